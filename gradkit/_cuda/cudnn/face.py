"""The interface of both bindings: the functions of cuDNN that batch norm needs, and constants.

Names and argument order are those of ``cupy.cuda.cudnn``, which are cuDNN's own without the
prefix. Handles, descriptors and pointers are integers. A status other than success raises
``CudnnError``.
"""

from typing import Protocol

SPATIAL, SPATIAL_PERSISTENT = 1, 2  # cudnnBatchNormMode_t
BN_MIN_EPSILON = 0.0  # CUDNN_BN_MIN_EPSILON since cuDNN 7.5


class Bindings(Protocol):
    """A loaded cuDNN."""

    name: str
    path: str  # the file of the library

    def getVersion(self) -> int:
        """8907 for 8.9.7, 92800 for 9.28.0."""

    def create(self) -> int:
        """A handle on the current device."""

    def destroy(self, handle: int, /) -> None:
        """Free a handle."""

    def setStream(self, handle: int, stream: int, /) -> None:
        """Queue the handle's work on this stream from now on."""

    def createTensorDescriptor(self) -> int:
        """An empty descriptor."""

    def setTensor4dDescriptorEx(
        self,
        tensorDesc: int,
        dataType: int,
        n: int,
        c: int,
        h: int,
        w: int,
        nStride: int,
        cStride: int,
        hStride: int,
        wStride: int,
        /,
    ) -> None:
        """Set dimensions and strides, in elements; each must fit a C int."""

    def deriveBNTensorDescriptor(self, derivedBnDesc: int, xDesc: int, mode: int, /) -> None:
        """Describe scale, bias and statistics of batch norm on ``xDesc``."""

    def destroyTensorDescriptor(self, tensorDesc: int, /) -> None:
        """Free a descriptor."""

    def batchNormalizationForwardTraining(
        self,
        handle: int,
        mode: int,
        alpha: int,
        beta: int,
        xDesc: int,
        x: int,
        yDesc: int,
        y: int,
        bnScaleBiasMeanVarDesc: int,
        bnScale: int,
        bnBias: int,
        exponentialAverageFactor: float,
        resultRunningMean: int,
        resultRunningVariance: int,
        epsilon: float,
        resultSaveMean: int,
        resultSaveInvVariance: int,
        /,
    ) -> None:
        """``y = alpha * bn(x) + beta * y``; ``alpha`` and ``beta`` are addresses on the host."""

    def batchNormalizationForwardInference(
        self,
        handle: int,
        mode: int,
        alpha: int,
        beta: int,
        xDesc: int,
        x: int,
        yDesc: int,
        y: int,
        bnScaleBiasMeanVarDesc: int,
        bnScale: int,
        bnBias: int,
        estimatedMean: int,
        estimatedVariance: int,
        epsilon: float,
        /,
    ) -> None:
        """The same ``y``, by statistics that are given."""

    def batchNormalizationBackward(
        self,
        handle: int,
        mode: int,
        alphaDataDiff: int,
        betaDataDiff: int,
        alphaParamDiff: int,
        betaParamDiff: int,
        xDesc: int,
        x: int,
        dyDesc: int,
        dy: int,
        dxDesc: int,
        dx: int,
        dBnScaleBiasDesc: int,
        bnScale: int,
        dBnScaleResult: int,
        dBnBiasResult: int,
        epsilon: float,
        savedMean: int,
        savedInvVariance: int,
        /,
    ) -> None:
        """Each result is ``alpha * gradient + beta * result``; factors are host addresses."""
