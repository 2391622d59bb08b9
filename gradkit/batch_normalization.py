"""Batch norm: forward and backward passes in training mode.

Dtypes are written (T, U, V): T of the data, U of the statistics, V of scale and bias. ``out`` is
as in :mod:`gradkit.layer_normalization`.
"""

import threading
from functools import partial
from typing import Any

import numpy as np

from gradkit._arguments import checks
from gradkit._arguments.call import Call
from gradkit._arguments.norms import (
    Channels,
    Forward,
    Gradient,
    NormPlan,
    check_same_shape,
    types_of,
)
from gradkit._arguments.signatures import Signatures, Spec
from gradkit._backend import Array, Engine
from gradkit._dtypes import BATCH_NORM_TYPES

__all__ = ["batch_norm", "batch_norm_grad", "last_engine"]

_ENGINES = ("cudnn", "cudnn-persistent", "native")
_latest = threading.local()


def batch_norm(
    x: Any,
    scale: Any = None,
    bias: Any = None,
    *,
    channel_axis: int = 1,
    eps: float = 1e-5,
    out: Any = None,
    engine: Engine | None = None,
) -> tuple[Any, Any, Any]:
    """Batch norm in training mode: ``y = (x - mean) * inv_std * scale + bias``.

    Every channel has its own statistics.

    Parameters
    ----------
    x : array of two or more dimensions
        T: float16, bfloat16, float32 or float64. Channels-first and channels-last, by axis or
        by strides: both supported.
    scale, bias : arrays of shape (C,), optional
        V, as in :func:`batch_norm_grad`.
    channel_axis : int
        The channel axis; statistics are over all other axes.
    eps : float
        Added to the biased variance; finite and at least 0.
    out : tuple (y, mean, inv_std), optional
        Where the results are written; ``y`` may be ``x``.
    engine : {"cudnn", "cudnn-persistent", "native"} or None
        What computes on CuPy arrays: see :func:`batch_norm_grad`.

    Returns
    -------
    y : array of x's shape and dtype
    mean, inv_std : arrays of shape (C,)
        float32 (float64 for float64 data); 16-bit if ``out`` has 16-bit arrays.
        A batch without elements has mean 0 and variance 0.

    Raises
    ------
    TypeError
        A combination of dtypes that :func:`batch_norm_grad` does not list; arrays of two
        frameworks.
    ValueError
        Incompatible shapes; ``channel_axis`` out of range; ``eps`` negative or not finite; an
        output that overlaps an input; an ``engine`` that does not support these arrays.
        Nothing is written.
    BackendUnavailableError, CudnnError
        ``engine`` requires a cuDNN that is not installed or does not support the case.

    References
    ----------
    Ioffe, Szegedy: "Batch Normalization", 2015. cuDNN
    ``cudnnBatchNormalizationForwardTraining`` in spatial mode.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> x = np.array([[1.0, 10.0], [3.0, 10.0]])
    >>> y, mean, inv_std = gradkit.batch_norm(x, eps=0.0625)
    >>> mean, inv_std.round(4)
    (array([ 2., 10.]), array([0.9701, 4.    ]))
    """
    floor = checks.epsilon(eps)
    call = Call(Forward(x, scale, bias))
    given = call.arrays
    plan = _plan_forward(given, channel_axis, _statistic(call, out))
    _check_engine(given.x, engine)
    with call.on_stream():
        outputs = call.outputs(out, plan.outputs, reuse=given.x)
        y, mean, inv_std = outputs.views
        _latest.engine = call.backend.batch_norm(
            given.x, given.scale, given.bias, plan.axis, floor, y, mean, inv_std, engine
        )
        y, mean, inv_std = outputs.results()
        return y, mean, inv_std


