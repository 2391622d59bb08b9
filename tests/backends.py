"""Backends of tests, one object each: where arrays live, and what computes on them.

A behavioural test takes the ``backend`` fixture, makes its arguments with ``asarray``, calls
gradkit's public functions, and looks at results through ``asnumpy``. A further backend joins
the whole suite by one entry in ``BACKENDS``.
"""

import ctypes
import importlib.util
import os
from contextlib import contextmanager, nullcontext
from unittest import mock

import numpy as np
import pytest

import gradkit
from gradkit import _host
from testbed.emulator import EmulatedDevice
from testbed.ptx import PtxDevice
from testbed.tools import missing
from tests import tolerances
from tests.devices.emulated import emulated_backend, on_device, ptx_backend
from tests.tolerances import DTYPES

# The compute capability (80 for 8.0) whose compiled code the suite is to run too.
ARCHITECTURE = int(os.environ.get("GRADKIT_PTX", "0"))
COMPILED = {
    "architecture": ARCHITECTURE,
    "contracted": os.environ.get("GRADKIT_PTX_CONTRACTED") == "1",
}


class Backend:
    """NumPy arrays in host memory; other backends override what differs."""

    name = "numpy"
    marks = ()
    max_elements = 1 << 18  # of an array that Hypothesis draws
    on_host = True  # values can be looked at without waiting for a device
    depth = 256  # the most terms that a running total holds in the accumulation dtype
    mean_unit = 2.0**-53  # of what holds a row's mean in a forward pass
    run_errors = tolerances.RUNS

    has_read_only = True  # whether arrays can be read-only
    has_cudas_pow = False  # whether powers are those of NVIDIA's library

    def active(self):
        """A context in which the backend computes on its arrays."""
        return gradkit.use_cpu_backend(self.name)

    def asarray(self, array):
        """A copy of an array and of the gaps between its elements: its strides and alignment."""
        if array.flags.owndata and array.flags.c_contiguous:
            return array.copy()
        low, high = span(array)
        room = np.empty(high - low + 64, np.uint8)
        start = (low - room.ctypes.data) % 64
        room[start : start + high - low] = np.frombuffer(_bytes(array), np.uint8)
        offset = start + array.ctypes.data - low
        return np.ndarray(array.shape, array.dtype, room, offset, array.strides)

    def asnumpy(self, array):
        """A copy of an array's values in host memory."""
        return np.array(array)

    def assign(self, array, values):
        """Write values into an array, which may be misaligned."""
        array[...] = values

    def read_only(self, array):
        """The same array, not to be written from now on."""
        array.flags.writeable = False
        return array

    def stretched(self, array, shape, strides):
        """A writable view of any strides, 0 among them."""
        return np.lib.stride_tricks.as_strided(array, shape, strides, subok=True)

    def memory(self, array):
        """Every byte from an array's first to its last, gaps included."""
        return _bytes(array)

    def launches(self):
        """Number of kernels that have run, if they are counted."""
        return 0


# The files whose operations are compiled.
COMPILED_FILES = {
    *("bad_input/test_bad_input.py", "calls/test_sequences.py", "calls/test_layouts.py"),
    "calls/test_strided_rows.py",
    "cpu/test_compiled.py",
    *("distributed/test_batch_norm_over_ranks.py", "distributed/test_groups.py"),
    *("distributed/test_rank_states.py", "values/test_accumulate_grads.py"),
    *("values/test_accumulation.py", "values/test_averaging.py", "values/test_batch_norm.py"),
    *("values/test_batch_norm_inference.py", "values/test_block_clipping.py"),
    *("values/test_channel_norms.py", "values/test_clipping.py", "values/test_clipping_scaled.py"),
    *("values/test_compensation.py", "values/test_every_norm.py", "values/test_exact_norms.py"),
    "values/test_gated_norm.py",
    *("values/test_golden.py", "values/test_group_norm.py", "values/test_normalization.py"),
    *("values/test_residual_norms.py", "values/test_running_statistics.py"),
    *("values/test_samples.py", "values/test_spikes.py", "values/test_statistics.py"),
    *("values/test_stochastic_rounding.py", "values/test_updates.py", "values/test_wanted.py"),
}


class CompiledCpu(Backend):
    """The same by compiled code; in other files than those above, NumPy's once more, slowly."""

    name = "compiled"
    marks = (
        pytest.mark.skipif(
            not _host.describe()["compiled"]["available"] and os.environ.get("CI") != "true",
            reason="gradkit was installed without compiled code",
        ),
    )


class Emulated(Backend):
    """The CUDA kernels' own source on the CPU, every access checked."""

    name = "emulated"
    marks = (
        pytest.mark.emulated,
        pytest.mark.skipif(
            bool(missing("g++")) and os.environ.get("CI") != "true",
            reason="no g++ on this machine",
        ),
    )
    max_elements = 1 << 14  # a checked access takes tens of nanoseconds
    on_host = False
    run_errors = tolerances.PAIRS

    def __init__(self):
        self._cuda = None

    def active(self):
        self._cuda = self._cuda or self.make(schedule="shuffled", multiprocessors=1)
        return nullcontext()

    def make(self, **options):
        """Make a backend that computes on arrays like these."""
        return emulated_backend(**options)

    @contextmanager
    def sized(self, **options):
        """Yield a function that puts arrays on a device of another size, on which grids depend."""
        cuda = self.make(**options)
        yield lambda array: on_device(cuda.device.xp.array(array), cuda)

    def asarray(self, array):
        return on_device(super().asarray(np.asarray(array)), self._cuda)

    def launches(self):
        return self._cuda.device.total_traffic.launches


