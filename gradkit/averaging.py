"""Running averages of parameters, as they are evaluated in the place of the last step's."""

from typing import Any

from gradkit._calls.lists import AverageLists, EmaUpdate
from gradkit._open.dispatch import run
from gradkit._open.foreign import answers
from gradkit._open.gradients import Gradients
from gradkit._open.pairs import check_pairs, in_order_of, why_lossy
from gradkit._typing import A, Arrays, Scalar

__all__ = ["ema_update"]


@answers
def ema_update(averages: A, params: Arrays, decay: Scalar) -> A:
    """Move exponential moving averages towards parameters, in place.

    ``averages = decay * averages + (1 - decay) * params``, computed as the average plus a part of
    the difference: averages that have reached constant parameters do not move, and no difference
    overflows. A decay of 1 keeps every bit of the averages; one of 0 copies the parameters,
    whatever the averages hold.

    Parameters
    ----------
    averages : array, or iterable or nested dict/list/tuple of arrays
        **Written in place.** float16, bfloat16, float32 or float64; dtypes may be mixed. With a
        decay near 1, 16 bits are too few: most steps are rounded away.
    params : container with as many arrays, in the same order
        Each of the shape of its partner in ``averages``, and of its dtype or one that it holds
        exactly: float16 and bfloat16 beside float32, any beside float64.
    decay : float, or 0-d floating-point array
        From 0 to 1. An array on the averages' device is read there, so that the call does not wait
        for the device; it is not checked there.

    Returns
    -------
    averages
        The caller's own object (a list for a one-shot iterable).

    Raises
    ------
    TypeError
        A leaf is not a floating-point array; the dtype of a parameter does not fit; arrays are of
        two frameworks, or of one whose arrays are never written.
    ValueError
        The containers or shapes do not match; ``decay`` is a number that is not from 0 to 1; an
        average is read-only, overlaps itself, another one or a parameter that is not its partner.
        Nothing is written.

    References
    ----------
    B. Polyak and A. Juditsky, "Acceleration of Stochastic Approximation by Averaging", 1992.
    ``torch.optim.swa_utils.get_ema_multi_avg_fn``; ``optax.incremental_update``, whose
    ``step_size`` is ``1 - decay``.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> averages = {"w": np.zeros(2, np.float32)}
    >>> gradkit.ema_update(averages, {"w": np.array([1.0, 8.0], np.float32)}, decay=0.75)
    {'w': array([0.25, 2.  ], dtype=float32)}
    """
    call = AverageLists(averages=averages, params=params, decay=decay)
    return run(call, by_name=_by_name)


def _by_name(call: AverageLists, out: Any) -> Any:  # noqa: ARG001
    into = Gradients(call.averages, instead=call.instead["averages"], label="averages")
    read = Gradients(in_order_of(into, call.params), label="params")
    check_pairs(into, read, ("params", "averages"), why_lossy)
    with into.on_stream():
        decay = into.share(call.decay, "decay")
        into.backend.ema_update(EmaUpdate(averages=into.views, params=read.views, decay=decay))
    into.wrote()
    return into.returned(call.averages)
