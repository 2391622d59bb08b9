"""Steps that are skipped: decided on the device, and every bit of the state stays.

Gradients of 0 do not skip the step of an optimiser that has momentum, weight decay or a step count.
:func:`step_verdict` says whether a step is taken, and :func:`keep_if` takes it or leaves it.
"""

import math
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from gradkit._calls.lists import KeepIf, StepVerdict
from gradkit._open.clipping import norm_array
from gradkit._open.dispatch import run
from gradkit._open.foreign import answers
from gradkit._open.gradients import Gradients
from gradkit._open.pairs import check_pairs, in_order_of, why_unlike
from gradkit._typing import A, Arrays, Flag, Number, Out, Scalar, X

__all__ = ["keep_if", "step_verdict"]


@overload
def step_verdict(
    norm: Number,
    *,
    limit: Scalar | None = None,
    found_inf: Flag | None = None,
    out: Out = None,
) -> NDArray[np.bool_]: ...
@overload
def step_verdict(
    norm: X,
    *,
    limit: Scalar | None = None,
    found_inf: Flag | None = None,
    out: Out = None,
) -> X: ...
def step_verdict(
    norm: Any,
    *,
    limit: Scalar | None = None,
    found_inf: Any = None,
    out: Out = None,
) -> Any:
    """Decide if a step is taken: its norm is finite, not above a limit, and nothing was found.

    Parameters
    ----------
    norm : float, or 0-d floating-point array
        As :func:`grad_norm` returns it; over a group of ranks, all of them get the same verdict.
        An array is read on its device.
    limit : float, or 0-d floating-point array, optional
        The largest norm of a step that is taken, such as what :meth:`SpikeGuard.update` returns
        with ``on_spike="skip"``. A NaN in an array skips every step.
    found_inf : bool, or 0-d or 1-element bool or floating-point array, optional
        As :func:`grad_norm` writes it: the step is skipped unless it is 0.
    out : 0-d bool array, optional
        Where the verdict is written.

    Returns
    -------
    0-d bool array
        On the norm's device, for :func:`keep_if`. The call does not wait for the device.

    Raises
    ------
    TypeError
        ``norm``, ``limit`` or ``found_inf`` is not of a dtype that is accepted; arrays are of two
        frameworks.
    ValueError
        ``norm`` is a negative number on the host, or ``limit`` a negative one or NaN there; an
        array has another shape. Nothing is written.

    References
    ----------
    ``optax.apply_if_finite``, which lets updates through after some that were not finite;
    OLMo-core's ``SkipStepOptimizer``.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> norm = gradkit.grad_norm([np.array([3.0, 4.0])])
    >>> gradkit.step_verdict(norm), gradkit.step_verdict(norm, limit=4.0)
    (array(True), array(False))
    >>> gradkit.step_verdict(np.float64("nan"))
    array(False)
    """
    call = StepVerdict(
        norm=norm_array(norm), limit=math.inf if limit is None else limit, found_inf=found_inf
    )
    return run(call, out)


@answers
def keep_if(verdict: Flag, new: Arrays, old: A) -> A:
    """Copy each array of ``new`` over its partner in ``old``, or leave ``old`` as it is.

    One launch, and no host synchronisation: where the verdict is false, parameters, moments and
    step counts keep every bit, whatever ``new`` holds. After a step that was made in place, swap
    the roles: ``keep_if(skipped, saved, state)`` brings back a copy that was made before it.

    Parameters
    ----------
    verdict : bool, or 0-d or 1-element bool array
        As :func:`step_verdict` returns it. An array on the arrays' device is read there.
    new : container with as many arrays, in the same order
        Each of the shape and dtype of its partner in ``old``, and perhaps the same array.
    old : array, or iterable or nested dict/list/tuple of arrays
        **Written in place** if the verdict is true. Floating-point arrays, integers and bools, of
        up to 8 bytes an element; dtypes may be mixed. ``None`` is skipped, in both.

    Returns
    -------
    old
        The caller's own object (a list for a one-shot iterable).

    Raises
    ------
    TypeError
        A leaf is not an array, or its dtype differs from its partner's; arrays are of two
        frameworks, or of one whose arrays are never written: in JAX, use ``jnp.where``.
    ValueError
        The containers or shapes do not match; an array of ``old`` is read-only, overlaps itself,
        another one, the verdict or an array of ``new`` that is not its partner. Nothing is written.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> state = {"w": np.array([1.0, -0.0]), "step": np.array(3)}
    >>> after = {"w": np.array([np.nan, np.nan]), "step": np.array(4)}
    >>> gradkit.keep_if(gradkit.step_verdict(np.float64("nan")), after, state)
    {'w': array([ 1., -0.]), 'step': array(3)}
    """
    instead = "choose with its own where(verdict, new, old) for each pair"
    near = {"verdict": verdict}  # of an empty list
    into = Gradients(old, instead=instead, label="old", beside=lambda: near, floats=False)
    source = Gradients(in_order_of(into, new), label="new", floats=False)
    check_pairs(into, source, ("new", "old"), why_unlike)
    with into.on_stream():
        flag = into.flag(verdict, "verdict")
        if not isinstance(flag, bool):
            into.refuse_overlap(flag, "verdict")
        into.backend.keep_if(KeepIf(verdict=flag, new=source.views, old=into.views))
    into.wrote()
    return into.returned(old)
