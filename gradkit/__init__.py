"""Training-loop utilities for people who hold arrays, not a framework.

Gradient clipping, accumulation and zeroing, and the backward passes of layer norm,
invertible layer norm, RMS norm and batch norm.
"""

from gradkit._engine import last_engine
from gradkit.accumulation import accumulate_grad, accumulate_grad_v2, zero_grad
from gradkit.clipping import (
    clip_by_global_norm,
    clip_coefficient,
    clip_grad_norm,
    clip_grad_value,
    grad_norm,
    grads_of,
    scale_grads,
)
from gradkit.config import show_config
from gradkit.errors import (
    BackendUnavailableError,
    CudnnError,
    GradkitError,
    KernelCompileError,
    KernelLaunchError,
    NonFiniteNormError,
)
from gradkit.normalization import (
    batch_norm,
    batch_norm_grad,
    invertible_layer_norm_grad,
    layer_norm,
    layer_norm_grad,
    layer_norm_inverse,
    rms_norm,
    rms_norm_grad,
)
from gradkit.startup import warmup

__version__ = "0.1.0"

__all__ = [
    "BackendUnavailableError",
    "CudnnError",
    "GradkitError",
    "KernelCompileError",
    "KernelLaunchError",
    "NonFiniteNormError",
    "accumulate_grad",
    "accumulate_grad_v2",
    "batch_norm",
    "batch_norm_grad",
    "clip_by_global_norm",
    "clip_coefficient",
    "clip_grad_norm",
    "clip_grad_value",
    "grad_norm",
    "grads_of",
    "invertible_layer_norm_grad",
    "last_engine",
    "layer_norm",
    "layer_norm_grad",
    "layer_norm_inverse",
    "rms_norm",
    "rms_norm_grad",
    "scale_grads",
    "show_config",
    "warmup",
    "zero_grad",
]
