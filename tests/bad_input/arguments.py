"""Arguments that every function takes, and a record of their bytes."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from tests import strategies as draw_
from tests.problems import BATCH_TYPES, LAYER_TYPES
from tests.tolerances import DTYPES

R, C = 4, 6  # rows and columns of every norm's arguments


class Cell(NamedTuple):
    """One case of a row, for any backend."""

    name: str
    check: Callable


class Factory:
    """Makes arrays on a backend and remembers their bytes."""

    def __init__(self, backend):
        self.backend = backend
        self.arrays = []

    def __call__(self, host):
        array = self.backend.asarray(np.asarray(host))
        self.arrays.append(array)
        return array

    def read_only(self, host):
        return self.backend.read_only(self(host))

    def stretched(self, dtype, shape):
        return self.backend.stretched(self(np.ones((), dtype)), shape, (0,) * len(shape))

    def windows(self, dtype):
        step = np.dtype(dtype).itemsize
        return self.backend.stretched(self(np.ones(9, dtype)), (3, 4), (2 * step, step))

    def memory(self):
        return [self.backend.memory(array) for array in self.arrays]


class Parameter:
    """What holds a gradient but is none."""

    grad = np.ones(3)


class Sparse:
    """What looks like an array, and whose rows look like it too."""

    __module__ = "scipy.sparse"
    shape = (3, 3)

    def __iter__(self):
        return iter([self] * 3)


# Good arguments of every function; those of norms as (label, shape).
NORMS = {
    "layer_norm": {"x": (R, C), "scale": (C,), "bias": (C,)},
    "layer_norm_grad": {"dy": (R, C), "x": (R, C), "scale": (C,), "mean": (R,), "inv_std": (R,)},
    "layer_norm_inverse": {
        "y": (R, C), "scale": (C,), "bias": (C,), "mean": (R,), "inv_std": (R,)
    },
    "invertible_layer_norm_grad": {
        "dy": (R, C), "y": (R, C), "scale": (C,), "bias": (C,), "inv_std": (R,)
    },
    "rms_norm": {"x": (R, C), "scale": (C,)},
    "rms_norm_grad": {"dy": (R, C), "x": (R, C), "scale": (C,), "inv_std": (R,)},
    "batch_norm": {"x": (R, C), "scale": (C,), "bias": (C,)},
    "batch_norm_grad": {"dy": (R, C), "x": (R, C), "scale": (C,), "mean": (C,), "inv_std": (C,)},
}  # fmt: skip
RESULTS = {
    "layer_norm": {"y": (R, C), "mean": (R,), "inv_std": (R,)},
    "layer_norm_grad": {"dx": (R, C), "dscale": (C,), "dbias": (C,)},
    "layer_norm_inverse": {"x": (R, C)},
    "invertible_layer_norm_grad": {"dx": (R, C), "dscale": (C,), "dbias": (C,)},
    "rms_norm": {"y": (R, C), "inv_std": (R,)},
    "rms_norm_grad": {"dx": (R, C), "dscale": (C,)},
    "batch_norm": {"y": (R, C), "mean": (C,), "inv_std": (C,)},
    "batch_norm_grad": {"dx": (R, C), "dscale": (C,), "dbias": (C,)},
}
LISTS = {
    "grad_norm": {},
    "clip_grad_norm": {"max_norm": 0.1},
    "clip_by_global_norm": {"max_norm": 0.1},
    "scale_grads": {"coefficient": 0.5},
    "clip_grad_value": {"clip_value": 0.1},
    "zero_grad": {},
    "per_tensor_norms": {},
}
CLIPPERS = ("clip_grad_norm", "clip_by_global_norm")
WRITERS = ("clip_grad_norm", "scale_grads", "clip_grad_value", "zero_grad")
ACCUMULATORS = ("accumulate_grad", "accumulate_grad_v2")
LIST_ACCUMULATOR = "accumulate_grads"
GUARDS = ("spike_guard_init", "spike_guard_update")
FLOAT32 = LAYER_TYPES[0]


def values(dtype, *shape):
    return draw_.values(shape, dtype)


f64, f32 = partial(values, "float64"), partial(values, "float32")


def types_of(function):
    """The dtypes that a function takes: of (data; statistics; scale and bias)."""
    if function in NORMS:
        return BATCH_TYPES if "batch" in function else LAYER_TYPES
    return [(name, name, name) for name in DTYPES]


def role(types, label):
    """The dtype that an argument or a result has in a combination."""
    data, statistics, parameters = types
    if label in ("mean", "inv_std"):
        return statistics
    return parameters if label in ("scale", "bias", "dscale", "dbias") else data


def good(function, a, types=FLOAT32):
    """Arguments that the function takes."""
    data = types[0]
    if function in LISTS:
        return {"grads": [a(values(data, 3)), a(f64(2))], **LISTS[function]}
    if function in NORMS:
        return {
            label: a(values(role(types, label), *shape)) for label, shape in NORMS[function].items()
        }
    if function == LIST_ACCUMULATOR:
        shapes = ((R, C), (3,))
        return {label: [a(values(data, *n)) for n in shapes] for label in ("buffers", "grads")}
    if function in ACCUMULATORS:
        return {"buffer": a(values(data, R, C)), "grad": a(values(data, R, C))}
    return {
        "clip_coefficient": {"norm": 5.0, "max_norm": 1.0},
        "spike_guard_init": {"like": a(values(data, 3))},
        "spike_guard_update": {"state": a(np.array([30.0, 2.0, 0.5])), "norm": a(np.array(9.0))},
        "grads_of": {"parameters": [Parameter()]},
        "named_grads_of": {"named_parameters": {"w": Parameter()}},
        "names_of": {"grads": [a(values(data, 3))]},
    }[function]
