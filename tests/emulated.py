"""Arrays that live on the emulated device, so that the public functions run kernels on them.

To gradkit they are the arrays of one more library: their own framework, and a CUDA backend
whose device is the emulator.
"""

import numpy as np

from gradkit import _arrays, _dispatch
from gradkit._cuda import Backend
from tests.emulator import EmulatedDevice


class DeviceArray(np.ndarray):
    """An array that ``backend`` computes on; views and results of NumPy's functions are too."""

    backend = None

    def __array_finalize__(self, other):
        self.backend = getattr(other, "backend", None)


class Emulated(_arrays.Framework):
    """The library of ``DeviceArray``."""

    name = module = "emulated"

    def owns(self, kind):
        return issubclass(kind, DeviceArray)

    def view(self, array, *, write, detach=False):  # noqa: ARG002
        return array

    def wrap(self, native, like):
        return on_device(native, like.backend)


def on_device(array, backend):
    """The same memory as an array of the emulated device."""
    view = array.view(DeviceArray)
    view.backend = backend
    return view


def emulated_backend(**options):
    """A CUDA backend on an emulated device of its own."""
    return Backend(EmulatedDevice(**options))


class IdleDevice(EmulatedDevice):
    """Neither compiles nor launches: what is left of a call is the work of the host.

    ``compiled`` lists what a GPU would have compiled.
    """

    def __init__(self, **options):
        super().__init__(**options)
        self.compiled = []

    def compile(self, source, options=()):
        self.compiled.append((source, options))
        return self

    def get_function(self, name):  # noqa: ARG002
        return launch_nothing


def launch_nothing(grid, block, args, shared_mem=0):
    """Take a launch's arguments and return."""


# What looking at sys.modules does for real libraries.
_arrays._BY_TYPE[DeviceArray] = Emulated()
_dispatch._FINDERS[DeviceArray] = lambda native: native.backend
