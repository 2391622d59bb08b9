"""PyTorch: plain tensors on the CPU and on CUDA devices."""

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache
from itertools import pairwise
from operator import attrgetter, methodcaller
from typing import Any

import numpy as np

from gradkit._arrays import cuda
from gradkit._arrays.base import NOTHING, Framework
from gradkit._backend import Array, Borrowed, Shape
from gradkit._dtypes import FLOATS, dtype_named

_requires_grad, _is_cuda = attrgetter("requires_grad"), attrgetter("is_cuda")
_dtype_of, _shape_of = attrgetter("dtype"), attrgetter("shape")
_device_number = methodcaller("get_device")
_ACCEPTED = frozenset((*FLOATS, "bool", "uint8", "int32", "int64"))
_REQUIRES_GRAD = (
    "is a tensor that requires grad, perhaps a parameter; pass grads_of(parameters) for the "
    "gradients, or its .detach() for its values"
)


class Torch(Framework):
    """``torch.Tensor`` and ``torch.nn.Parameter`` themselves.

    On the CPU, ``Tensor.numpy`` is several times as fast as DLPack, and raises an error for more
    kinds of tensors that have no plain memory. On a CUDA device, views are made from addresses.
    """

    name = "torch"
    module = "torch"

    def owns(self, kind: type) -> bool:
        torch = sys.modules["torch"]
        return kind is torch.Tensor or kind is torch.nn.Parameter

    def view(self, array: Any, *, write: bool, detach: bool = False) -> Array:
        if array.requires_grad:  # under torch.no_grad, numpy() would accept it
            if write or not detach:
                raise TypeError(_REQUIRES_GRAD)
            array = array.detach()
        if not _is_cuda(array):
            try:
                view = array.numpy()
            except (TypeError, RuntimeError):
                pass  # the reason is found below: too slow to do for every tensor
            else:
                if array.data_ptr() or not view.size:
                    return view
        reason = _why_not(array)
        if reason:
            raise TypeError(reason)
        return _on_device(array) if _is_cuda(array) else _bits(array)

    def views(self, arrays: Sequence[Any], *, write: bool) -> Sequence[Array]:
        # The common case, plain tensors on the host, takes a few passes over the list.
        if not (_is_cuda(arrays[0]) or any(map(_requires_grad, arrays))):
            tensor = sys.modules["torch"].Tensor
            try:
                views = list(map(tensor.numpy, arrays))
            except (TypeError, RuntimeError):
                pass
            else:
                if all(map(tensor.data_ptr, arrays)):
                    return views
        elif (borrowed := _borrowed(arrays)) is not None:
            return borrowed
        return super().views(arrays, write=write)

    def empty(self, shape: Shape, dtype: np.dtype[Any], like: Any) -> tuple[Array, Any] | None:
        if not _is_cuda(like):
            return None
        # PyTorch's allocator tracks the streams that a tensor is used on.
        torch = sys.modules["torch"]
        tensor = torch.empty(shape, dtype=_torch_dtype(dtype), device=like.device)
        return _on_device(tensor), tensor

    def wrap(self, result: Array, like: Any) -> Any:  # noqa: ARG002
        torch = sys.modules["torch"]
        make = torch.from_numpy if type(result) is np.ndarray else torch.from_dlpack
        try:
            return make(result)
        except (TypeError, BufferError):  # bfloat16: pass its bits
            return make(result.view(np.int16)).view(torch.bfloat16)

    def wrote(self, arrays: Sequence[Any]) -> None:
        sys.modules["torch"].autograd.graph.increment_version(arrays)

    def on_stream(self, like: Any) -> AbstractContextManager[Any]:
        if not _is_cuda(like):
            return NOTHING
        stream = sys.modules["torch"].cuda.current_stream(like.device)
        return cuda.on_stream(like.device.index, stream.cuda_stream, _allocate)

    def known_disjoint(self, arrays: Sequence[Any], views: Sequence[Array]) -> bool:
        if isinstance(views, Borrowed):
            return super().known_disjoint(arrays, views)
        spans = []
        for array in arrays:
            if not array.is_contiguous():
                return False
            start = array.data_ptr()
            spans.append((start, start + array.nbytes))
        spans.sort()
        return all(before[1] <= after[0] for before, after in pairwise(spans))

    def disjoint(self, addresses: tuple[int, ...], layout: tuple[tuple[Any, ...], ...]) -> bool:
        if len(layout) > 2:
            return False
        sizes = [count * _numpy_dtype(dtype).itemsize for dtype, count in zip(*layout, strict=True)]
        return cuda.disjoint(addresses, sizes)


