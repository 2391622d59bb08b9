"""CuPy itself without a GPU: a CUDA driver whose kernels run on the PTX machine."""

from .cupy import install
from .library import Driver, load
from .machine import Machine

__all__ = ["Driver", "Machine", "install", "load"]
