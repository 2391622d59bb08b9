"""Cost of ``import gradkit``."""

import os
import subprocess
import sys

import pytest

from tests import tolerances

MODULES = "print(*sorted(name.partition('.')[0] for name in sys.modules))\n"
IMPORT = (
    "import time, sys\n"
    "start = time.thread_time()\n"  # OpenBLAS starts a thread for each other core
    "import numpy\n"
    "between = time.thread_time()\n"
    "import gradkit\n"
    "print((time.thread_time() - between) / (between - start))\n"
)
USE = (
    "import sys, numpy as np, gradkit\n"
    "g = np.ones((3, 4), np.float16)\n"
    "gradkit.clip_grad_norm([g], 1.0); gradkit.layer_norm(g); gradkit.zero_grad(g)\n"
)
OPTIONAL = {"cupy", "torch", "jax", "tensorflow", "ml_dtypes", "array_api_strict", "onnxruntime"}


def printed(code, **environment):
    """The lines that a fresh interpreter prints."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | environment
    )
    return done.stdout.splitlines()


def test_import_loads_no_framework():
    modules = set(printed(IMPORT + MODULES)[-1].split())
    assert "gradkit" in modules
    assert not modules & OPTIONAL


def test_use_loads_no_framework():
    assert not set(printed(USE + MODULES)[-1].split()) & OPTIONAL


@pytest.mark.alone
def test_import_is_quick(tmp_path):
    """Beside NumPy's own import in the same process: a slow machine is slow at both.

    With bytecode that earlier runs wrote, as an installed package has it.
    """
    bytecode = {"PYTHONPYCACHEPREFIX": str(tmp_path), "PYTHONDONTWRITEBYTECODE": ""}
    ratios = [float(printed(IMPORT, **bytecode)[0])]  # which writes it
    while len(ratios) < 20 and ratios[-1] > tolerances.IMPORT_TIME:
        ratios.append(float(printed(IMPORT, **bytecode)[0]))
    assert ratios[-1] <= tolerances.IMPORT_TIME, ratios


@pytest.mark.parametrize(
    ("name", "found", "said"),
    [
        ("torch", "None", "gradkit.torch needs PyTorch: pip install torch"),
        ("jax", "None", "gradkit.jax needs JAX 0.6 or newer: pip install jax"),
        (
            "jax",
            "types.SimpleNamespace(__version_info__=(0, 5, 3), __version__='0.5.3')",
            "gradkit.jax needs JAX 0.6 or newer, and this is 0.5.3",
        ),
    ],
)
def test_an_adapter_says_what_it_needs(name, found, said):
    code = (
        f"import sys, types; sys.modules[{name!r}] = {found}\n"
        f"try: import gradkit.{name}\n"
        "except ImportError as error: print(error)\n"
    )
    assert printed(code) == [said]
