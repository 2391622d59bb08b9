"""Accumulating and zeroing: one rounding, +0 bit for bit, and nothing beside the elements."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradkit
from tests import strategies as draw_
from tests import tolerances
from tests.layouts import LAYOUTS
from tests.tolerances import DTYPES, assert_same_bits, assert_ulps

# Each buffer dtype with the addends that lose nothing in it.
SAFE = [
    (into, addend)
    for into, addends in {
        "float16": ["float16"],
        "bfloat16": ["bfloat16"],
        "float32": ["float16", "bfloat16", "float32"],
        "float64": sorted(DTYPES),
    }.items()
    for addend in addends
]
NARROWING = [(a, b) for a in DTYPES for b in DTYPES if (a, b) not in SAFE]
FLAGS = [lambda b: b, np.bool_, np.array, lambda b: np.array([b]), lambda b: np.full((1, 1), b)]


@st.composite
def broadcastable(draw, shape):
    """A shape that broadcasts to another."""
    kept = shape[draw(st.integers(0, len(shape))) :]
    return tuple(draw(st.sampled_from((1, n))) for n in kept)


@st.composite
def pairs(draw, most, types):
    """A host buffer and an addend that broadcasts to it, in any layouts."""
    into, addend = draw(types)
    shape = draw(draw_.shapes(most))
    buffer = draw(draw_.arrays(shape, into))
    return buffer, draw(draw_.arrays(draw(broadcastable(shape)), addend))


def added(buffer, grad):
    """The sum in float64, in which two narrower terms lose nothing that matters, rounded."""
    with np.errstate(all="ignore"):
        total = buffer.astype(np.float64) + np.broadcast_to(grad, buffer.shape).astype(np.float64)
        return total.astype(buffer.dtype)


def assert_rest_untouched(backend, array, template):
    """The bytes between the elements are those of the template that the array was made from."""
    fresh = backend.asarray(template)
    backend.assign(fresh, array)
    assert backend.memory(array) == backend.memory(fresh)


@pytest.mark.guarantee("Sums rounded once")
@given(data=st.data(), accumulate=st.sampled_from(("v1", "v2")))
def test_adds_with_one_rounding(backend, data, accumulate):
    host, addend = data.draw(pairs(backend.max_elements // 4, st.sampled_from(SAFE)))
    buffer, grad = backend.asarray(host), backend.asarray(addend)
    before = backend.memory(grad)
    if accumulate == "v1":
        assert gradkit.accumulate_grad(buffer, grad) is buffer
    else:
        updated, same = gradkit.accumulate_grad_v2(buffer, grad)
        assert updated is True
        assert same is buffer
    assert_ulps(backend.asnumpy(buffer), added(host, addend), tolerances.ACCUMULATED_ULPS)
    assert_rest_untouched(backend, buffer, host)
    assert backend.memory(grad) == before


@pytest.mark.guarantee("Sums rounded once")
@given(data=st.data(), scale=st.floats(-4, 4) | st.just(1 / 3))
def test_adds_a_multiple(backend, data, scale):
    host, addend = data.draw(pairs(backend.max_elements // 4, st.sampled_from(SAFE)))
    buffer = backend.asarray(host)
    assert gradkit.accumulate_grad(buffer, backend.asarray(addend), scale=scale) is buffer
    term = np.broadcast_to(addend, host.shape).astype(np.longdouble) * scale
    ref = host.astype(np.longdouble) + term
    size = np.abs(host.astype(np.longdouble)) + np.abs(term)
    with np.errstate(over="ignore"):
        ref = np.where(np.isinf(ref.astype(host.dtype)), ref.astype(host.dtype), ref)
    bound = tolerances.SCALED_TERM * size + tolerances.rounded(ref, host.dtype)
    tolerances.assert_within(backend.asnumpy(buffer), ref, bound)
    assert_rest_untouched(backend, buffer, host)


@pytest.mark.guarantee("Sums rounded once")
@pytest.mark.parametrize(("into", "addend"), SAFE)
def test_a_scaled_sum_is_rounded_as_float64_has_it(backend, into, addend):
    """The product, the sum, and then to the buffer's dtype."""
    rng = np.random.default_rng(0)
    host, grad = (rng.normal(size=4096).astype(DTYPES[name]) for name in (into, addend))
    buffer = backend.asarray(host)
    gradkit.accumulate_grad(buffer, backend.asarray(grad), scale=1 / 3)
    wanted = (host.astype(np.float64) + grad.astype(np.float64) * (1 / 3)).astype(host.dtype)
    assert_same_bits(backend.asnumpy(buffer), wanted)


