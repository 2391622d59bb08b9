"""Common tests of batch norm and group norm, for channels first and last in memory."""

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

from tests.problems import ABOVE_NOTHING, BATCH_TYPES, LAYER_TYPES, make, make_groups, tiny
from tests.tolerances import DTYPES, assert_all_same_bits
from tests.values.test_batch_norm import batch_norm, batch_norm_grad
from tests.values.test_group_norm import channels_last, group_norm, group_norm_grad


class Norm(NamedTuple):
    """Both passes of a norm, and what makes a problem: six channels, or three groups of two."""

    forward: Callable[..., Any]
    gradient: Callable[..., Any]
    make: Callable[..., Any]


BATCH = Norm(
    *(batch_norm, batch_norm_grad),
    lambda shape, types, **options: make(shape, types, axis=1, batch=True, **options),
)
GROUP = Norm(
    *(group_norm, group_norm_grad),
    lambda shape, types, **options: make_groups(shape, 3, types, **options),
)
NORMS = pytest.mark.parametrize("norm", [BATCH, GROUP], ids=["batch", "group"])
TYPED = pytest.mark.parametrize(
    ("norm", "types"),
    [
        pytest.param(norm, types, id="-".join((name, *types)))
        for norm, name, every in ((BATCH, "batch", BATCH_TYPES), (GROUP, "group", LAYER_TYPES))
        for types in every
    ],
)
LAST = pytest.mark.parametrize("last", [False, True], ids=["channels-first", "channels-last"])


def of(name):
    return (name, "float64" if name == "float64" else "float32", name)


@pytest.mark.guarantee("Subnormal numbers")
@pytest.mark.sampled(3)
@TYPED
@pytest.mark.parametrize("above", ABOVE_NOTHING)
def test_down_to_the_smallest_number(backend, above, norm, types):
    """CuPy compiles kernels so that plain operations of float32 flush subnormal numbers to 0."""
    p = norm.make((15, 6, 8), types)
    p.dy = tiny(p.dy, above)
    p.check_gradients(backend, *norm.gradient(backend, p))
    p.x, p.bias = tiny(p.x, above), None  # beside a bias the rest would be nothing
    p.check_forward(backend, *norm.forward(backend, p))


@pytest.mark.guarantee("Any magnitude")
@NORMS
@pytest.mark.parametrize("name", sorted(DTYPES))
def test_constants_at_the_top_of_the_range(backend, name, norm):
    """``mean * inv_std`` is infinite there: nothing but deviations may be multiplied."""
    p = norm.make((3, 6, 9), of(name))
    p.x[:, 2:4] = np.ldexp(1.0, np.frexp(float(ml_dtypes.finfo(p.x.dtype).max))[1] - 1)
    p.__post_init__()
    p.check_gradients(backend, *norm.gradient(backend, p))


@pytest.mark.guarantee("Any magnitude")
@NORMS
@LAST
@pytest.mark.parametrize("name", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("exponent", [-30, -21, 30])
def test_squares_outside_float32(backend, name, exponent, last, norm):
    p = norm.make((4, 6, 70), of(name), eps=0.0)
    p = channels_last(p) if last else p
    p.x = (p.x.astype(np.float64) * 10.0**exponent).astype(DTYPES[name])
    p.check_forward(backend, *norm.forward(backend, p))


@pytest.mark.guarantee("No cancellation")
@NORMS
@LAST
@pytest.mark.parametrize("name", sorted(DTYPES))
def test_a_first_element_far_from_the_others(backend, name, last, norm):
    """Squares of distances from it are thousands of times their variance."""
    p = norm.make((2, 6, 3000), of(name))
    p.x[0, :, 0] = 1e4
    p = channels_last(p) if last else p
    p.__post_init__()
    p.check_forward(backend, *norm.forward(backend, p))


@pytest.mark.guarantee("No cancellation")
@TYPED
@LAST
def test_a_mean_of_many_deviations(backend, last, norm, types):
    """Here ``sum(dy x) - mean sum(dy)`` has lost every digit."""
    p = norm.make((2, 6, 8, 14), types)
    p = channels_last(p) if last else p
    p.x = (p.x.astype(np.float64) + (1e4 if "16" not in types[0] else 100)).astype(p.x.dtype)
    p.__post_init__()
    p.check_forward(backend, *norm.forward(backend, p))
    p.check_gradients(backend, *norm.gradient(backend, p))


@TYPED
@pytest.mark.sampled(4)
@pytest.mark.parametrize("shape", [(9, 24, 7, 7), (3, 24, 9), (2, 48, 255)], ids=str)
def test_packs_that_two_channels_share(backend, norm, types, shape):
    p = norm.make(shape, types)
    p.check_forward(backend, *norm.forward(backend, p))
    p.check_gradients(backend, *norm.gradient(backend, p))


@pytest.mark.guarantee("Independent")
@NORMS
@pytest.mark.parametrize("where", ["x", "dy"])
@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
def test_what_a_channel_holds_stays_out_of_its_neighbours(backend, norm, value, where):
    """Of 24 channels of 9 elements, in which packs begin and end in the middle."""
    p, kept = norm.make((5, 24, 9), of("float32")), np.r_[0:8, 16:24]

    def results():
        found = (*norm.forward(backend, p), *norm.gradient(backend, p))
        arrays = [backend.asnumpy(each) for each in found]
        return [array.take(kept, array.shape.index(24)) for array in arrays if 24 in array.shape]

    plain = results()
    getattr(p, where)[:, 8:16] = value
    assert_all_same_bits(plain, results())
    if value == np.inf:
        assert not np.isfinite(backend.asnumpy(norm.gradient(backend, p)[1])[8:16]).any()


@pytest.mark.sampled(7)
@TYPED
@LAST
@pytest.mark.parametrize(
    "shape",
    [(3, 1023), (1000, 6), (2, 2049), (4097, 3), (3001, 3, 4), (1100, 3, 2, 2), (2, 6, 2047)],
    ids=str,
)
def test_a_constant_gradient(backend, norm, types, shape, last):
    """The gradient of a sum: equal terms round the same way every time."""
    for seed in range(2):
        p = norm.make(shape, types, seed=seed)
        p = channels_last(p) if last else p
        p.dy = np.broadcast_to(p.dy.reshape(-1)[:1], p.x.shape)
        p.check_gradients(backend, *norm.gradient(backend, p))
