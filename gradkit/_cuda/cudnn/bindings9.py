"""cuDNN 9 through ctypes, with the names and argument order of ``cupy.cuda.cudnn``.

It works with any CuPy. It is the only binding for CuPy 14, which no longer has its own.
"""

import ctypes
from collections.abc import Iterable
from ctypes import POINTER, c_char_p, c_double, c_int, c_size_t, c_void_p
from typing import Any

from gradkit._cuda.cudnn import search
from gradkit.errors import CudnnError

SONAME = "libcudnn.so.9"

# cudnn_ops.h and cudnn_graph.h of cuDNN 9: handles, descriptors, arrays and host scalars are
# pointers, enumerations are ints.
PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cudnnCreate": (POINTER(c_void_p),),
    "cudnnDestroy": (c_void_p,),
    "cudnnSetStream": (c_void_p, c_void_p),
    "cudnnCreateTensorDescriptor": (POINTER(c_void_p),),
    "cudnnSetTensor4dDescriptorEx": (c_void_p, c_int, *(c_int,) * 4, *(c_int,) * 4),
    "cudnnDeriveBNTensorDescriptor": (c_void_p, c_void_p, c_int),
    "cudnnDestroyTensorDescriptor": (c_void_p,),
    "cudnnBatchNormalizationForwardTraining": (
        *(c_void_p, c_int),  # handle, mode
        *(c_void_p, c_void_p),  # alpha, beta
        *(c_void_p, c_void_p, c_void_p, c_void_p),  # xDesc, x, yDesc, y
        *(c_void_p, c_void_p, c_void_p),  # bnScaleBiasMeanVarDesc, bnScale, bnBias
        *(c_double, c_void_p, c_void_p),  # exponentialAverageFactor, running mean and variance
        *(c_double, c_void_p, c_void_p),  # epsilon, saved mean and inv_std
    ),
    "cudnnBatchNormalizationForwardInference": (
        *(c_void_p, c_int),  # handle, mode
        *(c_void_p, c_void_p),  # alpha, beta
        *(c_void_p, c_void_p, c_void_p, c_void_p),  # xDesc, x, yDesc, y
        *(c_void_p, c_void_p, c_void_p),  # bnScaleBiasMeanVarDesc, bnScale, bnBias
        *(c_void_p, c_void_p, c_double),  # estimatedMean, estimatedVariance, epsilon
    ),
    "cudnnBatchNormalizationBackward": (
        *(c_void_p, c_int),  # handle, mode
        *(c_void_p, c_void_p, c_void_p, c_void_p),  # alpha and beta of data, of parameters
        *(c_void_p,) * 6,  # xDesc, x, dyDesc, dy, dxDesc, dx
        *(c_void_p, c_void_p, c_void_p, c_void_p),  # dBnScaleBiasDesc, bnScale, dscale, dbias
        *(c_double, c_void_p, c_void_p),  # epsilon, saved mean and inv_std
    ),
}


class Bindings9:
    """A loaded ``libcudnn.so.9``."""

    name = "ctypes"

    def __init__(self, library: Any, path: str):
        self.path = path
        self._library = library
        library.cudnnGetVersion.restype = c_size_t
        library.cudnnGetVersion.argtypes = ()
        library.cudnnGetErrorString.restype = c_char_p
        library.cudnnGetErrorString.argtypes = (c_int,)
        for name, types in PROTOTYPES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = c_int, types

    def getVersion(self) -> int:
        """92800 for 9.28.0."""
        return int(self._library.cudnnGetVersion())

    def create(self) -> int:
        """A handle on the current device."""
        return self._made("cudnnCreate")

    def destroy(self, handle: int) -> None:
        """Free a handle."""
        self._call("cudnnDestroy", handle)

    def setStream(self, handle: int, stream: int) -> None:
        """Queue the handle's work on this stream from now on."""
        self._call("cudnnSetStream", handle, stream)

    def createTensorDescriptor(self) -> int:
        """An empty descriptor."""
        return self._made("cudnnCreateTensorDescriptor")

    def setTensor4dDescriptorEx(self, *args: int) -> None:
        """Descriptor, data type, n, c, h, w and their strides in elements."""
        self._call("cudnnSetTensor4dDescriptorEx", *args)

    def deriveBNTensorDescriptor(self, derivedBnDesc: int, xDesc: int, mode: int) -> None:
        """Describe scale, bias and statistics of batch norm on ``xDesc``."""
        self._call("cudnnDeriveBNTensorDescriptor", derivedBnDesc, xDesc, mode)

    def destroyTensorDescriptor(self, tensorDesc: int) -> None:
        """Free a descriptor."""
        self._call("cudnnDestroyTensorDescriptor", tensorDesc)

    def batchNormalizationForwardTraining(self, *args: float) -> None:
        """The arguments of ``cudnnBatchNormalizationForwardTraining``."""
        self._call("cudnnBatchNormalizationForwardTraining", *args)

    def batchNormalizationForwardInference(self, *args: float) -> None:
        """The arguments of ``cudnnBatchNormalizationForwardInference``."""
        self._call("cudnnBatchNormalizationForwardInference", *args)

    def batchNormalizationBackward(self, *args: float) -> None:
        """The arguments of ``cudnnBatchNormalizationBackward``."""
        self._call("cudnnBatchNormalizationBackward", *args)

    def _made(self, name: str) -> int:
        made = c_void_p()
        self._call(name, ctypes.byref(made))
        return made.value or 0

    def _call(self, name: str, *args: Any) -> None:
        status = getattr(self._library, name)(*args)
        if status:
            text = self._library.cudnnGetErrorString(status).decode(errors="replace")
            raise CudnnError(name, status, text)


def load(places: Iterable[search.Place]) -> Bindings9:
    """Load the library from the first place that has it.

    Raises ``search.UnusableError`` with the reason if that is not a usable cuDNN 9.
    """
    library, path = search.open_first(SONAME, places)
    try:
        bindings = Bindings9(library, path)
    except AttributeError as error:
        raise search.UnusableError(f"{path} lacks a function of cuDNN 9: {error}") from error
    version = bindings.getVersion()
    if not 90000 <= version < 100000:
        raise search.UnusableError(f"{path} is cuDNN {version}; gradkit needs cuDNN 9")
    return bindings
