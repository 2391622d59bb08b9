"""Steps of optimisers on lists of arrays: what follows a clip, without objects or schedules.

Every function here writes in place and returns the caller's own parameters.
"""

from functools import partial
from typing import Any

from gradkit._arrays import is_array
from gradkit._calls import checks
from gradkit._calls.lists import AdamwLists, AdamwUpdate, SgdLists, SgdUpdate, goes_with_param
from gradkit._dtypes import FLOATS, float_of
from gradkit._open.dispatch import run
from gradkit._open.foreign import answers
from gradkit._open.gradients import Gradients
from gradkit._open.pairs import check_apart, check_pairs, in_order_of
from gradkit._open.rounding import at_random
from gradkit._typing import A, Arrays, Flag, Number, Rounding, Scalar, Seed, Step

__all__ = ["adamw_update", "sgd_update"]


@answers
def adamw_update(
    params: A,
    grads: Arrays,
    moments: Arrays,
    variances: Arrays,
    step: Step,
    *,
    lr: Scalar,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: Number = 1e-8,
    weight_decay: Number = 0.01,
    scale: Scalar = 1.0,
    verdict: Flag | None = None,
    rounding: Rounding = "nearest",
    seed: Seed | None = None,
) -> A:
    """Take a step of AdamW: move parameters and both moments of their gradients, in place.

    With ``g = scale * grad``, for each element::

        moment   = beta1 * moment + (1 - beta1) * g
        variance = beta2 * variance + (1 - beta2) * g**2
        change   = (moment / (1 - beta1**step)) / (sqrt(variance / (1 - beta2**step)) + eps)
        param    = param - lr * change - lr * weight_decay * param

    Gradients are only read: with a clip's coefficient as ``scale``, norm and step are two passes
    over them, where norm, clip and step are three. float64 parameters are computed in float64 and
    others in float32; each result is rounded once.

    Parameters
    ----------
    params : array, or iterable or nested dict/list/tuple of arrays
        **Written in place.** float16, bfloat16, float32 or float64; dtypes may be mixed. One launch
        moves all that agree in their dtypes and in those of their gradients and moments.
    grads : container with as many arrays, in the same order
        Each of its parameter's shape, and of its dtype, float32 or a dtype that it holds exactly.
    moments, variances : containers with as many arrays, in the same order
        **Written in place**; zeros before the first step. Each of its parameter's shape, and of its
        dtype or float32, both alike. With 16 bits most changes of a variance are rounded away.
    step : int, or 0-d int64 array
        An int is this step's number, from 1. An array on the parameters' device holds how many
        steps were taken: it is **counted up in place** first, unless ``verdict`` is false.
    lr : float, or 0-d floating-point array
        The learning rate, at least 0. An array on the device is read there and not checked.
    betas : (float, float)
        Decays of both moments, from 0 to below 1.
    eps : float
        At least 0.
    weight_decay : float
        Decoupled from the gradients, and multiplied by ``lr``; at least 0. 0 leaves it out.
    scale : float, or 0-d floating-point array
        **Multiplies** the gradients, and neither the decay nor the rate: what
        :func:`clip_coefficient` returns, or 1 / loss scale. An array on the device is read there. A
        NaN or an infinity is no error: like a NaN gradient it reaches parameters and moments.
    verdict : bool, or 0-d or 1-element bool array, optional
        As :func:`step_verdict` returns it. A false one leaves every byte of parameters, moments and
        step. An array on the device is read there.
    rounding : {"nearest", "stochastic"}
        "stochastic" rounds 16-bit parameters up or down, as :func:`accumulate_grads` says; moments
        are always rounded to nearest.
    seed : int, or 0-d int64 or uint64 array
        For "stochastic", which needs it: another one in each step, such as the step's number.

    Returns
    -------
    params
        The caller's own object (a list for a one-shot iterable).

    Raises
    ------
    TypeError
        A leaf is not a floating-point array; a dtype does not fit; arrays are of two frameworks, or
        of one whose arrays are never written: in JAX, use :func:`gradkit.jax.adamw_update`.
    ValueError
        The containers or shapes do not match; a number is out of range; an array that is written is
        read-only or shares memory with another argument. Nothing is written.

    References
    ----------
    I. Loshchilov and F. Hutter, "Decoupled Weight Decay Regularization", 2019.
    ``torch.optim.AdamW``; ``optax.adamw``. To within rounding their steps are these.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> params, grads = {"w": np.ones(2)}, {"w": np.array([3.0, -4.0])}
    >>> moments, variances = {"w": np.zeros(2)}, {"w": np.zeros(2)}
    >>> scale = gradkit.clip_coefficient(gradkit.grad_norm(grads), max_norm=1.0)
    >>> step = gradkit.adamw_update(params, grads, moments, variances, 1, lr=0.125, scale=scale)
    >>> step is params, params["w"].round(3)
    (True, array([0.874, 1.124]))
    >>> moments["w"].round(3), grads["w"]
    (array([ 0.06, -0.08]), array([ 3., -4.]))
    """
    beta1, beta2 = checks.betas(betas)
    call = AdamwLists(
        params=params,
        grads=grads,
        moments=moments,
        variances=variances,
        step=step,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        scale=scale,
        verdict=True if verdict is None else verdict,
        at_random=_at_random(rounding, seed),
    )
    return run(call, by_name=_adamw_by_name)


