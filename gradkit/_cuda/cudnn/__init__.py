"""Batch norm through NVIDIA's cuDNN, which is loaded when a call first needs it.

``library`` loads it through one of two bindings with the same interface (``face``); ``handles``
keeps a handle per thread and device; ``batch_normalization`` describes arrays to cuDNN and calls
it.
"""

from gradkit._cuda.cudnn.library import Cudnn, cudnn, describe

__all__ = ["Cudnn", "cudnn", "describe"]
