"""JAX: arrays are read without a copy and never written."""

import sys
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from gradkit._arrays.base import NOTHING
from gradkit._arrays.dlpack import OwnMemory
from gradkit._backend import Array, Shape


class JAX(OwnMemory):
    """``jax.Array``, on one device."""

    name = "JAX"
    module = "jax"
    immutable = True

    def owns(self, kind: type) -> bool:
        jax = sys.modules["jax"]
        return issubclass(kind, (jax.Array, jax.core.Tracer))

    def view(self, array: Any, *, write: bool, detach: bool = False) -> Array:
        if isinstance(array, sys.modules["jax"].core.Tracer):
            raise TypeError(
                "is being traced by jax.jit, grad or vmap and has no values yet; gradkit.jax has "
                "norms, grad_norm, clip_by_global_norm and accumulate_grads for that; anything "
                "else, call outside of the traced function or by jax.pure_callback"
            )
        if array.is_deleted():
            raise ValueError("has been deleted (or donated to a jitted function)")
        devices = array.devices()
        if len(devices) > 1:
            raise TypeError(
                f"is spread over {len(devices)} devices; pass the .data of its addressable_shards, "
                "or gradkit.distributed.shards_of(grads) and a group to a norm of gradients"
            )
        if _on_host(array):
            return np.asarray(array)  # no copy; read-only; also for bfloat16
        return super().view(array, write=write, detach=detach)

    def wrap(self, result: Array, like: Any) -> Any:
        jax = sys.modules["jax"]
        if isinstance(result, np.ndarray):
            with np.errstate(over="ignore"):  # float64 becomes float32 unless x64 is enabled
                return jax.device_put(result, like.sharding)
        return super().wrap(result, like)

    def allocate(self, shape: Shape, dtype: np.dtype[Any], like: Any) -> Any:
        """Zeros, behind which our stream waits: the export of an array makes it do so."""
        jax = sys.modules["jax"]
        with jax.ensure_compile_time_eval():  # also while something else is traced
            return jax.numpy.empty(shape, dtype, device=next(iter(like.devices())))

    def on_stream(self, like: Any) -> AbstractContextManager[Any]:
        return NOTHING if _on_host(like) else super().on_stream(like)

    def widest(self, like: Any) -> str:
        return "float64" if sys.modules["jax"].config.jax_enable_x64 else "float32"


def _on_host(array: Any) -> bool:
    return bool(next(iter(array.devices())).platform == "cpu")
