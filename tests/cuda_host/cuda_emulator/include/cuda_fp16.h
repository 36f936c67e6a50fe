// binary16 of the device dialect: stored as its bits, converted by the CPU's own instructions (round to nearest even).
#pragma once
#include "cuda_emulator.h"

namespace emulator {
#if defined(__F16C__)
typedef float Floats __attribute__((vector_size(16)));
typedef short Halves __attribute__((vector_size(16)));
static inline unsigned short half_bits(float x)
{
    return (unsigned short)__builtin_ia32_vcvtps2ph(Floats{x, 0, 0, 0}, 0)[0];
}
static inline float half_value(unsigned short bits)
{
    return __builtin_ia32_vcvtph2ps(Halves{short(bits), 0, 0, 0, 0, 0, 0, 0})[0];
}
#elif defined(__aarch64__)
static inline unsigned short half_bits(float x)
{
    __fp16 h = __fp16(x);
    unsigned short bits;
    __builtin_memcpy(&bits, &h, 2);
    return bits;
}
static inline float half_value(unsigned short bits)
{
    __fp16 h;
    __builtin_memcpy(&h, &bits, 2);
    return float(h);
}
#else
#error "no conversion of binary16 for this processor"
#endif
}  // namespace emulator

struct __half
{
    unsigned short bits;
    __half() = default;
    __half(float x) : bits(emulator::half_bits(x)) {}
    __half(int x) : bits(emulator::half_bits(float(x))) {}
    operator float() const { return emulator::half_value(bits); }
};
typedef __half half;
struct alignas(4) __half2 { __half x, y; };
typedef __half2 half2;

static inline __half __float2half(float x) { return __half(x); }
static inline __half __float2half_rn(float x) { return __half(x); }
static inline float __half2float(__half x) { return float(x); }
static inline __half __ushort_as_half(unsigned short bits)
{
    __half h;
    h.bits = bits;
    return h;
}
static inline unsigned short __half_as_ushort(__half x) { return x.bits; }
static inline __half2 __floats2half2_rn(float a, float b) { return {__half(a), __half(b)}; }
static inline __half2 __halves2half2(__half a, __half b) { return {a, b}; }
static inline float2 __half22float2(__half2 x) { return {float(x.x), float(x.y)}; }

namespace emulator {
template <> struct Kind<__half> { static const char value = 'h'; };
}  // namespace emulator
