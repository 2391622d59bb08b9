"""Statistics of gradients by name, inside of ``jit``."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradkit._arrays import backend_of
from gradkit._backend import Array, Views
from gradkit._calls import checks
from gradkit._calls.lists import STATS, ListStats
from gradkit._calls.roles import Numbers
from gradkit.jax._callbacks import ResultShape, call
from gradkit.jax._numbers import store, widest
from gradkit.statistics import GradStats

__all__ = ["grad_stats"]

jax.tree_util.register_pytree_node(
    GradStats, lambda stats: ((stats.table,), stats.names), lambda names, of: GradStats(names, *of)
)


def grad_stats(grads: Any) -> "GradStats[jax.Array]":
    """Norm, largest magnitude, mean, zeros and non-finite elements of each gradient, by name.

    As :func:`gradkit.grad_stats`, in one pass. Under ``shard_map`` each device gets the statistics
    of its own parts.

    Parameters
    ----------
    grads : pytree of arrays
        float16, bfloat16, float32 or float64; dtypes may be mixed.

    Returns
    -------
    gradkit.GradStats
        A pytree, of one array of shape (k, 5): float64 with ``jax_enable_x64``, otherwise float32,
        in which counts above 2^24 are rounded. Names are keys and positions joined by dots.

    Raises
    ------
    TypeError
        A leaf is not a floating-point array; the result is differentiated.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, gradkit.jax
    >>> stats = jax.jit(gradkit.jax.grad_stats)({"w": jnp.array([3.0, -4.0]), "b": jnp.zeros(3)})
    >>> stats["w"].norm, stats["b"].zeros
    (Array(5., dtype=float32), Array(3., dtype=float32))
    """
    found = jax.tree_util.tree_leaves_with_path(grads)
    for path, leaf in found:
        checks.floating(leaf, f"grads{jax.tree_util.keystr(path)}")
    keys = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in found]
    return GradStats(tuple(key or "grads" for key in keys), _table([leaf for _, leaf in found]))


@partial(jax.jit, inline=True)
def _table(leaves: list[Any]) -> Any:
    shape = len(leaves), STATS
    if not leaves:
        return jnp.zeros(shape, widest())

    def compute(outs: list[Array], ins: list[Any]) -> None:
        backend = backend_of(ins[0])
        stats = backend.empty(shape, np.dtype(np.float64))
        backend.grad_stats(ListStats(grads=Views(ins), stats=Numbers(stats)))
        store(outs[0], stats)

    refusal = "grad_stats is not differentiable"
    return call(refusal, compute, [ResultShape(shape, widest())], leaves)[0]
