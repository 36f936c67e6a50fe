// CHANNEL_PADDING, INPUT_VIEW and MEAN_LOGITS: ops that move elements and compute next to nothing.
//
// The first two never look at a value, so there is one kernel for each size of an element. A block takes PIXELS pixels
// (or a row of a picture) at a time, so that the divisions inside are of small numbers.
#include "packs.cuh"

#define PIXELS 256

// y[p, 0..few) = x[p, 0..few), zeros in y[p, few..many); few channels of x, many of y, a multiple of 8.
template <class T> DEVICE void pad_channels(const T* x, T* y, long long pixels, int few, int many)
{
    const unsigned int lines = many / WIDTH<T>;
    for (long long first = (long long)blockIdx.x * PIXELS; first < pixels; first += (long long)gridDim.x * PIXELS) {
        const unsigned int here = pixels - first < PIXELS ? int(pixels - first) : PIXELS;
        for (unsigned int i = threadIdx.x; i < here * lines; i += blockDim.x) {
            const unsigned int pixel = i / lines, channel = (i - pixel * lines) * WIDTH<T>;
            const T* from = x + (first + pixel) * few;
            Line<T> line;
#pragma unroll
            for (int k = 0; k < WIDTH<T>; ++k) line.at[k] = channel + k < few ? from[channel + k] : T(0);
            store_line(y + (first + pixel) * many + channel, line);
        }
    }
}

// y[p, 0..few) = x[p, 0..few): many channels of x, few of y.
template <class T> DEVICE void drop_channels(const T* x, T* y, long long pixels, int many, int few)
{
    for (long long first = (long long)blockIdx.x * PIXELS; first < pixels; first += (long long)gridDim.x * PIXELS) {
        const unsigned int here = pixels - first < PIXELS ? int(pixels - first) : PIXELS;
        for (unsigned int i = threadIdx.x; i < here * few; i += blockDim.x) {
            const unsigned int pixel = i / few, channel = i - pixel * few;
            y[first * few + i] = x[(first + pixel) * many + channel];
        }
    }
}

DEVICE int clamped(int at, int size) { return at < 0 ? 0 : at < size ? at : size - 1; }

// y[n,h,w] = x[n,h+dy,w'+dx], w' = W-1-w when flipped; outside the picture its edge is repeated. rows: N*H.
template <class T>
DEVICE void input_view(const T* x, T* y, long long rows, int height, int width, int channels, int flip, int dy, int dx)
{
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        const long long picture = row / height;
        const int from_h = clamped(int(row - picture * height) + dy, height);
        const T* from = x + (picture * height + from_h) * width * channels;
        T* to = y + row * width * channels;
        for (unsigned int i = threadIdx.x; i < (unsigned int)width * channels; i += blockDim.x) {
            const unsigned int w = i / channels, channel = i - w * channels;
            const int from_w = clamped((flip ? width - 1 - int(w) : int(w)) + dx, width);
            to[i] = from[(unsigned int)from_w * channels + channel];
        }
    }
}

// y = (a + b + ...) / count in this order, over the first `count` sets; the pointers after them are not read.
template <class T>
DEVICE void mean_logits(const T* a, const T* b, const T* c, const T* d, const T* e, T* y, long long n, int count)
{
#pragma unroll 1
    for (long long i = first_index(); i < n; i += index_step()) {
        float total = to_float(a[i]);
        if (count > 1) total += to_float(b[i]);
        if (count > 2) total += to_float(c[i]);
        if (count > 3) total += to_float(d[i]);
        if (count > 4) total += to_float(e[i]);
        y[i] = from_float<T>(total / float(count));
    }
}

#define EXPORT_MOVES(suffix, T)                                                                                        \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        pad_channels_##suffix(const T* x, T* y, long long pixels, int few, int many)                                   \
    {                                                                                                                  \
        pad_channels(x, y, pixels, few, many);                                                                         \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        drop_channels_##suffix(const T* x, T* y, long long pixels, int many, int few)                                  \
    {                                                                                                                  \
        drop_channels(x, y, pixels, many, few);                                                                        \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        input_view_##suffix(const T* x, T* y, long long rows, int height, int width, int channels, int flip, int dy,   \
                            int dx)                                                                                    \
    {                                                                                                                  \
        input_view(x, y, rows, height, width, channels, flip, dy, dx);                                                 \
    }
EXPORT_MOVES(16, unsigned short)
EXPORT_MOVES(32, unsigned int)

#define EXPORT(suffix, T)                                                                                              \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        mean_logits_##suffix(const T* a, const T* b, const T* c, const T* d, const T* e, T* y, long long n, int count) \
    {                                                                                                                  \
        mean_logits(a, b, c, d, e, y, n, count);                                                                       \
    }
FOR_EACH_FLOAT(EXPORT)
