"""Every kernel file with every set of macros that an operation may ask for on any GPU."""

import json
import os
import sys
from collections.abc import Container
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from gradkit._calls.backend import OPERATIONS, names_in
from gradkit._calls.rows import RowOperations
from gradkit._cuda import CudaBackend
from gradkit._cuda.dry_run import DryDevice, needed_by
from gradkit._cuda.launch.kernels import Combination, options_of, source_of
from gradkit._dtypes import FLOATS
from testbed.emulator import IdleDevice
from testbed.emulator.cache import cache_folder, digest, locked
from tests.alone import fcntl

ROOT = Path(__file__).parents[1]


class Gpu(NamedTuple):
    """Properties of a GPU that the choice of a kernel depends on."""

    max_shared_memory: int  # of a block
    clusters: bool
    parameter_bytes: int = 32764

    @property
    def idle(self) -> IdleDevice:
        """Such a device, which launches nothing."""
        return IdleDevice(**self._asdict())


# T4, with an old driver too, V100, RTX 4090, A100, and an H100 that takes rows as an A100 does,
# which tests emulate; H100 and RTX 5090.
ON_GPUS = (
    Gpu(64 << 10, clusters=False, parameter_bytes=4096),
    *(Gpu(kib << 10, clusters=False) for kib in (64, 96, 99, 163, 227)),
    *(Gpu(kib << 10, clusters=True) for kib in (227, 99)),
)


def what_they_follow_from():
    """The texts of the modules that decide, with a fault if one is planted, and of this one."""
    yield Path(__file__).read_text()
    places = "_*.py", "_calls/**/*.py", "_cuda/**/*.py"
    for file in sorted(file for each in places for file in (ROOT / "gradkit").glob(each)):
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        planted = getattr(getattr(sys.modules.get(name), "__loader__", None), "source", None)
        yield planted if isinstance(planted, str) else file.read_text()


def _find():
    """Kernels that operations may need for any dtypes: place of a GPU, name, files and macros."""
    found = []
    for place, gpu in enumerate(ON_GPUS):
        # From the third on it is what holds a long row that depends on the GPU.
        for name in sorted(OPERATIONS if place < 2 else names_in(RowOperations)):
            backend = CudaBackend(DryDevice(gpu.idle))
            found.append((place, name, needed_by(backend, [name], FLOATS.keys())))
    return found


@cache
def _found():
    """The same from the disk, if a process before this one has found it: it takes seconds."""
    key = digest(sys.version, np.__version__, *what_they_follow_from())
    file = cache_folder() / f"combinations-{key}.json"
    with locked(file) if fcntl else nullcontext():
        if not file.exists():
            written = file.with_suffix(f".{os.getpid()}")
            written.write_text(json.dumps(_find()))
            written.replace(file)
    return {(ON_GPUS[place], name): asked for place, name, asked in json.loads(file.read_text())}


def needed(gpu: Gpu, operation: str) -> list[Combination]:
    """Kernels of an operation for any dtypes on a GPU; of rows, from the third GPU on."""
    return _found()[gpu, operation]


@cache
def combinations(*operations: str) -> tuple[Combination, ...]:
    """Kernels of operations (default: all) for any dtypes, each combination once."""
    found = {}
    for (_, name), asked in _found().items():
        if name in (operations or OPERATIONS):
            for file, macros in asked:
                found[file, *sorted(macros.items())] = file, macros
    return tuple(found.values())


class Asked:
    """The kernels that a module's tests ask for: all must be such as operations are listed with.

    Compared last (``fixture``), so that a fault that a test finds need not wait for the list.
    """

    def __init__(self, *operations: str):
        self.operations, self.by_test = operations, {}

    def note(self, source: str, options: tuple[str, ...]) -> None:
        self.by_test.setdefault((source, options), os.environ["PYTEST_CURRENT_TEST"])

    @property
    def listed(self) -> set[tuple[str, tuple[str, ...]]]:
        """Texts and options of all that is compiled for every GPU."""
        named = combinations(*self.operations)
        return {(source_of(file), options_of(macros)) for file, macros in named}

    @property
    def fixture(self):
        """Compares them at the end of a module."""

        @pytest.fixture(autouse=True, scope="module")
        def nothing_else_is_asked_for(request):
            yield
            if not request.session.testsfailed:
                others = self.by_test.keys() - self.listed
                assert not others, {self.by_test[each]: each[1] for each in others}

        return nothing_else_is_asked_for


def compiles_for(architecture: int, file: str, macros: Container[str]) -> bool:
    """Return whether an architecture is given a file with macros of these names.

    From 9.0 on, clusters have the long rows, for which a block has THREADS threads before.
    """
    if file == "layer_norm_grad_cluster" or "CLUSTERED" in macros:
        return architecture >= 90
    return architecture < 90 or "THREADS" not in macros
