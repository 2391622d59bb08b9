"""Norms of gradients and clipping, on pytrees inside of ``jit``.

Norms and coefficients are float64 inside, also if JAX holds no float64.
"""

from collections.abc import Callable
from functools import partial
from itertools import compress
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from gradkit._arrays import backend_of
from gradkit._backend import FLOAT64, Array, Views
from gradkit._calls import checks, lists
from gradkit._calls.roles import Grads, Number
from gradkit._open.dispatch import write
from gradkit._open.foreign import answers
from gradkit.jax._callbacks import ResultShape, axes_of, call, rows_of_all, varying
from gradkit.jax._compiled import CompiledCall, named_call
from gradkit.jax._numbers import doubles, factor, limit_of, pair, pairs, read, store, widest

__all__ = ["clip_by_global_norm", "grad_norm"]

_Tree = TypeVar("_Tree")
STATE = 6  # numbers of a norm that devices exchange: `lists.RankState`
_DIGEST = 0.0  # all devices run one program, so that none can make another call
REFUSAL = "{} is not differentiable; to differentiate a whole training step, clip with optax"


class ClipRule(NamedTuple):
    """Options of a call, without the numbers that may change from step to step."""

    function: str
    order: float
    axis_name: Any
    copies: tuple[int, ...] | None
    clips: bool = True
    eps: float = 0.0
    zero_nonfinite: bool = False
    guard: tuple[float, float, int, bool] | None = None  # decay, threshold, warmup and clips
    some: tuple[bool, ...] | None = None  # which gradients are clipped; all for None
    counted: tuple[bool, ...] | None = None  # which count in the norm

    @property
    def refusal(self) -> str:
        """Text of the error if the call is differentiated."""
        return REFUSAL.format(self.function)


class Clipped(NamedTuple):
    """Results of a clip, and of its spike guard, if there is one."""

    grads: Any
    norm: jax.Array
    max_norm: jax.Array | None = None
    state: jax.Array | None = None


@answers
def grad_norm(
    grads: Any,
    norm_type: float = 2.0,
    *,
    scale: Any = 1.0,
    axis_name: Any = None,
    replicas: Any = 1,
) -> jax.Array:
    """The p-norm of all gradients taken together as one vector: as :func:`gradkit.grad_norm`.

    Parameters
    ----------
    grads, norm_type, scale, axis_name, replicas
        As in :func:`clip_by_global_norm`: a pytree of arrays.

    Returns
    -------
    0-d array
        float64 with ``jax_enable_x64``; otherwise float32, which is infinity above 3.4e38.

    Raises
    ------
    TypeError, ValueError
        As :func:`clip_by_global_norm`.

    Examples
    --------
    >>> import jax.numpy as jnp, gradkit.jax
    >>> gradkit.jax.grad_norm({"w": jnp.array([3.0, 0.0]), "b": jnp.array(4.0)})
    Array(5., dtype=float32)
    """
    order, copies = checks.norm_order(norm_type), copies_of(replicas, axis_name, grads)
    rule = ClipRule("grad_norm", order, axis_name, copies, clips=False)
    return _clip(grads, pair(np.inf), factor(scale), None, rule).norm


@answers
def clip_by_global_norm(
    grads: _Tree,
    max_norm: Any,
    norm_type: float = 2.0,
    *,
    scale: Any = 1.0,
    eps: float = 1e-6,
    eps_mode: Literal["max", "add"] = "max",
    nonfinite: Literal["propagate", "zero"] = "propagate",
    axis_name: Any = None,
    replicas: Any = 1,
    clip: Any = None,
    count: Any = None,
) -> tuple[_Tree, jax.Array]:
    """Scaled gradients whose total norm is at most ``max_norm``.

    Each becomes ``g * (scale * min(1, max_norm / max(norm, eps)))``, where ``norm`` is that of
    ``scale * g``, as by :func:`gradkit.clip_by_global_norm`. XLA's own buffers are clipped in
    place if nobody else needs them: gradients whose norm does not exceed ``max_norm`` are then
    read and not written.

    Parameters
    ----------
    grads : pytree of arrays
        float16, bfloat16, float32 or float64; dtypes may be mixed.
    max_norm : float, or 0-d floating-point array
        At least 0; infinity clips nothing. A negative or NaN one in an array makes every gradient
        NaN.
    norm_type : float
        p of the norm: any real number above 0, or infinity.
    scale : float, or 0-d floating-point array
        What the gradients are multiplied by first, such as ``1 / tokens``. A non-finite one in
        an array is treated like a non-finite norm.
    eps : float
        Lower bound on the norm in the division.
    eps_mode : {"max", "add"}
        "add": divide by ``norm + eps`` instead.
    nonfinite : {"propagate", "zero"}
        What happens if the norm is NaN or infinite. "propagate": a NaN norm makes every gradient
        NaN, an infinite one makes finite gradients 0. "zero": every gradient becomes 0. To skip
        the step of an optimiser that has momentum, weight decay or a step count, put
        ``optax.apply_if_finite`` around the whole chain.
    axis_name : str or tuple of str, optional
        Axes of a ``shard_map``, or of a ``vmap``: the norm is that of the gradients of all their
        devices, by ``jax.lax.all_gather`` of six numbers. All get the same bits. Not for gradients
        that are the same on all devices already, as after a ``psum``. If ``max_norm`` or ``scale``
        has another value on one of them, the norm is NaN on all.
    replicas : int, or pytree of ints
        Number of devices of ``axis_name`` that hold a copy of each gradient; copies count once. A
        pytree may end where numbers below are the same.
    clip : bool, or pytree of bools, optional
        Which gradients are clipped; the others are only multiplied by ``scale``. Default: all.
    count : bool, or pytree of bools, optional
        Which gradients count in the norm. Default: all.

    Returns
    -------
    clipped : pytree of the same structure
    norm : 0-d array
        That of ``scale * g``, before clipping: float64 with ``jax_enable_x64``, otherwise float32.

    Raises
    ------
    TypeError
        A leaf is not a floating-point array; the result is differentiated.
    ValueError
        ``max_norm`` is a negative number or NaN; ``scale`` is a NaN or infinite number;
        ``nonfinite="raise"``, because nothing can be raised inside of ``jit``.

    References
    ----------
    ``optax.clip_by_global_norm``.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, gradkit.jax
    >>> grads = {"w": jnp.array([3.0, 0.0]), "b": jnp.array(4.0)}
    >>> clipped, norm = jax.jit(gradkit.jax.clip_by_global_norm)(grads, 2.5)
    >>> norm, clipped["b"]
    (Array(5., dtype=float32), Array(2., dtype=float32))
    """
    name = "clip_by_global_norm"
    rule = rule_of(name, norm_type, eps, nonfinite, axis_name, replicas, grads, eps_mode)
    rule = rule._replace(
        some=_per_leaf(clip, "clip", grads), counted=_per_leaf(count, "count", grads)
    )
    return clipped_by(grads, max_norm, scale, rule)[:2]


