"""Layer norm, RMS norm and batch norm: training-mode forward and backward passes.

Layer norms see an array as M rows of D: everything from ``axis`` on is one row, as in ONNX.
Dtypes are written (T, U, V): T of the data, U of the statistics, V of scale and bias.
Statistics and sums are kept in float32 (float64 for float64 data) whatever T is.

Every function takes ``out``: a tuple of arrays for its results, with ``None`` for what is to
be allocated. The data result may be written over the data argument itself (``dx`` over
``dy``, ``y`` over ``x``); any other overlap is an error.
"""

from typing import Any, Literal, TypeAlias

import numpy as np

from gradkit import _checks, _engine
from gradkit._call import Call
from gradkit._dtypes import (
    BATCH_NORM_TYPES,
    LAYER_NORM_TYPES,
    accumulation_name,
    check_combination,
    dtype_named,
)

# What may run batch norm; None chooses.
Engine: TypeAlias = Literal["cudnn", "cudnn-persistent", "native"] | None
_ENGINES = ("cudnn", "cudnn-persistent", "native")

__all__ = [
    "batch_norm",
    "batch_norm_grad",
    "invertible_layer_norm_grad",
    "layer_norm",
    "layer_norm_grad",
    "layer_norm_inverse",
    "rms_norm",
    "rms_norm_grad",
]


def layer_norm(
    x: Any,
    scale: Any = None,
    bias: Any = None,
    *,
    axis: int = -1,
    eps: float = 1e-5,
    out: Any = None,
) -> tuple[Any, Any, Any]:
    """Layer norm: ``y = (x - mean) * inv_std * scale + bias`` with statistics of each row.

    Parameters
    ----------
    x : array of shape (*rows, *normalised)
        T: float16, bfloat16, float32 or float64.
    scale, bias : array of shape ``x.shape[axis:]``, optional
        V: T itself or float32 beside 16-bit data, or 16-bit beside float32 data.
    axis : int
        The first normalised dimension; all after it are normalised too.
    eps : float
        Added to the variance; finite and at least 0.
    out : tuple (y, mean, inv_std), optional
        Where the results are written; ``y`` may be ``x``.

    Returns
    -------
    y : array of x's shape and dtype
    mean, inv_std : float32 (float64 for float64 data) arrays of shape ``x.shape[:axis]``
        ``inv_std = 1 / sqrt(var + eps)``. What the backward pass needs.

    Raises
    ------
    TypeError
        A combination of dtypes that is not listed here; arrays of two frameworks.
    ValueError
        Shapes that do not fit; ``axis`` out of range; ``eps`` negative or not finite; an
        output that overlaps an input. Nothing is written then.

    References
    ----------
    Ba, Kiros, Hinton: "Layer Normalization", 2016. ONNX ``LayerNormalization``.

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
    floor = _checks.epsilon(eps)
    call = Call(x=x, scale=scale, bias=bias)
    first = _checks.axis_index(axis, call["x"].ndim)
    lead, tail = _check_rows(call, "x", first, (), ("scale", "bias"))
    data, statistic, _ = _types(call, ("x",), (), ("scale", "bias"), LAYER_NORM_TYPES)
    outputs = call.outputs(
        out,
        [("y", lead + tail, data), ("mean", lead, statistic), ("inv_std", lead, statistic)],
        reuse=(0, "x"),
    )
    call.backend.layer_norm(call["x"], call["scale"], call["bias"], first, floor, *outputs.natives)
    return _three(outputs.results())


def layer_norm_grad(
    dy: Any,
    x: Any,
    scale: Any,
    mean: Any,
    inv_std: Any,
    *,
    axis: int = -1,
    out: Any = None,
) -> tuple[Any, Any, Any]:
    """The gradients of layer norm from its input.

    With ``xhat = (x - mean) * inv_std`` and ``w = dy * scale``, means taken over a row and
    sums over all rows::

        dx     = inv_std * (w - mean(w) - xhat * mean(w * xhat))
        dscale = sum(dy * xhat)
        dbias  = sum(dy)

    Parameters
    ----------
    dy, x : arrays of shape (*rows, *normalised)
        T. ``dy`` may be a broadcast view.
    scale : array of shape ``x.shape[axis:]``, or None
        V. ``None``: no affine part.
    mean, inv_std : arrays of shape ``x.shape[:axis]``, or that followed by ones
        U, as :func:`layer_norm` returns them.
    axis : int
        The first normalised dimension.
    out : tuple (dx, dscale, dbias), optional
        Where the results are written; ``dx`` may be ``dy``.

    Returns
    -------
    dx : T array of x's shape
    dscale, dbias : V arrays of scale's shape
        ``None`` where ``scale`` is ``None``.

    Raises
    ------
    TypeError
        A combination of dtypes other than (f32, f32, f32), (f64, f64, f64), (f16, f32, f16),
        (f16, f32, f32), (f32, f32, f16), (bf16, f32, bf16), (bf16, f32, f32) and (f32, f32,
        bf16); arrays of two frameworks.
    ValueError
        Shapes that do not fit; an output that overlaps an input. Nothing is written then.

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
    call = Call(dy=dy, x=x, scale=scale, mean=mean, inv_std=inv_std)
    first = _checks.axis_index(axis, call["x"].ndim)
    _, tail = _check_rows(call, "x", first, ("mean", "inv_std"), ("scale",), gradient="dy")
    data, _, parameter = _types(
        call, ("dy", "x"), ("mean", "inv_std"), ("scale",), LAYER_NORM_TYPES
    )
    affine = scale is not None
    outputs = call.outputs(
        out,
        [
            ("dx", call["x"].shape, data),
            ("dscale", tail, parameter) if affine else None,
            ("dbias", tail, parameter) if affine else None,
        ],
        reuse=(0, "dy"),
    )
    call.backend.layer_norm_grad(
        call["dy"],
        call["x"],
        call["scale"],
        call["mean"],
        call["inv_std"],
        first,
        *outputs.natives,
    )
    return _three(outputs.results())


