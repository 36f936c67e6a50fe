// Whole spans of regions: guarded copies, casts, the moving average of the weights. Padding between tensors is zero and
// stays zero, so nobody needs to know where it lies.
#include "quads.cuh"

// Bytes from `source` to `target`, unless the flag is set.
extern "C" __global__ void __launch_bounds__(256)
copy_unless(unsigned char* target, const unsigned char* source, const int* has_nan, long long bytes)
{
    typedef Pack<unsigned int, 4> Words;
    if (has_nan[0] != 0) return;
    const long long packs = bytes >> 4;
    for (long long p = first_index(); p < packs; p += index_step())
        reinterpret_cast<Words*>(target)[p] = reinterpret_cast<const Words*>(source)[p];
    const long long left = 16 * packs + first_index();
    if (left < bytes) target[left] = source[left];
}

template <class To, class From> DEVICE void cast(To* target, const From* source, long long n)
{
    walk(n,
         [=](long long q) {
             const Pack<From, 4> x = quad(source, q);
             Pack<To, 4> y;
#pragma unroll
             for (int k = 0; k < 4; ++k) y.at[k] = from_float<To>(to_float(x.at[k]));
             quad(target, q) = y;
         },
         [=](long long i) { target[i] = from_float<To>(to_float(source[i])); });
}
#define EXPORT_CASTS(suffix, T)                                                                                        \
    extern "C" __global__ void __launch_bounds__(256) cast_to_##suffix(T* target, const float* source, long long n)    \
    {                                                                                                                  \
        cast(target, source, n);                                                                                       \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256) cast_from_##suffix(float* target, const T* source, long long n)  \
    {                                                                                                                  \
        cast(target, source, n);                                                                                       \
    }
FOR_EACH_HALF(EXPORT_CASTS)

// average = decay * average + (1 - decay) * weight, unless the flag is set.
extern "C" __global__ void __launch_bounds__(256)
ema(float* average, const float* weight, const float* decay, const int* has_nan, long long n)
{
    if (has_nan[0] != 0) return;
    const float d = decay[0], rest = 1.0f - d;
    walk(n,
         [=](long long q) {
             Quad e = quad(average, q);
             const Quad w = quad(weight, q);
#pragma unroll
             for (int k = 0; k < 4; ++k) e.at[k] = d * e.at[k] + rest * w.at[k];
             quad(average, q) = e;
         },
         [=](long long i) { average[i] = d * average[i] + rest * weight[i]; });
}