class Ptx(Emulated):
    """The code that NVRTC makes of the kernels, on the CPU, every access checked."""

    name = "ptx"
    marks = (pytest.mark.ptx,)
    has_cudas_pow = True

    def make(self, **options):
        return ptx_backend(**COMPILED, **options)


class CompiledDevice(PtxDevice):
    """The device of the backend above, for tests that launch by themselves."""

    def __init__(self, **options):
        super().__init__(**COMPILED, **options)


# What tests of the kernels alone run on, and their mark.
KernelDevice = CompiledDevice if ARCHITECTURE else EmulatedDevice
kernel_mark = pytest.mark.ptx if ARCHITECTURE else pytest.mark.emulated


class CuPy(Backend):
    """CuPy's arrays on the current GPU."""

    name = "cupy"
    marks = (pytest.mark.gpu,)
    on_host = False
    run_errors = tolerances.PAIRS
    has_read_only = False
    has_cudas_pow = True

    def active(self):
        """CuDNN has tests of its own, with bounds of its own: here our kernels run."""
        from gradkit._cuda.cudnn import engines

        def natively(*_):  # a Mock would keep each call
            return False

        return mock.patch.object(engines, "_try_cudnn", natively)

    @contextmanager
    def sized(self, *, multiprocessors, sharing, max_shared_memory, clusters):  # noqa: ARG002
        """As if sums were divided among so few multiprocessors; the GPU keeps its own number.

        Of shared memory it must have enough.
        """
        import cupy

        from gradkit import _cuda
        from gradkit._cuda.launch.device import CupyDevice

        number = cupy.cuda.Device().id
        device = CupyDevice(number)
        if device.max_shared_memory < max_shared_memory:
            pytest.skip("long rows take another path on this GPU")
        device.sharing, device.max_shared_memory = sharing, max_shared_memory
        device.clusters = clusters
        with mock.patch.dict(_cuda.backends, {number: _cuda.CudaBackend(device)}), self.active():
            yield self.asarray

    def asarray(self, array):
        import cupy

        array = np.asarray(array)
        if array.dtype == DTYPES["bfloat16"] and int(cupy.__version__.split(".")[0]) < 14:
            pytest.skip("CuPy 13 has no bfloat16")
        low, high = span(array)
        room = cupy.empty(high - low + 64, np.uint8)  # CuPy's memory is aligned to 512 bytes
        start = low % 64
        room[start : start + high - low] = cupy.asarray(np.frombuffer(_bytes(array), np.uint8))
        first = room.data + (start + array.ctypes.data - low)
        return cupy.ndarray(array.shape, array.dtype, first, array.strides)

    def asnumpy(self, array):
        """By its bytes: CuPy's copies of what is not contiguous need aligned elements."""
        if isinstance(array, list):
            return np.array([self.asnumpy(each) for each in array])
        if isinstance(array, np.ndarray):  # the norm of an empty list
            return np.array(array)
        memory = np.frombuffer(self.memory(array), np.uint8)
        return np.ndarray(array.shape, array.dtype, memory, _first(array), array.strides).copy()

    def assign(self, array, values):
        import cupy

        memory = np.array(np.frombuffer(self.memory(array), np.uint8))
        host = np.ndarray(array.shape, array.dtype, memory, _first(array), array.strides)
        host[...] = values if np.isscalar(values) else self.asnumpy(values)
        place = cupy.ndarray(memory.shape, np.uint8, array.data - _first(array))
        place[...] = cupy.asarray(memory)

    def stretched(self, array, shape, strides):
        import cupy

        return cupy.ndarray(shape, array.dtype, array.data, strides)

    def memory(self, array):
        import cupy

        steps = zip(array.shape, array.strides, strict=True)
        reach = sum(abs((length - 1) * stride) for length, stride in steps)
        size = reach + array.itemsize if array.size else 0
        return cupy.ndarray(size, np.uint8, array.data - _first(array)).get().tobytes()


def _first(array):
    """Number of bytes of its memory before an array's first element."""
    steps = zip(array.shape, array.strides, strict=True)
    return sum(max(0, (1 - length) * stride) for length, stride in steps) if array.size else 0


def _bytes(array):
    """Every byte of a host array from its first to its last, gaps included."""
    low, high = span(array)
    return ctypes.string_at(low, high - low)


def has_gpu():
    """Return whether CuPy is installed and finds a device."""
    if importlib.util.find_spec("cupy") is None:
        return False
    import cupy

    try:
        return cupy.cuda.is_available()
    except cupy.cuda.runtime.CUDARuntimeError:  # CuPy 13 without a driver
        return False


ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not has_gpu(), reason="no CUDA device")]


def span(array):
    """The addresses of a host array's first byte and of the one past its last."""
    low = high = array.ctypes.data
    if array.size == 0:
        return low, high
    for length, stride in zip(array.shape, array.strides, strict=True):
        low += min(0, (length - 1) * stride)
        high += max(0, (length - 1) * stride)
    return low, high + array.itemsize


BACKENDS = [
    Backend(),
    CompiledCpu(),
    Emulated(),
    *([Ptx()] if ARCHITECTURE else []),
    *([CuPy()] if has_gpu() else []),
]
