"""Declarations of the C headers, in their own order and types.

Source: ``cudnn_ops.h`` of nvidia-cudnn-cu12 9.28.0.42 (and of 8.9.7.29, in
``cudnn_ops_infer.h`` and ``cudnn_ops_train.h``), without comments and ``const``. ``make
test-cudnn`` compares this with the headers that are installed.
"""

import ctypes

PROTOTYPES = {
    "cudnnCreate": "cudnnHandle_t *handle",
    "cudnnDestroy": "cudnnHandle_t handle",
    "cudnnSetStream": "cudnnHandle_t handle, cudaStream_t streamId",
    "cudnnCreateTensorDescriptor": "cudnnTensorDescriptor_t *tensorDesc",
    "cudnnSetTensor4dDescriptorEx": (
        "cudnnTensorDescriptor_t tensorDesc, cudnnDataType_t dataType, int n, int c, int h, int w, "
        "int nStride, int cStride, int hStride, int wStride"
    ),
    "cudnnDeriveBNTensorDescriptor": (
        "cudnnTensorDescriptor_t derivedBnDesc, cudnnTensorDescriptor_t xDesc, "
        "cudnnBatchNormMode_t mode"
    ),
    "cudnnDestroyTensorDescriptor": "cudnnTensorDescriptor_t tensorDesc",
    "cudnnBatchNormalizationForwardTraining": (
        "cudnnHandle_t handle, cudnnBatchNormMode_t mode, void *alpha, void *beta, "
        "cudnnTensorDescriptor_t xDesc, void *x, cudnnTensorDescriptor_t yDesc, void *y, "
        "cudnnTensorDescriptor_t bnScaleBiasMeanVarDesc, void *bnScale, void *bnBias, "
        "double exponentialAverageFactor, void *resultRunningMean, "
        "void *resultRunningVariance, double epsilon, void *resultSaveMean, "
        "void *resultSaveInvVariance"
    ),
    "cudnnBatchNormalizationForwardInference": (
        "cudnnHandle_t handle, cudnnBatchNormMode_t mode, void *alpha, void *beta, "
        "cudnnTensorDescriptor_t xDesc, void *x, cudnnTensorDescriptor_t yDesc, void *y, "
        "cudnnTensorDescriptor_t bnScaleBiasMeanVarDesc, void *bnScale, void *bnBias, "
        "void *estimatedMean, void *estimatedVariance, double epsilon"
    ),
    "cudnnBatchNormalizationBackward": (
        "cudnnHandle_t handle, cudnnBatchNormMode_t mode, void *alphaDataDiff, "
        "void *betaDataDiff, void *alphaParamDiff, void *betaParamDiff, "
        "cudnnTensorDescriptor_t xDesc, void *x, cudnnTensorDescriptor_t dyDesc, void *dy, "
        "cudnnTensorDescriptor_t dxDesc, void *dx, cudnnTensorDescriptor_t dBnScaleBiasDesc, "
        "void *bnScale, void *dBnScaleResult, void *dBnBiasResult, double epsilon, "
        "void *savedMean, void *savedInvVariance"
    ),
}
ENUMS = ("cudnnDataType_t", "cudnnBatchNormMode_t")
OPAQUE = ("cudnnHandle_t", "cudnnTensorDescriptor_t", "cudaStream_t")  # pointers to structures


def parameters(name):
    """(C type, name) of each parameter."""
    found = []
    for parameter in PROTOTYPES[name].split(","):
        kind, _, label = parameter.strip().replace("*", "* ").rpartition(" ")
        found.append((kind.replace(" ", ""), label))
    return found


def ctype(kind):
    """The ctypes type through which a C type must travel."""
    if kind.endswith("*"):
        return ctypes.POINTER(ctypes.c_void_p) if kind[:-1] in OPAQUE else ctypes.c_void_p
    if kind in OPAQUE:
        return ctypes.c_void_p
    return {"double": ctypes.c_double}.get(kind, ctypes.c_int)


def source(version, *, without=(), status=0):
    """C source of a library with these functions that writes down what it was called with."""
    lines = ["#include <stdio.h>", "#include <stddef.h>", "static char log_[4096];"]
    lines += [f"typedef void *{name};" for name in OPAQUE]
    lines += [f"typedef int {name};" for name in ENUMS]
    lines.append("const char *recorded(void) { return log_; }")
    lines.append(f"size_t cudnnGetVersion(void) {{ return {version}; }}")
    lines.append('const char *cudnnGetErrorString(int s) { return s == 3 ? "THREE" : "OTHER"; }')
    for name, prototype in PROTOTYPES.items():
        if name in without:
            continue
        formats, values, made = [], [], ""
        for kind, label in parameters(name):
            if kind.endswith("*") and kind[:-1] in OPAQUE:
                made += f"*{label} = (void *)4711; "
                continue
            formats.append(
                {"double": "%.17g"}.get(kind, "%d" if ctype(kind) is ctypes.c_int else "%zu")
            )
            cast = "(size_t)" if formats[-1] == "%zu" else ""
            values.append(cast + label)
        text = " ".join([name, *formats])
        call = ", ".join([f'log_, sizeof log_, "{text}"', *values])
        lines.append(f"int {name}({prototype}) {{ {made}snprintf({call}); return {status}; }}")
    return "\n".join(lines) + "\n"
