"""Names of the kernels that a preprocessed source defines, and of their parameters.

Types, sizes and const-ness are left to the C++ compiler (runtime/shim_signature.h), which sees
through typedefs and macros; only names must be read from the text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_GLOBAL = re.compile(r"\b__global__\b")
_TEMPLATE = re.compile(r"template\s*<[^;{}]*>\s*$")
_BOUNDS = re.compile(r"\b(__launch_bounds__|__cluster_dims__)\s*\(")
_ATTRIBUTE = re.compile(r"__attribute__\s*\(")
_NAME = re.compile(r"([A-Za-z_]\w*)\s*$")
_CLOSING = {"(": ")", "[": "]", "{": "}", "<": ">"}


@dataclass(frozen=True)
class KernelText:
    """A kernel as written: its name, its parameters' names, its launch bounds and its cluster."""

    name: str
    parameters: tuple[str, ...]
    launch_bounds: str = "0"
    cluster_dims: str = "1"


def find_kernels(preprocessed: str) -> list[KernelText]:
    """Return every ``__global__`` function of a preprocessed source, in order, each once."""
    kernels: dict[str, KernelText] = {}
    for match in _GLOBAL.finditer(preprocessed):
        before = max(preprocessed.rfind(end, 0, match.start()) for end in ";{}")
        if _TEMPLATE.search(preprocessed, before + 1, match.start()):
            continue  # has no name to launch it by
        kernel = _read_header(preprocessed, match.end())
        if kernel is not None:
            kernels[kernel.name] = kernel
    return list(kernels.values())


def _read_header(text: str, start: int) -> KernelText | None:
    stated: dict[str, str] = {}
    position = start
    while True:
        opening = text.find("(", position)
        if opening < 0:
            return None
        end = _matching(text, opening)
        head = text[start : opening + 1]
        if bounds := _BOUNDS.search(head, position - start):
            stated[bounds[1].strip("_")] = text[opening + 1 : end].strip()
        elif not _ATTRIBUTE.search(head, position - start):
            name = _NAME.search(text[start:opening])
            if name is None:
                return None
            return KernelText(name[1], _parameter_names(text[opening + 1 : end]), **stated)
        position = end + 1


def _matching(text: str, opening: int) -> int:
    """Return the index of the bracket that closes the one at ``opening``."""
    closing = _CLOSING[text[opening]]
    depth = 0
    for index in range(opening, len(text)):
        if text[index] == text[opening]:
            depth += 1
        elif text[index] == closing:
            depth -= 1
            if depth == 0:
                return index
    return len(text)


def _parameter_names(parameters: str) -> tuple[str, ...]:
    if parameters.strip() in ("", "void"):
        return ()
    names = []
    for number, parameter in enumerate(_split_commas(parameters)):
        declarator = re.sub(r"\[[^]]*\]\s*$", "", parameter.split("=")[0].strip())
        name = _NAME.search(declarator)
        names.append(name[1] if name else f"argument {number}")
    return tuple(names)


def _split_commas(text: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for index, character in enumerate(text):
        if character in "(<[{":
            depth += 1
        elif character in ")>]}":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    return [*parts, text[start:]]
