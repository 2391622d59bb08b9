"""The cases that cuDNN takes: every combination of dtypes, channel axis and layout."""

import os
from math import prod

import numpy as np

from gradkit import _numpy
from gradkit._calls.channels import BatchNorm, BatchNormGrad, BatchNormInference
from gradkit._dtypes import BATCH_NORM_TYPES, accumulation_name, dtype_named
from gradkit.errors import CudnnError
from tests.layouts import LAYOUTS
from tests.problems import launch, opened
from tests.tolerances import UNIT, assert_within, rounded, smallest

SHAPES = [(6, 3), (4, 1), (2, 3, 5), (2, 3, 4, 5), (1, 3, 4, 5), (3, 1, 2, 2), (2, 3, 2, 1, 4)]
SHAPES += [(2, 2, 3, 2, 2), (7, 5, 1, 1)]


def has_variance(shape, axis):
    """Return whether a channel has two elements, as a forward pass needs."""
    return prod(shape) > shape[axis]


COMBINATIONS = [tuple(map(dtype_named, row)) for row in BATCH_NORM_TYPES]
FACTOR = 64  # of cuDNN: its sums run over other terms, in float32
# Samples for which cuDNN's float32 statistics lose one more u. Seen on a GPU, in inv_std: 52 u for
# 880,801 samples, 95 u for 1.2 million, 475 u for 4 million, of one to four elements.
_LOST_EVERY = 1 << 13

# Which layout x, dy and dx have; values in the gaps are NaN.
MIXTURES = [(name, name, name) for name in LAYOUTS]
MIXTURES += [("C", "rolled", "C"), ("rolled", "C", "C"), ("rolled", "rolled", "C")]
MIXTURES += [
    ("C", "C", "rolled"),
    ("stepped", "Fortran", "reversed"),
    ("rolled", "rolled", "offset"),
]


