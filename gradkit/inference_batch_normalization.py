"""Batch norm by running statistics: what PyTorch calls evaluation mode, and fine-tuning frozen.

The statistics are constants, so no gradient flows through them. Functions of their own, so that
the gradient of one pass is not taken for that of the other: :func:`gradkit.batch_norm_grad` is that
of training mode. Dtypes are written (T, U, V), and ``out`` is, as in
:mod:`gradkit.batch_normalization`.
"""

from functools import partial
from typing import Any, NamedTuple

from gradkit._backend import Engine, Spec
from gradkit._calls import checks
from gradkit._dtypes import BATCH_NORM_TYPES
from gradkit._open import engines
from gradkit._open.call import Call
from gradkit._open.foreign import answers
from gradkit._open.norms import Channels, NormPlan, check_same_shape, types_of
from gradkit._open.signatures import Signatures

__all__ = ["batch_norm_inference", "batch_norm_inference_grad"]


class _Forward(NamedTuple):
    x: Any
    mean: Any
    var: Any
    scale: Any = None
    bias: Any = None


class _Gradient(NamedTuple):
    dy: Any
    x: Any
    mean: Any
    var: Any
    scale: Any = None


@answers
def batch_norm_inference(
    x: Any,
    scale: Any,
    bias: Any,
    mean: Any,
    var: Any,
    *,
    channel_axis: int = 1,
    eps: float = 1e-5,
    out: Any = None,
    engine: Engine | None = None,
) -> Any:
    """Batch norm by running statistics: ``y = (x - mean) / sqrt(var + eps) * scale + bias``.

    Parameters
    ----------
    x : array of two or more dimensions
        T: float16, bfloat16, float32 or float64, of any layout; perhaps without elements.
    scale, bias : arrays of shape (C,), or None
        V. With a bias alone, pass ones as ``scale``.
    mean, var : arrays of shape (C,)
        U: the running statistics that :func:`batch_norm` moves.
    channel_axis : int
        The channel axis.
    eps : float
        Added to ``var``; finite and at least 0. Where the sum is negative, ``y`` is NaN.
    out : array, optional
        Where ``y`` is written; it may be ``x``.
    engine : {"cudnn", "cudnn-persistent", "native"} or None
        What computes on CuPy arrays: see :func:`batch_norm_grad`.

    Returns
    -------
    T array of x's shape

    Raises
    ------
    TypeError
        A combination of dtypes that :func:`batch_norm_grad` does not list; arrays of two
        frameworks.
    ValueError
        Incompatible shapes; ``bias`` without ``scale``; ``channel_axis`` out of range; ``eps``
        negative or not finite; an output that overlaps an input; an ``engine`` that does not
        support these arrays. Nothing is written.
    BackendUnavailableError, CudnnError
        ``engine`` requires a cuDNN that is not installed or does not support the case.

    References
    ----------
    cuDNN ``cudnnBatchNormalizationForwardInference``; ``torch.nn.functional.batch_norm`` with
    ``training=False``.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> x, mean, var = np.array([[1.0], [3.0]]), np.array([3.0]), np.array([0.1875])
    >>> gradkit.batch_norm_inference(x, None, None, mean, var, eps=0.0625)
    array([[-4.],
           [ 0.]])
    """
    floor = checks.epsilon(eps)
    call = Call(_Forward(x, mean, var, scale, bias))
    given, plan = call.arrays, _plan(call.arrays, channel_axis)
    engines.check(given.x, engine)
    with call.on_stream():
        outputs = call.outputs(out, plan.outputs, reuse=given.x)
        known = given.scale, given.bias, given.mean, given.var
        ran = call.backend.batch_norm_inference(
            given.x, *known, plan.axis, floor, outputs.views[0], engine
        )
        engines.ran(ran)
        return outputs.results()[0]


@answers
def batch_norm_inference_grad(
    dy: Any,
    x: Any,
    scale: Any,
    mean: Any,
    var: Any,
    *,
    channel_axis: int = 1,
    eps: float = 1e-5,
    out: Any = None,
) -> tuple[Any, Any, Any]:
    """The gradients of batch norm by running statistics, which are constants.

    With ``inv_std = 1 / sqrt(var + eps)``::

        dx     = dy * inv_std * scale
        dscale = sum(dy * (x - mean) * inv_std)
        dbias  = sum(dy)

    No library has it: gradkit's own code computes.

    Parameters
    ----------
    dy, x : arrays of two or more dimensions and the same shape
        T. Their memory layouts may differ.
    scale : array of shape (C,), or None
        V. ``None``: no scale and no bias; only the shape of ``x`` matters then.
    mean, var : arrays of shape (C,)
        U, as :func:`batch_norm_inference` takes them.
    channel_axis : int
        The channel axis.
    eps : float
        As in :func:`batch_norm_inference`.
    out : tuple (dx, dscale, dbias), optional
        Where the results are written; ``dx`` may be ``dy``.

    Returns
    -------
    dx : T array of x's shape
    dscale, dbias : V arrays of shape (C,)
        ``None`` if ``scale`` is ``None``.

    Raises
    ------
    TypeError
        A combination of dtypes that :func:`batch_norm_grad` does not list; arrays of two
        frameworks.
    ValueError
        Incompatible shapes; ``channel_axis`` out of range; ``eps`` negative or not finite; an
        output that overlaps an input. Nothing is written.

    References
    ----------
    PyTorch's ``native_batch_norm_backward`` with ``train=False``.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> dy, x = np.array([[1.0], [0.5]]), np.array([[1.0], [3.0]])
    >>> scale, mean, var = np.ones(1), np.array([3.0]), np.array([0.1875])
    >>> gradkit.batch_norm_inference_grad(dy, x, scale, mean, var, eps=0.0625)
    (array([[2.],
           [1.]]), array([-4.]), array([1.5]))
    """
    floor = checks.epsilon(eps)
    call = Call(_Gradient(dy, x, mean, var, scale))
    given, plan = call.arrays, _plan_gradient(call.arrays, channel_axis)
    with call.on_stream():
        outputs = call.outputs(out, plan.outputs, reuse=given.dy)
        known = given.scale, given.mean, given.var
        call.backend.batch_norm_inference_grad(
            given.dy, given.x, *known, plan.axis, floor, *outputs.views
        )
        engines.ran("native")
        dx, dscale, dbias = outputs.results()
        return dx, dscale, dbias


@partial(Signatures, strides=True)
def _plan(given: _Forward, channel_axis: int) -> NormPlan:
    channels, parameters = Channels.of(given.x, channel_axis), (given.scale, given.bias)
    statistics = given.mean, given.var
    channels.check((*parameters, *statistics))
    t, _, _ = types_of(BATCH_NORM_TYPES, (given.x,), statistics, parameters)
    return NormPlan(channels.axis, (Spec("y", given.x.shape, t, channels.order),))


@partial(Signatures, strides=True)
def _plan_gradient(given: _Gradient, channel_axis: int) -> NormPlan:
    channels, statistics = Channels.of(given.x, channel_axis), (given.mean, given.var)
    channels.check((given.scale, *statistics))
    check_same_shape(given.dy, given.x)
    t, _, v = types_of(BATCH_NORM_TYPES, (given.dy, given.x), statistics, (given.scale,))
    parameters = (
        None if given.scale is None else Spec(name, channels.shape, v)
        for name in ("dscale", "dbias")
    )
    return NormPlan(channels.axis, (Spec("dx", given.x.shape, t, channels.order), *parameters))
