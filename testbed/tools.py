"""Search for the tools that the testbed runs."""

from __future__ import annotations

from .emulator.compiler import compiler_path
from .machine_code.sass import NvdisasmMissingError, nvdisasm
from .nvrtc.nvrtc import library_path


def missing(*tools: str) -> list[str]:
    """Return those of ``tools`` (``"g++"``, ``"nvrtc"``, ``"nvdisasm"``) that are not here."""
    found = {"g++": compiler_path, "nvrtc": library_path, "nvdisasm": _nvdisasm_path}
    return [tool for tool in tools if found[tool]() is None]


def _nvdisasm_path() -> str | None:
    try:
        return nvdisasm()
    except NvdisasmMissingError:
        return None
