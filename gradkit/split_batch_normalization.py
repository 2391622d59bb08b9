"""Batch norm in steps, between which ranks may exchange what they have summed.

:func:`gradkit.batch_norm` and :func:`gradkit.batch_norm_grad` take a ``group`` of ranks and do all
of this. The steps are for other ways to communicate, such as a collective on the device::

    mean, var, count = gradkit.batch_norm_stats(x)
    means, variances, counts = ...      # a row of these from each rank
    mean, var, count = gradkit.combine_stats(means, variances, counts)
    y, mean, inv_std = gradkit.batch_norm_apply(x, scale, bias, mean, var)

    sums = gradkit.batch_norm_grad_sums(dy, x, mean, inv_std)
    sum_dy_xhat, sum_dy = ...           # added up over all ranks
    dx = gradkit.batch_norm_grad_apply(
        dy, x, scale, mean, inv_std, sum_dy_xhat, sum_dy, count
    )

Every rank takes part in both collectives, whatever it holds. Results of one number per channel are
float64 (float32 where the library holds no float64, as JAX by default). Dtypes are written (T, U,
V), and ``out`` is, as in :mod:`gradkit.batch_normalization`.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from gradkit._backend import Array, Shape, Spec
from gradkit._calls import checks
from gradkit._dtypes import BATCH_NORM_TYPES
from gradkit._open.batch_norms import plan_forward, plan_gradient, statistic_of
from gradkit._open.call import Call
from gradkit._open.foreign import answers
from gradkit._open.norms import (
    Channels,
    Forward,
    Gradient,
    NormPlan,
    check_same_shape,
    types_of,
)
from gradkit._open.signatures import Described, Signatures

__all__ = [
    "batch_norm_apply",
    "batch_norm_grad_apply",
    "batch_norm_grad_sums",
    "batch_norm_stats",
    "combine_stats",
]

_FLOAT64 = np.dtype(np.float64)
_WIDE = ("float64", "float32")
_COUNT = Spec("count", (), _FLOAT64)


class _Stats(NamedTuple):
    x: Any


class _Rows(NamedTuple):
    means: Any
    variances: Any
    counts: Any


class _Apply(NamedTuple):
    x: Any
    mean: Any
    var: Any
    scale: Any = None
    bias: Any = None


class _Sums(NamedTuple):
    dy: Any
    x: Any
    mean: Any
    inv_std: Any


class _GradApply(NamedTuple):
    dy: Any
    x: Any
    mean: Any
    inv_std: Any
    sum_dy_xhat: Any
    sum_dy: Any
    scale: Any = None


class _KnownStats(NamedTuple):
    x: Any
    mean: Any
    var: Any


class _KnownSums(NamedTuple):
    x: Any
    sum_dy_xhat: Any
    sum_dy: Any


@answers
def batch_norm_stats(x: Any, *, channel_axis: int = 1, out: Any = None) -> tuple[Any, Any, Any]:
    """Mean and biased variance of each channel: the first step of :func:`batch_norm`.

    Parameters
    ----------
    x : array of two or more dimensions
        T: float16, bfloat16, float32 or float64, of any layout; perhaps without elements.
    channel_axis : int
        The channel axis; statistics are over all other axes.
    out : tuple (mean, var, count), optional
        Where the results are written.

    Returns
    -------
    mean, var : float64 arrays of shape (C,)
        0 if there are no elements. Squares of float16, bfloat16 and float32 neither overflow nor
        underflow.
    count : 0-d float64 array
        The elements per channel.

    Raises
    ------
    TypeError
        ``x`` is not a floating-point array.
    ValueError
        ``x`` has fewer than two dimensions; ``channel_axis`` out of range; an output that
        overlaps ``x``. Nothing is written.

    References
    ----------
    ``torch.batch_norm_stats``, which gives inv_std.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> mean, var, count = gradkit.batch_norm_stats(np.array([[1.0, 10.0], [3.0, 10.0]]))
    >>> mean, var, count
    (array([ 2., 10.]), array([1., 0.]), array(2.))
    """
    call = Call(_Stats(x))
    plan = _plan_stats(call.arrays, channel_axis)
    with call.on_stream():
        outputs = call.outputs(out, plan.outputs)
        mean, var, count = outputs.views
        call.backend.batch_norm_stats(call.arrays.x, plan.axis, mean, var)
        count[...] = float(Channels(call.arrays.x, plan.axis).size)
        mean, var, count = outputs.results()
        return mean, var, count


@answers
def combine_stats(
    means: Any, variances: Any, counts: Any, *, out: Any = None
) -> tuple[Any, Any, Any]:
    """Mean and biased variance of what several ranks hold together, channel by channel.

    With n the sum of ``counts``::

        mean = sum(counts / n * means)
        var  = sum(counts / n * (variances + (means - mean)**2))

    in which nothing overflows or underflows that the result does not. Equal arrays give equal bits,
    so that all ranks agree.

    Parameters
    ----------
    means, variances : arrays of shape (ranks, C)
        A row from each rank, as :func:`batch_norm_stats` returns them: float64 or float32.
    counts : array of shape (ranks,)
        The elements per channel of each rank, at least 0: float64 or float32. A rank whose count
        is 0 is ignored, whatever its row holds.
    out : tuple (mean, var, count), optional
        Where the results are written.

    Returns
    -------
    mean, var : float64 arrays of shape (C,)
        0 if all counts are.
    count : 0-d float64 array
        The sum of all counts.

    Raises
    ------
    TypeError
        An argument is neither float64 nor float32: a float16 count ends at 65504.
    ValueError
        Incompatible shapes; an output that overlaps an input. Nothing is written.

    References
    ----------
    Chan, Golub, LeVeque: "Updating Formulae and a Pairwise Algorithm for Computing Sample
    Variances", 1979.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> means, variances = np.array([[1.0], [4.0], [7.0]]), np.array([[0.0], [2.0], [9.0]])
    >>> gradkit.combine_stats(means, variances, np.array([1.0, 2.0, 0.0]))
    (array([3.]), array([3.33333333]), array(3.))
    """
    call = Call(_Rows(means, variances, counts))
    given, plan = call.arrays, _plan_rows(call.arrays)
    with call.on_stream():
        outputs = call.outputs(out, plan)
        mean, var, count = outputs.views
        known = _wide(call, given.means), _wide(call, given.variances), _wide(call, given.counts)
        call.backend.combine_stats(*known, mean, var, count)
        mean, var, count = outputs.results()
        return mean, var, count


@answers
def batch_norm_apply(
    x: Any,
    scale: Any,
    bias: Any,
    mean: Any,
    var: Any,
    *,
    channel_axis: int = 1,
    eps: float = 1e-5,
    out: Any = None,
) -> tuple[Any, Any, Any]:
    """The last step of :func:`batch_norm`: ``y = (x - mean) * inv_std * scale + bias``.

    Parameters
    ----------
    x : array of two or more dimensions
        T, as in :func:`batch_norm`.
    scale, bias : arrays of shape (C,), or None
        V. With a bias alone, pass ones as ``scale``.
    mean, var : arrays of shape (C,)
        The statistics of the whole batch, as :func:`combine_stats` returns them: float64 or
        float32.
    channel_axis : int
        The channel axis.
    eps : float
        Added to ``var``; finite and at least 0.
    out : tuple (y, mean, inv_std), optional
        Where the results are written; ``y`` may be ``x``.

    Returns
    -------
    y : array of x's shape and dtype
    mean, inv_std : arrays of shape (C,)
        U, as :func:`batch_norm` returns them, for the backward pass.

    Raises
    ------
    TypeError
        A combination of dtypes that :func:`batch_norm_grad` does not list; arrays of two
        frameworks.
    ValueError
        Incompatible shapes; ``bias`` without ``scale``; ``channel_axis`` out of range; ``eps``
        negative or not finite; an output that overlaps an input. Nothing is written.

    References
    ----------
    ``torch.batch_norm_elemt``.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> x, mean, var = np.array([[1.0], [3.0]]), np.array([3.0]), np.array([0.1875])
    >>> gradkit.batch_norm_apply(x, None, None, mean, var, eps=0.0625)
    (array([[-4.],
           [ 0.]]), array([3.]), array([2.]))
    """
    floor = checks.epsilon(eps)
    call = Call(_Apply(x, mean, var, scale, bias))
    given, statistic = call.arrays, statistic_of(call.view, out)
    plan = plan_forward(Forward(given.x, given.scale, given.bias), channel_axis, statistic)
    _check_known(_KnownStats(given.x, given.mean, given.var), plan.axis)
    with call.on_stream():
        outputs = call.outputs(out, plan.outputs, reuse=given.x)
        y, saved_mean, inv_std = outputs.views
        known = _wide(call, given.mean), _wide(call, given.var)
        call.backend.batch_norm_apply(
            given.x, given.scale, given.bias, *known, plan.axis, floor, y, saved_mean, inv_std
        )
        y, mean, inv_std = outputs.results()
        return y, mean, inv_std


@answers
def batch_norm_grad_sums(
    dy: Any, x: Any, mean: Any, inv_std: Any, *, channel_axis: int = 1, out: Any = None
) -> tuple[Any, Any]:
    """The sums over each channel that :func:`batch_norm_grad` needs: its first step.

    With ``xhat = (x - mean) * inv_std``, they are ``sum(dy * xhat)`` and ``sum(dy)``. As they are,
    they are this rank's dscale and dbias, which data parallelism adds up with all other
    parameters' gradients. Added up over all ranks, they are what :func:`batch_norm_grad_apply`
    takes.

    Parameters
    ----------
    dy, x : arrays of two or more dimensions and the same shape
        T, perhaps without elements.
    mean, inv_std : arrays of shape (C,)
        U, as :func:`batch_norm_apply` returns them.
    channel_axis : int
        The channel axis.
    out : tuple (sum_dy_xhat, sum_dy), optional
        Where the results are written.

    Returns
    -------
    sum_dy_xhat, sum_dy : float64 arrays of shape (C,)

    Raises
    ------
    TypeError
        A combination of dtypes that :func:`batch_norm_grad` does not list; arrays of two
        frameworks.
    ValueError
        Incompatible shapes; an output that overlaps an input. Nothing is written.

    References
    ----------
    ``torch.batch_norm_backward_reduce``, whose first sum is without inv_std.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> dy, x, one = np.array([[1.0], [0.5]]), np.array([[1.0], [2.0]]), np.ones(1)
    >>> gradkit.batch_norm_grad_sums(dy, x, one, one)
    (array([0.5]), array([1.5]))
    """
    call = Call(_Sums(dy, x, mean, inv_std))
    plan = _plan_sums(call.arrays, channel_axis)
    with call.on_stream():
        outputs = call.outputs(out, plan.outputs)
        call.backend.batch_norm_grad_sums(*call.arrays, plan.axis, *outputs.views)
        sum_dy_xhat, sum_dy = outputs.results()
        return sum_dy_xhat, sum_dy


@answers
def batch_norm_grad_apply(
    dy: Any,
    x: Any,
    scale: Any,
    mean: Any,
    inv_std: Any,
    sum_dy_xhat: Any,
    sum_dy: Any,
    count: Any,
    *,
    channel_axis: int = 1,
    out: Any = None,
) -> Any:
    """The last step of :func:`batch_norm_grad`: dx, from the sums over the whole batch.

    ``dx = inv_std * scale * (dy - sum_dy / count - xhat * sum_dy_xhat / count)``.

    Parameters
    ----------
    dy, x : arrays of two or more dimensions and the same shape
        T.
    scale : array of shape (C,), or None
        V.
    mean, inv_std : arrays of shape (C,)
        U, as :func:`batch_norm_apply` returns them.
    sum_dy_xhat, sum_dy : arrays of shape (C,)
        What :func:`batch_norm_grad_sums` returns, added up over all ranks: float64 or float32.
    count : float, or 0-d floating-point array
        The elements per channel of all ranks, as :func:`combine_stats` returns them. An array on
        the device is read there.
    channel_axis : int
        The channel axis.
    out : array, optional
        Where dx is written; it may be ``dy``.

    Returns
    -------
    T array of x's shape

    Raises
    ------
    TypeError
        A combination of dtypes that :func:`batch_norm_grad` does not list; arrays of two
        frameworks.
    ValueError
        Incompatible shapes; ``count`` is a negative, infinite or NaN number; an output that
        overlaps an input. Nothing is written.

    References
    ----------
    ``torch.batch_norm_backward_elemt``.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> dy, x, one = np.array([[1.0], [0.5]]), np.array([[1.0], [2.0]]), np.ones(1)
    >>> sums = gradkit.batch_norm_grad_sums(dy, x, one, one)
    >>> gradkit.batch_norm_grad_apply(dy, x, None, one, one, *sums, 2)
    array([[ 0.25],
           [-0.5 ]])
    """
    call = Call(_GradApply(dy, x, mean, inv_std, sum_dy_xhat, sum_dy, scale))
    given = call.arrays
    plan = plan_gradient(
        Gradient(given.dy, given.x, given.mean, given.inv_std, given.scale), channel_axis
    )
    _check_known(_KnownSums(given.x, given.sum_dy_xhat, given.sum_dy), plan.axis)
    number = call.number(count, "count")
    if isinstance(number, float):
        checks.finite(checks.nonnegative(number, "count"), "count")
    with call.on_stream():
        outputs = call.outputs(out, plan.outputs[:1], reuse=given.dy)
        statistics = given.mean, given.inv_std
        sums = _wide(call, given.sum_dy_xhat), _wide(call, given.sum_dy)
        call.backend.batch_norm_grad_apply(
            given.dy, given.x, given.scale, *statistics, *sums, number, plan.axis, outputs.views[0]
        )
        return outputs.results()[0]


@partial(Signatures, strides=True)
def _plan_stats(given: _Stats, channel_axis: int) -> NormPlan:
    channels = Channels.of(given.x, channel_axis)
    types_of(BATCH_NORM_TYPES, (given.x,), (), ())
    return NormPlan(channels.axis, (*_totals(channels.shape, "mean", "var"), _COUNT))


@Signatures
def _plan_rows(given: _Rows) -> tuple[Spec, ...]:
    shape = given.means.shape
    if len(shape) != 2:
        raise ValueError(f"means has shape {shape}; expected two dimensions, ranks and channels")
    check_same_shape(given.variances, given.means)
    checks.shape(given.counts, shape[:1], "counts", "one number per rank")
    _check_wide(given)
    return *_totals(shape[1:], "mean", "var"), _COUNT


@partial(Signatures, strides=True)
def _plan_sums(given: _Sums, channel_axis: int) -> NormPlan:
    whole = plan_gradient(Gradient(*given), channel_axis)
    shape = given.mean.shape
    return NormPlan(whole.axis, _totals(shape, "sum_dy_xhat", "sum_dy"))


@Signatures
def _check_known(given: _KnownStats | _KnownSums, axis: int) -> None:
    """Raise unless what all ranks have together fits the data."""
    data, *vectors = given
    Channels(data, axis).check(vectors)
    _check_wide(vectors)


def _totals(shape: Shape, *names: str) -> tuple[Spec, ...]:
    return tuple(Spec(name, shape, _FLOAT64) for name in names)


def _check_wide(arrays: Sequence[Described]) -> None:
    """Raise unless numbers of whole batches have a dtype that holds them."""
    for array in arrays:
        if checks.floating(array, array.label) not in _WIDE:
            raise TypeError(f"{array.label} has dtype {array.dtype}; accepted: {', '.join(_WIDE)}")


def _wide(call: Call[Any], array: Array) -> Array:
    """The same numbers in float64."""
    return array if array.dtype == _FLOAT64 else call.backend.as_float64(array)
