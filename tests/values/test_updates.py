"""Steps of AdamW and SGD: values, bits, what skips them, and what counts them."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradkit
from gradkit._calls.lists import goes_with_param
from gradkit._dtypes import accumulation_name
from tests import strategies as draw_
from tests.tolerances import DTYPES, UNIT, assert_same_bits, assert_within, below_normal, rounded

# Of parameters, gradients and what is kept of them.
KINDS = [
    (param, grad, state)
    for param in DTYPES
    for grad in DTYPES
    for state in {param, accumulation_name(param)}
    if goes_with_param("grads", param, grad)
]
BETAS, EPS = (0.9, 0.99), 1e-8
ADAMW = {"lr": 0.1, "betas": BETAS, "eps": EPS, "weight_decay": 0.3, "scale": 0.7}
SGD = {"lr": 0.1, "weight_decay": 0.3, "scale": 0.7}


def adamw(param, grad, moment, variance, step, lr, betas, eps, weight_decay, scale):
    """The formulas of the paper; all that is written."""
    g = grad * scale
    m = betas[0] * moment + (1 - betas[0]) * g
    v = betas[1] * variance + (1 - betas[1]) * g * g
    unbiased = m / (1 - betas[0] ** step), v / (1 - betas[1] ** step)
    change = lr * unbiased[0] / (np.sqrt(unbiased[1]) + eps) + lr * weight_decay * param
    return param - change, m, v


def sgd(param, grad, momentum, lr, weight_decay, scale, factor, nesterov):
    d = grad * scale + weight_decay * param
    moved = factor * momentum + d
    return param - lr * (d + factor * moved if nesterov else moved), moved


def wide(*arrays):
    return [np.asarray(array, np.longdouble) for array in arrays]


def check(backend, found, ref, sizes, kinds, roundings=12):
    """To within a few roundings of terms of these sizes, and one of the result."""
    for got, wanted, size, own in zip(found, ref, sizes, kinds, strict=True):
        unit = UNIT[accumulation_name(kinds[0])]
        bound = roundings * unit * size + rounded(wanted, own) + below_normal("moved", own)
        assert_within(backend.asnumpy(got), wanted, bound)


def drawn(data, backend, *kinds):
    shape = data.draw(draw_.shapes(backend.max_elements // 8))
    return [data.draw(draw_.arrays(shape, name)) for name in kinds]


def on(backend, hosts):
    return [[backend.asarray(host)] for host in hosts]


@given(data=st.data(), kinds=st.sampled_from(KINDS), step=st.sampled_from((1, 2, 3, 1000, 10**6)))
def test_a_step_of_adamw(backend, data, kinds, step):
    """In any layouts; gradients, and gaps beside what is written, keep every bit."""
    param, grad, moment, variance = drawn(data, backend, *kinds, kinds[2])
    variance[...] = np.abs(variance)
    lists = on(backend, (param, grad, moment, variance))
    before = backend.memory(lists[1][0])
    assert gradkit.adamw_update(*lists, step, **ADAMW) is lists[0]
    assert backend.memory(lists[1][0]) == before
    p, g, m, v = wide(param, grad, moment, variance)
    ref = adamw(p, g, m, v, step, **ADAMW)
    change = ADAMW["lr"] * np.abs(ref[1]) / (1 - BETAS[0] ** step)
    change /= np.sqrt(ref[2] / (1 - BETAS[1] ** step)) + EPS
    lost = ADAMW["lr"] * (np.abs(m) + np.abs(g)) / (1 - BETAS[0] ** step)
    lost /= np.sqrt(ref[2] / (1 - BETAS[1] ** step)) + EPS
    sizes = np.abs(p) + change + lost, np.abs(m) + np.abs(g), v + g * g
    written = [lists[k][0] for k in (0, 2, 3)]
    check(backend, written, ref, sizes, (kinds[0], kinds[2], kinds[2]))
    for array, host in zip(written, (param, moment, variance), strict=True):
        fresh = backend.asarray(host)
        backend.assign(fresh, array)
        assert backend.memory(array) == backend.memory(fresh)


@given(
    data=st.data(),
    kinds=st.sampled_from(KINDS),
    factor=st.sampled_from((0.0, 0.9, None)),
    nesterov=st.booleans(),
)
def test_a_step_of_sgd(backend, data, kinds, factor, nesterov):
    param, grad, momentum = drawn(data, backend, *kinds)
    lists = on(backend, (param, grad, momentum))
    how = {} if factor is None else {"momentum": factor, "nesterov": nesterov}
    assert gradkit.sgd_update(*lists[: 2 + bool(how)], **SGD, **how) is lists[0]
    p, g, m = wide(param, grad, momentum)
    ref = sgd(p, g, m, **SGD, factor=factor or 0, nesterov=nesterov and bool(how))
    sizes = np.abs(p) + np.abs(g) + np.abs(m), np.abs(p) + np.abs(g) + np.abs(m)
    count = 1 + bool(how)
    written = [lists[0][0], lists[2][0]][:count]
    check(backend, written, ref[:count], sizes[:count], (kinds[0], kinds[2])[:count])
    assert_same_bits(backend.asnumpy(lists[1][0]), grad)


def every_kind(seed=0, shape=(5, 13)):
    """A list that mixes all kinds, as hosts: parameters, gradients, and two of what is kept."""
    hosts = [
        [draw_.values(shape, name, seed + 7 * k + n) for n, name in enumerate((*kinds, kinds[2]))]
        for k, kinds in enumerate(KINDS)
    ]
    params, grads, moments, variances = map(list, zip(*hosts, strict=True))
    return params, grads, moments, [np.abs(each) for each in variances]


def update(lists, kind, number=lambda value: value, **how):
    if kind == "adamw":
        step = how.pop("step", 3)
        numbers = {name: number(value) for name, value in (("lr", 0.1), ("scale", 0.7))}
        return gradkit.adamw_update(*lists, step, betas=BETAS, weight_decay=0.3, **numbers, **how)
    numbers = {name: number(value) for name, value in (("lr", 0.1), ("scale", 0.7))}
    states = lists[2:3] if kind == "momentum" else []
    how |= {"momentum": 0.9, "nesterov": True} if states else {}
    return gradkit.sgd_update(*lists[:2], *states, weight_decay=0.3, **numbers, **how)


UPDATES = ("adamw", "momentum", "sgd")


@pytest.mark.guarantee("A step of an optimiser")
@pytest.mark.parametrize("kind", UPDATES)
@pytest.mark.parametrize("at_random", [False, True])
@pytest.mark.parametrize("on_device", [False, True])
def test_each_backend_has_numpys_bits(backend, kind, at_random, on_device):
    """Of every dtype, by random bits too; numbers may lie on the device, and views have gaps."""
    hosts = every_kind()
    how = {}
    if at_random:
        own = [k for k, kinds in enumerate(KINDS) if np.dtype(DTYPES[kinds[0]]).itemsize == 2]
        hosts = [[each[k] for k in own] for each in hosts]
        how = {"rounding": "stochastic", "seed": 5}
    expected = [[host.copy() for host in each] for each in hosts]
    with gradkit.use_cpu_backend("numpy"):
        update(expected, kind, **how)
    lie = lambda k, host: np.ascontiguousarray(host.T).T if k % 3 else host  # noqa: E731
    lists = [[backend.asarray(lie(k, host)) for k, host in enumerate(each)] for each in hosts]
    put = lambda value: backend.asarray(np.array(value))  # noqa: E731
    step = {}
    if on_device:
        step = {"step": put(2)} if kind == "adamw" else {}
        how |= {"verdict": put(True)} | ({"seed": put(np.uint64(5))} if at_random else {})
    update(lists, kind, put if on_device else float, **how, **step)
    for found, wanted in zip(lists, expected, strict=True):
        for a, b in zip(found, wanted, strict=True):
            assert_same_bits(backend.asnumpy(a), b)
    if step:
        assert int(backend.asnumpy(step["step"])) == 3


def test_infinite_parameters_stay_without_decay(backend):
    """Of which 0 times is NaN."""
    host, nothing = np.array([np.inf, -np.inf, 2], np.float32), np.zeros(3, np.float32)
    lists = on(backend, (host, nothing, nothing, nothing))
    gradkit.sgd_update(*lists[:2], lr=0.1)
    gradkit.adamw_update(*lists, 1, lr=0.1, weight_decay=0.0)
    assert_same_bits(backend.asnumpy(lists[0][0]), host)


@pytest.mark.guarantee("A step of an optimiser")
@pytest.mark.parametrize("beta", [0.0, 0.1, 0.25, 0.5, 0.75])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("counts", [False, True])
def test_a_large_moment_takes_no_digit_of_a_gradient(backend, beta, dtype, counts):
    """That of a spike before, with which betas of 0 have nothing to do."""
    grad = draw_.values((67,), dtype, 1)
    large = np.where(np.arange(67) % 2, 1e9, -1e4).astype(dtype)
    lists = on(backend, (draw_.values((67,), dtype), grad, large, np.ones_like(grad)))
    step = backend.asarray(np.array(0)) if counts else 1
    gradkit.adamw_update(*lists, step, lr=0.1, betas=(beta, 0.9))
    g, m = wide(grad, large)
    wanted, size = beta * m + (1 - beta) * g, np.abs(beta * m) + np.abs(g)
    assert_within(backend.asnumpy(lists[2][0]), wanted, 4 * UNIT[dtype] * size)


def test_a_number_alone_is_read_on_the_device(backend):
    """By a launch in front; without any, the host has all that the numbers follow from."""
    lists = on(backend, [np.ones(3, np.float32)] * 4)
    gradkit.adamw_update(*lists, 1, lr=0.5)
    if not backend.launches():
        pytest.skip("launches are not counted here")
    for name in ("step", "lr", "scale", None):
        numbers = {"step": 1, "lr": 0.5, "scale": 0.5}
        if name is not None:
            numbers[name] = backend.asarray(np.array(numbers[name]))
        before = backend.launches()
        gradkit.adamw_update(*lists, **numbers)
        assert backend.launches() - before == (1 if name is None else 2), name


@pytest.mark.guarantee("A step is skipped")
@pytest.mark.parametrize("kind", UPDATES)
@pytest.mark.parametrize("own", [False, True])
def test_a_false_verdict_leaves_every_byte(backend, kind, own):
    """Whatever the gradients hold, and the number of the step."""
    hosts = every_kind()
    for grad in hosts[1]:
        grad[0] = math.nan
    lists = [[backend.asarray(host) for host in each] for each in hosts]
    step = {"step": backend.asarray(np.array(4))} if kind == "adamw" else {}
    verdict = backend.asarray(np.array(False)) if own else False
    scale = lambda value: backend.asarray(np.array(math.nan if value == 0.7 else value))  # noqa: E731
    update(lists, kind, scale, verdict=verdict, **step)
    for found, wanted in zip(lists, hosts, strict=True):
        for a, b in zip(found, wanted, strict=True):
            assert_same_bits(backend.asnumpy(a), b)
    if step:
        assert int(backend.asnumpy(step["step"])) == 4


@pytest.mark.guarantee("A step of an optimiser")
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_stays_in_its_element(backend, dtype):
    grad = draw_.values((67,), dtype, 1)
    grad[[3, 40]] = math.nan, math.inf
    lists = on(
        backend, (draw_.values((67,), dtype), grad, np.zeros_like(grad), np.zeros_like(grad))
    )
    gradkit.adamw_update(*lists, 1, lr=0.1)
    for k in (0, 2, 3):
        finite = np.isfinite(np.asarray(backend.asnumpy(lists[k][0]), float))
        assert finite.sum() == 65


def test_a_scale_that_clips_leaves_gradients_as_they_are(backend):
    """Two passes: the norm, and the step of what a clip would have made."""
    hosts = [draw_.values((300,), "float64", k) for k in range(2)]
    clipped = [backend.asarray(host) for host in hosts]
    gradkit.clip_grad_norm(clipped[1:], 0.5)
    grads = [backend.asarray(host) for host in hosts]
    scale = gradkit.clip_coefficient(gradkit.grad_norm(grads[1:]), 0.5)
    gradkit.sgd_update(grads[:1], grads[1:], lr=0.1, scale=scale)
    gradkit.sgd_update(clipped[:1], clipped[1:], lr=0.1)
    np.testing.assert_allclose(*map(backend.asnumpy, (grads[0], clipped[0])), rtol=1e-15)
    assert_same_bits(backend.asnumpy(grads[1]), hosts[1])


@pytest.mark.guarantee("A step of an optimiser")
def test_random_bits_go_on_from_one_array_to_the_next(backend):
    """So equal arrays of a list are rounded differently, and a list as if it were one array."""
    halves = [np.ones(300, np.float16), draw_.values((300,), "float16", 1)]
    how = {"lr": 1e-3, "rounding": "stochastic", "seed": 2}
    params, grads = ([backend.asarray(host) for _ in range(2)] for host in halves)
    gradkit.sgd_update(params, grads, **how)
    whole = [[backend.asarray(np.tile(host, 2))] for host in halves]
    gradkit.sgd_update(*whole, **how)
    found = [backend.asnumpy(param) for param in params]
    assert (found[0] != found[1]).any()
    assert_same_bits(np.concatenate(found), backend.asnumpy(whole[0][0]))


def test_a_seed_among_what_is_written_is_refused(backend):
    """A device reads it while moments are written; the host has read it before."""
    moments = backend.asarray(np.zeros(4, np.float32))
    seed = moments.view(np.uint64)[:1].reshape(())
    halves = on(backend, [np.ones(4, np.float16)] * 2)
    call = lambda: gradkit.adamw_update(  # noqa: E731
        *halves, [moments], on(backend, [np.zeros(4, np.float32)])[0], 1, lr=0.1, seed=seed,
        rounding="stochastic",
    )  # fmt: skip
    if backend.on_host:
        call()
        return
    with pytest.raises(ValueError, match=r"seed overlaps moments\[0\]; pass a copy"):
        call()
    assert not backend.asnumpy(moments).any()


def test_moments_and_variances_of_two_dtypes_are_refused(backend):
    """Also where each list has the same dtypes as the other, in another order."""
    on_ = lambda dtype: backend.asarray(np.ones(3, dtype))  # noqa: E731
    lists = [[on_(np.float16), on_(np.float16)] for _ in range(2)]
    kept = [on_(np.float16), on_(np.float32)], [on_(np.float32), on_(np.float16)]
    with pytest.raises(
        TypeError, match=r"variances\[0\] has dtype float32 and moments\[0\] float16"
    ):
        gradkit.adamw_update(*lists, *kept, 1, lr=0.1)
    gradkit.adamw_update(*lists, kept[0], [on_(np.float16), on_(np.float32)], 1, lr=0.1)
