"""Plans: shapes, dtypes and strides decide them once, and never for other arrays."""

import sys
from functools import partial

import numpy as np
import pytest

import gradkit
from gradkit import _host
from gradkit._cuda import CudaBackend
from gradkit._host import chosen
from gradkit._open import dispatch
from testbed.emulator import IdleDevice
from tests.devices.emulated import IdleArray, on_device


def test_what_is_remembered_is_bounded(monkeypatch):
    known = dispatch._plans
    monkeypatch.setattr(dispatch, "_MOST", 8)
    known.clear()
    for length in range(1, 100):
        gradkit.rms_norm(np.ones((1, length)))
        gradkit.accumulate_grad(np.ones(length), np.ones(1))
        assert len(known) <= 8


def check_memory(make):
    """Overlaps, and what else depends on addresses, are nothing that a plan knows."""
    dy, x, room = (make(np.ones((4, 6), np.float32)) for _ in range(3))
    scale, row, scales = (make(np.ones(n, np.float32)) for n in (6, 4, (2, 6)))
    flat = make(np.ones(30, np.float32))
    inside, behind = flat[:24].reshape(4, 6), flat[6:].reshape(4, 6)
    grad = partial(gradkit.layer_norm_grad, dy, x, scale, row, row)
    for _ in range(3):
        out = (room, *scales)
        found = grad(out=out)
        assert all(a is b for a, b in zip(found, out, strict=True))
        assert grad(out=(dy, *scales))[0] is dy
        for wrong, message in (
            ((x, *scales), r"out\[0\] shares memory with x"),
            ((room, scales[1], scales[1]), r"out\[1\] and out\[2\] share memory"),
            ((room, scale, scales[1]), r"out\[1\] shares memory with scale"),
        ):
            with pytest.raises(ValueError, match=message):
                grad(out=wrong)
        for first, second in ((inside, behind), (behind, inside)):
            with pytest.raises(ValueError, match=r"out\[0\] shares memory with x"):
                gradkit.layer_norm_grad(dy, second, scale, row, row, out=(first, *scales))
        with pytest.raises(ValueError, match="buffer shares memory with grad"):
            gradkit.accumulate_grad(inside, behind)
        gradkit.accumulate_grad(room, inside)
        gradkit.batch_norm(x, None, None)  # of which running statistics are not written
        running = make(np.ones(6, np.float32)), make(np.ones(6, np.float32))
        with pytest.raises(ValueError, match="running_mean and running_var share memory"):
            gradkit.batch_norm(x, None, None, running_mean=running[0], running_var=running[0])
        gradkit.batch_norm(x, None, None, running_mean=running[0], running_var=running[1])


def test_memory_is_looked_at_in_each_call(backend):
    check_memory(backend.asarray)


@pytest.mark.emulated
def test_memory_on_a_device_is_looked_at_in_each_call():
    check_memory(idle_arrays())


def test_an_option_without_a_hash_is_looked_at_each_time():
    x = np.array([[1.0, 2.0], [3.0, 5.0]])
    for axis in (1, np.array(1), 0, np.array(0), np.array(1)):
        assert gradkit.layer_norm(x, axis=axis)[1].shape == x.shape[: int(axis)]


class Whole:
    """An integer that can be changed, with a hash, as a tensor of PyTorch is one."""

    def __index__(self):
        return self.value


