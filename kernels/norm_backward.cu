// Batch normalisation backward (BN_BWD), with the gradient of the activation and of a second consumer in the same passes.
//
// g = dy (+ dy2), 0 where the activation cut y off; dbeta = sum g; dgamma = inv_std sum g (x - mean);
// dx = gamma inv_std (g - (dbeta + (x - mean) inv_std dgamma) / n)   (Ioffe and Szegedy 2015)
//
// The first pass sums g and g (x - mean) per chunk of rows, the second adds the chunks in their order in double, the
// third computes dx. If g is not just dy, the first pass stores it, rounded, where the third would write anyway: in
// dresidual when that is asked for (it is g), else in dx. So dy, dy2 and y are read once.
#include "norm.cuh"

// Rows that a thread reads at once, of two to four tensors, so that enough bytes are on their way.
template <int N> constexpr int ROWS_AT_ONCE = N == 1 ? 4 : 2;

// Halves the rows of a block until the first one has the sums of all: the same tree whatever runs first.
template <int N> DEVICE void add_block(const Walk& at, int columns, float (&first)[N], float (&second)[N])
{
    constexpr int HALF = 128; // threads that may hand over at once
    __shared__ float handed[2 * N * HALF];
    for (int rows = at.rows; rows > 1;) {
        const int kept = (rows + 1) >> 1;
        float* slot = handed + threadIdx.x - (at.row >= kept ? kept * columns : 0);
        if (at.row >= kept && at.row < rows) {
#pragma unroll
            for (int i = 0; i < N; ++i) slot[i * HALF] = first[i], slot[(N + i) * HALF] = second[i];
        }
        __syncthreads();
        if (at.row + kept < rows) {
#pragma unroll
            for (int i = 0; i < N; ++i) first[i] += slot[i * HALF], second[i] += slot[(N + i) * HALF];
        }
        __syncthreads();
        rows = kept;
    }
}

// Sums of g and of g (x - mean) over the rows of a thread; g is written if it is not null. Pointers are at its channels.
template <class T, int N, bool TWO, bool GATED>
DEVICE void sum_rows(const T* dy, const T* dy2, const T* y, const T* x, T* g, const float (&mean)[N],
                     float (&to_beta)[N], float (&to_gamma)[N], int activation, int row, int rows, int stop,
                     int channels)
{
    constexpr int ROWS = ROWS_AT_ONCE<N>;
    for (; row < stop; row += ROWS * rows) {
        Words<T, N> in[ROWS], first[ROWS], more[ROWS], out[ROWS];
#pragma unroll
        for (int k = 0; k < ROWS; ++k) {
            const long long from = (row + k * rows < stop ? row + k * rows : row) * (long long)channels;
            in[k] = load<T, N>(x + from);
            first[k] = load<T, N>(dy + from);
            if (TWO) more[k] = load<T, N>(dy2 + from);
            if (GATED) out[k] = load<T, N>(y + from);
        }
#pragma unroll
        for (int k = 0; k < ROWS; ++k) {
            const int r = row + k * rows;
            float v[N], d[N];
            widen(first[k], d);
            if (TWO) {
                widen(more[k], v);
#pragma unroll
                for (int i = 0; i < N; ++i) d[i] += v[i];
            }
            if (GATED) {
                widen(out[k], v);
#pragma unroll
                for (int i = 0; i < N; ++i) d[i] = passed(v[i], activation) ? d[i] : 0.0f;
            }
            if (r >= stop) break;
            if (g) store(g + r * (long long)channels, narrow<T, N>(d));
            widen(in[k], v);
#pragma unroll
            for (int i = 0; i < N; ++i) {
                to_beta[i] += d[i];
                to_gamma[i] = fmaf(d[i], v[i] - mean[i], to_gamma[i]);
            }
        }
    }
}

// First pass. parts: [chunks][2][channels], sums of g and of g (x - mean). `two`: dy2 is there; `stores`: g is written.
// g may be dy or dy2.
template <class T, int N>
DEVICE void gradients(const T* dy, const T* dy2, const T* y, const T* x, const float* mean, const int* batch_valid,
                      T* g, float* parts, int two, int activation, int stores, int samples, int rows_per_sample,
                      int channels, int columns, int chunk_rows)
{
    const int seen = valid_rows(batch_valid, samples, rows_per_sample), start = blockIdx.y * chunk_rows;
    if (start >= seen) return; // the whole block
    const int stop = min(seen, start + chunk_rows);
    const Walk at = walk<N>(channels, columns);
    float to_beta[N] = {}, to_gamma[N] = {};
    if (!at.idle) {
        float means[N];
        load_floats(mean + at.channel, means);
        const int c = at.channel, row = start + at.row;
        T* to = stores ? g + c : nullptr;
        if (two && activation)
            sum_rows<T, N, true, true>(dy + c, dy2 + c, y + c, x + c, to, means, to_beta, to_gamma, activation, row,
                                       at.rows, stop, channels);
        else if (two)
            sum_rows<T, N, true, false>(dy + c, dy2 + c, y, x + c, to, means, to_beta, to_gamma, 0, row, at.rows, stop,
                                        channels);
        else if (activation)
            sum_rows<T, N, false, true>(dy + c, dy2, y + c, x + c, to, means, to_beta, to_gamma, activation, row,
                                        at.rows, stop, channels);
        else
            sum_rows<T, N, false, false>(dy + c, dy2, y, x + c, to, means, to_beta, to_gamma, 0, row, at.rows, stop,
                                         channels);
    }
    add_block(at, columns, to_beta, to_gamma);
    if (at.idle || at.row > 0) return;
    float* to = parts + 2LL * blockIdx.y * channels + at.channel;
    store_floats(to, to_beta);
    store_floats(to + channels, to_gamma);
}

