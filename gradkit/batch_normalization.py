"""Batch norm: forward and backward passes, in training mode and by running statistics.

Dtypes are written (T, U, V): T of the data, U of the statistics, V of scale and bias. ``out`` is
as in :mod:`gradkit.layer_normalization`.

In inference (PyTorch's evaluation mode, and fine-tuning with frozen statistics) the statistics are
constants, so no gradient flows through them: :func:`batch_norm_inference` and its gradient are
functions of their own.

With ``group``, the batch is that of all ranks together: each passes its own part, of any size, and
statistics and ``dx`` are those of the whole.
"""

from gradkit._calls import channels, engines
from gradkit._calls.backend import runs
from gradkit._open.dispatch import run
from gradkit._open.foreign import answers
from gradkit._ranks.batches import forward_over_ranks, gradient_over_ranks, run_over_ranks
from gradkit._ranks.groups import OverRanks
from gradkit._typing import AnyArray, Engine, Index, Number, Out, Outs, S, Wanted, X

__all__ = [
    "batch_norm",
    "batch_norm_grad",
    "batch_norm_inference",
    "batch_norm_inference_grad",
    "last_engine",
]


@runs(
    *("batch_norm", "batch_norm_stats", "combine_stats", "batch_norm_apply"),
    "update_running_statistics",
)
@answers
def batch_norm(
    x: X,
    scale: AnyArray | None = None,
    bias: AnyArray | None = None,
    *,
    channel_axis: Index = 1,
    eps: Number = 1e-5,
    running_mean: AnyArray | None = None,
    running_var: AnyArray | None = None,
    momentum: Number = 0.1,
    out: Outs = None,
    engine: Engine | None = None,
    group: OverRanks = None,
) -> tuple[X, X, X]:
    """Batch norm in training mode: ``y = (x - mean) * inv_std * scale + bias``.

    Every channel has its own statistics. Running statistics, which
    :func:`batch_norm_inference` takes, move in place, with n elements per channel::

        running_mean = (1 - momentum) * running_mean + momentum * mean
        running_var  = (1 - momentum) * running_var  + momentum * var * n / (n - 1)

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
    running_mean, running_var : arrays of shape (C,) and one dtype, optional
        Written in place: float16, bfloat16, float32 or float64. A batch without elements leaves
        them as they are. Arrays of JAX and TensorFlow cannot be written:
        :func:`gradkit.jax.batch_norm` returns new ones.
    momentum : float
        The weight of this batch in the running statistics, from 0 to 1. With 0,
        nothing moves; with 1, they become the batch's own mean and unbiased variance, whatever they
        were, NaN too. ``1 / k`` for the k-th batch gives the average over batches. Keras and ONNX
        call ``1 - momentum`` momentum.
    out : tuple (y, mean, inv_std), optional
        Where the results are written; ``y`` may be ``x``.
    engine : {"cudnn", "cudnn-persistent", "native"} or None
        What computes on CuPy arrays: see :func:`batch_norm_grad`.
    group : Group, optional
        Its ranks make this call together, each on its part of the batch, and get the same mean
        and inv_std; see :mod:`gradkit.distributed`. Parts may differ in size, be empty or have
        one element per channel, and differ in dtype. Waits for the device. gradkit's own code
        computes. An error on one of the ranks is an error on all. Running statistics move as by
        the whole batch, to the same bits on all ranks where they were equal.

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
        frameworks; ``running_mean`` without ``running_var``, of another dtype, or never to be
        written.
    ValueError
        Incompatible shapes; ``channel_axis`` out of range; ``eps``
        negative or not finite; ``momentum`` not from 0 to 1, or without running statistics; one
        element per channel, of all ranks together: it has no variance; an output that overlaps an
        input; running statistics that are read-only or share memory; an ``engine`` that does not
        support these arrays or ``group``. Nothing is written.
    RankError
        Another rank of ``group`` failed, or has other channels, another ``eps`` or ``momentum``, or
        other arguments that are ``None``. Nothing is written.
    BackendUnavailableError, CudnnError
        ``engine`` requires a cuDNN that is not installed or does not support the case; or
        cuDNN failed at a case like one that it computed, and running statistics may have moved.

    References
    ----------
    Ioffe, Szegedy: "Batch Normalization", 2015. cuDNN
    ``cudnnBatchNormalizationForwardTraining`` in spatial mode. PyTorch's ``native_batch_norm``
    defines ``momentum``.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> x = np.array([[1.0, 10.0], [3.0, 10.0]])
    >>> y, mean, inv_std = gradkit.batch_norm(x, eps=0.0625)
    >>> mean, inv_std.round(4)
    (array([ 2., 10.]), array([0.9701, 4.    ]))
    >>> running_mean, running_var = np.zeros(2), np.ones(2)
    >>> running = {"running_mean": running_mean, "running_var": running_var}
    >>> y, mean, inv_std = gradkit.batch_norm(x, **running, momentum=0.5)
    >>> running_mean, running_var
    (array([1., 5.]), array([1.5, 0.5]))
    """
    call = channels.BatchNorm(
        x=x,
        scale=scale,
        bias=bias,
        channel_axis=channel_axis,
        eps=eps,
        running_mean=running_mean,
        running_var=running_var,
        momentum=momentum,
        engine=engine,
    )
    return run_over_ranks(call, out, group, forward_over_ranks)