@pytest.mark.parametrize("compiled", [True, False])
def test_an_option_that_can_be_changed_is_looked_at_each_time(compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(_host, "code", None)
    x, own = np.arange(8.0).reshape(2, 4), Whole()
    for own.value in (1, 0, 1, 0):
        assert gradkit.layer_norm(x, axis=own)[1].shape == x.shape[: own.value]
        assert gradkit.batch_norm(x, channel_axis=own)[1].shape == x.shape[own.value :][:1]
    for own.value in (1, 2, 4, 1):
        assert gradkit.group_norm(x, own)[1].shape == (2, own.value)


def test_numbers_are_checked_unless_they_are_the_very_ones_of_the_last_call(monkeypatch):
    buffer, grad, half = np.zeros(3), np.ones(3), 0.5

    def add(**numbers):
        return gradkit.accumulate_grad(buffer, grad, **numbers).tolist()

    for times in (1, 2, 3):
        assert add(do_update=True, scale=half) == [times / 2] * 3
    for name, wrong in (("do_update", 1), ("do_update", 1.0), ("scale", "0.5"), ("scale", [0.5])):
        with pytest.raises(TypeError, match=name):
            add(**{"do_update": True, "scale": half, name: wrong})
    for scale in (np.float64(0.5), 1, 1):  # which a check changes
        add(scale=scale)
    for _ in range(2):
        with pytest.raises(TypeError, match="scale"):
            add(scale=True)
    assert add(scale=half) == [4.5] * 3
    if _host.code is not None:
        monkeypatch.setattr(dispatch, "_check_passing", None)
        assert add(scale=half) == [5] * 3
        with pytest.raises(TypeError, match="not callable"):
            add(scale=float(np.float64(half)))


def adamw(params, scale=0.5, step=1, verdict=True):
    grads, moments, variances = ([np.full(3, value)] for value in (3.0, 0.0, 0.0))
    numbers = {"lr": 0.25, "scale": scale, "verdict": verdict}
    return gradkit.adamw_update(params, grads, moments, variances, step, **numbers)


# Calls of one list, with the number that they are given in an array.
WITH_NUMBERS = {
    "accumulate": lambda own, n: gradkit.accumulate_grads(own, [np.ones(3)], scale=n),
    "adamw's scale": adamw,
    "adamw's rate": lambda own, n: gradkit.sgd_update(own, [np.ones(3)], lr=n),
    "average": lambda own, n: gradkit.ema_update(own, [np.ones(3)], n),
    "clip": lambda own, n: gradkit.clip_grad_norm(own, n),
    "norm": lambda own, n: gradkit.grad_norm(own, scale=n),
    "of a clip": lambda own, n: gradkit.clip_grad_norm(own, 1.0, scale=n),
}


@pytest.mark.parametrize("name", WITH_NUMBERS)
def test_a_number_in_an_array_is_read_in_each_call(name, monkeypatch):
    """On the road of plain numbers, whether or not the array is the one of the last call."""
    call, number = WITH_NUMBERS[name], np.array(0.25)

    def results(given):
        own = [np.arange(3.0)]
        return float(np.sum(call(own, given))), own[0].tolist()

    results(number)
    if _host.code is not None:
        monkeypatch.setattr(dispatch, "_run_by_name", None)
    for value in (0.25, 0.5, 0.75, 0.25):
        number[...] = value
        expected = results(value)
        for given in (number, number.astype(np.float32), np.float64(value), np.float32(value)):
            assert results(given) == expected


@pytest.mark.parametrize("name", [name for name in WITH_NUMBERS if name != "norm"])
def test_a_number_among_what_is_written_is_read_first(name):
    call = WITH_NUMBERS[name]
    for _ in range(2):
        expected, own = [np.array([1.0, 0.5, 2.0])], [np.array([1.0, 0.5, 2.0])]
        call(expected, 0.5)
        call(own, own[0][1:2].reshape(()))
        assert own[0].tolist() == expected[0].tolist()


def test_a_step_is_counted_and_a_verdict_is_read_in_each_call():
    params, step, verdict = [np.ones(3)], np.array(0), np.array(True)
    for taken in (1, 2, 2, 3):
        verdict[...] = taken != int(step)
        before = params[0].tolist()
        adamw(params, step=step, verdict=verdict)
        assert int(step) == taken
        assert (params[0].tolist() == before) == (not verdict)
    inside = params[0][:1].view(np.int64).reshape(())
    for wrong in (np.array(1.0), np.array([1]), np.array(-1), inside):
        with pytest.raises((TypeError, ValueError), match="step"):
            adamw(params, step=wrong)


@pytest.mark.skipif(_host.code is None, reason="nothing is compiled")
def test_a_result_in_place_of_an_argument_is_known_after_one_call(monkeypatch):
    dy, x, scale = np.random.default_rng(0).normal(size=(3, 4, 4))
    row, scales = np.ones(4), np.zeros((2, 4))
    expected = gradkit.layer_norm_grad(dy, x, scale[0], row, row)[0]
    for known in (False, True, True):
        own = dy.copy()
        with monkeypatch.context() as patch:
            if known:
                patch.setattr(dispatch, "Opened", None)
            dx, *_ = gradkit.layer_norm_grad(own, x, scale[0], row, row, out=(own, *scales))
        assert dx is own
        np.testing.assert_array_equal(own, expected)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"out\[0\] shares memory with x"):
            gradkit.layer_norm_grad(dy, x, scale[0], row, row, out=(x, *scales))


