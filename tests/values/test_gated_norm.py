"""RMS norm with an activated gate, and its gradient: values, gates of any size, memory, rows."""

from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradkit
from tests import oracles, tolerances
from tests import strategies as draw_
from tests.layouts import LAYOUTS
from tests.problems import ABOVE_NOTHING, LAYER_TYPES, every_other, make, problems, tiny
from tests.tolerances import DTYPES, assert_all_same_bits, assert_same_bits, assert_within

TYPES = pytest.mark.parametrize("types", LAYER_TYPES, ids="-".join)
BEFORE = pytest.mark.parametrize("before", [True, False], ids=["norm first", "gate first"])
ACTIVATIONS = pytest.mark.parametrize("activation", ["silu", "sigmoid"])
# Single elements, packs, several rows a block, sums in registers and not, several windows.
SHAPES = [(70, 5), (37, 64), (3, 1027), (2, 8200), (2, 40_001)]


class Activated(NamedTuple):
    """An activated gate, its derivative, and the size of the terms of that."""

    value: np.ndarray
    slope: np.ndarray
    slope_size: np.ndarray


@np.errstate(over="ignore")
def activated(activation, gate):
    sigmoid = 1 / (1 + np.exp(-gate))
    steep = sigmoid / (1 + np.exp(gate))  # and not with 1 - sigmoid, which cancels
    if activation == "sigmoid":
        return Activated(sigmoid, steep, steep)
    return Activated(gate * sigmoid, sigmoid + gate * steep, sigmoid + np.abs(gate * steep))


