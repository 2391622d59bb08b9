"""Odd input that has an answer: right to the suite's bounds, and no byte changed beside it."""

import math
from dataclasses import replace
from functools import partial

import ml_dtypes
import numpy as np

import gradkit
from gradkit._cuda.list_tables import CAPACITY, DIMS
from tests import oracles, tolerances
from tests import strategies as draw_
from tests.backends import Backend
from tests.bad_input.arguments import Cell, Factory
from tests.layouts import LAYOUTS
from tests.operations import OPERATIONS, ROW_NORMS
from tests.problems import make
from tests.tolerances import DTYPES, assert_same_bits, assert_ulps

NAN, INF = math.nan, math.inf
ORDERS = (1.0, 2.0, 3.0, INF)
HOST = Backend()

# Lists


def nothing():
    """Every container that holds no gradient, or none with elements."""
    containers = {
        "an empty list": lambda _: [],
        "an empty dict": lambda _: {},
        "None alone": lambda _: [None, {"w": None}],
        "a spent generator": lambda _: (g for g in ()),
        **{
            f"size 0 of {name}": lambda a, d=dtype: [a(np.empty((0, 3), d)), a(np.empty(0, d))]
            for name, dtype in DTYPES.items()
        },
    }

    def check(make_list, call, backend):
        a = Factory(backend)
        grads = make_list(a)
        launches = backend.launches()
        assert float(backend.asnumpy(call(grads))) == 0.0
        assert backend.launches() == launches

    calls = {
        **{f"norm {p}": lambda g, p=p: gradkit.grad_norm(g, p) for p in ORDERS},
        **{f"clip {p}": lambda g, p=p: gradkit.clip_grad_norm(g, 1.0, p) for p in ORDERS},
        "copies": lambda g: gradkit.clip_by_global_norm(g, 1.0)[1],
        "raise": lambda g: gradkit.clip_grad_norm(g, 1.0, nonfinite="raise"),
        "scale": lambda g: gradkit.grad_norm(gradkit.scale_grads(g, 0.5)),
        "clamp": lambda g: gradkit.grad_norm(gradkit.clip_grad_value(g, 0.5)),
        "zero": lambda g: gradkit.grad_norm(gradkit.zero_grad(g)),
    }
    for what, make_list in containers.items():
        for function, call in calls.items():
            yield Cell(f"{function}, {what}", partial(check, make_list, call))


def clipped(hosts_of, *, max_norm=None, orders=ORDERS, names=tuple(DTYPES)):
    """Lists that are clipped, in place and not: to half their norm unless said otherwise.

    ``hosts_of`` makes the host arrays of one dtype. What lies between their elements stays.
    """
    for name in names:
        for order in orders:
            check = partial(_check_clipped, hosts_of, max_norm, order, name)
            yield Cell(f"{name}, p = {order}", check)


def _check_clipped(hosts_of, max_norm, order, name, backend):
    hosts, a = hosts_of(DTYPES[name]), Factory(backend)
    exact = oracles.norm(hosts, order)
    limit = float(exact) / 2 if max_norm is None else max_norm
    grads = [a(host) for host in hosts]
    before = a.memory()
    copies, norm = gradkit.clip_by_global_norm(grads, limit, order)
    assert a.memory() == before
    norm = float(backend.asnumpy(norm))
    bound = tolerances.norm(order, backend.run_errors, runs=name != "float64")
    assert oracles.off_by(norm, exact) <= bound
    assert float(backend.asnumpy(gradkit.clip_grad_norm(grads, limit, order))) == norm
    for host, copy, grad in zip(hosts, copies, grads, strict=True):
        expected = oracles.clipped(host, norm, limit)
        found = backend.asnumpy(grad)
        assert_ulps(found, expected, tolerances.CLIPPED_ULPS)
        assert_same_bits(backend.asnumpy(copy), found)
        host[...] = found  # now the host's gaps are what the backend's must be
        assert backend.memory(grad) == HOST.memory(host)


def sized_nothing_among_others(dtype):
    return [np.empty((0, 3), dtype), np.arange(1, 6).astype(dtype), np.empty(0, dtype)]


def zero_d(dtype):
    return [np.array(3, dtype), np.array(-4, dtype)]


def zeros(dtype):
    return [np.zeros(3, dtype), -np.zeros((2, 5), dtype)]


def ones(dtype):
    return [np.ones(3, dtype), -np.ones((2, 5), dtype)]


