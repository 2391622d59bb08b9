"""Clip each gradient, each unit of it or each block of several by a norm of its own.

With ``blocks``, all gradients of one key are a block, and have one norm together. A unit is what
one norm covers otherwise: a whole gradient or, with ``axis``, the elements along some of its axes.
Which axes belong together differs between libraries: PyTorch's weights have inputs in axis 1 and
on, so that a neuron's unit is ``axis=1`` of a matrix and ``axis=(1, 2, 3)`` of a filter; those of
JAX and TensorFlow have them in all axes but the last. So nothing is guessed. Gradients of fewer
than two dimensions, such as biases, are one unit each.
"""

from functools import partial
from typing import Any

from gradkit._calls import checks
from gradkit._calls.backend import runs
from gradkit._open.clipping import pair_of
from gradkit._open.foreign import answers
from gradkit._open.units import adaptive_limits, adaptive_rule, block_rule, clip_each, units_along
from gradkit._ranks.blocks import Cut, clip_cut
from gradkit._ranks.collective import NOBODY, Collective
from gradkit._ranks.groups import OverRanks
from gradkit._ranks.norms import Ranks
from gradkit._typing import (
    Arrays,
    Axis,
    Blocks,
    Limits,
    NonFinite,
    Number,
    Order,
    Out,
    Replicas,
    Scalar,
    T,
    TreeOut,
)

__all__ = [
    "clip_by_adaptive_norm",
    "clip_by_block_norm",
    "clip_grad_adaptive",
    "clip_grad_block_norm",
]

_RUN = ("unit_norms", "clip_units", "grad_norm")
_RUN_BY_BLOCKS = (*_RUN, "norm_parts")


@runs(*_RUN_BY_BLOCKS)
@answers
def clip_grad_block_norm(
    grads: T,
    max_norm: Limits,
    norm_type: Order = 2.0,
    *,
    axis: Axis = None,
    rms: bool = False,
    blocks: Blocks = None,
    group: OverRanks = None,
    replicas: Replicas = 1,
    eps: Number = 1e-6,
    nonfinite: NonFinite = "propagate",
    out: Out = None,
) -> T:
    """Scale each gradient in place so that its own norm is at most ``max_norm``.

    Each becomes ``g * min(1, max_norm / max(norm(g), eps))``, or each unit of it does, or with
    ``blocks`` all gradients of a block by the norm of these together; the factor
    is float64, and each product is rounded once on a GPU and within one unit in the last place on
    the CPU. A unit whose norm does not exceed ``max_norm`` keeps every bit.

    Parameters
    ----------
    grads : array, or iterable or nested dict/list/tuple of arrays
        **Written in place.** float16, bfloat16, float32 or float64; dtypes may be mixed.
    max_norm : float or 0-d floating-point array; or a container of them, a function, a vector
        At least 0; infinity clips nothing. An array on the gradients' device is read there. A
        container like ``grads`` has a limit for each gradient, or for all below a place; a function
        gets a gradient's name and the gradient. A vector has one for each unit, in the order of
        ``out``, as a :class:`SpikeGuard` of as many norms makes it. With ``blocks``: one number, or
        a dict of them by key, which may have further keys.
    norm_type : float
        p: any real number above 0, or infinity.
    axis : int, tuple of int, dict, list or function, optional
        The axes that a norm sums over, as in NumPy's ``sum``; default: all, so that a gradient is
        one unit. A dict or list like ``grads`` holds them for each gradient, or for all below a
        place; a function gets a gradient's name, as :func:`names_of` has it, and the gradient.
        Gradients of fewer than two dimensions are one unit each.
    rms : bool
        Take ``(mean |g|^p)^(1/p)`` for the norm: for p = 2, the root mean square.
    blocks : function of (name, array) to a key, or container of keys like ``grads``, optional
        Gradients of one key are one block, with one norm and one limit, as expert and dense
        parameters are. Names are those of :func:`names_of`; a key is whatever a dict takes, but
        ``None``. A dict or list need only go as deep as keys differ. Not with ``axis`` or ``rms``.
    group : Group, optional
        With ``blocks``: a block's norm is that of its gradients on all ranks of the group, which
        make this call together; see :mod:`gradkit.distributed`. A rank need not have gradients of
        each block, but ranks pass the same ``max_norm``, ``norm_type``, ``eps`` and policy. Keys
        are strings or integers. The ranks exchange keys once, and then messages as in
        :func:`grad_stats`; the host waits for the device.
    replicas : int, or container of ints like ``grads``
        As in :func:`clip_grad_norm`: number of ranks that hold a copy of each gradient.
    eps : float
        Lower bound on the norm in the division.
    nonfinite : {"propagate", "raise", "zero"}
        What happens to a unit whose norm is NaN or infinite. "propagate": a NaN norm makes the
        unit NaN, an infinite one makes finite elements 0. "raise": an error that names the
        gradients; nothing is written, and the call has to wait for the device. "zero": the unit
        becomes 0, and no other.
    out : float64 array with one element per unit, optional
        Where the norms are written: gradient by gradient, in C order, or block by block, in the
        order of keys. Not with a group of several ranks.

    Returns
    -------
    dict, list, tuple or float64 array, like ``grads``
        The norms before clipping, on the gradients' device: for each gradient an array of the
        shape that is left of it without the axes summed over. ``None`` where ``None`` was. With
        ``blocks``: a dict of 0-d arrays by key, in the order of their first gradients; over a group
        with the keys of all ranks.

    Raises
    ------
    TypeError
        A leaf is not a floating-point array; arrays are of two frameworks; ``axis`` is not of the
        kinds above; ``blocks`` gives no key; with it, ``max_norm`` is no number or dict.
    ValueError
        ``axis`` is not an axis of a gradient; it, ``blocks`` or ``max_norm`` is not like ``grads``,
        or ``max_norm`` has no limit for a key; ``blocks`` goes with ``axis`` or ``rms``, or
        ``group`` without ``blocks``;
        ``max_norm`` is a negative number or NaN, or has not one number for each unit; a gradient
        is read-only, overlaps itself or shares memory with another. Nothing is written.
    NonFiniteNormError
        A norm is not finite and ``nonfinite="raise"``. Nothing is written.
    RankError
        With ``group``: another rank failed, or makes another call.

    References
    ----------
    ``optax.clip_by_block_rms``; TensorFlow's ``clip_by_norm``; Keras' ``clipnorm``.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> grads = {"w": np.array([[3.0, 4.0], [0.0, 0.5]]), "b": np.array([2.0])}
    >>> gradkit.clip_grad_block_norm(grads, max_norm=1.0, axis=1)
    {'w': array([5. , 0.5]), 'b': array(2.)}
    >>> grads
    {'w': array([[0.6, 0.8],
           [0. , 0.5]]), 'b': array([1.])}

    The experts of a mixture, and all else:

    >>> grads = {"expert.0": np.array([3.0]), "expert.1": np.array([4.0]), "dense": np.array([2.0])}
    >>> gradkit.clip_grad_block_norm(
    ...     grads, {"expert": 1.0, "dense": 5.0}, blocks=lambda name, grad: name.partition(".")[0]
    ... )
    {'expert': array(5.), 'dense': array(2.)}
    >>> grads
    {'expert.0': array([0.6]), 'expert.1': array([0.8]), 'dense': array([2.])}
    """
    instead = "use clip_by_block_norm, which returns new gradients"
    with NOBODY if group is None else Collective(group) as collective:
        rule = block_rule(norm_type, rms, eps, nonfinite)
        cut = Cut("clip_grad_block_norm", axis, blocks, Ranks(collective, replicas))
        return clip_cut(grads, max_norm, rule, cut, (None, out), instead=instead)[1]