class Gated:
    """A problem with a gate: what gradkit gives for it, and what it must give."""

    def __init__(self, p, gate, *, activation="silu", before=True, offset=0.0):
        self.p, self.gate = p, gate
        self.offset = offset if p.scale is not None else 0.0
        self.how = {"activation": activation, "norm_before_gate": before}
        self.how |= {"scale_offset": self.offset, **p.where}
        self.act = activated(activation, oracles.wide(p.rows(gate)))
        self.before = before
        x = oracles.wide(p.rows(p.x))
        self.source = x if before else x * self.act.value
        with np.errstate(all="ignore"):
            square = (self.source**2).mean(axis=1) if p.x.size else np.zeros(len(x))
            self.exact = 1 / np.sqrt(square + np.longdouble(p.eps))
        p.inv_std = self.exact.astype(DTYPES[p.statistics]).reshape(p.inv_std.shape)
        own = np.ones((1, 1)) if p.scale is None else oracles.wide(p.per_column(p.scale))
        self.scale = own + np.longdouble(self.offset)

    def forward(self, backend, **more):
        p = self.p
        x, scale = p.on(backend, "x", "scale")
        gate = backend.asarray(self.gate)
        return gradkit.gated_rms_norm(x, gate, scale, eps=p.eps, **self.how | more)

    def backward(self, backend, **more):
        dy, x, scale, inv_std = self.p.on(backend, "dy", "x", "scale", "inv_std")
        given = dy, x, backend.asarray(self.gate), scale, inv_std
        return gradkit.gated_rms_norm_grad(*given, **self.how | more)

    def check(self, backend):
        self.check_forward(backend, *self.forward(backend))
        self.check_gradients(backend, *self.backward(backend))

    def check_forward(self, backend, y, inv_std):
        p, kind = self.p, self.p.x.dtype
        y, inv_std = backend.asnumpy(y), backend.asnumpy(inv_std)
        assert (y.shape, y.dtype) == (p.x.shape, kind)
        assert (inv_std.shape, str(inv_std.dtype)) == (p.lead, p.statistics)
        if not p.x.size:
            return
        ref = self.source * self.exact[:, None] * self.scale
        ref = ref * self.act.value if self.before else ref
        depth = min(backend.depth, ref.shape[1])
        gain = self.exact[:, None] * np.abs(self.scale)
        bound = tolerances.averaged("y", np.abs(ref), ref, depth, kind)
        bound = bound + tolerances.below_normal("gate", kind, gain * (1 + np.abs(self.act.value)))
        assert_within(p.rows(y), ref, bound, "y")
        bound = tolerances.averaged("inv_std", self.exact, self.exact, depth, inv_std.dtype)
        assert_within(inv_std.reshape(-1), self.exact, bound, "inv_std")

    def check_gradients(self, backend, dx, dgate, dscale):
        p, kind = self.p, self.p.x.dtype
        for array in (dx, dgate):
            assert (array.shape, backend.asnumpy(array).dtype) == (p.x.shape, kind)
        assert (dscale is None) == (p.scale is None)
        if not p.x.size:
            assert dscale is None or not backend.asnumpy(dscale).any()
            return
        found = dict(zip(("dx", "dgate"), (dx, dgate), strict=True))
        ref = self.gradients()
        for name, array in found.items():
            value, size, gain = ref[name]
            bound = tolerances.elementwise("gate", size, value, kind)
            bound = bound + tolerances.below_normal("gate", kind, gain)
            assert_within(p.rows(backend.asnumpy(array)), value, bound, name)
        if dscale is not None:
            dscale = backend.asnumpy(dscale)
            assert (dscale.shape, dscale.dtype) == (p.tail, p.scale.dtype)
            value, size = ref["dscale"]
            depth = min(backend.depth, p.addends)
            bound = tolerances.summed(size, value, depth, dscale.dtype, kind)
            bound = bound + tolerances.elementwise("gate", size, value, dscale.dtype)
            bound = bound + tolerances.below_normal("sum", kind, p.x.size)
            assert_within(dscale.reshape(-1), value, bound, "dscale")

    def gradients(self):
        """By name: values, sizes of their terms, and what is multiplied with roundings."""
        p = self.p
        dy, x = oracles.wide(p.rows(p.dy)), oracles.wide(p.rows(p.x))
        inv_std = oracles.wide(p.inv_std).reshape(-1, 1)
        xhat = self.source * inv_std
        u = dy * self.act.value if self.before else dy
        w = u * self.scale
        mean, size = (f(w * xhat).mean(axis=1, keepdims=True) for f in (np.asarray, np.abs))
        dsource = inv_std * (w - xhat * mean)
        of_source = inv_std * (np.abs(w) + np.abs(xhat) * size)
        dscale = (u * xhat).sum(axis=0), np.abs(u * xhat).sum(axis=0)
        _, slope, slope_size = self.act
        value, gain = np.abs(self.act.value), 1 + inv_std + np.abs(self.scale)
        if self.before:
            dgate = dy * xhat * self.scale
            of_gate = dgate * slope, np.abs(dgate) * slope_size, gain * (1 + np.abs(dgate))
            return {"dx": (dsource, of_source, gain), "dgate": of_gate, "dscale": dscale}
        of_gate = dsource * x * slope, of_source * np.abs(x) * slope_size
        return {
            "dx": (dsource * self.act.value, of_source * value, gain * (1 + value)),
            "dgate": (*of_gate, gain * (1 + np.abs(x)) * (1 + slope_size) * (1 + of_source)),
            "dscale": dscale,
        }


def gated(shape, types=LAYER_TYPES[0], *, seed=0, axis=-1, affine=True, **how):
    """A problem with a gate of one shape."""
    p = make(shape, types, axis, seed=seed, centred=False, affine=affine)
    return Gated(p, draw_.values(shape, types[0], seed + 9) * DTYPES[types[0]].type(2), **how)


# Values


