"""Adding micro-batch gradients into buffers, and zeroing them.

Everything here writes in place and returns the caller's own objects.
"""

from typing import Any

from gradkit import _checks, _memory
from gradkit._arrays import Native, is_array
from gradkit._call import Call
from gradkit._dtypes import FLOATS, SAFE_ADDENDS
from gradkit._gradients import Gradients

__all__ = ["accumulate_grad", "accumulate_grad_v2", "zero_grad"]


def accumulate_grad(
    buffer: Any,
    grad: Any,
    *,
    do_update: Any = True,
    scale: float | None = None,
    casting: str = "safe",
) -> Any:
    """``buffer += scale * grad``, rounded once.

    Parameters
    ----------
    buffer : float16, bfloat16, float32 or float64 array
        **Written in place.**
    grad : array of a shape that broadcasts to the buffer's
        May be the buffer itself (which doubles it); may not overlap it otherwise. Of the
        buffer's dtype or one that fits in it: float16 and bfloat16 into float32, anything
        into float64.
    do_update : bool, or 0-d or 1-element bool array
        Whether to add at all. An array on the device is read there.
    scale : float, optional
        What ``grad`` is multiplied by: ``1 / micro_batches``, say.
    casting : {"safe", "same_kind"}
        "same_kind" also takes gradients of a wider dtype, and rounds the sum.

    Returns
    -------
    buffer
        The caller's own object.

    Raises
    ------
    TypeError
        A dtype that is not accepted.
    ValueError
        A shape that does not broadcast to the buffer's; a buffer that is read-only, overlaps
        itself or partly overlaps ``grad``. Nothing is written then.

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
    factor = None if scale is None else _checks.real(scale, "scale")
    call, flag = _open(buffer, grad, do_update, "do_update", casting, "compute buffer + grad")
    with call.running():
        call.backend.accumulate_grad(call["buffer"], call["grad"], flag, factor)
    call.framework.wrote([buffer])
    return buffer


def accumulate_grad_v2(
    buffer: Any, grad: Any, *, overwrite: Any = False, casting: str = "safe"
) -> tuple[bool, Any]:
    """``buffer = grad`` where ``overwrite``, else ``buffer += grad``.

    The first micro-batch of a step overwrites, the others add, and no zeroing pass is needed:
    what the buffer held before, NaN included, leaves no trace.

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
    instead = "take grad itself, or compute buffer + grad"
    call, flag = _open(buffer, grad, overwrite, "overwrite", casting, instead)
    with call.running():
        call.backend.accumulate_grad_v2(call["buffer"], call["grad"], flag)
    call.framework.wrote([buffer])
    return True, buffer


def zero_grad(grads: Any) -> Any:
    """Write +0 over every element of every gradient, in place.

    Parameters
    ----------
    grads : array, or iterable or nested dict/list/tuple of arrays
        **Written in place**, whatever was there (NaN too). A strided view leaves the elements
        between its own as they were.

    Returns
    -------
    grads
        The caller's own object (a list for a one-shot iterable).

    Raises
    ------
    TypeError
        A leaf that is not a floating-point array.
    ValueError
        A gradient that is read-only, overlaps itself or shares memory with another.

    References
    ----------
    ONNX Runtime's ``ZeroGradient``.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> gradkit.zero_grad([np.array([1.0, np.nan]), None])
    [array([0., 0.]), None]
    """
    group = Gradients(grads, write=True, instead="make new zeros (zeros_like)")
    with group.running():
        group.backend.zero_grad(group.natives)
    group.wrote()
    return group.returned(grads)


def _open(
    buffer: Any, grad: Any, flag: Any, flag_label: str, casting: str, instead: str
) -> tuple[Call, Native]:
    _checks.choice(casting, "casting", ("safe", "same_kind"))
    call = Call(write=("buffer",), instead=instead, detach=False, buffer=buffer, grad=grad)
    into, addend = call["buffer"], call["grad"]
    name = _checks.floating(into, "buffer")
    accepted = SAFE_ADDENDS[name] if casting == "safe" else FLOATS
    if _checks.floating(addend, "grad") not in accepted:
        raise TypeError(
            f"grad has dtype {addend.dtype} and the buffer {name}, which would lose digits of it; "
            f'accepted: {", ".join(accepted)}, or any with casting="same_kind"'
        )
    if not _broadcasts(addend.shape, into.shape):
        raise ValueError(
            f"grad has shape {addend.shape}, which does not broadcast to the buffer's {into.shape}"
        )
    _checks.writable(into, "buffer")
    if _memory.overlap(into, addend) and not _memory.same_elements(into, addend):
        raise ValueError("grad partly overlaps the buffer; pass a copy")
    return call, _flag(call, flag, flag_label)


def _flag(call: Call, flag: Any, label: str) -> Any:
    if _checks.is_flag(flag):
        return bool(flag)
    if not is_array(flag):
        raise TypeError(f"{label} must be a bool or a bool array, not {type(flag).__qualname__}")
    native = call.view(flag, label, write=False)
    if native.dtype != bool or native.size != 1:
        raise TypeError(
            f"{label} has dtype {native.dtype} and shape {native.shape}; expected one bool"
        )
    return native


def _broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    extra = len(target) - len(shape)
    return extra >= 0 and all(
        length in (1, wanted) for length, wanted in zip(shape, target[extra:], strict=True)
    )
