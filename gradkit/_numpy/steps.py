"""The verdict that a step is taken, and parameters and states that are kept without one."""

import math

import numpy as np

from gradkit._calls.lists import KeepIf, StepVerdict
from gradkit._numpy.interrupts import Uninterrupted

__all__ = ["keep_if", "step_verdict"]


def step_verdict(call: StepVerdict) -> None:
    """``verdict``: the norm is finite and at most the limit, and nothing was found."""
    norm, indicator = float(call.norm), 0.0 if call.found_inf is None else float(call.found_inf)
    is_good = math.isfinite(norm) and norm <= float(call.limit) and indicator == 0
    np.copyto(call.verdict, is_good)


def keep_if(call: KeepIf) -> None:
    """``old = new``, byte for byte, if the verdict is true."""
    if not call.verdict:
        return
    with Uninterrupted():
        for new, old in zip(call.new, call.old, strict=True):
            np.copyto(old, new)
