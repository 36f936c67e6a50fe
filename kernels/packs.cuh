// Element-wise kernels move 16 bytes of each operand at a time; the few elements after the last 16 bytes go one by one.
#pragma once
#include "dialect.cuh"

template <class T> constexpr int WIDTH = 16 / int(sizeof(T));
template <class T> using Line = Pack<T, WIDTH<T>>;

template <class T> DEVICE Line<T> load_line(const T* from) { return *reinterpret_cast<const Line<T>*>(from); }
template <class T> DEVICE void store_line(T* to, const Line<T>& line) { *reinterpret_cast<Line<T>*>(to) = line; }

// The element after the last whole line that is this thread's, or one past the end: there is one for each of the first
// threads of the grid.
template <class T> DEVICE long long leftover(long long n) { return n / WIDTH<T> * WIDTH<T> + first_index(); }

// y[i] = f(a[i]) in float, rounded once; the addresses are multiples of 16 and y may be a.
template <class T, class F> DEVICE void map(const T* a, T* y, long long n, F f)
{
    for (long long at = first_index() * WIDTH<T>; at + WIDTH<T> <= n; at += index_step() * WIDTH<T>) {
        const Line<T> from = load_line(a + at);
        Line<T> to;
#pragma unroll
        for (int i = 0; i < WIDTH<T>; ++i) to.at[i] = from_float<T>(f(to_float(from.at[i])));
        store_line(y + at, to);
    }
    const long long last = leftover<T>(n);
    if (last < n) y[last] = from_float<T>(f(to_float(a[last])));
}

// y[i] = f(a[i], b[i]); y may be a or b.
template <class T, class F> DEVICE void map(const T* a, const T* b, T* y, long long n, F f)
{
    for (long long at = first_index() * WIDTH<T>; at + WIDTH<T> <= n; at += index_step() * WIDTH<T>) {
        const Line<T> left = load_line(a + at), right = load_line(b + at);
        Line<T> to;
#pragma unroll
        for (int i = 0; i < WIDTH<T>; ++i) to.at[i] = from_float<T>(f(to_float(left.at[i]), to_float(right.at[i])));
        store_line(y + at, to);
    }
    const long long last = leftover<T>(n);
    if (last < n) y[last] = from_float<T>(f(to_float(a[last]), to_float(b[last])));
}
