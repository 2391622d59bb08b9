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
from tests import steps
from tests import strategies as draw_
from tests.devices.emulated import on_device, ptx_backend
from tests.operations import LISTS, OPERATIONS, POWER, Operation, Types, leaves, of
from tests.problems import BATCH_TYPES, LAYER_TYPES, Problem, make, make_groups, tiny
from tests.ranks import results
from tests.tolerances import DTYPES

FILE = Path(__file__).with_suffix(".json")
ARCHITECTURE = 80  # of the code whose bits are recorded
# The order of sums depends on how many multiprocessors they are divided among, which is the same on
# every GPU, but few here; and rows that a cluster of blocks would share have other sums.
DEVICE = {"sharing": 2, "max_shared_memory": 227 * 1024, "clusters": False}
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
SAMPLES = [(3, 5, 24), (2, 37, 64), (2, 3, 4100), (5, 1, 7), (2, 2, 20_000)]
IMAGES = [
    ((33, 3), 1),
    ((5, 4, 3, 7), 1),
    ((5, 3, 7, 4), 3),
    ((2, 16, 8, 8), 1),
    ((2, 8, 8, 16), 3),
]

On = Callable[[np.ndarray[Any, Any]], Any]


class Case(NamedTuple):
    """One call."""

    name: str  # begins with the public function's
    call: Callable[[On], Any]
    quick: bool  # whether it is one of the few that reach every kernel in every dtype


def cases() -> Iterator[Case]:
    """Every case; a call takes what puts a host array on the device."""
    yield from _rows()
    yield from _samples()
    yield from _channels()
    yield from _groups()
    yield from _lists()
    yield from _pairs()


def depends_on_pow(name: str) -> bool:
    """Return whether a case's bits are those of one library's ``pow``."""
    return f"p={POWER}" in name


def digest(results: Any) -> str:
    """A hash of dtypes, shapes and bytes."""
    state = hashlib.sha256()
    for result in results:
        if result is not None:
            state.update(f"{result.dtype} {result.shape}".encode())
            state.update(np.ascontiguousarray(result).tobytes())
    return state.hexdigest()[:16]


def _rows() -> Iterator[Case]:
    rows = of("rows")
    plain = [each for each in rows if "residual" not in each.arrays]
    for (i, operation), (j, types) in product(enumerate(plain), enumerate(LAYER_TYPES)):
        for k in range(len(ROWS)):
            quick = k in (TINY, (i + j) % len(ROWS))
            yield _of_rows(operation, "", types, k, quick=quick)
    further = sorted(
        ((each, variant) for each in rows for variant in _variants(each)),
        key=lambda found: ("gate" in found[0].arrays, "ds" in found[1]),
    )
    for (i, found), (j, types) in product(enumerate(further), enumerate(LAYER_TYPES)):
        yield _of_rows(*found, types, (2 * i + j) % len(ROWS), quick=j % 3 == i % 3)


def _variants(operation: Operation) -> list[str]:
    """Those that compute something else; parts of the same results have the same bits."""
    return [name for name, given in operation.variants.items() if "wanted" not in given]


def _samples() -> Iterator[Case]:
    """With a scale and bias per sample."""
    names = "layer_norm", "add_rms_norm", "layer_norm_grad", "rms_norm_grad"
    for (i, name), (j, types) in product(enumerate(names), enumerate(LAYER_TYPES)):
        shape = SAMPLES[(i + j) % len(SAMPLES)]
        p = make(shape, types, seed=7, centred="rms" not in name)
        own, kind = (len(p.x), 1, *p.tail), DTYPES[types[2]]
        p.scale = (1 + draw_.values(own, "float64", 5) / 4).astype(kind)
        p.bias = draw_.values(own, "float64", 6).astype(kind)
        size = f"{'x'.join(map(str, shape))}, per sample"
        yield _case(OPERATIONS[name], "", p, types, size, quick=j % 3 == i % 3)


