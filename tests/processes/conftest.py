"""Libraries of ranks: `make test-ranks` needs all, other runs skip what is absent."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

REQUIRED = os.environ.get("GRADKIT_REQUIRE_RANKS") == "1"
NEEDED = {"mpi": "mpi4py", "torch": "torch", "jax": "jax"}

# Without any of them, these would be hundreds of skipped tests.
NEEDY = ["test_examples.py", "test_launch.py", "test_ranks.py"]
collect_ignore = [] if REQUIRED or any(map(find_spec, NEEDED.values())) else NEEDY


@pytest.fixture(scope="session")
def there():
    """A function that skips the test if a library is absent, and fails it if all are required."""

    def check(library):
        absent = [name for name in _needed(library) if not find_spec(name)]
        if library == "mpi" and not (Path(sys.executable).parent / "mpiexec").exists():
            absent.append("mpiexec beside Python (pip install mpich)")
        if absent:
            (pytest.fail if REQUIRED else pytest.skip)(f"not installed: {', '.join(absent)}")

    return check


def _needed(library):
    return NEEDED.values() if library == "mpi" else [NEEDED[library]]
