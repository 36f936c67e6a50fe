// ACT_FWD, ACT_BWD, ADD_FWD and GRAD_SUM. Arithmetic is float whatever is stored; a result is rounded once.
#include "packs.cuh"

#define LEAK 0.01f
// Beyond this sigmoid is 0 or 1; keeps an infinite x out of a product with 0.
#define FAR_OUT 128.0f

DEVICE float sigmoid(float x) { return __fdividef(1.0f, 1.0f + expf(-x)); }
DEVICE float silu(float x) { return x < -FAR_OUT ? -0.0f : __fdividef(x, 1.0f + expf(-x)); }
DEVICE float silu_slope(float x)
{
    const float s = sigmoid(x), near = x < -FAR_OUT ? -FAR_OUT : x > FAR_OUT ? FAR_OUT : x;
    return s * (1.0f + near * (1.0f - s));
}
DEVICE float hardswish(float x) { return x <= -3.0f ? 0.0f : x >= 3.0f ? x : x * (x + 3.0f) * (1.0f / 6.0f); }
DEVICE float hardswish_slope(float x)
{
    return x <= -3.0f ? 0.0f : x >= 3.0f ? 1.0f : (2.0f * x + 3.0f) * (1.0f / 6.0f);
}
// Where the slope is 0 nothing passes, whatever dy is.
DEVICE float passed_on(float dy, float slope) { return slope == 0.0f ? 0.0f : dy * slope; }

// The kinds by number: KINDS of launch_elementwise.py.
template <class T> DEVICE void act_forward(const T* x, T* y, long long n, int kind)
{
    switch (kind) {
    case 0: return map(x, y, n, [](float v) { return relu(v); });
    case 1: return map(x, y, n, [](float v) { return relu6(v); });
    case 2: return map(x, y, n, [](float v) { return v > 0.0f ? v : LEAK * v; });
    case 3: return map(x, y, n, [](float v) { return hardswish(v); });
    case 4: return map(x, y, n, [](float v) { return tanhf(v); });
    case 5: return map(x, y, n, [](float v) { return sigmoid(v); });
    case 6: return map(x, y, n, [](float v) { return silu(v); });
    case 7: return map(x, y, n, [](float v) { return v > 0.0f ? v : expm1f(v); });
    }
}

// saved is x for hardswish and silu, y for the others; dx may be dy or saved.
template <class T> DEVICE void act_backward(const T* dy, const T* saved, T* dx, long long n, int kind)
{
    switch (kind) {
    case 0: return map(dy, saved, dx, n, [](float g, float y) { return passed(y, 1) ? g : 0.0f; });
    case 1: return map(dy, saved, dx, n, [](float g, float y) { return passed(y, 2) ? g : 0.0f; });
    case 2: return map(dy, saved, dx, n, [](float g, float y) { return y > 0.0f ? g : LEAK * g; });
    case 3: return map(dy, saved, dx, n, [](float g, float x) { return passed_on(g, hardswish_slope(x)); });
    case 4: return map(dy, saved, dx, n, [](float g, float y) { return passed_on(g, (1.0f - y) * (1.0f + y)); });
    case 5: return map(dy, saved, dx, n, [](float g, float y) { return passed_on(g, y * (1.0f - y)); });
    case 6: return map(dy, saved, dx, n, [](float g, float x) { return passed_on(g, silu_slope(x)); });
    case 7: return map(dy, saved, dx, n, [](float g, float y) { return y > 0.0f ? g : passed_on(g, y + 1.0f); });
    }
}

#define EXPORT(suffix, T)                                                                                             \
    extern "C" __global__ void __launch_bounds__(256) act_forward_##suffix(const T* x, T* y, long long n, int kind)    \
    {                                                                                                                 \
        act_forward(x, y, n, kind);                                                                                   \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(256)                                                                 \
        act_backward_##suffix(const T* dy, const T* saved, T* dx, long long n, int kind)                              \
    {                                                                                                                 \
        act_backward(dy, saved, dx, n, kind);                                                                         \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(256)                                                                 \
        add_##suffix(const T* a, const T* b, T* y, long long n, int activation)                                       \
    {                                                                                                                 \
        map(a, b, y, n, [activation](float v, float w) { return activate(v + w, activation); });                      \
    }
FOR_EACH_FLOAT(EXPORT)
