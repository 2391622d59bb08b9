"""Gradient transformations for optax: clipping, spike guards, accumulation and skipped steps.

They go where optax's own go::

    optimizer = optax.chain(transforms.clip_by_global_norm(1.0), optax.adamw(1e-3))
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

try:
    import optax
except ImportError as error:
    raise ImportError("gradkit.jax.transforms needs optax: pip install optax") from error

import gradkit
from gradkit._calls import checks
from gradkit._dtypes import float_of
from gradkit.jax import block_clipping
from gradkit.jax._callbacks import place, sharding_of, vary, varying
from gradkit.jax._numbers import widest
from gradkit.jax.accumulation import accumulate_grads
from gradkit.jax.clipping import clipped_by, rule_of

__all__ = [
    "AccumulateState",
    "ClipState",
    "SkipState",
    "SpikeGuardState",
    "accumulate",
    "clip_by_adaptive_norm",
    "clip_by_block_norm",
    "clip_by_global_norm",
    "clip_spikes",
    "skip_steps",
]


class ClipState(NamedTuple):
    """State of a clip: the norm of the last gradients, before clipping.

    Of :func:`clip_by_block_norm` and :func:`clip_by_adaptive_norm`: all norms, as
    :func:`gradkit.jax.clip_by_block_norm` returns them.
    """

    norm: Any


class SpikeGuardState(NamedTuple):
    """State of :func:`clip_spikes`.

    ``statistics``: how many norms it has seen, their mean and their standard deviation. ``norm``
    and ``max_norm``: the last norm, and what it was clipped to.
    """

    statistics: jax.Array
    norm: jax.Array
    max_norm: jax.Array


class AccumulateState(NamedTuple):
    """State of :func:`accumulate`.

    ``step``: how many micro-batches have been added since the last update. ``weight``: the sum of
    their weights. ``buffers``: that of their gradients. ``inner``: the optimizer's own state.
    """

    step: jax.Array
    weight: jax.Array
    buffers: Any
    inner: Any


class SkipState(NamedTuple):
    """State of :func:`skip_steps`.

    ``inner``: the optimizer's own state. ``norm`` and ``limit``: the last norm, and the largest of
    a step that is taken. ``taken``: whether the last step was. ``skipped``: how many were not.
    ``statistics``: those of the guard; zeros without one.
    """

    inner: Any
    norm: jax.Array
    limit: jax.Array
    taken: jax.Array
    skipped: jax.Array
    statistics: jax.Array


def clip_by_global_norm(
    max_norm: Any,
    norm_type: float = 2.0,
    *,
    scale: Any = 1.0,
    eps: float = 1e-6,
    eps_mode: Literal["max", "add"] = "max",
    nonfinite: Literal["propagate", "zero"] = "propagate",
    axis_name: Any = None,
    replicas: Any = 1,
) -> optax.GradientTransformation:
    """Clip by the norm of all gradients together: :func:`gradkit.jax.clip_by_global_norm`.

    Parameters
    ----------
    max_norm, norm_type, scale, eps, eps_mode, nonfinite, axis_name, replicas
        As in :func:`gradkit.jax.clip_by_global_norm`.

    Returns
    -------
    optax.GradientTransformation
        Its state is a :class:`ClipState`, with the norm.

    Examples
    --------
    >>> import jax.numpy as jnp, optax
    >>> from gradkit.jax import transforms
    >>> optimizer = optax.chain(transforms.clip_by_global_norm(2.5), optax.sgd(1.0))
    >>> params = jnp.zeros(2)
    >>> updates, state = optimizer.update(jnp.array([3.0, 4.0]), optimizer.init(params))
    >>> updates, state[0].norm
    (Array([-1.5, -2. ], dtype=float32), Array(5., dtype=float32))
    """

    def init(params: Any) -> ClipState:  # noqa: ARG001
        return ClipState(jnp.zeros((), widest()))

    def update(updates: Any, state: ClipState, params: Any = None) -> Any:  # noqa: ARG001
        rule = rule_of(
            "transforms.clip_by_global_norm",
            norm_type,
            eps,
            nonfinite,
            axis_name,
            replicas,
            updates,
            eps_mode,
        )
        clipped = clipped_by(updates, max_norm, scale, rule)
        return clipped.grads, ClipState(clipped.norm)

    return optax.GradientTransformation(init, update)


def clip_by_block_norm(
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
) -> optax.GradientTransformation:
    """Clip each gradient, unit or block: :func:`gradkit.jax.clip_by_block_norm`.

    Parameters
    ----------
    max_norm, norm_type, axis, rms, blocks, axis_name, replicas, eps, nonfinite
        As in :func:`gradkit.jax.clip_by_block_norm`.

    Returns
    -------
    optax.GradientTransformation
        Its state is a :class:`ClipState`, with the norms.

    References
    ----------
    ``optax.clip_by_block_rms``, which is ``rms=True``.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from gradkit.jax import transforms
    >>> clip = transforms.clip_by_block_norm(2.5)
    >>> grads = {"w": jnp.array([3.0, 4.0]), "b": jnp.array([1.0])}
    >>> clipped, state = clip.update(grads, clip.init(grads))
    >>> clipped["w"], state.norm["w"]
    (Array([1.5, 2. ], dtype=float32), Array(5., dtype=float32))
    """

    def clip(updates: Any, params: Any, name: Any = axis_name, copies: Any = replicas) -> Any:  # noqa: ARG001
        return block_clipping.clip_by_block_norm(
            updates,
            max_norm,
            norm_type,
            axis=axis,
            rms=rms,
            blocks=blocks,
            axis_name=name,
            replicas=copies,
            eps=eps,
            nonfinite=nonfinite,
        )

    # Norms have the same shapes over devices, whose axes are not known outside of a step.
    return _by_unit_norms(clip, partial(clip, name=None, copies=1))


def clip_by_adaptive_norm(
    clipping: Any = 0.01,
    *,
    eps: float = 0.001,
    axis: Any = None,
    nonfinite: Literal["propagate", "zero"] = "propagate",
) -> optax.GradientTransformation:
    """Clip by the norms of parameters: :func:`gradkit.jax.clip_by_adaptive_norm`.

    Parameters
    ----------
    clipping, eps, axis, nonfinite
        As in :func:`gradkit.jax.clip_by_adaptive_norm`.

    Returns
    -------
    optax.GradientTransformation
        ``update`` needs the parameters. Its state is a :class:`ClipState`, with the norms.

    References
    ----------
    ``optax.adaptive_grad_clip``, whose ``axis`` is all but the last.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from gradkit.jax import transforms
    >>> clip = transforms.clip_by_adaptive_norm(0.5)
    >>> params = jnp.array([0.0, 1.0])
    >>> clip.update(jnp.array([3.0, 4.0]), clip.init(params), params)[0]
    Array([0.3, 0.4], dtype=float32)
    """

    def clip(updates: Any, params: Any) -> Any:
        if params is None:
            raise ValueError("clip_by_adaptive_norm needs parameters: update(grads, state, params)")
        return block_clipping.clip_by_adaptive_norm(
            updates, params, clipping, eps=eps, axis=axis, nonfinite=nonfinite
        )

    return _by_unit_norms(clip, clip)


def clip_spikes(
    *,
    decay: float = 0.97,
    threshold: float = 2.5,
    warmup: int = 25,
    scale: Any = 1.0,
    eps: float = 1e-6,
    nonfinite: Literal["propagate", "zero"] = "propagate",
    axis_name: Any = None,
    replicas: Any = 1,
) -> optax.GradientTransformation:
    """Clip to a limit that follows the norms of earlier steps: :class:`gradkit.SpikeGuard`.

    Parameters
    ----------
    decay, threshold, warmup
        As in :func:`gradkit.spike_guard_update`.
    scale, eps, nonfinite, axis_name, replicas
        As in :func:`gradkit.jax.clip_by_global_norm`.

    Returns
    -------
    optax.GradientTransformation
        Its state is a :class:`SpikeGuardState` of arrays, which checkpoints like all others.

    Raises
    ------
    TypeError, ValueError
        As :func:`gradkit.spike_guard_update`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from gradkit.jax import transforms
    >>> guard = transforms.clip_spikes(warmup=2)
    >>> state = guard.init(None)
    >>> for norm in (1.0, 3.0, 10.0):
    ...     clipped, state = guard.update(jnp.array([norm]), state)
    >>> clipped, state.norm
    (Array([2.78125], dtype=float32), Array(10., dtype=float32))
    """
    gradkit.SpikeGuard(decay=decay, threshold=threshold, warmup=warmup)  # checks them

    def init(params: Any) -> SpikeGuardState:  # noqa: ARG001
        zero = jnp.zeros((), widest())
        return SpikeGuardState(jnp.zeros(3, widest()), zero, zero)

    def update(updates: Any, state: SpikeGuardState, params: Any = None) -> Any:  # noqa: ARG001
        function = "transforms.clip_spikes"
        rule = rule_of(function, 2.0, eps, nonfinite, axis_name, replicas, updates)
        guarded = rule._replace(guard=(float(decay), float(threshold), int(warmup), True))
        clipped = clipped_by(updates, jnp.inf, scale, guarded, state.statistics)
        return clipped.grads, SpikeGuardState(clipped.state, clipped.norm, clipped.max_norm)

    return optax.GradientTransformation(init, update)


def accumulate(
    optimizer: optax.GradientTransformation, every: int
) -> optax.GradientTransformationExtraArgs:
    """Give an optimizer the weighted mean of the gradients of ``every`` micro-batches.

    In between, updates are zeros. Sums are float32 for float16 and bfloat16 gradients.
    ``update`` takes ``weight``, which is 1 by default: with the number of tokens of each
    micro-batch, and each one's loss the mean over its tokens, the mean is that over all tokens. A
    micro-batch of weight 0 is left out, also if its gradients are NaN, the mean over no tokens.

    Parameters
    ----------
    optimizer : optax.GradientTransformation
        It is updated once in ``every`` steps. To clip, chain the clip inside of it: it then sees
        the mean.
    every : int
        How many micro-batches make a step; at least 1.

    Returns
    -------
    optax.GradientTransformationExtraArgs
        Its state is an :class:`AccumulateState`; ``step`` is 0 after each update. If gradients are
        wider than parameters, such as float32 beside bfloat16, the optimizer's own state is wider
        after the first micro-batch than ``init`` makes it, as it is without ``accumulate``. A
        ``scan``, whose carry keeps its dtypes, needs the ``init`` of parameters that are cast.

    Raises
    ------
    TypeError, ValueError
        ``every`` is not an integer of at least 1.

    References
    ----------
    ``optax.MultiSteps``, which weights all micro-batches alike.

    Examples
    --------
    >>> import jax.numpy as jnp, optax
    >>> from gradkit.jax import transforms
    >>> optimizer = transforms.accumulate(optax.sgd(1.0), every=2)
    >>> params = jnp.zeros(1)
    >>> state = optimizer.init(params)
    >>> for tokens, grad in ((1, 4.0), (3, 8.0)):
    ...     updates, state = optimizer.update(jnp.array([grad]), state, params, weight=tokens)
    >>> updates
    Array([-7.], dtype=float32)
    """
    if checks.integer(every, "every") < 1:
        raise ValueError(f"every must be at least 1, not {every}")
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Any) -> AccumulateState:
        buffers = jax.tree.map(_buffer, params)
        return AccumulateState(
            jnp.zeros((), jnp.int32), jnp.zeros((), widest()), buffers, inner.init(params)
        )

    def step(carried: Any, **extra: Any) -> Any:
        buffers, total, updates, state, params = carried
        by = jnp.where(total == 0, 1, total)  # without weight, sums are 0 too
        mean = jax.tree.map(
            lambda b, g: place((b / by).astype(g.dtype), sharding_of(g)), buffers, updates
        )
        return _taken(inner.update(mean, state, params, **extra), state)

    def wait(carried: Any, after: Callable[..., Any] = step) -> Any:
        return _not_taken(after, carried, carried[2], carried[3])

    def update(
        updates: Any, state: AccumulateState, params: Any = None, *, weight: Any = 1.0, **extra: Any
    ) -> Any:
        first = state.step == 0
        weight_array = jnp.asarray(weight, widest())
        total = jnp.where(first, weight_array, state.weight + weight_array)
        buffers = accumulate_grads(state.buffers, updates, scale=weight_array, overwrite=first)
        # The functions of the step before, which outside of jit are not compiled again.
        branches: Any = (step, wait)
        if extra:
            after = partial(step, **extra)
            branches = after, partial(wait, after=after)
        count = (state.step + 1) % every
        carried = buffers, total, updates, state.inner, params
        moved, following = jax.lax.cond(count == 0, *branches, carried)
        return moved, AccumulateState(count, total, buffers, following)

    return optax.GradientTransformationExtraArgs(init, update)


def skip_steps(
    optimizer: optax.GradientTransformation,
    *,
    limit: Any = None,
    guard: gradkit.SpikeGuard | None = None,
    axis_name: Any = None,
    replicas: Any = 1,
) -> optax.GradientTransformationExtraArgs:
    """Skip steps whose gradients have a norm that is not finite, or too large.

    A skipped step leaves the optimizer's state as it is, moments and counts too, and its updates
    are -0.0, so that ``optax.apply_updates`` leaves every parameter as it is.

    Parameters
    ----------
    optimizer : optax.GradientTransformation
        A chain, for example; a clip in it sees only the gradients of steps that are taken.
    limit : float, or 0-d floating-point array, optional
        The largest norm of a step that is taken. Default: any finite one.
    guard : gradkit.SpikeGuard, optional
        Skip spikes too: its settings; its statistics begin anew, in the state. It must have
        ``on_spike="skip"``.
    axis_name, replicas
        As in :func:`gradkit.jax.clip_by_global_norm`: all devices skip, or none.

    Returns
    -------
    optax.GradientTransformationExtraArgs
        Its state is a :class:`SkipState`, which counts skipped steps. If gradients are wider than
        parameters, the optimizer's own is in their dtype from the first step on, as
        :func:`accumulate` says.

    Raises
    ------
    TypeError, ValueError
        ``guard`` is no :class:`gradkit.SpikeGuard` with ``on_spike="skip"``; ``limit`` is a
        negative number or NaN; as :func:`gradkit.jax.clip_by_global_norm`.

    Notes
    -----
    XLA on CPUs flushes subnormal numbers to zero when it applies updates, those of skipped steps
    too.

    References
    ----------
    ``optax.apply_if_finite``, which lets updates through after some that were not finite.

    Examples
    --------
    >>> import jax.numpy as jnp, optax
    >>> from gradkit.jax import transforms
    >>> optimizer = transforms.skip_steps(optax.adamw(0.1), limit=10.0)
    >>> params = jnp.array([1.0, -0.0])
    >>> state = optimizer.init(params)
    >>> for size in (3.0, jnp.nan, 100.0):
    ...     updates, state = optimizer.update(jnp.array([size, 0.0]), state, params)
    >>> int(state.skipped), optax.apply_updates(params, updates)
    (2, Array([ 1., -0.], dtype=float32))
    """
    settings = _settings(guard)
    if limit is not None and not isinstance(limit, jax.Array):
        checks.nonnegative(limit, "limit")
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Any) -> SkipState:
        zero, count = jnp.zeros((), widest()), jnp.zeros((), jnp.int32)
        statistics = jnp.zeros(3, widest())
        return SkipState(inner.init(params), zero, zero, jnp.array(True), count, statistics)

    def step(carried: Any, **extra: Any) -> Any:
        return _taken(inner.update(*carried, **extra), carried[1])

    def skip(carried: Any, **extra: Any) -> Any:
        return _not_taken(partial(step, **extra), carried, *carried[:2])

    def update(updates: Any, state: SkipState, params: Any = None, **extra: Any) -> Any:
        name = "transforms.skip_steps"
        rule = rule_of(name, 2.0, 0.0, "propagate", axis_name, replicas, updates)
        before = None if settings is None else state.statistics
        rule = rule._replace(clips=False, guard=settings)
        clipped = clipped_by(updates, jnp.inf, 1.0, rule, before)
        most = jnp.asarray(jnp.inf if limit is None else limit, widest())
        if clipped.max_norm is not None:
            most = jnp.minimum(most, clipped.max_norm)
        is_good = jnp.isfinite(clipped.norm) & (clipped.norm <= most)

        # The functions of the step before, as in `accumulate`.
        branches: Any = (step, skip)
        if extra:
            branches = partial(step, **extra), partial(skip, **extra)
        after, following = jax.lax.cond(is_good, *branches, (updates, state.inner, params))
        skipped = state.skipped + (1 - is_good.astype(jnp.int32))
        statistics = state.statistics if clipped.state is None else clipped.state
        return after, SkipState(following, clipped.norm, most, is_good, skipped, statistics)

    return optax.GradientTransformationExtraArgs(init, update)


def _settings(guard: gradkit.SpikeGuard | None) -> tuple[float, float, int, bool] | None:
    if guard is None:
        return None
    if not isinstance(guard, gradkit.SpikeGuard):
        raise TypeError(f"guard must be a gradkit.SpikeGuard, not {type(guard).__name__}")
    *settings, on_spike = guard.settings.values()
    if on_spike != "skip":
        raise ValueError(
            'guard clips; pass SpikeGuard(on_spike="skip"), or put clip_spikes into the chain'
        )
    decay, threshold, warmup = settings
    return decay, threshold, warmup, False


def _by_unit_norms(
    clip: Callable[[Any, Any], Any], alone: Callable[[Any, Any], Any]
) -> optax.GradientTransformation:
    """A transformation that clips; ``alone`` gives norms of the same shapes on one device."""

    def init(params: Any) -> ClipState:
        norms = jax.eval_shape(alone, params, params)[1]
        return ClipState(jax.tree.map(lambda norm: jnp.zeros(norm.shape, norm.dtype), norms))

    def update(updates: Any, state: ClipState, params: Any = None) -> Any:  # noqa: ARG001
        clipped, norms = clip(updates, params)
        return clipped, ClipState(norms)

    return optax.GradientTransformation(init, update)


def _taken(step_result: Any, state: Any) -> Any:
    """Return an optimizer's step in dtypes that hold the state before it, too."""
    updates, following = step_result
    return updates, jax.tree.map(_widen, following, state)


def _not_taken(step: Callable[..., Any], operand: Any, grads: Any, state: Any) -> Any:
    """Updates that leave parameters as they are, and the same state; of a step's types.

    The updates are -0.0, since +0.0 would make +0.0 of -0.0.
    """
    updates, following = jax.eval_shape(step, operand)

    def one(update: Any, grad: Any) -> jax.Array:
        nothing = jnp.full(update.shape, -0.0, update.dtype)
        return vary(place(nothing, sharding_of(update)), varying(grad))

    def unchanged(before: Any, after: Any) -> Any:
        return place(_widen(before, after), sharding_of(after))

    return jax.tree.map(one, updates, grads), jax.tree.map(unchanged, state, following)


def _widen(value: Any, other: Any) -> Any:
    """The same values in a dtype that holds another array's too.

    From bfloat16 parameters an optimizer makes bfloat16 moments, and float32 gradients make these
    float32.
    """
    if value.dtype == other.dtype:
        return value
    return value.astype(jnp.promote_types(value.dtype, other.dtype))


def _buffer(parameter: Any) -> jax.Array:
    parameter = jnp.asarray(parameter)
    return jnp.zeros_like(parameter, float_of(parameter.dtype).accumulation)
