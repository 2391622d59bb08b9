"""What the benchmarks of norm gradients share: arguments, cases and checks."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks import peers, shapes
from benchmarks.harness import OURS, Case

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
    """float32 on every shape beside every peer, then the other dtypes on the first shape."""
    name = operation.__name__
    for shape, dtype in [(s, "float32") for s in wanted] + [(wanted[0], d) for d in DTYPES]:
        arguments = make(shape, DTYPES.get(dtype, np.float32))
        x = arguments["x"]
        out = tuple(np.empty_like(a) for a in operation(**arguments, **options))
        plain = dtype == "float32"
        beside = everyone if plain else [p for p in everyone if p.name == "torch"]
        yield Case(
            operation=name,
            shape="x".join(map(str, shape)),
            dtype=dtype,
            bytes=3 * x.nbytes,
            calls={
                OURS: lambda a=arguments: operation(**a, **options),
                f"{OURS} out=": lambda a=arguments, out=out: operation(**a, **options, out=out),
                **peers.calls(beside, name, **arguments),
            },
            targets=targets if plain and shape == wanted[0] else {},
            check=partial(_check, operation, name, arguments, options) if plain else None,
        )


def rows(shape: tuple[int, ...], dtype: Any, *, centred: bool) -> Arguments:
    """Arguments of the gradient of a layer norm, or of an RMS norm."""
    rng = np.random.default_rng(0)
    m, d = shape
    narrow = np.dtype(dtype).itemsize == 2
    x, dy = (rng.standard_normal(shape, np.float32).astype(dtype) for _ in range(2))
    statistic = np.float32 if narrow else dtype  # and of scale: PyTorch wants both alike
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
    """The published shapes that a CPU gets through in time."""
    return small([s for s in shapes.NORMS if s[0] * s[1] <= 1 << 24], quick=quick)


def _check(operation: Operation, name: str, arguments: Arguments, options: Arguments) -> None:
    expected = getattr(peers.Naive(), name)(**arguments)()
    for got, ref in zip(operation(**arguments, **options), expected, strict=True):
        size = np.abs(ref).max()
        np.testing.assert_allclose(got, ref, rtol=1e-3, atol=1e-4 * size, err_msg=name)
