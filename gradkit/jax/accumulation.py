"""Adding micro-batch gradients to buffers, on pytrees inside of ``jit``."""

from functools import partial
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

import gradkit
from gradkit._arrays import backend_of
from gradkit._backend import Array, Views
from gradkit._calls import checks
from gradkit._calls.lists import AccumulateGrads
from gradkit.jax._callbacks import ResultShape, call
from gradkit.jax._numbers import given, read

__all__ = ["accumulate_grads"]

_Tree = TypeVar("_Tree")
_REFUSAL = "accumulate_grads is not differentiable; compute buffer + scale * grad instead"


def accumulate_grads(
    buffers: _Tree,
    grads: Any,
    *,
    scale: Any = 1.0,
    overwrite: Any = False,
    do_update: Any = True,
    casting: Literal["safe", "same_kind"] = "safe",
) -> _Tree:
    """``buffer + scale * grad`` for each buffer of a pytree, or ``scale * grad``.

    New arrays, in the buffers' own memory if nobody else needs it: if a jitted step is given the
    buffers with ``donate_argnums``, or carries them through a ``scan``.

    Parameters
    ----------
    buffers : pytree of arrays
        float16, bfloat16, float32 or float64; dtypes may be mixed.
    grads : pytree of as many arrays, by the same keys
        Each of its buffer's shape, and of the buffer's dtype or one that it holds exactly:
        float16 and bfloat16 into float32, any into float64.
    scale : float, or 0-d floating-point array
        Factor for the gradients; finite.
    overwrite : bool, or 0-d bool array
        Whether the gradients replace what the buffers held, NaN included.
    do_update : bool, or 0-d bool array
        Whether the buffers change at all.
    casting : {"safe", "same_kind"}
        "same_kind" also accepts gradients of a wider dtype, and rounds the sums.

    Returns
    -------
    pytree like ``buffers``

    Raises
    ------
    TypeError
        A dtype is not accepted; the result is differentiated.
    ValueError
        The pytrees or their shapes do not match; ``scale`` is a NaN or infinite number.

    References
    ----------
    ``optax.MultiSteps``, which averages.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, gradkit.jax
    >>> step = jax.jit(gradkit.jax.accumulate_grads, donate_argnums=0)
    >>> step({"w": jnp.zeros(2)}, {"w": jnp.ones(2, jnp.bfloat16)}, scale=0.5)
    {'w': Array([0.5, 0.5], dtype=float32)}
    """
    if not isinstance(scale, jax.Array):
        checks.finite(checks.real(scale, "scale"), "scale")
    flags = [_flag(overwrite, "overwrite"), _flag(do_update, "do_update")]
    added: _Tree = _accumulate(buffers, grads, given(scale, "scale"), *flags, casting)
    return added


def _flag(flag: Any, label: str) -> Any:
    if isinstance(flag, jax.Array) and flag.dtype == bool and flag.shape == ():
        return flag
    return np.array(checks.flag(flag, label))


@partial(jax.jit, inline=True, static_argnames="casting")
def _accumulate(
    buffers: Any, grads: Any, scale: Any, overwrite: Any, do_update: Any, casting: Any
) -> Any:
    # What is wrong with a call is found out on arrays without elements.
    empty = map(_without_elements, (buffers, grads))
    gradkit.accumulate_grads(*empty, casting=casting)
    into, tree = jax.tree.flatten(buffers)
    added = jax.tree.leaves(grads)
    count = len(into)
    if not into:
        return buffers

    def compute(outs: list[Array], ins: list[Any]) -> None:
        by, fresh, update = ins[2 * count :]
        factor, addends = read(by), Views(ins[count : 2 * count])
        backend_of(by).accumulate_grads(
            AccumulateGrads(
                buffers=Views(outs),
                grads=addends,
                do_update=update,
                overwrite=fresh,
                scale=factor,
                norm=None,
            )
        )

    results = [ResultShape(buffer.shape, buffer.dtype) for buffer in into]
    operands = [*into, *added, scale, overwrite, do_update]
    reuse = {k: k for k in range(count)}
    return tree.unflatten(call(_REFUSAL, compute, results, operands, reuse=reuse))


def _without_elements(tree: Any) -> dict[str, Array]:
    """Arrays of the same shapes behind an axis of length 0, by the paths that lead to them."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): np.empty((0, *a.shape), a.dtype)
        for path, a in jax.tree_util.tree_leaves_with_path(jax.tree.map(jnp.asarray, tree))
    }
