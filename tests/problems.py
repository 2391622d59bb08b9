"""The arguments of one norm, drawn or made, and the checks of what comes back."""

import math
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

import gradkit
from gradkit._open.dispatch import Opened, write
from tests import oracles, tolerances
from tests import strategies as draw_
from tests.layouts import LAYOUTS
from tests.tolerances import DTYPES, FACTOR, assert_within

# (T of dy, x, dx; U of mean, inv_std; V of scale, bias, dscale, dbias)
LAYER_TYPES = [
    ("float32", "float32", "float32"),
    ("float64", "float64", "float64"),
    ("float16", "float32", "float16"),
    ("float16", "float32", "float32"),
    ("float32", "float32", "float16"),
    ("bfloat16", "float32", "bfloat16"),
    ("bfloat16", "float32", "float32"),
    ("float32", "float32", "bfloat16"),
]
BATCH_TYPES = [
    ("float32", "float32", "float32"),
    ("float64", "float64", "float64"),
    ("float16", "float16", "float16"),
    ("float16", "float32", "float16"),
    ("float16", "float32", "float32"),
    ("bfloat16", "float32", "bfloat16"),
    ("bfloat16", "float32", "float32"),
    ("bfloat16", "bfloat16", "bfloat16"),
]


def every_other(some, others):
    """Pairs of these: each of the one with every other of the other."""
    pairs = product(enumerate(some), enumerate(others))
    return [(one, other) for (i, one), (j, other) in pairs if (i + j) % 2]


def call_of(kind, **given):
    """A call of that kind, with defaults for what is not given."""
    defaults = {"axis": 1, "channel_axis": 1, "eps": 1e-5, "scale_offset": 0.0, "momentum": 0.1}
    fields = [*kind.arguments, *kind.in_place]
    names = [*(field.name for field in fields), *kind.numbers, *kind.passing]
    return kind(**{name: given.get(name, defaults.get(name)) for name in names})


def launch(backend, kind, outs, **given):
    """Have a backend write ``outs``; what it has kept in the plan of the call."""
    call = call_of(kind, **given)
    write(call, *outs, backend=backend)
    return call.plan.launcher


def opened(kind, outs, engine=None, **given):
    """A call as a backend gets it. Here an engine may be one that takes no arrays of NumPy.

    A plan that depends on it is the call's own.
    """
    call = call_of(kind, **given)
    Opened(call, outs=tuple(outs)).check_values()
    call.__dict__.update(zip(call.result_names, outs, strict=True))
    call.engine = engine
    if "engine" in kind.numbers:
        call.plan = copy(call.plan)
    return call


def one_or_each(grads, order=2.0, *, each, **options):
    """The norm of all gradients, or an array with that of each."""
    if each:
        return gradkit.per_tensor_norms(grads, order, flat=True, **options)
    return gradkit.grad_norm(grads, order, **options)