@pytest.mark.parametrize("place", ["host", "device"])
def test_only_missing_results_are_made(place, monkeypatch):
    """A warm call is short, whichever results the caller has arrays for."""
    asarray = idle_arrays() if place == "device" else np.array
    dy, x = (asarray(a) for a in np.random.default_rng(0).normal(size=(2, 3, 4)))
    scale, row = asarray(np.ones(4)), asarray(np.ones(3))
    grad = partial(gradkit.layer_norm_grad, dy, x, scale, row, row)
    expected = grad()
    backend = dy.backend if place == "device" else chosen.get()
    outputs, made = backend.outputs, []
    for names in ["100", "010", "011", "000", "111"]:
        outs = tuple(
            asarray(np.zeros(a.shape)) if n == "1" else None
            for n, a in zip(names, expected, strict=True)
        )
        first = grad(out=outs)
        with monkeypatch.context() as patch:
            patch.setattr(dispatch, "Opened", None)
            patch.setattr(backend, "outputs", lambda specs: outputs(made.extend(specs) or specs))
            found = grad(out=outs)
        for array, before, own, ref in zip(found, first, outs, expected, strict=True):
            assert (array is own) == (before is array) == (own is not None)
            assert (array.shape, array.strides) == (ref.shape, ref.strides)
            if place == "host":
                np.testing.assert_array_equal(array, ref)
    assert len(made) - made.count(None) == 2 + 2 + 1 + 3


def test_a_result_that_there_is_not_stays_none():
    x, row = np.ones((2, 3)), np.ones(2)
    dx = np.zeros((2, 3))
    for _ in range(3):
        found = gradkit.layer_norm_grad(x, x.copy(), None, row, row, out=(dx, None, None))
        assert found[0] is dx
        assert found[1:] == (None, None)


def idle_arrays():
    """Return a maker of arrays of a device that launches nothing, opened as CuPy's are."""
    backend = CudaBackend(IdleDevice())
    return lambda host: on_device(backend.device.xp.array(host), backend, IdleArray)


@pytest.mark.emulated
def test_results_that_are_arguments_and_those_in_another_order_are_short(monkeypatch):
    """As SpikeGuard's state is both, and as images lie with their channels last."""
    make = idle_arrays()
    dy, x = (make(np.ones((4, 6), np.float32)) for _ in range(2))
    scale, row, scales = (make(np.ones(n, np.float32)) for n in (6, 4, (2, 6)))
    last = [make(np.ones((2, 5, 4, 3), np.float32)).transpose(0, 3, 1, 2) for _ in range(3)]
    channels, sums = make(np.ones(3, np.float32)), make(np.ones((2, 3), np.float32))

    def rows(first):
        return gradkit.layer_norm_grad(dy, x, scale, row, row, out=(first, *scales))

    def images(dx, *more):
        out = (dx, *(more or sums))
        return gradkit.batch_norm_grad(*last[:2], channels, channels, channels, out=out)

    assert rows(dy)[0] is dy
    assert images(last[2])[0] is last[2]
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "Opened", None)
        assert rows(dy)[0] is dy
        assert images(last[2])[0] is last[2]
    for _ in range(2):
        with pytest.raises(ValueError, match=r"out\[0\] shares memory with x"):
            rows(x)
        with pytest.raises(ValueError, match=r"out\[0\] shares memory with x"):
            images(last[1])
        with pytest.raises(ValueError, match=r"out\[1\] and out\[2\] share memory"):
            images(last[2], sums[0], sums[0])


@pytest.mark.emulated
@pytest.mark.parametrize("axis", [[1, (1, 2), None], [(0,), 0, ()]])
def test_units_that_are_known_say_nothing_of_others(axis):
    make = idle_arrays()
    grads = [make(np.ones(shape, np.float32)) for shape in ((2, 3), (3, 4, 5), 6)]
    for _ in range(2):
        expected = [
            tuple(n for k, n in enumerate(g.shape) if k not in np.atleast_1d(one))
            for g, one in zip(grads[:2], axis, strict=False)
        ]
        norms = gradkit.clip_grad_block_norm(grads, 1.0, axis=axis)
        assert [each.shape for each in norms] == [*expected, ()]
        norms = gradkit.clip_grad_block_norm(grads[::-1], 1.0)
        assert [each.shape for each in norms] == [(), (), ()]
        with pytest.raises(TypeError, match=r"axis for grads\[1\] must be an integer, not bool"):
            gradkit.clip_grad_block_norm(grads, 1.0, axis=[axis[0], (True, 2), None])
        with pytest.raises(ValueError, match=r"axis for grads\[1\] is 3"):
            gradkit.clip_grad_block_norm(grads, 1.0, axis=[axis[0], 3, None])