class TorchSubclass(Framework):
    """Any other subclass of ``torch.Tensor``.

    DTensor, FakeTensor and wrapper subclasses hold no memory of their own: reading them would
    dereference a null pointer.
    """

    name = "torch subclass"
    module = "torch"

    def owns(self, kind: type) -> bool:
        return issubclass(kind, sys.modules["torch"].Tensor)

    def view(self, array: Any, *, write: bool, detach: bool = False) -> Array:  # noqa: ARG002
        kind = type(array).__qualname__
        instead = (
            "gradkit.distributed.shards_of(parameters)"
            if hasattr(array, "to_local")
            else "a plain torch.Tensor"
        )
        raise TypeError(f"is a {kind}, a subclass of torch.Tensor that may hold no memory of its "
                        f"own; pass {instead}")  # fmt: skip


def _bits(tensor: Any) -> Array:
    """A bfloat16 tensor on the host, which ``Tensor.numpy`` does not support."""
    torch = sys.modules["torch"]
    if tensor.dtype is not torch.bfloat16:
        return tensor.numpy()  # raises the error
    return tensor.view(torch.int16).numpy().view(dtype_named("bfloat16"))


def _borrowed(tensors: Sequence[Any]) -> Borrowed | None:
    """Many CUDA tensors in a few passes over them, if ``_why_not`` accepts each of them.

    A tensor of another layout than strided has no ``data_ptr``, or no ``is_contiguous``.
    """
    tensor = sys.modules["torch"].Tensor
    try:
        if (
            not all(map(_is_cuda, tensors))
            or any(map(_requires_grad, tensors))
            or any(map(tensor.is_neg, tensors))
            or len(_device_numbers(tensors)) > 1
        ):
            return None
        addresses, dtypes = tuple(map(tensor.data_ptr, tensors)), tuple(map(_dtype_of, tensors))
        layout: tuple[tuple[Any, ...], ...]
        if all(map(tensor.is_contiguous, tensors)):
            layout = dtypes, tuple(map(tensor.numel, tensors))
        else:
            layout = dtypes, tuple(map(_shape_of, tensors)), tuple(map(tensor.stride, tensors))
    except RuntimeError:
        return None
    if not (all(addresses) and all(_name_of(dtype) in FLOATS for dtype in set(dtypes))):
        return None
    return Borrowed(addresses, layout, lambda k: _on_device(tensors[k]))


def _device_numbers(tensors: Sequence[Any]) -> set[int]:
    return set(map(sys.modules["torch"].Tensor.get_device, tensors))  # quicker than one by one


@cache
def _name_of(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


@cache
def _numpy_dtype(dtype: Any) -> np.dtype[Any]:
    name = _name_of(dtype)
    return dtype_named(name) if name in FLOATS else np.dtype(name)


@cache
def _torch_dtype(dtype: np.dtype[Any]) -> Any:
    return getattr(sys.modules["torch"], str(dtype))


def _on_device(tensor: Any) -> Array:
    """A CUDA tensor's memory as a CuPy array."""
    dtype = _numpy_dtype(tensor.dtype)
    strides = tuple(step * dtype.itemsize for step in tensor.stride())
    return cuda.borrow(
        tensor, tensor.data_ptr(), _device_number(tensor), tuple(tensor.shape), strides, dtype
    )


def _allocate(size: int) -> Any:
    """Memory on the current device from PyTorch's allocator, or from its pool for a graph."""
    torch = sys.modules["torch"]
    tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
    return cuda.pointer_of(tensor, tensor.data_ptr(), size, tensor.device.index)


def _why_not(tensor: Any) -> str | None:
    """Why a tensor's memory does not hold its values as they are, or ``None``."""
    torch = sys.modules["torch"]
    device = tensor.device.type
    if tensor.layout is not torch.strided:
        return f"is stored as {tensor.layout}; pass its .to_dense()"
    if device == "meta":
        return "is on the meta device and holds no values"
    if device not in ("cpu", "cuda"):
        return f"is on device {device!r}; gradkit computes on the CPU and on CUDA devices"
    if tensor.is_quantized:
        return "is quantised; pass its .dequantize()"
    if _name_of(tensor.dtype) not in _ACCEPTED:
        return f"has dtype {tensor.dtype}; accepted: {', '.join(FLOATS)}"
    if tensor.is_neg():
        return "has its negative bit set: its memory holds -x; pass its .resolve_neg()"
    try:
        address = tensor.data_ptr()
    except RuntimeError:
        address = 0
    if address == 0 and tensor.numel():
        return (
            "holds no memory (inside vmap, grad, functionalize, or an efficient zero tensor); call "
            "gradkit on plain tensors, outside of such transformations"
        )
    return None
