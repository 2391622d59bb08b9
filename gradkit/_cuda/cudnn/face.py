"""The interface of both bindings: the functions of cuDNN that batch norm needs, and constants.

Names are those of ``cupy.cuda.cudnn``, which are cuDNN's own without the prefix. Arguments are
cuDNN's own, in its order: handles, descriptors and pointers are integers. A status other than
success raises ``CudnnError``.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

SPATIAL, SPATIAL_PERSISTENT = 1, 2  # cudnnBatchNormMode_t
BN_MIN_EPSILON = 0.0  # CUDNN_BN_MIN_EPSILON since cuDNN 7.5


@dataclass(frozen=True)
class Bindings:
    """A loaded cuDNN, by its functions."""

    name: str
    path: str  # the file of the library
    getVersion: Callable[[], int]  # 8907 for 8.9.7, 92800 for 9.28.0
    create: Callable[[], int]  # a handle on the current device
    destroy: Callable[[int], None]
    setStream: Callable[[int, int], None]  # where the handle's work is queued from now on
    createTensorDescriptor: Callable[[], int]
    setTensor4dDescriptorEx: Callable[..., None]  # strides in elements
    deriveBNTensorDescriptor: Callable[[int, int, int], None]
    destroyTensorDescriptor: Callable[[int], None]
    batchNormalizationForwardTraining: Callable[..., None]
    batchNormalizationForwardInference: Callable[..., None]
    batchNormalizationBackward: Callable[..., None]


FUNCTIONS = tuple(field.name for field in fields(Bindings))[2:]  # all but name and path


def name_of(function: str) -> str:
    """The name that cuDNN has for a function."""
    return f"cudnn{function[0].upper()}{function[1:]}"
