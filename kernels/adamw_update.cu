// A step of AdamW over a list of parameters, their gradients, moments and variances.
//
// updates_of_lists.cuh says what is read and written; moments come before variances. Nothing is accessed
// if *verdict is false. Deterministic: elements are independent.
//
// Launch: a warp per chunk, any grid, blockDim.x a multiple of 32.

#include "updates_of_lists.cuh"

#if AT_RANDOM
typedef Update<Adamw<Number>, 2, sizeof(STATE), sizeof(STATE), 1> Step;
#else
typedef Update<Adamw<Number>, 2, sizeof(STATE), sizeof(STATE)> Step;
#endif

// By what adamw_numbers.cu has computed, or by `numbers` if that is null; by *seed or seed_number.
extern "C" __global__ void __launch_bounds__(256, 2)
adamw_update(const __grid_constant__ TensorList list, const unsigned char* verdict,
             const AdamwNumbers<double>* computed, const AdamwNumbers<double> numbers, const u64* seed,
             u64 seed_number) {
    if (verdict && !*verdict) return;
    AdamwNumbers<double> by = numbers;
    if (computed) by = *computed;
    update_all(list, Step(Adamw<Number>(by), key_of(seed, seed_number)));
}
