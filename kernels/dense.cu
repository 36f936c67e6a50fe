// What goes with matrix products and convolutions: bias and activation after them, the mask of a ReLU after a gradient,
// sums of columns for bias gradients, and batch norm folded into weights before validation.
#include "packs.cuh"

// y = act(x + bias + residual) over rows of `columns` elements, W at a time; y may be x. A bias or residual that is not
// there is not read. The step of the grid is a multiple of a row (finish_grid in dense.py), so that a thread stays in
// its columns and reads their bias once; a grid of one step is free of that.
template <int W, class A, class T>
DEVICE void finish_by(const A* x, const float* bias, const T* residual, T* y, long long n, int columns, int has_bias,
                      int has_residual, int activation)
{
    const int column = int((unsigned int)first_index() % (unsigned int)(columns / W)) * W;
    Pack<float, W> b;
#pragma unroll
    for (int i = 0; i < W; ++i) b.at[i] = 0.0f;
    if (has_bias) b = *reinterpret_cast<const Pack<float, W>*>(bias + column);
#pragma unroll 1
    for (long long at = first_index() * W; at < n; at += index_step() * W) {
        const Pack<A, W> from = *reinterpret_cast<const Pack<A, W>*>(x + at);
        float v[W];
#pragma unroll
        for (int i = 0; i < W; ++i) v[i] = to_float(from.at[i]) + b.at[i];
        if (has_residual) {
            const Pack<T, W> more = *reinterpret_cast<const Pack<T, W>*>(residual + at);
#pragma unroll
            for (int i = 0; i < W; ++i) v[i] += to_float(more.at[i]);
        }
        Pack<T, W> to;
#pragma unroll
        for (int i = 0; i < W; ++i) to.at[i] = from_float<T>(activate(v[i], activation));
        *reinterpret_cast<Pack<T, W>*>(y + at) = to;
    }
}

// By lines where a row is a whole number of them, else by elements.
template <class A, class T>
DEVICE void finish(const A* x, const float* bias, const T* residual, T* y, long long n, int columns, int has_bias,
                   int has_residual, int activation)
{
    if (columns % WIDTH<T> == 0)
        finish_by<WIDTH<T>>(x, bias, residual, y, n, columns, has_bias, has_residual, activation);
    else
        finish_by<1>(x, bias, residual, y, n, columns, has_bias, has_residual, activation);
}

