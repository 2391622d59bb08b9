"""Batch norm through NVIDIA's cuDNN, which is found and loaded when it is first asked for.

``library`` finds it behind one of two bindings with one face; ``handles`` gives each
thread and device a handle; ``batch_normalization`` describes arrays to cuDNN and calls it.
"""

from gradkit._cuda.cudnn.library import Cudnn, cudnn, describe

__all__ = ["Cudnn", "cudnn", "describe"]
