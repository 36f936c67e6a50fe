// Batch normalisation backward (BN_BWD), with the gradient of the activation and of a second consumer in the same
// passes.
//
// g = dy (+ dy2), 0 where the activation cut y off; dbeta = sum g; dgamma = inv_std sum g (x - mean);
// dx = gamma inv_std (g - (dbeta + (x - mean) inv_std dgamma) / n)   (Ioffe and Szegedy 2015)
//
// The first pass sums g and g (x - mean) per chunk of rows, the second adds the chunks in their order in double, the
// third computes dx. If g is not just dy, the first pass leaves something for the third, so that y and dy2 are read
// once: dresidual when that is asked for (it is g); else, of a dy that is gated, a bit per element that says where it
// passed (a byte per pack, `gates`); else g itself, rounded, where the third would write anyway, in dx. A tensor with
// few rows takes one launch, whose blocks do all three passes for some channels.
#include "norm.cuh"

// Rows that a thread reads at once, of two to four tensors, so that enough bytes are on their way.
template <int N> constexpr int ROWS_AT_ONCE = N == 1 ? 4 : 2;

// Sums over all rows of the block, in its first row.
template <int HALF, int N> DEVICE void add_rows(const Walk& at, int columns, float (&first)[N], float (&second)[N])
{
    const auto give = [&](float* slot) {
#pragma unroll
        for (int i = 0; i < N; ++i) slot[i * HALF] = first[i], slot[(N + i) * HALF] = second[i];
    };
    const auto take = [&](const float* slot) {
#pragma unroll
        for (int i = 0; i < N; ++i) first[i] += slot[i * HALF], second[i] += slot[(N + i) * HALF];
    };
    fold_rows<float, 2 * N, HALF>(at, columns, give, take);
}