@runs("batch_norm_grad", "batch_norm_grad_sums", "batch_norm_grad_apply")
@answers
def batch_norm_grad(
    dy: AnyArray,
    x: X,
    scale: S,
    mean: AnyArray,
    inv_std: AnyArray,
    *,
    channel_axis: Index = 1,
    wanted: Wanted = None,
    out: Outs = None,
    engine: Engine | None = None,
    group: OverRanks = None,
) -> tuple[X, S, S]:
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
        V. ``None``: no scale.
    mean, inv_std : arrays of shape (C,)
        U, as :func:`batch_norm` returns them.
    channel_axis : int
        The channel axis.
    wanted : tuple of str, optional
        The results to compute, as in :func:`layer_norm_grad`.
    out : tuple (dx, dscale, dbias), optional
        Where the results are written; ``dx`` may be ``dy``.
    engine : {"cudnn", "cudnn-persistent", "native"} or None
        What computes on CuPy arrays. ``None``: cuDNN if it is installed and supports the case,
        gradkit's own kernel otherwise (one warning if cuDNN is missing or fails) and for
        channels-last data, for which cuDNN is slow; :func:`last_engine` names it. ``"native"``:
        gradkit's own kernel. ``"cudnn"``: cuDNN or an error. ``"cudnn-persistent"``: cuDNN's
        ``CUDNN_BATCHNORM_SPATIAL_PERSISTENT``, which may be faster; only for channels-last data
        of 3 or more dimensions, because for channels-first data it sums in scaled integers, and
        large finite values overflow. For NumPy arrays, ``None`` and ``"native"`` are the same; any
        other engine is an error.
    group : Group, optional
        As in :func:`batch_norm`, with the statistics that it returned: ``dx`` is that of the whole
        batch. ``dscale`` and ``dbias`` are the sums over this rank's part alone, to be added up
        over ranks as all other parameters' gradients are.

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
        support these arrays or ``group``. Nothing is written.
    RankError
        Another rank of ``group`` failed, has other channels, or has a ``scale`` where this one has
        none. Nothing is written.
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
    call = channels.BatchNormGrad(
        dy=dy,
        x=x,
        scale=scale,
        mean=mean,
        inv_std=inv_std,
        channel_axis=channel_axis,
        engine=engine,
        wanted=wanted,
    )
    return run_over_ranks(call, out, group, gradient_over_ranks)


@answers
def batch_norm_inference(
    x: X,
    scale: AnyArray | None,
    bias: AnyArray | None,
    mean: AnyArray,
    var: AnyArray,
    *,
    channel_axis: Index = 1,
    eps: Number = 1e-5,
    out: Out = None,
    engine: Engine | None = None,
) -> X:
    """Batch norm by running statistics: ``y = (x - mean) / sqrt(var + eps) * scale + bias``.

    Parameters
    ----------
    x : array of two or more dimensions
        T: float16, bfloat16, float32 or float64, of any layout; perhaps without elements.
    scale, bias : arrays of shape (C,), or None
        V.
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
        Incompatible shapes; ``channel_axis`` out of range; ``eps``
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
    call = channels.BatchNormInference(
        x=x,
        scale=scale,
        bias=bias,
        mean=mean,
        var=var,
        channel_axis=channel_axis,
        eps=eps,
        engine=engine,
    )
    return run(call, out)


@answers
def batch_norm_inference_grad(
    dy: AnyArray,
    x: X,
    scale: S,
    mean: AnyArray,
    var: AnyArray,
    *,
    channel_axis: Index = 1,
    eps: Number = 1e-5,
    wanted: Wanted = None,
    out: Outs = None,
) -> tuple[X, S, S]:
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
        V. ``None``: no scale.
    mean, var : arrays of shape (C,)
        U, as :func:`batch_norm_inference` takes them.
    channel_axis : int
        The channel axis.
    eps : float
        As in :func:`batch_norm_inference`.
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
    call = channels.BatchNormInferenceGrad(
        dy=dy,
        x=x,
        scale=scale,
        mean=mean,
        var=var,
        channel_axis=channel_axis,
        eps=eps,
        wanted=wanted,
    )
    return run(call, out)


def last_engine() -> str | None:
    """The engine that ran the last batch norm of the calling thread, of any kind.

    Returns
    -------
    "cudnn", "native" or None
        ``"native"``: gradkit's own code, for NumPy and CuPy arrays. ``None``: this thread has
        not called :func:`batch_norm`, :func:`batch_norm_inference` or a gradient of one yet.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> y, mean, inv_std = gradkit.batch_norm(np.ones((4, 2)))
    >>> gradkit.last_engine()
    'native'
    """
    return engines.latest()
