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
    "add_layer_norm": {"x": (R, C), "residual": (R, C), "scale": (C,), "bias": (C,)},
    "layer_norm_grad": {"dy": (R, C), "x": (R, C), "scale": (C,), "mean": (R,), "inv_std": (R,)},
    "layer_norm_inverse": {
        "y": (R, C), "scale": (C,), "bias": (C,), "mean": (R,), "inv_std": (R,)
    },
    "invertible_layer_norm_grad": {
        "dy": (R, C), "y": (R, C), "scale": (C,), "bias": (C,), "inv_std": (R,)
    },
    "rms_norm": {"x": (R, C), "scale": (C,)},
    "add_rms_norm": {"x": (R, C), "residual": (R, C), "scale": (C,)},
    "rms_norm_grad": {"dy": (R, C), "x": (R, C), "scale": (C,), "inv_std": (R,)},
    "batch_norm": {"x": (R, C), "scale": (C,), "bias": (C,)},
    "batch_norm_grad": {"dy": (R, C), "x": (R, C), "scale": (C,), "mean": (C,), "inv_std": (C,)},
    "batch_norm_inference": {
        "x": (R, C), "scale": (C,), "bias": (C,), "mean": (C,), "var": (C,)
    },
    "batch_norm_inference_grad": {
        "dy": (R, C), "x": (R, C), "scale": (C,), "mean": (C,), "var": (C,)
    },
    "group_norm": {"x": (R, C), "scale": (C,), "bias": (C,)},
    "group_norm_grad": {
        "dy": (R, C), "x": (R, C), "scale": (C,), "mean": (R, 3), "inv_std": (R, 3)
    },
    "batch_norm_stats": {"x": (R, C)},
    "combine_stats": {"means": (R, C), "variances": (R, C), "counts": (R,)},
    "batch_norm_apply": {"x": (R, C), "scale": (C,), "bias": (C,), "mean": (C,), "var": (C,)},
    "batch_norm_grad_sums": {"dy": (R, C), "x": (R, C), "mean": (C,), "inv_std": (C,)},
    "batch_norm_grad_apply": {
        "dy": (R, C), "x": (R, C), "scale": (C,), "mean": (C,), "inv_std": (C,),
        "sum_dy_xhat": (C,), "sum_dy": (C,),
    },
}  # fmt: skip
# Which of their arguments and results are float64 whatever the data is, and what is a number.
WIDE = {
    "batch_norm_stats": ("mean", "var", "count"),
    "combine_stats": ("means", "variances", "counts", "mean", "var", "count"),
    "batch_norm_apply": ("mean", "var"),
    "batch_norm_grad_sums": ("sum_dy_xhat", "sum_dy"),
    "batch_norm_grad_apply": ("sum_dy_xhat", "sum_dy"),
}
NUMBERS = {"batch_norm_grad_apply": {"count": 4.0}, "group_norm": {"num_groups": 3}}
RESULTS = {
    "layer_norm": {"y": (R, C), "mean": (R,), "inv_std": (R,)},
    "add_layer_norm": {"y": (R, C), "s": (R, C), "mean": (R,), "inv_std": (R,)},
    "layer_norm_grad": {"dx": (R, C), "dscale": (C,), "dbias": (C,)},
    "layer_norm_inverse": {"x": (R, C)},
    "invertible_layer_norm_grad": {"dx": (R, C), "dscale": (C,), "dbias": (C,)},
    "rms_norm": {"y": (R, C), "inv_std": (R,)},
    "add_rms_norm": {"y": (R, C), "s": (R, C), "inv_std": (R,)},
    "rms_norm_grad": {"dx": (R, C), "dscale": (C,)},
    "batch_norm": {"y": (R, C), "mean": (C,), "inv_std": (C,)},
    "batch_norm_grad": {"dx": (R, C), "dscale": (C,), "dbias": (C,)},
    "batch_norm_inference": {"y": (R, C)},
    "batch_norm_inference_grad": {"dx": (R, C), "dscale": (C,), "dbias": (C,)},
    "group_norm": {"y": (R, C), "mean": (R, 3), "inv_std": (R, 3)},
    "group_norm_grad": {"dx": (R, C), "dscale": (C,), "dbias": (C,)},
    "batch_norm_stats": {"mean": (C,), "var": (C,), "count": ()},
    "combine_stats": {"mean": (C,), "var": (C,), "count": ()},
    "batch_norm_apply": {"y": (R, C), "saved_mean": (C,), "inv_std": (C,)},
    "batch_norm_grad_sums": {"sum_dy_xhat": (C,), "sum_dy": (C,)},
    "batch_norm_grad_apply": {"dx": (R, C)},
}
# Norms that take a gradient beside dy, and norms whose scale may have an offset.
PASSED_BY = ("layer_norm_grad", "rms_norm_grad")
SHIFTED = ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm", *PASSED_BY)
LISTS = {
    "grad_norm": {},
    "clip_grad_norm": {"max_norm": 0.1},
    "clip_by_global_norm": {"max_norm": 0.1},
    "scale_grads": {"coefficient": 0.5},
    "clip_grad_value": {"clip_value": 0.1},
    "zero_grad": {},
    "per_tensor_norms": {},
    "clip_grad_block_norm": {"max_norm": 0.1, "axis": -1},
    "clip_by_block_norm": {"max_norm": 0.1},
    "clip_grad_adaptive": {"axis": 0},
    "clip_by_adaptive_norm": {},
}
CLIPPERS = ("clip_grad_norm", "clip_by_global_norm")
BLOCK_CLIPPERS = ("clip_grad_block_norm", "clip_by_block_norm")
ADAPTIVE = ("clip_grad_adaptive", "clip_by_adaptive_norm")
WRITERS = (
    *("clip_grad_norm", "scale_grads", "clip_grad_value", "zero_grad"),
    *(BLOCK_CLIPPERS[0], ADAPTIVE[0]),
)
ACCUMULATORS = ("accumulate_grad", "accumulate_grad_v2")
LIST_ACCUMULATOR = "accumulate_grads"
GUARDS = ("spike_guard_init", "spike_guard_update")
RUNNING = "update_running_statistics"
FLOAT32, FLOAT64 = LAYER_TYPES[:2]


