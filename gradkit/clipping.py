"""Gradient norms and clipping.

Gradients come as one array, as any iterable of arrays (a generator too), or as nested dicts,
lists and tuples of them; ``None`` leaves are skipped. Their dtypes (float16, bfloat16,
float32, float64) may be mixed.

Norms are float64 whatever the gradients are, and neither squares nor sums of them over- or
underflow on the way.
"""

import math
from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

import numpy as np

from gradkit import _checks, _tree
from gradkit._arrays import HOST, beside, framework_of, is_array
from gradkit._call import Call, Outputs
from gradkit._gradients import Gradients
from gradkit.distributed import Reduce
from gradkit.errors import NonFiniteNormError

__all__ = [
    "clip_by_global_norm",
    "clip_coefficient",
    "clip_grad_norm",
    "clip_grad_value",
    "grad_norm",
    "grads_of",
    "scale_grads",
]

NonFinite: TypeAlias = Literal["propagate", "raise", "zero"]
_POLICIES = ("propagate", "raise", "zero")


def grad_norm(
    grads: Any,
    norm_type: float = 2.0,
    *,
    per_tensor: bool = False,
    nonfinite: NonFinite = "propagate",
    reduce: Reduce | None = None,
    out: Any = None,
) -> Any:
    """The p-norm of all gradients taken together as one vector.

    ``(sum |g|^p)^(1/p)``, or ``max |g|`` for infinity.

    Parameters
    ----------
    grads : array, or iterable or nested dict/list/tuple of arrays
        Of any shapes, float16, bfloat16, float32 or float64, mixed as they come. Only read.
    norm_type : float
        p, any real number above 0, or infinity.
    per_tensor : bool
        Return one norm a gradient instead: a 1-D array in the order of the gradients.
    nonfinite : {"propagate", "raise", "zero"}
        What a NaN or infinite norm does: comes back as it is; raises (which waits for the
        device); comes back as it is too ("zero" concerns only those who clip).
    reduce : callable, optional
        Combines the norm over ranks; see :class:`gradkit.distributed.Reduce`.
    out : float64 array, optional
        Where the norm is written: 0-d, or of one element a gradient.

    Returns
    -------
    0-d float64 array on the gradients' device, of the gradients' type
        0 without gradients. On the CPU, float16, bfloat16 and float32 gradients are added up
        in float32 for 256 elements at a time: the relative error stays below ``2**-23``.

    Raises
    ------
    TypeError
        A leaf that is not a floating-point array, or arrays of two frameworks; a
        ``per_tensor`` that is no bool.
    ValueError
        A ``norm_type`` that is NaN or not above 0.
    NonFiniteNormError
        With ``nonfinite="raise"``; names the gradients.

    References
    ----------
    ``grad_norm`` of lucid's ``nn.util``; ``torch.nn.utils.get_total_norm``.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> grads = {"w": np.array([3.0, 0.0]), "b": np.array([4.0]), "unused": None}
    >>> gradkit.grad_norm(grads)
    array(5.)
    >>> gradkit.grad_norm(grads, norm_type=np.inf)
    array(4.)
    >>> gradkit.grad_norm(grads, per_tensor=True)
    array([3., 4.])
    """
    order = _checks.norm_order(norm_type)
    policy = _checks.choice(nonfinite, "nonfinite", _POLICIES)
    each = _checks.flag(per_tensor, "per_tensor")
    group = Gradients(grads, write=False)
    with group.running():
        return _norm(group, order, policy, reduce, out, per_tensor=each).results()[0]


