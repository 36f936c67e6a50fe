// How norms and pools walk NHWC tensors. A row is the C channels of one pixel; a thread owns N neighbouring channels (a
// pack: 16 bytes, or one channel where C is no multiple of that) and walks down rows, so that what it knows about its
// channels stays in registers and neighbouring threads read neighbouring bytes.
//
// A block has as many columns of packs as fit (`columns`, from channel_tiles.py) and blockDim.x / columns rows at a
// time; the few threads that are left over are idle. blockIdx.x is the tile of columns, blockIdx.y the chunk of rows.
#pragma once
#include "dialect.cuh"

struct Walk {
    int channel; // the first of this thread's
    int row;     // of the block's rows
    int rows;    // of the block: from one row of a thread to its next
    bool idle;   // no channels: waits at barriers only
};

template <int N> DEVICE Walk walk(int channels, int columns)
{
    const unsigned int row = threadIdx.x / (unsigned int)columns, rows = blockDim.x / (unsigned int)columns;
    const int channel = (int)(blockIdx.x * columns + threadIdx.x - row * columns) * N;
    return {channel, (int)row, (int)rows, row >= rows || channel >= channels};
}

// The channels of a pack as they are loaded: whole words, which stay whole until they are used (a half in a register of
// its own takes as much room as a float). One channel is just that.
template <class T, int N> struct alignas(sizeof(T) * N) Words { unsigned int at[sizeof(T) * N / 4]; };
template <class T> struct Words<T, 1> { T at; };
template <class T, int N> DEVICE Words<T, N> load(const T* from) { return *reinterpret_cast<const Words<T, N>*>(from); }
template <class T, int N> DEVICE void store(T* to, const Words<T, N>& words)
{
    *reinterpret_cast<Words<T, N>*>(to) = words;
}

template <class Two> union Bits {
    Two two;
    unsigned int word;
};
DEVICE void widen_word(unsigned int word, float* to, float*) { to[0] = __uint_as_float(word); }
DEVICE void widen_word(unsigned int word, float* to, __half*)
{
    Bits<__half2> bits;
    bits.word = word;
    to[0] = to_float(bits.two.x);
    to[1] = to_float(bits.two.y);
}
DEVICE void widen_word(unsigned int word, float* to, __nv_bfloat16*)
{
    to[0] = __uint_as_float(word << 16);
    to[1] = __uint_as_float(word & 0xffff0000u);
}
DEVICE unsigned int narrow_word(const float* from, float*) { return __float_as_uint(from[0]); }
DEVICE unsigned int narrow_word(const float* from, __half*)
{
    Bits<__half2> bits;
    bits.two = __floats2half2_rn(from[0], from[1]);
    return bits.word;
}
DEVICE unsigned int narrow_word(const float* from, __nv_bfloat16*)
{
    Bits<__nv_bfloat162> bits;
    bits.two = __floats2bfloat162_rn(from[0], from[1]);
    return bits.word;
}

template <class T, int N> DEVICE void widen(const Words<T, N>& words, float (&v)[N])
{
    if constexpr (N == 1) {
        v[0] = to_float(words.at);
    } else {
        constexpr int EACH = 4 / sizeof(T);
#pragma unroll
        for (int i = 0; i < N; i += EACH) widen_word(words.at[i / EACH], v + i, (T*)nullptr);
    }
}
// Rounded once.
template <class T, int N> DEVICE Words<T, N> narrow(const float (&v)[N])
{
    Words<T, N> words;
    if constexpr (N == 1) {
        words.at = from_float<T>(v[0]);
    } else {
        constexpr int EACH = 4 / sizeof(T);
#pragma unroll
        for (int i = 0; i < N; i += EACH) words.at[i / EACH] = narrow_word(v + i, (T*)nullptr);
    }
    return words;
}

// N floats per channel pack: statistics, factors and partial results.
template <int N> DEVICE void load_floats(const float* from, float (&v)[N])
{
    const Pack<float, N> pack = *reinterpret_cast<const Pack<float, N>*>(from);
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = pack.at[i];
}
template <int N> DEVICE void store_floats(float* to, const float (&v)[N])
{
    Pack<float, N> pack;
#pragma unroll
    for (int i = 0; i < N; ++i) pack.at[i] = v[i];
    *reinterpret_cast<Pack<float, N>*>(to) = pack;
}

// Halves the rows of a block until the first one has what all of them had, the same tree whatever runs first: a thread
// of the lower half gives, the one above it takes. A slot is EACH elements, HALF apart; HALF is half of the threads.
template <class V, int EACH, int HALF, class Give, class Take>
DEVICE void fold_rows(const Walk& at, int columns, Give give, Take take)
{
    __shared__ V handed[EACH * HALF];
    for (int rows = at.rows; rows > 1;) {
        const int kept = (rows + 1) >> 1;
        V* slot = handed + threadIdx.x - (at.row >= kept ? kept * columns : 0);
        if (at.row >= kept && at.row < rows) give(slot);
        __syncthreads();
        if (at.row + kept < rows) take(slot);
        __syncthreads();
        rows = kept;
    }
}

// KERNEL(suffix, type, N): for each float a kernel for packs of 16 bytes, and one for single channels.
#define FOR_EACH_PACK(KERNEL)                                                                                         \
    KERNEL(f32, float, 4)                                                                                             \
    KERNEL(f32_1, float, 1)                                                                                           \
    KERNEL(f16, __half, 8)                                                                                            \
    KERNEL(f16_1, __half, 1)                                                                                          \
    KERNEL(bf16, __nv_bfloat16, 8)                                                                                    \
    KERNEL(bf16_1, __nv_bfloat16, 1)
