"""Adding micro-batch gradients to buffers, on pytrees inside of ``jit``."""

from functools import partial
from itertools import accumulate
from typing import Any, Literal, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np

import gradkit
from gradkit._arrays import backend_of
from gradkit._backend import Array, Views
from gradkit._calls import checks
from gradkit._calls.lists import AccumulateGrads
from gradkit._open.foreign import answers
from gradkit.jax._callbacks import ResultShape, call, is_known, sharding_of
from gradkit.jax._compiled import named_call
from gradkit.jax._numbers import given, read

__all__ = ["accumulate_grads"]

_Tree = TypeVar("_Tree")
_Kept = TypeVar("_Kept")
_REFUSAL = "accumulate_grads is not differentiable; compute buffer + scale * grad instead"


@overload
def accumulate_grads(
    buffers: _Tree,
    grads: Any,
    *,
    scale: Any = 1.0,
    overwrite: Any = False,
    do_update: Any = True,
    casting: Literal["safe", "same_kind"] = "safe",
    compensation: None = None,
    rounding: Literal["nearest", "stochastic"] = "nearest",
    seed: Any = 0,
) -> _Tree: ...
@overload
def accumulate_grads(
    buffers: _Tree,
    grads: Any,
    *,
    scale: Any = 1.0,
    overwrite: Any = False,
    do_update: Any = True,
    casting: Literal["safe", "same_kind"] = "safe",
    compensation: _Kept,
    rounding: Literal["nearest"] = "nearest",
    seed: Any = 0,
) -> tuple[_Tree, _Kept]: ...
@answers
def accumulate_grads(
    buffers: Any,
    grads: Any,
    *,
    scale: Any = 1.0,
    overwrite: Any = False,
    do_update: Any = True,
    casting: Literal["safe", "same_kind"] = "safe",
    compensation: Any = None,
    rounding: Literal["nearest", "stochastic"] = "nearest",
    seed: Any = 0,
) -> Any:
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
        Factor for the gradients; finite. With 0 they are left out, whatever they hold.
    overwrite : bool, or 0-d bool array
        Whether the gradients replace what the buffers held, NaN included.
    do_update : bool, or 0-d bool array
        Whether the buffers change at all.
    casting : {"safe", "same_kind"}
        "same_kind" also accepts gradients of a wider dtype, and rounds the sums.
    compensation : pytree of arrays like ``buffers``, optional
        What rounding drops, zeros at first: the sum is ``buffers + compensation``, as exactly as
        two numbers of the buffers' dtype hold it. :func:`gradkit.accumulate_grads` says how.
        ``overwrite`` replaces it too. Not with "stochastic".
    rounding : {"nearest", "stochastic"}
        "stochastic" rounds sums up or down to 16-bit buffers, as :func:`gradkit.accumulate_grads`
        says, and with its bits.
    seed : int, or 0-d integer array
        For "stochastic": another one in each step, such as the step's number; at least 0.

    Returns
    -------
    pytree like ``buffers``
        With ``compensation``, a pair: the buffers and the compensation, both in the same memory as
        the old ones if nobody else needs it.

    Raises
    ------
    TypeError
        A dtype is not accepted; the result is differentiated.
    ValueError
        The pytrees or their shapes do not match; ``scale`` is a NaN or infinite number;
        ``compensation`` with "stochastic".

    References
    ----------
    ``optax.MultiSteps``, which averages.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, gradkit.jax
    >>> step = jax.jit(gradkit.jax.accumulate_grads, donate_argnums=0)
    >>> step({"w": jnp.zeros(2)}, {"w": jnp.ones(2, jnp.bfloat16)}, scale=0.5)
    {'w': Array([0.5, 0.5], dtype=float32)}

    1 is less than a bfloat16 of 256 can change by, and two of them are not:

    >>> buffers = kept = jnp.zeros(1, jnp.bfloat16)
    >>> for grad in (256.0, 1.0, 1.0):
    ...     grads = jnp.full(1, grad, jnp.bfloat16)
    ...     buffers, kept = gradkit.jax.accumulate_grads(buffers, grads, compensation=kept)
    >>> buffers, kept
    (Array([258], dtype=bfloat16), Array([0], dtype=bfloat16))
    """
    numbers = _numbers(scale, overwrite, do_update)
    own = None
    if checks.choice(rounding, "rounding", ("nearest", "stochastic")) == "stochastic":
        own = _words(seed)
    both = _accumulate(buffers, compensation, grads, (*numbers, own), casting)
    return both[0] if compensation is None else both


def _numbers(scale: Any, overwrite: Any, do_update: Any) -> tuple[Any, Any, Any]:
    if not isinstance(scale, jax.Array):
        checks.finite(checks.real(scale, "scale"), "scale")
    return given(scale, "scale"), _flag(overwrite, "overwrite"), _flag(do_update, "do_update")


def _words(seed: Any) -> Any:
    """A seed as JAX holds it, which may have no integers of 64 bits: two words, the lower first."""
    if not isinstance(seed, jax.Array):
        return np.array([checks.seed(seed, "seed")], np.uint64).view(np.uint32)
    checks.shape(seed, (), "seed", "one number")
    if not jnp.issubdtype(seed.dtype, jnp.integer):
        raise TypeError(f"seed has dtype {seed.dtype}; accepted: integers")
    upper = seed >> 32 if seed.dtype.itemsize == 8 else jnp.zeros_like(seed)
    return jnp.stack([seed.astype(jnp.uint32), upper.astype(jnp.uint32)])


def _flag(flag: Any, label: str) -> Any:
    if isinstance(flag, jax.Array):
        if flag.dtype == bool and flag.shape == ():
            return flag
        said = f"{flag.dtype} of shape {flag.shape}"
        raise TypeError(f"{label} must be a bool, or a 0-d bool array, not {said}")
    return np.array(checks.flag(flag, label))


@partial(jax.jit, inline=True, static_argnames="casting")
def _accumulate(
    buffers: Any, kept: Any, grads: Any, numbers: tuple[Any, ...], casting: Any
) -> tuple[Any, Any]:
    """The new buffers, and what is kept beside them, which may be ``None``.

    ``numbers``: the scale, whether to overwrite and to update, and a seed, if there is one.
    """
    *_, seed = numbers
    # What is wrong with a call is found out on arrays without elements.
    into, beside, addends = map(_by_path, (buffers, kept, grads))
    empty = map(_without_elements, (into, addends))
    rest = None if kept is None else _without_elements(beside)
    rounding: Any = "nearest" if seed is None else "stochastic"
    gradkit.accumulate_grads(*empty, compensation=rest, casting=casting, rounding=rounding)
    if not into:
        return buffers, kept
    # All in the buffers' order: pytrees of another type may have the same paths in another one.
    paths, count = list(into), len(into)
    written = [*into.values(), *(beside[path] for path in paths if beside)]
    first, last = len(written), len(written) + count  # the gradients among the operands

    # It outlives the trace, in what is compiled, and so holds none of its arrays.
    def compute(outs: list[Array], ins: list[Any]) -> None:
        by, fresh, update, *seeds = ins[last:]
        factor, grads = read(by), Views(ins[first:last])
        backend_of(by).accumulate_grads(
            AccumulateGrads(
                buffers=Views(outs[:count]),
                grads=grads,
                do_update=update,
                overwrite=fresh,
                scale=factor,
                norm=None,
                compensation=Views(outs[count:]) if first > count else None,
                seed=seeds[0].view(np.uint64).reshape(()) if seeds else None,
                offsets=[*accumulate((array.size for array in outs[:-1]), initial=0)],
            )
        )

    results = [ResultShape(a.shape, a.dtype, sharding=sharding_of(a)) for a in written]
    added = [*(addends[path] for path in paths), *(n for n in numbers if n is not None)]
    reuse = {k: k for k in range(len(written))}
    compiled = named_call("accumulate", compensated=[len(beside) > 0]) if seed is None else None
    found = call(_REFUSAL, compute, results, [*written, *added], reuse=reuse, compiled=compiled)
    left = dict(zip(paths, found[count:], strict=False))
    tree, left_tree = map(jax.tree.structure, (buffers, kept))
    return tree.unflatten(found[:count]), left_tree.unflatten([left[path] for path in beside])


def _by_path(tree: Any) -> dict[str, Any]:
    """The arrays of a pytree by what leads to them. Dots in keys are escaped: no two are alike."""

    def name(key: Any) -> str:
        plain = jax.tree_util.keystr((key,), simple=True)
        return plain.replace("\\", "\\\\").replace(".", "\\.")

    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {".".join(map(name, path)): jnp.asarray(leaf) for path, leaf in leaves}


def _without_elements(arrays: dict[str, Any]) -> dict[str, Array]:
    """Arrays of the same shapes behind an axis of length 0."""
    for path, array in arrays.items():
        if not is_known(array.shape):
            raise TypeError(
                f"an array at {path or 'the root'!r} has shape {array.shape}: gradkit.jax's sums "
                "take no symbolic sizes; export with fixed sizes, or buffer + scale * grad"
            )
    return {path: np.empty((0, *a.shape), a.dtype) for path, a in arrays.items()}
