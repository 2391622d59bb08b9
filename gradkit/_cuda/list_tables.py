"""A list of arrays as the kernels take it: chunks of equal bytes, in one launch or a few.

``kernels/tensor_list.cuh`` is the other half. A short list travels in the kernel's parameter
block, a single pair of arrays in a small one if a kernel takes no more. A longer list is uploaded
once and kept for as long as the same memory comes again, on the stream that it was uploaded on.
A graph that is captured has uploads of its own, and memory for them that it can keep.
"""

import math
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import count
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np

from gradkit import _host
from gradkit._backend import Address, Array, Axes, Views
from gradkit._calls.roles import Grads
from gradkit._cuda.launch.buffers import upload
from gradkit._cuda.launch.device import Device, note_others, noted
from gradkit._cuda.launch.kernels import Launch, kernel, source_of
from gradkit._cuda.launch.strides import Pair, pair_of, units_of
from gradkit._dtypes import FLOATS, float_name

Rows: TypeAlias = np.ndarray[Any, Any]  # of _TENSOR, _UNITS or _DIM
Owners: TypeAlias = np.ndarray[Any, Any] | slice
Step: TypeAlias = Callable[[], None]  # something to launch
Starts: TypeAlias = np.ndarray[Any, Any]  # addresses of sources and targets, or of both at once

CAPACITY = 90  # tensors in the parameter block: under 4096 bytes with 96 for what comes after
DIMS = 16  # dimensions of strided tensors there
UNIT_CAPACITY = 56  # and those whose rows also say what their units are
THREADS = 256  # a block; a warp takes a chunk at a time
_WARPS = THREADS // 32
_PACK = np.uint64(16)  # bytes of the widest access
_BLOCKS = 16  # for each multiprocessor: more than it holds, so that the fast ones take more
_SMALLEST_CHUNK = 4096  # bytes: two rounds of a warp's loads
_LARGEST_CHUNK = 1 << 30  # kernels count its elements by an int
_MANY_CHUNKS = 8192  # two or three for each warp that the largest devices hold at once
_MOST_CHUNKS = (1 << 32) - 1  # kernels count them by an unsigned int

_DTYPE = "LIST_T"  # the macro that is the dtype of all of a list, in files that know it
_OF_SIZE = {1: 4, 2: 0, 4: 2, 8: 3}  # `keep_if.cu` has the same numbers

_shape, _strides, _number = map(attrgetter, ("shape", "strides", "dtype.num"))

_DIM = np.dtype([("length", "i8"), ("source_stride", "i8"), ("target_stride", "i8")])
_TENSOR = np.dtype(
    [
        ("source", "u8"),
        ("target", "u8"),
        ("count", "i8"),
        ("first_chunk", "u4"),
        ("first_dim", "u4"),
        ("dims", "u4"),
        ("dtype", "u4"),
    ],
    align=True,
)
_UNITS = np.dtype(
    [
        *((name, _TENSOR[name]) for name in _TENSOR.names or ()),
        ("source_step", "i8"),
        ("target_step", "i8"),
        ("units", "u4"),
        ("first_unit", "u4"),
    ],
    align=True,
)
_HEAD: list[Any] = [(name, "u4") for name in ("chunk_bytes", "tensors", "chunks", "unused")]
_LAYOUTS = {  # of a TensorList, for each capacity
    capacity: np.dtype([*_HEAD, ("dim_at", _DIM, DIMS), ("at", row, capacity)], align=True)
    for capacity, row in ((CAPACITY, _TENSOR), (1, _TENSOR), (UNIT_CAPACITY, _UNITS))
}
_LAYOUTS[0] = np.dtype([*_HEAD, ("dim_at", "u8"), ("at", "u8")], align=True)


