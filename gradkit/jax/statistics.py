"""Statistics of gradients by name, inside of ``jit``."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from gradkit._arrays import backend_of
from gradkit._backend import FLOAT64, Array, Views
from gradkit._calls import checks
from gradkit._calls.lists import STATS, STATS_PART, ListStats
from gradkit._calls.roles import Numbers
from gradkit._open.foreign import answers
from gradkit._ranks.statistics import joined
from gradkit.jax._callbacks import ResultShape, axes_of, call, rows_of_all
from gradkit.jax._numbers import doubles, pairs, store, widest
from gradkit.jax._pytrees import different_names
from gradkit.jax.clipping import copies_of
from gradkit.statistics import GradStats

__all__ = ["grad_stats"]

_REFUSAL = "grad_stats is not differentiable"
jax.tree_util.register_pytree_node(
    GradStats, lambda stats: ((stats.table,), stats.names), lambda names, of: GradStats(names, *of)
)


@answers
def grad_stats(grads: Any, *, axis_name: Any = None, replicas: Any = 1) -> "GradStats[jax.Array]":
    """Norm, largest magnitude, mean, zeros and non-finite elements of each gradient, by name.

    As :func:`gradkit.grad_stats`, in one pass.

    Parameters
    ----------
    grads : pytree of arrays
        float16, bfloat16, float32 or float64; dtypes may be mixed.
    axis_name : str or tuple of str, optional
        Axes of ``shard_map`` over whose devices statistics are those of all parts, by one
        collective; on GPUs the callback then waits for the device. By default each device gets the
        statistics of its own parts.
    replicas : int, or pytree of int
        As in :func:`clip_by_global_norm`: number of devices of ``axis_name`` that hold a copy of
        each gradient; copies count once.

    Returns
    -------
    gradkit.GradStats
        A pytree, of one array of shape (k, 5): float64 with ``jax_enable_x64``, otherwise float32,
        in which counts above 2^24 are rounded. Names are keys and positions joined by dots.

    Raises
    ------
    TypeError
        A leaf is not a floating-point array; the result is differentiated.
    ValueError
        ``replicas`` is below 1, or is not 1 without ``axis_name``; two gradients have one name.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, gradkit.jax
    >>> stats = jax.jit(gradkit.jax.grad_stats)({"w": jnp.array([3.0, -4.0]), "b": jnp.zeros(3)})
    >>> stats["w"].norm, stats["b"].zeros
    (Array(5., dtype=float32), Array(3., dtype=float32))
    """
    leaves = jax.tree_util.tree_leaves_with_path(grads)
    for path, leaf in leaves:
        label = f"grads{jax.tree_util.keystr(path)}"
        if not hasattr(leaf, "dtype"):
            raise TypeError(f"{label} is a {type(leaf).__name__}; expected an array")
        checks.floating(leaf, label)
    names, copies = different_names(grads), copies_of(replicas, axis_name, grads)
    table = _table([leaf for _, leaf in leaves], axis_name, copies)
    return GradStats(tuple(names), table)


@partial(jax.jit, inline=True, static_argnums=(1, 2))
def _table(leaves: list[Any], axis_name: Any, copies: tuple[int, ...] | None) -> Any:
    shape = len(leaves), STATS
    if not leaves:
        return jnp.zeros(shape, widest())
    table = [ResultShape(shape, widest(), axes_of(axis_name))]
    if axis_name is not None:
        rows = rows_of_all(_parts(leaves), axis_name)
        return call(_REFUSAL, partial(_join, copies), table, [rows])[0]

    def compute(outs: list[Array], ins: list[Any]) -> None:
        backend = backend_of(ins[0])
        stats = backend.empty(shape, FLOAT64)
        backend.grad_stats(ListStats(grads=Views(ins), stats=Numbers(stats)))
        store(outs[0], stats)

    return call(_REFUSAL, compute, table, leaves)[0]


def _parts(leaves: list[Any]) -> Any:
    """Sums of one device's gradients, to be added up over devices."""

    def compute(outs: list[Array], ins: list[Any]) -> None:
        backend_of(ins[0]).grad_stats(ListStats(grads=Views(ins), parts=doubles(outs[0])))

    return call(_REFUSAL, compute, [pairs(len(leaves), STATS_PART)], leaves)[0]


def _join(copies: tuple[int, ...] | None, outs: list[Array], ins: list[Array]) -> None:
    """The statistics of all devices together."""
    store(outs[0], joined(backend_of(ins[0]), doubles(ins[0]), copies))