// Second pass: dgamma, dbeta, and the factors of the third: dx = g scale + (x - mean) slope + offset.
extern "C" __global__ void __launch_bounds__(1024)
    norm_gradients_finish(const float* __restrict__ parts, const int* __restrict__ batch_valid,
                          const float* __restrict__ gamma, const float* __restrict__ inv_std,
                          float* __restrict__ dgamma, float* __restrict__ dbeta, float* __restrict__ scale,
                          float* __restrict__ slope, float* __restrict__ offset, int samples, int rows_per_sample,
                          int channels, int chunk_rows)
{
    __shared__ double part[256];
    const Finish at = finish_of();
    const int c = at.channel, seen = valid_rows(batch_valid, samples, rows_per_sample);
    const int chunks = (seen + chunk_rows - 1) / chunk_rows;
    double to_beta = 0.0, to_gamma = 0.0;
    if (c < channels) {
#pragma unroll 4
        for (int k = at.strip; k < chunks; k += at.strips) {
            to_beta += parts[2LL * k * channels + c];
            to_gamma += parts[(2LL * k + 1) * channels + c];
        }
    }
    to_beta = sum_of_strips(to_beta, part);
    to_gamma = sum_of_strips(to_gamma, part);
    if (at.strip > 0 || c >= channels) return;
    const double std = inv_std[c], factor = gamma[c] * std, share = factor / (seen > 1 ? seen : 1);
    dbeta[c] = (float)to_beta;
    dgamma[c] = (float)(to_gamma * std);
    scale[c] = (float)factor;
    slope[c] = (float)(-share * std * std * to_gamma);
    offset[c] = (float)(-share * to_beta);
}

// Third pass, from the last chunk on: what the first one touched last is still in the cache. Rows that do not count: 0,
// in dresidual too if it is there (`adds`). g may be dx.
template <class T, int N>
DEVICE void input_gradient(const T* g, const T* x, T* dx, T* dresidual, const float* mean, const float* scale,
                           const float* slope, const float* offset, const int* batch_valid, int adds, int samples,
                           int rows_per_sample, int channels, int columns, int chunk_rows)
{
    const Walk at = walk<N>(channels, columns);
    if (at.idle) return;
    const int all = samples * rows_per_sample, seen = valid_rows(batch_valid, samples, rows_per_sample);
    const int start = (gridDim.y - 1 - blockIdx.y) * chunk_rows, stop = min(all, start + chunk_rows);
    float means[N], scales[N], slopes[N], offsets[N];
    load_floats(mean + at.channel, means);
    load_floats(scale + at.channel, scales);
    load_floats(slope + at.channel, slopes);
    load_floats(offset + at.channel, offsets);
    constexpr int ROWS = ROWS_AT_ONCE<N>;
    for (int row = start + at.row; row < stop; row += ROWS * at.rows) {
        Words<T, N> in[ROWS], first[ROWS];
#pragma unroll
        for (int k = 0; k < ROWS; ++k) {
            const long long from = (row + k * at.rows < stop ? row + k * at.rows : row) * (long long)channels;
            in[k] = load<T, N>(x + from + at.channel);
            first[k] = load<T, N>(g + from + at.channel);
        }
#pragma unroll
        for (int k = 0; k < ROWS; ++k) {
            const int r = row + k * at.rows;
            float v[N], d[N];
            widen(in[k], v);
            widen(first[k], d);
#pragma unroll
            for (int i = 0; i < N; ++i) v[i] = fmaf(d[i], scales[i], fmaf(v[i] - means[i], slopes[i], offsets[i]));
            if (r >= stop) continue;
            const long long to = r * (long long)channels + at.channel;
            store(dx + to, r < seen ? narrow<T, N>(v) : Words<T, N>{});
            if (adds && r >= seen) store(dresidual + to, Words<T, N>{});
        }
    }
}

#define EXPORT(suffix, T, N)                                                                                          \
    extern "C" __global__ void __launch_bounds__(256, 3) norm_gradients_##suffix(                                     \
        const T* dy, const T* dy2, const T* y, const T* x, const float* mean, const int* batch_valid, T* g,           \
        float* parts, int two, int activation, int stores, int samples, int rows_per_sample, int channels,            \
        int columns, int chunk_rows)                                                                                  \
    {                                                                                                                 \
        gradients<T, N>(dy, dy2, y, x, mean, batch_valid, g, parts, two, activation, stores, samples,                 \
                        rows_per_sample, channels, columns, chunk_rows);                                              \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(256, 3) norm_input_gradient_##suffix(                                \
        const T* g, const T* x, T* dx, T* dresidual, const float* mean, const float* scale, const float* slope,       \
        const float* offset, const int* batch_valid, int adds, int samples, int rows_per_sample, int channels,        \
        int columns, int chunk_rows)                                                                                  \
    {                                                                                                                 \
        input_gradient<T, N>(g, x, dx, dresidual, mean, scale, slope, offset, batch_valid, adds, samples,             \
                             rows_per_sample, channels, columns, chunk_rows);                                         \
    }
FOR_EACH_PACK(EXPORT)
