"""Sums whose rounding errors a second array keeps."""

import itertools
import math
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradkit
from testbed.emulator import EmulatedDevice
from tests import strategies as draw_
from tests.devices.emulated import emulated_backend, on_device
from tests.tolerances import DTYPES, assert_all_same_bits, assert_same_bits
from tests.values.test_accumulate_grads import norm_of, rounded
from tests.values.test_accumulation import assert_rest_untouched

PAIRS = [("bfloat16", "bfloat16"), ("float16", "float32"), ("float64", "float16")]
HALVES = ("float16", "bfloat16")


def wide(host):
    return np.asarray(host, np.float64)


def summed(buffer, kept, grad, scale, name, *, overwrite=False):
    """Result of a call, by rational numbers and one rounding at a time."""
    before, kept = (0.0, 0.0) if overwrite else (float(buffer), float(kept))
    change = kept + scale * float(grad)
    exact = Fraction(before) + Fraction(change)
    after = rounded(np.array(float(exact)), name)
    rest = float(exact - Fraction(float(after))) if math.isfinite(after) else 0.0
    return after, rounded(np.array(rest), name)


@pytest.mark.parametrize(("into", "addend"), [*itertools.product(DTYPES, DTYPES)])
@pytest.mark.parametrize(("scale", "overwrite"), [(1.0, False), (0.3, False), (0.3, True)])
def test_rounds_the_sum_and_what_is_left(backend, into, addend, scale, overwrite):
    shapes = ((70,), (3, 11), (1,))
    hosts = [draw_.values(shape, into, k) for k, shape in enumerate(shapes)]
    small = DTYPES[into].type(1e-3)
    kept = [draw_.values(shape, into, k + 5) * small for k, shape in enumerate(shapes)]
    grads = [draw_.values(shape, addend, k + 9) for k, shape in enumerate(shapes)]
    placed, rests = ([backend.asarray(h) for h in each] for each in (hosts, kept))
    options = {"scale": scale, "overwrite": overwrite, "casting": "same_kind"}
    found = gradkit.accumulate_grads(
        placed, [backend.asarray(g) for g in grads], compensation=rests, **options
    )
    assert found is placed
    for each in zip(placed, rests, hosts, kept, grads, strict=True):
        buffer, rest = map(backend.asnumpy, each[:2])
        for index in np.ndindex(buffer.shape):
            before = [host[index] for host in each[2:]]
            after, left = summed(*before, scale, into, overwrite=overwrite)
            assert (buffer[index], rest[index]) == (after, left)