@answers
def sgd_update(
    params: A,
    grads: Arrays,
    momenta: Arrays | None = None,
    *,
    lr: Scalar,
    momentum: Number = 0.0,
    nesterov: bool = False,
    weight_decay: Number = 0.0,
    scale: Scalar = 1.0,
    verdict: Flag | None = None,
    rounding: Rounding = "nearest",
    seed: Seed | None = None,
) -> A:
    """Take a step of SGD: move parameters, and their momenta if there are any, in place.

    For each element::

        change   = scale * grad + weight_decay * param
        momentum = momentum_factor * momentum + change
        param    = param - lr * momentum

    Without ``momenta`` the parameter moves by ``lr * change``, and with ``nesterov`` by
    ``lr * (change + momentum_factor * momentum)``.

    Parameters
    ----------
    params, grads
        As in :func:`adamw_update`: parameters are **written in place**, gradients only read.
    momenta : container with as many arrays, in the same order, optional
        **Written in place**; zeros before the first step. Each of its parameter's shape, and of its
        dtype or float32.
    lr : float, or 0-d floating-point array
        As in :func:`adamw_update`.
    momentum : float
        The factor of old momenta; at least 0. One that is not 0 needs ``momenta``.
    nesterov : bool
        Needs ``momenta``.
    weight_decay : float
        Added to the gradient, so that it enters momenta (L2 regularisation); at least 0.
    scale, verdict, rounding, seed
        As in :func:`adamw_update`: ``scale`` **multiplies** the gradients alone.

    Returns
    -------
    params
        The caller's own object (a list for a one-shot iterable).

    Raises
    ------
    TypeError, ValueError
        As :func:`adamw_update`; ``momentum`` or ``nesterov`` without ``momenta``.

    References
    ----------
    I. Sutskever et al., "On the importance of initialization and momentum in deep learning", 2013.
    ``torch.optim.SGD`` with ``dampening=0``; ``optax.sgd``. To within rounding their steps are
    these.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> params, grads, momenta = [np.ones(2)], [np.array([2.0, 4.0])], [np.zeros(2)]
    >>> for _ in range(2):
    ...     params = gradkit.sgd_update(params, grads, momenta, lr=0.125, momentum=0.5)
    >>> params, momenta
    ([array([ 0.375, -0.25 ])], [array([3., 6.])])
    """
    call = SgdLists(
        params=params,
        grads=grads,
        momenta=momenta,
        lr=lr,
        momentum=momentum,
        nesterov=nesterov,
        weight_decay=weight_decay,
        scale=scale,
        verdict=True if verdict is None else verdict,
        at_random=_at_random(rounding, seed),
    )
    if momenta is None and (checks.flag(nesterov, "nesterov") or checks.size(momentum, "momentum")):
        label = "nesterov" if nesterov else "momentum"
        raise ValueError(f"{label} is {getattr(call, label)}, which needs momenta; pass zeros")
    return run(call, by_name=_sgd_by_name)


