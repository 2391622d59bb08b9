"""Batch norm: forward and backward passes in training mode.

:mod:`gradkit.inference_batch_normalization` has those by running statistics.

Dtypes are written (T, U, V): T of the data, U of the statistics, V of scale and bias. ``out`` is
as in :mod:`gradkit.layer_normalization`.

With ``group``, the batch is that of all ranks together: each passes its own part, of any size, and
statistics and ``dx`` are those of the whole. :mod:`gradkit.split_batch_normalization` has the
steps by themselves, for other ways to communicate.
"""

from typing import Any

import numpy as np

from gradkit._backend import Engine
from gradkit._calls import checks
from gradkit._calls.backend import runs
from gradkit._open import engines
from gradkit._open.batch_norms import plan_forward, plan_gradient, statistic_of
from gradkit._open.batch_of_ranks import stats_of_ranks, sums_of_ranks
from gradkit._open.call import Call
from gradkit._open.foreign import answers
from gradkit._open.meeting import Meeting
from gradkit._open.norms import Channels, Forward, Gradient
from gradkit._open.outputs import Outputs
from gradkit._open.running import Moved, check_elements, moved_of, weight_of
from gradkit.distributed import Group

__all__ = ["batch_norm", "batch_norm_grad", "last_engine"]


@runs("batch_norm", "batch_norm_stats", "batch_norm_apply", "update_running_statistics")
@answers
def batch_norm(
    x: Any,
    scale: Any = None,
    bias: Any = None,
    *,
    channel_axis: int = 1,
    eps: float = 1e-5,
    running_mean: Any = None,
    running_var: Any = None,
    momentum: float = 0.1,
    out: Any = None,
    engine: Engine | None = None,
    group: Group | None = None,
) -> tuple[Any, Any, Any]:
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
        V, as in :func:`batch_norm_grad`. With a bias alone, pass ones as ``scale``.
    channel_axis : int
        The channel axis; statistics are over all other axes.
    eps : float
        Added to the biased variance; finite and at least 0.
    running_mean, running_var : arrays of shape (C,) and one dtype, optional
        Written in place: float16, bfloat16, float32 or float64. A batch without elements leaves
        them as they are. Arrays of JAX and TensorFlow cannot be written:
        :func:`update_running_statistics` returns new ones.
    momentum : float
        From 0 to 1: the weight of this batch. With 0, nothing moves; with 1, they become the
        batch's own mean and unbiased variance, whatever they were, NaN too. ``1 / k`` for the k-th
        batch gives the average over batches. Keras and ONNX call ``1 - momentum`` momentum.
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
        Incompatible shapes; ``bias`` without ``scale``; ``channel_axis`` out of range; ``eps``
        negative or not finite; ``momentum`` not from 0 to 1; an output that overlaps an input;
        running statistics that are read-only or share memory, or one element per channel (of all
        ranks) to move them by; an ``engine`` that does not support these arrays or ``group``.
        Nothing is written.
    RankError
        Another rank of ``group`` failed, or has other channels or another ``eps``. Nothing is
        written.
    BackendUnavailableError, CudnnError
        ``engine`` requires a cuDNN that is not installed or does not support the case.

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
    with Meeting(group) as meeting:
        floor, weight = checks.epsilon(eps), weight_of(momentum)
        call = Call(Forward(x, scale, bias))
        plan = plan_forward(call.arrays, channel_axis, statistic_of(call.view, out))
        engines.check(call.arrays.x, engine, alone=meeting.alone)
        with call.on_stream():
            outputs = call.outputs(out, plan.outputs, reuse=call.arrays.x)
            shape, views = Channels(call.arrays.x, plan.axis).shape, outputs.views
            moved = moved_of(call, running_mean, running_var, weight, shape, views)
            if meeting.alone:
                _forward(call, plan.axis, floor, outputs, engine, moved)
            else:
                _forward_over_ranks(call, plan.axis, floor, outputs, meeting, moved)
            if moved is not None:
                moved.done()
            y, mean, inv_std = outputs.results()
            return y, mean, inv_std


@runs("batch_norm_grad", "batch_norm_grad_sums", "batch_norm_grad_apply")
@answers
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
    group: Group | None = None,
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
        Another rank of ``group`` failed, or has other channels. Nothing is written.
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
    with Meeting(group) as meeting:
        call = Call(Gradient(dy, x, mean, inv_std, scale))
        plan = plan_gradient(call.arrays, channel_axis)
        engines.check(call.arrays.x, engine, alone=meeting.alone)
        with call.on_stream():
            outputs = call.outputs(out, plan.outputs, reuse=call.arrays.dy)
            if meeting.alone:
                _gradient(call, plan.axis, outputs, engine)
            else:
                _gradient_over_ranks(call, plan.axis, outputs, meeting)
            dx, dscale, dbias = outputs.results()
            return dx, dscale, dbias


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


def _forward(
    call: Call[Forward],
    axis: int,
    eps: float,
    outputs: Outputs,
    engine: Engine | None,
    moved: Moved | None,
) -> None:
    given, (y, mean, inv_std) = call.arrays, outputs.views
    if moved is not None:
        check_elements(Channels(given.x, axis).size, "x has one element per channel")
    running = None if moved is None else moved.running
    ran = call.backend.batch_norm(
        given.x, given.scale, given.bias, axis, eps, y, mean, inv_std, engine, running
    )
    engines.ran(ran)


def _forward_over_ranks(
    call: Call[Forward],
    axis: int,
    eps: float,
    outputs: Outputs,
    meeting: Meeting,
    moved: Moved | None,
) -> None:
    given, (y, saved_mean, inv_std) = call.arrays, outputs.views
    mean, var, count = stats_of_ranks(call, axis, eps, meeting)
    if moved is not None:
        check_elements(count, "x has one element per channel on all ranks together")
    call.backend.batch_norm_apply(
        given.x, given.scale, given.bias, mean, var, axis, eps, y, saved_mean, inv_std
    )
    if moved is not None:
        known, next_mean, next_var = (mean, var, count), *moved.outputs.views
        momentum = moved.running.momentum
        call.backend.update_running_statistics(
            next_mean, next_var, *known, momentum, next_mean, next_var
        )
    engines.ran("native")


def _gradient(call: Call[Gradient], axis: int, outputs: Outputs, engine: Engine | None) -> None:
    dy, x, mean, inv_std, scale = call.arrays
    dx, dscale, dbias = outputs.views
    engines.ran(
        call.backend.batch_norm_grad(dy, x, scale, mean, inv_std, axis, dx, dscale, dbias, engine)
    )


def _gradient_over_ranks(
    call: Call[Gradient], axis: int, outputs: Outputs, meeting: Meeting
) -> None:
    """Write nothing before all have met: ``own`` holds what becomes dscale and dbias."""
    dy, x, mean, inv_std, scale = call.arrays
    dx, *parameters = outputs.views
    backend = call.backend
    own = backend.empty((2, x.shape[axis]), np.dtype(np.float64))
    backend.batch_norm_grad_sums(dy, x, mean, inv_std, axis, own[0], own[1])
    sums, count = sums_of_ranks(call, axis, own, meeting)
    backend.batch_norm_grad_apply(dy, x, scale, mean, inv_std, sums[0], sums[1], count, axis, dx)
    for row, gradient in enumerate(parameters):
        if gradient is not None:
            gradient[...] = own[row]
    engines.ran("native")
