"""How an array of any rank, channel axis and memory order is told to cuDNN.

Batch norm treats all axes but the channels alike, so that their order does not matter as long
as every array of a call has the same one. Taken in the order in which they lie in memory, the
axes before the channels become one and so do those after: (before, C, after), contiguous. That
makes a 4-D descriptor of every dense array, whatever its rank and strides.
"""

import math
from dataclasses import dataclass
from typing import Any

from gradkit.errors import CudnnError

_INT_MAX = 2**31 - 1


@dataclass(frozen=True)
class Dense:
    """Where x lies in memory."""

    order: tuple[int, ...]  # the array's axes from the outermost in memory to the innermost
    dims: tuple[int, int, int, int]  # n, c, h, w
    strides: tuple[int, int, int, int]  # of those, in elements
    channels_last: bool

    @classmethod
    def of(cls, x: Any, channel_axis: int) -> "Dense":
        """The layout of x, or the one that it will have once it has been made dense."""
        if x.size == 0:
            raise _not_described(f"shape {x.shape} has no elements")
        long = [axis for axis in range(x.ndim) if x.shape[axis] > 1]
        long.sort(key=lambda axis: -abs(x.strides[axis]))
        if channel_axis not in long:
            long.insert(1, channel_axis)
        at = long.index(channel_axis)
        outer, inner = ([x.shape[axis] for axis in part] for part in (long[:at], long[at + 1 :]))
        channels = x.shape[channel_axis]
        before, after = math.prod(outer), math.prod(inner)
        last = after == 1 and len(outer) > 1
        if last:
            # Many small images, not one row of them each: cuDNN limits the batch more tightly.
            n, h = outer[0], before // outer[0]
            dims, strides = (n, channels, h, 1), (h * channels, 1, channels, channels)
        else:
            dims, strides = (before, channels, after, 1), (channels * after, after, 1, 1)
        too_large = max(dims + strides)
        if too_large > _INT_MAX:
            raise _not_described(f"{too_large} does not fit a C int")
        short = [axis for axis in range(x.ndim) if axis not in long]
        return cls((*short, *long), dims, strides, last)


def _not_described(reason: str) -> CudnnError:
    text = f"CUDNN_STATUS_NOT_SUPPORTED: {reason}"
    return CudnnError("cudnnSetTensor4dDescriptorEx", None, text)
