"""Exact sums of lists, compiled."""

import gradkit._cpu.compiled as compiled
from gradkit._calls.lists import ExactSums
from gradkit._dtypes import float_of

__all__ = ["exact_sums"]


def exact_sums(call: ExactSums) -> None:
    """Write the digits of each row's sum, and the sum of what is not finite behind them."""
    grads = [grad.ravel(order="K") for grad in call.grads]  # a copy if there are gaps
    dtypes = [float_of(grad.dtype).code for grad in grads]
    rows, count = [*call.rows], len(call.sums)
    compiled.exact_sums(int(call.norm_type), grads, dtypes, rows, count, call.sums)
