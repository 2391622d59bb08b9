// The factors of a step of AdamW, from numbers some of which the device holds, and the step's count.
//
// Written with =, and *step with += 1; neither if *verdict is false. Each number is read from its array, or
// is the one behind it if that is null. By the operations of gradkit/_numpy/updates.py, with its bits.
//
// Launch: one thread.

#include "dtypes.cuh"

typedef Real<f64> Number;

// A power by repeated squares.
__device__ Number power(double base, i64 exponent) {
    Number result = {1}, square = {base};
    for (; exponent > 0; exponent >>= 1) {
        if (exponent & 1) result = result * square;
        square = square * square;
    }
    return result;
}

// In the order of AdamwNumbers in updates.cuh.
extern "C" __global__ void adamw_numbers(const unsigned char* verdict, i64* step, i64 step_number, const double* lr,
                                         double lr_number, const double* scale, double scale_number, double beta1,
                                         double beta2, double eps, double weight_decay, double* numbers) {
    if (verdict && !*verdict) return;
    const i64 number = step ? ++*step : step_number;
    const Number one = {1}, rate = {lr ? *lr : lr_number}, share = one - Number{beta1};
    numbers[0] = scale ? *scale : scale_number;
    numbers[1] = share.value > 0.5 ? (share - one).value : share.value;
    numbers[2] = beta2;
    numbers[3] = (one - Number{beta2}).value;
    numbers[4] = (rate / (one - power(beta1, number))).value;
    numbers[5] = (one / Number{__dsqrt_rn((one - power(beta2, number)).value)}).value;
    numbers[6] = eps;
    numbers[7] = (rate * Number{weight_decay}).value;
}