def layer_norm_inverse(
    y: Any,
    scale: Any,
    bias: Any,
    mean: Any,
    inv_std: Any,
    *,
    axis: int = -1,
    out: Any = None,
) -> Any:
    """The input of a layer norm out of its output: ``x = (y - bias) / scale / inv_std + mean``.

    The error is about ``u * |y| / |scale| / inv_std`` with u the rounding of y's dtype: half
    a unit of y's last place, undone.

    Parameters
    ----------
    y : array of shape (*rows, *normalised)
        T.
    scale, bias : arrays of shape ``y.shape[axis:]``, or None
        V. No element of ``scale`` may be 0 or subnormal.
    mean, inv_std : arrays of shape ``y.shape[:axis]``, or that followed by ones
        U.
    axis : int
        The first normalised dimension.
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
        Shapes that do not fit; on the CPU a zero or subnormal in ``scale`` (on a GPU, where
        looking would wait for the device, the result is not finite there).

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
    call = Call(y=y, scale=scale, bias=bias, mean=mean, inv_std=inv_std)
    first = _checks.axis_index(axis, call["y"].ndim)
    _check_rows(call, "y", first, ("mean", "inv_std"), ("scale", "bias"))
    data, _, _ = _types(call, ("y",), ("mean", "inv_std"), ("scale", "bias"), LAYER_NORM_TYPES)
    _check_invertible(call)
    outputs = call.outputs(out, [("x", call["y"].shape, data)], reuse=(0, "y"))
    call.backend.layer_norm_inverse(
        call["y"],
        call["scale"],
        call["bias"],
        call["mean"],
        call["inv_std"],
        first,
        *outputs.natives,
    )
    return outputs.results()[0]


def invertible_layer_norm_grad(
    dy: Any,
    y: Any,
    scale: Any,
    bias: Any,
    inv_std: Any,
    *,
    axis: int = -1,
    out: Any = None,
) -> tuple[Any, Any, Any]:
    """The gradients of layer norm from its *output*, so that its input need not be kept.

    As :func:`layer_norm_grad` with ``xhat = (y - bias) / scale``, whose error is about
    ``u * |y| / |scale|`` with u the rounding of y's dtype.

    Parameters
    ----------
    dy, y : arrays of shape (*rows, *normalised)
        T.
    scale, bias : arrays of shape ``y.shape[axis:]``, or None
        V. No element of ``scale`` may be 0 or subnormal.
    inv_std : array of shape ``y.shape[:axis]``, or that followed by ones
        U, as :func:`layer_norm` returns it.
    axis : int
        The first normalised dimension.
    out : tuple (dx, dscale, dbias), optional
        Where the results are written; ``dx`` may be ``dy``.

    Returns
    -------
    dx : T array of y's shape
    dscale : V array of scale's shape, ``None`` where ``scale`` is ``None``
    dbias : V array of bias's shape, ``None`` where ``bias`` is ``None``

    Raises
    ------
    TypeError
        A combination of dtypes that :func:`layer_norm_grad` does not list.
    ValueError
        Shapes that do not fit; on the CPU a zero or subnormal in ``scale`` (on a GPU, where
        looking would wait for the device, results are not finite there).

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
    call = Call(dy=dy, y=y, scale=scale, bias=bias, inv_std=inv_std)
    first = _checks.axis_index(axis, call["y"].ndim)
    _, tail = _check_rows(call, "y", first, ("inv_std",), ("scale", "bias"), gradient="dy")
    data, _, parameter = _types(
        call, ("dy", "y"), ("inv_std",), ("scale", "bias"), LAYER_NORM_TYPES
    )
    _check_invertible(call)
    outputs = call.outputs(
        out,
        [
            ("dx", call["y"].shape, data),
            None if scale is None else ("dscale", tail, parameter),
            None if bias is None else ("dbias", tail, parameter),
        ],
        reuse=(0, "dy"),
    )
    call.backend.invertible_layer_norm_grad(
        call["dy"],
        call["y"],
        call["scale"],
        call["bias"],
        call["inv_std"],
        first,
        *outputs.natives,
    )
    return _three(outputs.results())


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
        The first normalised dimension.
    eps : float
        Finite and at least 0.
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
    floor = _checks.epsilon(eps)
    call = Call(x=x, scale=scale)
    first = _checks.axis_index(axis, call["x"].ndim)
    lead, tail = _check_rows(call, "x", first, (), ("scale",))
    data, statistic, _ = _types(call, ("x",), (), ("scale",), LAYER_NORM_TYPES)
    outputs = call.outputs(
        out, [("y", lead + tail, data), ("inv_std", lead, statistic)], reuse=(0, "x")
    )
    call.backend.rms_norm(call["x"], call["scale"], first, floor, *outputs.natives)
    y, inv_std = outputs.results()
    return y, inv_std


