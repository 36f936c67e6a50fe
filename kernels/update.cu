// Optimizers over a whole span in one pass: read weights, gradients and moments, write weights, moments and the half copy
// of the weights. Formulas: renaissance/algo/optimizer.py. Nothing is touched while has_nan is set (law 5); every number
// of the step is read from memory (law 4). Padding is zero everywhere and stays zero: a step of 0 changes 0 by 0.
#include "quads.cuh"

// A rule changes one weight. g is still multiplied by the loss scale; `unscale` is the reciprocal of that scale, which is
// a power of two; `keep` is what decoupled decay leaves of a weight.
struct Sgd {
    static const int STATES = 0;
    float lr, unscale, keep;
    __device__ __forceinline__ void operator()(float& w, float g, float&, float&) const
    {
        w = w * keep - lr * (g * unscale);
    }
};

template <bool NESTEROV> struct Momentum {
    static const int STATES = 1;
    float lr, unscale, keep, beta;
    __device__ __forceinline__ void operator()(float& w, float scaled, float& m, float&) const
    {
        const float g = scaled * unscale;
        m = beta * m + g;
        w = w * keep - lr * (NESTEROV ? beta * m + g : m);
    }
};

// Adam has its decay in the gradient (`l2`), AdamW in `keep`.
struct Adam {
    static const int STATES = 2;
    float lr, unscale, keep, l2, beta, beta2, eps, correction, correction2;
    __device__ __forceinline__ void operator()(float& w, float scaled, float& m, float& v) const
    {
        const float g = scaled * unscale + l2 * w;
        m = beta * m + (1.0f - beta) * g;
        v = beta2 * v + (1.0f - beta2) * (g * g);
        w = w * keep - lr * (m * correction) / (sqrtf(v * correction2) + eps);
    }
};

// Without a half type T is float and `half` is not touched; moments that a rule does not have are not touched either.
template <class Rule, class T>
DEVICE void update(const Rule rule, float* w, const float* g, float* m, float* v, T* half, long long n)
{
    walk(n,
         [=](long long q) {
             Quad weight = quad(w, q), first, second;
             const Quad grad = quad(g, q);
             if (Rule::STATES > 0) first = quad(m, q);
             if (Rule::STATES > 1) second = quad(v, q);
#pragma unroll
             for (int k = 0; k < 4; ++k) rule(weight.at[k], grad.at[k], first.at[k], second.at[k]);
             quad(w, q) = weight;
             if (Rule::STATES > 0) quad(m, q) = first;
             if (Rule::STATES > 1) quad(v, q) = second;
             if (sizeof(T) == 2) {
                 Pack<T, 4> copy;
#pragma unroll
                 for (int k = 0; k < 4; ++k) copy.at[k] = from_float<T>(weight.at[k]);
                 quad(half, q) = copy;
             }
         },
         [=](long long i) {
             float weight = w[i], first = 0.0f, second = 0.0f;
             if (Rule::STATES > 0) first = m[i];
             if (Rule::STATES > 1) second = v[i];
             rule(weight, g[i], first, second);
             w[i] = weight;
             if (Rule::STATES > 0) m[i] = first;
             if (Rule::STATES > 1) v[i] = second;
             if (sizeof(T) == 2) half[i] = from_float<T>(weight);
         });
}

// `decay`: 0 none, 1 decoupled, 2 in the gradient (Adam).
DEVICE float kept(int decay, float lr, float wd) { return decay == 1 ? 1.0f - lr * wd : 1.0f; }

template <class T>
DEVICE void sgd(float* w, const float* g, T* half, const float* lr, const float* wd, const float* scaling, int decay,
                long long n)
{
    update(Sgd{lr[0], 1.0f / scaling[0], kept(decay, lr[0], wd[0])}, w, g, nullptr, nullptr, half, n);
}
template <bool NESTEROV, class T>
DEVICE void momentum(float* w, const float* g, float* m, T* half, const float* lr, const float* wd, const float* beta,
                     const float* scaling, int decay, long long n)
{
    const Momentum<NESTEROV> rule{lr[0], 1.0f / scaling[0], kept(decay, lr[0], wd[0]), beta[0]};
    update(rule, w, g, m, nullptr, half, n);
}
template <class T>
DEVICE void adam(float* w, const float* g, float* m, float* v, T* half, const float* lr, const float* wd,
                 const float* beta, const float* beta2, const float* eps, const float* correction,
                 const float* correction2, const float* scaling, int decay, long long n)
{
    const float keep = kept(decay, lr[0], wd[0]), l2 = decay == 2 ? wd[0] : 0.0f;
    const Adam rule{lr[0], 1.0f / scaling[0], keep, l2, beta[0], beta2[0], eps[0], correction[0], correction2[0]};
    update(rule, w, g, m, v, half, n);
}

#define KERNEL(name) extern "C" __global__ void __launch_bounds__(256) name
#define EXPORT(suffix, T)                                                                                              \
    KERNEL(sgd_##suffix)(float* w, const float* g, T* half, const float* lr, const float* wd, const float* scaling,    \
                         const int* has_nan, int decay, long long n)                                                   \
    {                                                                                                                  \
        if (has_nan[0] == 0) sgd(w, g, half, lr, wd, scaling, decay, n);                                               \
    }                                                                                                                  \
    KERNEL(momentum_##suffix)(float* w, const float* g, float* m, T* half, const float* lr, const float* wd,           \
                              const float* beta, const float* scaling, const int* has_nan, int decay, long long n)     \
    {                                                                                                                  \
        if (has_nan[0] == 0) momentum<false>(w, g, m, half, lr, wd, beta, scaling, decay, n);                          \
    }                                                                                                                  \
    KERNEL(nesterov_##suffix)(float* w, const float* g, float* m, T* half, const float* lr, const float* wd,           \
                              const float* beta, const float* scaling, const int* has_nan, int decay, long long n)     \
    {                                                                                                                  \
        if (has_nan[0] == 0) momentum<true>(w, g, m, half, lr, wd, beta, scaling, decay, n);                           \
    }                                                                                                                  \
    KERNEL(adam_##suffix)(float* w, const float* g, float* m, float* v, T* half, const float* lr, const float* wd,     \
                          const float* beta, const float* beta2, const float* eps, const float* correction,            \
                          const float* correction2, const float* scaling, const int* has_nan, int decay, long long n)  \
    {                                                                                                                  \
        if (has_nan[0] == 0)                                                                                           \
            adam(w, g, m, v, half, lr, wd, beta, beta2, eps, correction, correction2, scaling, decay, n);              \
    }
FOR_EACH_FLOAT(EXPORT)
