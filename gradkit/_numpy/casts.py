"""16-bit floats to float32 and back, a whole array at a time.

NumPy converts float16 one number after the other. Here the bits without the sign, 13 places up,
are those of a float32 that is 2^112 times smaller; subnormal numbers are no exception.
"""

from typing import Any, TypeAlias

import numpy as np

from gradkit._numpy import tuning

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

_F16, _F32, _F64 = (np.dtype(kind) for kind in (np.float16, np.float32, np.float64))
_I16, _I32 = np.dtype(np.int16), np.dtype(np.int32)
_PLACES = 13  # bits that float32's fraction has beyond float16's
_UP, _DOWN = np.float32(2.0**112), np.float32(2.0**-112)
_BEYOND = np.float32(2.0**16)  # the first power of two that is infinite in float16
_LEAST = np.float32(2.0**-14)  # float16's smallest normal number


def pays(array: Array) -> bool:
    """Whether an array is worth converting before a sum, rather than by NumPy within it."""
    return array.size >= tuning.CONVERTED and array.itemsize == 2


def rounds_twice(source: np.dtype[Any], target: np.dtype[Any]) -> bool:
    """Whether a cast by NumPy goes through float32: of float64 to bfloat16."""
    return source == _F64 and target.itemsize == 2 and target != _F16


def widen(source: Array, target: Array) -> None:
    """``target = source``; the target has no gaps."""
    simple = pays(source) and source.dtype == _F16 and target.dtype == _F32
    if not (simple and _all_finite(source)):
        target[...] = source
        return
    bits = target.view(_I32)
    bits[...] = source.view(_I16)
    bits <<= _PLACES
    bits &= ~(0x7 << 28)  # copies of the sign
    target *= _UP


def narrow(values: Array, target: Array, room: Array) -> None:
    """``target = values``, rounded to nearest even; overwrites values and as much of the room.

    bfloat16's own cast of float64 goes through float32, and so rounds twice.
    """
    if rounds_twice(values.dtype, target.dtype):
        target[...] = _beside_ties(values, room)
        return
    if not (pays(target) and target.dtype == _F16 and values.dtype == _F32):
        target[...] = values
        return
    bits, half = values.view(_I32), target.view(_I16)
    magic = room[: values.size].reshape(values.shape)
    magic_bits = magic.view(_I32)
    np.right_shift(bits, 16, out=magic_bits)
    half[...] = magic_bits
    half &= -0x8000  # the sign
    # 2^13 times a number's power of two: the last bit of a sum with it is float16's last bit.
    np.bitwise_and(bits, 0xFF << 23, out=magic_bits)
    np.clip(magic, _LEAST, _BEYOND, out=magic)
    magic *= np.float32(1.5 * 2**_PLACES)  # 1.5 for the sum to keep its exponent either way
    values += magic
    values -= magic
    np.clip(values, -_BEYOND, _BEYOND, out=values)
    values *= _DOWN
    bits >>= _PLACES
    low = room.view(_I16)[: values.size].reshape(values.shape)
    low[...] = bits
    half |= low


def _beside_ties(values: Array, room: Array) -> Array:
    """Float64 as float32, where what becomes a tie of bfloat16 lies on its own side of it.

    It lies in the room, which has as many bytes as the values.
    """
    bits, low = (room.view(_I32)[k * values.size :][: values.size] for k in (0, 1))
    single = bits.view(_F32).reshape(values.shape)
    single[...] = values
    np.bitwise_and(bits, 0xFFFF, out=low)
    (ties,) = np.nonzero(low == 0x8000)
    if ties.size:
        rest = values.reshape(-1)[ties] - bits.view(_F32)[ties]
        bits[ties] += np.sign(rest * values.reshape(-1)[ties]).astype(_I32)
    return single


def _all_finite(source: Array) -> bool:
    positive, negative = source.view(np.int16).max(), source.view(np.uint16).max()
    return bool(positive < 0x7C00 and negative < 0xFC00)
