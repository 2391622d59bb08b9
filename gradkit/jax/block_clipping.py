"""Clipping by the norm of each gradient, unit or block, on pytrees inside of ``jit``."""

from collections.abc import Mapping
from functools import partial
from itertools import accumulate, compress, pairwise
from math import inf, isfinite, prod, ulp
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import jax
import numpy as np

from gradkit._arrays import backend_of
from gradkit._backend import FLOAT64, Array, Axes, Shape, Views, picked
from gradkit._calls import checks
from gradkit._calls.lists import ClipUnits
from gradkit._calls.roles import Norm
from gradkit._open.foreign import answers
from gradkit._open.units import (
    SMALLEST_NORM,
    UnitLimits,
    check_key,
    norms_of_blocks,
    norms_of_units,
    units_of_shapes,
)
from gradkit.jax._callbacks import ResultShape, axes_of, call, rows_of_all, varying
from gradkit.jax._numbers import doubles, limit_of, pairs, read, store, widest
from gradkit.jax._pytrees import by_path, different_names, dotted_names, refuse_symbolic_sizes
from gradkit.jax.clipping import (
    REFUSAL,
    STATE,
    copies_of,
    join,
    leaves_of,
    makes_zeros,
    spread,
    state_of,
)

__all__ = ["clip_by_adaptive_norm", "clip_by_block_norm"]

Numbers: TypeAlias = tuple[Any, ...]
Places: TypeAlias = tuple[int, ...]

_Tree = TypeVar("_Tree")


class CutRule(NamedTuple):
    """Options of a call, without the numbers that may change from step to step."""

    function: str
    zero_nonfinite: bool
    eps: float
    axes: Axes
    limit_at: Places  # of each gradient's or block's limit among all
    order: float = 2.0
    mean: bool = False
    least: float | None = None  # of a parameter's norm, if those count
    block_of: Places | None = None  # each gradient's block
    axis_name: Any = None
    copies: tuple[int, ...] | None = None

    @property
    def refusal(self) -> str:
        """Text of the error if the call is differentiated."""
        return REFUSAL.format(self.function)


