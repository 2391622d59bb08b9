"""Steps that are skipped: the verdict, and state that keeps every bit."""

import math
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import gradkit
from gradkit._arrays import backend_of
from tests import strategies as draw_
from tests.layouts import LAYOUTS
from tests.tolerances import DTYPES

NAN, INF = math.nan, math.inf
KINDS = [*DTYPES.values(), np.dtype("int64"), np.dtype("int32"), np.dtype("uint8"), np.dtype(bool)]

norms = st.one_of(st.floats(0, 1e308), st.sampled_from((0.0, 5e-324, 1.0, INF, NAN)))
found = st.sampled_from((None, False, True, 0.0, -0.0, 1.0, 0.5, NAN, INF))


@pytest.mark.guarantee("A step is skipped")
@example(norm=INF, limit=None, found=None)
@example(norm=INF, limit=INF, found=None)
@example(norm=1.0, limit=1.0, found=False)
@example(norm=1.0, limit=None, found=math.nan)
@given(norm=norms, limit=st.one_of(st.none(), norms), found=found)
def test_a_step_is_taken_if_nothing_speaks_against_it(backend, norm, limit, found):
    expected = math.isfinite(norm) and (limit is None or norm <= limit) and found in (None, 0)
    on = lambda value: None if value is None else backend.asarray(np.array(value))  # noqa: E731
    if backend.on_host and limit is not None and math.isnan(limit):
        with pytest.raises(ValueError, match="limit must be at least 0, not nan"):
            gradkit.step_verdict(norm, limit=on(limit))
        return
    flags = on(found) if found is None else on(found).reshape(1)
    verdict = gradkit.step_verdict(on(norm), limit=on(limit), found_inf=flags)
    assert (verdict.dtype, verdict.shape) == (bool, ())
    assert bool(backend.asnumpy(verdict)) == expected
    if (limit is None or not math.isnan(limit)) and not isinstance(found, float):
        again = gradkit.step_verdict(on(norm), limit=limit, found_inf=found)
        assert bool(backend.asnumpy(again)) == expected


def test_a_bool_becomes_an_array_of_the_backend(backend):
    """In the first call, and in the second, whose plan is known: kernels read it there."""
    norm = backend.asarray(np.array(1.0))
    own = backend_of(norm)
    for _ in range(2):
        with mock.patch.object(own, "as_float64", wraps=own.as_float64) as made:
            assert not bool(backend.asnumpy(gradkit.step_verdict(norm, found_inf=True)))
        made.assert_called_once()


@pytest.mark.parametrize("dtype", ["bool", *DTYPES])
def test_what_was_found_has_any_dtype(backend, dtype):
    norm = backend.asarray(np.array(1.0))
    for value in (0, 1):
        flag = backend.asarray(np.array([value], DTYPES.get(dtype, bool)))
        assert bool(backend.asnumpy(gradkit.step_verdict(norm, found_inf=flag))) == (not value)


def test_a_norm_of_float32_and_a_verdict_of_ones_own(backend):
    room = backend.asarray(np.zeros(3, bool))
    norm = backend.asarray(np.array(2.0, np.float32))
    verdict = gradkit.step_verdict(norm, limit=2.0, out=room[1:2].reshape(()))
    np.testing.assert_array_equal(backend.asnumpy(room), [False, True, False])
    assert bool(backend.asnumpy(verdict))
    assert bool(gradkit.step_verdict(2.0))
    assert not bool(gradkit.step_verdict(2.0, limit=1.0))


@pytest.mark.guarantee("A step is skipped")
@given(data=st.data(), taken=st.booleans(), on_device=st.booleans())
def test_every_byte_is_copied_or_stays(backend, data, taken, on_device):
    hosts = []
    for _ in range(data.draw(st.integers(1, 6), "arrays")):
        kind = data.draw(st.sampled_from(KINDS), "dtype")
        shape = data.draw(draw_.shapes(min(backend.max_elements, 1 << 12)), "shape")
        rng = np.random.default_rng(data.draw(st.integers(0, 99), "seed"))
        pair = [
            np.frombuffer(rng.bytes(math.prod(shape) * np.dtype(kind).itemsize), kind).reshape(
                shape
            )
            for _ in range(2)
        ]
        if np.dtype(kind).kind == "b":
            pair = [np.asarray(bits.view(np.uint8) % 2 == 1) for bits in pair]
        hosts.append([LAYOUTS[data.draw(draw_.layouts)](bits) for bits in pair])
    new, old = ([backend.asarray(pair[k]) for pair in hosts] for k in range(2))
    gaps = [backend.memory(array) for array in old]
    verdict = backend.asarray(np.array(taken)) if on_device else taken
    assert gradkit.keep_if(verdict, new, old) is old
    for (fresh, stale), array, memory in zip(hosts, old, gaps, strict=True):
        expected = fresh if taken else stale
        assert backend.asnumpy(array).tobytes() == expected.tobytes()
        if not taken:
            assert backend.memory(array) == memory


