"""Compiled kernels as Python callables: what ``cupy.RawModule`` gives, over NumPy arrays."""

from __future__ import annotations

import ctypes
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .compiler import CompiledSource
from .faults import EmulatorFault, Index, LaunchContext, make_fault, source_line, text_of_line
from .memory import Array, Extent, make_window
from .runtime import SCHEDULES, Fault, Launch, Parameter, Signature, Window
from .signature import KernelText

if TYPE_CHECKING:
    from .device import EmulatedDevice

_MAX_THREADS = 1024
_UNASKED = 48 << 10  # bytes of shared memory that a block may have without asking for more
_MAX_BLOCK = (1024, 1024, 64)
_MAX_GRID = (2**31 - 1, 65535, 65535)
_MAX_CLUSTER = 8  # blocks


@dataclass
class Arguments:
    """A launch's arguments as the kernel will receive them, and the memory that they open."""

    values: list[ctypes.Array[ctypes.c_char]] = field(default_factory=list)
    arrays: list[tuple[str, Extent, bool, bool]] = field(default_factory=list)


class EmulatedModule:
    """A compiled source; `get_function` finds its kernels."""

    def __init__(self, device: EmulatedDevice, source: str, compiled: CompiledSource) -> None:
        self._device = device
        self._source = source
        self._compiled = compiled
        self._library = ctypes.PyDLL(str(compiled.library))
        self._kernels: dict[str, EmulatedKernel] = {}

    def get_function(self, name: str) -> EmulatedKernel:
        """Return the kernel that the source defines as ``extern "C" __global__ void name``."""
        if name not in self._kernels:
            self._kernels[name] = self._find(name)
        return self._kernels[name]

    def _find(self, name: str) -> EmulatedKernel:
        texts = {kernel.name: kernel for kernel in self._compiled.kernels}
        if name not in texts or not hasattr(self._library, name):
            raise ValueError(
                f"no kernel {name!r}: the source defines {', '.join(texts) or 'none'} "
                'and a kernel needs extern "C"'
            )
        return EmulatedKernel(
            self._device, self._source, self._compiled, self._library, texts[name]
        )


