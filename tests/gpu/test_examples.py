"""The examples on CuPy's arrays, which compute what they compute on NumPy's."""

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from tests.backends import ON_GPU, CuPy

pytestmark = ON_GPU
EXAMPLES = Path(__file__).parents[2] / "examples"
# A few float32 steps in another order of additions.
REORDERED = 1e-3


class Bar:
    """As much of tqdm as is needed."""

    def __init__(self, steps, **_):
        self._steps = steps

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def __iter__(self):
        return iter(self._steps)

    def set_postfix(self, **_):
        pass


def load_digits(*, return_X_y):  # noqa: N803 - scikit-learn's own name
    assert return_X_y
    rng = np.random.default_rng(0)
    return rng.integers(0, 17, (330, 64)).astype(float), rng.integers(0, 10, 330)


@pytest.fixture
def example(monkeypatch):
    """Import an example, without scikit-learn and tqdm."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setitem(sys.modules, "sklearn", ModuleType("sklearn"))
    monkeypatch.setitem(sys.modules, "sklearn.datasets", SimpleNamespace(load_digits=load_digits))
    monkeypatch.setitem(sys.modules, "tqdm", SimpleNamespace(tqdm=Bar))

    def load(name):
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    return load


def test_the_demo(example):
    import cupy

    demo = example("train_digits")

    def trained(xp):
        digits = demo.Digits.load(xp, 1)
        network = demo.Network.initialised(xp, digits.train_x.shape[1], 1)
        return demo.train(network, digits, 1, 1)

    assert demo.array_module("auto") is cupy
    with CuPy().active():  # without cuDNN
        found = trained(cupy)
    expected = trained(np)
    assert len(found.loss) == 2
    for name in ("loss", "norm_before", "norm_after"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), REORDERED)


def test_the_gpt(example, monkeypatch, tmp_path):
    """With a checkpoint, whose arrays CuPy writes and reads."""
    import cupy

    gpt, path = example("numpy_gpt"), tmp_path / "gpt.npz"
    monkeypatch.setattr(gpt, "rate", lambda step, _: gpt.RATE * (step + 1) / gpt.WARMUP)
    expected, _ = gpt.train(gpt.encoded(), 4)
    monkeypatch.setattr(gpt, "xp", cupy)
    gpt.train(gpt.encoded(), 2, path)
    found, _ = gpt.train(gpt.encoded(), 4, path)
    np.testing.assert_allclose(found.losses, expected.losses, REORDERED)
    assert gpt.written(found.averages, "The ", 5).startswith("The ")


def test_the_training_loop(example, monkeypatch):
    import cupy

    loop = example("cupy_training_loop")
    assert loop.array_module() is cupy
    found = loop.main(steps=3)
    monkeypatch.setattr(loop, "array_module", lambda: np)
    np.testing.assert_allclose(found, loop.main(steps=3), REORDERED)
