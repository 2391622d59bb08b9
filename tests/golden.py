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
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import gradkit
from gradkit._dtypes import FLOATS
from testbed.nvrtc import version
from tests import strategies as draw_
from tests.devices.emulated import on_device, ptx_backend
from tests.problems import BATCH_TYPES, LAYER_TYPES, Problem, make, make_groups, on_purpose, tiny
from tests.tolerances import DTYPES

FILE = Path(__file__).with_suffix(".json")
ARCHITECTURE = 80  # of the code whose bits are recorded
# Sizes of grids, and so the order of partial sums, depend on these.
DEVICE = {"multiprocessors": 2, "max_shared_memory": 227 * 1024}
# Shapes; and by what power of two tiny data lies above the smallest number of its dtype, where
# kernels might flush to zero.
ROWS = [
    ((9, 5), None),
    ((37, 64), None),
    ((37, 64), 12),
    ((3, 1027), None),
    ((70, 256), None),
    ((2, 20_000), None),
]
TINY = 2  # which of them is
IMAGES = [
    ((33, 3), 1),
    ((5, 4, 3, 7), 1),
    ((5, 3, 7, 4), 3),
    ((2, 16, 8, 8), 1),
    ((2, 8, 8, 16), 3),
]
# NVIDIA's pow is not the C library's.
POWER = 3.5

On = Callable[[np.ndarray[Any, Any]], Any]


class Case(NamedTuple):
    """One call."""

    name: str  # begins with the public function's
    call: Callable[[On], Any]
    quick: bool  # whether it is one of the few that reach every kernel in every dtype


def cases() -> Iterator[Case]:
    """Every case; a call takes what puts a host array on the device."""
    yield from _rows()
    yield from _sums()
    yield from _channels()
    yield from _groups()
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
# Those that take one more array, here dy backwards; with an offset of the scale.
_SUMS = {
    "add_layer_norm": ("x scale bias", "residual"),
    "add_rms_norm": ("x scale", "residual"),
    "layer_norm_grad": ("dy x scale mean inv_std", "ds"),
    "rms_norm_grad": ("dy x scale inv_std", "ds"),
}


def _rows() -> Iterator[Case]:
    for (i, (name, arguments)), (j, types) in product(
        enumerate(_ROW_NORMS.items()), enumerate(LAYER_TYPES)
    ):
        for k, (shape, above) in enumerate(ROWS):
            p = make(shape, types, seed=7, centred=not name.startswith("rms"))
            size = "x".join(map(str, shape))
            if above is not None:
                p.dy, p.x, size = tiny(p.dy, above), tiny(p.x, above), f"{size}, tiny"
                p.bias = None  # beside which a tiny result is nothing
            call = partial(_norm, name, p, arguments)
            yield Case(f"{name} {'-'.join(types)} {size}", call, k in (TINY, (i + j) % len(ROWS)))


def _sums() -> Iterator[Case]:
    for (i, (name, (arguments, label))), (j, types) in product(
        enumerate(_SUMS.items()), enumerate(LAYER_TYPES)
    ):
        shape, above = ROWS[(2 * i + j) % len(ROWS)]
        p = make(shape, types, seed=7, centred="rms" not in name)
        size = "x".join(map(str, shape))
        if above is not None:
            p.dy, p.x, size = tiny(p.dy, above), tiny(p.x, above), f"{size}, tiny"
            p.bias = None
        call = partial(_sum, name, p, arguments, label)
        yield Case(f"{name} with {label} {'-'.join(types)} {size}", call, j % 3 == i % 3)


def _sum(name: str, p: Problem, arguments: str, label: str, on: On) -> Any:
    given = {k: getattr(p, k) for k in arguments.split()} | {label: p.dy[::-1].copy()}
    given = {k: None if a is None else on(a) for k, a in given.items()}
    return getattr(gradkit, name)(**given, scale_offset=0.5)


def _norm(name: str, p: Problem, arguments: str, on: On) -> Any:
    given = (getattr(p, argument) for argument in arguments.split())
    results = getattr(gradkit, name)(*(None if a is None else on(a) for a in given))
    return results if isinstance(results, tuple) else [results]


