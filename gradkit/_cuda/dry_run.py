"""Kernels that operations ask for: calls of each kind, on a device that launches nothing.

Every record that a backend computes is filled in by the names of its fields. Arrays are of every
shape, layout and dtype that decides which kernel is asked for, and of memory that nobody reads.
"""

import math
from collections.abc import Iterable, Iterator, Set
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import as_strided

from gradkit._backend import Array, Shape
from gradkit._calls import rows
from gradkit._calls.backend import record_of
from gradkit._calls.channels import (
    BatchNormApply,
    BatchNormGradApply,
    BatchNormInferenceGrad,
    ChannelOperations,
)
from gradkit._calls.layouts import GroupLayout
from gradkit._calls.lists import (
    DIGITS,
    AccumulateGrad,
    AccumulateGrads,
    ExactSums,
    GradNorm,
    goes_with_param,
)
from gradkit._calls.record import Plan, Record
from gradkit._cuda.launch.buffers import VECTOR_BYTES, address_of
from gradkit._cuda.launch.device import Device
from gradkit._cuda.launch.kernels import Combination, take_combinations
from gradkit._dtypes import BATCH_NORM_TYPES, FLOATS, Types, accumulation_name, dtype_named

Fields: TypeAlias = Iterator[dict[str, Any]]  # of calls; also such as a record does not have

_PACKS = 8, 4, 2  # elements; of the widest dtypes, the first are several packs
_LENGTHS = 32, 4080, 6128, 8176, 12272, 32752, 49136, 65536, 262144
_WIDTHS = (  # of rows, for each way to hold one: of packs of elements, then of single ones
    *(length + pack for pack in _PACKS for length in _LENGTHS),
    *(31, 127, 2047, 4095, 5119, 8191, 10239, 32767, 49151),
    *(161 * pack for pack in (*_PACKS, 1)),  # a whole number of warps if a thread has one pack
    *(4608, 5376, 8960, 10240, 14336, 16384),  # for each number of threads of long rows
)
_RUNS = (*(56 + pack for pack in _PACKS), 63)
_IMAGES = (  # channels last or not, and several channels in the packs of a block
    *((2, 2, run) for run in _RUNS),
    *((2, run, 1) for run in _RUNS),
    (2, 8, 9),
)
_HELD_GROUPS = tuple((2, 8, 128 + run) for run in (*_PACKS, 1))  # a block holds a group of these
_MANY = 100  # tensors: more than a launch's parameters hold
_MANY_DIMS = 18  # of an array: too many as well
_ORDERS = (1.0, 2.0, 3.0, math.inf)


class DryDevice:
    """A device like another that compiles and launches nothing, over memory of the host."""

    xp: Any = SimpleNamespace(
        asarray=np.asarray,
        broadcast_to=np.broadcast_to,
        asnumpy=np.zeros_like,  # of what no kernel has written
    )
    stream, replays = 0, False
    launch_errors: tuple[type[Exception], ...] = ()
    max_dynamic_shared_size_bytes = 0  # of a kernel

    def __init__(self, like: Device):
        self.number, self.sharing = like.number, like.sharing
        self.multiprocessors = like.multiprocessors
        self.max_shared_memory, self.clusters = like.max_shared_memory, like.clusters
        self.parameter_bytes = like.parameter_bytes

    def cuda_stream(self) -> None:
        """Leave NVIDIA's libraries out of it."""

    def capturing(self) -> bool:
        """Nothing is captured."""
        return False

    def empty(self, shape: int | Shape, dtype: Any) -> Array:
        """New memory."""
        return np.empty(shape, dtype)

    def allocate(self, size: int) -> Array:
        """New memory, of bytes."""
        return np.empty(size, np.uint8)

    def compile(self, source: str, options: tuple[str, ...]) -> Any:  # noqa: ARG002
        """Stand in for the module and its kernels too."""
        return self

    def get_function(self, name: str) -> Any:  # noqa: ARG002
        """Stand in for a kernel."""
        return self

    def __call__(self, grid: Any, block: Any, args: Any, shared_mem: int = 0) -> None:
        """Launch nothing."""

    def resident(self, kernel: Any, threads: int, shared_mem: int) -> int:  # noqa: ARG002
        """Any number will do: no grid decides which kernel is asked for."""
        return 1

    def pointer(self, array: Array) -> int:
        """The address of an array's first element."""
        return address_of(array)

    def pointers(self, arrays: Iterable[Array], *, write: bool) -> tuple[int, ...]:  # noqa: ARG002
        """The addresses of many arrays."""
        return tuple(map(address_of, arrays))

    def upload(self, host: np.ndarray[Any, Any]) -> Array:
        """The array itself."""
        return host

    def synchronize(self) -> None:
        """Wait for nothing."""

    def active(self) -> AbstractContextManager[Any]:
        """A context that changes nothing."""
        return nullcontext()

    def record(self) -> Any:
        """No event."""

    def wait(self, event: Any) -> None:
        """Wait for nothing."""

    def fetch(self, source: Array, origin: int, target: Array) -> None:
        """Copy nothing."""


