"""The libraries that gradkit is measured against, and how each takes a benchmark's arrays.

A benchmark is a *table*: one operation by gradkit and by each peer. The entries of gradkit, the
naive formula, JAX and optax are functions that compute, of arguments by name. Those of PyTorch,
Liger-Kernel and ONNX Runtime take a namespace ``a`` of the same arguments, in their library's type,
and return the call that is timed, so that views and graphs are made before it. An entry that is a
string names another entry, if there is one.
"""

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.onnxruntime_peer import Remote, check_interpreter

Call = Callable[[], object]
Table = Mapping[str, Any]
Arguments = dict[str, Any]


class Module:
    """A module that is imported when it is first used: a peer may be missing."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        found = getattr(importlib.import_module(self._name), attribute)
        setattr(self, attribute, found)
        return found


torch, jax, optax = Module("torch"), Module("jax"), Module("optax")


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to all arrays in lists and dicts; other values stay."""
    if isinstance(value, dict):
        return {name: mapped(function, member) for name, member in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(function, member) for member in value)
    return function(value) if hasattr(value, "dtype") else value


def tensor(array: Any) -> Any:
    """Return a PyTorch tensor over the memory of a NumPy or CuPy array."""
    bits = array.view(np.int16) if array.dtype.name == "bfloat16" else array
    on_host = isinstance(array, np.ndarray)
    found = torch.from_numpy(np.asarray(bits)) if on_host else torch.from_dlpack(bits)
    return found if bits is array else found.view(torch.bfloat16)


def backward(forward: Callable[..., Any], dy: Any, *inputs: Any) -> Call:
    """Run PyTorch's autograd forward once; return the backward pass, for any number of calls."""
    leaves = [each.detach().requires_grad_() for each in inputs]
    y = forward(*leaves)
    return lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True)


def direct(function: Callable[..., object]) -> Callable[[Any], Call]:
    """Return the entry of a function of the arguments, for which nothing is made before."""
    return lambda a: partial(function, **vars(a))


def onnxruntime(op: str, outputs: int, a: Any, **changed: Any) -> Call:
    """Return a call that runs an operator with float32 outputs once, in the worker.

    Its inputs are the arguments, in their order; what is ``changed`` is an input in another shape,
    or an attribute.
    """
    inputs = {name: changed.pop(name, value) for name, value in vars(a).items()}
    attributes = {"axis": 1, **changed} if op.endswith("LayerNormalizationGrad") else changed
    kinds = {f"out{k}": "float32" for k in range(outputs)}
    return Remote({"op": op, "outputs": kinds, "attributes": attributes}, inputs)


def _computing(function: Callable[..., Any], arguments: Arguments) -> Call:
    return partial(function, **arguments)


def _making(make: Callable[..., Call], arguments: Arguments) -> Call:
    return make(SimpleNamespace(**arguments))


def _on_tensors(make: Callable[..., Call], arguments: Arguments) -> Call:
    return _making(make, mapped(tensor, arguments))


def _compiled(make: Callable[..., Call], arguments: Arguments) -> Call:
    """Compile the function that a ``partial`` holds, anew for each shape."""
    torch._dynamo.reset()
    call: Any = _on_tensors(make, arguments)
    function = torch.compile(lambda *given: call.func(*given, **call.keywords), dynamic=False)

    def run() -> object:
        with torch.no_grad():
            return function(*call.args)

    return run


def _jitted(function: Callable[..., Any], arguments: Arguments) -> Call:
    """Compile by ``jax.jit``, for the CPU; results are new arrays. Numbers are constants."""
    arrays = {k: v for k, v in arguments.items() if hasattr(v, "dtype") or isinstance(v, list)}
    constants = {k: v for k, v in arguments.items() if k not in arrays}
    placed, compiled = mapped(jax.numpy.asarray, arrays), jax.jit(partial(function, **constants))
    return lambda: jax.block_until_ready(compiled(**placed))


# For each peer: what must be there, and how it makes a call of its entry and the arguments.
_PEERS: dict[str, tuple[str, Callable[..., Call]]] = {
    "gradkit": ("gradkit", _computing),
    "gradkit, several calls": ("gradkit", _computing),
    "naive": ("numpy", _computing),
    "torch": ("torch", _on_tensors),
    "jax": ("jax", _jitted),
    "optax": ("optax", _jitted),
    "onnxruntime": ("", _making),
    "torch cuDNN": ("torch", _on_tensors),
    "torch.compile": ("torch", _compiled),
    "liger": ("liger_kernel.ops", _on_tensors),
    "quack": ("quack", _on_tensors),
    "cuDNN through gradkit": ("cupy", _computing),
}
# For tables: torch.compile and jax.jit compile these entries.
COMPILED = {"torch.compile": "torch", "jax": "naive"}
# What runs if --peers does not say. torch.compile takes seconds a case, and the formula in CuPy's
# calls checks results all the same.
ON = {
    "cpu": ("naive", "torch", "jax", "optax", "onnxruntime"),
    "cuda": ("torch", "torch cuDNN", "liger", "quack", "cuDNN through gradkit"),
    "emulated": ("naive", "torch", "torch cuDNN", "torch.compile", "liger"),
}


def available(wanted: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the peers that can be run, and for each of the others the reason why not."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    found, missing = [], {}
    for name in wanted:
        try:
            needed, _ = _PEERS[name]
            importlib.import_module(needed) if needed else check_interpreter()
            found.append(name)
        except Exception as error:  # an import may raise anything
            missing[name] = f"{type(error).__name__}: {error}"
    if "torch" in found:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    return found, missing


def makers(table: Table, names: Sequence[str]) -> dict[str, Callable[[Arguments], Call]]:
    """Return for each peer that has the operation a function from arguments to its call."""
    found = {}
    for name in names:
        entry = table.get(name)
        if entry := table.get(entry) if isinstance(entry, str) else entry:
            found[name] = partial(_PEERS[name][1], entry)
    return found