def error_in_child(call):
    """The text of cuDNN's error that a call raises in a forked child."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        answer = "no error"
        try:
            call()
        except CudnnError as error:
            answer = str(error)
        finally:
            os.write(write, answer.encode())
            os._exit(0)
    os.waitpid(child, 0)
    found = os.read(read, 1000).decode()
    os.close(read), os.close(write)
    return found


class OneCall:
    """A call of a kind, with what its backend function is named."""

    eps = None

    def call(self, engine=None, on=lambda array: array, **more):
        """The call as a backend gets it; ``on``: each array as the backend has it."""
        given = {
            argument.name: on(getattr(self, argument.name)) for argument in self.kind.arguments
        }
        outs = [on(getattr(self, name)) for name in self.kind.result_names]
        numbers = {"channel_axis": self.axis, "eps": self.eps}
        return opened(self.kind, outs, engine, **given, **numbers, **more)

    def run(self, backend, engine=None, **more):
        """Have a backend compute it; the engine that did."""
        return getattr(backend, self.operation)(self.call(engine, **more))


class Case(OneCall):
    """The arguments of one backward call, and what must come out of it."""

    kind, operation = BatchNormGrad, "batch_norm_grad"

    def __init__(self, shape, axis, types, *, layouts=("C", "C", "C"), affine=True, seed=0):
        rng = np.random.default_rng(seed)
        data, statistic, parameter = types
        x, dy = (rng.standard_normal(shape) * s + o for s, o in ((2, 0.5), (1, 0.1)))
        self.axis, self.types = axis, types
        self.x, self.dy = (
            LAYOUTS[layout](array.astype(data))
            for layout, array in zip(layouts, (x, dy), strict=False)
        )
        self.dx = LAYOUTS[layouts[2]](np.full(shape, np.nan, data))
        self._dy = self.dy.copy()  # which dx may be
        channels = shape[axis]
        others = tuple(a for a in range(len(shape)) if a != axis)
        wide = self.x.astype(np.float64)
        self.mean = wide.mean(axis=others).astype(statistic)
        self.inv_std = (1 / np.sqrt(wide.var(axis=others) + 1e-3)).astype(statistic)
        self.scale = (rng.standard_normal(channels) + 0.2).astype(parameter) if affine else None
        self.bias = rng.standard_normal(channels).astype(parameter) if affine else None
        self.dscale, self.dbias = (
            np.full(channels, np.nan, parameter) if affine else None for _ in range(2)
        )

    def check(self):
        """Compare with the reference in float64 within 64 u S."""
        data = self.x.dtype
        want = [np.empty(self.x.shape)] + [
            None if self.scale is None else np.empty(len(self.mean)) for _ in range(2)
        ]
        dy, x, mean, inv_std = (
            a.astype(np.float64) for a in (self._dy, self.x, self.mean, self.inv_std)
        )
        scale = None if self.scale is None else self.scale.astype(np.float64)
        statistics = {"mean": mean, "inv_std": inv_std, "channel_axis": self.axis}
        launch(_numpy, BatchNormGrad, want, dy=dy, x=x, scale=scale, **statistics)
        u = UNIT[accumulation_name(str(data))]
        along = [1] * x.ndim
        along[self.axis] = -1
        mean, inv_std = mean.reshape(along), inv_std.reshape(along)
        others = tuple(a for a in range(x.ndim) if a != self.axis)
        w = dy if scale is None else dy * scale.reshape(along)
        xhat = (x - mean) * inv_std
        size = np.abs(inv_std) * (
            np.abs(w)
            + np.abs(w).mean(axis=others, keepdims=True)
            + np.abs(xhat) * np.abs(w * xhat).mean(axis=others, keepdims=True)
        )
        assert_within(self.dx, want[0], FACTOR * u * size + rounded(want[0], data), "dx")
        if scale is None:
            return
        for got, ref, terms in ((self.dscale, want[1], dy * xhat), (self.dbias, want[2], dy)):
            bound = FACTOR * u * np.abs(terms).sum(axis=others) + rounded(ref, got.dtype)
            assert_within(got, ref, bound + smallest(got.dtype), "dscale, dbias")


class _Forward(OneCall):
    """The arrays of a call that normalises, but for statistics."""

    def __init__(self, shape, axis, types, layouts, affine, rng):
        data, _, parameter = types
        self.x = LAYOUTS[layouts[0]]((2 * rng.standard_normal(shape) + 0.5).astype(data))
        self.y = LAYOUTS[layouts[1]](np.full(shape, np.nan, data))
        self._x, self.axis, self.eps = self.x.copy(), axis, 1e-3
        vectors = rng.standard_normal((2, shape[axis])).astype(parameter)
        self.scale, self.bias = vectors if affine else (None, None)


class ForwardCase(_Forward):
    """The arguments of one forward call, and what must come out of it."""

    kind, operation = BatchNorm, "batch_norm"

    def __init__(self, shape, axis, types, *, layouts=("C", "C"), affine=True, seed=1):
        super().__init__(shape, axis, types, layouts, affine, np.random.default_rng(seed))
        self.mean, self.inv_std = np.full((2, shape[axis]), np.nan, types[1])

    def running(self, dtype, momentum, layout="stepped"):
        """Running statistics, which do not lie side by side unless ``layout`` is "C"."""
        self._before = np.random.default_rng(7).uniform(1, 2, (2, len(self.mean))).astype(dtype)
        mean, var = (LAYOUTS[layout](row.copy()) for row in self._before)
        self._running = {"running_mean": mean, "running_var": var, "momentum": momentum}
        return self._running

    def check_running(self):
        """Compare with what NumPy says of the batch."""
        x, (mean, var, momentum) = self._x.astype(np.float64), self._running.values()
        others = tuple(a for a in range(x.ndim) if a != self.axis)
        u = FACTOR * UNIT[accumulation_name(str(self.x.dtype))]
        largest = np.abs(x).max(axis=others)
        batch = (mean, x.mean(axis=others), largest), (var, x.var(axis=others, ddof=1), largest**2)
        for (got, new, size), old in zip(batch, self._before.astype(np.float64), strict=True):
            ref = (1 - momentum) * old + momentum * new
            assert_within(got, ref, u * (size + 2) + rounded(ref, got.dtype), "running")

    def unmoved(self):
        """Return whether running statistics are as they were."""
        rows = zip(self._running.values(), self._before, strict=False)
        return all(np.array_equal(row, before) for row, before in rows)

    def check(self):
        """Compare with the reference in float64."""
        wide = [None if a is None else a.astype(np.float64) for a in (self.scale, self.bias)]
        rule = {"scale": wide[0], "bias": wide[1], "channel_axis": self.axis, "eps": self.eps}
        x = self._x.astype(np.float64)
        y, (mean, inv_std) = np.empty(x.shape), np.empty((2, x.shape[self.axis]))
        launch(_numpy, BatchNorm, [y, mean, inv_std], x=x, **rule)
        lost = x.shape[0] / _LOST_EVERY
        u = (FACTOR + lost) * UNIT[accumulation_name(str(self.x.dtype))]
        along = [1] * x.ndim
        along[self.axis] = -1
        others = tuple(a for a in range(x.ndim) if a != self.axis)
        largest = np.abs(x).max(axis=others)
        terms = inv_std * largest
        if wide[0] is not None:
            terms = terms * np.abs(wide[0]) + np.abs(wide[1])
        assert_within(self.y, y, u * terms.reshape(along) + rounded(y, self.y.dtype), "y")
        assert_within(self.mean, mean, u * largest + rounded(mean, self.mean.dtype), "mean")
        bound = u * inv_std * (1 + (largest * inv_std) ** 2) + rounded(inv_std, self.mean.dtype)
        assert_within(self.inv_std, inv_std, bound, "inv_std")


class InferenceCase(_Forward):
    """The arguments of a call with known statistics, and what must come out of it."""

    kind, operation = BatchNormInference, "batch_norm_inference"

    def __init__(self, shape, axis, types, *, layouts=("C", "C"), affine=True, seed=2):
        rng = np.random.default_rng(seed)
        super().__init__(shape, axis, types, layouts, affine, rng)
        self.mean = rng.standard_normal(shape[axis]).astype(types[1])
        self.var = rng.uniform(0, 3, shape[axis]).astype(types[1])

    def check(self):
        """Compare with the formula in float64."""
        along = [1] * self._x.ndim
        along[self.axis] = -1
        x, mean, var = (a.astype(np.float64) for a in (self._x, self.mean, self.var))
        given = ((self.scale, 1), (self.bias, 0))
        vectors = (np.full(len(mean), fill) if a is None else a for a, fill in given)
        scale, bias = (vector.astype(np.float64).reshape(along) for vector in vectors)
        factor = scale / np.sqrt(var.reshape(along) + self.eps)
        y = (x - mean.reshape(along)) * factor + bias
        size = (np.abs(x) + np.abs(mean.reshape(along))) * np.abs(factor) + np.abs(bias)
        u = FACTOR * UNIT[accumulation_name(str(self.x.dtype))]
        assert_within(self.y, y, u * size + rounded(y, self.y.dtype), "y")
