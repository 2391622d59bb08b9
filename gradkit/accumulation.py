"""Add micro-batch gradients to buffers, and zero them.

Every function here writes in place and returns the caller's own objects.
"""

from functools import partial
from typing import Any

from gradkit._calls import checks, lists
from gradkit._open.clipping import NORM
from gradkit._open.dispatch import run
from gradkit._open.foreign import answers
from gradkit._open.gradients import Gradients
from gradkit._open.pairs import check_apart, check_pairs, in_order_of, why_lossy, why_unlike
from gradkit._open.results import Results
from gradkit._open.rounding import at_random
from gradkit._typing import (
    AnyArray,
    Casting,
    Flag,
    Number,
    Offsets,
    Out,
    Rounding,
    Scalar,
    Seed,
    T,
    Tree,
    X,
)

__all__ = ["accumulate_grad", "accumulate_grad_v2", "accumulate_grads", "zero_grad"]


def accumulate_grad(
    buffer: X,
    grad: AnyArray,
    *,
    do_update: Flag = True,
    scale: Number | None = None,
    casting: Casting = "safe",
    compensation: AnyArray | None = None,
) -> X:
    """``buffer += scale * grad``.

    Without ``scale``, the sum is rounded once. With it, the product and the sum are computed and
    rounded in float64, and the sum is then rounded to the buffer's dtype.

    Parameters
    ----------
    buffer : float16, bfloat16, float32 or float64 array
        **Written in place.**
    grad : array of a shape that broadcasts to the buffer's
        Of the buffer's dtype or one that it holds exactly: float16 and bfloat16 into float32,
        any into float64. May be the buffer itself, which doubles it; any other overlap is an
        error.
    do_update : bool, or 0-d or 1-element bool array
        Whether to add. An array on the device is read there.
    scale : float, optional
        Factor for ``grad``, such as ``1 / micro_batches``; finite. With 0 the buffer keeps every
        bit, as in :func:`accumulate_grads`.
    casting : {"safe", "same_kind"}
        "same_kind" also accepts gradients of a wider dtype, and rounds the sum.
    compensation : array like the buffer, optional
        **Read and written in place:** what rounding drops, as in :func:`accumulate_grads`.

    Returns
    -------
    buffer
        The caller's own object.

    Raises
    ------
    TypeError
        A dtype is not accepted.
    ValueError
        ``scale`` is NaN or infinite; the shape of ``grad`` does not broadcast to the buffer's, or
        that of ``compensation`` differs; the buffer is read-only, overlaps itself or partly
        overlaps ``grad``; ``compensation`` shares memory with another argument. Nothing is written.

    References
    ----------
    ONNX Runtime's ``InPlaceAccumulator``.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> buffer = np.zeros((2, 2), np.float32)
    >>> gradkit.accumulate_grad(buffer, np.ones(2, np.float32), scale=0.5)
    array([[0.5, 0.5],
           [0.5, 0.5]], dtype=float32)
    """
    call = lists.AccumulateGrad(
        buffer=buffer,
        grad=grad,
        casting=casting,
        do_update=do_update,
        scale=scale,
        compensation=compensation,
    )
    run(call)
    return buffer


def accumulate_grad_v2(
    buffer: X, grad: AnyArray, *, overwrite: Flag = False, casting: Casting = "safe"
) -> tuple[bool, X]:
    """``buffer = grad`` if ``overwrite``, else ``buffer += grad``.

    The first micro-batch of a step overwrites and the others add, so no buffer needs zeroing:
    what the buffer held before, NaN included, is ignored.

    Parameters
    ----------
    buffer : float16, bfloat16, float32 or float64 array
        **Written in place.**
    grad : array of a shape that broadcasts to the buffer's
        As in :func:`accumulate_grad`.
    overwrite : bool, or 0-d or 1-element bool array
        An array on the device is read there.
    casting : {"safe", "same_kind"}
        As in :func:`accumulate_grad`.

    Returns
    -------
    updated : bool
        ``True``: the buffer has been written (ONNX Runtime's ``updated_flag``).
    buffer
        The caller's own object.

    Raises
    ------
    TypeError, ValueError
        As :func:`accumulate_grad`.

    References
    ----------
    ONNX Runtime's ``InPlaceAccumulatorV2``.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> buffer = np.full(2, np.nan)
    >>> for step in range(2):
    ...     updated, buffer = gradkit.accumulate_grad_v2(buffer, np.ones(2), overwrite=step == 0)
    >>> updated, buffer
    (True, array([2., 2.]))
    """
    run(lists.AccumulateGradV2(buffer=buffer, grad=grad, casting=casting, overwrite=overwrite))
    return True, buffer


