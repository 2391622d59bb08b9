"""Checks of errors: what goes wrong on one rank ends the call on all, and the group goes on."""

import contextlib
import signal
import time
from functools import partial
from unittest import mock

import numpy as np

import gradkit
from gradkit import _host
from tests.distributed.test_agreement import OTHER
from tests.processes.norms import bits

SOON_S = 5


def raising(error):
    """Gradients whose iteration raises."""
    raise error
    yield


def interrupted():
    """Gradients during whose iteration Ctrl-C arrives."""
    signal.raise_signal(signal.SIGINT)
    yield


@contextlib.contextmanager
def wrong(**arguments):
    """Arguments that the rank at fault passes instead."""
    yield arguments


@contextlib.contextmanager
def no_room():
    """No memory once the rank adds up its gradients."""
    with mock.patch.object(_host.backend(), "norm_parts", side_effect=MemoryError("no room")):
        yield {}


TROUBLES = {
    "a bad dtype": (lambda: wrong(grads=np.arange(3)), TypeError),
    "a bad limit": (lambda: wrong(max_norm=-1.0), ValueError),
    "a bad policy": (lambda: wrong(nonfinite="never"), ValueError),
    "too many replicas": (lambda: wrong(replicas=99), ValueError),
    "no memory for the list": (lambda: wrong(grads=raising(MemoryError("no room"))), MemoryError),
    "Ctrl-C": (lambda: wrong(grads=interrupted()), KeyboardInterrupt),
    "an exit": (lambda: wrong(grads=raising(SystemExit(3))), SystemExit),
    "no memory for the sums": (no_room, MemoryError),
}


def attempt(call, **arguments):
    """The error that a call raises, if any, and its seconds."""
    start = time.monotonic()
    try:
        call(**arguments)
    except BaseException as error:
        return error, time.monotonic() - start
    return None, time.monotonic() - start


def fails_on_one(place, trouble):
    """First all calls, then the assertions: no rank may leave the others waiting."""
    found = []
    context, kind = TROUBLES[trouble]
    for at in sorted({0, place.size - 1}):
        grads, out = [place.array([3.0, 4.0]), place.array([5.0])], place.array(7.0)
        arguments = {"grads": grads, "max_norm": 1.0, "out": out, "group": place.group}
        with context() if place.rank == at else wrong() as own:
            error, seconds = attempt(gradkit.clip_grad_norm, **arguments | own)
        again = float(gradkit.grad_norm(grads[1], 1, group=place.group))
        found.append((at, error, seconds, bits(*grads, out), again))
    for at, error, seconds, memory, again in found:
        assert isinstance(error, kind if place.rank == at else gradkit.RankError), error
        if place.rank != at:
            assert error.ranks.keys() == {at}
            assert error.ranks[at].startswith(f"{kind.__name__}: ")
        assert seconds < SOON_S
        assert memory == bits([3.0, 4.0], [5.0], 7.0)
        assert again == 5.0 * place.size


def other_argument(name, last):
    """A clip, and what the last rank passes otherwise."""
    arguments = {"max_norm": 1.0, "eps": 1.0, "clip": True, "count": True}
    return gradkit.clip_grad_norm, arguments | ({name: OTHER[name]} if last else {})


CALLS = {
    **{name: partial(other_argument, name) for name in OTHER if name != "exact"},
    "p": lambda last: (gradkit.grad_norm, {"norm_type": 1 if last else 2}),
    "one norm or each": lambda last: (gradkit.per_tensor_norms if last else gradkit.grad_norm, {}),
    "function": lambda last: (gradkit.clip_grad_norm, {"max_norm": 1.0}) if last else
                             (gradkit.grad_norm, {}),
}  # fmt: skip


def different_calls(place, differ):
    last = place.rank == place.size - 1
    call, arguments = CALLS[differ](last)
    grads = [place.array([3.0]), place.array([4.0])]
    if "clip" in arguments or "count" in arguments:
        arguments["replicas"] = place.size
    error, seconds = attempt(call, grads=grads, group=place.group, **arguments)
    again = float(gradkit.grad_norm(grads, group=place.group))
    assert isinstance(error, gradkit.RankError), error
    assert "different calls" in str(error)
    assert [*error.ranks] == [*range(place.size)]
    assert error.ranks[0] != error.ranks[place.size - 1]
    assert seconds < SOON_S
    assert bits(*grads) == bits(3.0, 4.0)
    assert abs(again - 5 * place.size**0.5) < 1e-14
    return str(error)


def different_numbers_of_norms(place):
    grads = [place.array([3.0])] * (2 if place.rank else 1)
    error, _ = attempt(gradkit.per_tensor_norms, grads=grads, group=place.group)
    assert isinstance(error, gradkit.RankError), error
    assert error.ranks[0].endswith("3 numbers a rank")
    return str(error)


CHECKS = {
    **{f"{name} on one rank": partial(fails_on_one, trouble=name) for name in TROUBLES},
    **{f"ranks differ in {name}": partial(different_calls, differ=name) for name in CALLS},
    "ranks differ in their number of norms": different_numbers_of_norms,
}