def rms_norm_grad(
    dy: Any, x: Any, scale: Any, inv_std: Any, *, axis: int = -1, out: Any = None
) -> tuple[Any, Any]:
    """The gradients of RMS norm: no mean, no bias.

    With ``xhat = x * inv_std`` and ``w = dy * scale``::

        dx     = inv_std * (w - xhat * mean(w * xhat))
        dscale = sum(dy * xhat)

    Parameters
    ----------
    dy, x : arrays of shape (*rows, *normalised)
        T. ``dy`` may be a broadcast view.
    scale : array of shape ``x.shape[axis:]``, or None
        V.
    inv_std : array of shape ``x.shape[:axis]``, or that followed by ones
        U, as :func:`rms_norm` returns it.
    axis : int
        The first normalised dimension.
    out : tuple (dx, dscale), optional
        Where the results are written; ``dx`` may be ``dy``.

    Returns
    -------
    dx : T array of x's shape
    dscale : V array of scale's shape, ``None`` where ``scale`` is ``None``

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
    call = Call(dy=dy, x=x, scale=scale, inv_std=inv_std)
    first = _checks.axis_index(axis, call["x"].ndim)
    _, tail = _check_rows(call, "x", first, ("inv_std",), ("scale",), gradient="dy")
    data, _, parameter = _types(call, ("dy", "x"), ("inv_std",), ("scale",), LAYER_NORM_TYPES)
    outputs = call.outputs(
        out,
        [
            ("dx", call["x"].shape, data),
            None if scale is None else ("dscale", tail, parameter),
        ],
        reuse=(0, "dy"),
    )
    call.backend.rms_norm_grad(
        call["dy"], call["x"], call["scale"], call["inv_std"], first, *outputs.natives
    )
    dx, dscale = outputs.results()
    return dx, dscale


def batch_norm(
    x: Any,
    scale: Any = None,
    bias: Any = None,
    *,
    channel_axis: int = 1,
    eps: float = 1e-5,
    out: Any = None,
    engine: Engine = None,
) -> tuple[Any, Any, Any]:
    """Batch norm in training mode: ``y = (x - mean) * inv_std * scale + bias`` by channel.

    Parameters
    ----------
    x : array of two or more dimensions
        T: float16, bfloat16, float32 or float64. Channels-last arrays and channels-last
        strides are as welcome as channels-first.
    scale, bias : arrays of shape (C,), optional
        V.
    channel_axis : int
        Where the C channels are; every other axis is summed over.
    eps : float
        Added to the (biased) variance; finite and at least 0.
    out : tuple (y, mean, inv_std), optional
        Where the results are written; ``y`` may be ``x``.
    engine : {"cudnn", "cudnn-persistent", "native"} or None
        What computes on CuPy arrays; see :func:`batch_norm_grad`.

    Returns
    -------
    y : array of x's shape and dtype
    mean, inv_std : arrays of shape (C,)
        float32 (float64 for float64 data); 16-bit where ``out`` has such arrays.
        A batch of no elements has mean 0 and variance 0.

    Raises
    ------
    TypeError
        A combination of dtypes that :func:`batch_norm_grad` does not list.
    ValueError
        Shapes that do not fit; ``channel_axis`` out of range; ``eps`` negative or not finite;
        an output that overlaps an input; an ``engine`` that these arrays do not have. Nothing
        is written then.
    BackendUnavailableError, CudnnError
        ``engine`` insists on a cuDNN that is not installed, or that does not take the case.

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
    floor = _checks.epsilon(eps)
    call = Call(x=x, scale=scale, bias=bias)
    _check_engine(call, engine)
    channel, count = _check_channels(call, channel_axis, ("scale", "bias"))
    data, statistic, _ = _types(
        call, ("x",), (), ("scale", "bias"), BATCH_NORM_TYPES, out=_second(out)
    )
    outputs = call.outputs(
        out,
        [
            ("y", call["x"].shape, data),
            ("mean", (count,), statistic),
            ("inv_std", (count,), statistic),
        ],
        reuse=(0, "x"),
        laid_out=(0, "x"),
    )
    _engine.ran("native")  # unless the backend says otherwise
    call.backend.batch_norm(
        call["x"], call["scale"], call["bias"], channel, floor, *outputs.natives, engine
    )
    return _three(outputs.results())