def _channels() -> Iterator[Case]:
    for j, types in enumerate(BATCH_TYPES):
        for k, (shape, axis) in enumerate(IMAGES):
            p = make(shape, types, axis, seed=7, batch=True)
            where = f"{'-'.join(types)} {'x'.join(map(str, shape))} axis {axis}"
            quick = k == j % len(IMAGES)
            yield Case(f"batch_norm {where}", partial(_batch_norm, p), quick)
            yield Case(f"batch_norm_grad {where}", partial(_batch_norm_grad, p), quick)
            p = make(shape, types, axis, seed=7, batch=True)
            p.dy, p.x, p.bias = tiny(p.dy, 12), tiny(p.x, 12), None
            yield Case(f"batch_norm {where}, tiny", partial(_batch_norm, p), quick)
            yield Case(f"batch_norm_grad {where}, tiny", partial(_batch_norm_grad, p), quick)
            p = make(shape, types, axis, seed=7, batch=True)
            for name, by_known in _KNOWN.items():
                yield Case(f"{name} {where}", partial(by_known, p), quick)
            for name, step in _STEPS.items():
                yield Case(f"{name} {where}", partial(step, p), quick)


def _batch_norm(p: Problem, on: On) -> Any:
    out = None, on(np.empty_like(p.mean)), on(np.empty_like(p.inv_std))
    bias = None if p.bias is None else on(p.bias)
    return gradkit.batch_norm(on(p.x), on(p.scale), bias, out=out, **p.where)


def _batch_norm_grad(p: Problem, on: On) -> Any:
    given = p.dy, p.x, p.scale, p.mean, p.inv_std
    return gradkit.batch_norm_grad(*map(on, given), **p.where)


def _running(p: Problem, on: On) -> Any:
    out = None, on(np.empty_like(p.mean)), on(np.empty_like(p.inv_std))
    own = on(p.mean), on(np.square(p.inv_std))
    names = {"running_mean": own[0], "running_var": own[1]}
    return [*gradkit.batch_norm(on(p.x), out=out, **names, **p.where), *own]


def _inference(p: Problem, on: On) -> Any:
    given = p.x, p.scale, p.bias, p.mean, np.square(p.inv_std)
    return [gradkit.batch_norm_inference(*(a if a is None else on(a) for a in given), **p.where)]


def _inference_grad(p: Problem, on: On) -> Any:
    given = p.dy, p.x, p.scale, p.mean, np.square(p.inv_std)
    return gradkit.batch_norm_inference_grad(*map(on, given), **p.where)


def _stats(p: Problem, on: On) -> Any:
    return gradkit.batch_norm_stats(on(p.x), **p.where)


def _apply(p: Problem, on: On) -> Any:
    out = None, on(np.empty_like(p.mean)), on(np.empty_like(p.inv_std))
    given = p.x, p.scale, p.bias, _PER_CHANNEL[: p.mean.size], _PER_CHANNEL[-p.mean.size :] ** 2
    return gradkit.batch_norm_apply(*map(on, given), out=out, **p.where)


def _grad_sums(p: Problem, on: On) -> Any:
    return gradkit.batch_norm_grad_sums(*map(on, (p.dy, p.x, p.mean, p.inv_std)), **p.where)


def _grad_apply(p: Problem, on: On) -> Any:
    given = p.dy, p.x, p.scale, p.mean, p.inv_std
    sums = _PER_CHANNEL[: p.mean.size], _PER_CHANNEL[-p.mean.size :], np.array(77.0)
    return [gradkit.batch_norm_grad_apply(*map(on, (*given, *sums)), **p.where)]


_KNOWN: dict[str, Callable[[Problem, On], Any]] = {
    "batch_norm with running statistics": _running,
    "batch_norm_inference": _inference,
    "batch_norm_inference_grad": _inference_grad,
}


