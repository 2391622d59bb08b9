"""The runtime library's C interface, field by field as runtime/*.h declares it."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_int, c_int32, c_int64, c_uint, c_uint32, c_uint64, c_void_p
from pathlib import Path

SCHEDULES = ("ascending", "descending", "shuffled", "preempted", "run-ahead")
SPACES = {"global": 0, "shared": 1, "constant": 2}
NO_WINDOW = -(2**63)


class Parameter(Structure):
    """Size and kind of one of a kernel's parameters."""

    _fields_ = [
        ("size", c_uint),
        ("alignment", c_uint),
        ("is_pointer", c_uint),
        ("is_const", c_uint),
        ("is_floating", c_uint),
        ("is_integer", c_uint),
        ("item_size", c_uint),
    ]


class Signature(Structure):
    """All that a kernel takes, the most threads of a block, and the blocks of a cluster."""

    _fields_ = [
        ("count", c_uint),
        ("max_threads", c_uint),
        ("parameters", POINTER(Parameter)),
        ("cluster", c_uint * 3),
    ]


class Window(Structure):
    """Memory that a launch may touch, and how many bytes of it were."""

    _fields_ = [
        ("start", c_uint64),
        ("end", c_uint64),
        ("writable", c_uint32),
        ("space", c_uint32),
        ("tracked", c_uint32),
        ("used", c_uint32),
        ("read_bytes", c_uint64),
        ("written_bytes", c_uint64),
        ("id", c_int64),
        ("rank", c_uint32),
        ("padding", c_uint32),
    ]


class Fault(Structure):
    """Why a launch was stopped, and where."""

    _fields_ = [
        ("kind", c_uint32),
        ("access", c_uint32),
        ("block", c_uint32 * 3),
        ("thread", c_uint32 * 3),
        ("address", c_uint64),
        ("size", c_uint64),
        ("window", c_int64),
        ("code", c_uint64),
        ("other_access", c_uint32),
        ("other_thread", c_int32),
        ("other_block", c_int64),
        ("other_code", c_uint64),
        ("detail", c_uint64),
    ]


class Launch(Structure):
    """One launch: the kernel and its arguments, its sizes, and counters for what it did."""

    _fields_ = [
        ("invokes", POINTER(c_void_p)),
        ("values", POINTER(c_void_p)),
        ("grid", c_uint32 * 3),
        ("block", c_uint32 * 3),
        ("cluster", c_uint32 * 3),
        ("schedule", c_uint32),
        ("shared_bytes", c_uint64),
        ("windows", POINTER(Window)),
        ("window_count", c_uint64),
        ("blocks", POINTER(c_uint64)),
        ("block_count", c_uint64),
        ("seed", c_uint64),
        ("read_bytes", c_uint64),
        ("written_bytes", c_uint64),
        ("accesses", c_uint64),
        ("switches", c_uint64),
    ]


class Runtime:
    """The loaded library. Its state is the process's: whatever is registered, every device sees.

    ``PyDLL`` keeps the interpreter's lock during a call, so that neither another Python thread nor
    a finaliser can touch that state while a kernel runs.
    """

    def __init__(self, path: Path) -> None:
        library = ctypes.PyDLL(str(path))
        self.launch = library.emu_launch
        self.launch.argtypes = [POINTER(Launch), POINTER(Fault)]
        self.launch.restype = c_int
        self.register_window = library.emu_register_window
        self.register_window.argtypes = [POINTER(Window)]
        self.register_window.restype = None
        self.unregister_window = self._range_function(library.emu_unregister_window)
        self.mark_uninitialised = self._range_function(library.emu_mark_uninitialised)
        self.mark_initialised = self._range_function(library.emu_mark_initialised)
        self._image = library.emu_image
        self._image.argtypes = [c_void_p, POINTER(c_uint64), POINTER(c_uint64)]
        library.emu_dynamic_shared_base.restype = c_uint64
        library.emu_dynamic_shared_capacity.restype = c_uint64
        self.shared_base: int = library.emu_dynamic_shared_base()
        self.shared_capacity: int = library.emu_dynamic_shared_capacity()

    @staticmethod
    def _range_function(function: ctypes._NamedFuncPointer) -> ctypes._NamedFuncPointer:
        function.argtypes = [c_uint64, c_uint64]
        function.restype = None
        return function

    def image(self, symbol: ctypes._NamedFuncPointer) -> tuple[int, int]:
        """Return where the library with ``symbol`` begins, and where its read-only part ends."""
        start, end = c_uint64(), c_uint64()
        address = ctypes.cast(symbol, c_void_p)
        if self._image(address, ctypes.byref(start), ctypes.byref(end)):
            raise RuntimeError("the kernel's library is not in the process's list of libraries")
        return start.value, end.value
