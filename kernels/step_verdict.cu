// True if a step is taken: the norm is finite and at most a limit, and nothing was found.
//
// With *max_norm, or `limit` if `max_norm` is null. `found_inf`: one number, or null. The verdict is
// written with =: 1 or 0. A limit or a found_inf that is NaN gives 0. Deterministic.
//
// Launch: one thread.

#include "dtypes.cuh"

extern "C" __global__ void step_verdict(const double* norm, const double* max_norm, double limit,
                                        const double* found_inf, unsigned char* verdict) {
    const double found = found_inf ? *found_inf : 0, most = max_norm ? *max_norm : limit;
    *verdict = fabs(*norm) <= LARGEST && *norm <= most && found == 0;
}
