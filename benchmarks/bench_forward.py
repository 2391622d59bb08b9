"""The norms themselves: x is read and y is written, and with a residual two more.

Batch norm must have read all of x before it writes the first y; if x fits into a cache, 2 elements
per element move through memory, otherwise 3.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np

import gradkit
from benchmarks import forward, gpu_peers, norms, shapes
from benchmarks import peers as others
from benchmarks.bench_group_norm import GROUPS
from benchmarks.harness import OURS, Case
from benchmarks.places import Arrays, Call

ROWS, IMAGES = [shapes.NORMS[0], shapes.NORMS[2]], shapes.IMAGES[:1:-1]
OF_ROWS = {"layer_norm": "x scale bias", "rms_norm": "x scale", "add_rms_norm": "x residual scale"}
OF_IMAGES = {
    "group_norm": "x num_groups scale bias",
    "batch_norm": "x scale bias running_mean running_var",
    "batch_norm_inference": "x scale bias mean var",
}
MOVED = {"add_rms_norm": 4, "batch_norm": 3}  # elements for each of x; of others 2


def cases(peers: Sequence[Any], *, quick: bool) -> Iterator[Case]:
    """float32 with every peer, and bfloat16 beside PyTorch on the first shape."""
    host, torch = _Host(), [peer for peer in peers if peer.name == "torch"]
    for names, wanted in ((OF_ROWS, ROWS), (OF_IMAGES, IMAGES)):
        chosen = [(shape, "float32") for shape in norms.small(wanted, quick=quick)]
        for name, (shape, dtype) in product(names, [*chosen, (wanted[0], "bfloat16")]):
            given = _arguments(host, names[name], shape, dtype)
            calls = others.calls(peers if dtype == "float32" else torch, name, **given)
            yield _case(host, name, given, dtype, calls)


def device_cases(place: Arrays, peers: Sequence[Any]) -> Iterator[Case]:
    """bfloat16, on the largest shapes."""
    rows = shapes.TINY_NORMS[:1] if place.tiny else shapes.DEVICE_NORMS[:3]
    images = shapes.TINY_IMAGES[:1] if place.tiny else shapes.DEVICE_IMAGES[:2]
    for names, wanted in ((OF_ROWS, rows), (OF_IMAGES, images)):
        for name, shape in product(names, wanted):
            given = _arguments(place, names[name], shape, "bfloat16")
            calls = gpu_peers.calls(peers, name, **given)
            yield _case(place, name, given, "bfloat16", calls)


class _Host(Arrays):
    xp = np

    def array(self, host: Any) -> Any:
        return host


def _arguments(place: Arrays, names: str, shape: tuple[int, ...], dtype: str) -> norms.Arguments:
    """Normal numbers by name; of images, parameters and statistics are float32."""
    channels, given = shape[1:2], dict[str, Any]()
    kind = dtype if names in OF_ROWS.values() else "float32"
    for seed, name in enumerate(names.split()):
        if name == "num_groups":
            given[name] = min(GROUPS, *channels)
        elif name in ("x", "residual"):
            given[name] = place.normal(shape, dtype, seed)
        else:
            given[name] = place.normal(channels, kind, seed)
        if name.endswith("var"):
            given[name] *= given[name]
    return given


def _case(
    place: Arrays, name: str, given: norms.Arguments, dtype: str, calls: Mapping[str, Call]
) -> Case:
    operation, x = getattr(gradkit, name), given["x"]
    found = operation(**given)
    several = isinstance(found, tuple)
    out = tuple(map(place.empty_like, found)) if several else place.empty_like(found)
    return Case(
        operation=name,
        shape="x".join(map(str, x.shape)),
        dtype=dtype,
        bytes=MOVED.get(name, 2) * x.nbytes,
        calls={
            OURS: lambda: operation(**given),
            f"{OURS} out=": lambda: operation(**given, out=out),
            **calls,
        },
        check=partial(_check, place, name, given),
    )


def _check(place: Arrays, name: str, given: norms.Arguments) -> None:
    """Compare y with the plain formula in float64."""
    exact = {k: v if isinstance(v, int) else place.exact(v) for k, v in given.items()}
    y, expected = getattr(gradkit, name)(**given), getattr(forward, name)(place.xp, **exact)
    if isinstance(y, tuple):
        y, expected = y[0], expected[0]
    off = float(abs(place.exact(y) - expected).max() / abs(expected).max())
    if not off <= norms.OFF[y.dtype.itemsize]:
        raise AssertionError(f"{name} {y.shape} {y.dtype} is off by {off:.2g}")
