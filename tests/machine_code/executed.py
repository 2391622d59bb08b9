"""Instructions that each operation executes for an element: PTX, counted while it runs.

The shapes are friendly ones, rows and runs that 16-byte accesses divide, and the values normally
distributed: ties, subnormals and general p play no part. What runs once for a row or a block
counts too, spread over the elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeAlias
from unittest.mock import patch

import numpy as np

import gradkit
from gradkit._cuda import CudaBackend, list_tables
from gradkit._dtypes import dtype_named
from testbed.emulator.idle import launch_nothing
from testbed.ptx import PtxDevice
from tests.devices.emulated import on_device
from tests.operations import OPERATIONS, of

ARCHITECTURE = 90
# As many blocks as fit on a small GPU: what a block does once is spread over many elements.
_MULTIPROCESSORS = 2
# Their work grows with blocks and channels, not with elements. What the last two write is read by
# no kernel, so they need not run.
_FINISHING = {"finish_channels", "finish_moments", "column_sums", "norm_finish"}
_LAST = {"column_sums", "norm_finish"}

Shape: TypeAlias = tuple[int, ...]


class Executed(NamedTuple):
    """Counts of one kernel in an operation, for each element of the operation's data."""

    operation: str
    dtype: str
    kernel: str
    instructions: float
    double: float


class Operation(NamedTuple):
    """One call on arrays of ``shape``, which it takes from an `Arrays`."""

    name: str
    shape: Shape
    call: Callable[[Arrays], Any]
    dtypes: tuple[str, ...] = ("bfloat16", "float32")

    def executed(self, dtype: str) -> list[Executed]:
        """Run it on data of ``dtype`` and count."""
        device = _Device()
        self.call(Arrays(CudaBackend(device), self.shape, dtype))
        elements = int(np.prod(self.shape))
        return [
            Executed(self.name, dtype, kernel, ran.instructions / elements, ran.double / elements)
            for kernel, ran in sorted(device.executed().items())
            if kernel not in _FINISHING
        ]


class Arrays:
    """Arrays of random numbers on a device: an operation's data, and what goes with it."""

    def __init__(self, backend: CudaBackend, shape: Shape, dtype: str) -> None:
        self._backend = backend
        self._random = np.random.default_rng(5)
        self.shape = shape
        self._dtype = dtype

    def data(self) -> Any:
        """The operation's data, normally distributed."""
        return self._placed(self._random.standard_normal(self.shape), self._dtype)

    def positive(self, shape: Shape, dtype: str | None = None) -> Any:
        """Numbers between 1 and 2, which may be divisors."""
        return self._placed(1 + self._random.random(shape), dtype or self._dtype)

    def along(self, axis: int) -> Any:
        """Parameters for the elements of an axis."""
        return self.positive((self.shape[axis],))

    def statistic(self, axis: int) -> Any:
        """The same in float32."""
        return self.positive((self.shape[axis],), "float32")

    def number(self) -> Any:
        """A float64 number, to be written."""
        return self._placed(np.zeros(()), "float64")

    def _placed(self, numbers: Any, dtype: str) -> Any:
        return on_device(
            self._backend.device.xp.array(numbers.astype(dtype_named(dtype))), self._backend
        )


class _Module(NamedTuple):
    """A compiled source, of which the kernels in ``_LAST`` do nothing."""

    made: Any

    def get_function(self, name: str) -> Any:
        """Return a kernel."""
        return launch_nothing if name in _LAST else self.made.get_function(name)


class _Device(PtxDevice):
    """Counts, and leaves out what need not run."""

    def __init__(self) -> None:
        super().__init__(
            architecture=ARCHITECTURE,
            counted=True,
            multiprocessors=_MULTIPROCESSORS,
            max_shared_memory=227 * 1024,
            resident_threads=512,
        )

    def compile(self, source: str, options: tuple[str, ...] = ()) -> Any:
        """Compile a source."""
        return _Module(super().compile(source, options))


def operations() -> Iterator[Operation]:
    """Everything that is counted."""
    yield from _lists()
    yield from _rows()
    yield from _channels()


_LIST, _LONG_LIST, _SQUARE = (1 << 16,), (1 << 20,), (1 << 8, 1 << 8)
_EVERY = ("float16", "bfloat16", "float32")


LONG_CHUNKS = ", long chunks"  # as in lists of more than 32 MiB; others have chunks of 4 KiB


