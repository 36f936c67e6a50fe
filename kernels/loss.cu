// Softmax cross-entropy with label smoothing, log-sum-exp without guards:
//     loss = log sum_c exp(z_c - top) - (1 - eps) (z_label - top) - eps / K sum_c (z_c - top)
// Sums are double in a fixed order. A row labelled -1 (past the end of the last batch) has no loss and no gradient. A row
// with NaN or +Inf, and a row whose label is no class, has a NaN loss, NaN probabilities and a NaN gradient: a call on a
// GPU cannot fail, but such a step is skipped as a whole (law 5), and a validation loss shows it.
#include "dialect.cuh"

#define MASKED (-1)
#define TOP_K 5
// What the label of a row earns: bits of `hits`.
#define HIT_1 1
#define HIT_5 2
// Logits that a thread holds in registers; rows of up to lanes * HELD classes are read once.
#define HELD 4

// Joins a value of each of the `lanes` threads that work on one row: a power of two up to 32, or a whole block of 256.
// `part`: shared memory, 8 elements; it may be used again at once.
template <class V, class Join> DEVICE V over_lanes(V v, int lanes, V* part, Join join)
{
    for (int offset = (lanes < 32 ? lanes : 32) >> 1; offset > 0; offset >>= 1)
        v = join(v, __shfl_xor_sync(FULL_WARP, v, offset));
    if (lanes <= 32) return v;
    if ((threadIdx.x & 31) == 0) part[threadIdx.x >> 5] = v;
    __syncthreads();
    v = part[0];
    for (int warp = 1; warp < lanes >> 5; ++warp) v = join(v, part[warp]);
    __syncthreads();
    return v;
}
DEVICE double sum_over_lanes(double v, int lanes, double* part)
{
    return over_lanes(v, lanes, part, [](double a, double b) { return a + b; });
}

// The classes of one row that fall to one of its threads.
template <class T> struct Logits {
    const T* row;
    int classes, lanes, lane;
    float held[HELD];

    __device__ __forceinline__ void load(int first)
    {
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            const int c = first + lane + i * lanes;
            held[i] = c < classes ? to_float(row[c]) : 0.0f;
        }
    }
    // body(class, logit) in ascending order. A row that fits is held; a longer one is read again in each pass.
    template <class Body> __device__ __forceinline__ void each(Body body)
    {
        for (int first = 0; first < classes; first += lanes * HELD) {
            if (classes > lanes * HELD) load(first);
#pragma unroll
            for (int i = 0; i < HELD; ++i) {
                const int c = first + lane + i * lanes;
                if (c < classes) body(c, held[i]);
            }
        }
    }
};

// First maximum (-1 with a NaN) and hits of the label; ties go to the lower class. `rank`: classes that come before the
// label's.
template <class T>
DEVICE void ranked(Logits<T>& z, float top, float own, int label, bool is_class, int* predicted, int* hits, int* part)
{
    int best = z.classes, rank = 0;
    z.each([&](int c, float x) {
        if (x == top && c < best) best = c;
        rank += x > own || (x == own && c < label) ? 1 : 0;
    });
    best = over_lanes(best, z.lanes, part, [](int a, int b) { return a < b ? a : b; });
    rank = over_lanes(rank, z.lanes, part, [](int a, int b) { return a + b; });
    const bool counts = is_class && !is_nan(top);
    *predicted = is_nan(top) ? MASKED : best;
    *hits = !counts ? 0 : rank == 0 ? HIT_1 | HIT_5 : rank < TOP_K && z.classes >= TOP_K ? HIT_5 : 0;
}

// Mean loss, and rates if there are hits, over the valid rows, in row order within each thread; by one block.
template <bool RANKED>
DEVICE void mean_of_rows(const float* losses, const int* hits, const int* valid, float* loss, float* top1, float* top5,
                         int rows)
{
    __shared__ double part[32];
    double sum = 0.0, first = 0.0, five = 0.0;
    for (int r = threadIdx.x; r < rows; r += blockDim.x) {
        sum += (double)losses[r];
        if (RANKED) {
            first += (double)(hits[r] & HIT_1);
            five += (double)((hits[r] & HIT_5) >> 1);
        }
    }
    sum = block_sum(sum, part);
    if (RANKED) {
        first = block_sum(first, part);
        five = block_sum(five, part);
    }
    if (threadIdx.x != 0) return;
    const double count = valid[0] > 1 ? (double)valid[0] : 1.0;
    loss[0] = (float)(sum / count);
    if (RANKED) {
        top1[0] = (float)(first / count);
        top5[0] = (float)(five / count);
    }
}

