// What both directions of batch normalisation share: which rows count, and the second pass's sums over chunks.
#pragma once
#include "channels.cuh"

#define FINISHED 8 // channels of a block of a second pass: of every chunk's results it reads whole sectors of 32 bytes
#define FEW_CHANNELS 16 // most of a block that does all passes: sectors of 32 bytes of every row

DEVICE int valid_rows(const int* batch_valid, int samples, int rows_per_sample)
{
    const int valid = *batch_valid;
    return (valid < 0 ? 0 : valid < samples ? valid : samples) * rows_per_sample;
}

// A block of a second pass: FINISHED channels side by side, blockDim.x / FINISHED strips of chunks above each other.
struct Finish {
    int channel, strip, strips;
};
DEVICE Finish finish_of()
{
    return {(int)(blockIdx.x * FINISHED + threadIdx.x % FINISHED), (int)threadIdx.x / FINISHED,
            (int)blockDim.x / FINISHED};
}

// Sum over the strips of each channel, in every thread of strip 0. `part`: shared memory of 256 doubles.
DEVICE double sum_of_strips(double v, double* part)
{
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    v += __shfl_xor_sync(FULL_WARP, v, 8);
    v += __shfl_xor_sync(FULL_WARP, v, 16);
    if (lane < FINISHED) part[warp * FINISHED + lane] = v;
    __syncthreads();
    if (warp == 0) {
        v = 0.0;
        for (int at = lane; at < warps * FINISHED; at += 32) v += part[at];
        v += __shfl_xor_sync(FULL_WARP, v, 8);
        v += __shfl_xor_sync(FULL_WARP, v, 16);
    }
    __syncthreads();
    return v;
}
