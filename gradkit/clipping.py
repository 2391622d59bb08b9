"""Gradient norms and clipping.

Pass gradients as one array, as any iterable of arrays, or as nested dicts, lists and tuples of
them; ``None`` leaves are skipped. A generator can be read once: for a second call, such as
:func:`clip_grads_with_norm` after :func:`grad_norm`, make a list, as :func:`grads_of` does.
Dtypes (float16, bfloat16, float32, float64) may be mixed.

Norms are float64 for every dtype. No intermediate overflows or underflows.
"""

from typing import Any

import numpy as np

from gradkit._arrays import is_array
from gradkit._calls import checks, lists
from gradkit._calls.backend import runs
from gradkit._open.clipping import pair_of, raise_if_nonfinite, rule_of
from gradkit._open.dispatch import run
from gradkit._open.foreign import answers, norm_comes
from gradkit._open.gradients import Gradients
from gradkit._ranks.clipping import Clip, clip_all, clip_by
from gradkit._ranks.collective import NOBODY, Collective
from gradkit._ranks.device_norms import Factors
from gradkit._ranks.groups import OverRanks
from gradkit._ranks.norms import RUN_BY_NORMS, Ranks, Wanted, norm_of
from gradkit._typing import (
    Chosen,
    EpsMode,
    FoundInf,
    GradTree,
    N,
    NonFinite,
    Norm,
    Number,
    Order,
    Out,
    Plain,
    Replicas,
    Scalar,
    T,
    TreeOut,
    X,
)

__all__ = [
    "clip_by_global_norm",
    "clip_coefficient",
    "clip_grad_norm",
    "clip_grad_value",
    "clip_grads_with_norm",
    "grad_norm",
    "scale_grads",
]

_CLIP = "clip_by_norm"


@runs(*RUN_BY_NORMS)
@answers
def grad_norm(
    grads: GradTree[X],
    norm_type: Order = 2.0,
    *,
    scale: Scalar = 1.0,
    nonfinite: NonFinite = "propagate",
    group: OverRanks = None,
    replicas: Replicas = 1,
    exact: bool = False,
    found_inf: FoundInf = None,
    out: Out = None,
) -> X:
    """The p-norm of all gradients taken together as one vector.

    ``(sum |scale * g|^p)^(1/p)``, or ``max |scale * g|`` for infinity.

    Parameters
    ----------
    grads : array, or iterable or nested dict/list/tuple of arrays
        float16, bfloat16, float32 or float64, of any shape; dtypes may be mixed. Never written.
        They may lie on several CUDA devices of this process: then the norm is on the first
        gradient's device, ``out`` and ``found_inf`` too, and numbers in arrays on any of theirs.
        Some may be in host memory beside those: the device is that of the first that is on one.
    norm_type : float
        p: any real number above 0, or infinity.
    scale : float, or 0-d floating-point array
        What the gradients are to be multiplied by, such as ``1 / loss_scale`` or ``1 / tokens``:
        a finite number, perhaps 0 or negative. An array on the gradients' device is read there;
        one that is not finite gives a norm that is not finite. One in host memory is a number,
        whatever its library.
    nonfinite : {"propagate", "raise", "zero"}
        What happens if the norm is NaN or infinite. "propagate" and "zero": the norm is
        returned. "raise": an error that names the gradients; it has to wait for the device.
    group : Group, optional
        The norm is that of the gradients of all its ranks, which make this call together; see
        :mod:`gradkit.distributed`. If one rank raises, or passes another limit, scale, ``eps`` or
        policy, all raise (with a :class:`gradkit.distributed.DeviceGroup`: at the next
        ``check()``).
    replicas : int, or container of ints like ``grads``
        Number of ranks that hold a copy of each gradient; copies count once. A container need
        only go as deep as numbers differ.
    exact : bool
        Round once, from the exact sum: the norm then has the same bits however tensors are cut,
        ordered or spread over ranks and devices. For float16, bfloat16 and float32 and
        ``norm_type`` 1 or 2; that of infinity is always so. The host waits for gradients on a
        device. Over ranks it takes a second collective, of 200 bytes.
    found_inf : bool or floating-point array, optional
        **Written:** whether an element of a gradient is NaN or infinite, on any rank, as loss
        scalers ask. The norm of finite gradients may overflow, at the latest in JAX's float32.
        0-d or of one element.
    out : float64 array, optional
        Where the norm is written: 0-d.

    Returns
    -------
    0-d float64 array on the gradients' device, of the gradients' type
        0 if there are no gradients. On the CPU, the relative error for float16, bfloat16 and
        float32 gradients stays below ``2**-48``.

    Raises
    ------
    RuntimeError
        Gradients lie on several devices while one is captured into a graph.
    TypeError
        A leaf is not a floating-point array; arrays are of two frameworks.
    ValueError
        ``norm_type`` is NaN or not above 0; ``scale`` is a NaN or infinite number.
    NonFiniteNormError
        The norm is not finite and ``nonfinite="raise"``; names the gradients.

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
    """
    call = lists.TotalNorm(
        grads=grads,
        norm_type=norm_type,
        scale=scale,
        nonfinite=nonfinite,
        group=group,
        replicas=replicas,
        exact=exact,
        found_inf=found_inf,
    )
    return run(call, out, by_name=_norm_by_name)