def rule_of(
    function: str,
    norm_type: float,
    eps: float,
    nonfinite: str,
    axis_name: Any,
    replicas: Any,
    grads: Any,
    eps_mode: str = "max",
) -> ClipRule:
    """The rule that a function's arguments make."""
    return ClipRule(
        function,
        checks.norm_order(norm_type),
        axis_name,
        copies_of(replicas, axis_name, grads),
        zero_nonfinite=makes_zeros(nonfinite),
        eps=checks.signed_epsilon(eps, eps_mode),
    )


def makes_zeros(nonfinite: str) -> bool:
    """True if gradients become 0 where their norm is not finite."""
    if nonfinite == "raise":
        raise ValueError(
            'nonfinite="raise" would raise inside of jit; pass "zero", and look at the norm'
        )
    return checks.choice(nonfinite, "nonfinite", ("propagate", "zero")) == "zero"


def clipped_by(grads: Any, max_norm: Any, scale: Any, rule: ClipRule, state: Any = None) -> Clipped:
    """Clip to ``max_norm``, and to what a spike guard says of the norm if it has a state."""
    return _clip(grads, limit_of(max_norm, "max_norm"), factor(scale), state, rule)


def copies_of(replicas: Any, axis_name: Any, grads: Any) -> tuple[int, ...] | None:
    """Number of devices that hold each gradient; None if each is on one."""
    if type(replicas) is int and replicas == 1:
        return None
    if axis_name is None:
        raise ValueError("replicas are copies on other devices; pass axis_name too")
    copies = tuple(
        checks.integer(count, "replicas") for count in spread(replicas, grads, "replicas")
    )
    if min(copies, default=1) < 1:
        raise ValueError(f"replicas must be at least 1, not {min(copies)}")
    return copies


def _per_leaf(choice: Any, label: str, grads: Any) -> tuple[bool, ...] | None:
    """Return a bool for each gradient, or None if all are meant."""
    if choice is None:
        return None
    return tuple(checks.flag(one, label) for one in spread(choice, grads, label))


def spread(
    prefix: Any, grads: Any, label: str, is_leaf: Callable[[Any], bool] | None = None
) -> list[Any]:
    """Spread a pytree that may end above the gradients: a value for each."""
    values: list[Any] = []

    def put(value: Any, own: Any) -> None:
        values.extend(value for _ in jax.tree.leaves(own))

    try:
        jax.tree.map(put, prefix, grads, is_leaf=is_leaf)
    except ValueError as error:
        raise ValueError(f"{label} must be like grads, or end above them: {error}") from None
    return values


def _of(each: Any, chosen: tuple[bool, ...] | None) -> Any:
    """Select items of a list, or of None."""
    return each if each is None or chosen is None else type(each)(compress(each, chosen))


