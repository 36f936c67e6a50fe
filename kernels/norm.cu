// Batch normalisation forward (BN_FWD), with running statistics (BN_INF), and their folding (BN_UPDATE_EQ_PARAMS).
//
// Forward is three passes. The first reads x once and leaves, per chunk of rows and channel, the mean and the sum of
// squared deviations from it; the second combines the chunks in their order in double (Chan, Golub and LeVeque 1983)
// and turns them into factors per channel; the third computes y = act((x - mean) scale + shift (+ residual)). Only rows
// of the first batch_valid samples count; those of the others become 0. A tensor with few rows takes one launch, whose
// blocks do all three for some channels: the launches would cost more than the work.
//
// Accuracy: a thread sums x - (its first x), so the squares are as small as the deviations; means are stored relative
// to the channel's first value (`origin`) and lose nothing when they are large beside their spread. A NaN or Inf makes
// the variance of its channel NaN, and so y and the running variance, which the NaN check sees (law 5).
#include "norm.cuh"

// Rows that a thread reads at once, so that enough bytes are on their way. What writes as much as it reads needs fewer.
template <int N> constexpr int READ_AT_ONCE = N == 1 ? 8 : 4;
template <int N> constexpr int WRITTEN_AT_ONCE = N == 1 ? 8 : 2;

// Statistics of all rows of the block, in its first row; n, mean and squares are those of this thread's rows.
template <int HALF, int N>
DEVICE void merge_rows(const Walk& at, int columns, float& n, float (&mean)[N], float (&squares)[N])
{
    const auto give = [&](float* slot) {
        slot[0] = n;
#pragma unroll
        for (int i = 0; i < N; ++i) slot[(1 + i) * HALF] = mean[i], slot[(1 + N + i) * HALF] = squares[i];
    };
    const auto take = [&](const float* slot) {
        const float more = slot[0], both = n + more, share = both > 0.0f ? more / both : 0.0f;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const float off = slot[(1 + i) * HALF] - mean[i];
            mean[i] = fmaf(off, share, mean[i]);
            squares[i] += fmaf(off * off, n * share, slot[(1 + N + i) * HALF]);
        }
        n = both;
    };
    fold_rows<float, 1 + 2 * N, HALF>(at, columns, give, take);
}