def batch_norm_grad(
    dy: Any,
    x: Any,
    scale: Any,
    mean: Any,
    inv_std: Any,
    *,
    channel_axis: int = 1,
    out: Any = None,
    engine: Engine = None,
) -> tuple[Any, Any, Any]:
    """The gradients of batch norm in training mode, from saved statistics.

    With ``xhat = (x - mean) * inv_std`` and n elements a channel::

        dscale = sum(dy * xhat)
        dbias  = sum(dy)
        dx     = inv_std * scale * (dy - dbias / n - xhat * dscale / n)

    Parameters
    ----------
    dy, x : arrays of two or more dimensions and the same shape
        T. Their memory layouts may differ.
    scale : array of shape (C,), or None
        V. ``None``: no affine part.
    mean, inv_std : arrays of shape (C,)
        U, as :func:`batch_norm` returns them.
    channel_axis : int
        Where the C channels are.
    out : tuple (dx, dscale, dbias), optional
        Where the results are written; ``dx`` may be ``dy``.
    engine : {"cudnn", "cudnn-persistent", "native"} or None
        What computes on CuPy arrays. ``None``: cuDNN where it is installed and takes the case,
        gradkit's own kernel otherwise (a missing cuDNN is warned of once);
        :func:`last_engine` tells which. ``"native"``: gradkit's own kernel. ``"cudnn"``: cuDNN
        or an error. ``"cudnn-persistent"``: cuDNN's ``CUDNN_BATCHNORM_SPATIAL_PERSISTENT``,
        which may be faster, on channels-last data of 3 or more dimensions alone: channels
        first it sums in scaled integers, and large finite values overflow. NumPy arrays take
        ``None`` and ``"native"``, which are the same there.

    Returns
    -------
    dx : T array of x's shape
    dscale, dbias : V arrays of shape (C,)
        ``None`` where ``scale`` is ``None``.

    Raises
    ------
    TypeError
        A combination of dtypes other than (f32, f32, f32), (f64, f64, f64), (f16, f16, f16),
        (f16, f32, f16), (f16, f32, f32), (bf16, f32, bf16), (bf16, f32, f32) and (bf16, bf16,
        bf16); arrays of two frameworks.
    ValueError
        Shapes that do not fit; an output that overlaps an input; an ``engine`` that these
        arrays do not have. Nothing is written then.
    BackendUnavailableError, CudnnError
        ``engine`` insists on a cuDNN that is not installed, or that does not take the case.

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
    call = Call(dy=dy, x=x, scale=scale, mean=mean, inv_std=inv_std)
    _check_engine(call, engine)
    channel, count = _check_channels(call, channel_axis, ("scale", "mean", "inv_std"))
    _checks.shape(call["dy"], call["x"].shape, "dy", "the shape of x")
    data, _, parameter = _types(
        call, ("dy", "x"), ("mean", "inv_std"), ("scale",), BATCH_NORM_TYPES
    )
    affine = scale is not None
    outputs = call.outputs(
        out,
        [
            ("dx", call["x"].shape, data),
            ("dscale", (count,), parameter) if affine else None,
            ("dbias", (count,), parameter) if affine else None,
        ],
        reuse=(0, "dy"),
        laid_out=(0, "x"),
    )
    _engine.ran("native")  # unless the backend says otherwise
    call.backend.batch_norm_grad(
        call["dy"],
        call["x"],
        call["scale"],
        call["mean"],
        call["inv_std"],
        channel,
        *outputs.natives,
        engine,
    )
    return _three(outputs.results())


def _check_rows(
    call: Call,
    data: str,
    first: int,
    statistics: tuple[str, ...],
    parameters: tuple[str, ...],
    *,
    gradient: str | None = None,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Check shapes against M rows of D; the shapes of the rows and of what is normalised."""
    whole = call[data].shape
    lead, tail = whole[:first], whole[first:]
    if gradient is not None:
        _checks.shape(call[gradient], whole, gradient, f"the shape of {data}")
    for label in statistics:
        if call[label].shape not in (lead, lead + (1,) * len(tail)):
            _checks.shape(call[label], lead, label, f"one number a row of {data} (ones may follow)")
    for label in parameters:
        if call[label] is not None:
            _checks.shape(call[label], tail, label, f"the normalised dimensions of {data}")
    return lead, tail


