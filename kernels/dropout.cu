// DROPOUT_FWD and DROPOUT_BWD: no mask is stored, both draw it again (docs/random-numbers.md, domain 4).
#include "packs.cuh"
#include "philox.cuh"

#define LANES 4  // words of a Philox block, hence elements

// A dropped NaN stays one, and the sum makes +0 of -0: the CPU's bits.
template <class T> DEVICE T scaled(T x, float factor) { return from_float<T>(to_float(x) * factor + 0.0f); }

// y = x * factor; the factor of element e is scale where word e mod 4 of block e div 4 is at least threshold, else 0.
template <class T>
DEVICE void dropout(const T* x, T* y, const int* seed_low, const int* seed_high, const int* step, long long n,
                    unsigned int purpose, unsigned int threshold, float scale)
{
    const unsigned int k0 = *seed_low, k1 = *seed_high, c2 = *step;
    for (long long at = first_index() * WIDTH<T>; at < n; at += index_step() * WIDTH<T>) {
        float factor[WIDTH<T>];
#pragma unroll
        for (int block = 0; block < WIDTH<T> / LANES; ++block) {
            const PhiloxWords words = philox(k0, k1, (unsigned int)(at / LANES) + block, purpose, c2, 0);
#pragma unroll
            for (int i = 0; i < LANES; ++i) factor[block * LANES + i] = words.at[i] >= threshold ? scale : 0.0f;
        }
        if (at + WIDTH<T> <= n) {
            Line<T> line = load_line(x + at);
#pragma unroll
            for (int i = 0; i < WIDTH<T>; ++i) line.at[i] = scaled(line.at[i], factor[i]);
            store_line(y + at, line);
        } else {
#pragma unroll
            for (int i = 0; i < WIDTH<T>; ++i)
                if (at + i < n) y[at + i] = scaled(x[at + i], factor[i]);
        }
    }
}

#define EXPORT(suffix, T)                                                                                            \
    extern "C" __global__ void __launch_bounds__(256)                                                                \
        dropout_##suffix(const T* x, T* y, const int* seed_low, const int* seed_high, const int* step, long long n,  \
                         unsigned int purpose, unsigned int threshold, float scale)                                  \
    {                                                                                                                \
        dropout(x, y, seed_low, seed_high, step, n, purpose, threshold, scale);                                      \
    }
FOR_EACH_FLOAT(EXPORT)
