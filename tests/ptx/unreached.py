"""Lines of the kernels that no test reaches in compiled code, and why.

``python -m tests.ptx.unreached REPORT.json ...`` reads what ``GRADKIT_PTX_REPORT`` made the suite
write. A line stands for the basic blocks that begin with it, under all macros and architectures
together. The exit status is 1 where a line has no reason below.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from testbed.ptx import Coverage, merge, summary, unreached

_LONG_QUOTIENT = "a quotient of 64 bits: no memory holds 2^32 packs"
_NO_ORDER = "copies for p = 0, which is no order of a norm"
_ONE_BY_ONE = "general powers go one by one: the first loop over a run leaves nothing"
_IN_STEP = (
    "arrays that are added with their norm in one launch have no gaps, and packs at the same places"
)
_AT_STRIDES = "copies for runs at odd addresses: arrays there are walked element by element instead"
_SOME_DIMS = "copies of walks over no dimension, where there is one at least"
_ALWAYS_PARTS = "copies for no partial sums of a row, and there is one at least"
_NEVER_NULL = "copies for statistics that are absent, and they never are"
# A kernel, a part of its line, and why no block that begins there runs.
REASONS = (
    ("normalize", "run = first / packs;", _LONG_QUOTIENT),
    ("apply_channels", "run = first / packs;", _LONG_QUOTIENT),
    ("sum_channels", "run = first / packs;", _LONG_QUOTIENT),
    ("infer_gradient", "run = first / packs;", _LONG_QUOTIENT),
    ("clip_grad_value", "if (x != x) y.bits", "what is narrowed is a limit, which is never NaN"),
    (
        "clip_grad_value",
        "const u32 top = __float_as_uint(rounded(limit));",
        "in place, less than a warp's share of single elements lies around the packs",
    ),
    ("norm_partials", "op.fetch(held, source + at", _ONE_BY_ONE),
    ("norm_partials", "part.lo = __dadd_rn(part.lo, lost);", _ONE_BY_ONE),
    ("norm_partials", "other.scale = __shfl_xor_sync", _NO_ORDER),
    ("norm_finish", "combine_scaled<SumOfPowers>", _NO_ORDER),
    ("norms_finish", "combine_scaled<SumOfPowers>", _NO_ORDER),
    ("norm_finish", "other.scale = __shfl_xor_sync", _NO_ORDER),
    ("norms_finish", "other.scale = __shfl_xor_sync", _NO_ORDER),
    ("norm_parts", "combine_scaled<SumOfPowers>", _NO_ORDER),
    ("norm_parts", "other.scale = __shfl_xor_sync", _NO_ORDER),
    ("unit_norm_partials", "other.scale = __shfl_xor_sync", _NO_ORDER),
    ("unit_norm_finish", "other.scale = __shfl_xor_sync", _NO_ORDER),
    ("unit_norm_partials", "op.fetch(held, source + at", _ONE_BY_ONE),
    ("accumulate_grads", "if (is_time_to_rest(count - i, WARP)) op.rest();", _IN_STEP),
    ("accumulate_grads", "return result;", _IN_STEP),
    ("accumulate_grads", "held.target = load", "copies for a -0 that is rounded, and it is exact"),
    ("accumulate_grad_v2", "return fetch<N>(from);", _SOME_DIMS),
    ("accumulate_grad_v2", "return __uint_as_float(bits | 1);", _SOME_DIMS),
    ("clip_units", "__trap();  // a dtype without a row", "no list holds another dtype"),
    ("clip_units", "return value;", _AT_STRIDES),
    ("scale_grads", "return value;", _AT_STRIDES),
    ("apply_gradient", "for (int b = 0; b < AT_ONCE; ++b) {", _ALWAYS_PARTS),
    ("apply_gradient", "SINGLE_OPERATION(", _ALWAYS_PARTS),
    ("apply_gradient", "double product_of(double a, double b)", _ALWAYS_PARTS),
    ("normalize", "double difference_of(double a, double b)", _NEVER_NULL),
    ("normalize_groups", "start = sample * of.space * of.channels;", _NEVER_NULL),
)


def main(paths: list[str]) -> int:
    """Print how much ran and what did not; the exit status."""
    total: Coverage = {}
    for path in paths:
        for kernel, titles in json.loads(Path(path).read_text()).items():
            ours = {title: ran for title, ran in titles.items() if title.startswith("sm_")}
            merge(total, {kernel: ours})
    print(summary(total))
    status = 0
    for kernel, line, reason in explained(total):
        print(f"  {kernel}: {line}\n    {reason or 'NO REASON'}")
        status = status or int(not reason)
    return status


def explained(coverage: Coverage) -> Iterator[tuple[str, str, str]]:
    """Each line that no test reached, with its kernel and the reason, which may be empty."""
    for kernel, lines in unreached(coverage).items():
        for line in lines:
            reasons = (why for of, part, why in REASONS if of == kernel and part in line)
            yield kernel, line, next(reasons, "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
