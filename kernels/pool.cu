// Max, average and global average pooling. A thread has one pixel of what is written and a pack of its channels, so no
// sum depends on the order of threads: gradients are collected from the windows that cover a pixel, summed in float in
// the order of the windows, and rounded once.
//
// A NaN wins over every number and survives an average, so that the NaN check sees it (law 5). Padding never wins; of
// equal values, all -Inf among them, the first in scan order does.
#include "channels.cuh"

// Cells of a window's row that are on their way at once.
#define CELLS 3
template <int N> constexpr int ROWS_AT_ONCE = N == 1 ? 8 : 4;

// A square window of k x k cells on a picture; `small` is the picture of windows.
struct Window {
    int height, width, k, stride, pad, small_height, small_width;
};
struct Pixel {
    int image, row, column;
};
DEVICE Pixel pixel_of(int number, int height, int width)
{
    const unsigned int above = (unsigned int)number / (unsigned int)width, image = above / (unsigned int)height;
    return {(int)image, (int)(above - image * height), (int)(number - above * width)};
}

// Cells of window number `at` of one axis that lie in the picture: from `first` to before `stop`, counted in the
// window; `origin` is where its cell 0 lies.
struct Cells {
    int origin, first, stop;
};
DEVICE Cells cells_of(int at, int length, const Window& w)
{
    const int origin = at * w.stride - w.pad;
    return {origin, max(0, -origin), min(w.k, length - origin)};
}
// Windows of one axis that cover pixel `at`: from `first` to before `stop`.
struct Covering {
    int first, stop;
};
DEVICE Covering covering(int at, int count, const Window& w)
{
    const int ahead = at + w.pad;
    const int first = ahead < w.k ? 0 : (int)((unsigned int)(ahead - w.k) / (unsigned int)w.stride) + 1;
    return {first, min(count, (int)((unsigned int)ahead / (unsigned int)w.stride) + 1)};
}

// Places of a pack of channels, one or two bytes each, as whole words.
template <class I, int N> DEVICE Words<I, N> pack_places(const int (&place)[N])
{
    Words<I, N> words;
    if constexpr (N == 1) {
        words.at = (I)place[0];
    } else {
        constexpr int EACH = 4 / sizeof(I), BITS = 8 * sizeof(I);
#pragma unroll
        for (int i = 0; i < N; i += EACH) {
            unsigned int word = 0;
#pragma unroll
            for (int j = 0; j < EACH; ++j) word |= (unsigned int)place[i + j] << (BITS * j);
            words.at[i / EACH] = word;
        }
    }
    return words;
}
template <class I, int N> DEVICE int place_in(const Words<I, N>& words, int i)
{
    if constexpr (N == 1) {
        return words.at;
    } else {
        constexpr int EACH = 4 / sizeof(I), BITS = 8 * sizeof(I);
        return words.at[i / EACH] >> (BITS * (i % EACH)) & ((1u << BITS) - 1);
    }
}

// `keeps`: the index is there.
template <class T, class I, int N>
DEVICE void max_forward(const T* __restrict__ x, T* y, I* index, int keeps, const Window w, int channels, int columns,
                        int pixels, int chunk)
{
    const Walk at = walk<N>(channels, columns);
    if (at.idle) return;
    const int stop = min(pixels, (int)(blockIdx.y + 1) * chunk);
    for (int number = blockIdx.y * chunk + at.row; number < stop; number += at.rows) {
        const Pixel p = pixel_of(number, w.small_height, w.small_width);
        const Cells down = cells_of(p.row, w.height, w), across = cells_of(p.column, w.width, w);
        float best[N];
        int place[N];
#pragma unroll
        for (int i = 0; i < N; ++i) best[i] = -POSITIVE_INFINITY, place[i] = down.first * w.k + across.first;
        for (int a = down.first; a < down.stop; ++a) {
            const int line = (p.image * w.height + down.origin + a) * w.width + across.origin;
            for (int b = across.first; b < across.stop; b += CELLS) {
                Words<T, N> in[CELLS];
#pragma unroll
                for (int j = 0; j < CELLS; ++j) // a cell that is looked at again does not replace itself
                    in[j] = load<T, N>(x + (line + min(b + j, across.stop - 1)) * (long long)channels + at.channel);
#pragma unroll
                for (int j = 0; j < CELLS; ++j) {
                    float v[N];
                    widen(in[j], v);
#pragma unroll
                    for (int i = 0; i < N; ++i) {
                        const bool wins = !(v[i] <= best[i]) && !is_nan(best[i]);
                        best[i] = wins ? v[i] : best[i];
                        place[i] = wins ? a * w.k + b + j : place[i];
                    }
                }
            }
        }
        const long long to = number * (long long)channels + at.channel;
        store(y + to, narrow<T, N>(best));
        if (keeps) store(index + to, pack_places<I, N>(place));
    }
}

