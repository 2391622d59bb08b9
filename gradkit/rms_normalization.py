"""RMS norm: forward and backward passes in training mode.

Rows, dtypes and ``out`` are as in :mod:`gradkit.layer_normalization`.
"""

from typing import Literal

from gradkit._calls import rows
from gradkit._open.dispatch import run
from gradkit._open.foreign import answers
from gradkit._typing import AnyArray, Index, Number, Outs, S, Wanted, X

__all__ = [
    "add_rms_norm",
    "gated_rms_norm",
    "gated_rms_norm_grad",
    "invertible_rms_norm_grad",
    "rms_norm",
    "rms_norm_grad",
]


@answers
def rms_norm(
    x: X,
    scale: AnyArray | None = None,
    *,
    axis: Index = -1,
    eps: Number = 1e-6,
    scale_offset: Number = 0.0,
    out: Outs = None,
) -> tuple[X, X]:
    """RMS norm: ``y = x * inv_std * scale`` with ``inv_std = 1 / sqrt(mean(x^2) + eps)``.

    It is computed in the accumulation dtype and rounded to x's dtype once.

    Parameters
    ----------
    x : array of shape (*rows, *normalised)
        T: float16, bfloat16, float32 or float64.
    scale : array of shape ``x.shape[axis:]``, or one per sample, optional
        V, as in :func:`layer_norm`.
    axis : int
        The first normalised dimension; all dimensions after it are normalised too.
    eps : float
        Added to the mean square; finite and at least 0.
    scale_offset : float
        Added to ``scale`` in the accumulation dtype; 1 for Gemma's scale, which is stored as its
        distance from 1.
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
    call = rows.RmsNorm(x=x, scale=scale, axis=axis, eps=eps, scale_offset=scale_offset)
    return run(call, out)


@answers
def add_rms_norm(
    x: X,
    residual: AnyArray,
    scale: AnyArray | None = None,
    *,
    axis: Index = -1,
    eps: Number = 1e-6,
    scale_offset: Number = 0.0,
    out: Outs = None,
) -> tuple[X, X, X]:
    """RMS norm of a residual sum: ``s = x + residual``, and ``y`` and ``inv_std`` of ``s``.

    ``s`` is rounded to x's dtype before it is normalised, so that the results are those of the
    addition followed by :func:`rms_norm`. For the gradient, pass ``s`` and the gradient that
    arrives at it to :func:`rms_norm_grad`, as ``x`` and ``ds``.

    Parameters
    ----------
    x, residual : arrays of shape (*rows, *normalised)
        T: float16, bfloat16, float32 or float64.
    scale : array of shape ``x.shape[axis:]``, or one per sample, optional
        V, as in :func:`layer_norm`.
    axis : int
        The first normalised dimension; all dimensions after it are normalised too.
    eps : float
        Added to the mean square; finite and at least 0.
    scale_offset : float
        As in :func:`rms_norm`.
    out : tuple (y, s, inv_std), optional
        Where the results are written; ``y`` may be ``x``, and ``s`` may be ``x`` or ``residual``.

    Returns
    -------
    y, s : arrays of x's shape and dtype
    inv_std : float32 (float64 for float64 data) array of shape ``x.shape[:axis]``

    Raises
    ------
    TypeError, ValueError
        As :func:`layer_norm`.

    References
    ----------
    ONNX Runtime's ``SkipSimplifiedLayerNormalization``.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> x, residual = np.array([[1.0, 4.0]]), np.array([[2.0, 0.0]])
    >>> y, s, inv_std = gradkit.add_rms_norm(x, residual, eps=0.0)
    >>> y.round(4), s
    (array([[0.8485, 1.1314]]), array([[3., 4.]]))
    """
    call = rows.AddRmsNorm(
        x=x, residual=residual, scale=scale, axis=axis, eps=eps, scale_offset=scale_offset
    )
    return run(call, out)


@answers
def rms_norm_grad(
    dy: AnyArray,
    x: X,
    scale: S,
    inv_std: AnyArray,
    *,
    axis: Index = -1,
    ds: AnyArray | None = None,
    scale_offset: Number = 0.0,
    wanted: Wanted = None,
    out: Outs = None,
) -> tuple[X, S]:
    """The gradients of RMS norm.

    With ``xhat = x * inv_std`` and ``w = dy * (scale + scale_offset)``; the mean is over a row, the
    sum over all rows::

        dx     = inv_std * (w - xhat * mean(w * xhat)) + ds
        dscale = sum(dy * xhat)

    Parameters
    ----------
    dy, x : arrays of shape (*rows, *normalised)
        T. ``dy`` may be a broadcast view.
    scale : array of shape ``x.shape[axis:]``, or one per sample, or None
        V, as in :func:`layer_norm`. ``None``: no scale.
    inv_std : array of shape ``x.shape[:axis]``, or that followed by ones
        U, as :func:`rms_norm` returns it.
    axis : int
        The first normalised dimension; all dimensions after it are normalised too.
    ds : array of x's shape, optional
        T. Gradient of the loss with respect to ``s`` from the residual branch; ``x`` is then the
        ``s`` that :func:`add_rms_norm` returned, and ``dx`` the gradient of both summands. It is
        added in the accumulation dtype, before the one rounding.
    scale_offset : float
        As in the forward pass.
    wanted : tuple of str, optional
        The results to compute, as in :func:`layer_norm_grad`.
    out : tuple (dx, dscale), optional
        Where the results are written; ``dx`` may be ``dy`` or ``ds``.

    Returns
    -------
    dx : T array of x's shape
    dscale : V array of scale's shape, ``None`` if ``scale`` is ``None``
        Per sample: sums over the rows of each.

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
    call = rows.RmsNormGrad(
        dy=dy,
        x=x,
        scale=scale,
        inv_std=inv_std,
        ds=ds,
        axis=axis,
        scale_offset=scale_offset,
        wanted=wanted,
    )
    return run(call, out)


