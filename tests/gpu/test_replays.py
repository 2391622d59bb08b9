"""Launches that a plan remembers do what its next calls would have done."""

from unittest import mock

import numpy as np
import pytest

import gradkit
from gradkit._cuda.launch import replay
from gradkit._open import dispatch
from gradkit.errors import KernelError
from tests.backends import CuPy, has_gpu
from tests.gpu.test_captures import CALLS, LARGE, Arguments

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not has_gpu(), reason="no CUDA device"),
]

BACKEND = CuPy()
# Calls that are known whatever arrays they have, and those that are if lists lie where they did.
FAMILIES = {"rows", "groups"}
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

    with BACKEND.active(), mock.patch.object(replay._Launched, "again", counted):
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
    [*((name, layout) for name in CALLS for layout in ("C", "misaligned")),
     *((name, "C") for name in LARGE)],
)  # fmt: skip
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


@pytest.mark.usefixtures("again")
@pytest.mark.parametrize(
    ("name", "values"),
    [("eps", (1e-5, 2.0, 1e-5)), ("scale_offset", (0.0, 1.0, -0.0, 0.0)), ("eps", (1, 1.0))],
)
def test_another_number_is_another_launch(name, values):
    (x, scale), found = rows(4), {}
    for value in (*values, *values, *values):
        y, _ = gradkit.rms_norm(x, scale, **{name: value})
        host, host_scale = x.get(), scale.get()
        expected, _ = gradkit.rms_norm(host, host_scale, **{name: value})
        np.testing.assert_allclose(y.get(), expected, rtol=1e-12)
        assert found.setdefault(str(value), y.get().tobytes()) == y.get().tobytes()


def test_a_limit_in_an_array_is_read_where_it_is(again):
    import cupy

    grads = [cupy.full(4, 4.0), cupy.full(9, 3.0)]
    for limit in (1.0, 1.0, 1.0, cupy.array(2.0), cupy.array(3.0), 1.0, cupy.array(0.5)):
        for grad in grads:
            grad.fill(4)
        gradkit.clip_grad_norm(grads, limit)
        assert float(gradkit.grad_norm(grads)) == pytest.approx(float(limit), rel=1e-5)
    assert again[True] == 9  # three clips, and six norms


@pytest.mark.usefixtures("again")
def test_arrays_that_were_apart_may_be_one():
    """And may begin together: no address says which of them a launch takes."""
    import cupy

    (x, scale), room = rows(4), cupy.zeros(40)
    for _ in range(4):
        gradkit.rms_norm(x, scale)
    shared = room[:32].reshape(4, 8), room[:8]
    for seed in (1, 2, 3, 4):
        room[:32] = cupy.asarray(np.random.default_rng(seed).normal(size=32))
        for given in (shared, rows(4, seed), (x, scale)):
            y, _ = gradkit.rms_norm(*given)
            expected, _ = gradkit.rms_norm(*(each.get() for each in given))
            np.testing.assert_allclose(y.get(), expected, rtol=1e-12)
    dispatch._plans.clear()
    for given in (shared, shared, rows(4), rows(4, 5)):  # noted where both begin together
        y, _ = gradkit.rms_norm(*given)
        expected, _ = gradkit.rms_norm(*(each.get() for each in given))
        np.testing.assert_allclose(y.get(), expected, rtol=1e-12)


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


@pytest.mark.usefixtures("again")
def test_a_known_launch_that_fails_says_what_a_new_one_says():
    import cupy

    x, scale = rows(4)
    for _ in range(3):
        gradkit.rms_norm(x, scale)
    (replayed,) = (plan.replay for plan in dispatch._plans.values() if plan.replay)
    ((launch, _),) = replayed._launched.launches

    def fail(_):
        raise cupy.cuda.driver.CUDADriverError(1)

    with mock.patch.object(launch, "start", fail), pytest.raises(KernelError, match="refused"):
        gradkit.rms_norm(x, scale)
