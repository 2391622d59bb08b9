"""The example a newcomer starts from: its gradients, its training step, and a short run."""

import importlib
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from gradkit import SpikeGuard

EXAMPLES = Path(__file__).parents[2] / "examples"

if not os.environ.get("CI"):  # there, a missing package is a failure
    for package in ("matplotlib", "sklearn", "tqdm"):
        if find_spec(package) is None:  # importing it now would take seconds
            pytest.skip("pip install '.[demo]'", allow_module_level=True)

# Central differences in float64 with a step of 1e-6 on a loss near 1: rounding of the loss
# costs about 1e-16 / 1e-6 = 1e-10, the third derivative about 1e-12.
STEP, DIFFERENCES = 1e-6, 1e-8
# Sums of a few float64 numbers of size 1, in another order.
REORDERED = 1e-14


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        importlib.import_module("digits_plot")
        return importlib.import_module("train_digits")


def some_digits(demo, count, seed=3):
    """Digits in float64, and a network whose parameters are all unlike their start."""
    digits = demo.Digits.load(np, seed)
    network = demo.Network.initialised(np, 64, seed, "float64")
    rng = np.random.default_rng(seed)
    for value in network.params.values():
        value += rng.normal(0, 0.1, value.shape)
    return (
        network,
        digits.train_x[:count].astype(np.float64),
        digits.train_targets[:count].astype(np.float64),
    )


def test_gradients_are_those_of_the_loss(demo):
    network, x, targets = some_digits(demo, 12)
    _, grads = network.loss_and_grads(x, targets, len(x))
    rng = np.random.default_rng(0)
    assert grads.keys() == network.params.keys()
    for name, param in network.params.items():
        flat = param.reshape(-1)
        # The largest entry, which the tolerance is relative to, and five drawn ones.
        largest = np.abs(grads[name]).argmax()
        for i in (largest, *rng.integers(0, flat.size, 5)):
            start, losses = flat[i], []
            for shift in (STEP, -STEP):
                flat[i] = start + shift
                losses.append(network.loss_and_grads(x, targets, len(x))[0])
            flat[i] = start
            slope = (losses[0] - losses[1]) / (2 * STEP)
            assert grads[name].reshape(-1)[i] == pytest.approx(slope, rel=0, abs=DIFFERENCES), name
        assert np.abs(grads[name]).max() > 1e3 * DIFFERENCES, f"{name}: nothing to compare"


def test_step_adds_up_micro_batches(demo):
    size = demo.MICRO_BATCH
    network, x, targets = some_digits(demo, 2 * size + 5)
    parts = [slice(0, size), slice(size, 2 * size), slice(2 * size, None)]
    shares = [network.loss_and_grads(x[part], targets[part], len(x)) for part in parts]
    trainer = demo.Trainer(network, max_norm=np.inf)
    for buffer in trainer.grads.values():
        buffer[...] = np.nan  # what the buffers held must leave no trace
    loss, before, after = trainer.step(x, targets, 0.0)
    assert loss == pytest.approx(sum(share for share, _ in shares), rel=REORDERED)
    for name, buffer in trainer.grads.items():
        total = sum(grads[name] for _, grads in shares)
        np.testing.assert_allclose(buffer, total, rtol=0, atol=REORDERED)
    assert before == after == pytest.approx(flat_norm(trainer.grads), rel=REORDERED)


def test_step_clips_and_updates_with_momentum(demo):
    network, x, targets = some_digits(demo, 40)
    trainer = demo.Trainer(network)
    start = {name: value.copy() for name, value in network.params.items()}
    _, before, after = trainer.step(x, targets, 0.1)
    assert before > demo.MAX_NORM
    assert after == pytest.approx(demo.MAX_NORM, rel=REORDERED)
    assert flat_norm(trainer.grads) == pytest.approx(demo.MAX_NORM, rel=REORDERED)
    first = {name: value.copy() for name, value in trainer.grads.items()}
    for name, value in network.params.items():
        np.testing.assert_array_equal(value, start[name] - 0.1 * first[name])
    middle = {name: value.copy() for name, value in network.params.items()}
    trainer.step(x, targets, 0.1)
    for name, value in network.params.items():
        velocity = demo.MOMENTUM * first[name] + trainer.grads[name]
        np.testing.assert_array_equal(value, middle[name] - 0.1 * velocity)


