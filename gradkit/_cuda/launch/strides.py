"""Describe pairs of strided arrays in as few dimensions as possible, without reading elements."""

from collections.abc import Iterator, Sequence, Set
from itertools import product
from typing import NamedTuple, TypeAlias

from gradkit._backend import Array

Strides: TypeAlias = tuple[int, ...]
Dim: TypeAlias = tuple[int, int, int]  # length, source stride, target stride; in bytes


class Pair(NamedTuple):
    """A source and a target of the same shape, as kernels read and write them."""

    source: int  # addresses
    target: int
    elements: int
    dims: tuple[Dim, ...]  # innermost first; empty if both are aligned and without gaps


def pair_of(source_at: int, target_at: int, source: Array, target: Array) -> Pair:
    """The pair of two arrays at these addresses; the source is broadcast to the target's shape."""
    sizes = source.itemsize, target.itemsize
    aligned = not (source_at % sizes[0] or target_at % sizes[1])
    gapless = source.flags.c_contiguous and target.flags.c_contiguous
    if aligned and gapless and source.shape == target.shape:
        return Pair(source_at, target_at, target.size, ())
    dims = []
    for length, step, target_step in zip(
        target.shape, broadcast_strides(source, target.shape), target.strides, strict=True
    ):
        if target_step < 0:  # start at the other end: elements may be visited in any order
            source_at += (length - 1) * step
            target_at += (length - 1) * target_step
            step, target_step = -step, -target_step
        dims.append((length, step, target_step))
    merged = merge(dims) if target.size else []
    if merged in ([], [(target.size, *sizes)]) and aligned:
        merged = []
    elif not merged:
        merged = [(1, 0, 0)]  # one unaligned element
    return Pair(source_at, target_at, target.size, tuple(merged))


class Units(NamedTuple):
    """Units at one distance from each other: a pair for the first, and how to reach the others."""

    pair: Pair
    number: int
    source_step: int  # in bytes
    target_step: int


def units_of(
    source_at: int, target_at: int, source: Array, target: Array, axes: Set[int]
) -> Iterator[Units]:
    """Two arrays of one shape, cut into units that extend along ``axes``, in C order."""
    inside = tuple(slice(None) if axis in axes else 0 for axis in range(source.ndim))
    counted = [axis for axis in range(source.ndim) if axis not in axes and source.shape[axis] != 1]
    dims: list[Dim] = []  # outermost first
    for axis in counted:
        dim = (source.shape[axis], source.strides[axis], target.strides[axis])
        if dims and dims[-1][1:] == (dim[0] * dim[1], dim[0] * dim[2]):
            dim = (dims.pop()[0] * dim[0], *dim[1:])
        dims.append(dim)
    if any(length == 0 for length, _, _ in dims):
        return
    one = source[(*inside, ...)], target[(*inside, ...)]
    number, *steps = dims.pop() if dims else (1, 0, 0)
    for index in product(*(range(length) for length, _, _ in dims)):
        skipped, target_skipped = (
            sum(i * dim[side] for i, dim in zip(index, dims, strict=True)) for side in (1, 2)
        )
        pair = pair_of(source_at + skipped, target_at + target_skipped, *one)
        if not pair.dims and any(
            step % array.itemsize for step, array in zip(steps, one, strict=True)
        ):
            pair = pair._replace(dims=((pair.elements, one[0].itemsize, one[1].itemsize),))
        yield Units(pair, number, *steps)


def broadcast_strides(array: Array, shape: tuple[int, ...]) -> Strides:
    """An array's strides when it is broadcast to ``shape``."""
    missing: int = len(shape) - array.ndim
    own = zip(array.shape, array.strides, shape[missing:], strict=True)
    steps: Strides = tuple(step if length == wanted else 0 for length, step, wanted in own)
    return (0,) * missing + steps


def merge(dims: Sequence[Dim]) -> list[Dim]:
    """The same elements in fewer dimensions, innermost first."""
    merged: list[Dim] = []
    for dim in sorted((d for d in dims if d[0] != 1), key=lambda d: (d[2], abs(d[1]))):
        if merged:
            length, step, target_step = merged[-1]
            if dim[1:] == (length * step, length * target_step):
                merged[-1] = (length * dim[0], step, target_step)
                continue
        merged.append(dim)
    return merged
