"""Lists of NumPy arrays, element by element: multiplied by a number, or clamped."""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain, repeat, starmap
from operator import attrgetter, itemgetter
from typing import Any, TypeAlias

import numpy as np

from gradkit._numpy import scratch, tuning
from gradkit._numpy.blocks import Array, DType, load, matched, store
from gradkit._numpy.interrupts import Uninterrupted
from gradkit._numpy.threads import in_strips

# What is called for each array of a dtype, and what it takes between source and target.
Recipe: TypeAlias = Callable[[DType], tuple[Callable[..., object], tuple[Any, ...]]]
Pair: TypeAlias = tuple[Array, ...]  # a source and a target

_F32, _F64 = np.dtype(np.float32), np.dtype(np.float64)
# Elements of a large gradient that are taken at a time.
_PIECE = scratch.elements(1, _F64)

_NO_SCRATCH = nullcontext((np.empty(0), np.empty(0)))
_dtype_of, _size_of = attrgetter("dtype"), attrgetter("size")


def scaling(factor: float) -> Recipe:
    """How arrays are multiplied by a number."""
    # float32 rounds the factor and the product: within one unit in the last place, as long
    # as the factor itself is a normal float32.
    low, high = tuning.NORMAL_FACTORS
    normal = factor == 0 or not math.isfinite(factor) or low <= abs(factor) < high
    # 0-d arrays: NumPy takes three times as long to make an operand of a scalar.
    narrow, wide = np.array(factor, _F32), np.array(factor)

    def recipe(dtype: DType) -> tuple[Callable[..., object], tuple[Any, ...]]:
        if dtype == _F64:
            return np.multiply, (wide,)
        if normal:
            return np.multiply, (narrow,)
        return partial(np.multiply, dtype=_F64, casting="unsafe"), (wide,)

    return recipe


def clamping(limit: float) -> Recipe:
    """How arrays are clamped to both sides of zero."""
    return lambda dtype: (np.clip, (dtype.type(-limit), dtype.type(limit)))


def elementwise(recipe: Recipe, sources: Sequence[Array], targets: Sequence[Array]) -> None:
    """Write to each target what the recipe makes of its source; 16-bit floats in float32."""
    elements = sum(map(_size_of, sources))
    pairs: Iterable[Pair] = zip(sources, targets, strict=True)
    if elements > _PIECE and max(map(_size_of, sources)) > _PIECE:
        pairs = chain.from_iterable(
            matched(*pair, limit=_PIECE) if pair[0].size > _PIECE else [pair] for pair in pairs
        )
    dtypes = dict.fromkeys(map(_dtype_of, sources))
    recipes = {dtype: recipe(_F32 if dtype.itemsize == 2 else dtype) for dtype in dtypes}
    with Uninterrupted():
        in_strips(partial(_elementwise_strip, recipes), list(pairs), elements, pays=tuning.ONE_PASS)


def _elementwise_strip(
    recipes: dict[DType, tuple[Callable[..., object], tuple[Any, ...]]], pairs: Sequence[Pair]
) -> None:
    half = any(dtype.itemsize == 2 for dtype in recipes)
    # Before anything is written: memory may run out.
    with scratch.arrays(2, _F32) if half else _NO_SCRATCH as (wide, room):
        for dtype, (function, operands) in recipes.items():
            one = len(recipes) == 1
            mine = pairs if one else [pair for pair in pairs if pair[0].dtype == dtype]
            if dtype.itemsize == 2:
                for source, target in mine:
                    values = load(source, _F32, wide, source.shape)
                    function(values, *operands, values)
                    store(values, target, room)
            else:
                between = (repeat(operand, len(mine)) for operand in operands)
                first, last = (map(itemgetter(side), mine) for side in (0, 1))
                # A loop of Python's own takes a fifth longer.
                for _ in starmap(function, zip(first, *between, last, strict=True)):
                    pass
