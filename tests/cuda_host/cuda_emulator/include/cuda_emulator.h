// The device dialect of kernels/*.cu for g++: an unchanged file compiles against this header and runs on the CPU.
//
// What is here is what kernels may use; what is not (inline PTX, cooperative groups, standard headers, floating-point
// atomics, INFINITY, uint32_t) fails to compile here as it does, or should, with NVRTC. scheduler.cpp holds the rest.
#pragma once
#include <type_traits>

typedef decltype(sizeof(0)) size_t;

// ------------------------------------------------------------------------------------------------ qualifiers
#define __CUDA_EMULATOR__ 1
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __constant__ static
// Right for "__shared__ T a[N];" in a function and for "extern __shared__ T a[];" (the build defines the array). The
// scheduler finds all of a module's shared memory as its block of thread-local storage.
#define __shared__ thread_local

// ------------------------------------------------------------------------------------------------ vector types
struct uint3 { unsigned int x, y, z; };
struct dim3 { unsigned int x, y, z; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) double2 { double x, y; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned int x, y; };
struct alignas(16) uint4 { unsigned int x, y, z, w; };
struct alignas(4) uchar4 { unsigned char x, y, z, w; };
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline double2 make_double2(double x, double y) { return {x, y}; }
static inline int2 make_int2(int x, int y) { return {x, y}; }
static inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
static inline uint2 make_uint2(unsigned int x, unsigned int y) { return {x, y}; }
static inline uint4 make_uint4(unsigned int x, unsigned int y, unsigned int z, unsigned int w) { return {x, y, z, w}; }

// ------------------------------------------------------------------------------------------------ the scheduler
extern "C" {
extern uint3 emulator_thread, emulator_block;
extern dim3 emulator_block_size, emulator_grid_size;
int emulator_block_barrier(int predicate, const char* where);
void emulator_warp_barrier(unsigned int mask, const char* where);
int emulator_lane();
unsigned long long emulator_exchange(unsigned int mask, unsigned long long bits, int source, int own, const char* where);
unsigned int emulator_ballot(unsigned int mask, int predicate, const char* where);
int emulator_reduce(unsigned int mask, int operation, int value, const char* where);
void emulator_atomic(int step);
void emulator_trap(const char* message);
int emulator_run(void (*body)(void**), const unsigned int* sizes, unsigned int bound, unsigned int dynamic_bytes,
                 void** arguments, void** dynamic_arrays, const void* anchor);
}
#define threadIdx emulator_thread
#define blockIdx emulator_block
#define blockDim emulator_block_size
#define gridDim emulator_grid_size
static const int warpSize = 32;

#define EMULATOR_TEXT(x) #x
#define EMULATOR_LINE(x) EMULATOR_TEXT(x)
#define EMULATOR_HERE __FILE__ ":" EMULATOR_LINE(__LINE__)