def _of_rows(operation: Operation, variant: str, types: Types, k: int, *, quick: bool) -> Case:
    shape, above = ROWS[k]
    p = make(shape, types, seed=7, centred="rms" not in operation.name)
    size = "x".join(map(str, shape))
    if above is not None:
        p.dy, p.x, size = tiny(p.dy, above), tiny(p.x, above), f"{size}, tiny"
        p.bias = None  # beside which a tiny result is nothing
    return _case(operation, variant, p, types, size, quick=quick)


def _case(
    operation: Operation, variant: str, p: Problem, types: Types, size: str, *, quick: bool
) -> Case:
    title = f"{operation.name} {variant}".rstrip()
    call = partial(_norm, operation, variant, p)
    return Case(f"{title} {'-'.join(types)} {size}", call, quick)


def _norm(operation: Operation, variant: str, p: Problem, on: On) -> Any:
    def one(label: str, *_: Any) -> Any:
        host = _argument(p, label)
        return None if host is None else on(host)

    given = operation.arguments(one, variant=variant) | p.where
    if "num_groups" in given:
        given["num_groups"] = getattr(p, "groups", None)
    if operation.family == "channels" and "inv_std" in operation.results:
        given["out"] = None, on(np.empty_like(p.mean)), on(np.empty_like(p.inv_std))
    running = [array for label, array in given.items() if label.startswith("running")]
    return [*leaves(operation.function(**given)), *running]


def _argument(p: Problem, label: str) -> Any:
    """A norm's argument; an inverse takes x for the output of the norm."""
    if label in ("residual", "ds", "gate"):
        return p.dy[::-1].copy()
    if label in ("var", "running_var"):
        return np.square(p.inv_std)
    return getattr(p, {"y": "x", "running_mean": "mean"}.get(label, label))


def _channels() -> Iterator[Case]:
    norms = of("channels")
    for (j, types), (k, (shape, axis)) in product(enumerate(BATCH_TYPES), enumerate(IMAGES)):
        p, small = (make(shape, types, axis, seed=7, batch=True) for _ in range(2))
        small.dy, small.x, small.bias = tiny(p.dy, 12), tiny(p.x, 12), None
        where, quick = f"{'x'.join(map(str, shape))} axis {axis}", k == j % len(IMAGES)
        for norm in norms:
            for variant in ("", *_variants(norm)):
                yield _case(norm, variant, p, types, where, quick=quick)
        for norm in norms[:2]:
            yield _case(norm, "", small, types, f"{where}, tiny", quick=quick)
        call = partial(_over_ranks, p)
        yield Case(f"batch_norm over ranks {'-'.join(types)} {where}", call, quick)


