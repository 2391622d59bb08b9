"""Running statistics of batch norm, for :func:`gradkit.batch_norm_inference`.

:func:`gradkit.batch_norm` moves them in place. The function here does it by itself, for arrays that
cannot be written, and for statistics that come from elsewhere::

    mean, var, count = gradkit.batch_norm_stats(x)
    y, mean_, inv_std = gradkit.batch_norm_apply(x, scale, bias, mean, var)
    running_mean, running_var = gradkit.update_running_statistics(
        running_mean, running_var, mean, var, count
    )
"""

from typing import Any, NamedTuple

import numpy as np

from gradkit._backend import Array, Spec
from gradkit._calls import checks
from gradkit._open.call import Call
from gradkit._open.foreign import answers
from gradkit._open.running import check_elements, weight_of
from gradkit._open.signatures import Signatures

__all__ = ["update_running_statistics"]

_FLOAT64 = np.dtype(np.float64)


class _Update(NamedTuple):
    running_mean: Any
    running_var: Any
    mean: Any
    var: Any


@answers
def update_running_statistics(
    running_mean: Any,
    running_var: Any,
    mean: Any,
    var: Any,
    count: Any,
    *,
    momentum: float = 0.1,
    out: Any = None,
) -> tuple[Any, Any]:
    """Running statistics, moved towards those of one batch.

    With n = ``count``::

        running_mean = (1 - momentum) * running_mean + momentum * mean
        running_var  = (1 - momentum) * running_var  + momentum * var * n / (n - 1)

    Parameters
    ----------
    running_mean, running_var : arrays of shape (C,) and one dtype
        float16, bfloat16, float32 or float64. Not written, unless they are ``out``.
    mean, var : arrays of shape (C,)
        A batch's mean and biased variance: of any of these dtypes, as
        :func:`batch_norm_stats` or, for several ranks, :func:`combine_stats` returns them. The
        variance is never to be computed from ``inv_std``: ``1 / inv_std**2 - eps`` may be negative.
        For a running variance that is biased, as ONNX's and Keras', pass ``var * (n - 1) / n``.
    count : float, or 0-d floating-point array
        The elements per channel of that batch, of all ranks together. 0: the results are the
        running statistics as they were. An array on the device is read there, where nothing can be
        raised: a count of at most 1 is as one of 0.
    momentum : float
        From 0 to 1: the weight of this batch. With 0, the results are the running statistics as
        they were; with 1, the batch's own mean and unbiased variance. What has no weight is left
        out, NaN and infinities too; else they stay. Keras and ONNX call ``1 - momentum`` momentum.
    out : tuple (running_mean, running_var), optional
        Where the results are written; each may be the argument of its name.

    Returns
    -------
    running_mean, running_var : arrays of shape (C,)
        In their dtype, computed in float64 and rounded once.

    Raises
    ------
    TypeError
        An argument is not a floating-point array; ``running_mean`` and ``running_var`` differ in
        dtype; arrays of two frameworks; ``momentum`` is not a real number.
    ValueError
        Incompatible shapes; ``momentum`` not from 0 to 1; ``count`` is a number that is negative,
        infinite, NaN, or above 0 and at most 1, so that there is no unbiased variance; an output
        that overlaps another array. Nothing is written.

    References
    ----------
    PyTorch's ``native_batch_norm``, whose ``running_var`` is unbiased too.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> mean, var, count = gradkit.batch_norm_stats(np.array([[1.0], [3.0]]))
    >>> running = np.zeros(1), np.ones(1)
    >>> gradkit.update_running_statistics(*running, mean, var, count, momentum=0.5)
    (array([1.]), array([1.5]))
    """
    weight = weight_of(momentum)
    call = Call(_Update(running_mean, running_var, mean, var))
    given, specs = call.arrays, _plan(call.arrays)
    number = call.number(count, "count")
    if isinstance(number, float):
        checks.finite(checks.nonnegative(number, "count"), "count")
        check_elements(number, f"count is {number:g}")
    with call.on_stream():
        outputs = call.outputs(out, specs, reuse=((given.running_mean,), (given.running_var,)))
        known = _wide(call, given.mean), _wide(call, given.var)
        call.backend.update_running_statistics(
            given.running_mean, given.running_var, *known, number, weight, *outputs.views
        )
        next_mean, next_var = outputs.results()
        return next_mean, next_var


@Signatures
def _plan(given: _Update) -> tuple[Spec, ...]:
    first = given.running_mean
    if len(first.shape) != 1:
        raise ValueError(f"running_mean has shape {first.shape}; expected one number per channel")
    for array in given:
        checks.floating(array, array.label)
        checks.shape(array, first.shape, array.label, "the shape of running_mean")
    if given.running_var.dtype != first.dtype:
        raise TypeError(
            f"running_var has dtype {given.running_var.dtype}; running_mean has dtype {first.dtype}"
        )
    return tuple(Spec(array.label, first.shape, first.dtype) for array in given[:2])


def _wide(call: Call[Any], array: Array) -> Array:
    """The same numbers in float64."""
    return array if array.dtype == _FLOAT64 else call.backend.as_float64(array)
