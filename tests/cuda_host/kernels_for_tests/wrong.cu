// Deliberately wrong kernels, each with the mistake in its name: the emulator must find it.
#include "dialect.cuh"

extern "C" __global__ void missing_barrier(float* y)
{
    __shared__ float cells[256];
    cells[threadIdx.x] = (float)threadIdx.x;
    y[threadIdx.x] = cells[blockDim.x - 1 - threadIdx.x];
}
// The second barrier of a reduction: without it a fast thread writes `part` again while a slow one still reads it.
extern "C" __global__ void missing_second_barrier(const float* x, float* y)
{
    __shared__ float part[4];
    for (int round = 0; round < 2; ++round)
    {
        if ((threadIdx.x & 31) == 0) part[threadIdx.x >> 5] = x[threadIdx.x + round];
        __syncthreads();
        y[threadIdx.x] = part[0] + part[1];
    }
}
extern "C" __global__ void divergent_barrier(float* y)
{
    if (threadIdx.x < 32)
    {
        y[0] = 1.0f;
        __syncthreads();
    }
    else
    {
        y[1] = 1.0f;
        __syncthreads();
    }
}
// Half of the block never reaches the first barrier, and waits at another one.
extern "C" __global__ void skipped_barrier(float* y)
{
    if (threadIdx.x < 32) __syncthreads();
    __shfl_xor_sync(FULL_WARP, 1, 1);
    if (threadIdx.x >= 32)
        for (int i = 0; i < 2; ++i) __syncthreads();
    y[threadIdx.x] = 1.0f;
}
extern "C" __global__ void shuffle_after_return(float* y, int n)
{
    if ((int)threadIdx.x >= n) return;
    float v = 1.0f;
    for (int offset = 16; offset; offset >>= 1) v += __shfl_down_sync(FULL_WARP, v, offset);
    if (threadIdx.x == 0) y[0] = v;
}
extern "C" __global__ void shuffle_of_half_a_warp(float* y)
{
    float v = threadIdx.x;
    if (threadIdx.x < 16) v = __shfl_xor_sync(FULL_WARP, v, 1);
    y[threadIdx.x] = v;
}
extern "C" __global__ void unwritten_shared_memory(float* y)
{
    __shared__ float cells[64];
    if (threadIdx.x < 63) cells[threadIdx.x] = 1.0f;
    __syncthreads();
    float sum = 0.0f;
    for (int i = 0; i < 64; ++i) sum += cells[i];
    y[threadIdx.x] = sum;
}
extern "C" __global__ void past_the_end(float* y, int n)
{
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i <= n) y[i] = 1.0f;
}
extern "C" __global__ void past_shared_memory(float* y)
{
    __shared__ float cells[32];
    cells[threadIdx.x + 1] = 1.0f;
    __syncthreads();
    y[threadIdx.x] = cells[threadIdx.x];
}
extern "C" __global__ void past_dynamic_shared_memory(float* y)
{
    extern __shared__ float cells[];
    cells[threadIdx.x] = 1.0f;
    __syncthreads();
    y[threadIdx.x] = cells[threadIdx.x];
}
extern "C" __global__ void misaligned_vector(const float* x, float* y)
{
    const Pack<float, 4> v = *reinterpret_cast<const Pack<float, 4>*>(x + 1);
    y[threadIdx.x] = v.at[0];
}
extern "C" __global__ void overflowing_product(float* y, int rows, int columns)
{
    const int n = rows * columns;
    y[0] = (float)n;
}
extern "C" __global__ void division_by_zero(float* y, int n) { y[0] = (float)(100 / n); }
extern "C" __global__ void unordered_sum(float* sum) { sum[0] += 1.0f; }
// Two threads write the same pack; the bytes beside it are written by one.
extern "C" __global__ void overlapping_packs(__half* y)
{
    Pack<__half, 8> v = {};
    reinterpret_cast<Pack<__half, 8>*>(y)[threadIdx.x < 31 ? threadIdx.x : 30] = v;
}
extern "C" __global__ void without_end(float* y)
{
    float deep[40000];
    for (int i = 0; i < 40000; ++i) deep[i] = y[0];
    y[0] = deep[(int)y[1]];
}
extern "C" __global__ void __launch_bounds__(64) larger_than_its_bounds(float* y) { y[threadIdx.x] = 1.0f; }
