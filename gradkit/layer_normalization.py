"""Layer norm and invertible layer norm: forward and backward passes in training mode.

Layer norms see an array as M rows of D elements: all dimensions from ``axis`` on form one row,
as in ONNX. Dtypes are written (T, U, V): T of the data, U of the statistics, V of scale and
bias. Statistics and sums are float32 for 16-bit and 32-bit data, float64 for float64 data.

Rows may lie at strides, as heads do in a fused projection: if the normalised dimensions have no
gaps, rows are read and written where they are, and results have the bits of contiguous arrays'.

Every function takes ``out``: a tuple of arrays for its results (None: allocate). ``dx`` may be
``dy`` or ``ds``, ``y`` may be ``x``, ``s`` may be ``x`` or ``residual`` and the inverse's ``x`` may
be ``y``; any other overlap is an error.
"""

from gradkit._calls import rows
from gradkit._open.dispatch import run
from gradkit._open.foreign import answers
from gradkit._typing import AnyArray, B, Index, Number, Out, Outs, S, Wanted, X

__all__ = [
    "add_layer_norm",
    "invertible_layer_norm_grad",
    "layer_norm",
    "layer_norm_grad",
    "layer_norm_inverse",
]


@answers
def layer_norm(
    x: X,
    scale: AnyArray | None = None,
    bias: AnyArray | None = None,
    *,
    axis: Index = -1,
    eps: Number = 1e-5,
    scale_offset: Number = 0.0,
    out: Outs = None,
) -> tuple[X, X, X]:
    """Layer norm: ``y = (x - mean) * inv_std * scale + bias`` with each row's statistics.

    Parameters
    ----------
    x : array of shape (*rows, *normalised)
        T: float16, bfloat16, float32 or float64.
    scale, bias : array of shape ``x.shape[axis:]``, or one per sample, optional
        V: T; also float32 for 16-bit data, and 16-bit for float32 data. *Per sample*:
        both have leading dimensions of x, then ones in front of ``x.shape[axis:]``, such as
        (B, 1, D) for x of shape (B, T, D).
    axis : int
        The first normalised dimension; all dimensions after it are normalised too.
    eps : float
        Added to the variance; finite and at least 0.
    scale_offset : float
        Added to ``scale`` in the accumulation dtype; 1 for a scale that is stored as its distance
        from 1, as with TransformerEngine's ``zero_centered_gamma``.
    out : tuple (y, mean, inv_std), optional
        Where the results are written; ``y`` may be ``x``.

    Returns
    -------
    y : array of x's shape and dtype
    mean, inv_std : float32 (float64 for float64 data) arrays of shape ``x.shape[:axis]``
        ``inv_std = 1 / sqrt(var + eps)``. The backward pass needs both.

    Raises
    ------
    TypeError
        A combination of dtypes that :func:`layer_norm_grad` does not list; arrays of two
        frameworks.
    ValueError
        Incompatible shapes; ``axis`` out of range; ``eps`` negative or not finite; ``scale_offset``
        not finite, or not 0 without ``scale``; an output that overlaps an input. Nothing is
        written.

    References
    ----------
    Ba, Kiros, Hinton: "Layer Normalization", 2016. ONNX ``LayerNormalization``. Per sample: the
    adaptive layer norm of Peebles, Xie: "Scalable Diffusion Models with Transformers", 2023.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> y, mean, inv_std = gradkit.layer_norm(np.array([[1.0, 3.0], [5.0, 5.0]]), eps=0.25)
    >>> mean, inv_std
    (array([2., 5.]), array([0.89442719, 2.        ]))
    >>> y.round(3)
    array([[-0.894,  0.894],
           [ 0.   ,  0.   ]])
    """
    call = rows.LayerNorm(
        x=x, scale=scale, bias=bias, axis=axis, eps=eps, scale_offset=scale_offset
    )
    return run(call, out)