@pytest.mark.emulated
def test_lists_that_fit_say_nothing_of_others():
    """Of two lists that come again, what was found once is not looked at anew."""
    make = idle_arrays()
    room, buffers, grads = make(np.ones(64, np.float32)), [], []
    for k in range(3):
        buffers.append(room[8 * k : 8 * k + 6].reshape(2, 3))
        grads.append(room[32 + 8 * k : 32 + 8 * k + 6].reshape(2, 3))
    norm, float64 = make(np.zeros(())), make(np.ones((2, 3)))
    for _ in range(3):
        gradkit.accumulate_grads(buffers, grads, norm_out=norm)
        gradkit.accumulate_grads(dict(zip("abc", buffers)), dict(zip("abc", grads)))  # noqa: B905
        gradkit.accumulate_grads(buffers, buffers)
        for wrong, message in (
            ([*grads[:2], grads[2].reshape(3, 2)], r"grads\[2\] has shape \(3, 2\)"),
            ([*grads[:2], room[18:24].reshape(2, 3)], r"grads\[2\] overlaps buffers\[2\]"),
            ([grads[0], buffers[0], grads[2]], r"grads\[1\] overlaps buffers\[0\]"),
            (buffers[::-1], r"grads\[2\] overlaps buffers\[0\]"),
            (grads[:2], r"buffers\[2\] has no counterpart"),
            (dict(zip("abc", grads)), "same structure"),  # noqa: B905
        ):
            with pytest.raises(ValueError, match=message):
                gradkit.accumulate_grads(buffers, wrong)
        with pytest.raises(ValueError, match=r"\['c'\] has no counterpart"):
            gradkit.accumulate_grads(dict(zip("abc", buffers)), dict(zip("abd", grads)))  # noqa: B905
        with pytest.raises(TypeError, match=r"grads\[2\] has dtype float64"):
            gradkit.accumulate_grads(buffers, [*grads[:2], float64])
        gradkit.accumulate_grads(buffers, [*grads[:2], float64], casting="same_kind")
        with pytest.raises(ValueError, match=r"compensation\[0\] overlaps buffers\[0\]"):
            gradkit.accumulate_grads(buffers, buffers, compensation=buffers)
        for shared in (buffers[1], grads[2]):
            inside = shared.reshape(-1)[2:4].view(np.float64).reshape(())
            with pytest.raises(ValueError, match="norm_out shares memory with"):
                gradkit.accumulate_grads(buffers, grads, norm_out=inside)
            with pytest.raises(ValueError, match="grad_norm_out shares memory with"):
                gradkit.accumulate_grads(buffers, grads, norm_out=norm, grad_norm_out=inside)
        with pytest.raises(ValueError, match="grad_norm_out shares memory with norm_out"):
            gradkit.accumulate_grads(buffers, grads, norm_out=norm, grad_norm_out=norm)


@pytest.mark.emulated
def test_a_plan_on_one_device_says_nothing_of_two():
    one, other = idle_arrays(), idle_arrays()
    ones = np.ones((4, 6), np.float32)
    for on in (one, other, one):
        gradkit.rms_norm(on(ones))
        assert on(ones).backend.device.compiled
        with pytest.raises(ValueError, match="are on different devices"):
            gradkit.add_rms_norm(one(ones), other(ones))
        gradkit.add_rms_norm(one(ones), one(ones))
    with pytest.raises(TypeError, match="x is a str; expected an array"):
        gradkit.rms_norm("ones")


def test_new_results_of_batch_norm_lie_as_x_does_whatever_came_before():
    first = np.ones((2, 3, 4))
    for x in (first, first.transpose(0, 2, 1).copy().transpose(0, 2, 1), np.asfortranarray(first)):
        y, mean, inv_std = gradkit.batch_norm(x)
        dx, _, _ = gradkit.batch_norm_grad(x, x, None, mean, inv_std)
        assert y.strides == dx.strides == x.strides


def test_a_known_call_keeps_no_reference():
    buffer, grad, scale = np.zeros(3), np.ones(3), 0.12345
    counts = []
    for _ in range(8):
        gradkit.accumulate_grad(buffer, grad, scale=scale)
        counts.append([sys.getrefcount(each) for each in (buffer, grad, scale)])
    assert counts[2:] == [counts[2]] * 6
