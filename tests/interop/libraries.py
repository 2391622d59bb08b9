"""The frameworks under test: how their arrays are made and read back, without gradkit."""

import gc
import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from gradkit import _host
from gradkit._arrays import torch as adapter

REQUIRED = os.environ.get("GRADKIT_REQUIRE_FRAMEWORKS") == "1"


def framework(name: str) -> Any:
    """A framework's module. Absent, it skips the test, or fails it where all are required."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if REQUIRED:
            raise
        pytest.skip(f"{name} is not installed: {error}")


class _WithoutTables:
    def __init__(self, code: Any):
        self._code = code

    def __getattr__(self, name: str) -> Any:
        return getattr(self._code, name)

    def table(self, *_: Any) -> None:
        """Say that a list has none."""

    def known(self, *_: Any) -> tuple[None, None, tuple[()]]:
        """Say that a call has no plan."""
        return None, None, ()


def without_tables() -> Any:
    """Compiled code that takes no list: CPU tensors stand in for those of two devices."""
    return _host.code and _WithoutTables(_host.code)


@contextmanager
def on_a_device() -> Iterator[None]:
    """While compiled code takes CPU tensors for those of a CUDA device."""
    framework("torch")
    code = adapter._describing()
    if code is None:
        yield
        return
    code.use_places(0, 1)
    try:
        yield
    finally:
        code.use_places(1, 2)


@contextmanager
def checking_leaks() -> Iterator[None]:
    """JAX's check that nothing of a trace outlives it, which goes through all objects each time.

    What is there by now holds nothing of what is traced within, and is left out.
    """
    gc.freeze()
    with framework("jax").checking_leaks():
        yield


@dataclass(frozen=True)
class Library:
    """A framework in tests: ``make`` copies, ``read`` goes through the framework."""

    name: str
    kind: type
    dtypes: tuple[str, ...]
    mutable: bool
    norm_dtype: str
    make: Callable[[np.ndarray], Any]
    read: Callable[[Any], np.ndarray]
    dtype: Callable[[Any], str]
    device: Callable[[Any], Any]
    address: Callable[[Any], int]

    def __str__(self) -> str:
        return self.name


DTYPES = {
    "torch": ("float16", "bfloat16", "float32", "float64"),
    "jax": ("float16", "bfloat16", "float32"),  # float64 takes jax_enable_x64
    "tensorflow": ("float16", "bfloat16", "float32", "float64"),
    "array-api-strict": ("float32", "float64"),
}


def _torch() -> Library:
    torch = framework("torch")

    def make(values: np.ndarray) -> Any:
        exact = torch.tensor(values.astype(np.float64).tolist(), dtype=torch.float64)
        return exact.to(getattr(torch, str(values.dtype))).reshape(values.shape)

    return Library(
        "torch",
        torch.Tensor,
        DTYPES["torch"],
        True,
        "float64",
        make,
        lambda a: np.asarray(a.double().tolist()).reshape(tuple(a.shape)),
        lambda a: str(a.dtype).removeprefix("torch."),
        lambda a: a.device,
        lambda a: a.data_ptr(),
    )


def _jax() -> Library:
    jax = framework("jax")
    import jax.numpy as jnp

    return Library(
        "jax",
        jax.Array,
        DTYPES["jax"],
        False,
        "float32",
        lambda values: jnp.array(values, copy=True),
        lambda a: np.asarray(a.tolist(), np.float64).reshape(a.shape),
        lambda a: str(a.dtype),
        lambda a: a.device,
        lambda a: a.unsafe_buffer_pointer(),
    )


def _tensorflow() -> Library:
    tf = framework("tensorflow")

    def address(a: Any) -> int:
        same_size = tf.bitcast(a, {2: tf.uint16, 4: tf.uint32, 8: tf.uint64}[a.dtype.size])
        return int(np.asarray(memoryview(same_size)).__array_interface__["data"][0])

    return Library(
        "tensorflow",
        tf.Tensor,
        DTYPES["tensorflow"],
        False,
        "float64",
        tf.convert_to_tensor,
        lambda a: tf.cast(a, tf.float64).numpy().copy(),
        lambda a: a.dtype.name,
        lambda a: a.device,
        address,
    )


def _strict() -> Library:
    xp = framework("array_api_strict")
    return Library(
        "array-api-strict",
        type(xp.asarray(1.0)),
        DTYPES["array-api-strict"],
        True,
        "float64",
        lambda values: xp.asarray(values.copy()),
        lambda a: np.array(a._array, np.float64),
        lambda a: str(a._array.dtype),
        lambda a: a.device,
        lambda a: int(a._array.__array_interface__["data"][0]),
    )


LIBRARIES = {"torch": _torch, "jax": _jax, "tensorflow": _tensorflow, "array-api-strict": _strict}


def _subclass(tensor: Any) -> Any:
    torch = framework("torch")
    return tensor.as_subclass(type("Subclass", (torch.Tensor,), {}))


def _wrapper(tensor: Any) -> Any:
    """One without memory, of which nobody computes anything."""
    torch = framework("torch")
    kind = type("Wrapper", (torch.Tensor,), {"__torch_dispatch__": pytest.fail})
    return torch.Tensor._make_wrapper_subclass(kind, tensor.shape, dtype=tensor.dtype)


def _fake(tensor: Any) -> Any:
    return framework("torch._subclasses").FakeTensorMode().from_tensor(tensor)


# What is made of a plain tensor of rows that is no tensor of floats in memory, and what is said.
HAZARDS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "requires grad": (lambda t: t.requires_grad_(), "requires grad"),
    "negative": (lambda t: framework("torch")._neg_view(t), r"negative bit.*\.resolve_neg\(\)"),
    "integers": (lambda t: t.int(), "dtype int32; accepted: float16"),
    "bools": (lambda t: t.bool(), "bool.*accepted"),
    "float8": (lambda t: t.to(framework("torch").float8_e4m3fn), "float8_e4m3fn; accepted"),
    "complex": (lambda t: t.cfloat(), "complex64.*accepted"),
    "conjugate": (lambda t: t.cfloat().conj(), "complex64; accepted: float16"),
    "quantised": (
        lambda t: framework("torch").quantize_per_tensor(t, 0.1, 0, framework("torch").qint8),
        r"quantised; pass its \.dequantize\(\)",
    ),
    "zero tensor": (lambda t: framework("torch")._efficientzerotensor(t.shape), "holds no memory"),
    "functional": (lambda t: framework("torch")._to_functional_tensor(t), "holds no memory"),
    "coo": (lambda t: t.to_sparse(), r"stored as torch.sparse_coo; pass its \.to_dense\(\)"),
    "csr": (lambda t: t.to_sparse_csr(), r"torch.sparse_csr; pass its \.to_dense\(\)"),
    "csc": (lambda t: t.to_sparse_csc(), "torch.sparse_csc"),
    "bsr": (lambda t: t.to_sparse_bsr((2, 2)), "torch.sparse_bsr"),
    "mkldnn": (lambda t: t.to_mkldnn(), r"torch._mkldnn; pass its \.to_dense\(\)"),
    "meta": (lambda t: t.to("meta"), "meta device and holds no values"),
    "fake": (_fake, r"is a FakeTensor.*pass a plain torch.Tensor"),
    "a wrapper": (_wrapper, r"is a .*Wrapper, a subclass of torch.Tensor"),
    "of a subclass": (_subclass, "Subclass, a subclass"),
}