def _check_engine(call: Call, engine: str | None) -> None:
    """A word of ours, and cuDNN only for arrays that it can have."""
    if engine is None:
        return
    _checks.choice(engine, "engine", _ENGINES)
    if engine != "native" and isinstance(call["x"], np.ndarray):
        raise ValueError(f"engine={engine!r} computes on CuPy arrays; NumPy takes None or 'native'")


def _check_channels(call: Call, channel_axis: int, vectors: tuple[str, ...]) -> tuple[int, int]:
    """The channel axis as an index and how many channels there are, once vectors fit them."""
    whole = call["x"].shape
    if len(whole) < 2:
        raise ValueError(f"x has shape {whole}; batch norm needs a batch and a channel axis")
    channel = _checks.axis_index(channel_axis, len(whole), "channel_axis")
    for label in vectors:
        if call[label] is not None:
            _checks.shape(call[label], (whole[channel],), label, "one number a channel of x")
    return channel, whole[channel]


def _types(
    call: Call,
    data: tuple[str, ...],
    statistics: tuple[str, ...],
    parameters: tuple[str, ...],
    table: tuple[tuple[str, str, str], ...],
    *,
    out: Any = None,
) -> tuple[str, str, str]:
    """(T, U, V) of a call, where an absent U or V is whatever goes with the rest."""
    t = call.dtype(*data)
    assert t is not None  # the data is always there
    u = call.dtype(*statistics) if statistics else None
    if u is None and out is not None:
        u = _checks.floating(call.view(out, "out[1]", write=True), "out[1]")
    u = u or accumulation_name(t)
    v = call.dtype(*parameters)
    if v is None:
        v = next((row[2] for row in table if row[:2] == (t, u)), t)
    roles = f"({', '.join(data)}; {', '.join(statistics) or 'statistics'}; {', '.join(parameters)})"
    check_combination((t, u, v), table, roles)
    return t, u, v


def _check_invertible(call: Call) -> None:
    """On the host, refuse a scale that cannot be divided by."""
    scale = call["scale"]
    if not isinstance(scale, np.ndarray):
        return
    wide = dtype_named(accumulation_name(str(scale.dtype)))
    bad = np.flatnonzero(np.abs(scale.astype(wide)) < np.finfo(wide).smallest_normal)
    if bad.size:
        raise ValueError(
            f"scale is zero or subnormal at flat index {bad[0]} ({bad.size} in all), so that the "
            "norm cannot be inverted; use layer_norm_grad, which reads x"
        )


def _second(out: Any) -> Any:
    return out[1] if isinstance(out, tuple) and len(out) == 3 else None


def _three(results: tuple[Any, ...]) -> tuple[Any, Any, Any]:
    first, second, third = results
    return first, second, third
