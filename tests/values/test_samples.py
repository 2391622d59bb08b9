"""Layer and RMS norm whose scale and bias belong to a sample: values, memory, errors."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradkit
from gradkit._calls.rows import LayerNorm, by_sample
from tests import strategies as draw_
from tests.layouts import LAYOUTS
from tests.problems import LAYER_TYPES, call_of, every_other, make
from tests.tolerances import assert_same_bits

TYPES = pytest.mark.parametrize("types", LAYER_TYPES, ids="-".join)
CENTRED = pytest.mark.parametrize("centred", [True, False], ids=["layer", "rms"])
# Single elements and packs, few rows and many, one row a sample, sums in shared memory, two visits.
SHAPES = [(3, 4, 5), (7, 1, 64), (2, 37, 64), (40, 3, 24), (2, 3, 4100), (2, 2, 16_400)]


class Samples:
    """A problem for each index of the first ``depth`` dimensions, in arrays of all of them."""

    def __init__(self, shape, types=LAYER_TYPES[0], axis=2, depth=1, *, seed=0, centred=True):
        self.whole = p = make(shape, types, axis, seed=seed, centred=centred)
        self.axis, self.lead = axis, shape[:depth]
        parameters = *self.lead, *(1,) * (axis - depth), *p.tail
        self.inner = (0,) * (axis - depth)
        p.scale = (1 + draw_.values(parameters, "float64", seed + 2) / 4).astype(p.scale.dtype)
        if centred:
            p.bias = draw_.values(parameters, "float64", seed + 3).astype(p.scale.dtype)

    def laid(self, lay):
        """The same in arrays of another layout."""
        for name in ("dy", "x", "scale", "bias"):
            if (array := getattr(self.whole, name)) is not None:
                setattr(self.whole, name, lay(array))
        return self

    @property
    def each(self):
        """Every sample's index, the index of its parameters, and its problem."""
        p = self.whole
        for index in np.ndindex(self.lead):
            place = (*index, *self.inner)
            own = {"dy": p.dy[index], "x": p.x[index], "scale": p.scale[place]}
            own["bias"] = None if p.bias is None else p.bias[place]
            yield index, place, replace(p, **own, axis=self.axis - len(index))

    def forward(self, backend, **options):
        return forward(backend, self.whole, axis=self.axis, **options)

    def backward(self, backend, **options):
        return backward(backend, self.whole, axis=self.axis, **options)

    def check(self, backend):
        """Every sample by the oracle of one that is alone."""
        found = [backend.asnumpy(a) for a in (*self.forward(backend), *self.backward(backend))]
        p = self.whole
        y, *statistics, dx, dscale = found if not p.centred else found[:5]
        dbias = found[5] if p.centred else None
        assert dscale.shape == p.scale.shape
        assert dbias is None or dbias.shape == p.scale.shape
        for index, place, sample in self.each:
            own = [backend.asarray(a[index]) for a in (y, *statistics)]
            sample.check_forward(backend, *own[:1], *([] if p.centred else [None]), *own[1:])
            sums = [None if a is None else backend.asarray(a[place]) for a in (dscale, dbias)]
            sample.check_gradients(backend, backend.asarray(dx[index]), *sums)


def forward(backend, p, residual=None, *, axis, **options):
    x, scale, bias = p.on(backend, "x", "scale", "bias")
    given = (x,) if residual is None else (x, backend.asarray(residual))
    given += (scale, bias) if p.centred else (scale,)
    name = f"{'' if residual is None else 'add_'}{'layer' if p.centred else 'rms'}_norm"
    return getattr(gradkit, name)(*given, axis=axis, eps=p.eps, **options)


def backward(backend, p, *, axis, **options):
    dy, x, scale, mean, inv_std = p.on(backend, "dy", "x", "scale", "mean", "inv_std")
    if p.centred:
        return gradkit.layer_norm_grad(dy, x, scale, mean, inv_std, axis=axis, **options)
    return gradkit.rms_norm_grad(dy, x, scale, inv_std, axis=axis, **options)


