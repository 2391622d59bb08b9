"""The example of a transformer block: its gradients, and that it learns."""

import importlib
import sys

import numpy as np
import pytest

from tests.package.test_demo import DIFFERENCES, EXAMPLES, STEP


@pytest.fixture(scope="module")
def example():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        return importlib.import_module("train_transformer")


def test_gradients_are_those_of_the_loss(example):
    """Of every parameter: through both residual norms, QK-norm on strided heads and group norm."""
    rng = np.random.default_rng(0)
    network = example.Network.initialised(np, 1, "float64")
    for param in network.params.values():
        param += rng.normal(0, 0.1, param.shape)
    x, targets = rng.normal(size=(3, 64)), np.eye(10)[[3, 1, 4]]
    _, grads = network.loss_and_grads(x, targets, 3)
    assert grads.keys() == network.params.keys()
    for name, param in network.params.items():
        flat, grad = param.reshape(-1), grads[name].reshape(-1)
        # The largest entry, which the tolerance is relative to, and two drawn ones.
        for i in (np.abs(grad).argmax(), *rng.integers(0, flat.size, 2)):
            start, losses = flat[i], []
            for shift in (STEP, -STEP):
                flat[i] = start + shift
                losses.append(network.loss_and_grads(x, targets, 3)[0])
            flat[i] = start
            slope = (losses[0] - losses[1]) / (2 * STEP)
            assert grad[i] == pytest.approx(slope, rel=0, abs=DIFFERENCES), name
        assert np.abs(grad).max() > 1e3 * DIFFERENCES, f"{name}: nothing to compare"


@pytest.mark.slow
def test_it_learns_to_read(example, monkeypatch, capsys):
    arguments = ["train_transformer.py", "--backend", "numpy", "--epochs", "6"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--min-accuracy", "1.01"])
    assert example.main() == 1
    said = capsys.readouterr()
    assert "FAILED: test accuracy below 101.00%" in said.err
    assert float(said.out.rpartition(" ")[2].strip("%\n")) > 80
