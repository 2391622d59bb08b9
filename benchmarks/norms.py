"""Shared by the benchmarks of norm gradients: arguments, cases and checks."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks import gpu_peers, peers, shapes
from benchmarks.harness import OURS, Case
from benchmarks.places import Arrays

Arguments = dict[str, Any]
Operation = Callable[..., Any]

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float64": np.float64}


def cases(
    operation: Operation,
    make: Callable[[tuple[int, ...], Any], Arguments],
    everyone: Sequence[Any],
    wanted: Sequence[tuple[int, ...]],
    targets: dict[str, float],
    **options: Any,
) -> Iterator[Case]:
    """float32 on every shape with every peer, then the other dtypes on the first shape."""
    name = operation.__name__
    for shape, dtype in [(s, "float32") for s in wanted] + [(wanted[0], d) for d in DTYPES]:
        arguments = make(shape, DTYPES.get(dtype, np.float32))
        dy = arguments["dy"]
        out = tuple(np.empty_like(a) for a in operation(**arguments, **options))
        plain = dtype == "float32"
        beside = everyone if plain else [p for p in everyone if p.name == "torch"]
        yield Case(
            operation=name,
            shape="x".join(map(str, shape)),
            dtype=dtype,
            bytes=3 * dy.nbytes,
            calls={
                OURS: lambda a=arguments: operation(**a, **options),
                f"{OURS} out=": lambda a=arguments, out=out: operation(**a, **options, out=out),
                **peers.calls(beside, name, **arguments),
            },
            targets=targets if plain and shape == wanted[0] else {},
            check=partial(_check, operation, name, arguments, options) if plain else None,
        )


def rows(shape: tuple[int, ...], dtype: Any, *, centred: bool) -> Arguments:
    """Arguments of the gradient of layer norm or RMS norm."""
    rng = np.random.default_rng(0)
    m, d = shape
    narrow = np.dtype(dtype).itemsize == 2
    x, dy = (rng.standard_normal(shape, np.float32).astype(dtype) for _ in range(2))
    statistic = np.float32 if narrow else dtype  # also of scale: PyTorch requires the same dtype
    scale = rng.standard_normal(d, np.float32).astype(statistic)
    variance = x.astype(np.float32).var(axis=1) if centred else np.ones(m)
    found = {"dy": dy, "x": x, "scale": scale}
    if centred:
        found["mean"] = x.astype(np.float32).mean(axis=1).astype(statistic)
    return found | {"inv_std": (1 / np.sqrt(variance + 1e-5)).astype(statistic)}


def small(wanted: Sequence[tuple[int, ...]], *, quick: bool) -> Sequence[tuple[int, ...]]:
    """All shapes, or the first two."""
    return wanted[:2] if quick else wanted


def row_shapes(*, quick: bool) -> Sequence[tuple[int, ...]]:
    """The published shapes that are small enough for a CPU."""
    return small([s for s in shapes.NORMS if s[0] * s[1] <= 1 << 24], quick=quick)


def _check(operation: Operation, name: str, arguments: Arguments, options: Arguments) -> None:
    expected = getattr(peers.Naive(), name)(**arguments)()
    for got, ref in zip(operation(**arguments, **options), expected, strict=True):
        size = np.abs(ref).max()
        np.testing.assert_allclose(got, ref, rtol=1e-3, atol=1e-4 * size, err_msg=name)


# On a device

OFF = {2: 1e-2, 4: 1e-4, 8: 1e-10}  # error relative to the largest element, by itemsize


def device_cases(
    operation: Operation,
    make: Callable[[tuple[int, ...], str], Arguments],
    place: Arrays,
    everyone: Sequence[Any],
    wanted: Sequence[tuple[tuple[int, ...], str]],
    targets: Callable[[tuple[int, ...], int], dict[str, float]],
    passes: int = 3,
    layout: str = "",
) -> Iterator[Case]:
    """Every shape and dtype with every peer."""
    name = operation.__name__
    for shape, dtype in wanted:
        arguments = make(shape, dtype)
        dy, scale = arguments["dy"], arguments["scale"]
        likes = (dy, scale, scale) if {"mean", "bias"} & arguments.keys() else (dy, scale)
        out = tuple(map(place.empty_like, likes))
        size = passes * dy.nbytes
        yield Case(
            operation=name,
            shape="x".join(map(str, shape)) + layout,
            dtype=dtype,
            bytes=size,
            calls={
                OURS: lambda a=arguments, out=out: operation(**a, out=out),
                f"{OURS} allocating": lambda a=arguments: operation(**a),
                **gpu_peers.calls(everyone, name, **arguments),
            },
            targets={} if place.tiny else targets(shape, size),
            check=partial(_check_device, operation, arguments, place),
        )


def device_rows(place: Arrays, shape: tuple[int, ...], dtype: str, *, centred: bool) -> Arguments:
    """The same as ``rows``, on a device, with scale of the data's dtype."""
    x, dy = place.normal(shape, dtype, 0), place.normal(shape, dtype, 1)
    scale = place.normal(shape[1:], dtype, 2)
    values = place.exact(x)
    mean = values.mean(axis=1)
    squares = ((values - mean[:, None] if centred else values) ** 2).mean(axis=1)
    statistic = np.float64 if dtype == "float64" else np.float32
    found = {"dy": dy, "x": x, "scale": scale}
    if centred:
        found["mean"] = place.array(mean.astype(statistic))
    eps = 1e-5 if centred else 1e-6
    return found | {"inv_std": place.array((1 / (squares + eps) ** 0.5).astype(statistic))}


def device_row_shapes(place: Arrays) -> list[tuple[tuple[int, ...], str]]:
    """The published shapes in bfloat16, and the first of them in other dtypes."""
    shapes_ = shapes.TINY_NORMS if place.tiny else shapes.DEVICE_NORMS
    others = [(shapes_[0], dtype) for dtype in ("float32", "float16")]
    return [(shapes_[0], "bfloat16"), *others, *((s, "bfloat16") for s in shapes_[1:])]


def row_targets(best: float, shape: tuple[int, ...], size: int) -> dict[str, float]:
    """The targets for a shape, by its size in bytes and its columns."""
    rows, width = shape
    if size < 2e6:
        return {"ms": 0.008, "wall ms": 0.020, "torch": 1.0, "torch.compile": 1.0, "liger": 1.0}
    if width <= 256:
        return {"copy": 0.65, "torch.compile": 1.5}
    if size <= 50e6:
        return {"copy": 0.55, "torch": 1.5}
    if width >= 12288:
        return {"copy": 0.72, "torch.compile": 1.5}
    if width >= 4096 and rows >= 8192:
        return {"copy": best, "torch": 2.0, "torch.compile": 1.8, "liger": 1.0}
    return {"copy": 0.75, "torch": 2.0} if size >= 100e6 else {}


def _check_device(operation: Operation, arguments: Arguments, place: Arrays) -> None:
    """Compare every result with the plain formula in float64."""
    exact = {name: place.exact(array) for name, array in arguments.items()}
    expected = getattr(gpu_peers.Plain(place), operation.__name__)(**exact)()
    for got, ref in zip(operation(**arguments), expected, strict=True):
        off = float(abs(place.exact(got) - ref).max() / abs(ref).max())
        if not off <= OFF[got.dtype.itemsize]:
            raise AssertionError(
                f"{operation.__name__} {got.shape} {got.dtype} is off by {off:.2g}"
            )