@answers
def accumulate_grads(
    buffers: T,
    grads: Tree,
    *,
    scale: Scalar = 1.0,
    overwrite: Flag = False,
    do_update: Flag = True,
    casting: Casting = "safe",
    norm_out: Out = None,
    grad_norm_out: Out = None,
    compensation: Tree | None = None,
    rounding: Rounding = "nearest",
    seed: Seed = 0,
    offsets: Offsets = 0,
) -> T:
    """``buffer += scale * grad`` for each buffer of a container, or ``buffer = scale * grad``.

    Sums are rounded as by :func:`accumulate_grad`, in one launch for each pair of dtypes. The last
    micro-batch of a step can give the norm of the result in the same pass: ``norm_out`` has the
    very bits of ``grad_norm(buffers)``, and goes to :func:`clip_grads_with_norm`.

    Parameters
    ----------
    buffers : array, or iterable or nested dict/list/tuple of arrays
        **Written in place.** float16, bfloat16, float32 or float64; dtypes may be mixed.
    grads : container with as many arrays, in the same order
        Each of its buffer's shape, and of the buffer's dtype or one that it holds exactly:
        float16 and bfloat16 into float32, any into float64. May be the buffer itself; any other
        overlap is an error. Where one container has ``None``, the other must have it too.
    scale : float, or 0-d floating-point array
        Factor for the gradients, such as ``1 / micro_batches``; finite. An array on the
        buffers' device is read there and not checked: a non-finite one makes 0 NaN. Gradients whose
        scale is 0 are skipped, whatever they hold: the mean over a micro-batch without tokens is
        NaN. Buffers and ``compensation`` keep
        every bit then, or become +0 with ``overwrite``.
    overwrite : bool, or 0-d or 1-element bool array
        Whether the gradients replace what the buffers held, NaN included. An array on the
        device is read there.
    do_update : bool, or 0-d or 1-element bool array
        Whether to write the buffers at all. An array on the device is read there.
    casting : {"safe", "same_kind"}
        "same_kind" also accepts gradients of a wider dtype, such as float32 ones for float16
        buffers, and rounds the sums.
    norm_out : 0-d float64 array, optional
        **Written:** the 2-norm of all buffers after the call, also if nothing was added.
    grad_norm_out : 0-d float64 array, optional
        **Written:** the 2-norm of the gradients as they arrive, without ``scale``, with the bits of
        ``grad_norm(grads)``. They are read once more for it.
    compensation : container of arrays like ``buffers``, optional
        **Read and written in place:** what rounding drops, so that ``buffers + compensation`` is
        the sum, as exactly as two numbers of the buffers' dtype can hold it; zeros at first. In
        float64, ``change = compensation + scale * grad``, ``sum = buffer + change``; then
        ``buffer = round(sum)`` and ``compensation = round(sum - buffer)``, with what ``sum`` lost
        by rounding, or 0 where the buffer is not finite. ``overwrite`` replaces both. Norms are
        those of the buffers alone.
    rounding : {"nearest", "stochastic"}
        "stochastic" rounds each sum, which is computed in float64, up or down to 16-bit buffers,
        with probabilities that make the expected value the sum: to within 2^-33 units in the last
        place, and where the sum is not above the largest number. What the dtype holds is not
        changed. Not together with ``compensation``.
    seed : int, or 0-d int64 or uint64 array
        For "stochastic": at least 0 and below 2^64; another one in each call. An array on the
        buffers' device is read there, so that a captured graph can change it between replays.
    offsets : int, or a container of ints like ``buffers``
        For "stochastic": the random bits of an element depend on ``seed`` and on its offset plus
        its index in C order, and on nothing else: not on the backend or its threads. By default
        arrays follow each other; an int is the offset of the first. Ranks that hold parts of one
        list give each part's offset in the whole.

    Returns
    -------
    buffers
        The caller's own object (a list for a one-shot iterable).

    Raises
    ------
    TypeError
        A dtype is not accepted, or not for ``rounding``; arrays are of two frameworks.
    ValueError
        The containers do not match; a buffer is read-only, overlaps itself, another buffer or a
        gradient that is not its own; an array of ``compensation`` shares memory with a buffer or
        a gradient; ``scale`` is a NaN or infinite number; ``seed`` or an offset is out of range.
        Nothing is written.

    References
    ----------
    ONNX Runtime's ``InPlaceAccumulatorV2``, over lists; ``torch._foreach_add_``. For
    ``compensation``: W. Kahan, "Further Remarks on Reducing Truncation Errors", 1965; D. Knuth,
    The Art of Computer Programming, volume 2, 4.2.2, theorem B. For ``rounding``: S. Gupta et al.,
    "Deep Learning with Limited Numerical Precision", 2015; the bits are those of SplitMix64
    (G. L. Steele, D. Lea and C. H. Flood, "Fast Splittable Pseudorandom Number Generators", 2014).

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> buffers = {"w": np.zeros(2, np.float32), "b": np.zeros(1, np.float32)}
    >>> norm = np.zeros(())
    >>> for step in range(2):
    ...     grads = {"w": np.full(2, 2.0, np.float16), "b": np.ones(1, np.float16)}
    ...     buffers = gradkit.accumulate_grads(
    ...         buffers, grads, scale=0.5, overwrite=step == 0, norm_out=norm
    ...     )
    >>> buffers, norm
    ({'w': array([2., 2.], dtype=float32), 'b': array([1.], dtype=float32)}, array(3.))
    """
    random = None if rounding == "nearest" else (rounding, seed, offsets)
    call = lists.AccumulateLists(
        buffers=buffers,
        grads=grads,
        compensation=compensation,
        casting=casting,
        scale=scale,
        overwrite=overwrite,
        do_update=do_update,
        norm=norm_out,
        grad_norm=grad_norm_out,
        at_random=random,
    )
    return run(call, by_name=_accumulate_by_name)