template <class T, class I, int N>
DEVICE void max_backward(const T* __restrict__ dy, const I* __restrict__ index, T* __restrict__ dx, const Window w,
                         int channels, int columns, int pixels, int chunk)
{
    const Walk at = walk<N>(channels, columns);
    if (at.idle) return;
    const int stop = min(pixels, (int)(blockIdx.y + 1) * chunk);
    for (int number = blockIdx.y * chunk + at.row; number < stop; number += at.rows) {
        const Pixel p = pixel_of(number, w.height, w.width);
        const Covering down = covering(p.row, w.small_height, w), across = covering(p.column, w.small_width, w);
        float sum[N] = {};
        for (int a = down.first; a < down.stop; ++a) {
            const int line = (p.image * w.small_height + a) * w.small_width;
            const int cell = (p.row + w.pad - a * w.stride) * w.k + p.column + w.pad;
            for (int b = across.first; b < across.stop; ++b) {
                const long long from = (line + b) * (long long)channels + at.channel;
                const Words<I, N> won = load<I, N>(index + from);
                float v[N];
                widen(load<T, N>(dy + from), v);
#pragma unroll
                for (int i = 0; i < N; ++i) sum[i] += place_in(won, i) == cell - b * w.stride ? v[i] : 0.0f;
            }
        }
        store(dx + number * (long long)channels + at.channel, narrow<T, N>(sum));
    }
}

// `padded`: cells in the padding count.
template <class T, int N>
DEVICE void average_forward(const T* __restrict__ x, T* __restrict__ y, int padded, const Window w, int channels,
                            int columns, int pixels, int chunk)
{
    const Walk at = walk<N>(channels, columns);
    if (at.idle) return;
    const int stop = min(pixels, (int)(blockIdx.y + 1) * chunk);
    for (int number = blockIdx.y * chunk + at.row; number < stop; number += at.rows) {
        const Pixel p = pixel_of(number, w.small_height, w.small_width);
        const Cells down = cells_of(p.row, w.height, w), across = cells_of(p.column, w.width, w);
        float sum[N] = {};
        for (int a = down.first; a < down.stop; ++a) {
            const int line = (p.image * w.height + down.origin + a) * w.width + across.origin;
            for (int b = across.first; b < across.stop; b += CELLS) {
                Words<T, N> in[CELLS];
#pragma unroll
                for (int j = 0; j < CELLS; ++j)
                    in[j] = load<T, N>(x + (line + min(b + j, across.stop - 1)) * (long long)channels + at.channel);
#pragma unroll
                for (int j = 0; j < CELLS; ++j) {
                    if (b + j >= across.stop) break;
                    float v[N];
                    widen(in[j], v);
#pragma unroll
                    for (int i = 0; i < N; ++i) sum[i] += v[i];
                }
            }
        }
        const int cells = padded ? w.k * w.k : (down.stop - down.first) * (across.stop - across.first);
        const float share = 1.0f / cells;
#pragma unroll
        for (int i = 0; i < N; ++i) sum[i] *= share;
        store(y + number * (long long)channels + at.channel, narrow<T, N>(sum));
    }
}

template <class T, int N>
DEVICE void average_backward(const T* __restrict__ dy, T* __restrict__ dx, int padded, const Window w, int channels,
                             int columns, int pixels, int chunk)
{
    const Walk at = walk<N>(channels, columns);
    if (at.idle) return;
    const int stop = min(pixels, (int)(blockIdx.y + 1) * chunk);
    for (int number = blockIdx.y * chunk + at.row; number < stop; number += at.rows) {
        const Pixel p = pixel_of(number, w.height, w.width);
        const Covering down = covering(p.row, w.small_height, w), across = covering(p.column, w.small_width, w);
        float sum[N] = {};
        for (int a = down.first; a < down.stop; ++a) {
            const int line = (p.image * w.small_height + a) * w.small_width;
            const Cells high = cells_of(a, w.height, w);
            for (int b = across.first; b < across.stop; ++b) {
                const Cells wide = cells_of(b, w.width, w);
                const int cells = padded ? w.k * w.k : (high.stop - high.first) * (wide.stop - wide.first);
                const float share = 1.0f / cells;
                float v[N];
                widen(load<T, N>(dy + (line + b) * (long long)channels + at.channel), v);
#pragma unroll
                for (int i = 0; i < N; ++i) sum[i] = fmaf(v[i], share, sum[i]);
            }
        }
        store(dx + number * (long long)channels + at.channel, narrow<T, N>(sum));
    }
}

