"""Adding micro-batch gradients to buffers, on pytrees inside of ``jit``."""

from functools import partial
from itertools import accumulate
from typing import Any, Literal, TypeVar, overload

import jax
import numpy as np

import gradkit
from gradkit._arrays import backend_of
from gradkit._backend import Array, Views
from gradkit._calls import checks
from gradkit._calls.lists import AccumulateGrads
from gradkit._open.foreign import answers
from gradkit.jax._compiled import named_call
from gradkit.jax._numbers import factor, read
from gradkit.jax._pytrees import (
    by_path,
    call_on_lists,
    flag,
    rebuilt,
    shapes_alike,
    without_elements,
    words,
)

__all__ = ["accumulate_grads"]

_Tree = TypeVar("_Tree")
_Remainders = TypeVar("_Remainders")
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
    compensation: _Remainders,
    rounding: Literal["nearest"] = "nearest",
    seed: Any = 0,
) -> tuple[_Tree, _Remainders]: ...
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
    numbers = factor(scale), flag(overwrite, "overwrite"), flag(do_update, "do_update")
    seed_words = None
    if checks.choice(rounding, "rounding", ("nearest", "stochastic")) == "stochastic":
        seed_words = words(seed)
    both = _accumulate(buffers, compensation, grads, (*numbers, seed_words), casting)
    return both[0] if compensation is None else both


@partial(jax.jit, inline=True, static_argnames="casting")
def _accumulate(
    buffers: Any, remainders: Any, grads: Any, numbers: tuple[Any, ...], casting: Any
) -> tuple[Any, Any]:
    """The new buffers, and what is kept beside them, which may be ``None``.

    ``numbers``: the scale, whether to overwrite and to update, and a seed, if there is one.
    """
    *_, seed = numbers
    into, beside, addends = map(by_path, (buffers, remainders, grads))
    _check(into, None if remainders is None else beside, addends, casting, seed)
    if not into:
        return buffers, remainders
    count, written = len(into), [into, beside] if beside else [into]
    first, last = count * len(written), count * len(written) + count  # gradients among the operands

    # It outlives the trace, in what is compiled, and so holds none of its arrays.
    def compute(outs: list[Array], ins: list[Any]) -> None:
        by, fresh, update, *seeds = ins[last:]
        backend_of(by).accumulate_grads(
            AccumulateGrads(
                buffers=Views(outs[:count]),
                grads=Views(ins[first:last]),
                do_update=update,
                overwrite=fresh,
                scale=read(by),
                norm=None,
                compensation=Views(outs[count:]) if first > count else None,
                seed=seeds[0].view(np.uint64).reshape(()) if seeds else None,
                offsets=[*accumulate((array.size for array in outs[:-1]), initial=0)],
            )
        )

    present = [n for n in numbers if n is not None]
    compiled = named_call("accumulate", compensated=[len(beside) > 0]) if seed is None else None
    new = call_on_lists(_REFUSAL, compute, written, addends, present, compiled)
    return rebuilt(buffers, new[0]), rebuilt(remainders, new[-1])


def _check(
    buffers: dict[str, Any],
    remainders: dict[str, Any] | None,
    grads: dict[str, Any],
    casting: Any,
    seed: Any,
) -> None:
    """Find out what is wrong with a call, on arrays without elements."""
    into, addends = map(without_elements, (buffers, grads))
    rest = None if remainders is None else without_elements(remainders)
    shapes_alike("buffers", buffers, grads=grads, compensation=remainders or {})
    rounding: Any = "nearest" if seed is None else "stochastic"
    gradkit.accumulate_grads(into, addends, compensation=rest, casting=casting, rounding=rounding)
