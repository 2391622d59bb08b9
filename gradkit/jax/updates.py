"""Steps of optimisers on pytrees, inside of ``jit``: new arrays in the place of the old."""

from functools import partial
from itertools import accumulate
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

import gradkit
from gradkit._arrays import backend_of
from gradkit._backend import Array, Views
from gradkit._calls import checks
from gradkit._calls.lists import AdamwUpdate, SgdUpdate
from gradkit._open.foreign import answers
from gradkit.jax._numbers import number, read
from gradkit.jax._pytrees import (
    by_path,
    call_on_lists,
    flag,
    rebuilt,
    shapes_alike,
    without_elements,
    words,
)

__all__ = ["adamw_update", "sgd_update"]

_Params = TypeVar("_Params")
_State = TypeVar("_State")
_STEPS: dict[str, tuple[Any, tuple[str, ...]]] = {  # the record, and what is kept of parameters
    "adamw_update": (AdamwUpdate, ("moments", "variances")),
    "sgd_update": (SgdUpdate, ("momenta",)),
}
_REFUSAL = "{} is not differentiable; differentiate the loss, and pass its gradients"


@answers
def adamw_update(
    params: _Params,
    grads: Any,
    moments: _State,
    variances: _State,
    step: Any,
    *,
    lr: Any,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    scale: Any = 1.0,
    verdict: Any = None,
    rounding: Literal["nearest", "stochastic"] = "nearest",
    seed: Any = None,
) -> tuple[_Params, _State, _State, jax.Array]:
    """Take a step of AdamW: what :func:`gradkit.adamw_update` writes in place, as new arrays.

    In the old arrays' own memory if nobody else needs it: if a jitted step is given them with
    ``donate_argnums``, or carries them through a ``scan``.

    Parameters
    ----------
    params, grads : pytrees of arrays, by the same keys
        Dtypes as in :func:`gradkit.adamw_update`.
    moments, variances : pytrees of arrays, by the same keys
        Zeros before the first step. Each of its parameter's dtype or float32.
    step : int, or 0-d integer array
        How many steps were taken before this one; 0 at first.
    lr, scale : float, or 0-d floating-point array
        The learning rate, and what **multiplies** the gradients: a clip's coefficient.
    betas, eps, weight_decay
        Python numbers, as in :func:`gradkit.adamw_update`.
    verdict : bool, or 0-d bool array, optional
        A false one leaves everything as it was, the step too.
    rounding : {"nearest", "stochastic"}
        "stochastic" rounds 16-bit parameters up or down.
    seed : int, or 0-d integer array
        For "stochastic": another one in each step, such as the step.

    Returns
    -------
    params, moments, variances : pytrees like the arguments
    step : 0-d integer array
        How many steps were taken, with this one.

    Raises
    ------
    TypeError
        A dtype is not accepted; the result is differentiated.
    ValueError
        The pytrees or their shapes do not match; a Python number is out of range.

    References
    ----------
    ``optax.adamw``, whose steps are these to within rounding.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, gradkit.jax
    >>> params, zeros = {"w": jnp.ones(2)}, {"w": jnp.zeros(2)}
    >>> step = jax.jit(gradkit.jax.adamw_update)
    >>> step(params, {"w": jnp.array([3.0, -4.0])}, zeros, zeros, 0, lr=0.125)[0]
    {'w': Array([0.87375, 1.12375], dtype=float32)}
    """
    counted = _count(step)
    beta1, beta2 = checks.betas(betas)
    how = {"beta1": beta1, "beta2": beta2, "eps": checks.epsilon(eps)}
    how["weight_decay"] = checks.size(weight_decay, "weight_decay")
    numbers = _numbers(lr, scale, verdict, rounding, seed) | {"step": counted}
    trees = params, moments, variances
    moved = _updated("adamw_update", trees, grads, numbers, tuple(how.items()))
    step_taken = jnp.asarray(numbers["verdict"]).astype(counted.dtype)
    return (*moved, counted + step_taken)