def clip_grad_norm(
    grads: Any,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    eps: float = 1e-6,
    nonfinite: NonFinite = "propagate",
    reduce: Reduce | None = None,
    out: Any = None,
) -> Any:
    """Scale all gradients in place so that their common norm is at most ``max_norm``.

    Each becomes ``g * min(1, max_norm / max(norm, eps))`` with the coefficient in float64.
    Gradients whose norm does not exceed ``max_norm`` keep every bit.

    Parameters
    ----------
    grads : array, or iterable or nested dict/list/tuple of arrays
        **Written in place.** Strided and negative-stride views too.
    max_norm : float
        At least 0; infinity changes nothing.
    norm_type : float
        p of the norm, any real number above 0, or infinity.
    eps : float
        The norm counts as at least this when dividing by it.
    nonfinite : {"propagate", "raise", "zero"}
        What a NaN or infinite norm does. "propagate", as PyTorch: a NaN norm makes every
        gradient NaN, an infinite one makes finite gradients 0. "raise": an error that names
        the gradients, and nothing is written (this waits for the device). "zero": every
        gradient becomes 0, decided on the device.
    reduce : callable, optional
        Combines the norm over ranks; see :class:`gradkit.distributed.Reduce`.
    out : 0-d float64 array, optional
        Where the norm is written.

    Returns
    -------
    0-d float64 array on the gradients' device, of the gradients' type
        The norm before clipping.

    Raises
    ------
    TypeError
        A leaf that is not a floating-point array, or arrays of two frameworks.
    ValueError
        ``max_norm`` negative or NaN; a gradient that is read-only, overlaps itself, or
        shares memory with another. Nothing is written then.
    NonFiniteNormError
        With ``nonfinite="raise"``; nothing is written.

    References
    ----------
    Pascanu, Mikolov, Bengio: "On the difficulty of training recurrent neural networks",
    2013. ONNX Runtime's ``InplaceClipGradNorm``; ``torch.nn.utils.clip_grad_norm_``.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> grads = [np.array([3.0, 0.0]), np.array([4.0])]
    >>> gradkit.clip_grad_norm(grads, max_norm=1.0)
    array(5.)
    >>> grads
    [array([0.6, 0. ]), array([0.8])]
    """
    limit, order, floor, policy = _clip_arguments(max_norm, norm_type, eps, nonfinite)
    instead = "use clip_by_global_norm, which returns new gradients"
    group = Gradients(grads, write=True, instead=instead)
    with group.running():
        norm = _norm(group, order, policy, reduce, out)
        _clip(group, norm.natives[0], group.natives, limit, floor, policy)
        group.wrote()
        return norm.results()[0]


def clip_by_global_norm(
    grads: Any,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    eps: float = 1e-6,
    nonfinite: NonFinite = "propagate",
    reduce: Reduce | None = None,
    out: Any = None,
) -> tuple[Any, Any]:
    """The gradients scaled to a common norm of at most ``max_norm``; inputs are never written.

    The functional twin of :func:`clip_grad_norm`, with the same coefficient and errors.

    Parameters
    ----------
    grads : array, or iterable or nested dict/list/tuple of arrays
        Only read. The same array may stand in it more than once.
    max_norm, norm_type, eps, nonfinite, reduce
        As in :func:`clip_grad_norm`.
    out : tuple (clipped, norm), optional
        ``clipped`` is a container of the same structure as ``grads`` whose arrays have the
        same shapes and dtypes, ``norm`` a 0-d float64 array; either may be ``None``.

    Returns
    -------
    clipped : container of the same structure
        New arrays of the gradients' type, shapes and dtypes; a generator gives a list, and
        ``None`` stays ``None``.
    norm : 0-d float64 array
        The norm before clipping.

    References
    ----------
    ``optax.clip_by_global_norm``; ONNX Runtime's ``InplaceClipGradNorm``, which copies where
    it may not write.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> grads = {"w": np.array([3.0, 0.0]), "b": np.array([4.0])}
    >>> gradkit.clip_by_global_norm(grads, max_norm=1.0)
    ({'w': array([0.6, 0. ]), 'b': array([0.8])}, array(5.))
    >>> grads["b"]
    array([4.])
    """
    limit, order, floor, policy = _clip_arguments(max_norm, norm_type, eps, nonfinite)
    group = Gradients(grads, write=False)
    clipped_out, norm_out = _pair(out)
    with group.running():
        clipped = _twins(group, clipped_out)
        apart = [(f"out[0], gradient {i}", native) for i, native in enumerate(clipped.natives)]
        norm = _norm(group, order, policy, reduce, norm_out, apart=apart)
        _clip(group, norm.natives[0], clipped.natives, limit, floor, policy)
        results = clipped.results()
        tree = group.rebuilt(results) if clipped_out is None else clipped_out
        return tree, norm.results()[0]