def _groups() -> Iterator[Case]:
    for j, types in enumerate(LAYER_TYPES):
        for k, (shape, axis) in enumerate(IMAGES):
            groups = shape[axis] // (1 if shape[axis] % 2 else 2)
            p = make_groups(shape, groups, types, axis, seed=7)
            where = f"{'-'.join(types)} {'x'.join(map(str, shape))} axis {axis}"
            quick = k == j % len(IMAGES)
            yield Case(f"group_norm {where}", partial(_group_norm, p), quick)
            yield Case(f"group_norm_grad {where}", partial(_group_norm_grad, p), quick)


def _group_norm(p: Problem, on: On) -> Any:
    given = on(p.x), p.mean.shape[1], on(p.scale), on(p.bias)
    return gradkit.group_norm(*given, **p.where)


def _group_norm_grad(p: Problem, on: On) -> Any:
    given = p.dy, p.x, p.scale, p.mean, p.inv_std
    return gradkit.group_norm_grad(*map(on, given), **p.where)


_PER_CHANNEL = draw_.values((16,), "float64", 5)
_STEPS: dict[str, Callable[[Problem, On], Any]] = {
    "batch_norm_stats": _stats,
    "batch_norm_apply": _apply,
    "batch_norm_grad_sums": _grad_sums,
    "batch_norm_grad_apply": _grad_apply,
}


def _lists() -> Iterator[Case]:
    for count in (4, 120):
        for dtype in (*DTYPES, "mixed", "tiny"):
            grads, where = _gradients(count, dtype), f"{dtype} {count} arrays"
            for name, call in _LIST_CALLS.items():
                yield Case(f"{name} {where}", partial(call, grads), dtype in ("mixed", "tiny"))


def _gradients(count: int, dtype: str) -> list[np.ndarray[Any, Any]]:
    names = [dtype] if dtype in DTYPES else list(DTYPES)
    grads = [
        draw_.values((k % 7 + 1, 3 * k % 50 + 1 + 2000 * (k == 3)), names[k % len(names)], k)
        for k in range(count)
    ]
    return [tiny(grad, 12) for grad in grads] if dtype == "tiny" else grads


def _norm_of(p: float, grads: Any, on: On, **options: Any) -> Any:
    return [on_purpose(gradkit.grad_norm, list(map(on, grads)), p, **options)]


def _blocks(p: float, grads: Any, on: On) -> Any:
    clipped, norms = gradkit.clip_by_block_norm(
        list(map(on, grads)), 0.7, p, axis=0 if p == 1 else -1, rms=p != 2
    )
    return [*clipped, *norms]


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
    "per_tensor_norms": lambda grads, on: gradkit.per_tensor_norms(list(map(on, grads))),
    "clip_grad_norm": _in_place("clip_grad_norm", 0.7),
    "clip_grads_with_norm": _in_place("clip_grads_with_norm", _NORM, 0.7),
    "clip_grad_value": _in_place("clip_grad_value", 0.3),
    "scale_grads": _in_place("scale_grads", 0.3),
    "zero_grad": _in_place("zero_grad"),
    **{f"clip_by_block_norm p={p}": partial(_blocks, p) for p in (1, 2, POWER, math.inf)},
    "clip_grad_block_norm": _in_place("clip_grad_block_norm", 0.7),
    "clip_by_adaptive_norm": lambda grads, on: gradkit.clip_by_adaptive_norm(
        list(map(on, grads)), list(map(on, grads)), 0.5, axis=1
    )[0],
    "clip_grad_adaptive": lambda grads, on: [
        *gradkit.clip_grad_adaptive(list(map(on, grads)), list(map(on, grads)), 0.5, axis=0)
    ],
    "clip_by_global_norm": lambda grads, on: gradkit.clip_by_global_norm(list(map(on, grads)), 0.7)[
        0
    ],
}