// ------------------------------------------------------------------------------------------------ barriers, warps
namespace emulator {
template <class V> static inline unsigned long long to_bits(V v)
{
    static_assert(sizeof(V) <= 8, "a shuffle moves at most 8 bytes");
    unsigned long long bits = 0;
    __builtin_memcpy(&bits, &v, sizeof v);
    return bits;
}
template <class V> static inline V from_bits(unsigned long long bits)
{
    V v;
    __builtin_memcpy(&v, &bits, sizeof v);
    return v;
}
struct Here { const char* where; };
// The value of lane `source`; its own when that lane lies outside of the segment.
template <class V> static inline V take(Here at, unsigned int mask, V v, int source, bool own)
{
    return from_bits<V>(emulator_exchange(mask, to_bits(v), source, own, at.where));
}
template <class V> static inline V shuffle(Here at, unsigned int mask, V v, int source, int width = 32)
{
    const int lane = emulator_lane();
    return take(at, mask, v, (lane & ~(width - 1)) | (source & (width - 1)), false);
}
template <class V> static inline V shuffle_xor(Here at, unsigned int mask, V v, int bits, int width = 32)
{
    const int lane = emulator_lane(), source = lane ^ bits;
    return take(at, mask, v, source, source >= (lane & ~(width - 1)) + width);
}
template <class V> static inline V shuffle_down(Here at, unsigned int mask, V v, unsigned int delta, int width = 32)
{
    const int lane = emulator_lane();
    return take(at, mask, v, int(lane + delta), (lane & (width - 1)) + int(delta) >= width);
}
template <class V> static inline V shuffle_up(Here at, unsigned int mask, V v, unsigned int delta, int width = 32)
{
    const int lane = emulator_lane();
    return take(at, mask, v, int(lane - delta), (lane & (width - 1)) < int(delta));
}
static inline void warp_barrier(Here at, unsigned int mask = 0xffffffffu) { emulator_warp_barrier(mask, at.where); }
}  // namespace emulator
#define EMULATOR_AT emulator::Here{EMULATOR_HERE}
#define __syncthreads() (void)emulator_block_barrier(0, EMULATOR_HERE)
#define __syncthreads_count(p) emulator_block_barrier((p) != 0, EMULATOR_HERE)
#define __syncthreads_or(p) (emulator_block_barrier((p) != 0, EMULATOR_HERE) != 0)
#define __syncthreads_and(p) (emulator_block_barrier((p) == 0, EMULATOR_HERE) == 0)
#define __syncwarp(...) emulator::warp_barrier(EMULATOR_AT __VA_OPT__(, ) __VA_ARGS__)
#define __shfl_sync(...) emulator::shuffle(EMULATOR_AT, __VA_ARGS__)
#define __shfl_xor_sync(...) emulator::shuffle_xor(EMULATOR_AT, __VA_ARGS__)
#define __shfl_down_sync(...) emulator::shuffle_down(EMULATOR_AT, __VA_ARGS__)
#define __shfl_up_sync(...) emulator::shuffle_up(EMULATOR_AT, __VA_ARGS__)
#define __ballot_sync(mask, p) emulator_ballot(mask, (p) != 0, EMULATOR_HERE)
#define __any_sync(mask, p) (emulator_ballot(mask, (p) != 0, EMULATOR_HERE) != 0)
#define __all_sync(mask, p) (emulator_ballot(mask, (p) == 0, EMULATOR_HERE) == 0)
#define __reduce_add_sync(mask, v) emulator_reduce(mask, 0, v, EMULATOR_HERE)
#define __reduce_max_sync(mask, v) emulator_reduce(mask, 1, v, EMULATOR_HERE)
#define __reduce_min_sync(mask, v) emulator_reduce(mask, 2, v, EMULATOR_HERE)
static inline void __threadfence() {}
static inline void __threadfence_block() {}
static inline void __trap() { emulator_trap("__trap()"); }