// Global average of `pixels` of each image: a block for some channels of one image. A few rows at a time are summed in
// float, these sums in double, so that the result is rounded as if once however many pixels there are.
template <class T, int N>
DEVICE void global_forward(const T* __restrict__ x, T* __restrict__ y, int channels, int columns, int images,
                           int pixels)
{
    constexpr int ROWS = ROWS_AT_ONCE<N>, HALF = 128;
    const Walk at = walk<N>(channels, columns);
    for (int image = blockIdx.y; image < images; image += gridDim.y) {
        const T* from = x + image * (long long)pixels * channels + at.channel;
        double sum[N] = {};
        for (int row = at.row; row < pixels && !at.idle; row += ROWS * at.rows) {
            Words<T, N> in[ROWS];
#pragma unroll
            for (int k = 0; k < ROWS; ++k)
                in[k] = load<T, N>(from + min(row + k * at.rows, pixels - 1) * (long long)channels);
            float few[N] = {};
#pragma unroll
            for (int k = 0; k < ROWS; ++k) {
                if (row + k * at.rows >= pixels) break;
                float v[N];
                widen(in[k], v);
#pragma unroll
                for (int i = 0; i < N; ++i) few[i] += v[i];
            }
#pragma unroll
            for (int i = 0; i < N; ++i) sum[i] += few[i];
        }
        const auto give = [&](double* slot) {
#pragma unroll
            for (int i = 0; i < N; ++i) slot[i * HALF] = sum[i];
        };
        const auto take = [&](const double* slot) {
#pragma unroll
            for (int i = 0; i < N; ++i) sum[i] += slot[i * HALF];
        };
        fold_rows<double, N, HALF>(at, columns, give, take);
        if (at.idle || at.row > 0) continue;
        float v[N];
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] = (float)(sum[i] / pixels);
        store(y + image * (long long)channels + at.channel, narrow<T, N>(v));
    }
}

template <class T, int N>
DEVICE void global_backward(const T* __restrict__ dy, T* __restrict__ dx, int channels, int columns, int images,
                            int pixels)
{
    const Walk at = walk<N>(channels, columns);
    if (at.idle) return;
    for (int image = blockIdx.y; image < images; image += gridDim.y) {
        float v[N];
        widen(load<T, N>(dy + image * (long long)channels + at.channel), v);
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] /= pixels;
        const Words<T, N> share = narrow<T, N>(v);
        T* to = dx + image * (long long)pixels * channels + at.channel;
        for (int row = at.row; row < pixels; row += at.rows) store(to + row * (long long)channels, share);
    }
}

#define WINDOW_PARAMETERS int height, int width, int k, int stride, int pad, int small_height, int small_width
#define WINDOW {height, width, k, stride, pad, small_height, small_width}
#define WALK_PARAMETERS int channels, int columns, int pixels, int chunk
#define WALK channels, columns, pixels, chunk

#define EXPORT_MAX(name, T, I, N)                                                                                     \
    extern "C" __global__ void __launch_bounds__(256, 4) max_forward_##name(                                          \
        const T* __restrict__ x, T* y, I* index, int keeps, WINDOW_PARAMETERS, WALK_PARAMETERS)                       \
    {                                                                                                                 \
        max_forward<T, I, N>(x, y, index, keeps, WINDOW, WALK);                                                       \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(256, 4) max_backward_##name(                                         \
        const T* __restrict__ dy, const I* __restrict__ index, T* __restrict__ dx, WINDOW_PARAMETERS,                 \
        WALK_PARAMETERS)                                                                                              \
    {                                                                                                                 \
        max_backward<T, I, N>(dy, index, dx, WINDOW, WALK);                                                           \
    }
#define EXPORT(suffix, T, N)                                                                                          \
    EXPORT_MAX(suffix, T, unsigned char, N)                                                                           \
    extern "C" __global__ void __launch_bounds__(256, 4) average_forward_##suffix(                                    \
        const T* __restrict__ x, T* __restrict__ y, int padded, WINDOW_PARAMETERS, WALK_PARAMETERS)                   \
    {                                                                                                                 \
        average_forward<T, N>(x, y, padded, WINDOW, WALK);                                                            \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(256, 4) average_backward_##suffix(                                   \
        const T* __restrict__ dy, T* __restrict__ dx, int padded, WINDOW_PARAMETERS, WALK_PARAMETERS)                 \
    {                                                                                                                 \
        average_backward<T, N>(dy, dx, padded, WINDOW, WALK);                                                         \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(256, 4) global_forward_##suffix(                                     \
        const T* __restrict__ x, T* __restrict__ y, int channels, int columns, int images, int pixels)                \
    {                                                                                                                 \
        global_forward<T, N>(x, y, channels, columns, images, pixels);                                                \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(256) global_backward_##suffix(                                       \
        const T* __restrict__ dy, T* __restrict__ dx, int channels, int columns, int images, int pixels)              \
    {                                                                                                                 \
        global_backward<T, N>(dy, dx, channels, columns, images, pixels);                                             \
    }
FOR_EACH_PACK(EXPORT)
// Windows of more than 255 cells, whose places take two bytes.
#define EXPORT_WIDE(suffix, T) EXPORT_MAX(wide_##suffix##_1, T, unsigned short, 1)
FOR_EACH_FLOAT(EXPORT_WIDE)