@runs(*_RUN_BY_BLOCKS)
@answers
def clip_by_block_norm(
    grads: T,
    max_norm: Limits,
    norm_type: Order = 2.0,
    *,
    axis: Axis = None,
    rms: bool = False,
    blocks: Blocks = None,
    group: OverRanks = None,
    replicas: Replicas = 1,
    eps: Number = 1e-6,
    nonfinite: NonFinite = "propagate",
    out: TreeOut = None,
) -> tuple[T, T]:
    """Gradients each of which has a norm of at most ``max_norm``; inputs are never written.

    The functional version of :func:`clip_grad_block_norm`, with the same factors and errors.

    Parameters
    ----------
    grads : array, or iterable or nested dict/list/tuple of arrays
        Never written. An array may occur more than once.
    max_norm, norm_type, axis, rms, blocks, group, replicas, eps, nonfinite
        As in :func:`clip_grad_block_norm`.
    out : tuple (clipped, norms), optional
        Where the results are written; either may be ``None``. ``clipped``: a container of the
        same structure as ``grads``, with arrays of the same shapes and dtypes. ``norms``: a
        float64 array with one element per unit or block.

    Returns
    -------
    clipped : container of the same structure
        Arrays of the gradients' type, shapes and dtypes; ``None`` stays ``None``.
    norms : container of the same structure, or dict by key
        As :func:`clip_grad_block_norm` returns them.

    Raises
    ------
    TypeError, ValueError, NonFiniteNormError, RankError
        As :func:`clip_grad_block_norm`; ``out`` is no such pair. Nothing is written.

    References
    ----------
    ``optax.clip_by_block_rms``, which is ``rms=True``.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> gradkit.clip_by_block_norm([np.full(4, 2.0), np.ones(2)], max_norm=1.0, rms=True)
    ([array([1., 1., 1., 1.]), array([1., 1.])], [array(2.), array(1.)])
    """
    with NOBODY if group is None else Collective(group) as collective:
        rule = block_rule(norm_type, rms, eps, nonfinite)
        cut = Cut("clip_by_block_norm", axis, blocks, Ranks(collective, replicas))
        return clip_cut(grads, max_norm, rule, cut, pair_of(out, "norms"))