@dataclass(repr=False)
class Problem:
    """A norm's arguments on the host; ``axis`` is a batch norm's channel axis if ``batch``."""

    dy: np.ndarray
    x: np.ndarray
    scale: np.ndarray | None
    bias: np.ndarray | None
    axis: int
    statistics: str  # dtype of mean and inv_std
    batch: bool = False
    centred: bool = True
    eps: float = 1e-5
    mean: np.ndarray = field(init=False)
    inv_std: np.ndarray = field(init=False)

    def __post_init__(self):
        """Save true statistics of x, rounded to their dtype."""
        if self.x.size:
            ref = self.forward()
            mean, inv_std = ref.mean, ref.inv_std
        else:
            mean, inv_std = np.zeros((2, math.prod(self.lead)))
        dtype = DTYPES[self.statistics]
        self.mean = mean.astype(dtype).reshape(self.lead)
        self.inv_std = inv_std.astype(dtype).reshape(self.lead)

    def __repr__(self):
        """Shapes, dtypes and strides; a million values would help nobody."""
        names = ("dy", "x", "scale", "bias", "mean", "inv_std")
        shown = [
            f"{name}: {a.dtype}{a.shape} strides {a.strides}"
            for name in names
            if (a := getattr(self, name)) is not None
        ]
        return "; ".join([*shown, f"axis={self.axis} batch={self.batch} eps={self.eps}"])

    def _repr_pretty_(self, printer, _):
        printer.text(repr(self))

    @property
    def lead(self):
        """The shape of a statistic."""
        first = self.axis % self.x.ndim
        return (self.x.shape[first],) if self.batch else self.x.shape[:first]

    @property
    def tail(self):
        """The shape of a parameter."""
        return self.lead if self.batch else self.x.shape[self.axis % self.x.ndim :]

    def rows(self, array):
        """An array like x as (rows, columns), each row with statistics of its own."""
        first = np.moveaxis(array, self.axis, 0) if self.batch else array
        rest = first.shape[len(self.lead) :]
        return first.reshape(math.prod(self.lead), math.prod(rest))

    def per_column(self, parameter):
        """A parameter as it broadcasts against rows."""
        if parameter is None:
            return None
        return parameter.reshape((-1, 1) if self.batch else (1, -1))

    def on(self, backend, *names):
        """Arguments by name on a backend."""
        given = (getattr(self, name) for name in names)
        return [None if a is None else backend.asarray(a) for a in given]

    @property
    def addends(self):
        """Number of terms of a parameter's gradient."""
        return math.prod(self.x.shape) // math.prod(self.tail)

    @property
    def where(self):
        """The keyword that says which axis."""
        return {"channel_axis" if self.batch else "axis": self.axis}

    def forward(self):
        """Expected results of the forward pass."""
        scale, bias = self.per_column(self.scale), self.per_column(self.bias)
        return oracles.forward(self.rows(self.x), scale, bias, self.eps, centred=self.centred)

    def output(self):
        """The norm's output, and xhat as it follows from that."""
        y = (self.forward().y if self.x.size else self.x).astype(self.x.dtype)
        columns = self.per_column(self.scale), self.per_column(self.bias)
        y = y.reshape(self.x.shape)
        return y, oracles.unscaled(self.rows(y), *columns)

    @property
    def xhat(self):
        """Normalised x, by the saved statistics."""
        mean = self.mean.reshape(-1) if self.centred else None
        return oracles.normalised(self.rows(self.x), mean, self.inv_std.reshape(-1))

    def gradients(self, xhat=None):
        """Expected results of the backward pass."""
        return oracles.gradients(
            self.rows(self.dy),
            self.xhat if xhat is None else xhat,
            self.per_column(self.scale),
            self.inv_std.reshape(-1),
            centred=self.centred,
            along=1 if self.batch else 0,
        )

    def check_forward(self, backend, y, mean, inv_std, *, exchanged=0.0):
        """Values, shapes and dtypes of a forward pass; ``mean`` may be None.

        ``exchanged``: by how much of itself the mean may be off beyond its own bound.
        """
        y, inv_std = backend.asnumpy(y), backend.asnumpy(inv_std)
        assert (y.shape, y.dtype) == (self.x.shape, self.x.dtype)
        assert (inv_std.shape, str(inv_std.dtype)) == (self.lead, self.statistics)
        if self.x.size == 0:
            return
        ref = self.forward()
        depth = min(backend.depth, ref.y.shape[1])
        bound = tolerances.averaged("y", ref.y_size, ref.y, depth, y.dtype)
        bound = bound + FACTOR["held"] * backend.mean_unit * ref.mean_in_y
        bound = bound + tolerances.below_normal("y", y.dtype, ref.inv_std.reshape(-1, 1))
        if exchanged:
            off = exchanged * np.abs(ref.mean * ref.inv_std)  # in deviations
            off = off * (1 + off)  # by how much of itself inv_std is off then
            bound = bound + exchanged * ref.mean_in_y + off[:, None] * ref.y_size
        assert_within(self.rows(y), ref.y, bound, "y")
        bound = tolerances.averaged("inv_std", ref.inv_std, ref.inv_std, depth, inv_std.dtype)
        if exchanged:
            bound = bound + off * ref.inv_std
        assert_within(inv_std.reshape(-1), ref.inv_std, bound, "inv_std")
        if mean is not None:
            mean = backend.asnumpy(mean)
            assert (mean.shape, str(mean.dtype)) == (self.lead, self.statistics)
            bound = tolerances.averaged("mean", ref.mean_size, ref.mean, depth, mean.dtype)
            bound = bound + tolerances.below_normal("mean", mean.dtype)
            bound = bound + exchanged * np.abs(ref.mean)
            assert_within(mean.reshape(-1), ref.mean, bound, "mean")

    def check_gradients(self, backend, dx, dscale, dbias=None, *, xhat=None):
        """Values, shapes and dtypes of a backward pass; what is ``None`` is not looked at."""
        dx = backend.asnumpy(dx)
        assert (dx.shape, dx.dtype) == (self.x.shape, self.x.dtype)
        sums = {"dscale": dscale, "dbias": dbias}
        sums = {name: backend.asnumpy(a) for name, a in sums.items() if a is not None}
        for array in sums.values():
            assert (array.shape, array.dtype) == (self.tail, self.scale.dtype)
        if self.x.size == 0:
            assert not any(array.any() for array in sums.values())
            return
        ref = self.gradients(xhat)
        bound = tolerances.elementwise("dx", ref.dx_size, ref.dx, dx.dtype)
        gain = self.inv_std.reshape(-1, 1).astype(ref.dx.dtype)
        bound = bound + tolerances.below_normal("dx", dx.dtype, gain)
        assert_within(self.rows(dx), ref.dx, bound, "dx")
        depth = min(backend.depth, self.addends)
        for name, array in sums.items():
            expected, size = getattr(ref, name), getattr(ref, f"{name}_size")
            bound = tolerances.summed(size, expected, depth, array.dtype, dx.dtype)
            bound = bound + tolerances.below_normal("sum", dx.dtype, ref.dx.size)
            assert_within(array.reshape(-1), expected, bound, name)