@answers
def clip_by_block_norm(
    grads: _Tree,
    max_norm: Any,
    norm_type: float = 2.0,
    *,
    axis: Any = None,
    rms: bool = False,
    blocks: Any = None,
    axis_name: Any = None,
    replicas: Any = 1,
    eps: float = 1e-6,
    nonfinite: Literal["propagate", "zero"] = "propagate",
) -> tuple[_Tree, Any]:
    """Gradients each of which, or each unit or block of which, has a norm of at most ``max_norm``.

    As by :func:`gradkit.clip_by_block_norm`, in the place of :func:`clip_by_global_norm`, which
    takes one norm of all.

    Parameters
    ----------
    grads : pytree of arrays
        float16, bfloat16, float32 or float64; dtypes may be mixed.
    max_norm : float, or 0-d floating-point array; or a pytree, or a dict of them
        A pytree has limits for the gradients, and may end where those below are the same. With
        ``blocks``: one limit, or a dict of them by key. A negative or NaN one in an array makes
        what it limits NaN.
    norm_type : float
        p: any real number above 0, or infinity.
    axis : int, tuple of int, function, or pytree of the first two, optional
        The axes that a norm sums over; default: all. A function gets a gradient's name, its keys
        joined by dots, and the gradient. Gradients of fewer than two dimensions are one unit each.
    rms : bool
        Take the root mean square for the norm, or for other p ``(mean |g|^p)^(1/p)``.
    blocks : function of (name, array) to a key, or pytree of keys, optional
        Gradients of one key are one block, with one norm and one limit. Keys are such as JAX sorts:
        strings or integers. Not with ``axis`` or ``rms``.
    axis_name, replicas
        As in :func:`clip_by_global_norm`, and with ``blocks``: a block's norm is that of its
        gradients on all devices, by one ``jax.lax.all_gather`` of six numbers a block.
    eps : float
        Lower bound on the norm in the division.
    nonfinite : {"propagate", "zero"}
        What happens to a unit or block whose norm is NaN or infinite. "propagate": a NaN norm makes
        it NaN, an infinite one makes its finite elements 0. "zero": it becomes 0, and no other.

    Returns
    -------
    clipped : pytree of the same structure
    norms : pytree of the same structure, or dict by key
        Before clipping; of each gradient an array of the shape that is left without the axes summed
        over. float64 with ``jax_enable_x64``, otherwise float32.

    Raises
    ------
    TypeError
        A leaf is not a floating-point array; ``blocks`` gives no key; the result is differentiated.
    ValueError
        ``axis`` is not an axis of a gradient; it, ``blocks`` or ``max_norm`` is no pytree that the
        gradients' continues; ``max_norm`` is a negative number or NaN, or has no limit for a key;
        ``blocks`` goes with ``axis`` or ``rms``, or ``axis_name`` without ``blocks``;
        ``nonfinite="raise"``, because nothing can be raised inside of ``jit``.

    References
    ----------
    ``optax.clip_by_block_rms``, which is ``rms=True``.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, gradkit.jax
    >>> grads = {"expert": [jnp.array([3.0]), jnp.array([4.0])], "dense": jnp.array([2.0])}
    >>> clip = jax.jit(
    ...     lambda g: gradkit.jax.clip_by_block_norm(
    ...         g, {"moe": 2.5, "rest": 5.0}, blocks={"expert": "moe", "dense": "rest"}
    ...     )
    ... )
    >>> clipped, norms = clip(grads)
    >>> clipped["expert"], norms["moe"]
    ([Array([1.5], dtype=float32), Array([2.], dtype=float32)], Array(5., dtype=float32))
    """
    rule = partial(
        CutRule,
        "clip_by_block_norm",
        makes_zeros(nonfinite),
        checks.epsilon(eps),
        order=checks.norm_order(norm_type),
        mean=checks.flag(rms, "rms"),
        axis_name=axis_name,
        copies=copies_of(replicas, axis_name, grads),
    )
    if blocks is None:
        if axis_name is not None:
            raise ValueError(
                "axis_name goes with blocks; pass blocks=lambda name, grad: name for a norm of "
                "each gradient"
            )
        numbers, of_each = _limits(max_norm, grads)
        return _clip(grads, (), numbers, rule(_axes(axis, grads), of_each))
    if rms or axis is not None:
        raise ValueError("axis and rms cut single gradients; leave them out with blocks")
    keys = _keys(blocks, grads)
    place = {key: k for k, key in enumerate(dict.fromkeys(keys))}
    numbers, of_each = _limits_by_key(max_norm, [*place])
    block_of = tuple(place[key] for key in keys)
    whole = rule(_axes(None, grads), of_each, block_of=block_of)
    clipped, norms = _clip(grads, (), numbers, whole)
    return clipped, dict(zip(place, norms, strict=True))


@answers
def clip_by_adaptive_norm(
    grads: _Tree,
    params: Any,
    clipping: Any = 0.01,
    *,
    eps: float = 0.001,
    axis: Any = None,
    nonfinite: Literal["propagate", "zero"] = "propagate",
) -> tuple[_Tree, _Tree]:
    """Gradients whose norms are small beside their parameters' (AGC).

    As by :func:`gradkit.clip_by_adaptive_norm`: each unit becomes ``g * min(1, limit /
    max(norm(g), 1e-6))`` with ``limit = clipping * max(norm(w), eps)`` for the same unit of its
    parameter ``w``.

    Parameters
    ----------
    grads : pytree of arrays
        float16, bfloat16, float32 or float64; dtypes may be mixed.
    params : pytree of arrays, by the same keys
        Each of its gradient's shape. Others are left out.
    clipping : float, or 0-d floating-point array
        At least 0: the largest ratio of the two norms.
    eps : float
        Lower bound on a parameter's norm, so that one that begins at 0 can move.
    axis, nonfinite
        As in :func:`clip_by_block_norm`, about the norms of gradients.

    Returns
    -------
    clipped, norms : pytrees of the same structure
        As :func:`clip_by_block_norm` returns them.

    Raises
    ------
    TypeError, ValueError
        As :func:`clip_by_block_norm`; ``params`` has no array of a gradient's shape at its place.

    References
    ----------
    ``optax.adaptive_grad_clip``, which sums over all axes but the last: ``axis=lambda name, grad:
    range(grad.ndim - 1)``.

    Examples
    --------
    >>> import jax.numpy as jnp, gradkit.jax
    >>> grads, params = {"w": jnp.array([3.0, 4.0])}, {"w": jnp.array([0.0, 1.0])}
    >>> gradkit.jax.clip_by_adaptive_norm(grads, params, clipping=0.5)[0]
    {'w': Array([0.3, 0.4], dtype=float32)}
    """
    least, zeros = checks.epsilon(eps), makes_zeros(nonfinite)
    number = limit_of(clipping, "clipping")
    if isinstance(clipping, jax.Array) or not isfinite(clipping):
        least = max(least, ulp(0.0))  # so that inf clips nothing: inf * 0 is NaN
    axes = _axes(axis, grads)
    rule = CutRule("clip_by_adaptive_norm", zeros, SMALLEST_NORM, axes, (0,) * len(axes))
    return _clip(grads, _params(params, grads), (number,), rule._replace(least=least))


