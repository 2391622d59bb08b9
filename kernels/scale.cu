// target = source * coefficient over a list of pairs of tensors, each pair of one dtype.
//
// One list may mix f16, bf16, f32 and f64. Results are those of a product in double, rounded once.
// The coefficient is a number or read on the device. A coefficient of 1 keeps every bit; in place, the
// launch then returns before it accesses any gradient. Targets are written with =. Deterministic:
// elements are independent.
//
// Launch: a warp per chunk, any grid, blockDim.x a multiple of 32. The last chunk is processed
// first, because the data that the norm read last are still in L2.

#include "scaling.cuh"

// Scales by *coefficient, or by `number` if `coefficient` is null.
extern "C" __global__ void __launch_bounds__(256, 3)
scale_grads(const __grid_constant__ TensorList list, const double* coefficient, double number, u32 in_place) {
    scale_all(list, number_of(coefficient, number), false, in_place);
}