class CheckedKernel:
    """One kernel: ``kernel(grid, block, args, shared_mem=0)`` runs it to its end.

    Arguments, sizes and windows are the same whatever its code was made from.
    """

    def __init__(
        self,
        device: EmulatedDevice,
        libraries: Sequence[ctypes.PyDLL],
        text: KernelText,
        parameters: Sequence[Parameter],
        *,
        max_threads: int,
        static_bytes: int,
        cluster: Index,
    ) -> None:
        """``libraries``: what each block of a cluster runs."""
        self._device = device
        self._text = text
        invokes = [library[f"emu_invoke_{text.name}"] for library in libraries]
        addresses = (ctypes.cast(invoke, ctypes.c_void_p) for invoke in invokes)
        self._invokes = (ctypes.c_void_p * len(invokes))(*(a.value for a in addresses))
        self._max_threads = max_threads
        self._parameters = parameters
        self._images = [device.runtime.image(invoke) for invoke in invokes]
        self._cluster = cluster
        self.name = text.name
        self._static = static_bytes
        self.max_dynamic_shared_size_bytes = _UNASKED - self._static

    def __call__(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Any],
        shared_mem: int = 0,
    ) -> None:
        """Run every thread of the grid; raise `EmulatorFault` at the first forbidden step."""
        grid3 = self._dimensions("grid", grid, _MAX_GRID)
        block3 = self._dimensions("block", block, _MAX_BLOCK)
        self._check_resources(block3, shared_mem)
        arguments = self._convert(args)
        self._run(self._limited(grid3), block3, arguments, shared_mem)

    def _limited(self, grid: Index) -> Index:
        """Cut a grid to the device's `grid_limit`, in whole clusters."""
        most = self._device.limit_grid(self.name, grid)[0]
        whole = most + -most % self._cluster[0]
        return min(grid[0], whole), grid[1], grid[2]

    def _refuse(self, kind: str, message: str) -> EmulatorFault:
        return EmulatorFault(kind, f"kernel {self.name}: {message}", kernel=self.name)

    def _dimensions(self, what: str, given: Sequence[int], limits: Index) -> Index:
        sizes = tuple(given) + (1,) * (3 - len(given))
        plain = all(isinstance(size, (int, np.integer)) for size in sizes)
        if (
            len(sizes) != 3
            or not plain
            or not all(1 <= size <= limit for size, limit in zip(sizes, limits, strict=True))
        ):
            raise self._refuse(
                "launch", f"{what} {given!r}: integers from 1 to {limits} are needed"
            )
        return int(sizes[0]), int(sizes[1]), int(sizes[2])

    def _check_resources(self, block: Index, shared_mem: int) -> None:
        threads = math.prod(block)
        limit = min(_MAX_THREADS, self._max_threads or _MAX_THREADS)
        if threads > limit:
            raise self._refuse("launch", f"{threads} threads in a block; at most {limit} can be")
        wanted = f"{self._static} bytes of static and {shared_mem} of dynamic shared memory; "
        if shared_mem < 0 or self._static + shared_mem > self._device.max_shared_memory:
            raise self._refuse("launch", f"{wanted}the device has {self._device.max_shared_memory}")
        if shared_mem > self.max_dynamic_shared_size_bytes:
            allowed = f"{self.max_dynamic_shared_size_bytes} of dynamic"
            raise self._refuse("launch", f"{wanted}the kernel was allowed {allowed}")

    def _convert(self, args: Sequence[Any]) -> Arguments:
        if len(args) != len(self._parameters):
            raise self._refuse(
                "argument", f"{len(args)} arguments for {len(self._parameters)} parameters"
            )
        offset = 0
        converted = Arguments()
        for name, parameter, arg in zip(self._text.parameters, self._parameters, args, strict=True):
            self._convert_one(converted, name, parameter, arg)
            offset += -offset % parameter.alignment + parameter.size
        if offset > self._device.parameter_bytes:
            raise self._refuse(
                "argument",
                f"{offset} bytes of parameters; at most {self._device.parameter_bytes} can be",
            )
        return converted

    def _convert_one(self, converted: Arguments, name: str, parameter: Parameter, arg: Any) -> None:
        if isinstance(arg, np.ndarray) and arg.dtype.type is not np.void:
            self._open_array(converted, name, parameter, arg)
            raw = Extent.of(arg).origin.to_bytes(8, "little")
        elif arg is None and parameter.is_pointer:
            raw = bytes(8)
        else:
            raw = self._value_bytes(name, parameter, arg)
        if len(raw) != parameter.size:
            raise self._refuse(
                "argument",
                f"{name} is {parameter.size} bytes in the kernel and {len(raw)} as given "
                f"({_describe(arg)})",
            )
        # A struct may ask for more alignment than a byte buffer has.
        buffer = ctypes.create_string_buffer(len(raw) + parameter.alignment)
        skip = -ctypes.addressof(buffer) % parameter.alignment
        aligned = (ctypes.c_char * len(raw)).from_buffer(buffer, skip)
        aligned.raw = raw
        converted.values.append(aligned)

    def _open_array(
        self, converted: Arguments, name: str, parameter: Parameter, array: Array
    ) -> None:
        if not parameter.is_pointer:
            raise self._refuse("argument", f"{name} is no pointer, {_describe(array)} was given")
        writable = not parameter.is_const
        if writable and not array.flags.writeable:
            raise self._refuse(
                "argument",
                f"{name} may be written by the kernel (no const), the array is read-only",
            )
        memory = self._device.memory
        tracked = writable or memory.maybe_unwritten(array) or memory.written_elsewhere(array)
        converted.arrays.append((name, Extent.of(array), writable, tracked))

    def _value_bytes(self, name: str, parameter: Parameter, arg: Any) -> bytes:
        if isinstance(arg, np.ndarray):  # raw bytes or fields: by value
            if arg.size != 1:
                raise self._refuse(
                    "argument", f"{name} takes one struct by value, {_describe(arg)} was given"
                )
            return arg.tobytes()
        if not isinstance(arg, np.generic) or isinstance(arg, np.void):
            raise self._refuse(
                "argument",
                f"{name} was given {_describe(arg)}, which CuPy refuses or passes with a size of "
                "its own choice: wrap it in np.float32, np.int64, ...",
            )
        floating = isinstance(arg, np.floating)
        if (
            (parameter.is_floating and not floating)
            or (parameter.is_integer and floating and arg.itemsize > 2)
            or (parameter.is_pointer and not isinstance(arg, np.integer))
        ):
            wanted = "floating" if parameter.is_floating else "an integer or a pointer"
            raise self._refuse(
                "argument", f"{name} is {wanted} in the kernel, {_describe(arg)} was given"
            )
        return arg.tobytes()

    def _run(self, grid: Index, block: Index, arguments: Arguments, shared_mem: int) -> None:
        if math.prod(self._cluster) > 1 and not self._device.clusters:
            raise self._refuse("launch", "the device has no clusters")
        if any(blocks % across for blocks, across in zip(grid, self._cluster, strict=True)):
            raise self._refuse("launch", f"grid {grid}: no multiple of the cluster {self._cluster}")
        passed = self._passed(arguments)
        windows, described = self._windows(arguments, shared_mem)
        values = (ctypes.c_void_p * max(1, len(passed)))(*map(ctypes.addressof, passed))
        chosen = self._device.chosen_blocks(math.prod(grid))
        launch = Launch(
            invokes=self._invokes,
            values=values,
            grid=grid,
            block=block,
            cluster=self._cluster,
            shared_bytes=shared_mem,
            windows=windows,
            window_count=len(windows),
            schedule=SCHEDULES.index(self._device.schedule),
            seed=self._device.seed,
        )
        if chosen is not None:
            launch.blocks = (ctypes.c_uint64 * len(chosen))(*chosen)
            launch.block_count = len(chosen)
        fault = Fault()
        failed = self._device.runtime.launch(ctypes.byref(launch), ctypes.byref(fault))
        by_array = {
            name: (window.read_bytes, window.written_bytes)
            for (name, _), window in zip(described, windows, strict=True)
            if window.space == 0
        }
        self._device.record_traffic(self.name, launch, by_array)
        if failed:
            finder = self._finder(described)
            lines = self._find_line, self._line_text
            raise make_fault(fault, LaunchContext(self.name, grid, block, *lines, finder))

    def _passed(self, arguments: Arguments) -> list[ctypes.Array[ctypes.c_char]]:
        """Return the values whose addresses the kernel's library is given."""
        return arguments.values

    def _own_windows(self, shared_mem: int, rank: int) -> list[tuple[str, Extent, bool, bool, str]]:
        """Memory that a block of this rank has besides arrays: name, extent, writable, tracked."""
        raise NotImplementedError

    def _find_line(self, code: int) -> int | None:
        raise NotImplementedError

    def _line_text(self, line: int) -> str:
        raise NotImplementedError

    def _windows(
        self, arguments: Arguments, shared_mem: int
    ) -> tuple[ctypes.Array[Window], list[tuple[str, Extent]]]:
        """Build the launch's windows, and what each is called in messages."""
        rows = [
            (name, extent, writable, tracked, "global", 0)
            for name, extent, writable, tracked in _merge_overlapping(arguments.arrays)
        ]
        for rank, (start, end) in enumerate(self._images):
            rows += [(*row, rank) for row in self._own_windows(shared_mem, rank)]
            extent = Extent(start, end, start, 1, "")
            rows.append(("constants", extent, False, False, "constant", rank))
        windows = (Window * len(rows))(
            *(
                make_window(extent, number, writable, tracked, space, rank)
                for number, (_, extent, writable, tracked, space, rank) in enumerate(rows)
            )
        )
        return windows, [(name, extent) for name, extent, *_ in rows]

    def _finder(self, described: list[tuple[str, Extent]]) -> Any:
        def find(identity: int) -> tuple[str, Extent] | None:
            if identity >= 0:
                return described[identity]
            extent = self._device.memory.registered_extent(~identity)
            return None if extent is None else ("registered array", extent)

        return find