// ------------------------------------------------------------------------------------------------ atomics
// One thread runs at a time, so they are plain accesses; the race check must know that they do not race.
#ifdef __SANITIZE_THREAD__
#define EMULATOR_ATOMIC(step) emulator_atomic(step)
#else
#define EMULATOR_ATOMIC(step) (void)0
#endif
#define EMULATOR_ATOMIC_FUNCTION(name, result)                                                                       \
    template <class V> static inline V name(V* place, std::common_type_t<V> v)                                       \
    {                                                                                                                \
        static_assert(std::is_integral<V>::value, #name ": floating-point atomics give other bits in another order"); \
        EMULATOR_ATOMIC(1);                                                                                          \
        V old = *place;                                                                                              \
        *place = V(result);                                                                                          \
        EMULATOR_ATOMIC(-1);                                                                                         \
        return old;                                                                                                  \
    }
template <class V> using emulator_unsigned = std::make_unsigned_t<V>;
EMULATOR_ATOMIC_FUNCTION(atomicAdd, emulator_unsigned<V>(old) + emulator_unsigned<V>(v))
EMULATOR_ATOMIC_FUNCTION(atomicSub, emulator_unsigned<V>(old) - emulator_unsigned<V>(v))
EMULATOR_ATOMIC_FUNCTION(atomicMax, old < v ? v : old)
EMULATOR_ATOMIC_FUNCTION(atomicMin, v < old ? v : old)
EMULATOR_ATOMIC_FUNCTION(atomicExch, v)
EMULATOR_ATOMIC_FUNCTION(atomicOr, old | v)
EMULATOR_ATOMIC_FUNCTION(atomicAnd, old & v)
template <class V> static inline V atomicCAS(V* place, std::common_type_t<V> expected, std::common_type_t<V> v)
{
    EMULATOR_ATOMIC(1);
    V old = *place;
    if (old == expected) *place = v;
    EMULATOR_ATOMIC(-1);
    return old;
}
template <class V> static inline V __ldg(const V* place) { return *place; }

// ------------------------------------------------------------------------------------------------ arithmetic
#define EMULATOR_LIBM_1(name)                                      \
    extern "C" double name(double) noexcept;                       \
    extern "C" float name##f(float) noexcept;                      \
    static inline float name(float x) { return name##f(x); }
#define EMULATOR_LIBM_2(name)                                      \
    extern "C" double name(double, double) noexcept;               \
    extern "C" float name##f(float, float) noexcept;               \
    static inline float name(float x, float y) { return name##f(x, y); }
EMULATOR_LIBM_1(exp) EMULATOR_LIBM_1(exp2) EMULATOR_LIBM_1(expm1) EMULATOR_LIBM_1(log) EMULATOR_LIBM_1(log2)
EMULATOR_LIBM_1(log1p) EMULATOR_LIBM_1(sqrt) EMULATOR_LIBM_1(tanh) EMULATOR_LIBM_1(sin) EMULATOR_LIBM_1(cos)
EMULATOR_LIBM_1(erf) EMULATOR_LIBM_1(fabs) EMULATOR_LIBM_1(floor) EMULATOR_LIBM_1(ceil) EMULATOR_LIBM_1(rint)
EMULATOR_LIBM_1(round) EMULATOR_LIBM_1(trunc)
EMULATOR_LIBM_2(pow) EMULATOR_LIBM_2(fmin) EMULATOR_LIBM_2(fmax) EMULATOR_LIBM_2(copysign) EMULATOR_LIBM_2(fmod)
extern "C" double fma(double, double, double) noexcept;
extern "C" float fmaf(float, float, float) noexcept;
extern "C" float ldexpf(float, int) noexcept;
static inline float fma(float a, float b, float c) { return fmaf(a, b, c); }
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline double rsqrt(double x) { return 1.0 / sqrt(x); }
template <class V> static inline bool isnan(V x) { return x != x; }
template <class V> static inline bool isinf(V x) { return __builtin_isinf(x); }
template <class V> static inline bool isfinite(V x) { return __builtin_isfinite(x); }
static inline int abs(int x) { return x < 0 ? -x : x; }
static inline long long llabs(long long x) { return x < 0 ? -x : x; }

// As CUDA's overloads: of integers the common type, of floats the one that is not NaN.
template <class A, class B> static inline std::common_type_t<A, B> min(A a, B b)
{
    using V = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point<V>::value) return fmin(V(a), V(b));
    else return V(b) < V(a) ? V(b) : V(a);
}
template <class A, class B> static inline std::common_type_t<A, B> max(A a, B b)
{
    using V = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point<V>::value) return fmax(V(a), V(b));
    else return V(a) < V(b) ? V(b) : V(a);
}

// The fast intrinsics, as exact as the plain functions.
#define __expf expf
#define __logf logf
#define __log2f log2f
#define __powf powf
#define __sinf sinf
#define __cosf cosf
static inline float __fdividef(float a, float b) { return a / b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __frcp_rn(float a) { return 1.0f / a; }
static inline float __fsqrt_rn(float a) { return sqrtf(a); }
static inline float __frsqrt_rn(float a) { return float(1.0 / sqrt(double(a))); }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline double __dadd_rn(double a, double b) { return a + b; }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline float __saturatef(float x) { return !(x > 0.0f) ? 0.0f : x > 1.0f ? 1.0f : x; }
static inline int __float_as_int(float x) { return emulator::from_bits<int>(emulator::to_bits(x)); }
static inline unsigned int __float_as_uint(float x) { return emulator::from_bits<unsigned int>(emulator::to_bits(x)); }
static inline float __int_as_float(int x) { return emulator::from_bits<float>(emulator::to_bits(x)); }
static inline float __uint_as_float(unsigned int x) { return emulator::from_bits<float>(emulator::to_bits(x)); }
static inline long long __double_as_longlong(double x) { return (long long)emulator::to_bits(x); }
static inline double __longlong_as_double(long long x) { return emulator::from_bits<double>((unsigned long long)x); }
static inline float __int2float_rn(int x) { return float(x); }
static inline float __uint2float_rn(unsigned int x) { return float(x); }
static inline float __ll2float_rn(long long x) { return float(x); }
static inline float __double2float_rn(double x) { return float(x); }
static inline int __float2int_rn(float x) { return int(rintf(x)); }
static inline int __float2int_rz(float x) { return int(x); }
static inline int __float2int_rd(float x) { return int(floorf(x)); }
static inline unsigned int __float2uint_rn(float x) { return (unsigned int)rintf(x); }
static inline int __popc(unsigned int x) { return __builtin_popcount(x); }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
static inline unsigned int __brev(unsigned int x)
{
    unsigned int y = 0;
    for (int i = 0; i < 32; ++i) y |= (x >> i & 1u) << (31 - i);
    return y;
}
static inline unsigned int __umulhi(unsigned int a, unsigned int b) { return (unsigned int)((unsigned long long)a * b >> 32); }
static inline int __mulhi(int a, int b) { return int((long long)a * b >> 32); }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b)
{
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}

// ------------------------------------------------------------------------------------------------ launch, signature
namespace emulator {
// One letter for the kind of a type; `f`loat, `i`nteger, `u`nsigned, and the halves `h` and `b`.
template <class P> struct Kind
{
    static const char value = std::is_floating_point<P>::value ? 'f' : !std::is_integral<P>::value ? '?' : std::is_signed<P>::value ? 'i' : 'u';
};
// Four characters for a parameter: 'p'ointer or 'v'alue, 'c'onst or not, kind, and '0' + bytes of an element.
struct Parameter { char how, constant, kind, bytes; };
template <class P> struct Describe
{
    static constexpr Parameter value{'v', 'c', Kind<std::remove_cv_t<P>>::value, char('0' + sizeof(P))};
};
template <class P> struct Describe<P*>
{
    static constexpr Parameter value{'p', std::is_const<P>::value ? 'c' : 'w', Kind<std::remove_cv_t<P>>::value, char('0' + sizeof(P))};
};
template <class P> struct Describe<P* __restrict__> : Describe<P*> {};
template <class P> struct Describe<P* const> : Describe<P*> {};

template <int... I> struct Indices {};
template <int N, int... I> struct Count : Count<N - 1, N - 1, I...> {};
template <int... I> struct Count<0, I...> { using type = Indices<I...>; };

template <auto K> struct Launch;
template <class... A, void (*K)(A...)> struct Launch<K>
{
    template <int... I> static void call(void** a, Indices<I...>) { K(*reinterpret_cast<std::remove_const_t<A>*>(a[I])...); }
    static void body(void** a) { call(a, typename Count<sizeof...(A)>::type{}); }
    static const char* signature()
    {
        static constexpr Parameter parameters[] = {Describe<A>::value..., Parameter{0, 0, 0, 0}};
        return &parameters[0].how;
    }
};
static thread_local volatile char storage_is_there;  // the first access allocates the thread's copy
static char anchor;                                  // tells the scheduler which module calls
}  // namespace emulator

// EMULATOR_DYNAMIC_ARRAYS: the addresses of the module's arrays of dynamic shared memory, then a null pointer.
#define EMULATOR_API extern "C" __attribute__((visibility("default")))
#define EMULATOR_EXPORT(name, bound)                                                                                 \
    EMULATOR_API int emulator_launch__##name(const unsigned int* sizes, unsigned int dynamic_bytes, void** arguments) \
    {                                                                                                                \
        emulator::storage_is_there = 1;                                                                              \
        void* dynamic_arrays[] = {EMULATOR_DYNAMIC_ARRAYS nullptr};                                                  \
        return emulator_run(&emulator::Launch<&name>::body, sizes, bound, dynamic_bytes, arguments, dynamic_arrays,  \
                            &emulator::anchor);                                                                      \
    }                                                                                                                \
    EMULATOR_API const char* emulator_signature__##name() { return emulator::Launch<&name>::signature(); }
