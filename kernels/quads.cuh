// Flat float memory, four elements (16 bytes) at a time. Spans and tensors begin at multiples of 256 bytes; what is left
// over at their end is done one by one.
#pragma once
#include "dialect.cuh"

typedef Pack<float, 4> Quad;

template <class T> DEVICE Pack<T, 4>& quad(T* p, long long at) { return reinterpret_cast<Pack<T, 4>*>(p)[at]; }
template <class T> DEVICE const Pack<T, 4>& quad(const T* p, long long at)
{
    return reinterpret_cast<const Pack<T, 4>*>(p)[at];
}

// Calls four(q) for elements 4q to 4q+3 and one(i) for each element that is left, over all threads of the grid.
template <class Four, class One> DEVICE void walk(long long n, Four four, One one)
{
    const long long quads = n >> 2, step = index_step();
    for (long long q = first_index(); q < quads; q += step) four(q);
    const long long left = 4 * quads + first_index();
    if (left < n) one(left);
}