@runs(*RUN_BY_NORMS, _CLIP)
@answers
def clip_grad_norm(
    grads: GradTree[X],
    max_norm: Scalar,
    norm_type: Order = 2.0,
    *,
    scale: Scalar = 1.0,
    eps: Number = 1e-6,
    eps_mode: EpsMode = "max",
    nonfinite: NonFinite = "propagate",
    group: OverRanks = None,
    replicas: Replicas = 1,
    exact: bool = False,
    found_inf: FoundInf = None,
    clip: Chosen = None,
    count: Chosen = None,
    out: Out = None,
) -> X:
    """Scale all gradients in place so that their total norm is at most ``max_norm``.

    Each becomes ``g * (scale * min(1, max_norm / max(norm, eps)))``, where ``norm`` is that of
    ``scale * g``; the factor is float64, and each product is rounded once on a GPU and within one
    unit in the last place on the CPU. Without a scale, gradients whose norm does not exceed
    ``max_norm`` keep every bit.

    Parameters
    ----------
    grads : array, or iterable or nested dict/list/tuple of arrays
        **Written in place**, also if they are views with any (even negative) strides.
        They may lie on several devices, as in :func:`grad_norm`; each clips its own. The host waits
        for the norm if some are in its memory.
    max_norm : float, or 0-d floating-point array
        At least 0; infinity clips nothing. An array on the gradients' device is read there, so
        the call does not wait for the device; a negative or NaN one makes every gradient NaN. One
        in host memory is a number, whatever its library.
    norm_type : float
        p of the norm: any real number above 0, or infinity.
    scale : float, or 0-d floating-point array
        As in :func:`grad_norm`: ``1 / loss_scale``, ``1 / tokens``, ``1 / ranks``, all in the
        same pass. If it is an array and not finite, ``nonfinite`` applies; ``found_inf`` depends
        on the gradients alone.
    eps : float
        Lower bound on the norm in the division.
    eps_mode : {"max", "add"}
        "add": divide by ``norm + eps`` instead, as PyTorch, apex, ONNX Runtime and lucid do. A
        norm just below ``max_norm`` is then clipped a little too.
    nonfinite : {"propagate", "raise", "zero"}
        What happens if the norm is NaN or infinite. "propagate", as in PyTorch: a NaN norm
        makes every gradient NaN, an infinite one makes finite gradients 0. "raise": an error
        that names the gradients; nothing is written, and the call has to wait for the device.
        "zero": every gradient becomes 0; this is decided on the device. It does not skip the
        step of an optimiser that has momentum, weight decay or a step count.
    group : Group, optional
        The norm is that of the gradients of all its ranks, which make this call together; see
        :mod:`gradkit.distributed`. If one rank raises, or passes another limit, scale, ``eps`` or
        policy, all raise (with a :class:`gradkit.distributed.DeviceGroup`: at the next
        ``check()``).
    replicas : int, or container of ints like ``grads``
        Number of ranks that hold a copy of each gradient; copies count once. A container need
        only go as deep as numbers differ.
    exact : bool
        As in :func:`grad_norm`.
    found_inf : 0-d or 1-element bool or floating-point array, optional
        **Written**, as by :func:`grad_norm`.
    clip : function of (name, array) to bool, or container of bools like ``grads``, optional
        Which gradients are clipped; names are those of :func:`names_of`. What is not keeps every
        bit but for ``scale``, and for ``nonfinite="zero"``. Default: all. A container need only
        go as deep as answers differ.
    count : the same, optional
        Which gradients count in the norm, and in what ``found_inf`` and ``nonfinite`` see. Default:
        all. With ``clip`` or ``count``, gradients lie on one device. Over a group, both are the
        same for a gradient that all ranks hold.
    out : 0-d float64 array, optional
        Where the norm is written.

    Returns
    -------
    0-d float64 array on the gradients' device, of the gradients' type
        The norm of ``scale * g``, before clipping.

    Raises
    ------
    RuntimeError
        Gradients lie on several devices while one is captured into a graph.
    TypeError
        A leaf is not a floating-point array; arrays are of two frameworks.
    ValueError
        ``max_norm`` is a negative number or NaN; ``scale`` is a NaN or infinite number; a gradient
        is read-only, overlaps itself or shares memory with another. Nothing is written.
    NonFiniteNormError
        The norm is not finite and ``nonfinite="raise"``. Nothing is written.

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
    call = lists.ClipByTotalNorm(
        grads=grads,
        max_norm=max_norm,
        norm_type=norm_type,
        scale=scale,
        eps=eps,
        eps_mode=eps_mode,
        nonfinite=nonfinite,
        group=group,
        replicas=replicas,
        exact=exact,
        found_inf=found_inf,
        clip=clip,
        count=count,
    )
    return run(call, out, by_name=_clip_by_name)


@runs(*RUN_BY_NORMS, _CLIP)
@answers
def clip_by_global_norm(
    grads: T,
    max_norm: Scalar,
    norm_type: Order = 2.0,
    *,
    scale: Scalar = 1.0,
    eps: Number = 1e-6,
    eps_mode: EpsMode = "max",
    nonfinite: NonFinite = "propagate",
    group: OverRanks = None,
    replicas: Replicas = 1,
    exact: bool = False,
    found_inf: FoundInf = None,
    clip: Chosen = None,
    count: Chosen = None,
    out: TreeOut = None,
) -> tuple[T, Norm]:
    """Scaled gradients whose total norm is at most ``max_norm``; inputs are never written.

    The functional version of :func:`clip_grad_norm`, with the same coefficient and errors.

    Parameters
    ----------
    grads : array, or iterable or nested dict/list/tuple of arrays
        Never written. An array may occur more than once. They may lie on several devices, as in
        :func:`grad_norm`; each is clipped to where it lies.
    max_norm, norm_type, scale, eps, eps_mode, nonfinite, group, replicas, exact, found_inf
        As in :func:`clip_grad_norm`. ``found_inf`` cannot be an array of JAX or TensorFlow; test
        whether ``grad_norm(grads, inf)`` is finite.
    clip, count
        As in :func:`clip_grad_norm`.
    out : tuple (clipped, norm), optional
        Where the results are written. ``clipped``: a container of the same structure as
        ``grads``, with arrays of the same shapes and dtypes. ``norm``: a 0-d float64 array.
        Either may be ``None``.

    Returns
    -------
    clipped : container of the same structure
        Arrays of the gradients' type, shapes and dtypes. A generator gives a list; ``None``
        stays ``None``.
    norm : 0-d float64 array
        The norm of ``scale * g``, before clipping.

    References
    ----------
    ``optax.clip_by_global_norm``; ONNX Runtime's ``InplaceClipGradNorm``, which copies if it
    may not write.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> grads = {"w": np.array([3.0, 0.0]), "b": np.array([4.0])}
    >>> gradkit.clip_by_global_norm(grads, max_norm=1.0)
    ({'w': array([0.6, 0. ]), 'b': array([0.8])}, array(5.))
    >>> grads["b"]
    array([4.])
    """
    with NOBODY if group is None else Collective(group) as collective:
        rule = rule_of(norm_type, eps, nonfinite, eps_mode, exact=exact)
        wanted = Wanted("clip_by_global_norm", rule, scale, then=_CLIP, max_norm=max_norm)
        clipped_out, norm_out = pair_of(out, "norm")
        options = Clip(wanted, clip, count, found_inf, norm_out)
        return clip_all(grads, options, Ranks(collective, replicas), clipped_out)


@answers
def clip_coefficient(
    norm: N | Plain,
    max_norm: Scalar,
    *,
    eps: Number = 1e-6,
    eps_mode: EpsMode = "max",
    out: Out = None,
) -> N:
    """The factor that clips gradients of a given norm: ``min(1, max_norm / max(norm, eps))``.

    For an optimiser that multiplies by it in its own step, which saves scaling the gradients
    in memory. Exactly 1 if ``norm <= max_norm``; NaN if the norm is NaN.

    Parameters
    ----------
    norm : float or floating-point array
        As :func:`grad_norm` returns it. Any shape; each element gets its coefficient.
    max_norm : float, or 0-d floating-point array
        As in :func:`clip_grad_norm`.
    eps : float
        At least 0.
    eps_mode : {"max", "add"}
        As in :func:`clip_grad_norm`.
    out : float64 array of norm's shape, optional
        Where the coefficient is written.

    Returns
    -------
    float64 array of norm's shape
        On norm's device. The call does not wait for the device.

    Raises
    ------
    TypeError, ValueError
        ``norm`` is not floating-point; ``max_norm`` or ``eps`` is a negative number or NaN.

    Examples
    --------
    >>> import gradkit
    >>> gradkit.clip_coefficient(5.0, 1.0)
    array(0.2)
    """
    signed = checks.signed_epsilon(eps, eps_mode)
    checked = norm if is_array(norm) else checks.real(norm, "norm")
    array = np.asarray(checked) if isinstance(checked, (float, np.generic)) else checked
    return run(lists.ClipCoefficient(norm=array, max_norm=max_norm, eps=signed), out)


@runs(_CLIP)
@answers
@norm_comes(1)
def clip_grads_with_norm(
    grads: T,
    norm: Scalar,
    max_norm: Scalar,
    *,
    scale: Scalar = 1.0,
    eps: Number = 1e-6,
    eps_mode: EpsMode = "max",
    nonfinite: NonFinite = "propagate",
) -> T:
    """Scale all gradients in place as :func:`clip_grad_norm` does, but with a given norm.

    Each becomes ``g * (scale * min(1, max_norm / max(norm, eps)))``. Use it if the norm covers
    more than these gradients, or has been computed earlier.

    Parameters
    ----------
    grads : array, or iterable or nested dict/list/tuple of arrays
        **Written in place.** They may lie on several devices, as in :func:`grad_norm`.
    norm : float, or 0-d floating-point array
        That of ``scale * g``, as :func:`grad_norm` returns it with the same ``scale``. An array
        on the gradients' device is read there, so the call does not wait for the device. If it is
        a Python number, pass ``max_norm`` by keyword: PyTorch has the two in the other order.
    max_norm, scale, eps, eps_mode, nonfinite
        As in :func:`clip_grad_norm`. "raise" has to wait for the device. "raise" and "zero" treat
        a non-finite scale in an array like a non-finite norm. With "propagate" and a finite norm,
        gradients are multiplied by such a scale, which makes 0 NaN.

    Returns
    -------
    grads
        The caller's own object (a list for a one-shot iterable).

    Raises
    ------
    TypeError, ValueError
        As :func:`clip_grad_norm`; ``norm`` is a negative number on the host, or not one number.
    NonFiniteNormError
        The norm is not finite and ``nonfinite="raise"``. Nothing is written.

    References
    ----------
    ``torch.nn.utils.clip_grads_with_norm_``.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> encoder, decoder = [np.array([3.0, 0.0])], [np.array([4.0])]
    >>> norm = gradkit.grad_norm([encoder, decoder])
    >>> gradkit.clip_grads_with_norm(encoder, norm, max_norm=1.0)
    [array([0.6, 0. ])]
    """
    rule = rule_of(2.0, eps, nonfinite, eps_mode)
    instead = "use clip_coefficient, and multiply each gradient by it"
    gradients = Gradients(grads, instead=instead, several=True)
    with gradients.on_stream():
        limit, by = gradients.limit(max_norm, "max_norm"), gradients.factor(scale, "scale")
        norm_number = gradients.number(norm, "norm")
        if isinstance(norm_number, float):
            if norm_number < 0:
                raise ValueError(f"norm must be at least 0, not {norm_number}")
            norm_number = gradients.backend.scalar(np.float64(norm_number))
        if rule.policy == "raise":
            raise_if_nonfinite(gradients, norm_number)
            if not isinstance(by, float):
                raise_if_nonfinite(gradients, by)
        clip_by(gradients, Factors(norm_number, limit, by), gradients.views, rule)
    gradients.wrote()
    return gradients.returned(grads)


@answers
def scale_grads(grads: T, coefficient: Scalar) -> T:
    """Multiply every gradient in place by one coefficient, and round as ``clip_grad_norm`` does.

    Parameters
    ----------
    grads : array, or iterable or nested dict/list/tuple of arrays
        **Written in place.** They may lie on several devices, as in :func:`grad_norm`.
    coefficient : float, or 0-d float64 array
        An array on the gradients' device is read there, so the call does not wait for the
        device. 1 keeps every bit. It need not be finite: infinity times 0 is NaN.

    Returns
    -------
    grads
        The caller's own object (a list for a one-shot iterable).

    Raises
    ------
    TypeError, ValueError
        As :func:`clip_grad_norm`; ``coefficient`` is not one number.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> grads = [np.array([2.0, -4.0])]
    >>> gradkit.scale_grads(grads, 0.5)
    [array([ 1., -2.])]
    """
    instead = "compute coefficient * g for each gradient g"
    gradients = Gradients(grads, instead=instead, several=True)
    with gradients.on_stream():
        factor = gradients.number(coefficient, "coefficient")
        gradients.backend.scale_grads(
            lists.ScaleGrads(grads=gradients.views, coefficient=factor, outs=gradients.views)
        )
    gradients.wrote()
    return gradients.returned(grads)


@answers
def clip_grad_value(grads: T, clip_value: Number) -> T:
    """Clamp every element of every gradient in place to ``[-clip_value, clip_value]``.

    Parameters
    ----------
    grads : array, or iterable or nested dict/list/tuple of arrays
        **Written in place.** NaN stays NaN. They may lie on several devices, as in
        :func:`grad_norm`.
    clip_value : float
        At least 0; rounded to each gradient's dtype.

    Returns
    -------
    grads
        The caller's own object (a list for a one-shot iterable).

    Raises
    ------
    TypeError, ValueError
        As :func:`clip_grad_norm`; ``clip_value`` is negative or NaN.

    References
    ----------
    ``torch.nn.utils.clip_grad_value_``; ``optax.clip``.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> gradkit.clip_grad_value(np.array([-3.0, 0.5, 2.0]), 1.0)
    array([-1. ,  0.5,  1. ])
    """
    limit = checks.nonnegative(clip_value, "clip_value")
    instead = "use its own clip(g, -clip_value, clip_value) for each gradient g"
    gradients = Gradients(grads, instead=instead, several=True)
    with gradients.on_stream():
        gradients.backend.clip_grad_value(
            lists.ClipGradValue(grads=gradients.views, clip_value=limit, outs=gradients.views)
        )
    gradients.wrote()
    return gradients.returned(grads)


def _norm_by_name(call: lists.TotalNorm, out: Any) -> Any:
    with NOBODY if call.group is None else Collective(call.group) as collective:
        rule = rule_of(call.norm_type, 0.0, call.nonfinite, exact=call.exact)
        wanted, ranks = Wanted("grad_norm", rule, call.scale), Ranks(collective, call.replicas)
        return norm_of(call.grads, wanted, ranks, call.found_inf, out)[1]


def _clip_by_name(call: lists.ClipByTotalNorm, out: Any) -> Any:
    with NOBODY if call.group is None else Collective(call.group) as collective:
        rule = rule_of(call.norm_type, call.eps, call.nonfinite, call.eps_mode, exact=call.exact)
        limit, instead = call.max_norm, call.instead["grads"]
        wanted = Wanted("clip_grad_norm", rule, call.scale, then=_CLIP, max_norm=limit)
        options = Clip(wanted, call.clip, call.count, call.found_inf, out)
        return clip_all(call.grads, options, Ranks(collective, call.replicas), instead=instead)[1]
