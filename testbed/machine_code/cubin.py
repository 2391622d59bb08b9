"""The kernels in a cubin, the ELF file that ptxas writes."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_CODE, _INFO = ".text.", ".nv.info."
# Attributes of .nv.info.<kernel>: a format, a number and, in this format, the size of the value.
_SIZED = 0x04
_MAX_THREADS = 0x05  # of a block along x, y and z: __launch_bounds__


@dataclass(frozen=True)
class Kernel:
    """One kernel's machine code; ``max_threads`` of a block, or None without launch bounds."""

    name: str
    code: bytes
    max_threads: int | None


def kernels_of(cubin: bytes) -> list[Kernel]:
    """Return the kernels of a cubin, by name."""
    sections = dict(_sections(cubin))
    return [
        Kernel(name, content, _max_threads(sections.get(_INFO + name, b"")))
        for section, content in sorted(sections.items())
        if section.startswith(_CODE)
        for name in [section.removeprefix(_CODE)]
    ]


def _sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    """The sections of a 64-bit ELF file with their names."""
    if elf[:5] != b"\x7fELF\x02":
        raise ValueError("not a cubin: a 64-bit ELF file was expected")
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, of_names = struct.unpack_from("<HHH", elf, 0x3A)
    places = [struct.unpack_from("<I20xQQ", elf, table + k * size) for k in range(count)]
    names = places[of_names][1]
    for name, at, length in places:
        start = names + name
        yield elf[start : elf.index(b"\0", start)].decode(), elf[at : at + length]


def _max_threads(info: bytes) -> int | None:
    at = 0
    while at + 4 <= len(info):
        kind, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if kind != _SIZED:  # the size is the value
            continue
        if attribute == _MAX_THREADS:
            x, y, z = struct.unpack_from("<III", info, at)
            return int(x * y * z)
        at += size
    return None
