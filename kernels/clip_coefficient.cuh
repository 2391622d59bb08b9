// The factor for gradients of a given norm, on GPUs and CPUs.
//
// A file that includes this defines INLINE and NOT_A_DOUBLE.

#pragma once

// min(1, max_norm / max(norm, eps)): exactly 1 if norm <= max_norm, NaN if norm is NaN (fmin and
// fmax would turn NaN into "do not clip") or if max_norm, which the host may not know, is negative.
// An eps below 0 is added instead: min(1, max_norm / (norm - eps)).
INLINE double clip_coefficient_of(double norm, double max_norm, double eps) {
    if (eps < 0) norm -= eps;
    if (norm <= max_norm) return 1;
    if (max_norm < 0) return NOT_A_DOUBLE;
    return max_norm / (norm < eps ? eps : norm);
}