@answers
def sgd_update(
    params: _Params,
    grads: Any,
    momenta: _State = None,  # type: ignore[assignment]
    *,
    lr: Any,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    scale: Any = 1.0,
    verdict: Any = None,
    rounding: Literal["nearest", "stochastic"] = "nearest",
    seed: Any = None,
) -> tuple[_Params, _State]:
    """Take a step of SGD: what :func:`gradkit.sgd_update` writes in place, as new arrays.

    Parameters
    ----------
    params, grads : pytrees of arrays, by the same keys
        As in :func:`adamw_update`.
    momenta : pytree of arrays, by the same keys, optional
        Zeros before the first step. Each of its parameter's dtype or float32.
    momentum, nesterov, weight_decay
        Python numbers, as in :func:`gradkit.sgd_update`.
    lr, scale, verdict, rounding, seed
        As in :func:`adamw_update`.

    Returns
    -------
    params : pytree like the argument
    momenta : pytree like the argument, or None

    Raises
    ------
    TypeError, ValueError
        As :func:`adamw_update`; ``momentum`` or ``nesterov`` without ``momenta``.

    References
    ----------
    ``optax.sgd``, whose steps are these to within rounding.

    Examples
    --------
    >>> import jax.numpy as jnp, gradkit.jax
    >>> gradkit.jax.sgd_update(jnp.ones(2), jnp.array([2.0, 4.0]), lr=0.125)
    (Array([0.75, 0.5 ], dtype=float32), None)
    """
    how = {"momentum": checks.size(momentum, "momentum")}
    how["nesterov"] = checks.flag(nesterov, "nesterov")
    how["weight_decay"] = checks.size(weight_decay, "weight_decay")
    numbers = _numbers(lr, scale, verdict, rounding, seed)
    trees = (params,) if momenta is None else (params, momenta)
    moved = _updated("sgd_update", trees, grads, numbers, tuple(how.items()))
    return (*moved, None) if momenta is None else moved


def _numbers(lr: Any, scale: Any, verdict: Any, rounding: Any, seed: Any) -> dict[str, Any]:
    numbers = {"lr": number(lr, "lr", checks.size), "scale": number(scale, "scale")}
    numbers["verdict"] = flag(True if verdict is None else verdict, "verdict")
    if checks.choice(rounding, "rounding", ("nearest", "stochastic")) == "stochastic":
        numbers["seed"] = words(seed)
    return numbers


def _count(step: Any) -> jax.Array:
    """Number of steps taken before."""
    if not isinstance(step, jax.Array):
        step = jnp.asarray(checks.offset(step, "step"))
    checks.shape(step, (), "step", "one number")
    if not jnp.issubdtype(step.dtype, jnp.integer):
        raise TypeError(f"step has dtype {step.dtype}; accepted: integers")
    return step


@partial(jax.jit, inline=True, static_argnames=("name", "how"))
def _updated(
    name: str, trees: tuple[Any, ...], grads: Any, numbers: dict[str, Any], how: Any
) -> tuple[Any, ...]:
    """Parameters and what is kept of them after a step."""
    written, read_only = [*map(by_path, trees)], by_path(grads)
    _check(name, written, read_only, dict(how), numbers.get("seed"))
    if not written[0]:
        return trees
    record, states = _STEPS[name]
    count, labels = len(written[0]), list(numbers)
    last = count * (len(written) + 1)

    # It outlives the trace, in what is compiled, and so holds none of its arrays.
    def compute(outs: list[Array], ins: list[Any]) -> None:
        lists = [Views(outs[k : k + count]) for k in range(0, len(outs), count)]
        fields: dict[str, Any] = dict(how) | dict(zip(labels, ins[last:], strict=True))
        fields |= {label: read(fields[label]) for label in ("lr", "scale")}
        if "seed" in fields:
            fields["seed"] = fields["seed"].view(np.uint64).reshape(())
        fields["offsets"] = [*accumulate((array.size for array in lists[0][:-1]), initial=0)]
        backend, gradients = backend_of(fields["lr"]), Views(ins[last - count : last])
        fields |= zip(("params", *states), lists, strict=False)
        if "step" in fields:
            fields["step"] = fields["step"].astype(np.int64)  # a copy, which is counted up
        getattr(backend, name)(record(grads=gradients, **fields))

    by_number = [*numbers.values()]
    new = call_on_lists(_REFUSAL.format(name), compute, written, read_only, by_number)
    return tuple([rebuilt(tree, arrays) for tree, arrays in zip(trees, new, strict=True)])


def _check(
    name: str, written: list[dict[str, Any]], grads: dict[str, Any], how: dict[str, Any], seed: Any
) -> None:
    """Find out what is wrong with a call, on arrays without elements."""
    params, gradients, *states = map(without_elements, (written[0], grads, *written[1:]))
    kept = dict(zip(_STEPS[name][1], written[1:], strict=False))
    shapes_alike("params", written[0], grads=grads, **kept)
    rounding: Any = {"rounding": "nearest" if seed is None else "stochastic", "seed": 0}
    if name == "adamw_update":
        gradkit.adamw_update(params, gradients, states[0], states[1], 1, lr=0, **rounding)
    else:
        momenta = states[0] if states else None
        gradkit.sgd_update(params, gradients, momenta, lr=0, **how, **rounding)