// One block's share of the sums of the columns of x [rows, columns], in float. The block is
// `lanes` packs of W columns wide and as many rows high as its threads allow; each thread adds up every so many rows,
// and then the rows of threads are halved until one is left: an order that follows from sizes alone.
template <int W, class T>
DEVICE void column_sums_by(const T* x, float* sums, float* part, int rows, int columns, int lanes)
{
    const int high = blockDim.x / lanes, row = threadIdx.x / lanes, lane = threadIdx.x - row * lanes;
    const int column = (blockIdx.x * lanes + lane) * W;
    const bool busy = row < high && column < columns;
    float sum[W];
#pragma unroll
    for (int i = 0; i < W; ++i) sum[i] = 0.0f;
    if (busy) {
#pragma unroll 4
        for (int r = row; r < rows; r += high) {
            const Pack<T, W> from = *reinterpret_cast<const Pack<T, W>*>(x + (long long)r * columns + column);
#pragma unroll
            for (int i = 0; i < W; ++i) sum[i] += to_float(from.at[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < W; ++i) part[i * blockDim.x + threadIdx.x] = sum[i];
    for (int left = high; left > 1;) {
        const int half = (left + 1) / 2;
        __syncthreads();
        if (row < left - half)
#pragma unroll
            for (int i = 0; i < W; ++i)
                part[i * blockDim.x + threadIdx.x] += part[i * blockDim.x + threadIdx.x + half * lanes];
        left = half;
    }
    // The first row of threads added to its own elements last.
    if (busy && row == 0) {
        Pack<float, W> to;
#pragma unroll
        for (int i = 0; i < W; ++i) to.at[i] = part[i * blockDim.x + threadIdx.x];
        *reinterpret_cast<Pack<float, W>*>(sums + column) = to;
    }
}

// sums[chunk, column] = sum of x over the rows of the chunk; blocks are [tile of columns, chunk of rows].
template <class T>
DEVICE void column_sums(const T* x, float* sums, float* part, long long rows, int columns, int chunk_rows, int lanes)
{
    const long long first = (long long)blockIdx.y * chunk_rows;
    const int here = rows - first < chunk_rows ? int(rows - first) : chunk_rows;
    const T* from = x + first * columns;
    float* to = sums + (long long)blockIdx.y * columns;
    if (columns % WIDTH<T> == 0)
        column_sums_by<WIDTH<T>>(from, to, part, here, columns, lanes);
    else
        column_sums_by<1>(from, to, part, here, columns, lanes);
}

// y = x in float.
template <class T> DEVICE void widen(const T* x, float* y, long long n)
{
    for (long long at = first_index() * WIDTH<T>; at + WIDTH<T> <= n; at += index_step() * WIDTH<T>) {
        const Line<T> from = load_line(x + at);
        Pack<float, WIDTH<T>> to;
#pragma unroll
        for (int i = 0; i < WIDTH<T>; ++i) to.at[i] = to_float(from.at[i]);
        *reinterpret_cast<Pack<float, WIDTH<T>>*>(y + at) = to;
    }
    const long long last = leftover<T>(n);
    if (last < n) y[last] = to_float(x[last]);
}

// w'[k, i] = w[k, i] * scale[k], rounded once; a block for each k.
template <class T> DEVICE void fold_weights(const T* w, const float* scale, T* folded, int each)
{
    const long long row = (long long)blockIdx.x * each;
    const float s = scale[blockIdx.x];
    for (int i = threadIdx.x; i < each; i += blockDim.x) folded[row + i] = from_float<T>(to_float(w[row + i]) * s);
}

#define EXPORT(suffix, T)                                                                                            \
    extern "C" __global__ void __launch_bounds__(256)                                                                \
        finish_##suffix(const T* x, const float* bias, const T* residual, T* y, long long n, int columns,            \
                        int has_bias, int has_residual, int activation)                                              \
    {                                                                                                                \
        finish(x, bias, residual, y, n, columns, has_bias, has_residual, activation);                                \
    }                                                                                                                \
    /* dx = 0 where the ReLU with output y cut off. */                                                               \
    extern "C" __global__ void __launch_bounds__(256) mask_relu_##suffix(const T* y, T* dx, long long n)             \
    {                                                                                                                \
        map(dx, y, dx, n, [](float g, float v) { return passed(v, 1) ? g : 0.0f; });                                 \
    }                                                                                                                \
    extern "C" __global__ void __launch_bounds__(256)                                                                \
        column_sums_##suffix(const T* x, float* sums, long long rows, int columns, int chunk_rows, int lanes)        \
    {                                                                                                                \
        __shared__ float part[256 * WIDTH<T>];                                                                       \
        column_sums(x, sums, part, rows, columns, chunk_rows, lanes);                                                \
    }                                                                                                                \
    extern "C" __global__ void __launch_bounds__(256)                                                                \
        fold_weights_##suffix(const T* w, const float* scale, T* folded, int each)                                   \
    {                                                                                                                \
        fold_weights(w, scale, folded, each);                                                                        \
    }
FOR_EACH_FLOAT(EXPORT)

#define EXPORT_HALF(suffix, T)                                                                                       \
    extern "C" __global__ void __launch_bounds__(256)                                                                \
        finish_wide_##suffix(const float* x, const float* bias, const T* residual, T* y, long long n, int columns,   \
                             int has_bias, int has_residual, int activation)                                         \
    {                                                                                                                \
        finish(x, bias, residual, y, n, columns, has_bias, has_residual, activation);                                \
    }                                                                                                                \
    extern "C" __global__ void __launch_bounds__(256) widen_##suffix(const T* x, float* y, long long n)              \
    {                                                                                                                \
        widen(x, y, n);                                                                                              \
    }
FOR_EACH_HALF(EXPORT_HALF)

#define COMBINED 8  // columns of a block of combine_sums

// db[column] = sum of the chunks' sums, in double; 32 threads for each column, every one of them every 32nd chunk.
extern "C" __global__ void __launch_bounds__(256) combine_sums(const float* sums, float* db, int chunks, int columns)
{
    __shared__ double part[256];
    const int row = threadIdx.x / COMBINED, column = blockIdx.x * COMBINED + threadIdx.x % COMBINED;
    double sum = 0.0;
    if (column < columns)
        for (int chunk = row; chunk < chunks; chunk += 256 / COMBINED) sum += sums[(long long)chunk * columns + column];
    part[threadIdx.x] = sum;
    for (int half = 128; half >= COMBINED; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
    }
    if (column < columns && row == 0) db[column] = float(part[threadIdx.x]);
}

// b'[k] = eq_bias[k] + b[k] * scale[k], without b just eq_bias[k].
extern "C" __global__ void __launch_bounds__(256)
    fold_bias(const float* eq_bias, const float* b, const float* scale, float* folded, int channels, int has_bias)
{
    for (int k = int(first_index()); k < channels; k += int(index_step()))
        folded[k] = eq_bias[k] + (has_bias ? b[k] * scale[k] : 0.0f);
}
