// The gradient noise scale: the ratio of moving means of noise and signal, and these.
//
// A state is 3 doubles: the number of steps, and the means of noise and signal; null stands for
// zeros. `next` may be `state`. Outputs are written with =. Deterministic: every operation rounds once, in the order of
// the CPU backend, so both give the same bits.
//
// Launch: one thread.

#include "dtypes.cuh"

typedef Real<f64> Number;

__device__ __forceinline__ bool is_finite(Number x) { return fabs(x.value) <= LARGEST; }

extern "C" __global__ void noise_scale(const double* norms, const double* sizes, i64 count, const double* big_norm,
                                       double big_size, const double* state, double decay, double* scale,
                                       double* next) {
    const Number one = {1}, big = {big_size};
    Number total = {0}, squares = {0};
    for (i64 i = 0; i < count; ++i) {
        const Number norm = {norms[i]}, size = {sizes[i]};
        total = total + size;
        squares = squares + size * (norm * norm);
    }
    const Number small = total / Number{static_cast<double>(count)}, mean = squares / total;
    const Number square = Number{*big_norm} * Number{*big_norm};
    const Number signal = (big * square - small * mean) / (big - small);
    const Number noise = (mean - square) / (one / small - one / big);
    const Number steps = {state ? state[0] : 0};
    Number noises = {state ? state[1] : 0}, signals = {state ? state[2] : 0};
    const bool counts = is_finite(signal) && is_finite(noise);
    if (counts) {
        const Number equal = one / (steps + one), last = one - Number{decay};
        const Number weight = equal.value > last.value ? equal : last;
        noises = noises + weight * (noise - noises);
        signals = signals + weight * (signal - signals);
    }
    next[0] = counts ? (steps + one).value : steps.value;
    next[1] = noises.value;
    next[2] = signals.value;
    *scale = (noises / signals).value;
}