class EmulatedKernel(CheckedKernel):
    """A kernel whose code g++ made from the CUDA source."""

    def __init__(
        self,
        device: EmulatedDevice,
        source: str,
        compiled: CompiledSource,
        library: ctypes.PyDLL,
        text: KernelText,
    ) -> None:
        describe = library[f"emu_signature_{text.name}"]
        describe.restype = Signature
        signature = describe()
        cluster = checked_cluster(text.name, signature.cluster)
        super().__init__(
            device,
            [library, *_copies(compiled.library, math.prod(cluster) - 1)],
            text,
            signature.parameters[: signature.count],
            max_threads=signature.max_threads,
            static_bytes=sum(array.size for array in compiled.shared_arrays),
            cluster=cluster,
        )
        self._source = source
        self._compiled = compiled

    def _own_windows(self, shared_mem: int, rank: int) -> list[tuple[str, Extent, bool, bool, str]]:
        rows = [shared_window("dynamic shared memory", self._device, 0, shared_mem, rank)]
        for array in self._compiled.shared_arrays:
            start = self._images[rank][0] + array.offset
            text = f"shared, {array.size} bytes; the index counts bytes"
            extent = Extent(start, start + array.size, start, 1, text)
            rows.append((array.name, extent, True, True, "shared"))
        return rows

    def _find_line(self, code: int) -> int | None:
        return source_line(self._compiled.library, code)

    def _line_text(self, line: int) -> str:
        return text_of_line(self._source, line)


