// bfloat16 of the device dialect: the upper half of a float, rounded to nearest even.
#pragma once
#include "cuda_emulator.h"

struct __nv_bfloat16
{
    unsigned short bits;
    __nv_bfloat16() = default;
    __nv_bfloat16(float x)
    {
        const unsigned int b = __float_as_uint(x);
        // the one NaN that CUDA makes; adding the rounding to a NaN's bits could make an infinity of it
        bits = (b & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : (unsigned short)((b + 0x7fffu + (b >> 16 & 1u)) >> 16);
    }
    operator float() const { return __uint_as_float((unsigned int)bits << 16); }
};
typedef __nv_bfloat16 nv_bfloat16;
struct alignas(4) __nv_bfloat162 { __nv_bfloat16 x, y; };

static inline __nv_bfloat16 __float2bfloat16(float x) { return __nv_bfloat16(x); }
static inline __nv_bfloat16 __float2bfloat16_rn(float x) { return __nv_bfloat16(x); }
static inline float __bfloat162float(__nv_bfloat16 x) { return float(x); }
static inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits)
{
    __nv_bfloat16 x;
    x.bits = bits;
    return x;
}
static inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
static inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) { return {__nv_bfloat16(a), __nv_bfloat16(b)}; }

namespace emulator {
template <> struct Kind<__nv_bfloat16> { static const char value = 'b'; };
}  // namespace emulator