def _over_ranks(p: Problem, on: On) -> Any:
    """Both passes of two ranks, and what moves."""
    parts = [np.array_split(array, [len(p.x) // 3]) for array in (p.dy, p.x)]
    held = [list(map(on, each)) for each in zip(*parts, strict=True)]
    scale, bias, mean, inv_std = map(on, (p.scale, p.bias, p.mean, p.inv_std))

    def work(group: Any) -> Any:
        dy, x = held[group.rank]
        running = [on(array.copy()) for array in (p.mean, np.square(p.inv_std))]
        moved = dict(zip(("running_mean", "running_var"), running, strict=True))
        out = None, *(on(np.empty_like(array)) for array in (p.mean, p.inv_std))
        over = {"group": group, **p.where}
        return [
            *gradkit.batch_norm(x, scale, bias, eps=p.eps, out=out, **moved, **over),
            *running,
            *gradkit.batch_norm_grad(dy, x, scale, mean, inv_std, **over),
        ]

    return [*leaves(results(work, 2))]


def _groups() -> Iterator[Case]:
    norms = of("groups")
    for (j, types), (k, (shape, axis)) in product(enumerate(LAYER_TYPES), enumerate(IMAGES)):
        groups = shape[axis] // (1 if shape[axis] % 2 else 2)
        p = make_groups(shape, groups, types, axis, seed=7)
        where = f"{'x'.join(map(str, shape))} axis {axis}"
        for norm in norms:
            yield _case(norm, "", p, types, where, quick=k == j % len(IMAGES))


def _lists() -> Iterator[Case]:
    for count in (4, 120):
        for dtype in (*DTYPES, "mixed", "tiny"):
            grads, where = _gradients(count, dtype), f"{dtype} {count} arrays"
            for operation in of("lists"):
                for variant in _variants(operation) or [""]:
                    name = f"{operation.name} {variant}".rstrip()
                    call = partial(_list, operation, variant, grads)
                    yield Case(f"{name} {where}", call, dtype in ("mixed", "tiny"))


def _gradients(count: int, dtype: str) -> list[np.ndarray[Any, Any]]:
    names = [dtype] if dtype in DTYPES else list(DTYPES)
    grads = [
        draw_.values((k % 7 + 1, 3 * k % 50 + 1 + 2000 * (k == 3)), names[k % len(names)], k)
        for k in range(count)
    ]
    return [tiny(grad, 12) for grad in grads] if dtype == "tiny" else grads


def _list(operation: Operation, variant: str, grads: Any, on: On) -> Any:
    """Return the arrays written in place, or the results; of two functions, those clipped alone."""
    given = operation.arguments(lambda *_: on(np.array(3.0)), variant=variant, lists=())
    given |= {label: list(map(on, grads)) for label in given.keys() & {*LISTS}}
    found = operation.function(**given)
    if operation.name in ("clip_by_global_norm", "clip_by_adaptive_norm"):
        return found[0]
    in_place = operation.writes and operation.name != "clip_grad_adaptive"
    return [*leaves(given["grads"] if in_place else found)]


def _pairs() -> Iterator[Case]:
    norms = np.array([3.0, 0.1, np.nan])
    yield Case(
        "clip_coefficient", lambda on: [gradkit.clip_coefficient(on(norms), 0.7)], quick=True
    )
    yield Case("spike_guard_update", _guard, quick=True)
    yield Case("step_verdict", _verdicts, quick=True)
    yield Case("keep_if", _keep, quick=True)
    yield Case("batch_norm over ranks, combined", _combine, quick=True)
    for dtype in DTYPES:
        call = partial(_move_running, dtype)
        yield Case(f"batch_norm running {dtype}", call, quick=True)
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
            call = partial(_compensate_lists, lists)
            yield Case(f"accumulate_grads {into} += 0.3 * {addend}, compensated", call, quick=True)
            call = partial(_average_lists, lists)
            yield Case(f"ema_update {into} by {addend}", call, quick=True)
            for name, update in (("adamw", _adamw_lists), ("sgd", _sgd_lists)):
                call = partial(_update_lists, lists, update)
                yield Case(f"{name}_update {into} by {addend}", call, quick=True)
            if len(kind.addends) == 1:  # 16 bits
                call = partial(_accumulate_at_random, lists)
                name = f"accumulate_grads {into} += 0.3 * {addend}, at random"
                yield Case(name, call, quick=True)


def _combine(on: On) -> Any:
    """Six ranks, of which one is empty and says nonsense."""
    means, variances = draw_.values((6, 37), "float64", 5), draw_.values((6, 37), "float64", 6) ** 2
    counts = np.array([3.0, 70_000.0, 0.0, 1.0, 12.0, 5.0])
    means[2] = np.nan
    return steps.combine_stats(*map(on, (means, variances, counts)))


def _move_running(dtype: str, on: On) -> Any:
    running = (draw_.values((37,), dtype, seed) for seed in (1, 2))
    batch = (draw_.values((37,), "float64", seed) for seed in (3, 4))
    given = map(on, (*running, *batch))
    return steps.update_running_statistics(*given, 77.0, momentum=0.3)


def _guard(on: On) -> Any:
    """Norms at rest, a spike and a NaN, on two scales."""
    found = []
    for norms in ((9.0, 11.1, 10.3, 30.0, 9.7, math.nan), (3e-310, 7e-310, 1e-300, 5e300, 1e290)):
        state = on(np.zeros(3))
        for norm in norms:
            state, limit = gradkit.spike_guard_update(state, on(np.array(norm)), warmup=2)
            found += [state, limit]
    return found


def _verdicts(on: On) -> Any:
    """Of norms below a limit, at it and above it, and of what is not finite."""
    norms, found = (1.0, 2.0, 3.0, math.inf, math.nan), (0.0, math.nan)
    return [
        gradkit.step_verdict(on(np.array(norm)), limit=2.0, found_inf=on(np.array(flag)))
        for norm, flag in product(norms, found)
    ]


def _keep(on: On) -> Any:
    """Elements of all sizes, kept and replaced."""
    dtypes = (*DTYPES.values(), np.dtype("uint8"), np.dtype("int64"))
    new, old = ([np.full(301, value, dtype) for dtype in dtypes] for value in (1, 2))
    flags = on(np.array(True)), on(np.array(False))
    return [a for flag in flags for a in gradkit.keep_if(flag, [*map(on, new)], [*map(on, old)])]


def _accumulate(pair: Any, on: On) -> Any:
    return [gradkit.accumulate_grad(*map(on, pair), scale=0.3, casting="same_kind")]


def _accumulate_lists(lists: Any, scale: float, overwrite: bool, on: On) -> Any:
    buffers, grads = ([on(array) for array in arrays] for arrays in lists)
    norm = on(np.zeros(()))
    options = {"scale": scale, "overwrite": overwrite, "norm_out": norm}
    return [*gradkit.accumulate_grads(buffers, grads, **options), norm]


def _compensate_lists(lists: Any, on: On) -> Any:
    """Two gradients, of which the second finds what was kept of the first."""
    buffers, grads = ([on(array) for array in arrays] for arrays in lists)
    kept = [on(np.zeros(array.shape, array.dtype)) for array in lists[0]]
    options = {"scale": 0.3, "compensation": kept}
    gradkit.accumulate_grads(buffers, grads, overwrite=True, **options)
    return [*gradkit.accumulate_grads(buffers, grads, **options), *kept]


def _accumulate_at_random(lists: Any, on: On) -> Any:
    buffers, grads = ([on(array) for array in arrays] for arrays in lists)
    options = {"scale": 0.3, "seed": 1, "offsets": 1 << 40}
    return gradkit.accumulate_grads(buffers, grads, rounding="stochastic", **options)


def _average_lists(lists: Any, on: On) -> Any:
    """From either end, the nearer one."""
    averages, params = ([on(array) for array in arrays] for arrays in lists)
    for decay in (0.999, on(np.array(0.3))):
        gradkit.ema_update(averages, params, decay)
    return averages


def _update_lists(lists: Any, update: Any, on: On) -> Any:
    """Two steps, the second by random bits if parameters have 16."""
    params, grads = ([on(array) for array in arrays] for arrays in lists)
    kept = [[on(np.zeros(array.shape, array.dtype)) for array in lists[0]] for _ in range(2)]
    halves = {"rounding": "stochastic", "seed": 1} if lists[0][0].itemsize == 2 else {}
    for step, how in ((1, {}), (on(np.array(1)), halves)):
        update(params, grads, kept, step, lr=0.1, weight_decay=0.1, scale=0.3, **how)
    return [*params, *(array for arrays in kept for array in arrays)]


def _adamw_lists(params: Any, grads: Any, kept: Any, step: Any, **how: Any) -> None:
    gradkit.adamw_update(params, grads, *kept, step, **how)


def _sgd_lists(params: Any, grads: Any, kept: Any, _: Any, **how: Any) -> None:
    gradkit.sgd_update(params, grads, kept[0], momentum=0.9, **how)
    gradkit.sgd_update(kept[1], grads, lr=how["lr"])


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