def clip_coefficient(norm: Any, max_norm: float, *, eps: float = 1e-6, out: Any = None) -> Any:
    """What gradients of a given norm are multiplied by: ``min(1, max_norm / max(norm, eps))``.

    For an optimiser that folds the coefficient into its own step instead of scaling the
    gradients in memory. Exactly 1 where ``norm <= max_norm``; NaN for a NaN norm.

    Parameters
    ----------
    norm : float or float64 array
        As :func:`grad_norm` returns it; of any shape, element by element.
    max_norm, eps : float
        At least 0.
    out : float64 array of norm's shape, optional
        Where the coefficient is written.

    Returns
    -------
    float64 array of norm's shape
        On norm's device; nothing waits for the device.

    Raises
    ------
    TypeError, ValueError
        ``norm`` not float64; ``max_norm`` or ``eps`` negative or NaN.

    Examples
    --------
    >>> import gradkit
    >>> gradkit.clip_coefficient(5.0, 1.0)
    array(0.2)
    """
    limit, floor = _checks.nonnegative(max_norm, "max_norm"), _checks.epsilon(eps)
    call = Call(norm=norm if is_array(norm) else np.float64(_checks.real(norm, "norm")))
    call.expect_dtype("norm", call.framework.widest())
    with call.running():
        coefficient = call.outputs(out, [("the coefficient", call["norm"].shape, "float64")])
        norms = call.backend.as_float64(call["norm"])
        call.backend.clip_coefficient(norms, limit, floor, coefficient.natives[0])
        return coefficient.results()[0]


def scale_grads(grads: Any, coefficient: Any) -> Any:
    """Multiply every gradient in place by one coefficient, rounding once.

    Parameters
    ----------
    grads : array, or iterable or nested dict/list/tuple of arrays
        **Written in place.**
    coefficient : float, or 0-d float64 array
        An array on the gradients' device is read there, without waiting for the device. 1
        keeps every bit.

    Returns
    -------
    grads
        The caller's own object (a list for a one-shot iterable).

    Raises
    ------
    TypeError, ValueError
        As :func:`clip_grad_norm`; a coefficient that is not one number.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> grads = [np.array([2.0, -4.0])]
    >>> gradkit.scale_grads(grads, 0.5)
    [array([ 1., -2.])]
    """
    instead = "compute coefficient * g for each gradient g"
    group = Gradients(grads, write=True, instead=instead)
    with group.running():
        factor = _factor(group, coefficient)
        group.backend.scale_grads(group.natives, factor, group.natives)
    group.wrote()
    return group.returned(grads)


def clip_grad_value(grads: Any, clip_value: float) -> Any:
    """Clamp every element of every gradient in place to ``[-clip_value, clip_value]``.

    Parameters
    ----------
    grads : array, or iterable or nested dict/list/tuple of arrays
        **Written in place.** NaN stays NaN.
    clip_value : float
        At least 0; rounded to each gradient's dtype.

    Returns
    -------
    grads
        The caller's own object (a list for a one-shot iterable).

    Raises
    ------
    TypeError, ValueError
        As :func:`clip_grad_norm`; ``clip_value`` negative or NaN.

    References
    ----------
    ``torch.nn.utils.clip_grad_value_``; ``optax.clip``.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> gradkit.clip_grad_value(np.array([-3.0, 0.5, 2.0]), 1.0)
    array([-1. ,  0.5,  1. ])
    """
    limit = _checks.nonnegative(clip_value, "clip_value")
    instead = "use its own clip(g, -clip_value, clip_value) for each gradient g"
    group = Gradients(grads, write=True, instead=instead)
    with group.running():
        group.backend.clip_grad_value(group.natives, limit, group.natives)
    group.wrote()
    return group.returned(grads)


def grads_of(parameters: Any) -> list[Any]:
    """The ``.grad`` of each parameter that has one, in order.

    Parameters
    ----------
    parameters : object with a ``grad`` attribute, or iterable or nested dict/list/tuple of them
        ``model.parameters()``, say; ``None`` leaves are skipped.

    Returns
    -------
    list
        The gradients themselves, not copies, for any function here.

    Raises
    ------
    TypeError
        A leaf without a ``grad`` attribute.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> import numpy as np, gradkit
    >>> weights = SimpleNamespace(grad=np.array([3.0, 4.0]))
    >>> frozen = SimpleNamespace(grad=None)
    >>> gradkit.clip_grad_norm(gradkit.grads_of([weights, frozen]), max_norm=1.0)
    array(5.)
    >>> weights.grad
    array([0.6, 0.8])
    """
    return _tree.gradients_of(parameters)


