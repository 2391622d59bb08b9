// The p-norm of gradients on several ranks, each with its own device.
//
//   rank_state: state[0..2] = a rank's status, digest and numbers; its Part follows
//   join_ranks: out = the norm, float64; found_inf = whether elements of any rank are NaN or infinite,
//               0 or 1, float64; factors for a clip. If a rank is at fault, only faults and
//               factors that change nothing are written.
//
// A state is 6 doubles: status, 0 for a rank that did not fail; digest, a number that identifies
// the call; numbers, another that identifies the values of scale and max_norm, which the host may
// not know; and the rank's Part, computed by norm_parts of norm.cu. -DORDER as there. Outputs are
// written with =. Deterministic: ranks are added in order, so that all of them get the same bits.
//
// Launch: one thread.

#include "norm_orders.cuh"

enum { STATUS, DIGEST, NUMBERS, PART, STATE = PART + 3 };

// One step of a digest: for each digest, a one-to-one function of the number. -0 counts as 0, and
// all NaN are alike. As in gradkit/_numpy/list_norms.py.
__device__ __forceinline__ u64 digested(u64 digest, double number) {
    const u64 bits = number != number ? 0x7ff8000000000000u : number == 0 ? 0 : __double_as_longlong(number);
    digest = (digest ^ bits) * 0x9e3779b97f4a7c15u;
    return digest ^ digest >> 32;
}

// A digest of a call's numbers: a whole number that a double holds.
__device__ __forceinline__ double digest_of(double scale, double max_norm) {
    return static_cast<double>(digested(digested(0, scale), max_norm) >> 11);
}

// `scale` and `max_norm` are on the device, or null for the numbers after them.
extern "C" __global__ void rank_state(double digest, const double* scale, double number, const double* max_norm,
                                      double limit, double* state) {
    state[STATUS] = 0;
    state[DIGEST] = digest;
    state[NUMBERS] = digest_of(number_of(scale, number), number_of(max_norm, limit));
}

// Why no rank writes anything: 0, or 1 for a rank that failed, 2 for one that made another call, 3
// for one that passed other numbers.
__device__ __forceinline__ double fault_of(const double* state, double digest, double numbers) {
    const bool failed = state[STATUS] != 0, differs = state[DIGEST] != digest, other = state[NUMBERS] != numbers;
    return failed ? 1 : differs ? 2 : other ? 3 : 0;
}

// True if no rank is at fault. A fault goes where none is noted yet.
__device__ __forceinline__ bool all_agree(const double* state, u32 ranks, double digest, double numbers,
                                          double* faults) {
    bool agree = true;  // no write in this loop, or a load would wait for it
    for (u32 r = 0; r < ranks; ++r) agree &= fault_of(state + r * STATE, digest, numbers) == 0;
    for (u32 r = 0; !agree && r < ranks; ++r) {
        const double fault = fault_of(state + r * STATE, digest, numbers);
        if (fault != 0 && faults[r] == 0) faults[r] = fault;
    }
    return agree;
}

// The Part of all ranks' gradients.
__device__ __forceinline__ Part joined(const double* state, u32 ranks, double p, bool& finite) {
    Part all = {0, 0, 0};
    for (u32 r = 0; r < ranks; ++r, state += STATE) {
        const Part own = {state[PART], state[PART + 1], state[PART + 2]};
        finite = finite && fabs(own.hi) <= LARGEST;
        ORDER::combine(all, own, p);
    }
    return all;
}

__device__ __forceinline__ void write_norm(unsigned char* out, double norm) {
    write<1>(reinterpret_cast<f64*>(out), Raw<f64, 1>{{norm}});
}

// `digest` stands for this rank's call; its scale and limit are on the device, or null for the
// numbers after them. `factors` becomes the norm, the scale and the limit that a clip computes its
// coefficient from. If a rank is at fault, these are 0, 1 and infinity, a coefficient of 1, and out
// (NaN if it is `fresh`) and found_inf keep their bits. `out` need not be aligned; `found_inf` may
// be null.
extern "C" __global__ void join_ranks(const double* __restrict__ states, u32 ranks, double digest, double p,
                                      const double* scale, double number, const double* max_norm,
                                      double limit, u32 fresh, unsigned char* out, double* found_inf,
                                      double* faults, double* factors) {
    const double by = number_of(scale, number), most = number_of(max_norm, limit);
    if (!all_agree(states, ranks, digest, digest_of(by, most), faults)) {
        factors[0] = 0;
        factors[1] = 1;
        factors[2] = __longlong_as_double(0x7ff0000000000000);
        if (fresh) write_norm(out, __longlong_as_double(0x7ff8000000000000));
        return;
    }
    bool finite = true;
    factors[0] = norm_of<ORDER>(joined(states, ranks, p, finite), p, fabs(by));
    factors[1] = by;
    factors[2] = most;
    write_norm(out, factors[0]);
    if (found_inf) *found_inf = finite ? 0 : 1;
}