def _each(values: Any, grads: Any, label: str) -> list[Any]:
    """A value for each gradient, from a function or a pytree of which tuples are values."""
    if callable(values):
        return [*map(values, different_names(grads), jax.tree.leaves(grads))]
    return spread(values, grads, label, lambda value: value is None or type(value) is tuple)


def _axes(axis: Any, grads: Any) -> Axes:
    """The axes of each gradient's units."""
    names, shapes = dotted_names(grads), [*map(np.shape, jax.tree.leaves(grads))]
    refuse_symbolic_sizes(dict(zip(names, shapes, strict=True)))
    return units_of_shapes(_each(axis, grads, "axis"), shapes, names).axes


def _keys(blocks: Any, grads: Any) -> list[Any]:
    """The key of each gradient's block."""
    keys = _each(blocks, grads, "blocks")
    for key, name in zip(keys, dotted_names(grads), strict=True):
        check_key(key, name)
    return keys


def _limits(max_norm: Any, grads: Any) -> tuple[Numbers, Places]:
    """The limits of gradients, and the place of each one's among them."""
    values, tree = jax.tree_util.tree_flatten_with_path(max_norm, is_leaf=lambda v: v is None)
    places = spread(tree.unflatten(range(len(values))), grads, "max_norm")
    at = {place: k for k, place in enumerate(dict.fromkeys(places))}  # of those that limit any
    labels = [f"max_norm{jax.tree_util.keystr(path)}" for path, _ in values]
    limits = {
        place: limit_of(value, labels[place])
        for place, (_, value) in enumerate(values)
        if value is not None or place in at
    }
    return tuple(limits[place] for place in at), tuple(at[place] for place in places)


def _limits_by_key(max_norm: Any, keys: list[Any]) -> tuple[Numbers, Places]:
    """The same of blocks."""
    if not isinstance(max_norm, Mapping):
        return (limit_of(max_norm, "max_norm"),), (0,) * len(keys)
    for key in keys:
        if key not in max_norm:
            raise ValueError(f"max_norm has no limit for the block {key!r}")
    return tuple(limit_of(max_norm[key], f"max_norm[{key!r}]") for key in keys), (
        *range(len(keys)),
    )


def _params(params: Any, grads: Any) -> tuple[Any, ...]:
    """The parameter of each gradient."""
    beside, found = by_path(params), []
    for path, grad in by_path(grads).items():
        name = f"params[{path!r}]" if path else "params"
        if path not in beside:
            raise ValueError(f"grads[{path!r}] has no counterpart in params")
        param = beside[path]
        checks.floating(param, name)
        checks.shape(param, grad.shape, name, "the shape of its gradient")
        found.append(param)
    return tuple(found)


@partial(jax.jit, static_argnames="rule", inline=True)
def _clip(grads: Any, params: Any, limits: Numbers, rule: CutRule) -> tuple[Any, Any]:
    """The clipped gradients, and their norms: a pytree, or a list by block."""
    leaves, tree = leaves_of(grads)
    if not leaves:
        return grads, [] if rule.block_of is not None else grads
    count, last = len(leaves), len(leaves) + len(params)
    shapes = _norm_shapes(leaves, rule)
    ends = [*accumulate(map(prod, shapes), initial=0)]
    rows = None if rule.axis_name is None else _states_of_all(leaves, limits, rule)

    # It outlives the trace, in what is compiled, and so holds none of its arrays.
    def compute(outs: list[Array], ins: list[Any]) -> None:
        own, params, numbers = Views(outs[:count]), Views(ins[count:last]), ins[last:-1]
        limits = [read(number) for number in numbers]
        norms = _norms(own, ins[-1], limits, ends[-1], rule)
        _write(own, norms, _unit_limits(params, limits, ends, rule), rule)
        store(outs[count], norms)

    operands, reuse = [*leaves, *params, *limits, rows], {k: k for k in range(count)}
    results = _results(leaves, [*params, *limits], ends[-1], rule)
    *arrays, norms = call(rule.refusal, compute, results, operands, reuse=reuse)
    each = [norms[slice(*run)].reshape(s) for run, s in zip(pairwise(ends), shapes, strict=True)]
    return tree.unflatten(arrays), each if rule.block_of is not None else tree.unflatten(each)