@dataclass(frozen=True)
class Table:
    """A list as kernels take it."""

    fields: np.ndarray[Any, Any]  # the kernel's TensorList
    capacity: int  # the macro that tells kernels which kind of table this is
    tensors: int  # how many pairs of arrays there are
    chunks: int  # that they are cut into
    units: int  # that they are cut into, if they are
    dtype: str  # of all the list's targets; empty if they differ
    memory: Array | None = None  # what the fields point into

    @cached_property
    def argument(self) -> np.ndarray[Any, Any]:
        """The fields as bytes, to be passed by value: CuPy describes fields anew in each launch."""
        return self.fields.view(f"V{self.fields.nbytes}")

    @cached_property
    def alone(self) -> "Table":
        """The same with room for the first tensor only, if it travels in the parameters."""
        if not self.capacity:
            return self
        fields = np.frombuffer(self.fields.tobytes(), _LAYOUTS[1], count=1).reshape(())
        return replace(self, fields=fields, capacity=1)

    def at(self, source: Address, target: Address) -> np.ndarray[Any, Any]:
        """The argument for another pair like the only one, aligned as it is."""
        note_others()
        fields = self.fields.copy()
        fields["at"]["source"], fields["at"]["target"] = source, target
        return fields.view(f"V{fields.nbytes}")

    @cached_property
    def blocks(self) -> int:
        """Number of blocks that take all chunks in one round."""
        return -(-self.chunks // _WARPS)

    @cached_property
    def launches(self) -> dict[Hashable, Any]:
        """Launches that this table had before, by their keys."""
        return {}

    def over_chunks(self, device: Device, file: str, name: str, **macros: Any) -> Launch:
        """The launch of a kernel of which each warp takes a chunk at a time."""
        key = (name, *macros.items()) if macros else name
        cached = self.launches.get(key)
        if cached is None:
            blocks = min(self.blocks, device.multiprocessors * _BLOCKS)
            cached = self.launch(device, blocks, THREADS, file, name, **macros)
            self.launches[key] = cached
        return cached

    def launch(
        self, device: Device, blocks: int, threads: int, file: str, name: str, **macros: Any
    ) -> Launch:
        """The launch of a kernel that takes this table, made once; only one file has its name.

        A file that tells dtypes apart is compiled for one of them, or for all if a list mixes them.
        """
        key = (blocks, threads, name, *macros.items())
        cached = self.launches.get(key)
        if cached is None:
            if self.dtype and _DTYPE in source_of(file):
                macros[_DTYPE] = self.dtype
            loaded = kernel(device, file, name, CAPACITY=self.capacity, **macros)
            cached = self.launches[key] = Launch(loaded, (blocks,), (threads,))
        return cached


@dataclass(frozen=True)
class ListPlan:
    """A list of tensors cut into chunks."""

    table: Table
    cut: "_Cut"
    starts: np.ndarray[Any, Any]  # the arrays' addresses

    @property
    def tensors(self) -> int:
        """Number of pairs."""
        return self.cut.tensors

    @cached_property
    def chunks(self) -> int:
        """Number of chunks that they are cut into."""
        return self.cut.chunks

    @cached_property
    def in_step(self) -> bool:
        """True if both arrays of each pair are cut into the same packs."""
        return self.cut.in_step(self.starts)

    @cached_property
    def uploaded(self) -> bool:
        """True if it lies in device memory."""
        return self.table.memory is not None


@dataclass(frozen=True)
class _Cut:
    """Pairs of arrays cut into chunks, wherever they lie."""

    table: Rows  # without addresses
    dims: Rows
    chunk: int  # bytes
    chunks: int
    sizes: np.ndarray[Any, Any]  # of an element: (sources and targets, arrays)
    shifts: np.ndarray[Any, Any]  # from an array's address to where kernels begin
    owners: Owners  # each tensor's array

    @property
    def tensors(self) -> int:
        """Number of pairs."""
        return len(self.table)

    @cached_property
    def dtype(self) -> str:
        """The name of the dtype of all targets; empty if they differ, or if there are none."""
        codes = {*np.unique(self.table["dtype"])}
        return "".join(row.name for row in FLOATS.values() if {row.code} == codes)

    def aligned(self, starts: np.ndarray[Any, Any]) -> bool:
        """True if arrays at these addresses are aligned; others are cut by themselves."""
        return not (starts % self.sizes).any()

    def in_step(self, starts: np.ndarray[Any, Any]) -> bool:
        """True if kernels cut both arrays of each pair into the same packs."""
        sources, targets = (starts + self.shifts) // self.sizes  # in elements
        packs = _PACK // self.sizes.max(axis=0)
        return not (len(self.dims) or ((sources - targets) % packs).any())

    def placed(self, starts: np.ndarray[Any, Any]) -> Rows:
        """The table of arrays at these addresses."""
        table = self.table.copy()
        table["source"], table["target"] = starts[:, self.owners] + self.shifts
        return table


Cached = TypeVar("Cached", _Cut, ListPlan)


@dataclass
class _Used(Generic[Cached]):
    """A cached object, and when it was last used."""

    value: Cached
    turn: int


class _LastUsed(Generic[Cached]):
    """The plans or cuts used last, bounded in number and in tensors.

    A key may be long, and Python computes its hash anew each time; so to find one looks once.
    """

    def __init__(self, number: int, tensors: int):
        self._limits = (number, tensors)
        self._cached: dict[Hashable, _Used[Cached]] = {}
        self._tensors = 0
        self._turns = count()
        self._lock = threading.Lock()

    def find(self, key: Hashable) -> Cached | None:
        used = self._cached.get(key)
        if used is None:
            return None
        used.turn = next(self._turns)
        return used.value

    def keep(self, key: Hashable, value: Cached) -> None:
        with self._lock:
            self._tensors += value.tensors - self._drop(key)
            self._cached[key] = _Used(value, next(self._turns))
            number, tensors = self._limits
            while len(self._cached) > number or (self._tensors > tensors and len(self._cached) > 1):
                self._tensors -= self._drop(min(self._cached, key=lambda k: self._cached[k].turn))

    def _drop(self, key: Hashable) -> int:
        used = self._cached.pop(key, None)
        return used.value.tensors if used else 0


_plans = _LastUsed[ListPlan](number=64, tensors=1 << 20)
_cuts = _LastUsed[_Cut](number=64, tensors=1 << 20)


def plan_of(
    device: Device, sources: Grads, targets: Grads | None = None, axes: Axes | None = None
) -> ListPlan:
    """The plan for pairs of arrays, each source broadcast to its target's shape.

    ``sources`` that are ``targets`` are worked on in place; without targets they are only read.
    With ``axes``, those that each array's units extend along, it is for kernels that know units.
    The gradients of one call keep theirs for its next step.
    """
    write, alone = targets is not None, targets is None or targets is sources
    if (notes := noted()) is not None:
        notes.lists += [sources] if alone else [sources, targets]
    keeping = alone and axes is None and isinstance(sources, (Views, _host.Table))
    if keeping and sources.plan is not None:  # type: ignore[attr-defined]
        device.pointers(sources, write=write)  # an emulator checks what is written
        return sources.plan  # type: ignore[attr-defined]
    pairs: tuple[Grads, ...] = (sources,) if alone else (sources, targets or ())
    addresses = [] if alone else [_places(device, sources)]
    addresses.append(device.pointers(pairs[-1], write=write))  # the last are what may be written
    first, last = pairs[0], pairs[-1]
    if isinstance(first, _host.Table) and isinstance(last, _host.Table):
        units = () if axes is None else _units(pairs, axes)
        key: Hashable = (device, device.stream, first.known, last.known, *units)
    else:
        key = (device, device.stream, *addresses, *_properties(pairs, axes))
    plan = _plans.find(key)
    if plan is None or (plan.uploaded and device.capturing()):
        starts = np.array(addresses, np.uint64)
        plan = _make(device, starts, pairs, axes)
        if not device.capturing():
            _plans.keep(key, plan)
    if plan.uploaded:  # memory that is kept only as long as the plan
        note_others()
    if keeping:
        sources.plan = plan  # type: ignore[attr-defined]
    return plan


class Counted(Views):
    """Arrays, and behind them as many runs of counters, each like a target in C order.

    To a plan, a counter is an element of a byte, at an address that is the counter itself.
    """

    def __init__(self, arrays: Grads, targets: Grads, offsets: Sequence[int]):
        super().__init__([*arrays, *map(_Counters, targets)])
        self.arrays, self.offsets = arrays, offsets


class _Counters:
    """Counters with the part of an array's interface that a plan uses."""

    dtype, itemsize = np.dtype(np.uint8), 1
    flags = SimpleNamespace(c_contiguous=True)

    def __init__(self, like: Array):
        self.shape, self.ndim = like.shape, like.ndim
        self.strides = tuple(math.prod(like.shape[k + 1 :]) for k in range(like.ndim))


def _places(device: Device, sources: Grads) -> tuple[int, ...]:
    """Addresses of sources."""
    if isinstance(sources, Counted):
        return (*device.pointers(sources.arrays, write=False), *sources.offsets)
    return device.pointers(sources, write=False)


def _properties(pairs: Sequence[Grads], axes: Axes | None) -> tuple[Hashable, ...]:
    """Everything about lists but where they lie."""
    return (*map(_properties_of, pairs), *(() if axes is None else _units(pairs, axes)))


def _units(pairs: Sequence[Grads], axes: Axes) -> tuple[Hashable, ...]:
    """Part of a plan's key that depends on units, which a table's layout need not tell."""
    first = pairs[0]
    arrays = first.arrays if isinstance(first, _host.Table) else first
    return axes, tuple(map(_shape, arrays))


def _properties_of(arrays: Sequence[Array]) -> tuple[Any, ...]:
    """Everything about arrays but where they lie."""
    if isinstance(arrays, _host.Table):
        return (arrays.layout,)
    # A tuple for each property, not for each array: fewer objects to make.
    return tuple(tuple(map(of, arrays)) for of in (_shape, _strides, _number))


def steps(
    device: Device, table: Table, file: str, name: str, *arguments: Any, **macros: Any
) -> list[Step]:
    """Launches of a kernel over all chunks of a table, if it has any; compiles the kernel.

    Calls that write with more than one launch first make all of their steps, so that what may
    fail by itself, memory and the compiler, fails before anything is written.
    """
    if not table.blocks:
        return []
    launch = table.over_chunks(device, file, name, **macros)
    return [partial(launch.__call__, table.argument, *arguments)]


def launch(launches: Iterable[Step]) -> None:
    """Launch what has been made."""
    for step in launches:
        step()


def _make(device: Device, starts: Starts, pairs: Sequence[Grads], axes: Axes | None) -> ListPlan:
    """The plan for arrays at these addresses; gradients often come back at others."""
    properties = _properties(pairs, axes)
    cut = _cuts.find(properties)
    if cut is None or not cut.aligned(starts):
        cut = _cut(starts, pairs) if axes is None else _cut_units(starts, pairs, axes)
        if cut.aligned(starts):
            _cuts.keep(properties, cut)
    table, every = cut.placed(starts), cut.dims
    short = len(table) <= _capacity(table) and len(every) <= DIMS
    plan_table = _inline(table, every, cut) if short else _uploaded(device, table, every, cut)
    return ListPlan(plan_table, cut, starts)


def _cut(starts: Starts, pairs: Sequence[Sequence[Array]]) -> _Cut:
    """Cut pairs of arrays into chunks."""
    ends = pairs[0], pairs[-1]
    rows = list(map(pair_of, *map(np.ndarray.tolist, (starts[0], starts[-1])), *ends))
    table = np.zeros(len(rows), _TENSOR)
    table["dtype"] = [_code(array) for array in pairs[-1]]
    return _filled(table, rows, starts, ends)


def _cut_units(starts: Starts, pairs: Sequence[Sequence[Array]], axes: Axes) -> _Cut:
    """Cut pairs of arrays into units, and those into chunks."""
    ends = pairs[0], pairs[-1]
    places = map(np.ndarray.tolist, (starts[0], starts[-1]))
    each = [list(units_of(*pair)) for pair in zip(*places, *ends, map(set, axes), strict=True)]
    rows = [row for units in each for row in units]
    table = np.zeros(len(rows), _UNITS)
    owners = np.repeat(np.arange(len(each)), [len(units) for units in each])
    table["dtype"] = np.array([_code(array) for array in pairs[-1]], np.uint32)[owners]
    table["source_step"] = [row.source_step for row in rows]
    table["target_step"] = [row.target_step for row in rows]
    units = np.array([row.number for row in rows], np.int64)
    table["units"], table["first_unit"] = units, np.cumsum(units) - units
    return _filled(table, [row.pair for row in rows], starts, ends, units, owners)


def _filled(
    table: Rows,
    rows: Sequence[Pair],
    starts: Starts,
    ends: tuple[Sequence[Array], Sequence[Array]],
    units: np.ndarray[Any, Any] | int = 1,
    owners: Owners = slice(None),
) -> _Cut:
    """Cut units of these pairs into chunks, and fill the table's rows but for addresses."""
    items = np.array([[array.itemsize for array in arrays] for arrays in ends], np.uint64)
    sizes = items[1].astype(np.int64)[owners]
    counts = np.array([row.elements for row in rows], np.int64)
    share = -(-int(counts * units @ sizes) // _MANY_CHUNKS)
    chunk = min(max(1, -(-share // _SMALLEST_CHUNK)) * _SMALLEST_CHUNK, _LARGEST_CHUNK)
    chunks = -(-counts // (chunk // sizes)) * units  # of each row
    if chunks.sum() > _MOST_CHUNKS:
        raise ValueError(
            f"axis cuts gradients into {chunks.sum()} pieces; accepted: up to {_MOST_CHUNKS}"
        )
    dims = np.array([len(row.dims) for row in rows], np.int64)
    table["count"] = counts
    table["first_chunk"] = np.cumsum(chunks) - chunks
    table["first_dim"] = np.cumsum(dims) - dims
    table["dims"] = dims
    every = np.array([dim for row in rows for dim in row.dims], _DIM)
    begins = np.array([[row.source for row in rows], [row.target for row in rows]], np.uint64)
    return _Cut(table, every, chunk, int(chunks.sum()), items, begins - starts[:, owners], owners)


def _code(array: Array) -> int:
    """The number by which kernels know a dtype; those that only copy, an element's size."""
    name = float_name(array.dtype)
    return _OF_SIZE[array.dtype.itemsize] if name is None else FLOATS[name].code


def _inline(table: Rows, dims: Rows, cut: _Cut) -> Table:
    """Rows in the parameter block."""
    capacity = _capacity(table)
    fields = np.zeros((), _LAYOUTS[capacity])
    fields["at"][: len(table)] = table
    fields["dim_at"][: len(dims)] = dims
    return _table(fields, capacity, table, cut)


def _uploaded(device: Device, table: Rows, dims: Rows, cut: _Cut) -> Table:
    """Rows in device memory: one copy."""
    memory = upload(device, np.concatenate([table.view(np.uint8), dims.view(np.uint8)]))
    fields = np.zeros((), _LAYOUTS[0])
    fields["at"] = device.pointer(memory)
    fields["dim_at"] = fields["at"] + np.uint64(table.nbytes)
    return _table(fields, 0, table, cut, memory)


def _table(
    fields: np.ndarray[Any, Any], capacity: int, rows: Rows, cut: _Cut, memory: Array | None = None
) -> Table:
    fields["chunk_bytes"], fields["tensors"], fields["chunks"] = cut.chunk, len(rows), cut.chunks
    has_units = rows.dtype == _UNITS and len(rows)
    units = int(rows["first_unit"][-1] + rows["units"][-1]) if has_units else 0
    return Table(fields, capacity, len(rows), cut.chunks, units, cut.dtype, memory)


def _capacity(table: Rows) -> int:
    """Number of rows like these that the parameter block holds."""
    return CAPACITY if table.dtype == _TENSOR else UNIT_CAPACITY