// Sums of g and of g (x - mean) over the rows of a thread; g and gates are written if they are not null. Pointers are at
// the thread's channels, gates at its pack. `two`: dy2 is there; activation 0: y is not.
template <class T, int N>
DEVICE void sum_rows(const T* dy, const T* dy2, const T* y, const T* x, T* g, unsigned char* gates,
                     const float (&mean)[N], float (&to_beta)[N], float (&to_gamma)[N], bool two, int activation,
                     int row, int rows, int stop, int channels)
{
    constexpr int ROWS = ROWS_AT_ONCE<N>;
    for (; row < stop; row += ROWS * rows) {
        Words<T, N> in[ROWS], first[ROWS], more[ROWS], out[ROWS];
#pragma unroll
        for (int k = 0; k < ROWS; ++k) {
            const long long from = (row + k * rows < stop ? row + k * rows : row) * (long long)channels;
            in[k] = load<T, N>(x + from);
            first[k] = load<T, N>(dy + from);
            if (two) more[k] = load<T, N>(dy2 + from);
            if (activation) out[k] = load<T, N>(y + from);
        }
#pragma unroll
        for (int k = 0; k < ROWS; ++k) {
            const int r = row + k * rows;
            float v[N], d[N];
            widen(first[k], d);
            if (two) {
                widen(more[k], v);
#pragma unroll
                for (int i = 0; i < N; ++i) d[i] += v[i];
            }
            unsigned int open = 0;
            if (activation) {
                widen(out[k], v);
#pragma unroll
                for (int i = 0; i < N; ++i) {
                    const bool passes = passed(v[i], activation);
                    d[i] = passes ? d[i] : 0.0f;
                    open |= passes ? 1u << i : 0u;
                }
            }
            if (r >= stop) break;
            if (gates) gates[r * (long long)(channels / N)] = (unsigned char)open;
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

// What a first pass leaves for the third, as launch_norm.py numbers it.
#define STORES_G 1
#define STORES_GATES 2

// First pass. parts: [chunks][2][channels], sums of g and of g (x - mean). g may be dy or dy2.
template <class T, int N>
DEVICE void gradients(const T* dy, const T* dy2, const T* y, const T* x, const float* mean, const int* batch_valid,
                      T* g, unsigned char* gates, float* parts, int two, int activation, int stores, int samples, int rows_per_sample,
                      int channels, int columns, int chunk_rows)
{
    const int seen = valid_rows(batch_valid, samples, rows_per_sample), start = blockIdx.y * chunk_rows;
    if (start >= seen) return; // the whole block
    const Walk at = walk<N>(channels, columns);
    const int c = at.channel;
    float to_beta[N] = {}, to_gamma[N] = {};
    if (!at.idle) {
        float means[N];
        load_floats(mean + c, means);
        T* to = stores == STORES_G ? g + c : nullptr;
        unsigned char* open = stores == STORES_GATES ? gates + c / N : nullptr;
        dy += c, dy2 += c, y += c, x += c;
        const int row = start + at.row, stop = min(seen, start + chunk_rows);
        if (two && activation) // known to the compiler in each of the four
            sum_rows(dy, dy2, y, x, to, (unsigned char*)nullptr, means, to_beta, to_gamma, true, activation, row,
                     at.rows, stop, channels);
        else if (two)
            sum_rows(dy, dy2, y, x, to, (unsigned char*)nullptr, means, to_beta, to_gamma, true, 0, row,
                     at.rows, stop, channels);
        else if (activation)
            sum_rows(dy, dy2, y, x, to, open, means, to_beta, to_gamma, false, activation, row,
                     at.rows, stop, channels);
        else
            sum_rows(dy, dy2, y, x, to, (unsigned char*)nullptr, means, to_beta, to_gamma, false, 0, row,
                     at.rows, stop, channels);
    }
    add_rows<128>(at, columns, to_beta, to_gamma);
    if (at.idle || at.row > 0) return;
    float* to = parts + 2LL * blockIdx.y * channels + c;
    store_floats(to, to_beta);
    store_floats(to + channels, to_gamma);
}

// dx = g scale + (x - mean) slope + offset
struct Factors {
    float scale, slope, offset;
};
// dgamma and dbeta of channel c over `seen` rows, from the sums of g and of g (x - mean).
DEVICE Factors finish_channel(float gamma, float inv_std, float* dgamma, float* dbeta, int c, int seen, double to_beta,
                              double to_gamma)
{
    const double std = inv_std, scale = gamma * std, share = scale / (seen > 1 ? seen : 1);
    dbeta[c] = (float)to_beta;
    dgamma[c] = (float)(to_gamma * std);
    return {(float)scale, (float)(-share * std * std * to_gamma), (float)(-share * to_beta)};
}

// Second pass.
extern "C" __global__ void __launch_bounds__(1024, 1)
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
    float weight = 0.0f, deviation = 0.0f; // loaded before the sums are there, since each load takes its time
    if (at.strip == 0 && c < channels) weight = gamma[c], deviation = inv_std[c];
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
    const Factors factors = finish_channel(weight, deviation, dgamma, dbeta, c, seen, to_beta, to_gamma);
    scale[c] = factors.scale;
    slope[c] = factors.slope;
    offset[c] = factors.offset;
}

// dx of the rows of one thread; pointers are at its channels, gates at its pack. Rows from `seen` on become 0, in
// dresidual too if it is not null. g may be dx. With gates, g is a dy that is still to be gated.
template <class T, int N>
DEVICE void gradient_rows(const T* g, const unsigned char* gates, const T* x, T* dx, T* dresidual,
                          const float (&mean)[N], const float (&scale)[N], const float (&slope)[N],
                          const float (&offset)[N], int row, int rows, int seen, int stop, int channels)
{
    constexpr int ROWS = ROWS_AT_ONCE<N>;
    for (; row < stop; row += ROWS * rows) {
        Words<T, N> in[ROWS], first[ROWS];
        unsigned int open[ROWS];
#pragma unroll
        for (int k = 0; k < ROWS; ++k) {
            const long long r = row + k * rows < stop ? row + k * rows : row, from = r * channels;
            in[k] = load<T, N>(x + from);
            first[k] = load<T, N>(g + from);
            open[k] = gates ? gates[r * (channels / N)] : 0xffu;
        }
#pragma unroll
        for (int k = 0; k < ROWS; ++k) {
            const int r = row + k * rows;
            float v[N], d[N];
            widen(in[k], v);
            widen(first[k], d);
#pragma unroll
            for (int i = 0; i < N; ++i) {
                const float passing = open[k] >> i & 1u ? d[i] : 0.0f;
                v[i] = fmaf(passing, scale[i], fmaf(v[i] - mean[i], slope[i], offset[i]));
            }
            if (r >= stop) break;
            store(dx + r * (long long)channels, r < seen ? narrow<T, N>(v) : Words<T, N>{});
            if (dresidual && r >= seen) store(dresidual + r * (long long)channels, Words<T, N>{});
        }
    }
}

// Third pass, from the last chunk on: what the first one touched last is still in the cache. `gated`: gates are there;
// `adds`: dresidual is.
template <class T, int N>
DEVICE void input_gradient(const T* g, const unsigned char* gates, const T* x, T* dx, T* dresidual, const float* mean,
                           const float* scale, const float* slope, const float* offset, const int* batch_valid,
                           int gated, int adds, int samples, int rows_per_sample, int channels, int columns,
                           int chunk_rows)
{
    const Walk at = walk<N>(channels, columns);
    if (at.idle) return;
    const int all = samples * rows_per_sample, seen = valid_rows(batch_valid, samples, rows_per_sample);
    const int start = (gridDim.y - 1 - blockIdx.y) * chunk_rows, stop = min(all, start + chunk_rows), c = at.channel;
    float means[N], scales[N], slopes[N], offsets[N];
    load_floats(mean + c, means);
    load_floats(scale + c, scales);
    load_floats(slope + c, slopes);
    load_floats(offset + c, offsets);
    gradient_rows(g + c, gated ? gates + c / N : nullptr, x + c, dx + c, adds ? dresidual + c : nullptr, means, scales,
                  slopes, offsets, start + at.row, at.rows, seen, stop, channels);
}

// All three passes for the channels of a block, FEW_CHANNELS at most. A thread reads only what it has written itself.
template <class T, int N>
DEVICE void backward_few_rows(const T* dy, const T* dy2, const T* y, const T* x, T* dx, T* dresidual,
                              const float* gamma, const float* mean, const float* inv_std, const int* batch_valid,
                              float* dgamma, float* dbeta, int two, int activation, int adds, int samples,
                              int rows_per_sample, int channels, int columns)
{
    __shared__ float held[3][FEW_CHANNELS];
    const Walk at = walk<N>(channels, columns);
    const int all = samples * rows_per_sample, seen = valid_rows(batch_valid, samples, rows_per_sample);
    const int c = at.channel, place = c - blockIdx.x * columns * N;
    const int one = blockIdx.x * columns * N + threadIdx.x; // a channel for each of the first threads
    const bool finishes = threadIdx.x < columns * N && one < channels;
    float weight = 0.0f, deviation = 0.0f;
    if (finishes) weight = gamma[one], deviation = inv_std[one];
    float to_beta[N] = {}, to_gamma[N] = {}, means[N] = {};
    T* const stored = adds ? dresidual : dx;
    const bool stores = adds || two || activation;
    if (!at.idle) {
        load_floats(mean + c, means);
        sum_rows(dy + c, dy2 + c, y + c, x + c, stores ? stored + c : nullptr, (unsigned char*)nullptr, means, to_beta,
                 to_gamma, two, activation, at.row, at.rows, seen, channels);
    }
    add_rows<256>(at, columns, to_beta, to_gamma);
    if (!at.idle && at.row == 0) {
#pragma unroll
        for (int i = 0; i < N; ++i) held[0][place + i] = to_beta[i], held[1][place + i] = to_gamma[i];
    }
    __syncthreads();
    if (finishes) {
        const Factors factors =
            finish_channel(weight, deviation, dgamma, dbeta, one, seen, held[0][threadIdx.x], held[1][threadIdx.x]);
        held[0][threadIdx.x] = factors.scale;
        held[1][threadIdx.x] = factors.slope;
        held[2][threadIdx.x] = factors.offset;
    }
    __syncthreads();
    if (at.idle) return;
    float scale[N], slope[N], offset[N];
#pragma unroll
    for (int i = 0; i < N; ++i)
        scale[i] = held[0][place + i], slope[i] = held[1][place + i], offset[i] = held[2][place + i];
    gradient_rows((stores ? stored : dy) + c, (const unsigned char*)nullptr, x + c, dx + c,
                  adds ? dresidual + c : nullptr, means, scale, slope, offset, at.row, at.rows, seen, all, channels);
}

#define EXPORT(suffix, T, N)                                                                                          \
    extern "C" __global__ void __launch_bounds__(256, 3) norm_gradients_##suffix(                                     \
        const T* dy, const T* dy2, const T* y, const T* x, const float* mean, const int* batch_valid, T* g,           \
        unsigned char* gates, float* parts, int two, int activation, int stores, int samples, int rows_per_sample,    \
        int channels, int columns, int chunk_rows)                                                                    \
    {                                                                                                                 \
        gradients<T, N>(dy, dy2, y, x, mean, batch_valid, g, gates, parts, two, activation, stores, samples,          \
                        rows_per_sample, channels, columns, chunk_rows);                                              \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(256, 3) norm_input_gradient_##suffix(                                \
        const T* g, const unsigned char* gates, const T* x, T* dx, T* dresidual, const float* mean,                   \
        const float* scale, const float* slope, const float* offset, const int* batch_valid, int gated, int adds,     \
        int samples, int rows_per_sample, int channels, int columns, int chunk_rows)                                  \
    {                                                                                                                 \
        input_gradient<T, N>(g, gates, x, dx, dresidual, mean, scale, slope, offset, batch_valid, gated, adds,        \
                             samples, rows_per_sample, channels, columns, chunk_rows);                                \
    }
FOR_EACH_PACK(EXPORT)
#define EXPORT_FEW(suffix, T, N)                                                                                      \
    extern "C" __global__ void __launch_bounds__(512, 1) norm_backward_##suffix(                                      \
        const T* dy, const T* dy2, const T* y, const T* x, T* dx, T* dresidual, const float* gamma,                   \
        const float* mean, const float* inv_std, const int* batch_valid, float* dgamma, float* dbeta, int two,        \
        int activation, int adds, int samples, int rows_per_sample, int channels, int columns)                        \
    {                                                                                                                 \
        backward_few_rows<T, N>(dy, dy2, y, x, dx, dresidual, gamma, mean, inv_std, batch_valid, dgamma, dbeta, two,  \
                                activation, adds, samples, rows_per_sample, channels, columns);                       \
    }
EXPORT_FEW(f32, float, 4)
EXPORT_FEW(f16, __half, 8)
EXPORT_FEW(bf16, __nv_bfloat16, 8)
