"""What shapes, dtypes and strides alone decide is decided once, and never for other arrays."""

import gc
import threading
import weakref
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest

import gradkit
from gradkit._open import signatures
from gradkit._open.signatures import Described, Signatures
from tests.problems import make


class Pair(NamedTuple):
    x: object
    scale: object = None


class Decisions:
    """A decision that counts how often it was made."""

    def __init__(self, **options):
        self.made = []
        self.signatures = Signatures(self.decide, **options)

    def decide(self, given, *options):
        self.made.append((given, options))
        return object()


def test_the_same_signature_is_decided_once():
    decisions = Decisions()
    first = decisions.signatures(Pair(np.ones((2, 3))), 1)
    assert decisions.signatures(Pair(np.zeros((2, 3))), 1) is first
    assert decisions.signatures(Pair(np.ones((2, 3))), 1) is first
    ((given, options),) = decisions.made
    assert given == Pair(Described("x", (2, 3), np.dtype(float), None))
    assert given.x.ndim == 2
    assert options == (1,)


@pytest.mark.parametrize(
    "other",
    [
        lambda known: known(Pair(np.ones((3, 2))), 1),
        lambda known: known(Pair(np.ones((2, 3), np.float32)), 1),
        lambda known: known(Pair(np.ones((2, 3), ">f8")), 1),
        lambda known: known(Pair(np.ones((2, 3)), np.ones(3)), 1),
        lambda known: known(Pair(np.ones((2, 3))), 2),
        lambda known: known(Pair(np.ones((2, 3))), 1.0),
        lambda known: known(Pair(np.ones((2, 3))), True),
    ],
    ids=["shape", "dtype", "byte order", "one more", "option", "option's type", "a bool"],
)
def test_another_signature_is_another_decision(other):
    decisions = Decisions()
    decisions.signatures(Pair(np.ones((2, 3))), 1)
    other(decisions.signatures)
    assert len(decisions.made) == 2


def test_strides_count_if_they_are_to():
    for strides, made in ((False, 1), (True, 2)):
        decisions = Decisions(strides=strides)
        decisions.signatures(Pair(np.ones((2, 3))))
        decisions.signatures(Pair(np.ones((3, 2)).T))
        assert len(decisions.made) == made


def test_no_array_is_kept():
    decisions = Decisions(strides=True)
    array = np.ones((2, 3))
    decisions.signatures(Pair(array, array[0]))
    alive = weakref.ref(array)
    del array
    gc.collect()
    assert alive() is None


def test_it_is_bounded(monkeypatch):
    monkeypatch.setattr(signatures, "_MOST", 8)
    decisions = Decisions()
    for length in range(100):
        decisions.signatures(Pair(np.ones(length)))
        assert len(decisions.signatures._known) <= 8
    assert len(decisions.made) == 100


def test_what_is_refused_is_refused_each_time():
    for _ in range(2):
        with pytest.raises(TypeError, match="x is a NoneType; expected an array"):
            Decisions().signatures(Pair(None))
        with pytest.raises(TypeError, match="mean is a NoneType; expected an array"):
            gradkit.layer_norm_grad(np.ones((2, 3)), np.ones((2, 3)), None, None, np.ones(2))
        with pytest.raises(TypeError, match="axis must be an integer, not list"):
            gradkit.layer_norm(np.ones((2, 3)), axis=[1])
        with pytest.raises(TypeError, match="axis must be an integer, not float"):
            gradkit.layer_norm(np.ones((2, 3)), axis=1.0)
        gradkit.layer_norm(np.ones((2, 3)), axis=1)


def test_threads_may_decide_at_once():
    decisions = Decisions()
    started = threading.Barrier(8)

    def work():
        started.wait()
        for length in range(200):
            decisions.signatures(Pair(np.ones(length)))

    threads = [threading.Thread(target=work) for _ in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(decisions.signatures._known) == 200


def test_a_call_like_an_earlier_one_is_still_looked_at(backend):
    """Overlaps, and what else depends on addresses, are nothing that a signature knows."""
    p = make((4, 6))
    dy, x, scale, mean, inv_std = p.on(backend, "dy", "x", "scale", "mean", "inv_std")
    grad = partial(gradkit.layer_norm_grad, dy, x, scale, mean, inv_std)
    expected = [backend.asnumpy(a) for a in grad()]
    with pytest.raises(ValueError, match=r"out\[0\] shares memory with x"):
        grad(out=(x, None, None))
    for found, ref in zip(grad(), expected, strict=True):
        np.testing.assert_array_equal(backend.asnumpy(found), ref)
    buffer = backend.asarray(np.arange(8.0))
    gradkit.accumulate_grad(buffer[:4], buffer[4:])
    with pytest.raises(ValueError, match="grad partly overlaps the buffer"):
        gradkit.accumulate_grad(buffer[:4], buffer[1:5])


def test_new_results_of_batch_norm_lie_as_x_does_whatever_came_before():
    first = np.ones((2, 3, 4))
    for x in (first, first.transpose(0, 2, 1).copy().transpose(0, 2, 1), np.asfortranarray(first)):
        y, mean, inv_std = gradkit.batch_norm(x)
        dx, _, _ = gradkit.batch_norm_grad(x, x, None, mean, inv_std)
        assert y.strides == dx.strides == x.strides