@given(data=st.data(), scale=st.sampled_from((1.0, 0.3, -2.0)), overwrite=st.booleans())
def test_loses_less_than_a_pair_can_hold(backend, data, scale, overwrite):
    """Of numbers of any sizes, in any layouts; nothing beside the elements is written."""
    types = data.draw(st.lists(st.sampled_from(PAIRS), min_size=1, max_size=3))
    shapes = [data.draw(draw_.shapes(backend.max_elements // 24)) for _ in types]
    draws = [
        [data.draw(draw_.arrays(shape, name)) for name in (into, into, addend)]
        for shape, (into, addend) in zip(shapes, types, strict=True)
    ]
    hosts = [*zip(*draws, strict=True)]
    buffers, kept, grads = ([backend.asarray(h) for h in each] for each in hosts)
    options = {"scale": scale, "overwrite": overwrite, "casting": "same_kind"}
    gradkit.accumulate_grads(buffers, grads, compensation=kept, **options)
    for buffer, rest, (host, before, grad) in zip(buffers, kept, draws, strict=True):
        old = [np.zeros(host.shape)] * 2 if overwrite else [wide(host), wide(before)]
        change = old[1] + wide(grad) * scale
        now, left = (wide(backend.asnumpy(array)) for array in (buffer, rest))
        with np.errstate(over="ignore"):
            expected = rounded(old[0] + change, host.dtype.name)
        np.testing.assert_array_equal(now, wide(expected))
        finite = np.isfinite(now)
        precision, least = {
            "float16": (2.0**-11, 2.0**-25),
            "bfloat16": (2.0**-8, 2.0**-134),
            "float64": (2.0**-53, 0.0),
        }[host.dtype.name]
        bound = precision * np.abs(left) + 2.0**-51 * np.abs(change) + least
        with np.errstate(invalid="ignore"):
            lost = (old[0].astype(np.longdouble) - now) + (change.astype(np.longdouble) - left)
        assert (np.abs(lost) <= bound)[finite].all()
        assert (left[~finite] == 0).all()
        assert_rest_untouched(backend, buffer, host)
        assert_rest_untouched(backend, rest, before)


@pytest.mark.parametrize("name", HALVES)
def test_many_small_gradients(backend, name):
    """A sum in 16 bits stands still, and the pair is right to its last digits."""
    unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[name]
    grad = np.linspace(0.9, 1.1, 40).astype(DTYPES[name]) * DTYPES[name].type(unit / 2)
    alone, buffer, kept = (backend.asarray(np.ones(40, DTYPES[name])) for _ in range(3))
    gradkit.zero_grad(kept)
    placed = backend.asarray(grad)
    for _ in range(500):
        gradkit.accumulate_grads([alone], [placed])
        gradkit.accumulate_grads([buffer], [placed], compensation=[kept])
    exact = 1 + 500 * wide(grad)
    pair = wide(backend.asnumpy(buffer)) + wide(backend.asnumpy(kept))
    assert (backend.asnumpy(alone) == 1).all()
    assert (exact > 1.1).all()
    assert (np.abs(pair / exact - 1) < 500 * unit**2).all()


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_nothing_is_kept_of_what_is_not_finite(backend, name):
    dtype = DTYPES[name]
    largest = float(np.finfo(np.float32 if name == "bfloat16" else dtype).max)
    largest = {"float16": 65504.0, "bfloat16": (2 - 2.0**-7) * 2.0**127}.get(name, largest)
    hosts = [[largest, 1.0, np.inf, np.nan, 1.0, -largest], [0.0, 0.5, 0.5, 0.5, np.nan, 0.0]]
    grads = np.array([largest, np.inf, -np.inf, 1.0, 1.0, largest], dtype)
    buffer, kept = (backend.asarray(np.array(host, dtype)) for host in hosts)
    gradkit.accumulate_grads([buffer], [backend.asarray(grads)], compensation=[kept])
    expected = np.array([np.inf, np.inf, np.nan, np.nan, np.nan, 0.0])
    np.testing.assert_array_equal(wide(backend.asnumpy(buffer)), expected)
    assert_same_bits(backend.asnumpy(kept), np.zeros(6, dtype))


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize(("update", "overwrite"), [*itertools.product((False, True), repeat=2)])
def test_flags_and_norms(backend, name, update, overwrite):
    """On the host and on the device; the norm is that of the buffers alone."""
    host, before, grad = (draw_.values((300,), name, k) for k in range(3))
    on = lambda value: backend.asarray(np.array(value))  # noqa: E731
    expected = [host, before] if not update else None
    for put, by in itertools.product((bool, on), (0.5, on(0.5))):
        buffer, kept, *grads = map(backend.asarray, (host, before, grad))
        norm, arriving = on(7.0), on(7.0)
        options = {"do_update": put(update), "overwrite": put(overwrite), "scale": by}
        outs = {"norm_out": norm, "grad_norm_out": arriving}
        gradkit.accumulate_grads([buffer], grads, compensation=[kept], **options, **outs)
        found = [backend.asnumpy(array) for array in (buffer, kept)]
        if expected is None:
            each = zip(host, before, grad, strict=True)
            pairs = [summed(*one, 0.5, name, overwrite=overwrite) for one in each]
            expected = [np.array(side, host.dtype) for side in zip(*pairs, strict=True)]
        assert_all_same_bits(found, expected)
        assert_same_bits(backend.asnumpy(norm), norm_of(backend, [buffer]))
        assert_same_bits(backend.asnumpy(arriving), norm_of(backend, grads))


@pytest.mark.parametrize("count", [44, 46, 200])
def test_lists_of_any_length(backend, count):
    """In and beyond the parameter block of a launch, of which a buffer takes two rows."""
    shapes = [(k % 5 + 1, 7) for k in range(count)]
    hosts = [
        [draw_.values(s, "bfloat16", k + 9 * n) for k, s in enumerate(shapes)] for n in range(3)
    ]
    buffers, kept, grads = ([backend.asarray(h) for h in each] for each in hosts)
    gradkit.accumulate_grads(buffers, grads, compensation=kept)
    for buffer, rest, *before in zip(buffers, kept, *hosts, strict=True):
        single, own, grad = map(backend.asarray, before)
        gradkit.accumulate_grad(single, grad, compensation=own)
        assert_same_bits(backend.asnumpy(buffer), backend.asnumpy(single))
        assert_same_bits(backend.asnumpy(rest), backend.asnumpy(own))


@pytest.mark.parametrize("scale", [None, 0.25])
def test_a_gradient_that_broadcasts(backend, scale):
    host, before = draw_.values((5, 6), "float16", 1), draw_.values((5, 6), "float16", 2)
    grad = draw_.values((6,), "float16", 3)
    buffer, kept = backend.asarray(host), backend.asarray(before)
    row = backend.asarray(grad)
    assert gradkit.accumulate_grad(buffer, row, scale=scale, compensation=kept) is buffer
    for index in np.ndindex(host.shape):
        one = summed(host[index], before[index], grad[index[1]], scale or 1.0, "float16")
        assert (backend.asnumpy(buffer)[index], backend.asnumpy(kept)[index]) == one
    gradkit.accumulate_grad(buffer, row, do_update=False, compensation=kept)
    assert backend.asnumpy(buffer)[-1, -1] == one[0]


def test_a_buffer_that_is_doubled(backend):
    buffers = [backend.asarray(np.full(3, 0.1, np.float16))]
    kept = [backend.asarray(np.full(3, 2.0**-15, np.float16))]
    gradkit.accumulate_grads(buffers, buffers, compensation=kept)
    assert_same_bits(backend.asnumpy(buffers[0]), np.full(3, np.float16(0.1) * 2))
    assert_same_bits(backend.asnumpy(kept[0]), np.full(3, 2.0**-15, np.float16))


def test_containers_are_matched_by_their_keys(backend):
    def tree(keys, value):
        return {key: backend.asarray(np.full(2, value + k)) for k, key in enumerate(keys)}

    buffers, kept = tree("ab", 1.0), tree("ba", 0.0)
    gradkit.accumulate_grads(buffers, tree("ab", 1.0), compensation=kept)
    for key, total in {"a": 1 + 1 + 1, "b": 2 + 2 + 0}.items():
        assert backend.asnumpy(buffers[key]).tolist() == [total] * 2
        assert backend.asnumpy(kept[key]).tolist() == [0] * 2


@pytest.mark.emulated
def test_a_long_list_of_threes_is_captured(monkeypatch):
    """It is uploaded in another way."""
    hosts = [
        [draw_.values((k % 3 + 1, 4), "float16", k + n) for k in range(100)] for n in (0, 7, 9)
    ]
    found = []
    for capturing in (False, True):
        monkeypatch.setattr(EmulatedDevice, "capturing", lambda _, now=capturing: now)
        backend = emulated_backend()
        on = partial(on_device, backend=backend)
        buffers, kept, grads = ([on(h.copy()) for h in each] for each in hosts)
        gradkit.accumulate_grads(buffers, grads, compensation=kept)
        found.append([*buffers, *kept])
    assert_all_same_bits(*found)