def checked_cluster(kernel: str, given: Sequence[int]) -> Index:
    """Return the shape of a kernel's clusters, if devices can have such."""
    x, y, z = given
    if not 1 <= x * y * z <= _MAX_CLUSTER:
        message = f"kernel {kernel}: {x * y * z} blocks in a cluster; 1 to {_MAX_CLUSTER} can be"
        raise EmulatorFault("launch", message, kernel=kernel)
    return x, y, z


def _copies(library: Path, count: int) -> Iterator[ctypes.PyDLL]:
    """Load a library again and again, each time with variables of its own."""
    for _ in range(count):
        with tempfile.NamedTemporaryFile(dir=library.parent, suffix=library.suffix) as file:
            file.write(library.read_bytes())
            file.flush()
            yield ctypes.PyDLL(file.name)


def shared_window(
    name: str, device: EmulatedDevice, offset: int, size: int, rank: int
) -> tuple[str, Extent, bool, bool, str]:
    """Return the window of a part of the dynamic shared memory of a block."""
    base = device.runtime.shared_base + rank * device.runtime.shared_capacity + offset
    return (
        name,
        Extent(base, base + size, base, 4, f"{size} bytes, in words of 4"),
        True,
        True,
        "shared",
    )


def _merge_overlapping(
    arrays: list[tuple[str, Extent, bool, bool]],
) -> list[tuple[str, Extent, bool, bool]]:
    """Join parameters that share memory (dx may be dy): what one may do there, both may."""
    merged: list[tuple[str, Extent, bool, bool]] = []
    for name, extent, writable, tracked in sorted(arrays, key=lambda row: row[1].start):
        if merged and extent.start < merged[-1][1].end:
            last_name, last, last_writable, last_tracked = merged[-1]
            union = Extent(
                last.start, max(last.end, extent.end), last.origin, last.itemsize, last.content
            )
            row = (f"{last_name}/{name}", union, last_writable or writable, last_tracked or tracked)
            merged[-1] = row
        else:
            merged.append((name, extent, writable, tracked))
    return merged


def _describe(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array {Extent.of(value).text}"
    return f"{type(value).__name__} {value!r}"
