// Batch normalisation forward (BN_FWD), with running statistics (BN_INF), and their folding (BN_UPDATE_EQ_PARAMS).
//
// Forward is three passes. The first reads x once and leaves, per chunk of rows and channel, the mean and the sum of
// squared deviations from it; the second combines the chunks in their order in double (Chan, Golub and LeVeque 1983)
// and turns them into factors per channel; the third computes y = act((x - mean) scale + shift (+ residual)). Only rows
// of the first batch_valid samples count; those of the others become 0.
//
// Accuracy: a thread sums x - (its first x), so the squares are as small as the deviations; means are stored relative to
// the channel's first value (`origin`) and lose nothing when they are large beside their spread. A NaN or Inf makes the
// variance of its channel NaN, and so y and the running variance, which the NaN check sees (law 5).
#include "norm.cuh"

// Rows that a thread reads at once, so that enough bytes are on their way. What writes as much as it reads needs fewer.
template <int N> constexpr int READ_AT_ONCE = N == 1 ? 8 : 4;
template <int N> constexpr int WRITTEN_AT_ONCE = N == 1 ? 8 : 2;

// (n, mean, squares) of this thread and of another one become those of both.
template <int N> DEVICE void merge(float& n, float (&mean)[N], float (&squares)[N], const float* other, int stride)
{
    const float more = other[0], both = n + more, share = both > 0.0f ? more / both : 0.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const float off = other[(1 + i) * stride] - mean[i];
        mean[i] = fmaf(off, share, mean[i]);
        squares[i] += fmaf(off * off, n * share, other[(1 + N + i) * stride]);
    }
    n = both;
}

// Halves the rows of a block until the first one has the statistics of all: the same tree whatever runs first.
template <int N> DEVICE void merge_block(const Walk& at, int columns, float& n, float (&mean)[N], float (&squares)[N])
{
    constexpr int HALF = 128; // threads that may hand over at once
    __shared__ float handed[(1 + 2 * N) * HALF];
    for (int rows = at.rows; rows > 1;) {
        const int kept = (rows + 1) >> 1;
        float* slot = handed + threadIdx.x - (at.row >= kept ? kept * columns : 0);
        if (at.row >= kept && at.row < rows) {
            slot[0] = n;
#pragma unroll
            for (int i = 0; i < N; ++i) {
                slot[(1 + i) * HALF] = mean[i];
                slot[(1 + N + i) * HALF] = squares[i];
            }
        }
        __syncthreads();
        if (at.row + kept < rows) merge(n, mean, squares, slot, HALF);
        __syncthreads();
        rows = kept;
    }
}

// First pass. parts: [chunks][2][channels], means minus origin and sums of squared deviations; origin: [channels].
template <class T, int N>
DEVICE void statistics(const T* __restrict__ x, const int* __restrict__ batch_valid, float* __restrict__ parts,
                       float* __restrict__ origin, int samples, int rows_per_sample, int channels, int columns,
                       int chunk_rows)
{
    const int seen = valid_rows(batch_valid, samples, rows_per_sample), start = blockIdx.y * chunk_rows;
    if (start >= seen) return; // the whole block
    const int stop = min(seen, start + chunk_rows);
    const Walk at = walk<N>(channels, columns);
    float n = 0.0f, first[N] = {}, mean[N] = {}, squares[N] = {};
    if (!at.idle && start + at.row < stop) {
        const T* from = x + at.channel;
        const Words<T, N> head = load<T, N>(from + (start + at.row) * (long long)channels);
        float shift[N], sum[N] = {};
        widen(load<T, N>(from), first);
        widen(head, shift);
        constexpr int ROWS = READ_AT_ONCE<N>;
        for (int row = start + at.row; row < stop; row += ROWS * at.rows) {
            Words<T, N> in[ROWS];
#pragma unroll
            for (int k = 0; k < ROWS; ++k) {
                const int r = row + k * at.rows;
                in[k] = load<T, N>(from + (r < stop ? r : start + at.row) * (long long)channels); // adds nothing twice
            }
#pragma unroll
            for (int k = 0; k < ROWS; ++k) {
                float v[N];
                widen(in[k], v);
#pragma unroll
                for (int i = 0; i < N; ++i) {
                    v[i] -= shift[i];
                    sum[i] += v[i];
                    squares[i] = fmaf(v[i], v[i], squares[i]);
                }
            }
        }
        n = (stop - start - at.row + at.rows - 1) / at.rows;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const float off = sum[i] / n, left = fmaf(-off, sum[i], squares[i]);
            mean[i] = shift[i] - first[i] + off;
            squares[i] = left < 0.0f ? 0.0f : left; // a NaN stays
        }
    }
    merge_block(at, columns, n, mean, squares);
    if (at.idle || at.row > 0) return;
    float* to = parts + 2LL * blockIdx.y * channels + at.channel;
    store_floats(to, mean);
    store_floats(to + channels, squares);
    if (blockIdx.y == 0) store_floats(origin + at.channel, first);
}

