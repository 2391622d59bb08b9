"""The compiled CPU backend: norms and lists in C++, all else as ``gradkit._numpy`` has it.

The module is a ``gradkit._calls.backend.Backend``. It cannot be imported if gradkit was installed
without compiled code. ``kernels/cpu`` has the source of ``compiled``.
"""

import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

import gradkit._cpu.compiled as compiled
from gradkit import _numpy
from gradkit._backend import LARGE, Array, Shape, Spec
from gradkit._calls.backend import OPERATIONS, Services, names_in
from gradkit._calls.channels import ChannelOperations
from gradkit._calls.lists import AccumulateGrad, AccumulateGradV2
from gradkit._calls.rows import RowOperations
from gradkit._cpu.exact import *
from gradkit._cpu.lists import *
from gradkit._cpu.norms import compiled_norm


def outputs(specs: Sequence[Spec | None]) -> list[Array | None]:
    """New arrays as these specs say, whose contents are undefined."""
    arrays: list[Array | None] = []
    for spec in specs:  # in C order without a frame for each, a tenth of a small call
        if spec is None:
            arrays.append(None)
            continue
        if math.prod(spec.shape) * spec.dtype.itemsize >= LARGE:
            arrays.append(spec.allocate(_large))
        else:
            array = spec.allocate(np.empty) if spec.order else np.empty(spec.shape, spec.dtype)
            arrays.append(array)
    return arrays


def _large(shape: Shape, dtype: np.dtype[Any]) -> Array:
    """A new array of memory that is kept for the next one when it is gone."""
    return compiled.memory(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)


def takes_memory(call: Any) -> bool:
    """True if compiled code alone makes the call: it reads tensors too, and NumPy does not."""
    if call.plan.widened:
        return False
    if isinstance(call, (AccumulateGrad, AccumulateGradV2)):
        return True
    types = call.plan.launcher
    return type(types) is int and types >= 0


for _name in names_in(ChannelOperations, RowOperations):
    globals()[_name] = compiled_norm(_name)

# NumPy's functions for all others. `__getattr__` would take half a microsecond of each call.
for _name in {*names_in(Services), *OPERATIONS}.difference(globals()):
    globals()[_name] = getattr(_numpy, _name)

if _wanted := os.environ.get("GRADKIT_CPU_ISA"):
    if _wanted not in compiled.instruction_sets():
        raise ValueError(
            f"GRADKIT_CPU_ISA is {_wanted!r}; this processor has {compiled.instruction_sets()}"
        )
    compiled.use_instruction_set(_wanted)