def huge(dtype):
    """Squares beyond what the dtype holds; of float64, beyond float64."""
    return [np.full(7, {2: 6e4, 4: 1e30, 8: 1e200}[dtype.itemsize]).astype(dtype)]


def tiny(dtype):
    """Squares below what the dtype holds."""
    return [np.full(7, {2: 1e-7, 4: 1e-30, 8: 1e-200}[dtype.itemsize]).astype(dtype)]


def beyond_the_dtype(dtype):
    """A norm that the gradients' own dtype does not hold."""
    return [np.full(3, float(ml_dtypes.finfo(dtype).max), dtype)]


def mixed(dtype):
    """One dtype among all the others."""
    return [np.full(4, k + 1, other) for k, other in enumerate((dtype, *DTYPES.values()))]


def laid_out(layout, dtype):
    return [LAYOUTS[layout](draw_.values((3, 5, 4), str(dtype), 7)), np.ones(2, dtype)]


def many(count, dtype):
    return [np.full(1 + k % 3, 2, dtype) for k in range(count)]


def many_dims(count, dtype):
    """Strided arrays of so many dimensions together."""
    return [np.ones((4, 6), dtype)[::2, ::3] for _ in range(count // 2)] + (
        [np.ones(6, dtype)[::2]] if count % 2 else []
    )


def lists_of_layouts():
    for layout in LAYOUTS:
        for cell in clipped(partial(laid_out, layout), orders=(2.0, INF)):
            yield cell._replace(name=f"{layout}, {cell.name}")


def lists_at_the_limits():
    for make_list, limit in ((many, CAPACITY), (many_dims, DIMS)):
        for count in (limit - 1, limit, limit + 1):
            for cell in clipped(partial(make_list, count), orders=(2.0,)):
                yield cell._replace(name=f"{make_list.__name__} {count}, {cell.name}")


# Norms

BATCH_NORMS = ("batch_norm", "batch_norm_grad")
NORMS = (*ROW_NORMS, *BATCH_NORMS)
# Those that read x, those of rows among them, those of these with a mean, and those with a bias.
FROM_INPUT = [name for name in NORMS if "y" not in OPERATIONS[name].arrays]
FROM_X = [name for name in FROM_INPUT if name in ROW_NORMS]
CENTRED = [name for name in FROM_X if "rms" not in name]
BIASED = [name for name in NORMS if "bias" in OPERATIONS[name].arrays]
BIASED_FORWARD = [name for name in BIASED if name in FROM_INPUT and not name.endswith("grad")]


def normed(shape, *changes, norms=ROW_NORMS, axis=-1, **options):
    """Norms forward or backward of a problem of one shape, changed.

    A change takes the problem and gives another. Statistics are saved anew after it.
    """
    for name in norms:
        for types in OPERATIONS[name].types:
            check = partial(_check_norm, name, types, shape, axis, changes, options)
            yield Cell(f"{name} of {'-'.join(types)}, {shape}, axis {axis}", check)


def _check_norm(name, types, shape, axis, changes, options, backend):
    batch = name in BATCH_NORMS
    p = make(shape, types, axis, centred="rms" not in name, batch=batch, **options)
    for change in changes:
        p = change(p)
    a, y, xhat = Factory(backend), *p.output()

    def argument(label):
        host = y if label == "y" else getattr(p, label)
        return None if host is None else a(host)

    operation = OPERATIONS[name]
    given = {label: argument(label) for label in operation.arrays}
    before = a.memory()
    if name.endswith("grad"):
        found = operation.function(**given, **p.where)
        p.check_gradients(backend, *found, xhat=xhat if "y" in given else None)
    else:
        out = None
        if batch and "16" in p.statistics:  # statistics of 16 bits come where out has such arrays
            out = (None, *(backend.asarray(np.empty_like(s)) for s in (p.mean, p.inv_std)))
        y, *statistics = operation.function(**given, **p.where, eps=p.eps, out=out)
        p.check_forward(backend, y, *([] if p.centred else [None]), *statistics)
    assert a.memory() == before


def without(*names):
    return lambda p: replace(p, **dict.fromkeys(names))


def with_zeros_in_scale(p):
    p.scale[::2] = 0
    return p


def with_a_constant_row(p):
    p.x[1] = 3.25
    return replace(p)


def with_an_offset(p):
    """Of 1e4 deviations; of 100 where the dtype has not the digits for more."""
    offset = 1e4 if p.x.itemsize > 2 else 100
    return replace(p, x=(p.x.astype(np.float64) + offset).astype(p.x.dtype))