@answers
def add_layer_norm(
    x: X,
    residual: AnyArray,
    scale: AnyArray | None = None,
    bias: AnyArray | None = None,
    *,
    axis: Index = -1,
    eps: Number = 1e-5,
    scale_offset: Number = 0.0,
    out: Outs = None,
) -> tuple[X, X, X, X]:
    """Layer norm of a residual sum: ``s = x + residual``, and the results of ``s``.

    ``s`` is rounded to x's dtype before it is normalised, so that the results are those of the
    addition followed by :func:`layer_norm`. For the gradient, pass ``s`` and the gradient that
    arrives at it to :func:`layer_norm_grad`, as ``x`` and ``ds``.

    Parameters
    ----------
    x, residual : arrays of shape (*rows, *normalised)
        T: float16, bfloat16, float32 or float64.
    scale, bias : array of shape ``x.shape[axis:]``, or one per sample, optional
        V, as in :func:`layer_norm`.
    axis : int
        The first normalised dimension; all dimensions after it are normalised too.
    eps : float
        Added to the variance; finite and at least 0.
    scale_offset : float
        As in :func:`layer_norm`.
    out : tuple (y, s, mean, inv_std), optional
        Where the results are written; ``y`` may be ``x``, and ``s`` may be ``x`` or ``residual``.

    Returns
    -------
    y, s : arrays of x's shape and dtype
    mean, inv_std : float32 (float64 for float64 data) arrays of shape ``x.shape[:axis]``

    Raises
    ------
    TypeError, ValueError
        As :func:`layer_norm`.

    References
    ----------
    ONNX Runtime's ``SkipLayerNormalization``.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> x, residual = np.array([[1.0, 2.0]]), np.array([[0.0, 1.0]])
    >>> y, s, mean, inv_std = gradkit.add_layer_norm(x, residual, eps=0.0)
    >>> y, s, mean
    (array([[-1.,  1.]]), array([[1., 3.]]), array([2.]))
    """
    call = rows.AddLayerNorm(
        x=x,
        residual=residual,
        scale=scale,
        bias=bias,
        axis=axis,
        eps=eps,
        scale_offset=scale_offset,
    )
    return run(call, out)


@answers
def layer_norm_grad(
    dy: AnyArray,
    x: X,
    scale: S,
    mean: AnyArray,
    inv_std: AnyArray,
    *,
    axis: Index = -1,
    ds: AnyArray | None = None,
    scale_offset: Number = 0.0,
    wanted: Wanted = None,
    out: Outs = None,
) -> tuple[X, S, S]:
    """The gradients of layer norm, computed from its input.

    With ``xhat = (x - mean) * inv_std`` and ``w = dy * (scale + scale_offset)``; means are over a
    row, sums over all rows::

        dx     = inv_std * (w - mean(w) - xhat * mean(w * xhat)) + ds
        dscale = sum(dy * xhat)
        dbias  = sum(dy)

    Parameters
    ----------
    dy, x : arrays of shape (*rows, *normalised)
        T. ``dy`` may be a broadcast view.
    scale : array of shape ``x.shape[axis:]``, or one per sample, or None
        V, as in :func:`layer_norm`. ``None``: no scale.
    mean, inv_std : arrays of shape ``x.shape[:axis]``, or that followed by ones
        U, as :func:`layer_norm` returns them.
    axis : int
        The first normalised dimension; all dimensions after it are normalised too.
    ds : array of x's shape, optional
        T. Gradient of the loss with respect to ``s`` from the residual branch; ``x`` is then the
        ``s`` that :func:`add_layer_norm` returned, and ``dx`` the gradient of both summands. It is
        added in the accumulation dtype, before the one rounding.
    scale_offset : float
        As in the forward pass.
    wanted : tuple of str, optional
        The results to compute, by name: the others are ``None``, and are neither computed nor
        written. By default all, of which ``dscale`` and ``dbias`` need a ``scale``. If there is a
        bias alone, ``("dx", "dbias")``.
    out : tuple (dx, dscale, dbias), optional
        Where the results are written; ``dx`` may be ``dy`` or ``ds``.

    Returns
    -------
    dx : T array of x's shape
    dscale, dbias : V arrays of scale's shape
        Per sample: sums over the rows of each. ``None`` if ``scale`` is ``None``.

    Raises
    ------
    TypeError
        A combination of dtypes other than (f32, f32, f32), (f64, f64, f64), (f16, f32, f16),
        (f16, f32, f32), (f32, f32, f16), (bf16, f32, bf16), (bf16, f32, f32) and (f32, f32,
        bf16); arrays of two frameworks.
    ValueError
        Incompatible shapes; ``scale_offset`` as for :func:`layer_norm`; an output that overlaps an
        input. Nothing is written.

    References
    ----------
    ONNX Runtime's ``LayerNormalizationGrad``.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> x, scale = np.array([[1.0, 2.0, 6.0]]), np.array([1.0, 2.0, 1.0])
    >>> y, mean, inv_std = gradkit.layer_norm(x, scale)
    >>> dy = np.array([[1.0, 0.0, 0.0]])
    >>> dx, dscale, dbias = gradkit.layer_norm_grad(dy, x, scale, mean, inv_std)
    >>> dx.round(4)
    array([[ 0.1763, -0.2204,  0.0441]])
    >>> dbias
    array([1., 0., 0.])
    """
    call = rows.LayerNormGrad(
        dy=dy,
        x=x,
        scale=scale,
        mean=mean,
        inv_std=inv_std,
        ds=ds,
        axis=axis,
        scale_offset=scale_offset,
        wanted=wanted,
    )
    return run(call, out)


