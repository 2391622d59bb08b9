"""Runs the kernels' compiled code, NVRTC's PTX, on the CPU, with every load and store checked."""

from .contract import contract
from .coverage import Coverage, collect, merge, summary, unreached
from .device import ARCHITECTURES, PtxDevice
from .executed import Executed
from .parse import Module, UnsupportedPtxError
from .translate import translate

__all__ = [
    "ARCHITECTURES",
    "Coverage",
    "Executed",
    "Module",
    "PtxDevice",
    "UnsupportedPtxError",
    "collect",
    "contract",
    "merge",
    "summary",
    "translate",
    "unreached",
]
