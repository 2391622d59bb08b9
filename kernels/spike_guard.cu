// One step of spike guards: the limit for each gradient norm, and the updated statistics.
//
// A state is 3 doubles: the number of norms seen, their mean, and their standard deviation. `next`
// may be `states`. Outputs are written with =. Deterministic: every operation rounds once, in the
// order of the CPU backend, so both give the same bits.
//
// Launch: a thread per norm, any grid, one-dimensional blocks.

#include "dtypes.cuh"

typedef Real<f64> Number;

__device__ __forceinline__ Number infinity() { return {__longlong_as_double(0x7ff0000000000000ll)}; }
__device__ __forceinline__ Number root_of(Number x) { return {__dsqrt_rn(x.value)}; }
__device__ __forceinline__ bool is_finite(Number x) { return fabs(x.value) <= LARGEST; }

// mean + margin, with margin = threshold * deviation; for a spike that is clipped to it,
// mean + margin^2 / (norm - mean).
__device__ Number limit_for(Number norm, Number mean, Number deviation, Number threshold, bool clips) {
    const Number margin = threshold * deviation, limit = mean + margin;
    if (!(clips && norm.value > limit.value && is_finite(norm))) return limit;
    return mean + margin * (margin / (norm - mean));
}

// sqrt(keep * (deviation^2 + weight * d^2)), whose squares stay near 1.
__device__ Number deviation_with(Number deviation, Number d, Number keep, Number weight) {
    const Number largest = {fmax(deviation.value, fabs(d.value))};
    if (largest.value == 0) return largest;
    const Number x = deviation / largest, y = d / largest;
    return largest * root_of(keep * (x * x + weight * y * y));
}

__device__ void step(const double* state, double norm, Number kept, Number threshold, double warmup, bool clips,
                     double* next, double* max_norm) {
    const Number count = {state[0]}, mean = {state[1]}, deviation = {state[2]}, value = {norm};
    const Number one = {1};
    const bool starting = count.value < warmup;
    const bool judges = !starting && deviation.value > 0;
    const Number limit = judges ? limit_for(value, mean, deviation, threshold, clips) : infinity();
    *max_norm = limit.value;

    const bool counts = value.value >= 0 && is_finite(value);  // a NaN does not
    const Number d = (value.value > limit.value ? limit : value) - mean;
    // The first norms have equal weights; `rest` makes the paper's variance of the later ones.
    const Number weight = starting ? one / (count + one) : one - kept;
    const Number keep = starting ? one - weight : kept, rest = starting ? one : kept;
    const Number spread = deviation_with(deviation, d, keep, weight * rest);
    next[0] = counts ? (count + one).value : count.value;
    next[1] = counts ? (mean + weight * d).value : mean.value;
    next[2] = counts ? spread.value : deviation.value;
}

extern "C" __global__ void spike_guard_update(const double* states, const double* norms, double decay,
                                              double threshold, double warmup, u32 clips, i64 count,
                                              double* next, double* max_norms) {
    const i64 step_size = static_cast<i64>(gridDim.x) * blockDim.x;
    for (i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step_size)
        step(states + 3 * i, norms[i], {decay}, {threshold}, warmup, clips, next + 3 * i, max_norms + i);
}