def _at_random(rounding: Any, seed: Any) -> tuple[Any, Any, int] | None:
    if rounding == "nearest":
        return None
    return rounding, seed, 0


class _Opened:
    """The lists and numbers of a step, opened argument by argument."""

    def __init__(self, call: Any, *states: str):
        instead = call.instead
        self.call = call
        own = instead["params"]
        self.into = Gradients(call.params, instead=own, label="params", beside=self._numbers)
        self.states: dict[str, Gradients] = {}
        self.read = self._beside("grads")
        for name in states:
            if getattr(call, name) is not None:
                self.states[name] = self._beside(name, instead=instead[name])

    def _numbers(self) -> dict[str, Any]:
        """Arrays that show the library and device of an empty list of parameters."""
        return {name: getattr(self.call, name, None) for name in ("step", "verdict")}

    def _beside(self, name: str, instead: str = "") -> Gradients:
        """A further list, whose arrays share no memory with those that were opened before."""
        arrays = in_order_of(self.into, getattr(self.call, name))
        opened = Gradients(arrays, instead=instead, label=name)
        check_pairs(self.into, opened, (name, "params"), partial(_why_not, name), may_be=False)
        for other in (self.read, *self.states.values()) if instead else ():
            check_apart(opened, other)
        return opened

    def take(self, step: type[AdamwUpdate | SgdUpdate], **more: Any) -> Any:
        """Take a step, and return the caller's own parameters."""
        into, call = self.into, self.call
        with into.on_stream():
            numbers = {n: check(getattr(call, n), into) for n, check in call.passing.items()}
            numbers |= at_random(into, call.at_random)
            for name in ("step", "verdict", "seed"):
                self._apart(numbers.get(name), name)
            lists = {"params": into, "grads": self.read, **self.states}
            views: dict[str, Any] = {name: opened.views for name, opened in lists.items()}
            getattr(into.backend, call.operation)(step(**views, **numbers, **more))
        for written in (into, *self.states.values()):
            written.wrote()
        if not into.framework.returns_views:
            into.framework.wrote(into.counted)
        return into.returned(call.params)

    def _apart(self, array: Any, label: str) -> None:
        """Raise if an array that is read or counted up lies in memory of the lists."""
        if is_array(array):
            for each in (self.into, self.read, *self.states.values()):
                each.refuse_overlap(array, label)


def _adamw_by_name(call: AdamwLists, out: Any) -> Any:  # noqa: ARG001
    opened = _Opened(call, "moments", "variances")
    _check_alike(**opened.states)
    return opened.take(AdamwUpdate)


def _sgd_by_name(call: SgdLists, out: Any) -> Any:  # noqa: ARG001
    opened = _Opened(call, "momenta")
    return opened.take(SgdUpdate, nesterov=checks.flag(call.nesterov, "nesterov"))


def _why_not(name: str, param: Any, other: Any) -> str | None:
    """Why an array cannot stand beside a parameter, by their dtypes."""
    dtype, other_dtype = float_of(param).name, float_of(other).name
    if goes_with_param(name, dtype, other_dtype):
        return None
    return f"; accepted: {', '.join(each for each in FLOATS if goes_with_param(name, dtype, each))}"


def _check_alike(moments: Gradients, variances: Gradients) -> None:
    for k, (moment, variance) in enumerate(zip(moments.views, variances.views, strict=True)):
        if moment.dtype != variance.dtype:
            said = f"{variances.name(k)} has dtype {variance.dtype} and {moments.name(k)}"
            raise TypeError(f"{said} {moment.dtype}; they must agree")
