"""Arrays that kernels can read or write from end to end: the caller's own, or copies of them."""

import math
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np

from gradkit._backend import Address, Array
from gradkit._cuda.launch.device import Device, keep_if_captured, note_others, scratch
from gradkit._cuda.launch.kernels import Launch, kernel

Role = TypeVar("Role")
Inputs = TypeVar("Inputs", bound=Sequence[Array | None])
Outs = TypeVar("Outs", bound=Sequence[Array | None])
VECTOR_BYTES = 16  # that one access moves at most
_WORD = 8  # bytes that a thread of an upload moves
_THREADS = 256

_in_c_order = attrgetter("flags.c_contiguous")


def vector_of(itemsize: int, run: int) -> int:
    """Elements that one access moves: the largest power of two that divides runs of ``run``.

    At most 16 bytes' worth. Shapes alone decide, so that results do not depend on where arrays lie
    in memory.
    """
    return math.gcd(run, VECTOR_BYTES // itemsize)


class Usable:
    """The arrays of a plan as any kernel takes them, if it can use them as they are: nearly always.

    If not, ask of each by itself: some kernels need less. The strides of a plan's arrays are always
    the same, so they are looked at once; where they begin, in each call. ``gapless``: whether all
    lie in C order without gaps, once somebody asked.
    """

    def __init__(self) -> None:
        self.gapless: bool | None = None

    def __call__(self, arrays: Sequence[Array | None]) -> Any:
        """Return the arrays' addresses if all are contiguous and aligned for vectors, else None.

        An absent one begins at 0; the first one is there. An emulated device takes the arrays.
        Whoever gives addresses has looked.
        """
        if type(arrays[0]) is Address:
            return arrays
        if self.gapless is None:
            self.gapless = all(array is None or _in_c_order(array) for array in arrays)
        if not self.gapless:
            return None
        emulated = isinstance(arrays[0], np.ndarray)
        addresses, every = [], 0
        for array in arrays:
            at = 0 if array is None else array.ctypes.data if emulated else array.data.ptr
            every |= at
            addresses.append(at)
        if every % VECTOR_BYTES:
            return None
        return arrays if emulated else addresses


def all_usable(arrays: Sequence[Array], vector: int) -> bool:
    """True if a kernel of such vectors can use arrays as they are, whatever their shapes."""
    return all(_contiguous_aligned(array, vector) for array in arrays)


def contiguous(device: Device, array: Role, vector: int = 1) -> Role:
    """The array itself if a kernel can read it in vectors from end to end, else a copy."""
    view: Any = array
    if view is None or _contiguous_aligned(view, vector):
        return array
    return copied(device, view)


def copied(device: Device, array: Array) -> Any:
    """A copy in C order without gaps."""
    note_others()
    whole = (_bits(array) if _aligned(array) else _bytes(array)).copy(order="C")
    if whole.dtype != array.dtype:
        whole = whole.view(array.dtype).reshape(array.shape)
    return keep_if_captured(device, whole)


def writable_like(device: Device, out: Role, vector: int = 1) -> Role:
    """Return ``out``, or scratch like it if the kernel cannot write it directly."""
    view: Any = out
    if view is None or _contiguous_aligned(view, vector):
        return out
    return scratch(device, view.shape, view.dtype)


def usable(
    device: Device, inputs: Inputs, outs: Outs, vector: Callable[[Array | None], int] = lambda _: 1
) -> tuple[Inputs, Outs]:
    """``contiguous`` of each input, and ``writable_like`` of each output."""
    read: Any = [contiguous(device, array, vector(array)) for array in inputs]
    written: Any = [writable_like(device, out, vector(out)) for out in outs]
    return read, written


def copy_back(out: Array | None, written: Array | None) -> None:
    """Copy results from what ``writable_like`` gave to where they belong."""
    if written is None or out is None or written is out or type(written) is Address:
        return
    note_others()
    if _aligned(out):
        _bits(out)[...] = _bits(written)
    else:
        _bytes(out)[...] = _bytes(written)


def fill(device: Device, out: Array, value: float) -> None:
    """Write one number to every element."""
    note_others()
    target = out if _aligned(out) else scratch(device, out.shape, out.dtype)
    bits = _bits(target)
    bits.fill(np.asarray(value, target.dtype).view(bits.dtype)[()])
    copy_back(out, target)


def on_device(device: Device, numbers: Any) -> Array:
    """Host numbers as doubles."""
    host = np.asarray(numbers, np.float64)
    return upload(device, host).view(host.dtype).reshape(host.shape)


def upload(device: Device, host: np.ndarray[Any, Any]) -> Array:
    """A copy on the device of an array of words of 8 bytes, as bytes.

    While a graph is captured they travel in parameters of launches, which a graph has copies of:
    each replay would read the array again, which nobody keeps. The kernel is loaded before that.
    """
    note_others()
    carried = device.parameter_bytes // _WORD * _WORD - 2 * _WORD  # an address and a number follow
    loaded = kernel(device, "upload", "upload", BYTES=carried)
    if not device.capturing():
        return device.upload(host)
    content = host.tobytes()
    copy = scratch(device, len(content), np.uint8)
    for first in range(0, len(content), carried):
        words = min(carried, len(content) - first) // _WORD
        parameters = np.zeros((), f"V{carried}")
        parameters[...] = content[first : first + carried]
        launch = Launch(loaded, (-(-words // _THREADS),), (_THREADS,))
        launch(parameters, copy[first:], np.uint32(words))
    return copy


def assign(to: Array, source: Array) -> None:
    """``to[...] = source``, with CuPy 13 also between bfloat16 and float32.

    Numbers are rounded to the nearest, ties to the even one.
    """
    note_others()
    if to.dtype == source.dtype:
        _bits(to)[...] = _bits(source)
    elif _is_bfloat16(to) and source.dtype == np.float32:
        bits = source.view(np.uint32)
        is_nan = ((bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)).astype(np.uint32)
        up = np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
        # A NaN stays one: it is not rounded, and gets a bit that is kept.
        rounded = (bits | is_nan << np.uint32(22)) + up * (np.uint32(1) - is_nan)
        _bits(to)[...] = (rounded >> np.uint32(16)).astype(np.uint16)
    else:
        to[...] = as_readable(source)


def as_readable(array: Array) -> Array:
    """The array, or its values in a dtype that CuPy's own kernels know."""
    if not _is_bfloat16(array):
        return array
    return (_bits(array).astype(np.uint32) << np.uint32(16)).view(np.float32)


def _is_bfloat16(array: Any) -> bool:
    """True if it is an array of CuPy's in bfloat16."""
    return array.dtype.kind == "V" and not isinstance(array, np.ndarray)


def _bits(array: Any) -> Any:
    """The array as CuPy's own kernels can copy it: up to CuPy 13 they know no bfloat16."""
    return array.view(np.uint16) if _is_bfloat16(array) else array


def _aligned(array: Any) -> bool:
    """True if the library's own kernels can copy an array: CuPy's need aligned elements."""
    return isinstance(array, np.ndarray) or array.data.ptr % array.itemsize == 0


def _bytes(array: Any) -> Any:
    """The bytes of one of CuPy's arrays, those of an element along a last axis."""
    shape, strides = (*array.shape, array.itemsize), (*array.strides, 1)
    return type(array)(shape, np.uint8, array.data, strides)


def _contiguous_aligned(array: Array, vector: int) -> bool:
    """True if an array lies in C order without gaps, and begins where its first access may."""
    alignment = min(VECTOR_BYTES, vector * array.itemsize)
    contiguous: bool = array.flags.c_contiguous
    return contiguous and address_of(array) % alignment == 0


def address_of(array: Array) -> int:
    """Address of an array, to ask about alignment and overlap; kernels take the array."""
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr
