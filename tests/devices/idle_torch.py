"""PyTorch's CPU tensors taken for CUDA ones, where CuPy has a device of whatever kind.

Tensors are asked the same number of questions, of which some are replaced by others that take as
long: a CPU tensor is on no CUDA device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter, methodcaller
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt

from gradkit._arrays import cuda
from gradkit._arrays import torch as adapter

_ROOM = 1 << 20  # bytes that every allocation shares: nobody looks at what is there
_number = methodcaller("storage_offset")  # 0, as the device's


@contextmanager
def _tensors_on_a_device() -> Iterator[None]:
    code: Any = adapter._describing()
    code.use_places(0, 1)  # as DLPack numbers types of devices, 1 is the host
    try:
        yield
    finally:
        code.use_places(1, 2)


@contextmanager
def torch_on_cuda() -> Iterator[Callable[[npt.NDArray[Any]], Any]]:
    """Give a function that makes a tensor of a host array's own memory."""
    import cupy
    import torch  # type: ignore[import-not-found,unused-ignore]

    def stream_of(device: int) -> int:  # noqa: ARG001
        return 0

    room = cupy.cuda.alloc(_ROOM)

    def allocate(size: int) -> Any:
        tensor = torch.empty(size, dtype=torch.uint8, device="cpu")
        return cuda.pointer_of(tensor, room.ptr, size, _number(tensor))

    with (
        _tensors_on_a_device(),
        mock.patch.object(adapter, "_is_cuda", attrgetter("is_cpu")),
        mock.patch.object(adapter, "_device_number", _number),
        mock.patch.object(adapter, "_allocate", allocate),
        mock.patch.object(adapter, "_stream_of", stream_of),
    ):
        yield lambda host: torch.from_numpy(np.ascontiguousarray(host))
