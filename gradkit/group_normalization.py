"""Group norm and instance norm: forward and backward passes.

An array is N samples of C channels; ``num_groups`` groups of C / num_groups adjacent channels have
statistics of their own in each sample. One channel a group makes an instance norm; one group is a
layer norm over channels and space. Dtypes are written (T, U, V): T of the data, U of the
statistics, V of scale and bias. Statistics and sums are float32 for 16-bit and 32-bit data,
float64 for float64 data. ``out`` is as in :mod:`gradkit.layer_normalization`.
"""

from gradkit._calls.channels import GroupNorm, GroupNormGrad
from gradkit._open.dispatch import run
from gradkit._open.foreign import answers
from gradkit._typing import AnyArray, Index, Number, Outs, S, Wanted, X

__all__ = ["group_norm", "group_norm_grad"]


@answers
def group_norm(
    x: X,
    num_groups: Index,
    scale: AnyArray | None = None,
    bias: AnyArray | None = None,
    *,
    channel_axis: Index = 1,
    eps: Number = 1e-5,
    out: Outs = None,
) -> tuple[X, X, X]:
    """Group norm: ``y = (x - mean) * inv_std * scale + bias`` with each group's statistics.

    With ``num_groups`` equal to the number of channels it is an instance norm.

    Parameters
    ----------
    x : array of two or more dimensions, samples first
        T: float16, bfloat16, float32 or float64. Channels-first and channels-last, by axis or
        by strides: both supported.
    num_groups : int
        Divides the number of channels.
    scale, bias : arrays of shape (C,), optional
        V, as in :func:`group_norm_grad`: one number per channel, as in ONNX from opset 21 on.
    channel_axis : int
        The channel axis, any but the first. Statistics are over the channels of a group and over
        all axes but the first.
    eps : float
        Added to the variance; finite and at least 0.
    out : tuple (y, mean, inv_std), optional
        Where the results are written; ``y`` may be ``x``.

    Returns
    -------
    y : array of x's shape and dtype
    mean, inv_std : float32 (float64 for float64 data) arrays of shape (N, num_groups)
        ``inv_std = 1 / sqrt(var + eps)``. The backward pass needs both. A group without elements
        has mean 0 and variance 0.

    Raises
    ------
    TypeError
        A combination of dtypes that :func:`group_norm_grad` does not list; arrays of two
        frameworks.
    ValueError
        Incompatible shapes; ``num_groups`` that does not divide the
        channels; ``channel_axis`` 0 or out of range; ``eps`` negative or not finite; an output that
        overlaps an input. Nothing is written.

    References
    ----------
    Wu, He: "Group Normalization", 2018. Ulyanov, Vedaldi, Lempitsky: "Instance Normalization",
    2016. ONNX ``GroupNormalization`` and ``InstanceNormalization``.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> x = np.array([[1.0, 3.0, 5.0, 5.0]])
    >>> y, mean, inv_std = gradkit.group_norm(x, 2, eps=0.25)
    >>> mean, inv_std
    (array([[2., 5.]]), array([[0.89442719, 2.        ]]))
    >>> y.round(3)
    array([[-0.894,  0.894,  0.   ,  0.   ]])
    """
    call = GroupNorm(
        x=x, num_groups=num_groups, scale=scale, bias=bias, channel_axis=channel_axis, eps=eps
    )
    return run(call, out)


@answers
def group_norm_grad(
    dy: AnyArray,
    x: X,
    scale: S,
    mean: AnyArray,
    inv_std: AnyArray,
    *,
    channel_axis: Index = 1,
    wanted: Wanted = None,
    out: Outs = None,
) -> tuple[X, S, S]:
    """The gradients of group norm, from saved statistics.

    With ``xhat = (x - mean) * inv_std``, ``w = dy * scale`` and mean() over each group::

        dx     = inv_std * (w - mean(w) - xhat * mean(w * xhat))
        dscale = sum(dy * xhat)
        dbias  = sum(dy)

    The mean is subtracted from every element before it is multiplied, so that nothing cancels if
    the mean is much larger than the standard deviation.

    Parameters
    ----------
    dy, x : arrays of two or more dimensions and the same shape, samples first
        T. Their memory layouts may differ.
    scale : array of shape (C,), or None
        V. ``None``: no scale.
    mean, inv_std : arrays of shape (N, groups)
        U, as :func:`group_norm` returns them. Their shape says how many groups there are.
    channel_axis : int
        The channel axis, any but the first.
    wanted : tuple of str, optional
        The results to compute, as in :func:`layer_norm_grad`.
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
        A combination of dtypes other than (f32, f32, f32), (f64, f64, f64), (f16, f32, f16),
        (f16, f32, f32), (f32, f32, f16), (bf16, f32, bf16), (bf16, f32, f32) and (f32, f32,
        bf16); arrays of two frameworks.
    ValueError
        Incompatible shapes; groups that do not divide the channels; an output that overlaps an
        input. Nothing is written.

    References
    ----------
    Wu, He: "Group Normalization", 2018. PyTorch's ``native_group_norm_backward``.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> x, scale = np.array([[1.0, 2.0, 6.0]]), np.array([1.0, 2.0, 1.0])
    >>> y, mean, inv_std = gradkit.group_norm(x, 1, scale)
    >>> dy = np.array([[1.0, 0.0, 0.0]])
    >>> dx, dscale, dbias = gradkit.group_norm_grad(dy, x, scale, mean, inv_std)
    >>> dx.round(4)
    array([[ 0.1763, -0.2204,  0.0441]])
    >>> dbias
    array([1., 0., 0.])
    """
    call = GroupNormGrad(
        dy=dy,
        x=x,
        scale=scale,
        mean=mean,
        inv_std=inv_std,
        channel_axis=channel_axis,
        wanted=wanted,
    )
    return run(call, out)
