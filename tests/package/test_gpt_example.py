"""The example of a GPT on plain arrays: its gradients, a run, and a run that is resumed."""

import importlib
import math
import re

import numpy as np
import pytest

from tests.package.test_demo import DIFFERENCES, EXAMPLES, STEP


@pytest.fixture
def example(monkeypatch):
    """The program, with a small network."""
    monkeypatch.syspath_prepend(EXAMPLES)
    program = importlib.import_module("numpy_gpt")
    sizes = {"CONTEXT": 7, "WIDTH": 12, "HEADS": 3, "LAYERS": 2, "BATCH": 4, "MICRO_BATCH": 2}
    for name, size in sizes.items():
        monkeypatch.setattr(program, name, size)
    return program


def test_gradients_are_those_of_the_loss(example):
    """Of every parameter, through attention, the perceptrons and the residual stream."""
    rng = np.random.default_rng(0)
    params = example.initialised(1, "float64")
    for param in params.values():
        param += rng.normal(0, 0.3, param.shape)
    text, following = example.windows(example.encoded(), 0)

    def mean_loss():
        return example.loss_and_grads(params, text, following)[0] / text.size

    _, grads = example.loss_and_grads(params, text, following)
    assert grads.keys() == params.keys()
    for name, param in params.items():
        flat, grad = param.reshape(-1), grads[name].reshape(-1) / text.size
        # The largest entry, which the tolerance is relative to, and drawn ones.
        for i in (np.abs(grad).argmax(), *rng.integers(0, flat.size, 5)):
            start, losses = flat[i], []
            for shift in (STEP, -STEP):
                flat[i] = start + shift
                losses.append(mean_loss())
            flat[i] = start
            slope = (losses[0] - losses[1]) / (2 * STEP)
            assert grad[i] == pytest.approx(slope, rel=0, abs=DIFFERENCES), name
        assert np.abs(grad).max() > 1e3 * DIFFERENCES, f"{name}: nothing to compare"


def test_a_character_reads_none_that_follow(example):
    params, text = example.initialised(), np.arange(5)[None]
    logits, _ = example.gpt(params, text)
    changed, _ = example.gpt(params, np.where(text == 3, 7, text))
    np.testing.assert_array_equal(logits[:3], changed[:3])
    assert (logits[3:] != changed[3:]).any(axis=1).all()


def test_adamw_is_its_expressions(example):
    ours, theirs = (example.Training(example.initialised(0, "float64")) for _ in range(2))
    for step in (1, 2):
        for name, grad in ours.grads.items():
            grad[...] = theirs.grads[name][...] = np.random.default_rng(step).normal(
                size=grad.shape
            )
        ours.adamw(step, 0.1)
        example.adamw_by_expressions(theirs, step, 0.1)
    for name, param in ours.params.items():
        np.testing.assert_allclose(param, theirs.params[name], rtol=1e-12, atol=1e-12)
    assert example.milliseconds(example.Training.adamw, ours) > 0


def test_a_step_is_that_of_the_mean_gradient_of_its_batch(example):
    """Micro-batches are added up, clipped to the limit, and averages follow."""
    start, batch = example.initialised(0, "float64"), example.windows(example.encoded(), 0)
    training = example.Training({name: value.copy() for name, value in start.items()})
    norm = training.step(*batch, 0.1)
    _, grads = example.loss_and_grads(start, *batch)
    flat = np.concatenate([grad.ravel() for grad in grads.values()]) / batch[0].size
    assert norm == pytest.approx(np.linalg.norm(flat), rel=1e-12)
    limit = example.MAX_NORM
    assert norm > limit
    clipped = np.concatenate([grad.ravel() for grad in training.grads.values()])
    np.testing.assert_allclose(clipped, flat * limit / norm, rtol=1e-9, atol=1e-15)
    for name, value in start.items():
        # AdamW's first step is the rate in the direction of the gradient's sign.
        kept = 1 if name in ("scale", "bias") else 1 - 0.1 * example.WEIGHT_DECAY
        wanted = kept * value - 0.1 * np.sign(grads[name]) * (grads[name] != 0)
        large = np.abs(training.grads[name]) > 1e-4
        assert large.any()
        np.testing.assert_allclose(training.params[name][large], wanted[large], atol=1e-4)
        average = value + (training.params[name] - value) * 10 / 11
        np.testing.assert_allclose(training.averages[name], average, rtol=1e-12, atol=1e-15)


def test_it_learns_and_writes(example, capsys):
    training = example.main(["--steps", "40"])
    printed = capsys.readouterr().out
    assert training.losses[0] == pytest.approx(math.log(len(example.CHARACTERS)), abs=0.1)
    assert np.mean(training.losses[-5:]) < training.losses[0] - 0.5
    steps, cores, ours, adamw, theirs, *text = printed.splitlines()
    assert steps.startswith("40 steps, loss 4.")
    assert re.fullmatch(r"On .+, \d+ cores:", cores)
    assert ours.startswith("gradkit and numpy: ")
    assert adamw.startswith("AdamW: ")
    assert theirs.startswith("PyTorch")
    assert "\n".join(text) == example.written(training.averages, "The ", 300)


def test_a_run_that_was_stopped_ends_with_the_same_bits(example, monkeypatch, tmp_path):
    text, path, rate = example.encoded(), tmp_path / "gpt.npz", example.rate
    straight, _ = example.train(text, 6)
    monkeypatch.setattr(example, "SAVE_EVERY", 2)
    monkeypatch.setattr(example, "rate", lambda k, steps: rate(k, steps) if k < 5 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        example.train(text, 6, path)
    monkeypatch.setattr(example, "rate", rate)
    resumed, _ = example.train(text, 6, path)
    assert resumed.losses == straight.losses
    for part in ("params", "averages", "first", "second"):
        for name, array in getattr(straight, part).items():
            np.testing.assert_array_equal(getattr(resumed, part)[name], array)
    assert [file.name for file in tmp_path.iterdir()] == ["gpt.npz"]