@pytest.mark.parametrize("count", [1, 90, 91, 300])
def test_lists_within_and_beyond_the_parameter_block(backend, count):
    new = [backend.asarray(np.full(k % 5 + 1, k % 256, np.uint8)) for k in range(count)]
    old = [backend.asarray(np.zeros(k % 5 + 1, np.uint8)) for k in range(count)]
    gradkit.keep_if(True, new, old)
    for a, b in zip(new, old, strict=True):
        np.testing.assert_array_equal(backend.asnumpy(a), backend.asnumpy(b))


class AdamW:
    """As torch.optim has it, on plain arrays: parameters, two moments and a count."""

    def __init__(self, params):
        self.state = {
            "params": params,
            "m": [np.zeros_like(p) for p in params],
            "v": [np.zeros_like(p) for p in params],
            "count": np.array(0),
        }

    def stepped(self, grads):
        """The state after a step; the own one stays."""
        old = self.state
        count, fresh = old["count"] + 1, {"params": [], "m": [], "v": []}
        for p, m, v, g in zip(old["params"], old["m"], old["v"], grads, strict=True):
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            update = m / (1 - 0.9**count) / (np.sqrt(v / (1 - 0.999**count)) + 1e-8)
            for name, value in (("params", p - 0.1 * (update + 0.01 * p)), ("m", m), ("v", v)):
                fresh[name].append(value.astype(p.dtype))
        return fresh | {"count": np.array(count)}


@pytest.mark.guarantee("A step is skipped")
@pytest.mark.parametrize("odd", [NAN, INF, 1e3])
def test_adamw_takes_a_skipped_step_never(odd):
    """A run with a bad gradient has the bits of a run that never saw it."""
    rng = np.random.default_rng(1)
    grads = [[rng.normal(size=5).astype("f4"), rng.normal(size=3)] for _ in range(8)]
    bad = [grads[4][0] * np.float32(odd), grads[4][1]]

    def run(steps):
        optimizer = AdamW([np.linspace(-1, 1, 5, dtype="f4"), np.array([0.0, -0.0, 1.0])])
        for step in steps:
            norm = gradkit.grad_norm(step)
            verdict = gradkit.step_verdict(norm, limit=100.0)
            with np.errstate(invalid="ignore"):
                gradkit.keep_if(verdict, optimizer.stepped(step), optimizer.state)
        return [*optimizer.state["params"], *optimizer.state["m"], *optimizer.state["v"]], int(
            optimizer.state["count"]
        )

    (found, count), (expected, same) = run([*grads[:4], bad, *grads[4:]]), run(grads)
    assert count == same == 8
    assert [a.tobytes() for a in found] == [a.tobytes() for a in expected]


def test_of_dicts_keys_decide_and_none_is_skipped(backend):
    on = lambda *values: backend.asarray(np.array(values))  # noqa: E731
    old = {"a": on(1.0), "b": [None, on(2.0)]}
    gradkit.keep_if(True, {"b": [None, on(4.0)], "a": on(3.0)}, old)
    assert backend.asnumpy(old["a"]) == [3.0]
    assert backend.asnumpy(old["b"][1]) == [4.0]
    gradkit.keep_if(True, old, old)


def test_what_holds_no_numbers():
    names = [np.array(["a", "b"], object)]
    with pytest.raises(TypeError, match=r"old\[0\] has dtype object; accepted: numbers"):
        gradkit.keep_if(True, names, names)


def test_a_verdict_among_what_is_kept(backend):
    flags = backend.asarray(np.array([True, False]))
    with pytest.raises(ValueError, match=r"verdict overlaps old\[0\]; pass a copy"):
        gradkit.keep_if(flags[:1], [backend.asarray(np.zeros(2, bool))], [flags])
    np.testing.assert_array_equal(backend.asnumpy(flags), [True, False])
