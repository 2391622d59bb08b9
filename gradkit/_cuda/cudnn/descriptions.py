"""Describe an array of any rank, channel axis and memory order to cuDNN.

Batch norm treats all axes except the channels alike, so their order does not matter if it is the
same for every array of a call. In memory order, the axes before the channels merge into one, and
so do those after: (before, C, after), contiguous. So every dense array of any rank and strides has
a 4-D descriptor.
"""

import math
from dataclasses import dataclass
from typing import Any

from gradkit.errors import CudnnError

_INT_MAX = 2**31 - 1


@dataclass(frozen=True)
class Dense:
    """The memory layout of x."""

    order: tuple[int, ...]  # the array's axes in memory, outermost first
    dims: tuple[int, int, int, int]  # n, c, h, w
    strides: tuple[int, int, int, int]  # of dims, in elements
    channels_last: bool

    @classmethod
    def of(cls, x: Any, channel_axis: int) -> "Dense":
        """The layout of x, or that of a dense copy of it."""
        if x.size == 0:
            raise _not_described(f"shape {x.shape} has no elements")
        long = _in_memory(x, channel_axis)
        at = long.index(channel_axis)
        outer, inner = ([x.shape[axis] for axis in part] for part in (long[:at], long[at + 1 :]))
        channels = x.shape[channel_axis]
        before, after = math.prod(outer), math.prod(inner)
        last = after == 1 and len(outer) > 1
        if last:
            # Not (before, C, 1, 1): cuDNN limits the batch more tightly than the other dimensions.
            n, h = outer[0], before // outer[0]
            dims, strides = (n, channels, h, 1), (h * channels, 1, channels, channels)
        else:
            dims, strides = (before, channels, after, 1), (channels * after, after, 1, 1)
        too_large = max(dims + strides)
        if too_large > _INT_MAX:
            raise _not_described(f"{too_large} does not fit a C int")
        short = [axis for axis in range(x.ndim) if axis not in long]
        return cls((*short, *long), dims, strides, last)


def channels_innermost(x: Any, channel_axis: int) -> bool:
    """True if neighbours in memory belong to different channels."""
    return _in_memory(x, channel_axis)[-1] == channel_axis


def _in_memory(x: Any, channel_axis: int) -> list[int]:
    """The channel axis and all axes longer than 1, outermost in memory first."""
    long = [axis for axis in range(x.ndim) if x.shape[axis] > 1]
    long.sort(key=lambda axis: -abs(x.strides[axis]))
    if channel_axis not in long:
        long.insert(1, channel_axis)
    return long


def _not_described(reason: str) -> CudnnError:
    text = f"CUDNN_STATUS_NOT_SUPPORTED: {reason}"
    return CudnnError("cudnnSetTensor4dDescriptorEx", None, text)
