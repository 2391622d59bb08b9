"""RMS norm: forward and backward passes in training mode.

Rows, dtypes and ``out`` are as in :mod:`gradkit.layer_normalization`.
"""

from typing import Any, NamedTuple

from gradkit._arguments import checks
from gradkit._arguments.call import Call
from gradkit._arguments.norms import NormPlan, Rows, check_same_shape, types_of
from gradkit._arguments.signatures import Signatures, Spec
from gradkit._backend import Array
from gradkit._dtypes import LAYER_NORM_TYPES

__all__ = ["rms_norm", "rms_norm_grad"]


def rms_norm(
    x: Any, scale: Any = None, *, axis: int = -1, eps: float = 1e-6, out: Any = None
) -> tuple[Any, Any]:
    """RMS norm: ``y = x * inv_std * scale`` with ``inv_std = 1 / sqrt(mean(x^2) + eps)``.

    Parameters
    ----------
    x : array of shape (*rows, *normalised)
        T: float16, bfloat16, float32 or float64.
    scale : array of shape ``x.shape[axis:]``, optional
        V, as in :func:`layer_norm`.
    axis : int
        The first normalised dimension; all dimensions after it are normalised too.
    eps : float
        Added to the mean square; finite and at least 0.
    out : tuple (y, inv_std), optional
        Where the results are written; ``y`` may be ``x``.

    Returns
    -------
    y : array of x's shape and dtype
    inv_std : float32 (float64 for float64 data) array of shape ``x.shape[:axis]``

    Raises
    ------
    TypeError, ValueError
        As :func:`layer_norm`.

    References
    ----------
    Zhang, Sennrich: "Root Mean Square Layer Normalization", 2019. ONNX Runtime's
    ``SimplifiedLayerNormalization``.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> y, inv_std = gradkit.rms_norm(np.array([[3.0, 4.0]]), eps=0.0)
    >>> y.round(4), inv_std.round(4)
    (array([[0.8485, 1.1314]]), array([0.2828]))
    """
    floor = checks.epsilon(eps)
    call = Call(_Forward(x, scale))
    given, plan = call.arrays, _plan_forward(call.arrays, axis)
    with call.on_stream():
        outputs = call.outputs(out, plan.outputs, reuse=given.x)
        y, inv_std = outputs.views
        call.backend.rms_norm(given.x, given.scale, plan.axis, floor, y, inv_std)
        y, inv_std = outputs.results()
        return y, inv_std


def rms_norm_grad(
    dy: Any, x: Any, scale: Any, inv_std: Any, *, axis: int = -1, out: Any = None
) -> tuple[Any, Any]:
    """The gradients of RMS norm.

    With ``xhat = x * inv_std`` and ``w = dy * scale``; the mean is over a row, the sum over all
    rows::

        dx     = inv_std * (w - xhat * mean(w * xhat))
        dscale = sum(dy * xhat)

    Parameters
    ----------
    dy, x : arrays of shape (*rows, *normalised)
        T. ``dy`` may be a broadcast view.
    scale : array of shape ``x.shape[axis:]``, or None
        V. ``None``: no scale.
    inv_std : array of shape ``x.shape[:axis]``, or that followed by ones
        U, as :func:`rms_norm` returns it.
    axis : int
        The first normalised dimension; all dimensions after it are normalised too.
    out : tuple (dx, dscale), optional
        Where the results are written; ``dx`` may be ``dy``.

    Returns
    -------
    dx : T array of x's shape
    dscale : V array of scale's shape, ``None`` if ``scale`` is ``None``

    Raises
    ------
    TypeError, ValueError
        As :func:`layer_norm_grad`.

    References
    ----------
    ONNX Runtime's ``SimplifiedLayerNormalizationGrad``.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> x, scale = np.array([[3.0, 4.0]]), np.ones(2)
    >>> y, inv_std = gradkit.rms_norm(x, scale, eps=0.0)
    >>> dx, dscale = gradkit.rms_norm_grad(np.array([[1.0, 0.0]]), x, scale, inv_std)
    >>> dx.round(4), dscale.round(4)
    (array([[ 0.181 , -0.1358]]), array([0.8485, 0.    ]))
    """
    call = Call(_Gradient(dy, x, inv_std, scale))
    given, plan = call.arrays, _plan_gradient(call.arrays, axis)
    with call.on_stream():
        outputs = call.outputs(out, plan.outputs, reuse=given.dy)
        dx, dscale = outputs.views
        call.backend.rms_norm_grad(
            given.dy, given.x, given.scale, given.inv_std, plan.axis, dx, dscale
        )
        dx, dscale = outputs.results()
        return dx, dscale


class _Forward(NamedTuple):
    x: Array
    scale: Array | None = None


class _Gradient(NamedTuple):
    dy: Array
    x: Array
    inv_std: Array
    scale: Array | None = None


@Signatures
def _plan_forward(given: _Forward, axis: int) -> NormPlan:
    rows = Rows.of(given.x, axis)
    rows.check((), (given.scale,))
    t, u, _ = types_of(LAYER_NORM_TYPES, (given.x,), (), (given.scale,))
    return NormPlan(rows.axis, (Spec("y", given.x.shape, t), Spec("inv_std", rows.lead, u)))


@Signatures
def _plan_gradient(given: _Gradient, axis: int) -> NormPlan:
    rows = Rows.of(given.x, axis)
    check_same_shape(given.dy, given.x)
    rows.check((given.inv_std,), (given.scale,))
    data, statistics = (given.dy, given.x), (given.inv_std,)
    t, _, v = types_of(LAYER_NORM_TYPES, data, statistics, (given.scale,))
    dscale = None if given.scale is None else Spec("dscale", rows.tail, v)
    return NormPlan(rows.axis, (Spec("dx", given.x.shape, t), dscale))
