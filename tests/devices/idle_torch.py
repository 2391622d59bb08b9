"""PyTorch's CPU tensors taken for CUDA ones, on ``idle_cupy``: what is left is the host's work.

Tensors are asked the same number of questions, of which some are replaced by others that take as
long: a CPU tensor is on no CUDA device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter, methodcaller
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt

from gradkit._arrays import cuda
from gradkit._arrays import torch as adapter
from tests.devices.idle_cupy import idle_cupy


@contextmanager
def idle_torch() -> Iterator[Callable[[npt.NDArray[Any]], Any]]:
    """Give a function that makes a tensor of a host array's own memory."""
    import torch  # type: ignore[import-not-found,unused-ignore]

    stream = SimpleNamespace(cuda_stream=0)

    def current_stream(device: Any) -> Any:  # noqa: ARG001
        return stream

    def device_numbers(tensors: Any) -> set[int]:
        return set(map(torch.Tensor.storage_offset, tensors))  # 0

    @contextmanager
    def on_stream(*arguments: Any) -> Iterator[None]:  # noqa: ARG001
        yield

    with (
        idle_cupy(),
        mock.patch.object(adapter, "_is_cuda", attrgetter("is_cpu")),
        mock.patch.object(adapter, "_device_number", methodcaller("storage_offset")),  # 0
        mock.patch.object(adapter, "_device_numbers", device_numbers),
        mock.patch.object(torch.cuda, "current_stream", current_stream),
        mock.patch.object(cuda, "on_stream", on_stream),
    ):
        yield lambda host: torch.from_numpy(np.ascontiguousarray(host))
