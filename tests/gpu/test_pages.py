"""Pages' programs on CuPy: docs/gpu.md, and the tutorial with ``import cupy as np``."""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.backends import CuPy, has_gpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not has_gpu(), reason="no CUDA device"),
]
DOCS = Path(__file__).parents[2] / "docs"


def blocks(page, language):
    text = (DOCS / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_the_program_of_the_gpu_page(capsys):
    """Its replays take the steps that calls on NumPy's arrays take."""
    import cupy

    (program,) = blocks("gpu.md", "py")
    found, names = {}, {}
    try:
        with CuPy().active():
            exec(compile(program, "docs/gpu.md", "exec"), found)
    finally:
        cupy.cuda.Stream.null.use()
    on_the_host = program.replace("import cupy as cp", "import numpy as cp")
    on_the_host = on_the_host.partition("used = ")[0].replace("stream", "# stream")
    exec(compile(on_the_host, "docs/gpu.md", "exec"), names)
    for _ in range(4):  # the first is what was run before the capture
        names["backward"]()
        norm = names["update"]()
    assert float(capsys.readouterr().out) == pytest.approx(float(norm), rel=1e-4)
    for kind in ("params", "averages"):
        for name, value in names[kind].items():
            np.testing.assert_allclose(found[kind][name].get(), value, rtol=1e-3, atol=1e-5)


def test_the_tutorial_with_cupy_in_the_place_of_numpy(monkeypatch):
    """Three steps of it; CuPy's Generator has ``standard_normal`` and no ``normal``.

    Its numbers and sines are NumPy's: the testbed has no cuRAND and no sine of float64.
    """
    import cupy

    def default_rng(seed):
        numbers = np.random.default_rng(seed)
        return SimpleNamespace(
            standard_normal=lambda size: cupy.asarray(numbers.standard_normal(size))
        )

    monkeypatch.setattr(cupy.random, "default_rng", default_rng)
    monkeypatch.setattr(cupy, "sin", lambda array: cupy.asarray(np.sin(array.get())))
    code = "".join(blocks("tutorial.md", "python"))
    code = code.replace("import numpy as np", "import cupy as np").replace("< 200", "< 3")
    names = {}
    with CuPy().active():
        exec(compile(code, "docs/tutorial.md", "exec"), names)
    assert len(names["losses"]) == 3
    assert isinstance(names["grads"]["scale"], cupy.ndarray)
