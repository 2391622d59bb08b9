"""The compiled CPU backend with another text for one of its files, for one instruction set."""

import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.mutants.mutant import ROOT, digest

KERNELS = ROOT / "kernels"
# As CMakeLists.txt has them, but for the instruction set and what changes no bit.
_ARITHMETIC = "-O1 -ffp-contract=off -fno-math-errno -fno-trapping-math -march=native"
_COMMAND = f"g++ -std=c++17 -fPIC -fvisibility=hidden {_ARITHMETIC} -DISA=baseline".split()
_INCLUDED = re.compile(r'^#include "(.+)"', re.M)


def build(file: Path, text: str) -> Path:
    """A module to be imported as ``gradkit._cpu.compiled``; an error if the compiler refuses it."""
    import nanobind  # which not every environment has

    folder = Path(tempfile.mkdtemp(prefix="gradkit-compiled-", dir=os.environ["XDG_CACHE_HOME"]))
    for path in [*KERNELS.glob("*.cuh"), *(KERNELS / "cpu").iterdir()]:
        copy = folder / path.relative_to(KERNELS)
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(text if path == file else path.read_text())
    nanobinds = Path(nanobind.source_dir(), "nb_combined.cpp")
    headers = Path(nanobind.include_dir())
    sources = [*sorted((folder / "cpu").glob("*.cpp")), nanobinds]
    objects = [_object(path, folder, headers) for path in sources]
    module = folder / f"compiled{sysconfig.get_config_var('EXT_SUFFIX')}"
    _run("-shared", "-pthread", "-o", module, *objects)
    return module


def _object(source: Path, folder: Path, headers: Path) -> Path:
    """Compiled, or as it was when it and all that it includes had these texts."""
    texts = sorted(f"{path.name}\n{path.read_text()}" for path in {source, *_includes(source)})
    kept = ROOT / "build" / "mutants" / "objects" / f"{digest(''.join(texts))}.o"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        made = folder / f"{source.stem}.o"
        where = sysconfig.get_path("include"), headers, headers.parent / "ext/robin_map/include"
        options = ["-fno-strict-aliasing"] if source.name == "nb_combined.cpp" else []
        _run(*options, *(f"-I{path}" for path in where), "-c", source, "-o", made)
        made.replace(kept)
    return kept


def _includes(source: Path) -> Iterator[Path]:
    for name in _INCLUDED.findall(source.read_text()):
        path = source.parent / name
        if path.exists():
            yield path.resolve()
            yield from _includes(path)


def _run(*arguments: object) -> None:
    done = subprocess.run([*_COMMAND, *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"the compiler rejects the source\n{done.stderr}")