// Of the rows of one thread: how many, their mean minus the channel's first value, which is `first`, and the sum of
// squared deviations. `x` is at the thread's channels.
template <class T, int N>
DEVICE void row_statistics(const T* x, int row, int rows, int stop, int channels, float& n, float (&first)[N],
                           float (&mean)[N], float (&squares)[N])
{
    if (row >= stop) return;
    constexpr int ROWS = READ_AT_ONCE<N>;
    const int own = row;
    n = (stop - row + rows - 1) / rows;
    float shift[N], sum[N] = {};
    widen(load<T, N>(x), first);
    widen(load<T, N>(x + own * (long long)channels), shift);
    for (; row < stop; row += ROWS * rows) {
        Words<T, N> in[ROWS];
#pragma unroll
        for (int k = 0; k < ROWS; ++k) // beyond the last row its first one again, which adds nothing
            in[k] = load<T, N>(x + (row + k * rows < stop ? row + k * rows : own) * (long long)channels);
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
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const float off = sum[i] / n, left = fmaf(-off, sum[i], squares[i]);
        mean[i] = shift[i] - first[i] + off;
        squares[i] = left < 0.0f ? 0.0f : left; // a NaN stays
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
    const Walk at = walk<N>(channels, columns);
    float n = 0.0f, first[N] = {}, mean[N] = {}, squares[N] = {};
    if (!at.idle)
        row_statistics(x + at.channel, start + at.row, at.rows, min(seen, start + chunk_rows), channels, n, first,
                       mean, squares);
    merge_rows<128>(at, columns, n, mean, squares);
    if (at.idle || at.row > 0) return;
    float* to = parts + 2LL * blockIdx.y * channels + at.channel;
    store_floats(to, mean);
    store_floats(to + channels, squares);
    if (blockIdx.y == 0) store_floats(origin + at.channel, first);
}

// What BN_FWD has per channel beside x and y.
struct Channels {
    const float *gamma, *beta, *prev_mean, *prev_var;
    float *saved_mean, *saved_inv_std, *next_mean, *next_var;
    float momentum, eps;
};
// y = (x - mean) scale + shift
struct Factors {
    float mean, scale, shift;
};
// What is known of a channel from the start: loaded before the sums are there, since each load takes its time.
struct Known {
    float gamma, beta, prev_mean, prev_var;
};
DEVICE Known known_of(const Channels& from, int c)
{
    return {from.gamma[c], from.beta[c], from.prev_mean[c], from.prev_var[c]};
}
// Batch and running statistics of channel c over `seen` rows, from their mean and sum of squared deviations. No row:
// the running ones stay.
DEVICE Factors finish_channel(const Channels& to, const Known& known, int c, int seen, double mean, double squares)
{
    const double old_mean = known.prev_mean, old_var = known.prev_var;
    double var = old_var, unbiased = old_var, share = 0.0;
    if (seen > 0) {
        var = (squares < 0.0 ? 0.0 : squares) / seen; // a NaN stays
        unbiased = seen > 1 ? var * (seen / (seen - 1.0)) : var;
        share = to.momentum;
    } else {
        mean = old_mean;
    }
    const double inv_std = 1.0 / sqrt(var + to.eps), scale = known.gamma * inv_std;
    to.saved_mean[c] = (float)mean;
    to.saved_inv_std[c] = (float)inv_std;
    to.next_mean[c] = (float)((1.0 - share) * old_mean + share * mean);
    to.next_var[c] = (float)((1.0 - share) * old_var + share * unbiased);
    const double missed = mean - (float)mean; // by rounding it to float
    return {(float)mean, (float)scale, (float)(known.beta - missed * scale)};
}

// Second pass: the factors of the third are saved_mean, scale and shift.
DEVICE void finish(const float* __restrict__ parts, const float* __restrict__ origin, const int* batch_valid,
                   const Channels& to, float* scale, float* shift, int samples, int rows_per_sample, int channels,
                   int chunk_rows)
{
    __shared__ double part[256];
    const Finish at = finish_of();
    const int c = at.channel, seen = valid_rows(batch_valid, samples, rows_per_sample);
    const int chunks = (seen + chunk_rows - 1) / chunk_rows;
    double first = 0.0, second = 0.0;
    Known known = {};
    float before = 0.0f;
    if (at.strip == 0 && c < channels) {
        known = known_of(to, c);
        if (seen > 0) before = origin[c];
    }
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
    const double off = seen > 0 ? first / seen : 0.0;
    const Factors factors = finish_channel(to, known, c, seen, before + off, second - first * off);
    scale[c] = factors.scale;
    shift[c] = factors.shift;
}

// The third pass

template <int N> DEVICE void activate_all(float (&v)[N], int activation)
{
    if (activation == 0) return; // the same way for all threads
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = relu(v[i]);
    if (activation == 1) return;
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = v[i] > 6.0f ? 6.0f : v[i];
}
// The rows of one thread; pointers are at its channels, rows from `seen` on become 0. `adds`: residual is there.
template <class T, int N>
DEVICE void normalise_rows(const T* x, const T* residual, T* y, const float (&mean)[N], const float (&scale)[N],
                           const float (&shift)[N], bool adds, int activation, int row, int rows, int seen, int stop,
                           int channels)
{
    constexpr int ROWS = WRITTEN_AT_ONCE<N>;
    for (; row < stop; row += ROWS * rows) {
        Words<T, N> in[ROWS], other[ROWS];
#pragma unroll
        for (int k = 0; k < ROWS; ++k) {
            const long long from = (row + k * rows < stop ? row + k * rows : row) * (long long)channels;
            in[k] = load<T, N>(x + from);
            if (adds) other[k] = load<T, N>(residual + from);
        }
#pragma unroll
        for (int k = 0; k < ROWS; ++k) {
            const int r = row + k * rows;
            float v[N], more[N];
            widen(in[k], v);
            if (adds) widen(other[k], more);
#pragma unroll
            for (int i = 0; i < N; ++i) {
                v[i] = fmaf(v[i] - mean[i], scale[i], shift[i]);
                if (adds) v[i] += more[i];
            }
            activate_all(v, activation);
            if (r < stop) store(y + r * (long long)channels, r < seen ? narrow<T, N>(v) : Words<T, N>{});
        }
    }
}
// Third pass, and BN_INF, from the last chunk on: what the first pass read last is still in the cache. `plain`: mean is
// 0 and all rows count. y may be x or residual.
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
    if (adds) // known to the compiler in each of the two
        normalise_rows(x + c, residual + c, y + c, means, scales, shifts, true, activation, row, at.rows, seen, stop,
                       channels);
    else
        normalise_rows(x + c, residual, y + c, means, scales, shifts, false, activation, row, at.rows, seen, stop,
                       channels);
}