@dataclass(repr=False)
class GroupProblem(Problem):
    """A group norm's arguments; rows are the groups of all samples, ``axis`` has the channels."""

    groups: int = 1

    @property
    def lead(self):
        return len(self.x), self.groups

    @property
    def tail(self):
        return (self.x.shape[self.axis],)

    @property
    def where(self):
        return {"channel_axis": self.axis}

    def rows(self, array):
        """An array like x as (samples * groups, elements of a group)."""
        first = np.moveaxis(array, self.axis, 1)
        return first.reshape(math.prod(self.lead), first.size // max(1, math.prod(self.lead)))

    def per_column(self, parameter):
        """One number per channel as an array like ``rows``."""
        if parameter is None:
            return None
        space = (1,) * (self.x.ndim - 2)
        first = np.moveaxis(self.x, self.axis, 1)
        return self.rows(
            np.moveaxis(np.broadcast_to(parameter.reshape(-1, *space), first.shape), 1, self.axis)
        )

    def gradients(self, xhat=None):
        """Those of its rows, with sums over samples and space."""
        ref = super().gradients(xhat)
        dy, xhat = oracles.wide(self.rows(self.dy)), self.xhat if xhat is None else xhat
        shape = len(self.x), *self.tail, -1
        with np.errstate(all="ignore"):
            terms, of_dy = (a.reshape(shape) for a in (dy * xhat, dy))
            sums = [a.sum(axis=(0, 2)) for a in (terms, of_dy, np.abs(terms), np.abs(of_dy))]
        return ref._replace(dscale=sums[0], dbias=sums[1], dscale_size=sums[2], dbias_size=sums[3])


# Far above a dtype's smallest subnormal number, around its smallest normal one, and at the end.
ABOVE_NOTHING = (26, 22, 12, 5, 1)


def tiny(array, above):
    """``array`` scaled to about 2^above times the smallest number of its dtype."""
    least = np.longdouble(tolerances.smallest(array.dtype))
    return (array.astype(np.longdouble) * (least * 2**above)).astype(array.dtype)


def make_groups(shape, groups, types=LAYER_TYPES[0], axis=1, *, seed=0, kind="normal", **options):
    """A group norm's problem of one shape, all arrays gapless."""
    p = make(shape, types, axis, seed=seed, kind=kind, batch=True, **options)
    return GroupProblem(p.dy, p.x, p.scale, p.bias, axis, types[1], eps=p.eps, groups=groups)


def make(shape, types=LAYER_TYPES[0], axis=-1, *, seed=0, kind="normal", affine=True, **options):
    """A problem of one shape, all arrays gapless."""
    data, statistics, parameters = types
    dy = draw_.values(shape, data, seed)
    x = draw_.values(shape, data, seed + 1, kind)
    first = axis % len(shape)
    tail = (shape[first],) if options.get("batch") else shape[first:]
    scale = 1 + draw_.values(tail, "float64", seed + 2) / 4
    bias = draw_.values(tail, "float64", seed + 3)
    scale, bias = (a.astype(DTYPES[parameters]) if affine else None for a in (scale, bias))
    bias = bias if options.get("centred", True) else None
    return Problem(dy, x, scale, bias, axis, statistics, **options)


@st.composite
def group_problems(draw, most, *, kind=draw_.kinds):
    """Any shape of rank 2 to 5, channel axis, number of groups, dtypes, layouts and values."""
    types = draw(st.sampled_from(LAYER_TYPES))
    groups, width = draw(st.sampled_from((1, 2, 3, 8))), draw(st.sampled_from((1, 2, 3, 4, 7)))
    rest = draw(draw_.shapes(max(1, most // (groups * width)), least_rank=1, most_rank=4))
    axis = draw(st.integers(1, len(rest)))
    shape = (*rest[:axis], groups * width, *rest[axis:])
    axis = draw(st.sampled_from((axis, axis - len(shape))))
    affine = draw(st.integers(0, 5)) > 0
    seed, kind = draw(draw_.seeds), draw(kind)
    p = make_groups(shape, groups, types, axis, seed=seed, kind=kind, affine=affine)
    for name in ("dy", "x", "scale", "bias"):
        if (array := getattr(p, name)) is not None:
            setattr(p, name, LAYOUTS[draw(draw_.layouts)](array))
    return p


@st.composite
def problems(draw, most, *, types=None, batch=False, kind=draw_.kinds, **options):
    """Any shape of rank 1 to 5, axis, dtypes, layouts and values.

    For batch norm: of rank 2 to 5, and not with one element per channel.
    """
    types = draw(st.sampled_from(types or (BATCH_TYPES if batch else LAYER_TYPES)))
    shape = draw(draw_.shapes(most, least_rank=2 if batch else 1))
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    assume(not batch or prod(shape) == 0 or prod(shape) > shape[axis])
    plain = make(
        shape,
        types,
        axis,
        seed=draw(draw_.seeds),
        kind=draw(kind),
        affine=draw(st.integers(0, 5)) > 0,
        batch=batch,
        **options,
    )
    dy = plain.dy
    if draw(st.integers(0, 4)) == 0:  # a broadcast gradient, as sum() has
        one = draw(st.sets(st.integers(0, dy.ndim - 1)))
        dy = np.broadcast_to(
            dy[tuple(slice(0, 1 if k in one else None) for k in range(dy.ndim))], shape
        )
    else:
        dy = LAYOUTS[draw(draw_.layouts)](dy)
    laid = {
        name: None if (a := getattr(plain, name)) is None else LAYOUTS[draw(draw_.layouts)](a)
        for name in ("x", "scale", "bias")
    }
    found = replace(plain, dy=dy, **laid)
    if not batch and draw(st.booleans()):
        ones = found.lead + (1,) * len(found.tail)
        found.mean, found.inv_std = found.mean.reshape(ones), found.inv_std.reshape(ones)
    return found