def needed_by(backend: Any, operations: Iterable[str], dtypes: Set[str]) -> list[Combination]:
    """The kernel files, with macros, that operations on arrays of these dtypes need.

    ``backend`` is on a ``DryDevice``.
    """
    for operation in sorted(operations):
        kind = record_of(operation)
        for fields in _fields_of(kind, dtypes):
            getattr(backend, operation)(_call(kind, fields))
        if kind is AccumulateGrad:
            for fields in _compensated(dtypes):
                backend.accumulate_grads(_call(AccumulateGrads, fields))
        if kind in (BatchNormApply, BatchNormGradApply):
            backend.as_float64(np.ones(1))  # what the host knows of all ranks
    return take_combinations(backend.device)


def _call(kind: type[Record], fields: dict[str, Any]) -> Any:
    """A call that has been opened, with those of the fields that its record has."""
    call: Any = kind(**{name: fields[name] for name in kind.fields & fields.keys()})
    call.plan = Plan((), {})
    return call


def _fields_of(kind: type[Record], dtypes: Set[str]) -> Fields:
    """The fields of calls that ask for every kernel that an operation may need."""
    if kind.__module__ == rows.__name__:
        return _rows(kind, dtypes)
    if kind.__module__ == ChannelOperations.__module__:
        return _channels(kind, dtypes)
    if "buffer" in kind.fields:
        return _pairs(dtypes)
    if "averages" in kind.fields:
        return _averages(dtypes)
    if "verdict" in kind.fields and "params" in kind.fields:
        return _updates(kind, dtypes)
    return _sums(dtypes) if "buffers" in kind.fields else _lists(kind, dtypes)


def _empty(shape: Shape, name: str) -> Array:
    return np.empty(shape, dtype_named(name))


def _fitting(kind: Any, dtypes: Set[str]) -> Iterator[Types]:
    """The combinations (T, U, V) that arrays of these dtypes can be in.

    An absent scale or bias counts as an array of the statistics' dtype.
    """
    statistics = _statistics(dtypes)
    for t, u, v in getattr(kind, "types", BATCH_NORM_TYPES):
        if t in dtypes and u in statistics and v in {*dtypes, u}:
            yield t, u, v


def _statistics(dtypes: Set[str]) -> list[str]:
    """The dtypes that statistics of such arrays may have."""
    return sorted({*dtypes, *map(accumulation_name, dtypes)})