def _pairs() -> Iterator[Case]:
    norms = np.array([3.0, 0.1, np.nan])
    yield Case(
        "clip_coefficient", lambda on: [gradkit.clip_coefficient(on(norms), 0.7)], quick=True
    )
    yield Case("spike_guard_update", _guard, quick=True)
    yield Case("combine_stats", _combine, quick=True)
    for dtype in DTYPES:
        call = partial(_move_running, dtype)
        yield Case(f"update_running_statistics {dtype}", call, quick=True)
    for (i, into), (j, addend) in product(enumerate(DTYPES), enumerate(DTYPES)):
        pair = draw_.values((7, 301), into, 1), draw_.values((301,), addend, 2)
        quick = j in (i, (i + 1) % len(DTYPES))
        yield Case(f"accumulate_grad {into} += {addend}", partial(_accumulate, pair), quick)
        yield Case(f"accumulate_grad_v2 {into} = {addend}", partial(_overwrite, pair), quick)
        pair = tiny(pair[0], 12), tiny(pair[1], 12)
        yield Case(f"accumulate_grad {into} += {addend}, tiny", partial(_accumulate, pair), quick)

    for into, kind in FLOATS.items():
        for addend in kind.addends:
            shapes = (9001,), (7, 301), (1,)
            lists = [[draw_.values(n, name, 3) for n in shapes] for name in (into, addend)]
            for scale, overwrite in ((1.0, False), (0.3, False), (0.3, True)):
                name = f"accumulate_grads {into} {'' if overwrite else '+'}= {scale:g} * {addend}"
                call = partial(_accumulate_lists, lists, scale, overwrite)
                yield Case(name, call, quick=scale != 1)


def _combine(on: On) -> Any:
    """Six ranks, of which one is empty and says nonsense."""
    means, variances = draw_.values((6, 37), "float64", 5), draw_.values((6, 37), "float64", 6) ** 2
    counts = np.array([3.0, 70_000.0, 0.0, 1.0, 12.0, 5.0])
    means[2] = np.nan
    return gradkit.combine_stats(*map(on, (means, variances, counts)))


def _move_running(dtype: str, on: On) -> Any:
    running = (draw_.values((37,), dtype, seed) for seed in (1, 2))
    batch = (draw_.values((37,), "float64", seed) for seed in (3, 4))
    given = map(on, (*running, *batch, np.array(77.0)))
    return gradkit.update_running_statistics(*given, momentum=0.3)


def _guard(on: On) -> Any:
    """Norms at rest, a spike and a NaN, on two scales."""
    found = []
    for norms in ((9.0, 11.1, 10.3, 30.0, 9.7, math.nan), (3e-310, 7e-310, 1e-300, 5e300, 1e290)):
        state = on(np.zeros(3))
        for norm in norms:
            state, limit = gradkit.spike_guard_update(state, on(np.array(norm)), warmup=2)
            found += [state, limit]
    return found


def _accumulate(pair: Any, on: On) -> Any:
    return [gradkit.accumulate_grad(*map(on, pair), scale=0.3, casting="same_kind")]


def _accumulate_lists(lists: Any, scale: float, overwrite: bool, on: On) -> Any:
    buffers, grads = ([on(array) for array in arrays] for arrays in lists)
    norm = on(np.zeros(()))
    options = {"scale": scale, "overwrite": overwrite, "norm_out": norm}
    return [*gradkit.accumulate_grads(buffers, grads, **options), norm]


def _overwrite(pair: Any, on: On) -> Any:
    return [gradkit.accumulate_grad_v2(*map(on, pair), overwrite=True, casting="same_kind")[1]]


def recorded() -> dict[str, str]:
    """The hashes in the repository, by case."""
    return dict(json.loads(FILE.read_text())["bits"])


def main() -> None:
    """Write ``golden.json``."""
    cuda = ptx_backend(architecture=ARCHITECTURE, **DEVICE)
    bits = {
        case.name: digest(case.call(lambda host: on_device(cuda.device.xp.array(host), cuda)))
        for case in cases()
    }
    compiler = f"NVRTC {'.'.join(map(str, version()))}, sm_{ARCHITECTURE}"
    content = {"device": DEVICE, "compiler": compiler, "bits": bits}
    FILE.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
