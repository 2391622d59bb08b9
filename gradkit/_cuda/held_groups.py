"""Group norm and its gradient if a block's shared memory holds a group: data are read once."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Self, TypeAlias

import numpy as np

from gradkit._backend import Array, Shape
from gradkit._calls.roles import Bias, Data, InvStd, Mean, Scale
from gradkit._cuda.channel_kernels import Partials, held_group_gradient, held_group_norm
from gradkit._cuda.channel_launches import Columns, Launches
from gradkit._cuda.launch.buffers import VECTOR_BYTES, vector_of
from gradkit._cuda.launch.device import Device, workspace
from gradkit._cuda.launch.grids import column_sums, power_of_two, row_threads
from gradkit._cuda.launch.kernels import Launch, kernel, norm_macros
from gradkit._dtypes import Types, accumulation_name, dtype_named

_WARP = 32
_FEWEST, _MOST = 128, 512  # threads of a block
_LEAST = 64  # packs of a group: of less, few would be on their way at once
_PACKS = 8  # that a thread takes of a group, unless that gives fewer threads
_SHARING = 256  # threads of a block of four on a multiprocessor, which has registers for 1024
_ACCESSES = 8  # of a channel that a thread makes at least, unless it has fewer
_SLOTS = 2048  # bytes of shared memory that a kernel takes beside a group, at most
_FLOAT64 = np.dtype(np.float64)

# The forward pass reads x, scale and bias, and writes y, mean, inv_std.
NormInputs: TypeAlias = tuple[Data, Scale | None, Bias | None]
NormOuts: TypeAlias = tuple[Data, Mean, InvStd]
# The gradient reads dy, x, scale, mean and inv_std, and writes dx, dscale, dbias.
Inputs: TypeAlias = tuple[Data, Data, Scale | None, Mean, InvStd]
Outs: TypeAlias = tuple[Data | None, Scale | None, Bias | None]


@dataclass(frozen=True, eq=False)
class HeldGroups(Launches):
    """The launches of kernels whose blocks hold ``held`` bytes of a group."""

    held: int

    _FILE: ClassVar[str]
    _KERNEL: ClassVar[str]
    _ARRAYS: ClassVar[int]  # that a block holds a group of

    @classmethod
    def of(cls, device: Device, x: Array, axis: int, groups: int, types: Types) -> Self | None:
        """Launches for data like this; None if its groups do not fit or are not whole packs."""
        columns = Columns.of_groups(x, axis, groups)
        _, _, space, width = columns.extent
        whole = VECTOR_BYTES // x.itemsize
        packs, more = divmod(width * space, whole)
        size = cls._ARRAYS * packs * VECTOR_BYTES
        if columns.last or more or packs < _LEAST or size + _SLOTS > device.max_shared_memory:
            return None
        run, block = cls._divided(width, space, whole)
        if not run:
            return None
        macros = norm_macros(types, whole, RUN=run)
        loaded = kernel(device, cls._FILE, cls._KERNEL, **macros)
        resident = loaded.resident(math.prod(block), size) * device.multiprocessors
        grid = (min(columns.count // width, resident),)
        columns = replace(columns, vector=whole)
        accumulator = dtype_named(accumulation_name(types[0]))
        return cls(device, cls._FILE, macros, columns, grid, block, accumulator, size)

    @staticmethod
    def _divided(width: int, space: int, whole: int) -> tuple[int, Shape]:
        """The macro RUN, 0 if the kernel cannot, and the block; ``whole``: elements of a pack."""
        raise NotImplementedError

    @cached_property
    def _over_groups(self) -> Launch:
        return Launch(self.kernel(self._KERNEL), self.grid, self.block, self.held)

    @cached_property
    def _groups(self) -> tuple[np.integer[Any], ...]:
        """Groups, those of a sample, and the shape of each."""
        samples, channels, space, width = self.columns.extent
        groups = channels // width
        return np.int64(samples * groups), np.int64(groups), np.int32(space), np.int32(width)


class HeldNorm(HeldGroups):
    """Launches of the forward pass, whose blocks hold x."""

    _FILE, _KERNEL, _ARRAYS = "group_norm_held", held_group_norm, 1

    @staticmethod
    def _divided(width: int, space: int, whole: int) -> tuple[int, Shape]:
        run = whole if space % whole == 0 else int(space > whole)
        return run, (_threads(width * space // whole),)

    def write(self, inputs: NormInputs, outs: NormOuts, eps: float) -> None:
        """Write ``y``, ``mean`` and ``inv_std``."""
        self._over_groups(*inputs, *outs, *self._groups, np.float64(eps))


class HeldGradient(HeldGroups):
    """Launches of the gradient, whose blocks hold dy and x."""

    _FILE, _KERNEL, _ARRAYS = "group_norm_grad_held", held_group_gradient, 2

    @staticmethod
    def _divided(width: int, space: int, whole: int) -> tuple[int, Shape]:
        run = vector_of(VECTOR_BYTES // whole, space)
        return run, _block(width, space // run, width * space // whole)

    def write(self, inputs: Inputs, outs: Outs, *, has_sums: bool) -> None:
        """Write what is wanted; ``has_sums``: a parameter's gradient is."""
        dx, dscale, dbias = outs
        sums: Partials | None = None
        if has_sums:
            sums = workspace(self.device, (2, self.columns.count), _FLOAT64)
        self._over_groups(*inputs, sums, dx, *self._groups)
        if has_sums:
            self._parameters(sums, dscale, dbias, *self._rows)

    @cached_property
    def _parameters(self) -> Launch:
        """Launch of the kernel that adds up the sums of all samples."""
        parameter, channels = str(self.macros["PARAM_T"]), self.columns.channels
        rows = self.columns.count // channels
        return column_sums(self.device, _FLOAT64.name, parameter, channels, planes=2, rows=rows)

    @cached_property
    def _rows(self) -> tuple[np.int64, np.int64]:
        """Samples and channels."""
        return np.int64(self.columns.extent[0]), np.int64(self.columns.channels)


def _threads(packs: int) -> int:
    """Threads for a group that a block sees as one row, of which nearly all have work."""
    fewer = max(_SHARING, packs // (2 * _PACKS))
    return row_threads(packs, min(_MOST, max(_FEWEST, packs // _PACKS), fewer))


def _block(width: int, accesses: int, packs: int) -> Shape:
    """Threads for each channel of a group, which has so many accesses, and channels at once."""
    threads = min(_MOST, max(_FEWEST, power_of_two(packs // _PACKS)))
    across = min(_WARP, power_of_two(-(-accesses // _ACCESSES)))
    rounds = -(-width // (threads // across))
    beside = _WARP // across  # channels of a warp, all of one block
    down = -(-width // (rounds * beside)) * beside
    if across == _WARP:
        across = min(row_threads(accesses, _MOST), threads // down // _WARP * _WARP)
    return across, down
