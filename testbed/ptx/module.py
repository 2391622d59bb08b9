"""Kernels from PTX as Python callables: what ``cupy.RawModule`` gives, over NumPy arrays."""

from __future__ import annotations

import ctypes
import math
from functools import partial
from typing import Any

from testbed.emulator.device import EmulatedDevice
from testbed.emulator.faults import Index, source_place, text_of_line
from testbed.emulator.memory import Extent
from testbed.emulator.module import Arguments, CheckedKernel, checked_cluster, shared_window
from testbed.emulator.runtime import Parameter
from testbed.emulator.signature import KernelText

from .compiler import CompiledKernel, compile_kernel, parameters_of
from .coverage import Ran, record
from .executed import Executed
from .parse import Module
from .translate import Translation

_ALIGNMENT = 64  # of the parameter block


class PtxModule:
    """A source's PTX; a kernel is compiled when `get_function` asks for it.

    ``kernels`` are the source's own, if it is known: PTX has no names for parameters.
    """

    def __init__(
        self,
        device: EmulatedDevice,
        module: Module,
        kernels: list[KernelText] | None = None,
        *,
        source: str = "",
        title: str = "",
        contracted: bool = False,
        counted: bool = False,
    ) -> None:
        self._device = device
        self._module = module
        self._texts = {kernel.name: kernel for kernel in kernels or []}
        self._source = source
        self._title = title
        self._contracted = contracted
        self._counted = counted
        self._kernels: dict[str, PtxKernel] = {}

    def get_function(self, name: str) -> PtxKernel:
        """Return the kernel of that name."""
        if name not in self._kernels:
            self._kernels[name] = self._find(name)
        return self._kernels[name]

    def executed(self) -> dict[str, Executed]:
        """Return what each kernel has executed, if it is counted."""
        return {name: kernel.executed() for name, kernel in self._kernels.items()}

    def _find(self, name: str) -> PtxKernel:
        if name not in self._module.functions:
            known = ", ".join(self._module.functions) or "none"
            raise ValueError(f"no kernel {name!r}: the PTX defines {known}")
        compiled = compile_kernel(
            self._module, name, contracted=self._contracted, counted=self._counted
        )
        if name in self._texts:
            text = self._texts[name]
            parameters = parameters_of(self._module, text)
        else:
            rows = compiled.translation.parameters
            text = KernelText(name, tuple(row[0] for row in rows))
            parameters = [_untyped(size, alignment) for _, size, alignment in rows]
        return PtxKernel(
            self._device,
            self._module,
            compiled,
            text,
            parameters,
            self._source,
            self._title,
            counted=self._counted,
        )


def _untyped(size: int, alignment: int) -> Parameter:
    """Describe a parameter by PTX alone: eight bytes may be an address."""
    return Parameter(size=size, alignment=alignment, is_pointer=size == 8)


class PtxKernel(CheckedKernel):
    """A kernel whose code was made from PTX."""

    def __init__(
        self,
        device: EmulatedDevice,
        module: Module,
        compiled: CompiledKernel,
        text: KernelText,
        parameters: list[Parameter],
        source: str,
        title: str,
        *,
        counted: bool,
    ) -> None:
        self._translation = compiled.translation
        library = ctypes.PyDLL(str(compiled.library))
        cluster = checked_cluster(text.name, self._translation.cluster)
        super().__init__(
            device,
            [library] * math.prod(cluster),
            text,
            parameters,
            max_threads=self._translation.max_threads,
            static_bytes=self._translation.static_bytes,
            cluster=cluster,
        )
        self._module = module
        self._library = compiled.library
        self._source = source
        self._block = ctypes.create_string_buffer(b"")
        covered = (ctypes.c_uint8 * len(self._translation.blocks)).in_dll(library, "ptx_covered")
        if title and not counted:  # what is counted may be a part of a source, under its title
            lines = partial(_block_lines, module, self._translation, source)
            record(Ran(text.name, title, lines, covered))
        ran = ctypes.c_uint64 * len(covered) if counted else None
        self._ran = ran.in_dll(library, "ptx_ran") if ran else None
        self._before = list(self._ran or ())  # the library may have run for another device

    def executed(self) -> Executed:
        """Return what all launches of a counted kernel have executed, in all threads together."""
        if self._ran is None:
            raise ValueError(f"{self._library.name} does not count")
        runs = (now - before for now, before in zip(self._ran, self._before, strict=True))
        return Executed.total(runs, self._translation.tallies)

    def run(self, grid: Index, block: Index, content: bytes, shared_mem: int = 0) -> None:
        """Launch with all parameters in one block of bytes, laid out as PTX reads it.

        No parameter is known to be an array's address: kernels reach registered memory alone.
        """
        arguments, at = Arguments(), 0
        for _, size, alignment in self._translation.parameters:
            at += -at % alignment
            arguments.values.append((ctypes.c_char * size).from_buffer_copy(content, at))
            at += size
        self._run(grid, block, arguments, shared_mem)

    def _passed(self, arguments: Arguments) -> list[ctypes.Array[ctypes.c_char]]:
        """One block with all parameters, as PTX reads it."""
        content = bytearray()
        rows = self._translation.parameters
        for (name, size, alignment), value in zip(rows, arguments.values, strict=True):
            if len(value) != size:
                raise self._refuse("argument", f"{name} is {size} bytes, {len(value)} were given")
            content += bytes(-len(content) % alignment) + value.raw
        buffer = ctypes.create_string_buffer(len(content) + _ALIGNMENT)
        skip = -ctypes.addressof(buffer) % _ALIGNMENT
        self._block = (ctypes.c_char * len(content)).from_buffer(buffer, skip)
        self._block.raw = bytes(content)
        return [self._block]

    def _own_windows(self, shared_mem: int, rank: int) -> list[tuple[str, Extent, bool, bool, str]]:
        rows = [
            shared_window(name, self._device, offset, size, rank)
            for name, offset, size in self._translation.shared
        ]
        static = self._static + -self._static % 16
        rows.append(shared_window("dynamic shared memory", self._device, static, shared_mem, rank))
        start = ctypes.addressof(self._block)
        extent = Extent(start, start + len(self._block), start, 1, "the kernel's parameters")
        return [*rows, ("parameters", extent, False, False, "constant")]

    def _find_line(self, code: int) -> int | None:
        place = source_place(self._library, code)
        if place is None or not place[0].endswith(".ptx"):
            return None
        function = self._module.functions[place[0].removesuffix(".ptx")]
        return function.line + place[1] - 1

    def _line_text(self, line: int) -> str:
        functions: Any = self._module.functions.values()
        function = max((f for f in functions if f.line <= line), key=lambda f: f.line)
        inner = line - function.line + 1
        text = text_of_line(function.text, inner)
        written = function.source_line(inner)
        if written is None:
            return f"{text} (PTX)"
        return (
            f"{text} (PTX, of the source's line {written}: {text_of_line(self._source, written)})"
        )


def _block_lines(module: Module, translation: Translation, source: str) -> list[str]:
    """The source's line that each basic block begins with, behind its number."""
    functions = module.functions
    places = [functions[name].block_source_line(at) for name, at in translation.blocks]
    lines = source.splitlines()
    return [f"{at}: {lines[at - 1].strip()}" if at else "no line" for at in places]