@pytest.mark.guarantee("Overwriting and zeroing")
@given(data=st.data())
def test_overwrites(backend, data):
    host, addend = data.draw(pairs(backend.max_elements // 4, st.sampled_from(SAFE)))
    host[...] = np.nan
    buffer = backend.asarray(host)
    updated, same = gradkit.accumulate_grad_v2(buffer, backend.asarray(addend), overwrite=True)
    assert updated is True
    assert same is buffer
    expected = np.broadcast_to(addend, host.shape).astype(host.dtype)
    assert_same_bits(backend.asnumpy(buffer), expected)
    assert_rest_untouched(backend, buffer, host)


@pytest.mark.parametrize("size", [3, 3000])
def test_what_float32_takes_for_a_tie_of_bfloat16(backend, size):
    """Float64 is rounded once, a sum and a copy alike."""
    bfloat16 = DTYPES["bfloat16"]
    sums = np.resize([1, 1 + 2.0**-40, 1 - 2.0**-40], size) * 2.0**-8  # half a unit of 1
    expected = np.resize([1, 1 + 2.0**-7, 1], size)
    buffer = backend.asarray(np.ones(size, bfloat16))
    gradkit.accumulate_grad(buffer, backend.asarray(sums), casting="same_kind")
    np.testing.assert_array_equal(backend.asnumpy(buffer).astype(np.float64), expected)
    options = {"overwrite": True, "casting": "same_kind"}
    gradkit.accumulate_grad_v2(buffer, backend.asarray(-1 - sums), **options)
    np.testing.assert_array_equal(backend.asnumpy(buffer).astype(np.float64), -expected)


@pytest.mark.guarantee("Casting")
@given(data=st.data())
def test_wider_gradients_when_asked_for(backend, data):
    host, addend = data.draw(pairs(backend.max_elements // 8, st.sampled_from(NARROWING)))
    buffer, grad = backend.asarray(host), backend.asarray(addend)
    with pytest.raises(TypeError, match="grad has dtype"):
        gradkit.accumulate_grad(buffer, grad)
    with pytest.raises(TypeError, match="grad has dtype"):
        gradkit.accumulate_grad_v2(buffer, grad, overwrite=True)
    assert_same_bits(backend.asnumpy(buffer), host)
    gradkit.accumulate_grad(buffer, grad, casting="same_kind")
    # Past float32 on the way to float64: at most one unit in the last place.
    assert_ulps(backend.asnumpy(buffer), added(host, addend), tolerances.CLIPPED_ULPS)


@pytest.mark.parametrize("flag", FLAGS, ids=["bool", "numpy bool", "0-d", "1-d", "2-d"])
@pytest.mark.parametrize("name", sorted(DTYPES))
def test_flags(backend, flag, name):
    def seen(value):
        value = flag(value)
        return backend.asarray(value) if isinstance(value, np.ndarray) else value

    host = np.array([1.0, -0.0, np.nan], DTYPES[name])
    grad = backend.asarray(np.array([2.0, 0.0, 1.0], DTYPES[name]))
    buffer = backend.asarray(host)
    gradkit.accumulate_grad(buffer, grad, do_update=seen(False))
    assert_same_bits(backend.asnumpy(buffer), host)
    gradkit.accumulate_grad(buffer, grad, do_update=seen(True))
    assert_ulps(backend.asnumpy(buffer), np.array([3.0, 0.0, np.nan], DTYPES[name]), 0)
    gradkit.accumulate_grad_v2(buffer, grad, overwrite=seen(False))
    assert_ulps(backend.asnumpy(buffer), np.array([5.0, 0.0, np.nan], DTYPES[name]), 0)
    gradkit.accumulate_grad_v2(buffer, grad, overwrite=seen(True))
    assert_same_bits(backend.asnumpy(buffer), np.array([2.0, 0.0, 1.0], DTYPES[name]))


@pytest.mark.guarantee("Aliasing")
@pytest.mark.parametrize("name", sorted(DTYPES))
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_a_buffer_added_to_itself_doubles(backend, name, layout):
    host = LAYOUTS[layout](draw_.values((3, 700), name))
    buffer = backend.asarray(host)
    gradkit.accumulate_grad(buffer, buffer)
    assert_ulps(backend.asnumpy(buffer), added(host, host), 0)
    again = buffer[...]  # the same elements by another object
    gradkit.accumulate_grad_v2(again, buffer)
    assert_ulps(backend.asnumpy(buffer), added(added(host, host), added(host, host)), 0)
    kept = backend.asnumpy(buffer)
    gradkit.accumulate_grad_v2(again, buffer, overwrite=True)
    assert_same_bits(backend.asnumpy(buffer), kept)


def test_interleaved_views_do_not_overlap(backend):
    room = backend.asarray(np.arange(8.0))
    gradkit.accumulate_grad(room[::2], room[1::2])
    np.testing.assert_array_equal(backend.asnumpy(room), [1, 1, 5, 3, 9, 5, 13, 7])


def test_micro_batches_average(backend):
    """16-bit gradients into a float32 buffer keep what 16 bits alone would lose."""
    buffer = backend.asarray(np.zeros(3, np.float32))
    grad = backend.asarray(np.array([1.0, 2.0**-10, 3.0], np.float16))
    for _ in range(3000):
        gradkit.accumulate_grad(buffer, grad)
    np.testing.assert_array_equal(backend.asnumpy(buffer), [3000, 3000 * 2.0**-10, 9000])


@pytest.mark.guarantee("Overwriting and zeroing")
@given(data=st.data())
def test_zeroes_bit_for_bit(backend, data):
    host = data.draw(draw_.gradient_lists(backend.max_elements // 4))
    for h in host:
        h[...] = data.draw(st.sampled_from((np.nan, -np.inf, -0.0, 1.0)))
    grads = [backend.asarray(h) for h in host]
    tree = data.draw(draw_.trees(grads))
    for _ in range(2):  # idempotent
        assert gradkit.zero_grad(tree) is tree
        for g, h in zip(grads, host, strict=True):
            assert_same_bits(backend.asnumpy(g), np.zeros(h.shape, h.dtype))
            assert_rest_untouched(backend, g, h)


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("name", sorted(DTYPES))
def test_zeroes_large_arrays_in_any_layout(backend, name, layout):
    host = LAYOUTS[layout](np.full((3, 7, 780), np.nan, DTYPES[name]))
    grad = backend.asarray(host)
    gradkit.zero_grad([grad])
    assert_same_bits(backend.asnumpy(grad), np.zeros(host.shape, host.dtype))
    assert_rest_untouched(backend, grad, host)


def test_zero_of_a_generator_is_a_list(backend):
    a = backend.asarray(np.array(math.nan))
    found = gradkit.zero_grad(g for g in (a, None))
    assert found == [a, None]
    assert float(backend.asnumpy(a)) == 0.0
