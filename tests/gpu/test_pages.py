"""Pages' programs on CuPy: docs/gpu.md, the tutorial with ``import cupy as np``, the driver's."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.backends import ON_GPU, CuPy

pytestmark = ON_GPU
ROOT = Path(__file__).parents[2]


def blocks(page, language):
    text = (ROOT / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def _numpys_numbers(monkeypatch):
    """CuPy's Generator has ``standard_normal`` and no ``normal``; the testbed has no cuRAND."""
    import cupy

    def default_rng(seed):
        numbers = np.random.default_rng(seed)
        return SimpleNamespace(
            standard_normal=lambda *args, **kw: cupy.asarray(numbers.standard_normal(*args, **kw))
        )

    monkeypatch.setattr(cupy.random, "default_rng", default_rng)


def test_the_program_of_the_gpu_page(capsys, monkeypatch):
    """Its replays take the steps that calls on NumPy's arrays take."""
    import cupy

    _numpys_numbers(monkeypatch)
    (program,) = blocks("docs/gpu.md", "py")
    names, on_host = {}, {}
    try:
        with CuPy().active():
            exec(compile(program, "docs/gpu.md", "exec"), names)
    finally:
        cupy.cuda.Stream.null.use()
    host = program.replace("import cupy as cp", "import numpy as cp")
    host = host.partition("calls = ")[0].replace("stream", "# stream")
    exec(compile(host, "docs/gpu.md", "exec"), on_host)
    for _ in range(4):  # the first is what was run before the capture
        norm = on_host["step"]()
    assert float(capsys.readouterr().out) == pytest.approx(float(norm), rel=1e-4)
    for param, expected in zip(names["params"], on_host["params"], strict=True):
        np.testing.assert_allclose(param.get(), expected, rtol=1e-3, atol=1e-5)


def test_the_tutorial_with_cupy_in_the_place_of_numpy(monkeypatch):
    """Three steps of it; sines are NumPy's, since the testbed has none of float64."""
    import cupy

    _numpys_numbers(monkeypatch)
    monkeypatch.setattr(cupy, "sin", lambda array: cupy.asarray(np.sin(array.get())))
    code = "".join(blocks("docs/tutorial.md", "python"))
    code = code.replace("import numpy as np", "import cupy as np").replace("< 200", "< 3")
    names = {}
    with CuPy().active():
        exec(compile(code, "docs/tutorial.md", "exec"), names)
    assert len(names["losses"]) == 3
    assert isinstance(names["grads"]["scale"], cupy.ndarray)


@pytest.mark.skipif(
    "testbed.driver.plugin" not in sys.modules, reason="not on the testbed's driver"
)
def test_the_program_of_the_drivers_page():
    """In a process of its own, since it installs the driver before CuPy is imported."""
    (program,) = blocks("testbed/driver/README.md", "python")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program]
    printed = subprocess.check_output(command, env=environment, text=True)
    assert re.fullmatch(r"10 [1-9]\d* launches\n", printed)