@answers
def zero_grad(grads: T) -> T:
    """Write +0 over every element of every gradient, in place.

    Parameters
    ----------
    grads : array, or iterable or nested dict/list/tuple of arrays
        **Written in place**; what they held, NaN included, is ignored. Gaps of a strided view
        stay unchanged. They may lie on several devices, as in :func:`grad_norm`.

    Returns
    -------
    grads
        The caller's own object (a list for a one-shot iterable).

    Raises
    ------
    TypeError
        A leaf is not a floating-point array.
    ValueError
        A gradient is read-only, overlaps itself or shares memory with another. Nothing is
        written.

    References
    ----------
    ONNX Runtime's ``ZeroGradient``.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> gradkit.zero_grad([np.array([1.0, np.nan]), None])
    [array([0., 0.]), None]
    """
    instead = "make new zeros (zeros_like)"
    group = Gradients(grads, instead=instead, several=True)
    with group.on_stream():
        group.backend.zero_grad(lists.ZeroGrad(grads=group.views))
    group.wrote()
    return group.returned(grads)


def _beside(call: lists.AccumulateLists) -> dict[str, Any]:
    """Arrays that show the library and device of an empty list of buffers."""
    outs = {"norm_out": call.norm, "grad_norm_out": call.grad_norm}
    return {**outs, "overwrite": call.overwrite, "do_update": call.do_update}


def _norm_in(
    out: Any, label: str, into: Gradients, others: list[Gradients], apart: list[Any]
) -> Results | None:
    """Open the output of a norm, if there is one."""
    if out is None:
        return None
    for gradients in (into, *others):
        gradients.refuse_shards("take the norm with grad_norm and a group")
    return into.outputs(out, (NORM,), apart=apart, others=others, label=label)


def _compensating(into: Gradients, added: Gradients, compensation: Any, instead: str) -> Gradients:
    """Open ``compensation``, which keeps the bits that buffers drop."""
    arrays = in_order_of(into, compensation)
    opened = Gradients(arrays, instead=instead, label="compensation")
    check_pairs(into, opened, ("compensation", "buffers"), why_unlike, may_be=False)
    check_apart(opened, added)
    return opened


def _why_not_added(buffer: Any, grad: Any) -> str | None:
    """Why a gradient cannot be added to a buffer, by their dtypes."""
    reason = why_lossy(buffer, grad)
    return reason and f'{reason}, or any with casting="same_kind"'


def _accumulate_by_name(call: lists.AccumulateLists, out: Any) -> Any:  # noqa: ARG001
    instead = call.instead["buffers"]
    into = Gradients(call.buffers, instead=instead, label="buffers", beside=partial(_beside, call))
    added = Gradients(in_order_of(into, call.grads))
    checks.choice(call.casting, "casting", ("safe", "same_kind"))
    why = _why_not_added if call.casting == "safe" else lambda *_: None
    check_pairs(into, added, ("grads", "buffers"), why)
    remainders = None
    if call.compensation is not None:
        remainders = _compensating(into, added, call.compensation, instead)
    with into.on_stream():
        factor = into.factor(call.scale, "scale")
        update = into.flag(call.do_update, "do_update")
        fresh = into.flag(call.overwrite, "overwrite")
        random = at_random(into, call.at_random, call.compensation)
        others = [added] if remainders is None else [added, remainders]
        norms: list[Results | None] = []
        apart: list[Any] = []
        for label, norm_array in (("norm_out", call.norm), ("grad_norm_out", call.grad_norm)):
            norms.append(_norm_in(norm_array, label, into, others, apart))
            apart += [] if norms[-1] is None else norms[-1].named()
        into.backend.accumulate_grads(
            lists.AccumulateGrads(
                buffers=into.views,
                grads=added.views,
                do_update=update,
                overwrite=fresh,
                scale=factor,
                norm=None if norms[0] is None else norms[0].views[0],
                grad_norm=None if norms[1] is None else norms[1].views[0],
                compensation=None if remainders is None else remainders.views,
                **random,
            )
        )
        for norm in filter(None, norms):
            norm.results()  # tells the library that it was written
    for written in filter(None, (into, remainders)):
        written.wrote()
    return into.returned(call.buffers)