def _norm_shapes(leaves: list[Any], rule: CutRule) -> list[Shape]:
    """The shapes of the norms, gradient by gradient or block by block."""
    if rule.block_of is not None:
        return [()] * len(rule.limit_at)
    return [
        tuple(n for k, n in enumerate(leaf.shape) if k not in axes)
        for leaf, axes in zip(leaves, rule.axes, strict=True)
    ]


def _results(leaves: list[Any], others: list[Any], total: int, rule: CutRule) -> list[ResultShape]:
    """Gradients and norms, and over which axes they are the same on all devices."""
    norms = ResultShape((total,), widest(), axes_of(rule.axis_name))
    same = norms.same_on - varying(*others)
    return [*(ResultShape.like(leaf, same - varying(leaf)) for leaf in leaves), norms]


def _states_of_all(leaves: list[Any], limits: Numbers, rule: CutRule) -> Any:
    """Partial results of each device's gradients for the norm of each block: rows by device."""
    count = len(leaves)

    def compute(outs: list[Array], ins: list[Any]) -> None:
        grads, numbers = Views(ins[:count]), ins[count:]
        for block, state in enumerate(doubles(outs[0])):
            mine = [own == block for own in rule.block_of or ()]
            copies = None if rule.copies is None else [*compress(rule.copies, mine)]
            limit = read(numbers[rule.limit_at[block]])
            state_of(picked(grads, mine), limit, 1.0, copies, rule.order, state)

    shape = pairs(len(rule.limit_at), STATE)
    (states,) = call(rule.refusal, compute, [shape], [*leaves, *limits])
    return rows_of_all(states, rule.axis_name)


def _norms(
    grads: Views, rows: Array | None, limits: list[Array], total: int, rule: CutRule
) -> Norm:
    """The norm of each unit, or of each block here or on all devices."""
    backend = backend_of(grads[0])
    if rule.block_of is not None and rows is None:
        return norms_of_blocks(backend, grads, rule.order, np.array(rule.block_of), total)
    if rows is None:
        return norms_of_units(backend, grads, rule.axes, total, rule.order, mean=rule.mean)
    states, norms = doubles(rows), Norm(backend.empty((total,), FLOAT64))
    for block, at in enumerate(rule.limit_at):
        join(states[:, block], norms[block : block + 1].reshape(()), 1.0, limits[at], rule.order)
    return norms


def _unit_limits(params: Views, limits: list[Array], ends: list[int], rule: CutRule) -> UnitLimits:
    """The limits by which gradients are clipped."""
    if len(limits) == 1 and rule.least is None:
        return UnitLimits(limits[0])
    backend = backend_of(limits[0])
    if rule.least is not None:
        sizes = norms_of_units(backend, params, rule.axes, ends[-1])
        return UnitLimits(limits[0], sizes, rule.least)
    sizes = Norm(backend.empty((ends[-1],), FLOAT64))
    for run, at in zip(pairwise(ends), rule.limit_at, strict=True):
        sizes[slice(*run)] = limits[at]
    return UnitLimits(1.0, sizes, -inf)


def _write(grads: Views, norms: Norm, limits: UnitLimits, rule: CutRule) -> None:
    """Clip in place."""
    backend, sizes = backend_of(grads[0]), limits.sizes
    if rule.block_of is not None:
        places = np.array(rule.block_of)
        norms = Norm(backend.take(norms, places))
        sizes = None if sizes is None else Norm(backend.take(sizes, places))
    backend.clip_units(
        ClipUnits(
            grads=grads,
            norms=norms,
            max_norm=limits.common,
            param_norms=sizes,
            least=limits.least,
            eps=rule.eps,
            axes=rule.axes,
            zero_nonfinite=rule.zero_nonfinite,
            outs=grads,
        )
    )
