"""Arguments that every function takes, and a record of their bytes."""

import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

import gradkit
from tests import strategies as draw_
from tests.operations import FLOAT32, OPERATIONS, on


class Refused(NamedTuple):
    """A call that is refused: the function, its arguments of a factory's arrays, and the error."""

    function: str
    arguments: Callable
    error: type[Exception]
    message: str


class Cell(NamedTuple):
    """One case of a row, for any backend."""

    name: str
    check: Callable
    call: Refused | None = None  # if the input is refused

    @property
    def raises(self):
        return self.call is not None


def own_frames(error):
    """The lines of a traceback that are gradkit's."""
    package = str(Path(gradkit.__file__).parent)
    return [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(package)]


class NoSuchArrayError(Exception):
    """The backend has no arrays of that kind, which a cell is about."""


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
        if not self.backend.has_read_only:
            raise NoSuchArrayError
        return self.backend.read_only(self(host))

    def stretched(self, dtype, shape):
        return self.backend.stretched(self(np.ones((), dtype)), shape, (0,) * len(shape))

    def windows(self, dtype):
        step = np.dtype(dtype).itemsize
        return self.backend.stretched(self(np.ones(9, dtype)), (3, 4), (2 * step, step))

    def memory(self):
        return [self.backend.memory(array) for array in self.arrays]


class Parameter:
    """A holder of a gradient, which is no gradient itself."""

    grad = np.ones(3)


class Sparse:
    """A stand-in for a sparse array: it looks like an array, and so do its rows."""

    __module__ = "scipy.sparse"
    shape = (3, 3)

    def __iter__(self):
        return iter([self] * 3)


def named(*families, takes="", writes=None):
    """Functions of some families (of all): those with an argument, or that write one."""
    return tuple(
        name
        for name, operation in OPERATIONS.items()
        if not families or operation.family in families
        if not takes or takes in operation.parameters
        if writes is None or operation.writes == writes
    )


NORMS = named("rows", "channels", "groups")
LISTS = named("lists")
WRITERS = named("lists", writes="grads")
ACCUMULATORS = named("buffers")


def values(dtype, *shape):
    return draw_.values(shape, dtype)


f64, f32 = partial(values, "float64"), partial(values, "float32")


def good(function, a, types=FLOAT32):
    """Arguments that the function takes."""
    if function in OPERATIONS:
        return OPERATIONS[function].arguments(on(a), types)
    return {
        "spike_guard_init": {"like": a(values(types[0], 3))},
        "grads_of": {"parameters": [Parameter()]},
        "named_grads_of": {"named_parameters": {"w": Parameter()}},
        "names_of": {"grads": [a(values(types[0], 3))]},
    }[function]
