// A step of SGD over a list of parameters, their gradients and, with -DMOMENTA=1, momenta.
//
// updates_of_lists.cuh says what is read and written. Nothing is accessed if *verdict is false.
// Deterministic: elements are independent.
//
// Launch: a warp per chunk, any grid, blockDim.x a multiple of 32.

#include "updates_of_lists.cuh"

#if MOMENTA && AT_RANDOM
typedef Update<Sgd<Number>, 1, sizeof(STATE), 1> Step;
#elif MOMENTA
typedef Update<Sgd<Number>, 1, sizeof(STATE)> Step;
#elif AT_RANDOM
typedef Update<Sgd<Number>, 0, 1> Step;
#else
typedef Update<Sgd<Number>, 0> Step;
#endif

// By *lr, *scale and *seed, or by the number behind each that is null.
extern "C" __global__ void __launch_bounds__(256, 2)
sgd_update(const __grid_constant__ TensorList list, const double* lr, double lr_number, double momentum, u32 nesterov,
           double weight_decay, const double* scale, double scale_number, const unsigned char* verdict,
           const u64* seed, u64 seed_number) {
    if (verdict && !*verdict) return;
    const Sgd<Number> rule(number_of(lr, lr_number), number_of(scale, scale_number), momentum, weight_decay, nesterov != 0);
    update_all(list, Step(rule, key_of(seed, seed_number)));
}