// Second pass: batch and running statistics, and the factors of the third. No valid row: the running ones stay.
extern "C" __global__ void __launch_bounds__(1024)
    norm_finish(const float* __restrict__ parts, const float* __restrict__ origin, const int* __restrict__ batch_valid,
                const float* __restrict__ gamma, const float* __restrict__ beta, const float* __restrict__ prev_mean,
                const float* __restrict__ prev_var, float* __restrict__ saved_mean, float* __restrict__ saved_inv_std,
                float* __restrict__ next_mean, float* __restrict__ next_var, float* __restrict__ scale,
                float* __restrict__ shift, int samples, int rows_per_sample, int channels, int chunk_rows,
                float momentum, float eps)
{
    __shared__ double part[256];
    const Finish at = finish_of();
    const int c = at.channel, seen = valid_rows(batch_valid, samples, rows_per_sample);
    const int chunks = (seen + chunk_rows - 1) / chunk_rows;
    double first = 0.0, second = 0.0;
    if (c < channels) {
#pragma unroll 4
        for (int k = at.strip; k < chunks; k += at.strips) {
            const double n = min(chunk_rows, seen - k * chunk_rows), mean = parts[2LL * k * channels + c];
            first += n * mean;
            second += parts[(2LL * k + 1) * channels + c] + n * mean * mean;
        }
    }
    first = sum_of_strips(first, part);
    second = sum_of_strips(second, part);
    if (at.strip > 0 || c >= channels) return;

    const double old_mean = prev_mean[c], old_var = prev_var[c];
    double mean = old_mean, var = old_var, unbiased = old_var, share = 0.0;
    if (seen > 0) {
        const double off = first / seen, squares = second - first * off;
        mean = origin[c] + off;
        var = (squares < 0.0 ? 0.0 : squares) / seen; // a NaN stays
        unbiased = seen > 1 ? var * (seen / (seen - 1.0)) : var;
        share = momentum;
    }
    const double inv_std = 1.0 / sqrt(var + eps), factor = gamma[c] * inv_std;
    saved_mean[c] = (float)mean;
    saved_inv_std[c] = (float)inv_std;
    next_mean[c] = (float)((1.0 - share) * old_mean + share * mean);
    next_var[c] = (float)((1.0 - share) * old_var + share * unbiased);
    scale[c] = (float)factor;
    shift[c] = (float)(beta[c] - (mean - (float)mean) * factor); // what rounding the mean to float missed
}

