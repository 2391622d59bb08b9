"""The bits of every operation on small arrays, as hashes: ``tests/golden.json``.

Kernels compute as they are written, so their bits are those of the source, the grid and the
input, whatever compiled them. A change of bits shows up in review, and the first run on a GPU
says in a line where hardware differs. ``python -m tests.golden`` writes the file anew, from what
NVRTC makes of the kernels.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import gradkit
from testbed.emulated import on_device, ptx_backend
from testbed.nvrtc import version
from tests import strategies as draw_
from tests.problems import BATCH_TYPES, LAYER_TYPES, Problem, make
from tests.tolerances import DTYPES

FILE = Path(__file__).with_suffix(".json")
# Sizes of grids, and so the order of partial sums, depend on these.
ARCHITECTURE = 80
DEVICE = {"multiprocessors": 2, "max_shared_memory": 227 * 1024}
ROWS = [(9, 5), (37, 64), (3, 1027), (70, 256), (2, 20_000)]
IMAGES = [(33, 3), (5, 4, 3, 7), (2, 16, 8, 8)]
# NVIDIA's pow is not the C library's.
POWER = 3.5

On = Callable[[np.ndarray[Any, Any]], Any]
Case = tuple[str, Callable[[On], Any]]


def cases() -> Iterator[Case]:
    """Every case by name; a call takes what puts a host array on the device."""
    yield from _rows()
    yield from _channels()
    yield from _lists()
    yield from _pairs()


def depends_on_pow(name: str) -> bool:
    """Whether a case's bits are those of one library's ``pow``."""
    return f"p={POWER}" in name


def digest(results: Any) -> str:
    """A hash of dtypes, shapes and bytes."""
    state = hashlib.sha256()
    for result in results:
        if result is not None:
            state.update(f"{result.dtype} {result.shape}".encode())
            state.update(np.ascontiguousarray(result).tobytes())
    return state.hexdigest()[:16]


# Each norm's arguments, in order; an inverse takes x for the output of the norm.
_ROW_NORMS = {
    "layer_norm": "x scale bias",
    "layer_norm_grad": "dy x scale mean inv_std",
    "layer_norm_inverse": "x scale bias mean inv_std",
    "invertible_layer_norm_grad": "dy x scale bias inv_std",
    "rms_norm": "x scale",
    "rms_norm_grad": "dy x scale inv_std",
}


def _rows() -> Iterator[Case]:
    for name, arguments in _ROW_NORMS.items():
        for types in LAYER_TYPES:
            for shape in ROWS:
                p = make(shape, types, seed=7, centred=not name.startswith("rms"))
                where = f"{'-'.join(types)} {'x'.join(map(str, shape))}"
                yield f"{name} {where}", partial(_norm, name, p, arguments)


def _norm(name: str, p: Problem, arguments: str, on: On) -> Any:
    results = getattr(gradkit, name)(*(on(getattr(p, argument)) for argument in arguments.split()))
    return results if isinstance(results, tuple) else [results]


def _channels() -> Iterator[Case]:
    for types in BATCH_TYPES:
        for shape in IMAGES:
            for axis in dict.fromkeys((1, len(shape) - 1)):
                p = make(shape, types, axis, seed=7, batch=True)
                where = f"{'-'.join(types)} {'x'.join(map(str, shape))} axis {axis}"
                yield f"batch_norm {where}", partial(_batch_norm, p)
                yield f"batch_norm_grad {where}", partial(_batch_norm_grad, p)


def _batch_norm(p: Problem, on: On) -> Any:
    out = None, on(np.empty_like(p.mean)), on(np.empty_like(p.inv_std))
    return gradkit.batch_norm(*map(on, (p.x, p.scale, p.bias)), out=out, **p.where)


def _batch_norm_grad(p: Problem, on: On) -> Any:
    given = p.dy, p.x, p.scale, p.mean, p.inv_std
    return gradkit.batch_norm_grad(*map(on, given), **p.where)


def _lists() -> Iterator[Case]:
    for count in (4, 120):
        for dtype in (*DTYPES, "mixed"):
            grads, where = _gradients(count, dtype), f"{dtype} {count} arrays"
            for name, call in _LIST_CALLS.items():
                yield f"{name} {where}", partial(call, grads)


def _gradients(count: int, dtype: str) -> list[np.ndarray[Any, Any]]:
    names = list(DTYPES) if dtype == "mixed" else [dtype]
    return [
        draw_.values((k % 7 + 1, 3 * k % 50 + 1 + 2000 * (k == 3)), names[k % len(names)], k)
        for k in range(count)
    ]


def _norm_of(p: float, grads: Any, on: On, **options: Any) -> Any:
    return [gradkit.grad_norm(list(map(on, grads)), p, **options)]


def _in_place(function: str, *arguments: Any) -> Callable[[Any, On], Any]:
    def call(grads: Any, on: On) -> Any:
        own = list(map(on, grads))
        given = (on(a) if isinstance(a, np.ndarray) else a for a in arguments)
        getattr(gradkit, function)(own, *given)
        return own

    return call


_NORM = np.array(3.0)
_LIST_CALLS: dict[str, Callable[[Any, On], Any]] = {
    **{f"grad_norm p={p}": partial(_norm_of, p) for p in (1, 2, POWER, math.inf)},
    f"grad_norm over ranks p={POWER}": partial(_norm_of, POWER, reduce=lambda value, _: value),
    "clip_grad_norm": _in_place("clip_grad_norm", 0.7),
    "clip_grads_with_norm": _in_place("clip_grads_with_norm", _NORM, 0.7),
    "clip_grad_value": _in_place("clip_grad_value", 0.3),
    "scale_grads": _in_place("scale_grads", 0.3),
    "zero_grad": _in_place("zero_grad"),
    "clip_by_global_norm": lambda grads, on: gradkit.clip_by_global_norm(list(map(on, grads)), 0.7)[
        0
    ],
}


def _pairs() -> Iterator[Case]:
    norms = np.array([3.0, 0.1, np.nan])
    yield "clip_coefficient", lambda on: [gradkit.clip_coefficient(on(norms), 0.7)]
    for into in DTYPES:
        for addend in DTYPES:
            pair = draw_.values((7, 301), into, 1), draw_.values((301,), addend, 2)
            yield f"accumulate_grad {into} += {addend}", partial(_accumulate, pair)
            yield f"accumulate_grad_v2 {into} = {addend}", partial(_overwrite, pair)


def _accumulate(pair: Any, on: On) -> Any:
    return [gradkit.accumulate_grad(*map(on, pair), scale=0.3, casting="same_kind")]


def _overwrite(pair: Any, on: On) -> Any:
    return [gradkit.accumulate_grad_v2(*map(on, pair), overwrite=True, casting="same_kind")[1]]


def recorded() -> dict[str, str]:
    """The hashes in the repository, by case."""
    return dict(json.loads(FILE.read_text())["bits"])


def main() -> None:
    """Write ``golden.json``."""
    cuda = ptx_backend(architecture=ARCHITECTURE, **DEVICE)
    bits = {
        name: digest(call(lambda host: on_device(cuda.device.xp.array(host), cuda)))
        for name, call in cases()
    }
    compiler = f"NVRTC {'.'.join(map(str, version()))}, sm_{ARCHITECTURE}"
    content = {"device": DEVICE, "compiler": compiler, "bits": bits}
    FILE.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