// All three passes for the channels of a block, FEW_CHANNELS at most.
template <class T, int N>
DEVICE void forward_few_rows(const T* x, const T* residual, T* y, const int* batch_valid, const Channels& to, int adds,
                             int activation, int samples, int rows_per_sample, int channels, int columns)
{
    __shared__ float held[3][FEW_CHANNELS];
    const Walk at = walk<N>(channels, columns);
    const int all = samples * rows_per_sample, seen = valid_rows(batch_valid, samples, rows_per_sample);
    const int c = at.channel, place = c - blockIdx.x * columns * N;
    const int one = blockIdx.x * columns * N + threadIdx.x; // a channel for each of the first threads
    const bool finishes = threadIdx.x < columns * N && one < channels;
    Known known = {};
    if (finishes) known = known_of(to, one);
    float n = 0.0f, first[N] = {}, mean[N] = {}, squares[N] = {};
    if (!at.idle) row_statistics(x + c, at.row, at.rows, seen, channels, n, first, mean, squares);
    merge_rows<256>(at, columns, n, mean, squares);
    if (!at.idle && at.row == 0) {
#pragma unroll
        for (int i = 0; i < N; ++i)
            held[0][place + i] = first[i], held[1][place + i] = mean[i], held[2][place + i] = squares[i];
    }
    __syncthreads();
    if (finishes) {
        const double middle = (double)held[0][threadIdx.x] + held[1][threadIdx.x];
        const Factors factors = finish_channel(to, known, one, seen, middle, held[2][threadIdx.x]);
        held[0][threadIdx.x] = factors.mean;
        held[1][threadIdx.x] = factors.scale;
        held[2][threadIdx.x] = factors.shift;
    }
    __syncthreads();
    if (at.idle) return;
    float scale[N], shift[N];
#pragma unroll
    for (int i = 0; i < N; ++i)
        mean[i] = held[0][place + i], scale[i] = held[1][place + i], shift[i] = held[2][place + i];
    normalise_rows(x + c, residual + c, y + c, mean, scale, shift, adds, activation, at.row, at.rows, seen, all,
                   channels);
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

#define CHANNEL_PARAMETERS                                                                                            \
    const float *gamma, const float *beta, const float *prev_mean, const float *prev_var, float *saved_mean,          \
        float *saved_inv_std, float *next_mean, float *next_var
#define CHANNELS {gamma, beta, prev_mean, prev_var, saved_mean, saved_inv_std, next_mean, next_var, momentum, eps}

extern "C" __global__ void __launch_bounds__(1024, 1)
    norm_finish(const float* parts, const float* origin, const int* batch_valid, CHANNEL_PARAMETERS, float* scale,
                float* shift, int samples, int rows_per_sample, int channels, int chunk_rows, float momentum, float eps)
{
    finish(parts, origin, batch_valid, CHANNELS, scale, shift, samples, rows_per_sample, channels, chunk_rows);
}

#define EXPORT(suffix, T, N)                                                                                          \
    extern "C" __global__ void __launch_bounds__(256, 4) norm_statistics_##suffix(                                    \
        const T* x, const int* batch_valid, float* parts, float* origin, int samples, int rows_per_sample,            \
        int channels, int columns, int chunk_rows)                                                                    \
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
#define EXPORT_FEW(suffix, T, N)                                                                                      \
    extern "C" __global__ void __launch_bounds__(512, 1) norm_forward_##suffix(                                       \
        const T* x, const T* residual, T* y, const int* batch_valid, CHANNEL_PARAMETERS, int adds, int activation,    \
        int samples, int rows_per_sample, int channels, int columns, float momentum, float eps)                       \
    {                                                                                                                 \
        forward_few_rows<T, N>(x, residual, y, batch_valid, CHANNELS, adds, activation, samples, rows_per_sample,     \
                               channels, columns);                                                                    \
    }
EXPORT_FEW(f32, float, 4)
EXPORT_FEW(f16, __half, 8)
EXPORT_FEW(bf16, __nv_bfloat16, 8)
