"""Batch norm through NVIDIA's cuDNN, which is found and loaded when it is first asked for.

``load`` finds the library behind one of two bindings with one face; ``handles`` gives each
thread and device a handle; ``batch_normalization`` describes arrays to cuDNN and calls it.
"""

from gradkit._cuda.cudnn.load import Cudnn, cudnn, describe

__all__ = ["Cudnn", "cudnn", "describe"]