@answers
def invertible_rms_norm_grad(
    dy: AnyArray,
    y: X,
    scale: S,
    inv_std: AnyArray,
    *,
    axis: Index = -1,
    ds: AnyArray | None = None,
    scale_offset: Number = 0.0,
    wanted: Wanted = None,
    out: Outs = None,
) -> tuple[X, S]:
    """The gradients of RMS norm, computed from its *output*: you need not keep its input.

    As :func:`rms_norm_grad`, but with ``xhat = y / (scale + scale_offset)``. The error of ``xhat``
    is about ``u * |xhat|``, where u is the unit roundoff of y's dtype.

    Parameters
    ----------
    dy, y : arrays of shape (*rows, *normalised)
        T.
    scale : array of shape ``y.shape[axis:]``, or None
        V. No element of ``scale + scale_offset`` may be 0 or subnormal.
    inv_std : array of shape ``y.shape[:axis]``, or that followed by ones
        U, as :func:`rms_norm` returns it.
    axis : int
        The first normalised dimension; all dimensions after it are normalised too.
    ds : array of y's shape, optional
        T. A further gradient with respect to ``x``, which is added in the accumulation dtype,
        before the one rounding.
    scale_offset : float
        As in the forward pass.
    wanted : tuple of str, optional
        The results to compute, as in :func:`layer_norm_grad`.
    out : tuple (dx, dscale), optional
        Where the results are written; ``dx`` may be ``dy`` or ``ds``.

    Returns
    -------
    dx : T array of y's shape
    dscale : V array of scale's shape, ``None`` if ``scale`` is ``None``

    Raises
    ------
    TypeError
        A combination of dtypes that :func:`layer_norm_grad` does not list.
    ValueError
        Incompatible shapes; an output that overlaps an input; on the CPU, a zero or subnormal in
        ``scale + scale_offset``. Nothing is written. On a GPU results are not finite there instead,
        because a check would wait for the device.

    References
    ----------
    NVIDIA's Apex: ``FusedRMSNorm`` with ``memory_efficient=True``.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> y, inv_std = gradkit.rms_norm(np.array([[3.0, 4.0]]), np.ones(2), eps=0.0)
    >>> dy = np.array([[1.0, 0.0]])
    >>> dx, dscale = gradkit.invertible_rms_norm_grad(dy, y, np.ones(2), inv_std)
    >>> dx.round(4), dscale.round(4)
    (array([[ 0.181 , -0.1358]]), array([0.8485, 0.    ]))
    """
    call = rows.InvertibleRmsNormGrad(
        dy=dy,
        y=y,
        scale=scale,
        inv_std=inv_std,
        ds=ds,
        axis=axis,
        scale_offset=scale_offset,
        wanted=wanted,
    )
    return run(call, out)