@partial(jax.jit, static_argnames="rule", inline=True)
def _clip(grads: Any, limit: Any, scale: Any, state: Any, rule: ClipRule) -> Clipped:
    leaves, tree = leaves_of(grads)
    count = len(leaves)
    if not leaves and state is None:
        return Clipped(grads, jnp.zeros((), widest()))
    rows = None if rule.axis_name is None else _states_of_all(leaves, limit, scale, rule)

    def compute(outs: list[Array], ins: list[Any]) -> None:
        numbers = outs[count:] if rule.clips else outs
        _compute(Views(outs[:count] if rule.clips else ins[:count]), ins[count:], numbers, rule)

    operands = [*leaves, limit, scale, state, rows]
    reuse = {k: k for k in range(count)} if rule.clips else None
    results = _results(*operands[:-1], rule=rule)
    compiled = _compiled(count, rule)
    arrays = call(rule.refusal, compute, results, operands, reuse=reuse, compiled=compiled)
    if not rule.clips:
        return Clipped(None, *arrays)
    return Clipped(tree.unflatten(arrays[:count]), *arrays[count:])


def leaves_of(grads: Any) -> tuple[list[jax.Array], Any]:
    """The arrays of a pytree of gradients, and its structure."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        checks.floating(leaf, f"grads{jax.tree_util.keystr(path)}")
    leaves, tree = jax.tree.flatten(grads)
    return [jnp.asarray(leaf) for leaf in leaves], tree


def _compiled(count: int, rule: ClipRule) -> CompiledCall | None:
    """The compiled code of a clip on one device that nothing guards."""
    if rule.axis_name is not None or rule.guard is not None:
        return None
    numbers = rule.order, rule.eps, rule.zero_nonfinite, rule.clips
    every = (True,) * count
    return named_call("clip", numbers, counted=rule.counted or every, some=rule.some or every)


def _results(*operands: Any, rule: ClipRule) -> list[ResultShape]:
    """Gradients, norm, limit and state, and over which axes they are the same on all devices.

    A gradient that differs between devices still does when it is clipped.
    """
    *leaves, limit, scale, state = operands
    norm = ResultShape((), widest(), axes_of(rule.axis_name))
    states = [] if state is None else [state]
    same = norm.same_on - varying(limit, scale, *states)
    clipped = [ResultShape.like(leaf, same - varying(leaf)) for leaf in leaves if rule.clips]
    guarded = [ResultShape(shape, widest(), same) for each in states for shape in ((), each.shape)]
    return [*clipped, norm, *guarded]


def state_of(
    grads: Grads, limit: Array, scale: Number, copies: Any, order: float, state: Array
) -> None:
    """Write what a device tells the others of its gradients."""
    record = lists.RankState(
        grads=grads,
        norm_type=order,
        digest=_DIGEST,
        scale=scale,
        max_norm=limit,
        copies=copies,
        state=state,
    )
    backend_of(state).rank_state(record)


def _states_of_all(leaves: list[Any], limit: Any, scale: Any, rule: ClipRule) -> Any:
    """Partial results of each device's gradients for the norm: a row of each."""

    def compute(outs: list[Array], ins: list[Any]) -> None:
        *grads, most, by = ins
        counted, copies = _of(Views(grads), rule.counted), _of(rule.copies, rule.counted)
        state_of(counted, read(most), read(by), copies, rule.order, doubles(outs[0]))

    (state,) = call(rule.refusal, compute, [pairs(STATE)], [*leaves, limit, scale])
    return rows_of_all(state, rule.axis_name)


def _compute(grads: Views, numbers: list[Any], outs: list[Array], rule: ClipRule) -> None:
    """Clip in place; write the norm, and what a spike guard says."""
    limit, scale, state, rows = numbers
    backend = backend_of(limit)
    most, by = read(limit), read(scale)
    norm = backend.empty((), FLOAT64)
    if rows is None:
        counted = _of(grads, rule.counted)
        backend.grad_norm(lists.GradNorm(grads=counted, norm_type=rule.order, norm=norm, scale=by))
    else:
        join(doubles(rows), norm, by, most, rule.order)
    if rule.guard is not None:
        most, following = backend.empty((), FLOAT64), backend.empty(state.shape, FLOAT64)
        wide = backend.as_float64(state)
        decay, threshold, warmup, clips = rule.guard
        step = lists.SpikeGuardUpdate(
            state=wide, norm=norm, decay=decay, threshold=threshold, warmup=warmup, clips=clips
        )
        write(step, following, most)
        store(outs[1], most)
        store(outs[2], following)
    if rule.clips:
        clip = lists.ClipByNorm(
            grads=grads,
            norm=norm,
            max_norm=most,
            scale=by,
            eps=rule.eps,
            zero_nonfinite=rule.zero_nonfinite,
            outs=grads,
        )
        if rule.some is None:
            backend.clip_by_norm(clip)
        else:
            clip.clip_some(backend, rule.some)
    store(outs[0], norm)


def join(states: Array, norm: Array, scale: Number, limit: Array, order: float) -> None:
    """The norm over all devices; NaN on all of them if one has another scale or limit."""
    backend = backend_of(states)
    backend.join_ranks(
        lists.JoinRanks(
            states=states,
            digest=_DIGEST,
            norm_type=order,
            scale=scale,
            max_norm=limit,
            fresh=True,
            norm=norm,
            found_inf=None,
            faults=backend.as_float64(np.zeros(len(states))),
            factors=backend.empty((3,), FLOAT64),
        )
    )