// Third pass, and BN_INF: y = act((x - mean) scale + shift (+ residual)), from the last chunk on: what the first pass
// read last is still in the cache. `plain`: mean is 0 and all rows count. y may be x or residual.
template <int N> DEVICE void activate_all(float (&v)[N], int activation)
{
    if (activation == 0) return; // the same way for all threads
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = relu(v[i]);
    if (activation == 1) return;
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = v[i] > 6.0f ? 6.0f : v[i];
}
template <class T, int N, bool ADDS>
DEVICE void normalise_rows(const T* x, const T* residual, T* y, const float (&mean)[N], const float (&scale)[N],
                           const float (&shift)[N], int activation, int row, int rows, int seen, int stop, int channels)
{
    constexpr int ROWS = WRITTEN_AT_ONCE<N>;
    for (; row < stop; row += ROWS * rows) {
        Words<T, N> in[ROWS], other[ROWS];
#pragma unroll
        for (int k = 0; k < ROWS; ++k) {
            const long long from = (row + k * rows < stop ? row + k * rows : row) * (long long)channels;
            in[k] = load<T, N>(x + from);
            if (ADDS) other[k] = load<T, N>(residual + from);
        }
#pragma unroll
        for (int k = 0; k < ROWS; ++k) {
            const int r = row + k * rows;
            float v[N], more[N];
            widen(in[k], v);
            if (ADDS) widen(other[k], more);
#pragma unroll
            for (int i = 0; i < N; ++i) {
                v[i] = fmaf(v[i] - mean[i], scale[i], shift[i]);
                if (ADDS) v[i] += more[i];
            }
            activate_all(v, activation);
            if (r < stop) store(y + r * (long long)channels, r < seen ? narrow<T, N>(v) : Words<T, N>{});
        }
    }
}
template <class T, int N>
DEVICE void normalise(const T* x, const T* residual, T* y, const float* mean, const float* scale, const float* shift,
                      const int* batch_valid, int adds, int plain, int activation, int samples, int rows_per_sample,
                      int channels, int columns, int chunk_rows)
{
    const Walk at = walk<N>(channels, columns);
    if (at.idle) return;
    const int all = samples * rows_per_sample, seen = plain ? all : valid_rows(batch_valid, samples, rows_per_sample);
    const int start = (gridDim.y - 1 - blockIdx.y) * chunk_rows, stop = min(all, start + chunk_rows), c = at.channel;
    float means[N] = {}, scales[N], shifts[N];
    if (!plain) load_floats(mean + c, means);
    load_floats(scale + c, scales);
    load_floats(shift + c, shifts);
    const int row = start + at.row;
    if (adds)
        normalise_rows<T, N, true>(x + c, residual + c, y + c, means, scales, shifts, activation, row, at.rows,
                                   seen, stop, channels);
    else
        normalise_rows<T, N, false>(x + c, residual, y + c, means, scales, shifts, activation, row, at.rows,
                                    seen, stop, channels);
}

// BN_UPDATE_EQ_PARAMS: eq_scale = gamma / sqrt(var + eps), eq_bias = beta - mean eq_scale.
extern "C" __global__ void __launch_bounds__(256)
    norm_fold(const float* __restrict__ gamma, const float* __restrict__ beta, const float* __restrict__ mean,
              const float* __restrict__ var, float* __restrict__ eq_scale, float* __restrict__ eq_bias, int channels,
              float eps)
{
    const int c = (int)first_index();
    if (c >= channels) return;
    const double factor = gamma[c] / sqrt((double)var[c] + eps);
    eq_scale[c] = (float)factor;
    eq_bias[c] = (float)(beta[c] - mean[c] * factor);
}

#define EXPORT(suffix, T, N)                                                                                          \
    extern "C" __global__ void __launch_bounds__(256, 4) norm_statistics_##suffix(                                    \
        const T* __restrict__ x, const int* __restrict__ batch_valid, float* __restrict__ parts,                      \
        float* __restrict__ origin, int samples, int rows_per_sample, int channels, int columns, int chunk_rows)      \
    {                                                                                                                 \
        statistics<T, N>(x, batch_valid, parts, origin, samples, rows_per_sample, channels, columns, chunk_rows);     \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(256, 4) normalise_##suffix(                                          \
        const T* x, const T* residual, T* y, const float* mean, const float* scale, const float* shift,               \
        const int* batch_valid, int adds, int plain, int activation, int samples, int rows_per_sample, int channels,  \
        int columns, int chunk_rows)                                                                                  \
    {                                                                                                                 \
        normalise<T, N>(x, residual, y, mean, scale, shift, batch_valid, adds, plain, activation, samples,            \
                        rows_per_sample, channels, columns, chunk_rows);                                              \
    }
FOR_EACH_PACK(EXPORT)