@runs(*_RUN)
@answers
def clip_grad_adaptive(
    grads: T,
    params: Arrays,
    clipping: Scalar = 0.01,
    *,
    eps: Number = 0.001,
    axis: Axis = None,
    nonfinite: NonFinite = "propagate",
    out: Out = None,
) -> T:
    """Scale each gradient in place so that its norm is small beside its parameter's (AGC).

    Each unit of a gradient becomes ``g * min(1, limit / max(norm(g), 1e-6))`` with ``limit =
    clipping * max(norm(w), eps)`` for the same unit of its parameter ``w``; 2-norms. A unit
    whose norm does not exceed its limit keeps every bit.

    Parameters
    ----------
    grads : array, or iterable or nested dict/list/tuple of arrays
        **Written in place.** float16, bfloat16, float32 or float64; dtypes may be mixed.
    params : container like ``grads``
        An array of its gradient's shape at the place of each gradient, of any of these dtypes.
        Never written; may require grad. Where a gradient is ``None``, anything. A dict may have
        further entries.
    clipping : float, or 0-d floating-point array
        At least 0: the largest ratio of the two norms. An array on the gradients' device is read
        there.
    eps : float
        Lower bound on a parameter's norm, so that one that begins at 0 can move.
    axis
        As in :func:`clip_grad_block_norm`: the axes of a neuron's inputs.
    nonfinite, out
        As in :func:`clip_grad_block_norm`, about the norms of gradients.

    Returns
    -------
    dict, list, tuple or float64 array, like ``grads``
        The gradients' norms before clipping, as :func:`clip_grad_block_norm` returns them.

    Raises
    ------
    TypeError, ValueError
        As :func:`clip_grad_block_norm`; ``params`` has no array of a gradient's shape at its place.
    NonFiniteNormError
        A gradient's norm is not finite and ``nonfinite="raise"``. Nothing is written.

    References
    ----------
    Brock, De, Smith, Simonyan: "High-performance large-scale image recognition without
    normalization", 2021. ``optax.adaptive_grad_clip``; timm's ``adaptive_clip_grad``.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> grads, params = [np.array([[3.0, 4.0], [0.0, 0.1]])], [np.full((2, 2), 8.0)]
    >>> gradkit.clip_grad_adaptive(grads, params, clipping=0.125, axis=1)
    [array([5. , 0.1])]
    >>> np.linalg.norm(grads[0], axis=1) / np.linalg.norm(params[0], axis=1) <= 0.1251
    array([ True,  True])
    """
    rule, units = adaptive_rule(nonfinite), partial(units_along, axis=axis)
    limits = partial(adaptive_limits, params=params, clipping=clipping, least=checks.epsilon(eps))
    instead = "use clip_by_adaptive_norm, which returns new gradients"
    near = partial(dict[str, Any], out=out)  # of an empty list
    return clip_each(grads, rule, units, limits, (None, out), instead=instead, beside=near)[1]


@runs(*_RUN)
@answers
def clip_by_adaptive_norm(
    grads: T,
    params: Arrays,
    clipping: Scalar = 0.01,
    *,
    eps: Number = 0.001,
    axis: Axis = None,
    nonfinite: NonFinite = "propagate",
    out: TreeOut = None,
) -> tuple[T, T]:
    """Gradients whose norms are small beside their parameters'; inputs are never written.

    The functional version of :func:`clip_grad_adaptive`, with the same factors and errors.

    Parameters
    ----------
    grads : array, or iterable or nested dict/list/tuple of arrays
        Never written.
    params, clipping, eps, axis, nonfinite
        As in :func:`clip_grad_adaptive`.
    out : tuple (clipped, norms), optional
        As in :func:`clip_by_block_norm`.

    Returns
    -------
    clipped : container of the same structure
        Arrays of the gradients' type, shapes and dtypes; ``None`` stays ``None``.
    norms : container of the same structure
        As :func:`clip_grad_block_norm` returns them.

    Raises
    ------
    TypeError, ValueError, NonFiniteNormError
        As :func:`clip_grad_adaptive`; ``out`` is no such pair. Nothing is written.

    References
    ----------
    ``optax.adaptive_grad_clip``, whose ``axis`` is that of JAX's weights: all but the last.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> gradkit.clip_by_adaptive_norm(np.array([3.0, 4.0]), np.array([0.0, 1.0]), clipping=0.5)
    (array([0.3, 0.4]), array(5.))
    """
    rule, units = adaptive_rule(nonfinite), partial(units_along, axis=axis)
    limits = partial(adaptive_limits, params=params, clipping=clipping, least=checks.epsilon(eps))
    outs = pair_of(out, "norms")
    return clip_each(grads, rule, units, limits, outs, beside=lambda: {"out": outs[1]})
