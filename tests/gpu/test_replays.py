"""Launches that a plan remembers do what its next calls would have done."""

from unittest import mock

import numpy as np
import pytest

import gradkit
from gradkit import _host
from gradkit._cuda.cudnn import library
from gradkit._cuda.launch import replay
from gradkit._open import dispatch
from tests.backends import CuPy, has_gpu
from tests.gpu.test_captures import CALLS, LARGE, Arguments
from tests.operations import OPERATIONS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not has_gpu(), reason="no CUDA device"),
    pytest.mark.skipif(_host.code is None, reason="compiled code finds plans"),
]

BACKEND = CuPy()
# Calls that are known whatever arrays they have, and those that are if lists lie where they did.
FAMILIES = {"rows", "groups", "channels"}
LISTS = {"grad_norm", "clip_grad_norm", "accumulate_grads"}


@pytest.fixture
def again():
    """Have no plans; count the calls that were launched as an earlier one."""
    dispatch._plans.clear()
    known, counts = replay._Launched.again, {True: 0, False: 0}

    def counted(*arguments):
        found = known(*arguments)
        counts[found] += 1
        return found

    without_cudnn = mock.patch.object(library, "is_missing", return_value=True)
    with BACKEND.active(), without_cudnn, mock.patch.object(replay._Launched, "again", counted):
        yield counts
    dispatch._plans.clear()


def computed():
    """Nothing is launched as an earlier call."""
    return mock.patch.object(replay._Launched, "again", return_value=False)


def bits_of(operation, sets):
    """Of calls on sets of arrays, on each twice in a row, with other values the second time."""
    found = []
    for arguments in sets:
        for change in (np.array, np.flip):
            arguments.restore(change)
            found.append(arguments.bits(operation(**arguments.given)))
    return found


@pytest.mark.parametrize(
    ("name", "layout"),
    [*((name, "C") for name in CALLS | LARGE), *((name, "misaligned") for name in OPERATIONS)],
)
def test_known_launches_have_the_bits_of_the_call(name, layout, again):
    """On arrays that lie elsewhere; those that begin between packs are computed as before."""
    operation, variant, more = (CALLS | LARGE)[name]
    sets = [Arguments(operation, variant, more, each) for each in ("C", layout, "C")]
    with computed():
        expected = bits_of(operation, sets)
    dispatch._plans.clear()
    assert bits_of(operation, sets) == expected
    if layout == "C" and operation.family in FAMILIES:
        assert again == {True: 4, False: 0}  # but the one that made the plan, and the one noted
    if layout == "C" and name in LISTS:
        assert again[True] == 2


def rows(number, seed=0):
    """Rows for a norm, and their scale."""
    import cupy

    random = np.random.default_rng(seed)
    return [cupy.asarray(random.normal(size=shape)) for shape in ((number, 8), (8,))]


def test_a_limit_in_an_array_is_read_where_it_is(again):
    import cupy

    grads = [cupy.full(4, 4.0), cupy.full(9, 3.0)]
    for limit in (1.0, 1.0, 1.0, cupy.array(2.0), cupy.array(3.0), 1.0, cupy.array(0.5)):
        for grad in grads:
            grad.fill(4)
        gradkit.clip_grad_norm(grads, limit)
        assert float(gradkit.grad_norm(grads)) == pytest.approx(float(limit), rel=1e-5)
    assert again[True] > 5  # clips and norms


def test_lists_that_travel_by_an_upload_are_uploaded_anew(again):
    """Memory that they lie in is another call's as soon as their plan is forgotten."""
    import cupy

    grads = [cupy.full(7, 2.0) for _ in range(200)]
    for _ in range(4):
        gradkit.clip_grad_norm(grads, 1.0)
        gradkit.clip_grad_norm([cupy.ones(3 + _) for k in range(200)], 1.0)
    assert not again[True]


def test_known_launches_run_on_the_current_stream(again):
    import cupy

    x, scale = rows(64)
    for _ in range(3):
        expected, _ = gradkit.rms_norm(x, scale)
    cupy.cuda.runtime.deviceSynchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        y, _ = gradkit.rms_norm(x, scale)
        stream.synchronize()
        assert (y == expected).all()
        stream.begin_capture()
        y, _ = gradkit.rms_norm(x, scale)
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
        assert (y == expected).all()
    assert again[True] == 2  # not in a capture, which keeps its memory