def _rows(kind: type[Record], dtypes: Set[str]) -> Fields:
    """Data without gaps between rows, with gaps, and between packs; and another gradient."""
    for (t, u, v), width in product(_fitting(kind, dtypes), _WIDTHS):
        whole, *apart = (_empty((2, width + gap), t)[:, :width] for gap in (0, width, 1))
        fields = dict.fromkeys(("scale", "bias", "dscale", "dbias"), _empty((width,), v))
        fields |= dict.fromkeys(("mean", "inv_std"), _empty((2,), u))
        fields |= {"axis": 1, "eps": 0.0, "scale_offset": 0.0}
        fields |= {"activation": "silu", "norm_before_gate": True}
        further = "ds" in kind.fields
        for x in (whole, *apart):
            data = dict.fromkeys(("dy", "x", "y", "s", "dx", "residual", "gate", "dgate"), x)
            if "norm_before_gate" in kind.fields:
                for before, out in product((True, False), (x, None)):
                    yield fields | data | {"norm_before_gate": before, "dgate": out}
            for ds in (None, x) if further else (None,):
                yield fields | data | {"ds": ds}
        if "scale_offset" in kind.fields and width * whole.itemsize % VECTOR_BYTES == 0:
            data = dict.fromkeys(data, whole)
            yield fields | data | {"ds": None, "scale_offset": 1.0}


def _channels(kind: Any, dtypes: Set[str]) -> Fields:
    """Images, with running statistics of every dtype, and the statistics of two ranks."""
    of_groups = isinstance(kind.layout, GroupLayout)
    moved = _statistics(dtypes) if "running_mean" in kind.fields else ["float64"]
    images = _IMAGES + _HELD_GROUPS * of_groups
    for (t, u, v), shape, name in product(_fitting(kind, dtypes), images, moved):
        channels = shape[1:2]
        fields = dict.fromkeys(("x", "dy", "y", "dx"), _empty(shape, t))
        fields |= dict.fromkeys(("scale", "bias", "dscale", "dbias"), _empty(channels, v))
        statistics = _empty((shape[0], 1) if of_groups else channels, u)
        fields |= dict.fromkeys(("mean", "var", "inv_std", "saved_mean"), statistics)
        running = ("running_mean", "running_var", "next_mean", "next_var")
        fields |= dict.fromkeys(running, _empty(channels, name))
        fields |= dict.fromkeys(("sum_dy_xhat", "sum_dy"), np.empty(channels))
        fields |= dict.fromkeys(("means", "variances"), np.empty((2, *channels)))
        fields |= {"counts": np.empty(2), "total": np.empty(()), "count": 2.0}
        fields |= {"eps": 0.0, "momentum": 0.1, "engine": "native"}
        fields |= {"channel_axis": 1, "num_groups": 1}
        yield fields
        if kind is BatchNormInferenceGrad:
            yield fields | {"dx": None}


def _two_lists(*names: str) -> tuple[list[Array], list[Array]]:
    """A list that fits into a launch's parameters, and one that does not."""
    arrays = [_empty((4,), name) for name in names]
    return arrays, arrays * _MANY


def _mixtures(dtypes: Set[str]) -> list[tuple[str, ...]]:
    """Dtypes that a list may have: each alone, or several."""
    names = sorted(dtypes)
    return [(name,) for name in names] + [(*names,)] * (len(names) > 1)


def _lists(kind: type[Record], dtypes: Set[str]) -> Fields:
    """Lists, and numbers that belong to them."""
    one, flag = np.empty(()), np.empty((), bool)
    numbers = ("norm", "coefficient", "scale", "max_norm")
    values: dict[str, Any] = dict.fromkeys((*numbers, "found_inf", "limit"), one)
    values |= {"factors": np.empty(3), "faults": np.empty(2), "states": np.empty((2, 6))}
    values |= dict.fromkeys(("state", "next_state"), np.empty(6)) | {"parts": np.empty((1, 3))}
    values["verdict"] = flag
    values |= dict.fromkeys(("eps", "decay", "digest"), 0.0) | {"zero_nonfinite": False}
    values |= {"clip_value": 1.0, "threshold": 2.0, "warmup": 1, "clips": True}
    orders = _ORDERS if "norm_type" in kind.fields else (2.0,)
    narrow = dtypes - {"float64"} if kind is ExactSums else dtypes
    lists_of = [grads for names in _mixtures(narrow) for grads in _two_lists(*names)]
    for grads, order in product(lists_of, orders):
        own = {"norms": np.empty(len(grads)), "axes": ((0,),) * len(grads), "mean": False}
        own |= {"rows": (0,) * len(grads), "sums": np.empty((1, DIGITS + 1))}
        lists = dict.fromkeys(("grads", "outs", "new", "old"), grads)
        call = values | lists | own | {"norm_type": order, "fresh": True}
        yield call
        if kind is GradNorm:
            yield call | {"per_tensor": True, "norm": own["norms"], "found_inf": own["norms"]}


