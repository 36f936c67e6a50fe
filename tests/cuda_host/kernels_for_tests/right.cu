// Kernels of every feature of the dialect, right ones.
#include "dialect.cuh"

// From macros, as all kernels that are there once for each type.
template <class T> DEVICE void scale_packs(const T* x, T* y, float factor, long long n)
{
    const long long packs = n / 8;
    for (long long i = first_index(); i < packs; i += index_step())
    {
        Pack<T, 8> v = reinterpret_cast<const Pack<T, 8>*>(x)[i];
#pragma unroll
        for (int k = 0; k < 8; ++k) v.at[k] = from_float<T>(factor * to_float(v.at[k]));
        reinterpret_cast<Pack<T, 8>*>(y)[i] = v;
    }
    for (long long i = packs * 8 + first_index(); i < n; i += index_step()) y[i] = from_float<T>(factor * to_float(x[i]));
}
#define EXPORT(suffix, T)                                                                                          \
    extern "C" __global__ void __launch_bounds__(256) scale_##suffix(const T* x, T* y, float factor, long long n)  \
    {                                                                                                              \
        scale_packs(x, y, factor, n);                                                                              \
    }
FOR_EACH_FLOAT(EXPORT)
#undef EXPORT

// Sums of rows in a block of three dimensions, in float and double.
extern "C" __global__ void __launch_bounds__(1024)
    row_sums(const float* __restrict__ x, float* __restrict__ sums, double* __restrict__ exact, int columns)
{
    __shared__ float part[32];
    __shared__ double double_part[32];
    const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    const int step = blockDim.x * blockDim.y * blockDim.z;
    float sum = 0.0f;
    for (int i = thread; i < columns; i += step) sum += x[blockIdx.x * columns + i];
    const double whole = block_sum((double)sum, double_part);
    sum = block_sum(sum, part);
    if (thread == 0)
    {
        sums[blockIdx.x] = sum;
        exact[blockIdx.x] = whole;
    }
}
// Columns of a matrix in dynamic shared memory, from the last row to the first.
extern "C" __global__ void flip_rows(const __half* x, __half* y, int rows)
{
    extern __shared__ __half rows_of_column[];
    for (int i = threadIdx.x; i < rows; i += blockDim.x) rows_of_column[i] = x[i * gridDim.x + blockIdx.x];
    __syncthreads();
    for (int i = threadIdx.x; i < rows; i += blockDim.x) y[i * gridDim.x + blockIdx.x] = rows_of_column[rows - 1 - i];
}
extern "C" __global__ void count_positive(const float* x, int* count, unsigned int* lanes, int n)
{
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    const bool positive = i < n && x[i] > 0.0f;
    const unsigned int which = __ballot_sync(FULL_WARP, positive);
    if ((threadIdx.x & 31) == 0)
    {
        lanes[i >> 5] = which;
        atomicAdd(count, __popc(which));
    }
    __syncwarp();
}
extern "C" __global__ void high_words(const unsigned int* x, unsigned int* y, unsigned int factor, int n)
{
    for (int i = threadIdx.x; i < n; i += blockDim.x)
    {
        y[2 * i] = __umulhi(x[i], factor);
        y[2 * i + 1] = (unsigned int)((unsigned long long)x[i] * factor);
    }
}
// Votes of a block, one right after the other.
extern "C" __global__ void votes(const int* x, int* counts)
{
    const int positive = __syncthreads_count(x[threadIdx.x] > 0), any = __syncthreads_or(x[threadIdx.x] > 1);
    const int all = __syncthreads_and(x[threadIdx.x] > 0);
    counts[threadIdx.x] = positive * 100 + any * 10 + all;
}