def test_running_statistics_follow_the_batches(demo):
    network, x, targets = some_digits(demo, 50)
    for _ in range(700):  # 0.95 ** 700 is below float64's rounding
        network.loss_and_grads(x, targets, len(x))
    hidden = x @ network.params["weights1"]
    np.testing.assert_allclose(network.running["mean"], hidden.mean(axis=0), atol=1e-12)
    np.testing.assert_allclose(network.running["var"], hidden.var(axis=0, ddof=1), rtol=1e-10)


def test_same_seed_same_run(demo):
    runs = []
    for _ in range(2):
        digits = demo.Digits.load(np, 0)
        runs.append(demo.train(demo.Network.initialised(np, 64, 0), digits, 1, 0))
    assert runs[0] == runs[1]
    assert len(runs[0].loss) == len(runs[0].norm_before) == 1437 // demo.BATCH


def test_backend_is_what_the_machine_has(demo, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)  # importing it raises ImportError
    assert demo.array_module("auto") is np
    assert demo.array_module("numpy") is np
    with pytest.raises(SystemExit, match="--backend cupy does not work here"):
        demo.array_module("cupy")


@pytest.mark.slow  # as `make demo`, which CI runs
def test_short_run_writes_the_plot(tmp_path):
    picture = tmp_path / "run.png"
    done = run("--epochs", "2", "--output", str(picture), "--min-accuracy", "0.5")
    assert done.returncode == 0, done.stderr
    assert "22 steps" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert "mean test accuracy of 3 runs: " in done.stdout
    assert done.stderr == ""  # the progress bar is for terminals


def test_smoothing_does_not_lag():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        smoothed = importlib.import_module("digits_plot").smoothed
    decay = np.exp(-np.arange(200) / 20)  # a line on the plot's logarithmic axis
    np.testing.assert_allclose(smoothed(decay), decay, rtol=1e-9)
    bump = np.exp(-(((np.arange(200) - 90) / 30) ** 2))
    assert np.argmax(smoothed(bump)) == 90
    assert smoothed([1.0]) == 1.0


@pytest.fixture(scope="module")
def guarded(demo) -> ModuleType:
    """The example of the spike guard, which has the demo's network."""
    assert demo.MAX_NORM
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        return importlib.import_module("spike_guard")


@pytest.mark.slow
def test_the_guard_clips_the_poisoned_steps_and_saves_the_run(
    guarded, tmp_path, monkeypatch, capsys
):
    runs, train = [], guarded.train
    monkeypatch.setattr(guarded, "train", lambda guard: runs.append(train(guard)) or runs[-1])
    picture = tmp_path / "guard.png"
    monkeypatch.setattr(sys, "argv", ["spike_guard.py", "--output", str(picture)])
    assert guarded.main() == 0
    without, saved = runs
    first = guarded.POISONED[0]
    assert without.loss[: first + 1] == saved.loss[: first + 1]
    assert without.clipped == []
    assert {*guarded.POISONED} <= {*saved.clipped}
    assert len(saved.clipped) <= 8
    assert without.loss[-1] > 1 > 0.5 > saved.loss[-1]
    assert without.accuracy < 0.5 < 0.95 < saved.accuracy
    assert "with the guard: " in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_the_guards_run_is_the_same_again(guarded):
    assert guarded.train(SpikeGuard(), epochs=3) == guarded.train(SpikeGuard(), epochs=3)


@pytest.mark.slow
def test_low_accuracy_fails():
    done = run("--epochs", "1", "--no-plot", "--min-accuracy", "1.01")
    assert done.returncode == 1
    assert "FAILED: test accuracy below 101.00%" in done.stderr


def flat_norm(grads):
    return np.linalg.norm(np.concatenate([grad.reshape(-1) for grad in grads.values()]))


def run(*options):
    command = [sys.executable, str(EXAMPLES / "train_digits.py"), "--backend", "numpy", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