@answers
def layer_norm_inverse(
    y: X,
    scale: AnyArray | None,
    bias: AnyArray | None,
    mean: AnyArray,
    inv_std: AnyArray,
    *,
    axis: Index = -1,
    out: Out = None,
) -> X:
    """The input of a layer norm from its output: ``x = (y - bias) / scale / inv_std + mean``.

    The error is about ``u * |y| / |scale| / inv_std``, where u is the unit roundoff of y's
    dtype.

    Parameters
    ----------
    y : array of shape (*rows, *normalised)
        T.
    scale, bias : arrays of shape ``y.shape[axis:]``, or None
        V. No element of ``scale`` may be 0 or subnormal.
    mean, inv_std : arrays of shape ``y.shape[:axis]``, or that followed by ones
        U.
    axis : int
        The first normalised dimension; all dimensions after it are normalised too.
    out : array of y's shape and dtype, optional
        Where ``x`` is written; may be ``y``.

    Returns
    -------
    x : T array of y's shape

    Raises
    ------
    TypeError
        A combination of dtypes that :func:`layer_norm_grad` does not list.
    ValueError
        Incompatible shapes; an output that overlaps an input; on the
        CPU, a zero or subnormal in ``scale``. Nothing is written. On a GPU the result is not finite
        there instead, because a check would wait for the device.

    References
    ----------
    Gomez, Ren, Urtasun, Grosse: "The Reversible Residual Network", 2017; ONNX Runtime's
    ``InvertibleLayerNormalizationGrad``.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> x, scale, bias = np.array([[1.0, 2.0, 6.0]]), np.full(3, 2.0), np.ones(3)
    >>> y, mean, inv_std = gradkit.layer_norm(x, scale, bias)
    >>> gradkit.layer_norm_inverse(y, scale, bias, mean, inv_std)
    array([[1., 2., 6.]])
    """
    call = rows.LayerNormInverse(y=y, scale=scale, bias=bias, mean=mean, inv_std=inv_std, axis=axis)
    return run(call, out)


@answers
def invertible_layer_norm_grad(
    dy: AnyArray,
    y: X,
    scale: S,
    bias: B,
    inv_std: AnyArray,
    *,
    axis: Index = -1,
    wanted: Wanted = None,
    out: Outs = None,
) -> tuple[X, S, B]:
    """The gradients of layer norm, computed from its *output*: you need not keep its input.

    As :func:`layer_norm_grad`, but with ``xhat = (y - bias) / scale``. The error of ``xhat`` is
    about ``u * |y| / |scale|``, where u is the unit roundoff of y's dtype.

    Parameters
    ----------
    dy, y : arrays of shape (*rows, *normalised)
        T.
    scale, bias : arrays of shape ``y.shape[axis:]``, or None
        V. No element of ``scale`` may be 0 or subnormal.
    inv_std : array of shape ``y.shape[:axis]``, or that followed by ones
        U, as :func:`layer_norm` returns it.
    axis : int
        The first normalised dimension; all dimensions after it are normalised too.
    wanted : tuple of str, optional
        The results to compute, as in :func:`layer_norm_grad`.
    out : tuple (dx, dscale, dbias), optional
        Where the results are written; ``dx`` may be ``dy``.

    Returns
    -------
    dx : T array of y's shape
    dscale : V array of scale's shape, ``None`` if ``scale`` is ``None``
    dbias : V array of bias's shape, ``None`` if ``bias`` is ``None``

    Raises
    ------
    TypeError
        A combination of dtypes that :func:`layer_norm_grad` does not list.
    ValueError
        Incompatible shapes; an output that overlaps an input; on the
        CPU, a zero or subnormal in ``scale``. Nothing is written. On a GPU results are not finite
        there instead, because a check would wait for the device.

    References
    ----------
    ONNX Runtime's ``InvertibleLayerNormalizationGrad``.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> x, scale, bias = np.array([[1.0, 2.0, 6.0]]), np.array([1.0, 2.0, 1.0]), np.ones(3)
    >>> y, mean, inv_std = gradkit.layer_norm(x, scale, bias)
    >>> dy = np.array([[1.0, 0.0, 0.0]])
    >>> dx, dscale, dbias = gradkit.invertible_layer_norm_grad(dy, y, scale, bias, inv_std)
    >>> dx.round(4)
    array([[ 0.1763, -0.2204,  0.0441]])
    """
    call = rows.InvertibleLayerNormGrad(
        dy=dy,
        y=y,
        scale=scale,
        bias=bias,
        inv_std=inv_std,
        axis=axis,
        wanted=wanted,
    )
    return run(call, out)
