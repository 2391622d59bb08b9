"""cuDNN handles: one per thread and device; one thread at a time may use a handle."""

import atexit
import os
import threading
from collections import defaultdict

from gradkit._cuda.cudnn.face import Bindings
from gradkit.errors import CudnnError


class Handles:
    """Creates handles, reuses handles of ended threads, frees all at exit."""

    def __init__(self, bindings: Bindings):
        self._bindings = bindings
        self._process = os.getpid()
        self._local = threading.local()
        self._spare: defaultdict[int, list[int]] = defaultdict(list)
        self._all: list[int] = []
        self._closed = False
        atexit.register(self.close)

    def get(self, device: int, stream: int) -> int:
        """The thread's handle for a device, which must be current, set to a stream."""
        self.check_process()
        if self._closed:
            raise CudnnError("cudnnCreate", None, "cuDNN was shut down: the interpreter is exiting")
        handles: dict[int, _HandleOfThread] = self._local.__dict__.setdefault("held", {})
        if device not in handles:
            handles[device] = _HandleOfThread(self._take(device), self._spare[device])
        handle = handles[device].handle
        self._bindings.setStream(handle, stream)
        return handle

    def check_process(self) -> None:
        """Raise an error in a forked child, where any CUDA call may hang."""
        if os.getpid() != self._process:
            raise CudnnError(
                "cudnnSetStream",
                None,
                f"cuDNN was loaded in process {self._process} and does not survive the fork into "
                f'process {os.getpid()}; start workers with multiprocessing\'s "spawn"',
            )

    def close(self) -> None:
        """Free every handle."""
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        for handle in self._all:
            try:
                self._bindings.destroy(handle)
            except CudnnError:  # the device is lost, or the driver is already shut down
                return

    def _take(self, device: int) -> int:
        try:
            return self._spare[device].pop()
        except IndexError:
            handle = self._bindings.create()
            self._all.append(handle)
            return handle


class _HandleOfThread:
    """A handle that a thread holds; when the thread ends, it becomes spare."""

    def __init__(self, handle: int, spare: list[int]):
        self.handle = handle
        self._spare = spare

    def __del__(self) -> None:
        self._spare.append(self.handle)
