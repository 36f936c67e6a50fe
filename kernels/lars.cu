// LARS and LARS-Nesterov (You, Gitman, Ginsburg 2017) of one tensor:
//     r = trust |w| / (|g| + wd |w| + eps), at most 100; 1 where a norm is below 1e-12
//     m = beta m + lr r (g + wd w);  w = w - m, or w - (lr r (g + wd w) + beta m) with Nesterov
// g is the gradient divided by the loss scale. Squares are summed in double: per thread, per block, and then over the
// blocks, each in an order that the tensor's size fixes. A large tensor takes two launches (lars_norms, lars_update: all
// blocks of the second add up the same partial sums); a small one takes one block of lars_update, which sums up itself.
#include "quads.cuh"

#define LEAST_NORM 1e-12
#define LARGEST_RATIO 100.0

struct Squares { double w, g; };

DEVICE Squares squares(const float* w, const float* g, long long n)
{
    Squares sum = {0.0, 0.0};
    const auto add = [&](float x, float y) {
        sum.w += (double)x * (double)x;
        sum.g += (double)y * (double)y;
    };
    walk(n,
         [&](long long q) {
             const Quad x = quad(w, q), y = quad(g, q);
#pragma unroll
             for (int k = 0; k < 4; ++k) add(x.at[k], y.at[k]);
         },
         [&](long long i) { add(w[i], g[i]); });
    return sum;
}

// partials: one pair for each block.
extern "C" __global__ void __launch_bounds__(512)
lars_norms(const float* w, const float* g, const int* has_nan, double* partials, long long n)
{
    __shared__ double part[32];
    if (has_nan[0] != 0) return;
    Squares sum = squares(w, g, n);
    sum.w = block_sum(sum.w, part);
    sum.g = block_sum(sum.g, part);
    if (threadIdx.x == 0) {
        partials[2 * blockIdx.x] = sum.w;
        partials[2 * blockIdx.x + 1] = sum.g;
    }
}

DEVICE double trust_ratio(Squares sum, double trust, double wd, double eps, double scaling)
{
    const double w = sqrt(sum.w), g = sqrt(sum.g) / scaling;
    if (w < LEAST_NORM || g < LEAST_NORM) return 1.0;
    const double ratio = trust * w / (g + wd * w + eps);
    return ratio < LARGEST_RATIO ? ratio : LARGEST_RATIO;
}

template <class T>
DEVICE void lars(float* weight, float* m, float* ratio, T* half, const float* g, const double* partials,
                 const float* lr, const float* wd, const float* beta, const float* trust, const float* eps,
                 const float* scaling, int blocks, int nesterov, long long n)
{
    __shared__ double part[32];
    Squares sum = {0.0, 0.0};
    if (blocks == 0) sum = squares(weight, g, n);
    for (int b = threadIdx.x; b < blocks; b += blockDim.x) {
        sum.w += partials[2 * b];
        sum.g += partials[2 * b + 1];
    }
    sum.w = block_sum(sum.w, part);
    sum.g = block_sum(sum.g, part);
    const float r = (float)trust_ratio(sum, trust[0], wd[0], eps[0], scaling[0]);
    if (blockIdx.x == 0 && threadIdx.x == 0) ratio[0] = r;

    const float rate = lr[0] * r, decay = wd[0], moment = beta[0], unscale = 1.0f / scaling[0];
    const auto step = [=](float& w, float grad, float& first) {
        const float pull = rate * (grad * unscale + decay * w);
        first = moment * first + pull;
        w = w - (nesterov ? pull + moment * first : first);
    };
    walk(n,
         [=](long long q) {
             Quad w = quad(weight, q), first = quad(m, q);
             const Quad grad = quad(g, q);
#pragma unroll
             for (int k = 0; k < 4; ++k) step(w.at[k], grad.at[k], first.at[k]);
             quad(weight, q) = w;
             quad(m, q) = first;
             if (sizeof(T) == 2) {
                 Pack<T, 4> copy;
#pragma unroll
                 for (int k = 0; k < 4; ++k) copy.at[k] = from_float<T>(w.at[k]);
                 quad(half, q) = copy;
             }
         },
         [=](long long i) {
             float w = weight[i], first = m[i];
             step(w, g[i], first);
             weight[i] = w;
             m[i] = first;
             if (sizeof(T) == 2) half[i] = from_float<T>(w);
         });
}

// Without a half type T is float and `half` is not touched. `blocks`: pairs in `partials`, or 0 for a block that is alone.
#define EXPORT(suffix, T)                                                                                              \
    extern "C" __global__ void __launch_bounds__(1024)                                                                 \
    lars_update_##suffix(float* weight, float* m, float* ratio, T* half, const float* g, const double* partials,       \
                         const float* lr, const float* wd, const float* beta, const float* trust, const float* eps,    \
                         const float* scaling, const int* has_nan, int blocks, int nesterov, long long n)              \
    {                                                                                                                  \
        if (has_nan[0] == 0)                                                                                           \
            lars(weight, m, ratio, half, g, partials, lr, wd, beta, trust, eps, scaling, blocks, nesterov, n);         \
    }
FOR_EACH_FLOAT(EXPORT)
