"""Random bits by counters, and numbers that are rounded up or down by them.

The bits of a key and a counter n are those of the n-th number of a SplitMix64 generator whose state
begins at the key (G. L. Steele, D. Lea and C. H. Flood, "Fast Splittable Pseudorandom Number
Generators", OOPSLA 2014; it passes BigCrush). So any part of a list can be computed by itself.
"""

from typing import Any

import numpy as np

from gradkit._numpy.blocks import Array

_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = (1 << 64) - 1
# Digits behind the leading one, the float64 exponent of the smallest normal number, infinity, NaN.
_FORMATS = {True: (10, 1009, 0x7C00, 0x7E00), False: (7, 897, 0x7F80, 0x7FC0)}


def key_of(seed: Any) -> int:
    """The key of a seed: an integer, or an array of one."""
    return _mixed(int(seed) & _WORD)


def random_bits(key: int, counter: int, count: int) -> Array:
    """32 random bits for each of so many counters, from one on."""
    first = (key + (counter + 1) * _STEP) & _WORD
    states = np.uint64(first) + np.arange(count, dtype=np.uint64) * np.uint64(_STEP)
    return _mixed(states) >> 32


def _mixed(state: Any) -> Any:
    """SplitMix64's output for a state: 64 bits of which each depends on all of the state's."""
    state = (state ^ (state >> 30)) * _FIRST
    state = state & _WORD
    state = (state ^ (state >> 27)) * _SECOND
    state = state & _WORD
    return state ^ (state >> 31)


def rounded_at_random(values: Array, bits: Array, dtype: np.dtype[Any]) -> Array:
    """The bits of float64 numbers in a 16-bit dtype, each rounded to a neighbour.

    The one that is farther from 0 has the probability of the distance to the other, in units
    between them, rounded to a multiple of 2^-32. The exponent has no upper end for this, but what
    is above the largest number becomes infinite.
    """
    digits, least, infinity, nan = _FORMATS[dtype == np.float16]
    words = np.ascontiguousarray(values).view(np.uint64)
    size = words & (_WORD >> 1)
    exponent = np.maximum(size >> 52, 1)
    significand = (size & ((1 << 52) - 1)) | ((size >> 52 != 0).astype(np.uint64) << 52)
    below = np.maximum(least, exponent) - exponent  # places below the smallest normal number
    dropped = np.minimum(52 - digits + below, 95)
    places = np.minimum(dropped, 63)
    head = significand >> places
    share = (significand - (head << places) + (np.uint64(1) << (dropped - 33))) >> (dropped - 32)
    rounded = ((np.maximum(least, exponent) - least) << digits) + head + (bits < share)
    signed = np.minimum(rounded, infinity) | (words >> 63 << 15)
    return np.where(size > 0x7FF << 52, nan, signed).astype(np.uint16)