@given(data=st.data())
def test_any_problem(backend, data):
    shape = data.draw(draw_.shapes(backend.max_elements // 8, least_rank=2))
    axis = data.draw(st.integers(1, len(shape) - 1))
    depth = data.draw(st.integers(0, axis))
    types, centred = data.draw(st.sampled_from(LAYER_TYPES)), data.draw(st.booleans())
    found = Samples(shape, types, axis, depth, seed=data.draw(draw_.seeds), centred=centred)
    if np.prod(found.lead) <= 64:
        found.laid(LAYOUTS[data.draw(draw_.layouts)]).check(backend)


@pytest.mark.sampled(11)
@CENTRED
@pytest.mark.parametrize(("shape", "types"), every_other(SHAPES, LAYER_TYPES), ids=str)
def test_shapes(backend, shape, types, centred):
    Samples(shape, types, centred=centred).check(backend)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_any_number_of_leading_dimensions(backend, depth):
    """With none there is one scale for all, behind ones; with all of them one a row."""
    Samples((2, 3, 2, 8), axis=3, depth=depth).check(backend)
    if backend.on_host and not depth:  # wider than what a CPU computes at once
        Samples((2, 2, 40_001), axis=1).check(backend)
        Samples((1, 2, 40_001), axis=1, depth=0).check(backend)
    Samples((2, 1, 2, 8), axis=2, depth=min(depth, 2)).check(backend)


@CENTRED
@pytest.mark.parametrize("shape", [(0, 4, 5), (3, 0, 5), (3, 4, 0), (0, 0, 0)], ids=str)
def test_no_elements(backend, shape, centred):
    found = Samples(shape, centred=centred)
    found.whole.eps = 0.25
    y, *_, inv_std = found.forward(backend)
    assert y.shape == shape
    if not shape[2]:
        assert (backend.asnumpy(inv_std) == 2).all()
    dx, *sums = found.backward(backend)
    assert dx.shape == shape
    for array in sums:
        assert array.shape == found.whole.scale.shape
        assert not backend.asnumpy(array).any()


@pytest.mark.guarantee("A scale and bias per sample")
@pytest.mark.sampled(5)
@CENTRED
@pytest.mark.parametrize("shape", [(3, 4, 5), (3, 9, 64), (2, 2, 16_400)], ids=str)
def test_bits_are_those_of_samples_alone(backend, shape, centred):
    """With all further arguments. On a device sums over rows may be added in another order."""
    found, offset = Samples(shape, centred=centred), {"scale_offset": 0.5}
    other = draw_.values(shape, "float32", 9)
    added = found.forward(backend, residual=other, **offset)
    past = found.backward(backend, ds=backend.asarray(other), **offset)
    whole = [*found.forward(backend, **offset), *added, *past]
    for index, place, sample in found.each:
        own = {"axis": found.axis - 1} | offset
        alone = [*forward(backend, sample, **own)]
        alone += forward(backend, sample, other[index], **own)
        alone += backward(backend, sample, ds=backend.asarray(other[index]), **own)
        sums = 2 if centred else 1
        for k, (got, ref) in enumerate(zip(whole, alone, strict=True)):
            of_rows = k >= len(whole) - sums
            if of_rows and not backend.on_host:
                continue
            part = backend.asnumpy(got)[place if of_rows else index]
            assert_same_bits(part, backend.asnumpy(ref))


@CENTRED
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_arrays_of_any_layout(backend, layout, centred):
    """Read and written with the bits of arrays without gaps, also over dy and x."""
    found, lay = Samples((3, 4, 8), centred=centred), LAYOUTS[layout]
    expected = [backend.asnumpy(a) for a in found.forward(backend)]
    count = len(expected)
    expected += [backend.asnumpy(a) for a in found.backward(backend)]
    found.laid(lay)
    out = [backend.asarray(lay(np.full_like(a, np.nan))) for a in expected]
    got = found.forward(backend, out=tuple(out[:count]))
    got += found.backward(backend, out=tuple(out[count:]))
    for array, room, ref in zip(got, out, expected, strict=True):
        assert array is room
        assert_same_bits(backend.asnumpy(array), ref)


@pytest.mark.guarantee("A scale and bias per sample")
def test_a_sample_does_not_feel_another(backend):
    found = Samples((3, 5, 8))
    fine = [backend.asnumpy(a) for a in (*found.forward(backend), *found.backward(backend))]
    found.whole.scale[1] = np.nan
    found.whole.x[1, 2, 3] = np.nan
    spoilt = [backend.asnumpy(a) for a in (*found.forward(backend), *found.backward(backend))]
    for got, ref in zip(spoilt, fine, strict=True):
        assert_same_bits(got[::2], ref[::2])
        assert np.isnan(got[1]).any() or np.isfinite(ref).all()
    assert np.isnan(spoilt[0][1]).all()
    assert np.isnan(spoilt[4][1]).any()  # dscale


def test_a_scale_per_sample_is_modulation(backend):
    """Diffusion transformers' ``norm(x) * (1 + scale[:, None]) + shift[:, None]``."""
    p = Samples((2, 3, 8)).whole
    x, scale, shift = p.on(backend, "x", "scale", "bias")
    y, _, _ = gradkit.layer_norm(x, scale, shift, scale_offset=1.0, eps=1e-6)
    plain, _, _ = gradkit.layer_norm(x, eps=1e-6)
    expected = backend.asnumpy(plain) * (1 + p.scale) + p.bias
    np.testing.assert_allclose(backend.asnumpy(y), expected, rtol=1e-5, atol=1e-6)


def test_more_samples_than_a_launch_has():
    """A backend's function gets single samples then, whose results are views."""
    seen = []

    @by_sample(2)
    def write(call):
        seen.append((call.x.shape, call.scale.shape, call.axis))
        call.y[...] = call.scale

    for samples, shapes in ((2, [((2, 4, 5), (2, 1, 5), 2)]), (3, [((4, 5), (5,), 1)] * 3)):
        scale = np.arange(5.0 * samples).reshape(samples, 1, 5)
        call = call_of(LayerNorm, x=np.ones((samples, 4, 5)), scale=scale, axis=2)
        call.y, call.plan = np.empty((samples, 4, 5)), None
        write(call)
        assert seen == shapes
        assert (call.y == scale).all()
        seen.clear()


@pytest.mark.parametrize(
    "shape", [(2, 1, 8), (3, 4, 1), (1, 4, 8), (3, 8), (3, 1, 1, 8), (3, 1, 4)]
)
def test_other_shapes_are_refused(backend, shape):
    x = backend.asarray(np.ones((3, 4, 8)))
    scale = backend.asarray(np.ones(shape))
    with pytest.raises(ValueError, match=r"scale has shape .*per sample, as in \(3, 1, 8\)"):
        gradkit.layer_norm(x, scale)
    with pytest.raises(ValueError, match="scale has shape"):
        gradkit.rms_norm_grad(x, x, scale, backend.asarray(np.ones((3, 4))))


def test_a_bias_of_another_shape_is_refused(backend):
    x, scale, bias = (backend.asarray(np.ones(n)) for n in ((3, 4, 8), (3, 1, 8), (8,)))
    for own in ((scale, bias), (bias, scale)):
        with pytest.raises(ValueError, match="bias has shape"):
            gradkit.layer_norm(x, *own)


def test_other_norms_have_one_scale(backend):
    x, scale = backend.asarray(np.ones((3, 4, 8))), backend.asarray(np.ones((3, 1, 8)))
    with pytest.raises(ValueError, match=r"scale has shape \(3, 1, 8\); expected \(8,\)"):
        gradkit.gated_rms_norm(x, x, scale)