def values(dtype, *shape):
    return draw_.values(shape, dtype)


f64, f32 = partial(values, "float64"), partial(values, "float32")


def types_of(function):
    """The dtypes that a function takes: of (data; statistics; scale and bias)."""
    if function == "combine_stats":
        return [FLOAT64]
    if function in NORMS:
        return BATCH_TYPES if "batch" in function else LAYER_TYPES
    return [(name, name, name) for name in DTYPES]


def role(types, label, function=""):
    """The dtype that an argument or a result has in a combination."""
    data, statistics, parameters = types
    if label in WIDE.get(function, ()):
        return "float64"
    if label in ("mean", "saved_mean", "inv_std", "var"):
        return statistics
    return parameters if label in ("scale", "bias", "dscale", "dbias") else data


def good(function, a, types=FLOAT32):
    """Arguments that the function takes."""
    data = types[0]
    if function in LISTS:
        given = {"grads": [a(values(data, 3)), a(f64(2))], **LISTS[function]}
        if function in ADAPTIVE:
            given["params"] = [a(values(data, 3)), a(f64(2))]
        return given
    if function in NORMS:
        dtypes = {label: role(types, label, function) for label in NORMS[function]}
        given = {label: a(values(dtypes[label], *n)) for label, n in NORMS[function].items()}
        return given | NUMBERS.get(function, {})
    if function == LIST_ACCUMULATOR:
        shapes = ((R, C), (3,))
        return {label: [a(values(data, *n)) for n in shapes] for label in ("buffers", "grads")}
    if function in ACCUMULATORS:
        return {"buffer": a(values(data, R, C)), "grad": a(values(data, R, C))}
    return {
        "clip_coefficient": {"norm": 5.0, "max_norm": 1.0},
        "spike_guard_init": {"like": a(values(data, 3))},
        "spike_guard_update": {"state": a(np.array([30.0, 2.0, 0.5])), "norm": a(np.array(9.0))},
        RUNNING: {
            **{label: a(f32(C)) for label in ("running_mean", "running_var")},
            **{label: a(f64(C)) for label in ("mean", "var")},
            "count": 9.0,
        },
        "grads_of": {"parameters": [Parameter()]},
        "named_grads_of": {"named_parameters": {"w": Parameter()}},
        "names_of": {"grads": [a(values(data, 3))]},
    }[function]