def _clip_arguments(
    max_norm: float, norm_type: float, eps: float, nonfinite: str
) -> tuple[float, float, float, str]:
    return (
        _checks.nonnegative(max_norm, "max_norm"),
        _checks.norm_order(norm_type),
        _checks.epsilon(eps),
        _checks.choice(nonfinite, "nonfinite", _POLICIES),
    )


def _norm(
    group: Gradients,
    order: float,
    policy: str,
    reduce: Reduce | None,
    out: Any,
    *,
    per_tensor: bool = False,
    apart: Iterable[tuple[str, Any]] = (),
) -> Outputs:
    """The norm, over all ranks if there are several, written where the caller wants it."""
    shape = (len(group.arrays),) if per_tensor else ()
    result = group.outputs(out, [("the norm", shape, "float64")], apart=apart)
    target = result.natives[0]
    # An error may leave no byte changed, not even those of out.
    fallible = policy == "raise" or reduce is not None
    norm = group.backend.empty(shape, target.dtype) if fallible else target
    group.backend.grad_norm(group.natives, order, norm, per_tensor=per_tensor)
    if reduce is not None:
        _combine_ranks(group, norm, order, reduce)
    if policy == "raise":
        _raise_if_nonfinite(group, norm)
    if fallible:
        target[...] = norm
    return result


def _combine_ranks(group: Gradients, norm: Any, order: float, reduce: Reduce) -> None:
    label = "what reduce returned"

    def combined(value: Any, op: Literal["sum", "max"]) -> Any:
        answer = reduce(group.wrap(value.copy()), op)  # a copy: value will be written again
        framework = framework_of(answer)
        if framework is None:
            native = group.backend.as_float64(_checks.real(answer, label))
        elif framework is HOST:  # NumPy may answer for any framework
            native = beside(answer, value)
        else:
            native = group.view(answer, label, write=False)
        _checks.shape(native, value.shape, label, "the shape of what it was given")
        return group.backend.as_float64(native)

    share = group.backend.empty(norm.shape, norm.dtype)
    largest = combined(norm, "max")
    group.backend.norm_shares(norm, largest, order, share)
    group.backend.norm_of_shares(combined(share, "sum"), largest, order, norm)


def _clip(group: Gradients, norm: Any, outs: Any, limit: float, floor: float, policy: str) -> None:
    group.backend.clip_by_norm(
        group.natives, norm, limit, floor, outs, zero_nonfinite=policy == "zero"
    )


def _raise_if_nonfinite(group: Gradients, norm: Any) -> None:
    """Wait for the norm and raise unless it is finite, naming the gradients at fault."""
    values = [float(value) for value in norm.reshape(-1)]
    worst = next((value for value in values if not math.isfinite(value)), None)
    if worst is None:
        return
    largest = group.backend.empty((len(group.arrays),), np.dtype(np.float64))
    group.backend.grad_norm(group.natives, math.inf, largest, per_tensor=True)
    culprits = [i for i, value in enumerate(largest) if not math.isfinite(float(value))]
    raise NonFiniteNormError(worst, tuple(map(group.name, culprits)))


def _factor(group: Gradients, coefficient: Any) -> Any:
    if not is_array(coefficient) or isinstance(coefficient, np.generic):
        return _checks.real(coefficient, "coefficient")
    if type(coefficient) is np.ndarray and coefficient.ndim == 0:
        return _checks.real(coefficient, "coefficient")  # host memory: nothing to wait for
    if not group.arrays:  # nothing to scale, on whatever device the coefficient is
        return 1.0
    native = group.view(coefficient, "coefficient", write=False)
    _checks.shape(native, (), "coefficient", "one number for all gradients")
    if _checks.floating(native, "coefficient") != "float64":
        native = group.backend.as_float64(native)
    return native


def _pair(out: Any) -> tuple[Any, Any]:
    if out is None:
        return None, None
    if not isinstance(out, tuple) or len(out) != 2:
        raise TypeError("out must be a tuple (clipped, norm); either may be None")
    return out


def _twins(group: Gradients, out: Any) -> Outputs:
    """Arrays like the gradients: the caller's, or new ones."""
    given = None
    if out is not None:
        given = tuple(_tree.leaves(_tree.freeze(out, is_array), is_array))
    specs = [
        (group.name(i) if given else "", native.shape, _checks.floating(native, "grads"))
        for i, native in enumerate(group.natives)
    ]
    return group.outputs(given, specs)