@given(data=st.data())
def test_any_problem(backend, data):
    p = data.draw(problems(backend.max_elements // 4, centred=False))
    gate = draw_.values(p.x.shape, str(p.x.dtype), data.draw(draw_.seeds))
    Gated(
        p,
        LAYOUTS[data.draw(draw_.layouts)](gate),
        activation=data.draw(st.sampled_from(["silu", "sigmoid"])),
        before=data.draw(st.booleans()),
        offset=data.draw(st.sampled_from([0.0, 1.0])),
    ).check(backend)


@pytest.mark.sampled(37)
@pytest.mark.parametrize(("shape", "types"), every_other(SHAPES, LAYER_TYPES), ids=str)
@BEFORE
@ACTIVATIONS
def test_shapes(backend, shape, types, activation, before):
    gated(shape, types, activation=activation, before=before, offset=0.5).check(backend)


@pytest.mark.sampled(3)
@TYPES
@BEFORE
@pytest.mark.parametrize("above", ABOVE_NOTHING)
def test_gradients_down_to_the_smallest_number(backend, above, types, before):
    g = gated((9, 70), types, before=before)
    g.p.dy = tiny(g.p.dy, above)
    g.check_gradients(backend, *g.backward(backend))


def test_the_other_name_of_silu(backend):
    g = gated((5, 8))
    for run in (g.forward, g.backward):
        assert_all_same_bits(run(backend), run(backend, activation="swish"), backend)


# The oracle


@BEFORE
@ACTIVATIONS
def test_the_oracle_is_the_derivative_of_the_formula(activation, before):
    """By the complex step, in which nothing cancels."""
    g = gated((3, 5), LAYER_TYPES[1], activation=activation, before=before, offset=0.5)
    p = g.p
    dy, x, gate = (oracles.wide(a) for a in (p.dy, p.x, g.gate))
    eps = np.longdouble(p.eps)

    def loss(x, gate, scale):
        a = 1 / (1 + np.exp(-gate)) * (gate if activation == "silu" else 1)
        source = x if before else x * a
        y = source / np.sqrt((source**2).mean(axis=-1, keepdims=True) + eps) * (scale + 0.5)
        return (dy * (y * a if before else y)).sum()

    given = {"dx": x, "dgate": gate, "dscale": oracles.wide(p.scale)}
    p.inv_std = g.exact  # unrounded
    ref = g.gradients()
    h = np.longdouble(1e-30)
    for k, (name, array) in enumerate(given.items()):
        for place in np.ndindex(array.shape):
            args = [a.astype(np.clongdouble) for a in given.values()]
            args[k][place] += 1j * h
            slope = loss(*args).imag / h
            value = ref[name][0][place]
            assert abs(slope - value) <= tolerances.COMPLEX_STEP * max(1, abs(value))


# Gates of any size


@pytest.mark.parametrize("types", [LAYER_TYPES[k] for k in (0, 1, 2, 6)], ids="-".join)
@BEFORE
@ACTIVATIONS
def test_gates_of_any_size(backend, types, activation, before):
    """Exponentials overflow, vanish, or are subnormal."""
    sizes = [0, 1e-30, 1e-4, 1.27846, 10, 16.6, 17, 44, 86, 87.5, 88.8, 95, 103.9, 104.1, 173, 175]
    sizes += [350, 700, 708.5, 710, 730, 745, 746, 1400, 1420, 6e4]
    if before:  # else squares of the products would leave their range
        sizes += [largest(types[0])]
    gate = np.array([*sizes, *np.negative(sizes)], np.float64)
    g = gated((4, gate.size), types)
    gate = np.broadcast_to(gate, g.p.x.shape).astype(g.p.x.dtype)
    # None of them is multiplied with more than 1, and overflows then.
    for name in ("x", "dy", "scale"):
        host = getattr(g.p, name)
        setattr(g.p, name, np.clip(host, -1, 1).astype(host.dtype))
    g.p.eps = 1.0
    g = Gated(g.p, gate, activation=activation, before=before)
    y, inv_std = g.forward(backend)
    g.check_forward(backend, y, inv_std)
    assert np.isfinite(backend.asnumpy(y).astype(np.float64)).all()
    if before:  # dy times the gate squared is in range
        g.p.dy[:, np.abs(gate[0].astype(np.float64)) > 1e30] = 0
    g.check_gradients(backend, *g.backward(backend))


def largest(dtype):
    return float(ml_dtypes.finfo(DTYPES[dtype]).max)


@pytest.mark.parametrize("types", [LAYER_TYPES[k] for k in (0, 1, 2, 5)], ids="-".join)
def test_gates_that_are_not_finite(backend, types):
    """NaN stays NaN; infinities have what the formulas make of them."""
    kind = DTYPES[types[0]]
    gate = np.array([[np.nan], [np.inf], [-np.inf]], kind)
    x = np.ones((3, 1), kind)
    expected = {
        "sigmoid": ([np.nan, 1, 0], [np.nan, 0, 0]),
        "silu": ([np.nan, np.inf, np.nan], [np.nan] * 3),
    }
    for activation, (values, slopes) in expected.items():
        y, inv_std = gradkit.gated_rms_norm(
            *map(backend.asarray, (x, gate)), activation=activation, eps=0.0
        )
        np.testing.assert_array_equal(backend.asnumpy(y)[:, 0].astype(np.float64), values)
        given = *map(backend.asarray, (x, x, gate)), None, inv_std
        _, dgate, _ = gradkit.gated_rms_norm_grad(*given, activation=activation)
        np.testing.assert_array_equal(backend.asnumpy(dgate)[:, 0].astype(np.float64), slopes)


@BEFORE
def test_squares_beyond_float32(backend, before):
    """Statistics are those of the numbers, whatever their squares overflow or lose."""
    for size in (1e25, 1e-25):
        g = gated((5, 64), before=before)
        g.p.x *= np.float32(size)
        g.p.eps = 0.0
        g = Gated(g.p, g.gate, before=before)
        g.check_forward(backend, *g.forward(backend))


@BEFORE
@pytest.mark.parametrize("shape", [(70, 33), (5, 8200)], ids=str)
def test_two_rows_alone_have_the_bits_of_a_batch(backend, shape, before):
    g = gated(shape, before=before)
    fine = [backend.asnumpy(a) for a in (*g.forward(backend), *g.backward(backend)[:2])]
    p = g.p
    p.x, p.dy, p.inv_std, g.gate = p.x[:2], p.dy[:2], p.inv_std[:2], g.gate[:2]
    alone = [*g.forward(backend), *g.backward(backend)[:2]]
    assert_all_same_bits(alone, [ref[:2] for ref in fine], backend)


# Memory


def halves(room):
    """Both halves of the rows of a projection."""
    width = room.shape[-1] // 2
    return room[..., :width], room[..., width:]


@pytest.mark.sampled(5)
@BEFORE
@pytest.mark.parametrize("types", [LAYER_TYPES[k] for k in (0, 1, 6)], ids="-".join)
@pytest.mark.parametrize("width", [5, 64, 8200])
def test_views_of_one_projection(backend, types, width, before):
    """Read where they lie, and written: into another projection, and over themselves."""
    g = gated((2, 3, width), types, before=before)
    expected = [backend.asnumpy(a) for a in (*g.forward(backend), *g.backward(backend))]
    dy, scale, inv_std = g.p.on(backend, "dy", "scale", "inv_std")

    def projection():
        room = backend.asarray(np.concatenate([g.p.x, g.gate], axis=-1))
        return room, halves(room)

    room, (x, gate) = projection()
    before_call = backend.memory(room)
    found = gradkit.gated_rms_norm(x, gate, scale, eps=g.p.eps, **g.how)
    other = halves(backend.asarray(np.full(room.shape, np.nan, g.p.x.dtype)))
    given = dy, x, gate, scale, inv_std
    apart = backend.asarray(LAYOUTS["stepped"](np.full_like(expected[-1], np.nan)))
    found += gradkit.gated_rms_norm_grad(*given, out=(*other, apart), **g.how)
    assert_all_same_bits(found, expected, backend)
    assert backend.memory(room) == before_call
    for place in (0, 1):  # of strides of its own
        out = [None] * 3
        out[place] = other[place]
        found = gradkit.gated_rms_norm_grad(*given, out=tuple(out), **g.how)
        assert_all_same_bits(found, expected[2:], backend)
    found = gradkit.gated_rms_norm_grad(*given, out=(x, gate, None), **g.how)
    assert_all_same_bits(found, expected[2:], backend)
    for place in (0, 1):
        _, both = projection()
        out = both[place], None
        y, _ = gradkit.gated_rms_norm(*both, scale, eps=g.p.eps, out=out, **g.how)
        assert_same_bits(backend.asnumpy(y), expected[0])
