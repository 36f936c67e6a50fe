// What a step counts: one thread, a few scalars. Law 5: what persists stays as it is while has_nan is set.
#include "dialect.cuh"

#define SCALAR_KERNEL extern "C" __global__ void __launch_bounds__(32)
#define ONLY_ONE_THREAD if (blockIdx.x != 0 || threadIdx.x != 0) return

#define LARGEST_SCALE 2147483648.0f
#define GROWTH 2.0f
// Largest relative error of rounding to float.
#define ROUNDING 5.9604644775390625e-8

// 1 / (1 - beta^t), in double by squaring: the order of the products depends on t alone.
DEVICE float bias_correction(float beta, int t)
{
    double power = 1.0, base = beta;
    for (int left = t; left > 0; left >>= 1) {
        if (left & 1) power *= base;
        base *= base;
    }
    return (float)(1.0 / (1.0 - power));
}

// step and next_step may be one tensor, as in every kernel here whose state goes in and out.
SCALAR_KERNEL adam_step(const int* has_nan, const int* step, const float* beta, const float* beta2, int* next_step,
                        float* correction, float* correction2)
{
    ONLY_ONE_THREAD;
    if (has_nan[0] != 0) return;
    const int t = step[0] + 1;
    next_step[0] = t;
    correction[0] = bias_correction(beta[0], t);
    correction2[0] = bias_correction(beta2[0], t);
}

// A step that is tried again draws the same masks.
SCALAR_KERNEL dropout_advance(const int* has_nan, const int* step, int* next_step)
{
    ONLY_ONE_THREAD;
    if (has_nan[0] == 0) next_step[0] = step[0] + 1;
}

SCALAR_KERNEL flag_or(const int* a, const int* b, int* either)
{
    ONLY_ONE_THREAD;
    either[0] = (a[0] | b[0]) != 0 ? 1 : 0;
}

// The loss scale: down after an overflow, up after `interval` clean steps in a row.
SCALAR_KERNEL grad_scaling(const int* has_nan, const float* scaling, const int* good_steps, float* next_scaling,
                           int* next_good_steps, int interval, float backoff, float least)
{
    ONLY_ONE_THREAD;
    float scale = scaling[0];
    int good = good_steps[0] + 1;
    if (has_nan[0] != 0) {
        scale = fmaxf(least, scale * backoff);
        good = 0;
    } else if (good >= interval) {
        scale = fminf(LARGEST_SCALE, scale * GROWTH);
        good = 0;
    }
    next_scaling[0] = scale;
    next_good_steps[0] = good;
}

// sum + valid * value, rounded once; a product within float's rounding of a whole number (of hits) is that number, so
// that sums of rates are exact numbers of hits up to 2^24.
DEVICE float accumulated(float sum, float value, int valid)
{
    double product = (double)valid * (double)value;
    const double whole = floor(product + 0.5);
    if (fabs(product - whole) <= fabs(product) * ROUNDING) product = whole;
    return (float)((double)sum + product);
}
DEVICE void accumulate(int valid, const float* loss, const float* top1, const float* top5, float* sum_loss,
                       float* sum_top1, float* sum_top5, float* count)
{
    sum_loss[0] = accumulated(sum_loss[0], loss[0], valid);
    sum_top1[0] = accumulated(sum_top1[0], top1[0], valid);
    sum_top5[0] = accumulated(sum_top5[0], top5[0], valid);
    count[0] += (float)valid;
}
SCALAR_KERNEL accumulate_metrics(const int* valid, const float* loss, const float* top1, const float* top5,
                                 float* sum_loss, float* sum_top1, float* sum_top5, float* count)
{
    ONLY_ONE_THREAD;
    accumulate(valid[0], loss, top1, top5, sum_loss, sum_top1, sum_top5, count);
}
SCALAR_KERNEL accumulate_metrics_unless(const int* valid, const float* loss, const float* top1, const float* top5,
                                        const int* has_nan, float* sum_loss, float* sum_top1, float* sum_top5,
                                        float* count)
{
    ONLY_ONE_THREAD;
    if (has_nan[0] == 0) accumulate(valid[0], loss, top1, top5, sum_loss, sum_top1, sum_top5, count);
}

// The scalars that the host owns, from where they were copied to to where a step reads them.
SCALAR_KERNEL stage_scalars(const float* lr_in, const int* valid_in, float* lr, int* valid)
{
    ONLY_ONE_THREAD;
    lr[0] = lr_in[0];
    valid[0] = valid_in[0];
}
