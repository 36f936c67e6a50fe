// The one flag of a step (law 5): raised by NaN and Inf anywhere, and by gradients from a limit on whose squares are not
// finite. The flag is cleared before the kernel starts, and only set here: the order of blocks does not matter.
#include "quads.cuh"

#define INFINITE_BITS 0x7f800000u

// Magnitudes of floats are in the order of their bits; Inf, and above it NaN, come last.
DEVICE bool reaches(float x, unsigned int limit) { return (__float_as_uint(x) & 0x7fffffffu) >= limit; }

DEVICE bool any_reaches(const float* values, long long n, unsigned int limit)
{
    bool found = false;
    walk(n,
         [&](long long q) {
             const Quad x = quad(values, q);
#pragma unroll
             for (int k = 0; k < 4; ++k) found |= reaches(x.at[k], limit);
         },
         [&](long long i) { found |= reaches(values[i], limit); });
    return found;
}

// NaN stays NaN: it has been seen.
DEVICE float clamped(float x, float limit) { return x > limit ? limit : x < -limit ? -limit : x; }

// Looks at every value before it is clamped to +-limit.
DEVICE bool clamp_all(float* values, long long n, float limit)
{
    bool found = false;
    walk(n,
         [&](long long q) {
             Quad x = quad(values, q);
#pragma unroll
             for (int k = 0; k < 4; ++k) {
                 found |= reaches(x.at[k], INFINITE_BITS);
                 x.at[k] = clamped(x.at[k], limit);
             }
             quad(values, q) = x;
         },
         [&](long long i) {
             found |= reaches(values[i], INFINITE_BITS);
             values[i] = clamped(values[i], limit);
         });
    return found;
}

// One atomic per block at most: where every value is NaN, a thousand threads would queue for one address.
DEVICE void raise(bool found, int* flag)
{
    if (__syncthreads_or(found) && threadIdx.x == 0) atomicOr(flag, 1);
}

// `limit`: bits of the smallest magnitude of a gradient that raises the flag. Spans a and b are watched for NaN and Inf.
extern "C" __global__ void __launch_bounds__(256)
check_nan(const float* grad, const float* a, const float* b, int* flag, long long grads, long long as, long long bs,
          unsigned int limit)
{
    bool found = any_reaches(grad, grads, limit);
    found |= any_reaches(a, as, INFINITE_BITS);
    found |= any_reaches(b, bs, INFINITE_BITS);
    raise(found, flag);
}

// The same, and gradients are limited to +-clip * scaling, which is +-clip once they are divided by the loss scale.
extern "C" __global__ void __launch_bounds__(256)
check_nan_and_clip(float* grad, const float* a, const float* b, int* flag, const float* scaling, long long grads,
                   long long as, long long bs, float clip)
{
    bool found = clamp_all(grad, grads, clip * scaling[0]);
    found |= any_reaches(a, as, INFINITE_BITS);
    found |= any_reaches(b, bs, INFINITE_BITS);
    raise(found, flag);
}
