"""PyTorch: plain tensors on the CPU and on CUDA devices."""

import ctypes
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache, lru_cache, partial
from itertools import repeat
from math import prod
from operator import attrgetter, methodcaller
from typing import Any, TypeAlias

import numpy as np

from gradkit import _host
from gradkit._arrays import cuda
from gradkit._arrays.base import NOTHING, Framework
from gradkit._backend import LARGE, Array, Shape, Spec
from gradkit._calls.backend import Backend, NeedsArrays
from gradkit._calls.record import Plan
from gradkit._dtypes import FLOATS, dtype_named

_requires_grad, _is_cuda = attrgetter("requires_grad"), attrgetter("is_cuda")
_dtype_of, _shape_of, _is_cpu = map(attrgetter, ("dtype", "shape", "is_cpu"))
_device_number = methodcaller("get_device")
_ACCEPTED = frozenset(
    (*FLOATS, "bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))
)
_REQUIRES_GRAD = (
    "is a tensor that requires grad, perhaps a parameter; for its values pass its .detach(), for "
    "gradients grads_of(parameters)"
)
_CAST = re.compile(r"\.astype\(np\.(\w+)\)")
NESTED = "pass its .values(), or each tensor of its .unbind()"


class Torch(Framework):
    """``torch.Tensor`` and ``torch.nn.Parameter`` themselves.

    Views are made from addresses. ``Tensor.numpy`` takes as long, but leaves a storage that can
    no longer be resized, as FSDP2 resizes those of parameters; DLPack takes three times as long.
    """

    name = "torch"
    module = "torch"

    def owns(self, kind: type) -> bool:
        torch = sys.modules["torch"]
        is_tensor = kind is torch.Tensor or kind is torch.nn.Parameter
        if is_tensor:
            _describing()  # from now on compiled code knows tensors
            _share_threads()
        return is_tensor

    def in_its_words(self, text: str) -> str:
        return _CAST.sub(r".to(torch.\1)", text).replace(".astype(", ".to(")

    def view(self, array: Any, *, write: bool, detach: bool = False) -> Array:
        if array.requires_grad and (write or not detach):
            raise TypeError(_REQUIRES_GRAD)
        view = _seen(array, on_gpu=_is_cuda(array))
        if view is not None:
            return view
        reason = _why_not(array)
        if reason:
            raise TypeError(reason)
        return _on_device(array)

    def views(self, arrays: Sequence[Any], *, write: bool) -> Sequence[Array]:
        # The common case, plain tensors on the host, takes a few passes over the list.
        usual = not (_is_cuda(arrays[0]) or any(map(_requires_grad, arrays)))
        views = _all_on_host(arrays) if usual else None
        return super().views(arrays, write=write) if views is None else views

    def alike(self, arrays: list[Any]) -> list[Any] | None:
        torch = sys.modules["torch"]
        if _is_observed(arrays[0]):
            return None
        empty = partial(torch.empty_like, memory_format=torch.contiguous_format)
        most = max(map(torch.Tensor.numel, arrays)) * torch.float64.itemsize
        if most < LARGE or _is_cuda(arrays[0]):
            return list(map(empty, arrays))
        return [
            empty(a) if a.nbytes < LARGE else _large(a.shape, _numpy_dtype(a.dtype), a.device)()
            for a in arrays
        ]

    def new(self, shape: Shape, dtype: np.dtype[Any], like: Any) -> Any:
        torch = sys.modules["torch"]
        if shape == () and like.is_cpu:  # in half the time
            tensor = torch.empty_like(_number_of(dtype))
        elif prod(shape) * dtype.itemsize >= LARGE and not _is_observed(like):
            return _large(shape, dtype, like.device)()
        else:
            tensor = torch.empty(shape, dtype=_torch_dtype(dtype), device=like.device)
        return None if _is_observed(tensor) else tensor

    def outputs(self, specs: Sequence[Spec | None], table: Any) -> tuple[list[Any], list[Any]]:
        like = table.arrays[0]
        tensors = [spec and self.new(spec.shape, spec.dtype, like) for spec in specs]
        if table.device < 0:  # compiled code takes them
            return tensors, tensors
        return [each if each is None else _on_device(each) for each in tensors], tensors

    def results(self, plan: Plan, arrays: Sequence[Any]) -> Sequence[Any]:
        making, items = plan.making, [*arrays]
        if making is None:
            making, like = [], next(each for each in arrays if each is not None)
            for spec in plan.missing or ():
                model = None if spec is None else _model_of(spec)
                making.append(making_of(model, items, like.device))
                items.append(model)
            plan.making, items = making, [*arrays]
        make_all(making, items)
        return items[len(arrays) :]

    def compute(self, call: Any, arrays: Sequence[Any], results: Sequence[Any]) -> None:
        plan, fields = call.plan, call.__dict__
        if plan.on_host:  # compiled code takes tensors
            plan.compute(call)
            return
        tensors = dict(zip((*call.ordered_names, *call.result_names), (*arrays, *results)))  # noqa: B905 - strict takes longer
        for name, tensor in tensors.items():  # launches take addresses
            if tensor is not None:
                fields[name] = tensor.data_ptr()
        try:
            plan.compute(call)
        except NeedsArrays:
            for name, tensor in tensors.items():
                if tensor is not None:
                    fields[name] = _on_device(tensor)
            call.compute(plan.backend)

    def empty(self, spec: Spec, like: Any) -> tuple[Array, Any] | None:
        # PyTorch's allocator tracks the streams that a tensor is used on, and can resize.
        shape, transposition = spec.order or (spec.shape, ())
        tensor = self.new(shape, spec.dtype, like)
        if tensor is None:
            return None
        if transposition:
            tensor = _transposed(tensor, transposition)
        return _on_device(tensor) if _is_cuda(like) else _at(tensor.data_ptr(), tensor), tensor

    def wrap(self, result: Array, like: Any) -> Any:
        torch = sys.modules["torch"]
        on_host = type(result) is np.ndarray
        if on_host and (pair := self.empty(Spec("", result.shape, result.dtype), like)):
            pair[0][...] = result
            return pair[1]
        make = torch.from_numpy if on_host else torch.from_dlpack
        try:
            return make(result)
        except (TypeError, BufferError):  # bfloat16: pass its bits
            return make(result.view(np.int16)).view(torch.bfloat16)

    def wrote(self, arrays: Sequence[Any]) -> None:
        sys.modules["torch"].autograd.graph.increment_version(arrays)

    def on_stream(self, like: Any) -> AbstractContextManager[Any]:
        if not _is_cuda(like):
            return NOTHING
        number = _device_number(like)
        return cuda.on_stream(number, _stream_of(number), _allocate)

    def known_backend(self, device: int) -> Backend | None:
        return cuda.known_backend(device)


# How a result is made: like what is at a place, or by itself; an absent one is not. Places count
# what a call is given, and then its results.
Making: TypeAlias = int | Callable[[], Any] | None


def making_of(model: Any, items: Sequence[Any], device: Any) -> Making:
    """The way to make a tensor like a model, if there is one. Items never change layout."""
    if model is None:
        return None
    make, tensor = _maker(model, device), sys.modules["torch"].Tensor
    layout = model.shape, model.stride(), model.dtype
    for k, item in enumerate(items if make.func is sys.modules["torch"].empty_strided else ()):
        if isinstance(item, tensor) and (item.shape, item.stride(), item.dtype) == layout:
            return k
    return make


def make_all(making: Sequence[Making], items: list[Any]) -> None:
    """Append new tensors to what a call is given."""
    like = sys.modules["torch"].empty_like
    for each in making:
        if each is None:
            items.append(None)
        elif isinstance(each, int):
            items.append(like(items[each]))
        else:
            items.append(each())


def _maker(model: Any, device: Any) -> partial[Any]:
    """Return a function that makes tensors like a gapless one; large ones reuse memory."""
    shape, strides, dtype = tuple(model.shape), model.stride(), model.dtype
    if device.type == "cpu" and model.numel() * model.element_size() >= LARGE:
        code, name = _describing(), _name_of(dtype)
        if code is not None and name in FLOATS:
            return partial(code.new_tensor, shape, strides, FLOATS[name].code)
    # From a tuple as a size, `torch.empty` takes half as long again.
    empty = sys.modules["torch"].empty_strided
    return partial(empty, shape, strides, dtype=dtype, device=device)


@lru_cache(1024)
def _large(shape: Shape, dtype: np.dtype[Any], device: Any) -> partial[Any]:
    """Return a function that makes tensors in C order, in memory that is reused if possible."""
    return _maker(_model_of(Spec("", shape, dtype)), device)


def _model_of(spec: Spec) -> Any:
    """A tensor of such a shape, such strides and such a dtype, without memory."""
    shape, order = spec.order or (spec.shape, [*range(len(spec.shape))])
    dtype = _torch_dtype(spec.dtype)
    return sys.modules["torch"].empty(shape, dtype=dtype, device="meta").permute(order)


def _transposed(tensor: Any, axes: Sequence[int]) -> Any:
    """The memory of a new tensor, which no other one has, as one that is no view.

    Autograd refuses in-place operations, such as a ReLU's, on views that a function has made.
    """
    shape, strides = ([of[axis] for axis in axes] for of in (tensor.shape, tensor.stride()))
    return tensor.set_(tensor.untyped_storage(), tensor.storage_offset(), shape, strides)


class TorchSubclass(Framework):
    """Any other subclass of ``torch.Tensor``.

    DTensor, FakeTensor and wrapper subclasses hold no memory of their own: reading them would
    dereference a null pointer.
    """

    name = "torch subclass"
    module = "torch"

    def owns(self, kind: type) -> bool:
        return issubclass(kind, sys.modules["torch"].Tensor)

    def view(self, array: Any, *, write: bool, detach: bool = False) -> Array:
        if array.is_nested:
            raise TypeError(f"is a nested tensor; {NESTED}")
        kind = type(array).__qualname__
        instead = (
            "gradkit.distributed.shards_of(parameters)"
            if hasattr(array, "to_local")
            else "a plain torch.Tensor"
        )
        raise TypeError(f"is a {kind}, a subclass of torch.Tensor that may hold no memory of its "
                        f"own; pass {instead}")  # fmt: skip


def seen_on_host(like: Any, tensors: Sequence[Any], written: int) -> bytes | None:
    """A description of tensors that plans are cached by; None if compiled code cannot take them.

    Tensors are absent or on the host; the first ``written`` are written.
    """
    if _is_cuda(like) or not _host.is_compiled():
        return None
    code = _describing()
    return code and code.described_tensors(tensors, written)


@cache
def _describing() -> Any:
    """Compiled code that PyTorch describes tensors to, or ``None``: older versions, and no code."""
    torch, code = sys.modules["torch"], _host.code
    functions = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if code is None or functions is None:
        return None
    views = partial(Torch().views, write=False)
    return code if code.use_tensors(torch.Tensor, torch.nn.Parameter, functions, views) else None


@cache
def _share_threads() -> None:
    """Have compiled code work on the threads that PyTorch has of OpenMP, if it has such.

    They stay awake for milliseconds after each of its loops, and ours would wait for a processor.
    """
    names = "GOMP_parallel", "omp_get_thread_num", "omp_get_max_threads"
    extension = getattr(sys.modules["torch"], "_C", None)
    if _host.code is None or extension is None or sys.platform != "linux":
        return
    library = ctypes.CDLL(extension.__file__)  # and all that it is linked with
    if all(hasattr(library, name) for name in names):
        addresses = [ctypes.cast(library[name], ctypes.c_void_p).value for name in names]
        _host.code.use_openmp(*addresses)


_numbers: dict[Any, Any] = {}


def _number_of(dtype: np.dtype[Any]) -> Any:
    """A tensor of one number of that dtype on the host."""
    number = _numbers.get(dtype)
    if number is None:
        number = sys.modules["torch"].empty((), dtype=_torch_dtype(dtype), device="cpu")
        if not _is_observed(number):
            _numbers[dtype] = number
    return number


def _is_observed(tensor: Any) -> bool:
    """True if a mode, a transform or a tracer takes part in what is done to a tensor.

    It would not see what is written, or has made a tensor without memory.
    """
    torch = sys.modules["torch"]._C
    return bool(
        torch._dispatch_isTensorSubclassLike(tensor)
        or torch._are_functorch_transforms_active()
        or torch._get_tracing_state() is not None
    )


class _Memory(ctypes.c_char * sys.maxsize):  # type: ignore[misc]
    """All memory from an address on, and what keeps it from being freed."""

    owner: Any


def _at(address: int, tensor: Any) -> Array:
    """The memory of a tensor on the host; no element is at address 0."""
    memory = _Memory.from_address(address or 1)
    memory.owner = tensor
    dtype = _numpy_dtype(tensor.dtype)
    if tensor.is_contiguous():
        return np.ndarray(tensor.shape, dtype, memory)
    return np.ndarray(tensor.shape, dtype, memory, 0, _strides(tensor.stride(), dtype.itemsize))


def _seen(tensor: Any, *, on_gpu: bool = False) -> Array | None:
    """A view of a tensor on the host or on a CUDA device, if ``_why_not`` accepts it."""
    try:
        if tensor.is_neg() or _name_of(tensor.dtype) not in _ACCEPTED:
            return None
        address = tensor.data_ptr()
        if not (on_gpu or _is_cpu(tensor)) or (not address and tensor.numel()):
            return None
        return _on_device(tensor) if on_gpu else _at(address, tensor)
    except RuntimeError:  # of another layout than strided, or without memory
        return None


def _all_on_host(tensors: Sequence[Any]) -> Sequence[Array] | None:
    """The same of many tensors in a few passes over them, if all have elements."""
    tensor = sys.modules["torch"].Tensor
    try:
        if not all(map(_is_cpu, tensors)) or any(map(tensor.is_neg, tensors)):
            return None
        addresses, names = list(map(tensor.data_ptr, tensors)), list(map(_dtype_of, tensors))
        first = min(addresses)
        if first == 0 or not _ACCEPTED.issuperset(map(_name_of, set(names))):
            return None
        dtypes = list(map(_numpy_dtype, names))
        memory = _Memory.from_address(first)
        memory.owner = tuple(tensors)
        make: Any = np.ndarray
        places = repeat(memory), map((-first).__add__, addresses)
        if all(map(tensor.is_contiguous, tensors)):
            return list(map(make, map(_shape_of, tensors), dtypes, *places))
        sizes = [dtype.itemsize for dtype in dtypes]
        strides = map(_strides, map(tensor.stride, tensors), sizes)
        return list(map(make, map(_shape_of, tensors), dtypes, *places, strides))
    except RuntimeError:
        return None


@lru_cache
def _strides(steps: Shape, size: int) -> Shape:
    return tuple([step * size for step in steps])


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
    strides = _strides(tensor.stride(), dtype.itemsize)
    address, device = tensor.data_ptr(), _device_number(tensor)
    return cuda.borrow(tensor, address, device, tensor.shape, strides, dtype)


def _stream_of(device: int) -> int:
    """A stream's address, without an object for it, as PyTorch's compilers ask for it."""
    return sys.modules["torch"]._C._cuda_getCurrentRawStream(device)


def _allocate(size: int) -> Any:
    """Memory on the current device from PyTorch's allocator, or from its pool for a graph."""
    torch = sys.modules["torch"]
    tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
    return cuda.pointer_of(tensor, tensor.data_ptr(), size, tensor.device.index)


def _why_not(tensor: Any) -> str | None:
    """Why a tensor's memory does not hold its values as they are, or ``None``."""
    torch = sys.modules["torch"]
    device = tensor.device.type
    if tensor.is_nested:
        return f"is a nested tensor; {NESTED}"
    if tensor.layout is not torch.strided:
        return f"is stored as {tensor.layout}; pass its .to_dense()"
    if device == "meta":
        return "is on the meta device and holds no values"
    if device not in ("cpu", "cuda"):
        return f"is on device {device!r}; gradkit computes on the CPU and on CUDA devices"
    if tensor.is_quantized:
        return "is quantised; pass its .dequantize()"
    if _name_of(tensor.dtype) not in _ACCEPTED:
        instead = "torch.view_as_real of it" if tensor.is_complex() else "its .float()"
        return f"has dtype {tensor.dtype}; accepted: {', '.join(FLOATS)}; pass {instead}"
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