def batch_norm_grad(
    dy: Any,
    x: Any,
    scale: Any,
    mean: Any,
    inv_std: Any,
    *,
    channel_axis: int = 1,
    out: Any = None,
    engine: Engine | None = None,
) -> tuple[Any, Any, Any]:
    """The gradients of batch norm in training mode, from saved statistics.

    With ``xhat = (x - mean) * inv_std`` and n elements per channel::

        dscale = sum(dy * xhat)
        dbias  = sum(dy)
        dx     = inv_std * scale * (dy - dbias / n - xhat * dscale / n)

    Parameters
    ----------
    dy, x : arrays of two or more dimensions and the same shape
        T. Their memory layouts may differ.
    scale : array of shape (C,), or None
        V. ``None``: no scale and no bias.
    mean, inv_std : arrays of shape (C,)
        U, as :func:`batch_norm` returns them.
    channel_axis : int
        The channel axis.
    out : tuple (dx, dscale, dbias), optional
        Where the results are written; ``dx`` may be ``dy``.
    engine : {"cudnn", "cudnn-persistent", "native"} or None
        What computes on CuPy arrays. ``None``: cuDNN if it is installed and supports the case,
        gradkit's own kernel otherwise (one warning if cuDNN is missing or fails);
        :func:`last_engine` names it. ``"native"``: gradkit's own kernel. ``"cudnn"``: cuDNN or
        an error. ``"cudnn-persistent"``: cuDNN's ``CUDNN_BATCHNORM_SPATIAL_PERSISTENT``, which
        may be faster; only for channels-last data of 3 or more dimensions, because for
        channels-first data it sums in scaled integers, and large finite values overflow. For
        NumPy arrays, ``None`` and ``"native"`` are the same; any other engine is an error.

    Returns
    -------
    dx : T array of x's shape
    dscale, dbias : V arrays of shape (C,)
        ``None`` if ``scale`` is ``None``.

    Raises
    ------
    TypeError
        A combination of dtypes other than (f32, f32, f32), (f64, f64, f64), (f16, f16, f16),
        (f16, f32, f16), (f16, f32, f32), (bf16, f32, bf16), (bf16, f32, f32) and (bf16, bf16,
        bf16); arrays of two frameworks.
    ValueError
        Incompatible shapes; an output that overlaps an input; an ``engine`` that does not
        support these arrays. Nothing is written.
    BackendUnavailableError, CudnnError
        ``engine`` requires a cuDNN that is not installed or does not support the case.

    References
    ----------
    ONNX Runtime's ``BatchNormalizationGrad``; cuDNN ``cudnnBatchNormalizationBackward``.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> x, scale = np.array([[1.0], [2.0], [6.0]]), np.ones(1)
    >>> y, mean, inv_std = gradkit.batch_norm(x, scale)
    >>> dy = np.array([[1.0], [0.0], [0.0]])
    >>> dx, dscale, dbias = gradkit.batch_norm_grad(dy, x, scale, mean, inv_std)
    >>> dx.round(4)
    array([[ 0.1763],
           [-0.2204],
           [ 0.0441]])
    """
    call = Call(Gradient(dy, x, mean, inv_std, scale))
    given, plan = call.arrays, _plan_gradient(call.arrays, channel_axis)
    _check_engine(given.x, engine)
    with call.on_stream():
        outputs = call.outputs(out, plan.outputs, reuse=given.dy)
        dx, dscale, dbias = outputs.views
        _latest.engine = call.backend.batch_norm_grad(
            given.dy,
            given.x,
            given.scale,
            given.mean,
            given.inv_std,
            plan.axis,
            dx,
            dscale,
            dbias,
            engine,
        )
        dx, dscale, dbias = outputs.results()
        return dx, dscale, dbias


def last_engine() -> str | None:
    """The engine that ran the last batch norm of the calling thread, forward or backward.

    Returns
    -------
    "cudnn", "native" or None
        ``"native"``: gradkit's own code, for NumPy and CuPy arrays. ``None``: this thread has
        not called :func:`batch_norm` or :func:`batch_norm_grad` yet.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> y, mean, inv_std = gradkit.batch_norm(np.ones((4, 2)))
    >>> gradkit.last_engine()
    'native'
    """
    engine: str | None = getattr(_latest, "engine", None)
    return engine


@partial(Signatures, strides=True)
def _plan_forward(given: Forward, channel_axis: int, statistic: str | None) -> NormPlan:
    channels, parameters = Channels.of(given.x, channel_axis), (given.scale, given.bias)
    channels.check(parameters)
    t, u, _ = types_of(BATCH_NORM_TYPES, (given.x,), (), parameters, statistic=statistic)
    y = Spec("y", given.x.shape, t, channels.order)
    mean, inv_std = (Spec(name, channels.shape, u) for name in ("mean", "inv_std"))
    return NormPlan(channels.axis, (y, mean, inv_std))


@partial(Signatures, strides=True)
def _plan_gradient(given: Gradient, channel_axis: int) -> NormPlan:
    channels, statistics = Channels.of(given.x, channel_axis), (given.mean, given.inv_std)
    channels.check((given.scale, *statistics))
    check_same_shape(given.dy, given.x)
    t, _, v = types_of(BATCH_NORM_TYPES, (given.dy, given.x), statistics, (given.scale,))
    dscale = None if given.scale is None else Spec("dscale", channels.shape, v)
    dbias = None if given.scale is None else Spec("dbias", channels.shape, v)
    return NormPlan(channels.axis, (Spec("dx", given.x.shape, t, channels.order), dscale, dbias))


def _statistic(call: Call[Forward], out: Any) -> str | None:
    """The dtype of the mean in ``out``, if there is one: it may be 16-bit."""
    if not isinstance(out, tuple) or len(out) != 3 or out[1] is None:
        return None
    return checks.floating(call.view(out[1], "out[1]", write=True), "out[1]")


def _check_engine(x: Array, engine: str | None) -> None:
    """Raise if the engine is unknown, or is cuDNN's and the arrays are on the host."""
    if engine is None:
        return
    checks.choice(engine, "engine", _ENGINES)
    if engine != "native" and isinstance(x, np.ndarray):
        raise ValueError(f"engine={engine!r} needs CuPy arrays; for NumPy pass None or 'native'")