def _pairs(dtypes: Set[str]) -> Fields:
    """A gradient that is added to a buffer of few dimensions or many, none of them merged."""
    for grad, buffer in product(sorted(dtypes), sorted(dtypes)):
        source, target = _empty((1,), grad), _empty((4,), buffer)
        strides = [target.itemsize * 3**k for k in range(_MANY_DIMS)]
        fields = {"grad": source, "do_update": True, "overwrite": False, "scale": None}
        for array in (target, as_strided(target, (2,) * _MANY_DIMS, strides)):
            yield fields | {"buffer": array, "casting": "safe"}


def _averages(dtypes: Set[str]) -> Fields:
    """Lists that averages are moved to."""
    for average in sorted(dtypes):
        for param in sorted(dtypes & {*FLOATS[average].addends}):
            for params, averages in zip(_two_lists(param), _two_lists(average), strict=True):
                yield {"params": params, "averages": averages, "decay": 0.5}


def _updates(kind: type[Record], dtypes: Set[str]) -> Fields:
    """Lists of parameters, rounded in each of the ways, and numbers that the device has."""
    fields: dict[str, Any] = {"verdict": True, "step": 1, "nesterov": False, "momenta": None}
    fields |= {"lr": 0.1, "scale": 1.0, "beta1": 0.9, "beta2": 0.999, "eps": 0.0}
    fields |= {"momentum": 0.9, "weight_decay": 0.0}
    states = [each for each in ("moments", "variances", "momenta") if each in kind.fields]
    for names in product(sorted(dtypes), repeat=3):
        param, grad, state = names
        if not (goes_with_param("grads", param, grad) and goes_with_param("states", param, state)):
            continue
        for params, grads, arrays in zip(*map(_two_lists, names), strict=True):
            call = fields | {"params": params, "grads": grads, "offsets": (0,) * len(grads)}
            for seed in (None, 0) if params[0].itemsize == 2 else (None,):
                if "momenta" in states and arrays[0].dtype == params[0].dtype:
                    yield call | {"seed": seed}
                yield call | {"seed": seed} | dict.fromkeys(states, arrays)
    yield call | {"lr": np.empty(())} | dict.fromkeys(states, arrays)


def _sums(dtypes: Set[str]) -> Fields:
    """Accumulation in every mode, with the norms of both lists."""
    one = np.empty(())
    fields = {"do_update": True, "overwrite": False, "scale": 1.0, "grad_norm": one}
    for grads in _two_lists(*sorted(dtypes)):
        yield fields | {"grads": grads, "buffers": grads, "norm": one}
    for grad, buffer in product(sorted(dtypes), sorted(dtypes)):
        for grads, buffers in zip(_two_lists(grad), _two_lists(buffer), strict=True):
            for norm in (None, one):
                yield fields | {"grads": grads, "buffers": buffers, "norm": norm}
            if dtype_named(buffer).itemsize == 2:
                own = {"seed": 0, "offsets": (0,) * len(grads), "norm": None}
                yield fields | {"grads": grads, "buffers": buffers} | own
    yield from _compensated(dtypes)


def _compensated(dtypes: Set[str]) -> Fields:
    """Lists that are added to buffers, with what buffers drop."""
    fields = {"do_update": True, "overwrite": False, "scale": 1.0, "norm": None}
    for grad, buffer in product(sorted(dtypes), sorted(dtypes)):
        for grads, buffers in zip(_two_lists(grad), _two_lists(buffer), strict=True):
            yield fields | {"grads": grads, "buffers": buffers, "compensation": buffers}
