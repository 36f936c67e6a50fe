// What every kernel starts from: the three floating types, NaN-preserving arithmetic, and reductions in a fixed order.
//
// The dialect: each file compiles with NVRTC and, unchanged, with g++ through the emulator of tests/cuda_host. So: kernels
// are extern "C"; plain types (int, unsigned int, long long); no standard headers, no inline PTX, no INFINITY or FLT_MAX;
// block sizes are multiples of 32; pointers that are only read are const; no floating-point atomics.
#pragma once
#include <cuda_fp16.h>
#include <cuda_bf16.h>

#define DEVICE static __device__ __forceinline__
#define FULL_WARP 0xffffffffu
#define POSITIVE_INFINITY __int_as_float(0x7f800000)
#define QUIET_NAN __int_as_float(0x7fc00000)

// KERNEL(suffix, type) for float, __half and __nv_bfloat16.
#define FOR_EACH_FLOAT(KERNEL) KERNEL(f32, float) KERNEL(f16, __half) KERNEL(bf16, __nv_bfloat16)
#define FOR_EACH_HALF(KERNEL) KERNEL(f16, __half) KERNEL(bf16, __nv_bfloat16)

DEVICE float to_float(float x) { return x; }
DEVICE float to_float(__half x) { return __half2float(x); }
DEVICE float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// Rounded to nearest even; what is too large for the type becomes infinite, NaN stays NaN.
template <class T> DEVICE T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ __half from_float<__half>(float x) { return __float2half_rn(x); }
template <> __device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }

DEVICE bool is_nan(float x) { return x != x; }
DEVICE bool is_finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }
// fmaxf and fminf drop a NaN; these keep it, so that the check at the end of a step sees it.
DEVICE float relu(float x) { return x <= 0.0f ? 0.0f : x; }
DEVICE float relu6(float x) { return x <= 0.0f ? 0.0f : x > 6.0f ? 6.0f : x; }

// Fused activations of the op table by number: 0 none, 1 relu, 2 relu6.
DEVICE float activate(float x, int activation) { return activation == 0 ? x : activation == 1 ? relu(x) : relu6(x); }
// Whether the activation with output y let the gradient through; a NaN does.
DEVICE bool passed(float y, int activation)
{
    return activation == 0 || !(y <= 0.0f || (activation == 2 && y >= 6.0f));
}

// N consecutive elements as one load or store; the address is a multiple of their size.
template <class T, int N> struct alignas(sizeof(T) * N) Pack { T at[N]; };

DEVICE long long first_index() { return blockIdx.x * (long long)blockDim.x + threadIdx.x; }
DEVICE long long index_step() { return gridDim.x * (long long)blockDim.x; }

// Sum over the lanes of a warp, the same in every lane: a fixed tree.
DEVICE float warp_sum(float v)
{
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) v += __shfl_xor_sync(FULL_WARP, v, offset);
    return v;
}
DEVICE double warp_sum(double v)
{
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) v += __shfl_xor_sync(FULL_WARP, v, offset);
    return v;
}
// A NaN in any lane gives NaN.
DEVICE float larger(float a, float b) { return a > b || is_nan(a) ? a : b; }

// Sum over a block of up to 1024 threads (a multiple of 32), the same in every thread. `part` is shared memory of 32
// elements; it may be used again at once.
template <class V> DEVICE V block_sum(V v, V* part)
{
    const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    const int warps = (blockDim.x * blockDim.y * blockDim.z) >> 5;
    v = warp_sum(v);
    if ((thread & 31) == 0) part[thread >> 5] = v;
    __syncthreads();
    v = (thread & 31) < warps ? part[thread & 31] : V(0);
    v = warp_sum(v);
    __syncthreads();
    return v;
}