def _lists() -> Iterator[Operation]:
    for p in (1.0, 2.0, np.inf):
        dtypes = _EVERY if p == 2 else _EVERY[1:]
        call = partial(_norm, p)
        yield Operation(f"grad_norm p={p:g}", _LIST, call, dtypes)
    exact = partial(_norm, 2.0, exact=True)
    yield Operation("grad_norm, exact", _LIST, exact, _EVERY)
    yield Operation("grad_stats", _LIST, lambda a: gradkit.grad_stats([a.data()]), _EVERY)
    yield Operation("scale_grads", _LIST, _scale, _EVERY)
    for name, long in (("grad_norm p=2", partial(_norm, 2.0)), ("scale_grads", _scale)):
        yield Operation(f"{name}{LONG_CHUNKS}", _LONG_LIST, partial(_in_long_chunks, long))
    yield Operation("clip_grad_block_norm of rows", _SQUARE, partial(_units, 1), _EVERY[1:])
    yield Operation("clip_grad_block_norm of columns", _SQUARE, partial(_units, 0), _EVERY[1:])
    yield Operation("clip_grad_value", _LIST, lambda a: gradkit.clip_grad_value([a.data()], 2.5))
    yield Operation("zero_grad", _LIST, lambda a: gradkit.zero_grad([a.data()]), _EVERY[1:2])
    yield Operation("accumulate_grad", _LIST, lambda a: gradkit.accumulate_grad(a.data(), a.data()))
    yield Operation(
        "accumulate_grad with a scale",
        _LIST,
        lambda a: gradkit.accumulate_grad(a.data(), a.data(), scale=0.3),
    )
    yield Operation(
        "accumulate_grad_v2", _LIST, lambda a: gradkit.accumulate_grad_v2(a.data(), a.data())
    )
    yield Operation("accumulate_grads with their norm", _LIST, _accumulate_with_norm)


def _accumulate_with_norm(arrays: Arrays) -> Any:
    norm = arrays.number()
    return gradkit.accumulate_grads([arrays.data()], [arrays.data()], norm_out=norm)


def _norm(p: float, arrays: Arrays, **options: Any) -> Any:
    return gradkit.grad_norm([arrays.data()], p, **options)


def _scale(arrays: Arrays) -> Any:
    return gradkit.scale_grads([arrays.data()], 0.3)


def _in_long_chunks(call: Callable[[Arrays], Any], arrays: Arrays) -> Any:
    with patch.object(list_tables, "_MANY_CHUNKS", 1 << 6):
        return call(arrays)


def _units(axis: int, arrays: Arrays) -> Any:
    return gradkit.clip_grad_block_norm([arrays.data()], 0.5, axis=axis)


_FURTHER: dict[str, dict[str, Any]] = {"ds": {"ds": True}, "an offset": {"scale_offset": 0.5}}
_SAMPLES = (4, 16, 1024)
_ROWS, _LONG, _WIDE, _WIDEST = (64, 1024), (4, 16384), (4, 32768), (2, 65600)


def _rows() -> Iterator[Operation]:
    for each in of("rows"):
        yield Operation(each.name, _ROWS, partial(_row_norm, each.name))
    for name in ("layer_norm_grad", "rms_norm_grad"):
        for title, options in _FURTHER.items():
            yield Operation(f"{name} with {title}", _ROWS, partial(_row_norm, name, **options))
        yield Operation(f"{name} with a scale per sample", _SAMPLES, partial(_row_norm, name))
    for shape, rows in {_LONG: "long", _WIDE: "wide", _WIDEST: "the widest"}.items():
        name = "layer_norm_grad"
        yield Operation(f"{name} of {rows} rows", shape, partial(_row_norm, name))


def _row_norm(name: str, a: Arrays, *, ds: bool = False, **options: Any) -> Any:
    """Call a norm on arrays that are right for its arguments; of three dimensions, per sample."""
    *samples, rows, width = a.shape
    parameter, statistic = (*samples, 1, width) if samples else (width,), (*samples, rows)
    make: dict[str, Callable[[], Any]] = {
        "data": a.data,
        "parameter": lambda: a.positive(parameter),
        "statistic": lambda: a.positive(statistic, "float32"),
    }
    norm = OPERATIONS[name]
    arrays = [make[str(norm.kind(label).shape)]() for label in norm.arrays]
    return norm.function(*arrays, **options, **({"ds": a.data()} if ds else {}))


_IMAGES = {1: (16, 16, 64, 64), 3: (16, 64, 64, 64)}  # by the axis of the channels
_ODD_IMAGES = (32, 32, 7, 7)


def _channels() -> Iterator[Operation]:
    for name, call in (("batch_norm", _batch_norm), ("batch_norm_grad", _batch_norm_grad)):
        yield Operation(f"{name} of odd images", _ODD_IMAGES, partial(call, 1), _EVERY[1:])
    for axis, shape in _IMAGES.items():
        of, dtypes = ("", _EVERY[1:]) if axis == 1 else (" of channels last", _EVERY[1:2])
        yield Operation(f"batch_norm{of}", shape, partial(_batch_norm, axis), dtypes)
        yield Operation(f"batch_norm_grad{of}", shape, partial(_batch_norm_grad, axis), dtypes)


def _batch_norm(axis: int, a: Arrays) -> Any:
    out = None, a.statistic(axis), a.statistic(axis)
    parameters = a.along(axis), a.along(axis)
    return gradkit.batch_norm(a.data(), *parameters, channel_axis=axis, out=out)


def _batch_norm_grad(axis: int, a: Arrays) -> Any:
    given = a.data(), a.data(), a.along(axis), a.statistic(axis), a.statistic(axis)
    return gradkit.batch_norm_grad(*given, channel_axis=axis)