@answers
def gated_rms_norm(
    x: X,
    gate: AnyArray,
    scale: AnyArray | None = None,
    *,
    activation: Literal["silu", "swish", "sigmoid"] = "silu",
    norm_before_gate: bool = True,
    axis: Index = -1,
    eps: Number = 1e-6,
    scale_offset: Number = 0.0,
    out: Outs = None,
) -> tuple[X, X]:
    """RMS norm with an activated gate: ``rms_norm(x) * act(gate)``, or ``rms_norm(x * act(gate))``.

    It is computed in the accumulation dtype and rounded to x's dtype once. ``x`` and ``gate`` may
    be views of one projection, which is read where it lies.

    Parameters
    ----------
    x, gate : arrays of shape (*rows, *normalised)
        T: float16, bfloat16, float32 or float64.
    scale : array of shape ``x.shape[axis:]``, optional
        V, as in :func:`layer_norm`.
    activation : "silu" (alias "swish") or "sigmoid"
        ``silu(g) = g * sigmoid(g)``. No gate overflows it; as in PyTorch, that of minus infinity
        is NaN for silu, and so is the derivative of an infinite gate.
    norm_before_gate : bool
        The product with the gate follows the norm, as in Qwen3-Next and gated DeltaNet; if false,
        what is normalised is ``x * act(gate)``, as in Mamba-2.
    axis : int
        The first normalised dimension; all dimensions after it are normalised too. For groups in a
        row, reshape all of them to ``(*rows, groups, -1)``.
    eps : float
        Added to the mean square; finite and at least 0.
    scale_offset : float
        Added to ``scale`` in the accumulation dtype; 1 for a scale that is stored as its distance
        from 1.
    out : tuple (y, inv_std), optional
        Where the results are written; ``y`` may be ``x`` or ``gate``.

    Returns
    -------
    y : array of x's shape and dtype
    inv_std : float32 (float64 for float64 data) array of shape ``x.shape[:axis]``
        Of ``x``, or of ``x * act(gate)``.

    Raises
    ------
    TypeError, ValueError
        As :func:`layer_norm`; an ``activation`` that is none of these words; ``norm_before_gate``
        that is no bool.

    References
    ----------
    Dao, Gu: "Transformers are SSMs", 2024; Mamba's ``RMSNormGated``; flash-linear-attention's
    ``FusedRMSNormGated``; Hugging Face Transformers' ``Qwen3NextRMSNormGated``.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> x, gate = np.array([[3.0, 4.0]]), np.array([[0.0, 1.0]])
    >>> y, inv_std = gradkit.gated_rms_norm(x, gate, activation="sigmoid", eps=0.0)
    >>> y.round(4), inv_std.round(4)
    (array([[0.4243, 0.8271]]), array([0.2828]))
    """
    call = rows.GatedRmsNorm(
        x=x,
        gate=gate,
        scale=scale,
        axis=axis,
        eps=eps,
        scale_offset=scale_offset,
        activation=activation,
        norm_before_gate=norm_before_gate,
    )
    return run(call, out)


@answers
def gated_rms_norm_grad(
    dy: AnyArray,
    x: X,
    gate: AnyArray,
    scale: S,
    inv_std: AnyArray,
    *,
    activation: Literal["silu", "swish", "sigmoid"] = "silu",
    norm_before_gate: bool = True,
    axis: Index = -1,
    scale_offset: Number = 0.0,
    wanted: Wanted = None,
    out: Outs = None,
) -> tuple[X, X, S]:
    """The gradients of RMS norm with an activated gate.

    With ``a = act(gate)``, its derivative ``a'`` and ``shifted = scale + scale_offset``; the mean
    is over a row, the sum over all rows. If the norm comes before the gate, ``xhat = x * inv_std``
    and ``u = dy * a``; otherwise ``xhat = x * a * inv_std`` and ``u = dy``::

        w       = u * shifted
        dsource = inv_std * (w - xhat * mean(w * xhat))
        dscale  = sum(u * xhat)
        dx      = dsource                    or, if the gate comes first, dsource * a
        dgate   = dy * xhat * shifted * a'   or                           dsource * x * a'

    Parameters
    ----------
    dy, x, gate : arrays of shape (*rows, *normalised)
        T. ``dy`` may be a broadcast view.
    scale : array of shape ``x.shape[axis:]``, or None
        V. ``None``: no scale.
    inv_std : array of shape ``x.shape[:axis]``, or that followed by ones
        U, as :func:`gated_rms_norm` returns it.
    activation, norm_before_gate, axis, scale_offset
        As in the forward pass.
    wanted : tuple of str, optional
        The results to compute, as in :func:`layer_norm_grad`.
    out : tuple (dx, dgate, dscale), optional
        Where the results are written: ``dx`` and ``dgate`` may be views of one array. ``dx`` may be
        ``dy`` or ``x``, ``dgate`` may be ``dy`` or ``gate``.

    Returns
    -------
    dx, dgate : T arrays of x's shape
    dscale : V array of scale's shape, ``None`` if ``scale`` is ``None``

    Raises
    ------
    TypeError, ValueError
        As :func:`layer_norm_grad` and :func:`gated_rms_norm`.

    References
    ----------
    As :func:`gated_rms_norm`.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> projection = np.array([[3.0, 4.0, 0.0, 1.0]])
    >>> x, gate = np.split(projection, 2, axis=-1)
    >>> y, inv_std = gradkit.gated_rms_norm(x, gate, eps=0.0)
    >>> out = (*np.split(np.empty((1, 4)), 2, axis=-1), None)
    >>> dx, dgate, _ = gradkit.gated_rms_norm_grad(np.ones((1, 2)), x, gate, None, inv_std, out=out)
    >>> dx.round(4), dgate.round(4)
    (array([[-0.0993,  0.0744]]), array([[0.4243, 1.0495]]))
    """
    call = rows.GatedRmsNormGrad(
        dy=dy,
        x=x,
        gate=gate,
        scale=scale,
        inv_std=inv_std,
        axis=axis,
        scale_offset=scale_offset,
        activation=activation,
        norm_before_gate=norm_before_gate,
        wanted=wanted,
    )
    return run(call, out)