// A grid of one block takes the mean as well; for a larger one it is a launch of its own.
template <bool RANKED, class T>
DEVICE void softmax(const T* logits, const int* labels, const float* smoothing, const int* valid, int* predicted,
                    int* hits, float* probs, float* losses, float* loss, float* top1, float* top5, int rows,
                    int classes, int lanes)
{
    __shared__ double sums[8];
    __shared__ float tops[8];
    __shared__ int ranks[8];
    const int at_once = blockDim.x / lanes, mine = threadIdx.x / lanes;
    const double eps = smoothing[0];
    for (int base = blockIdx.x * at_once; base < rows; base += gridDim.x * at_once) {
        const bool exists = base + mine < rows;  // what lies past the last row repeats it and writes nothing
        const int r = exists ? base + mine : rows - 1;
        Logits<T> z = {logits + (long long)r * classes, classes, lanes, (int)threadIdx.x % lanes};
        if (classes <= lanes * HELD) z.load(0);

        const int label = labels[r];
        const bool is_class = label >= 0 && label < classes;
        const float own = to_float(z.row[is_class ? label : 0]);
        float top = -POSITIVE_INFINITY;
        z.each([&](int c, float x) { top = larger(x, top); });
        top = over_lanes(top, lanes, tops, [](float a, float b) { return larger(a, b); });

        double total = 0.0, shifted = 0.0;
        z.each([&](int c, float x) {
            const float below = x - top;
            total += (double)expf(below);
            shifted += (double)below;
        });
        total = sum_over_lanes(total, lanes, sums);
        if (eps > 0.0) shifted = sum_over_lanes(shifted, lanes, sums);

        const bool masked = label == MASKED, sound = is_class && is_finite(top);
        const float inverse = (float)(1.0 / total);
        float* out = probs + (long long)r * classes;
        z.each([&](int c, float x) {
            if (exists) out[c] = masked ? 0.0f : sound ? expf(x - top) * inverse : QUIET_NAN;
        });
        int prediction = 0, hit = 0;
        if (RANKED) ranked(z, top, own, label, is_class, &prediction, &hit, ranks);
        if (exists && z.lane == 0) {
            double value = log(total) - (1.0 - eps) * ((double)own - (double)top);
            if (eps > 0.0) value -= eps / classes * shifted;
            losses[r] = masked ? 0.0f : sound ? (float)value : QUIET_NAN;
            if (RANKED) {
                predicted[r] = prediction;
                hits[r] = hit;
            }
        }
    }
    if (gridDim.x == 1) {
        __syncthreads();
        mean_of_rows<RANKED>(losses, hits, valid, loss, top1, top5, rows);
    }
}

// (p - eps / K - (1 - eps) [c == label]) * scaling / valid.
template <class T>
DEVICE void gradient(const float* probs, const int* labels, const float* smoothing, const int* valid,
                     const float* scaling, T* out, int rows, int classes, int lanes)
{
    const int at_once = blockDim.x / lanes, lane = threadIdx.x % lanes;
    const float off = smoothing[0] / (float)classes, on = 1.0f - smoothing[0];
    const float factor = scaling[0] / (float)(valid[0] > 1 ? valid[0] : 1);
    for (int r = blockIdx.x * at_once + threadIdx.x / lanes; r < rows; r += gridDim.x * at_once) {
        const int label = labels[r];
        const bool known = label >= MASKED && label < classes;
        const float* row = probs + (long long)r * classes;
        T* gradients = out + (long long)r * classes;
        for (int first = lane; first < classes; first += lanes * HELD) {
            float p[HELD];  // all loads before the first store
#pragma unroll
            for (int i = 0; i < HELD; ++i) p[i] = first + i * lanes < classes ? row[first + i * lanes] - off : 0.0f;
#pragma unroll
            for (int i = 0; i < HELD; ++i) {
                const int c = first + i * lanes;
                const float g = (c == label ? p[i] - on : p[i]) * factor;
                if (c < classes) gradients[c] = from_float<T>(label == MASKED ? 0.0f : known ? g : QUIET_NAN);
            }
        }
    }
}

#define EXPORT(suffix, T)                                                                                              \
    extern "C" __global__ void __launch_bounds__(1024, 1)                                                                \
    softmax_##suffix(const T* logits, const int* labels, const float* smoothing, const int* valid, float* probs,       \
                     float* losses, float* loss, int rows, int classes, int lanes)                                     \
    {                                                                                                                  \
        softmax<false>(logits, labels, smoothing, valid, nullptr, nullptr, probs, losses, loss, nullptr, nullptr,      \
                       rows, classes, lanes);                                                                          \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(1024, 1)                                                                \
    softmax_ranked_##suffix(const T* logits, const int* labels, const float* smoothing, const int* valid,              \
                            int* predicted, int* hits, float* probs, float* losses, float* loss, float* top1,          \
                            float* top5, int rows, int classes, int lanes)                                             \
    {                                                                                                                  \
        softmax<true>(logits, labels, smoothing, valid, predicted, hits, probs, losses, loss, top1, top5, rows,        \
                      classes, lanes);                                                                                 \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
    softmax_gradient_##suffix(const float* probs, const int* labels, const float* smoothing, const int* valid,         \
                              const float* scaling, T* out, int rows, int classes, int lanes)                          \
    {                                                                                                                  \
        gradient(probs, labels, smoothing, valid, scaling, out, rows, classes, lanes);                                 \
    }
FOR_EACH_FLOAT(EXPORT)

extern "C" __global__ void __launch_bounds__(256)
mean_loss(const float* losses, const int* valid, float* loss, int rows)
{
    mean_of_rows<false>(losses, nullptr, valid, loss, nullptr, nullptr, rows);
}
extern "C" __global__ void __launch_bounds__(256)
mean_loss_and_rates(const float* losses, const int* hits, const int* valid, float* loss, float* top1, float* top5,
                    int rows)
{
    mean_of_rows<true>(losses, hits, valid, loss, top1, top5, rows);
}
