"""Runs the CUDA kernels' own source on the CPU, with every load and store checked."""

from .device import EmulatedDevice
from .faults import EmulatorFault

__all__ = ["EmulatedDevice", "EmulatorFault"]
