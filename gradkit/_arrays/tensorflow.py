"""TensorFlow: eager tensors are read without a copy and never written."""

import re
import sys
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from gradkit._arrays.dlpack import OwnMemory, exportable
from gradkit._backend import Array, Shape, Spec
from gradkit._dtypes import FLOATS

_NO_NUMBERS = "string", "resource", "variant"  # dtypes whose export by DLPack ends the process


class TensorFlow(OwnMemory):
    """Eager ``tf.Tensor``; also ``tf.Variable`` if only its values are used."""

    name = "TensorFlow"
    module = "tensorflow"
    immutable = True

    def owns(self, kind: type) -> bool:
        tf = sys.modules["tensorflow"]
        return issubclass(kind, (tf.Tensor, tf.Variable, tf.IndexedSlices))

    def in_its_words(self, text: str) -> str:
        return re.sub(r"(\S+)\.astype\((?:np\.(\w+)|(\S+))\)", _cast, text)

    def view(self, array: Any, *, write: bool, detach: bool = False) -> Array:
        tf = sys.modules["tensorflow"]
        if isinstance(array, tf.IndexedSlices):
            raise TypeError("is an IndexedSlices; pass tf.convert_to_tensor of it")
        if isinstance(array, tf.Variable):
            if not detach:
                raise TypeError(
                    "is a tf.Variable; pass the gradients that tape.gradient returned, or its "
                    ".value() for its values"
                )
            array = array.value()
        if tf.is_symbolic_tensor(array):
            raise TypeError(
                "is symbolic and has no values yet; call gradkit outside of tf.function, or "
                "through tf.numpy_function"
            )
        if array.dtype.name in _NO_NUMBERS:
            raise TypeError(f"has dtype {array.dtype.name}; accepted: {', '.join(FLOATS)}")
        return super().view(array, write=write, detach=detach)

    def empty(self, spec: Spec, like: Any) -> tuple[Array, Any] | None:
        return super().empty(spec, _value(like))

    def wrap(self, result: Array, like: Any) -> Any:
        if not isinstance(result, np.ndarray):
            return super().wrap(result, _value(like))
        capsule = exportable(result).__dlpack__()
        return sys.modules["tensorflow"].experimental.dlpack.from_dlpack(capsule)

    def allocate(self, shape: Shape, dtype: np.dtype[Any], like: Any) -> Any:
        """Memory that TensorFlow's work has left: the export of a tensor waits for all of it."""
        tf = sys.modules["tensorflow"]
        with tf.init_scope(), tf.device(like.device):
            if dtype.kind == "b":
                return tf.fill(shape, False)  # Empty has no kernel for it on a GPU
            return tf.raw_ops.Empty(shape=shape, dtype=dtype.name, init=False)

    def on_stream(self, like: Any) -> AbstractContextManager[Any]:
        return super().on_stream(_value(like))


def _cast(match: re.Match[str]) -> str:
    return f"tf.cast({match[1]}, {match[3] or 'tf.' + match[2]})"


def _value(array: Any) -> Any:
    """A variable's tensor; a variable itself has no ``__dlpack__``."""
    return array if hasattr(array, "__dlpack__") else array.value()
