"""Runs the CUDA kernels' own source on the CPU, with every load and store checked."""

from .device import EmulatedDevice
from .faults import EmulatorFault
from .idle import IdleDevice
from .memory import sparse_array
from .runtime import SCHEDULES

__all__ = ["SCHEDULES", "EmulatedDevice", "EmulatorFault", "IdleDevice", "sparse_array"]
