"""Strategies of Hypothesis: shapes chosen to hurt, every dtype, every layout in memory."""

import math

import numpy as np
from hypothesis import strategies as st

from tests.layouts import LAYOUTS
from tests.tolerances import DTYPES

# Either side of a warp, a block, a vector, and a CPU backend's block; then what is tiny.
_RAGGED = (1, 2, 3, 5, 7, 31, 32, 33, 63, 64, 65, 127, 129, 255, 257, 511, 513)
_LONG = (1023, 1024, 1025, 2047, 2049, 4095, 4096, 4097, 12289, 16385)
_FEW = (1, 2, 3, 4, 5)

names = st.sampled_from(sorted(DTYPES))
layouts = st.sampled_from(sorted(LAYOUTS))
seeds = st.integers(0, 2**32 - 1)
orders = st.sampled_from((1.0, 2.0, math.inf, 3.0, 0.5, 1.5, 7.25))

# The decimal exponents that a dtype's values may have without leaving its range when squared.
_SPREAD = {"float16": 2, "bfloat16": 15, "float32": 15, "float64": 140}


def _normal(rng, shape, name):  # noqa: ARG001
    return rng.standard_normal(shape)


def _offset(rng, shape, name):
    return rng.standard_normal(shape) + (1e4 if name in ("float32", "float64") else 30)


def _spread(rng, shape, name):
    return rng.standard_normal(shape) * 10.0 ** rng.uniform(-_SPREAD[name], _SPREAD[name], shape)


def _ties(rng, shape, name):  # noqa: ARG001
    return rng.integers(-2, 3, shape)


def _constant(rng, shape, name):  # noqa: ARG001
    return np.full(shape, rng.standard_normal())


KINDS = {f.__name__[1:]: f for f in (_normal, _offset, _spread, _ties, _constant)}
kinds = st.sampled_from(sorted(KINDS))


def values(shape, name, seed=0, kind="normal"):
    """An array of a dtype by name; what it holds is random, and the same for the same seed."""
    return np.asarray(KINDS[kind](np.random.default_rng(seed), shape, name)).astype(DTYPES[name])


def shapes(most, *, least_rank=0, most_rank=5, empty=True):
    """Shapes of at most ``most`` elements: one ragged or long axis among short ones."""

    @st.composite
    def build(draw):
        rank = draw(st.integers(least_rank, most_rank))
        shape = [draw(st.sampled_from(_FEW)) for _ in range(rank)]
        for axis in draw(st.permutations(range(rank)))[:2]:
            room = most * shape[axis] // math.prod(shape)
            lengths = [n for n in (*_RAGGED, *_LONG) if n <= room]
            shape[axis] = draw(st.sampled_from(lengths or [1]))
        if empty and rank and draw(st.integers(0, 15)) == 0:
            shape[draw(st.integers(0, rank - 1))] = 0
        return tuple(shape)

    return build()


@st.composite
def arrays(draw, shape, name, kind=kinds):
    """A host array of a shape and dtype in any layout."""
    return LAYOUTS[draw(layouts)](values(shape, name, draw(seeds), draw(kind)))


@st.composite
def gradient_lists(draw, most, *, name=names, kind=kinds):
    """Up to six host arrays of mixed shapes, dtypes and layouts."""
    found = []
    for _ in range(draw(st.integers(0, 6))):
        found.append(draw(arrays(draw(shapes(most // 8)), draw(name), kind)))
    return found


@st.composite
def trees(draw, leaves):
    """A nested container of the leaves in order, with ``None`` and empty branches between."""
    if not leaves:
        return draw(st.sampled_from([[], {}, (), [None], {"none": None}]))
    if len(leaves) == 1 and draw(st.booleans()):
        return leaves[0]
    cut = draw(st.integers(0, len(leaves) - 1))
    branches = [draw(trees(leaves[:cut])), *leaves[cut : cut + 1], draw(trees(leaves[cut + 1 :]))]
    kind = draw(st.sampled_from((list, tuple, dict)))
    return dict(zip("abc", branches, strict=True)) if kind is dict else kind(branches)
