"""Ranks for tests that have an emulated device each, and communicators between those devices.

The communicators take what the real ones take, refuse what those refuse or what would be undefined
there, and move the bits between threads. What they check is in CuPy 13 and 14 (``nccl.pyx`` and
``cupyx/distributed/_nccl_comm.py``), nccl4py 0.3.1 (``core/communicator.py``) and PyTorch
(``torch/distributed/distributed_c10d.py``).
"""

import ctypes
import sys
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np

from gradkit import distributed
from gradkit._arrays import register
from gradkit._cuda import CudaBackend
from gradkit._ranks import device as groups_device
from testbed.emulator import EmulatedDevice
from testbed.emulator.device import ArrayNamespace
from tests.devices.emulated import DeviceArray, Emulated, on_device
from tests.ranks import TIMEOUT_S, together

NCCL_FLOAT64 = 8


class Remembering:
    """A device's memory that knows the arrays it has given out."""

    def __init__(self, memory):
        self._memory, self.spans = memory, set()

    def __getattr__(self, name):
        return getattr(self._memory, name)

    def empty(self, shape, dtype):
        return self._remember(self._memory.empty(shape, dtype))

    def allocate(self, shape, dtype):
        return self._remember(self._memory.allocate(shape, dtype))

    def _remember(self, array):
        self.spans.add((array.ctypes.data, array.ctypes.data + array.nbytes))
        return array

    def holds(self, address, size):
        """Return whether so many bytes lie in an array of this device."""
        return any(start <= address and address + size <= end for start, end in self.spans)


class RankDevice(EmulatedDevice):
    """A device with a number, memory of its own and a current stream."""

    def __init__(self, number):
        super().__init__(multiprocessors=1)
        self.number = number
        self.memory = Remembering(self.memory)
        self.xp = ArrayNamespace(self.memory)
        self.waits = 0
        self.address = 0x1000 + number

    def cuda_stream(self):
        return self.address

    def synchronize(self):
        self.waits += 1


class RankBackend(CudaBackend):
    """The CUDA backend of such a device, whose scratch is the device's array too."""

    def empty(self, shape, dtype):
        return on_device(super().empty(shape, dtype), self)

    def as_float64(self, value):
        if isinstance(value, DeviceArray) and value.dtype == np.float64:
            return value
        return on_device(super().as_float64(value), self)

    def put(self, host):
        """A copy of a host array on the device."""
        return on_device(self.device.xp.asarray(host), self)


class Wire:
    """Connection of the ranks: each gives bytes and gets those of all."""

    def __init__(self, size):
        self.size, self.sent = size, [[] for _ in range(size)]
        self._states = [None] * size
        self._barrier = threading.Barrier(size, timeout=TIMEOUT_S)

    def exchange(self, rank, state):
        self.sent[rank].append(len(state) // 8)
        self._states[rank] = state
        self._barrier.wait()
        states = list(self._states)
        self._barrier.wait()
        assert len(set(map(len, states))) == 1, "NCCL would hang: ranks send different sizes"
        return b"".join(states)


class NcclCommunicator:
    """CuPy's, from its compiled module."""

    __module__ = "cupy_backends.cuda.libs.nccl"

    def __init__(self, wire, rank, device):
        self._wire, self._rank, self._device = wire, rank, device

    def device_id(self):
        return self._device.number

    def rank_id(self):
        return self._rank

    def size(self):
        return self._wire.size

    def allGather(self, sendbuf, recvbuf, count, datatype, stream):  # noqa: N802
        numbers = sendbuf, recvbuf, count, datatype, stream
        assert all(type(number) is int for number in numbers), numbers
        assert datatype == NCCL_FLOAT64
        assert stream == self._device.cuda_stream()
        size = count * 8
        assert size > 0
        assert sendbuf % 8 == recvbuf % 8 == 0
        assert self._device.memory.holds(sendbuf, size)
        assert self._device.memory.holds(recvbuf, size * self._wire.size)
        rows = self._wire.exchange(self._rank, ctypes.string_at(sendbuf, size))
        ctypes.memmove(recvbuf, rows, len(rows))
        # Bytes of 0xFF, as half of the largest double's are, would else count as never written.
        self._device.runtime.mark_initialised(recvbuf, recvbuf + len(rows))


class NCCLBackend:
    """CuPy's ``cupyx.distributed.NCCLBackend``."""

    __module__ = "cupyx.distributed._nccl_comm"

    def __init__(self, communicator):
        self.rank, self._comm = communicator.rank_id(), communicator

    def all_gather(self, in_array, out_array, count, stream=None):
        for array in (in_array, out_array):
            if not (array.flags.c_contiguous or array.flags.f_contiguous):
                raise RuntimeError("NCCL requires arrays to be either c- or f-contiguous")
        assert in_array.dtype.char == "d"
        stream = self._comm._device.cuda_stream() if stream is None else stream.ptr
        source, target = (array.ctypes.data for array in (in_array, out_array))
        self._comm.allGather(source, target, count, NCCL_FLOAT64, stream)


class Communicator:
    """nccl4py's."""

    __module__ = "nccl.core.communicator"

    def __init__(self, communicator):
        self._comm = communicator
        self.rank, self.nranks = communicator.rank_id(), communicator.size()
        self.device = SimpleNamespace(device_id=communicator.device_id())

    def allgather(self, sendbuf, recvbuf, *, stream=None):
        assert isinstance(sendbuf, DeviceArray)
        assert isinstance(recvbuf, DeviceArray)
        assert sendbuf.dtype == recvbuf.dtype
        assert recvbuf.size >= self.nranks * sendbuf.size
        source, target = sendbuf.ctypes.data, recvbuf.ctypes.data
        # Without a stream it takes the default one, whose handle is 0.
        self._comm.allGather(source, target, sendbuf.size, NCCL_FLOAT64, stream or 0)


class StubTorch:
    """The part of PyTorch that ``from_torch`` uses; tensors are arrays of a rank's device.

    A thread is a process: it has a current device, and its rank is that device's number.
    """

    float64 = np.float64

    def __init__(self, communicators, config):
        self._communicators, self._config = communicators, config
        self.gloo = Wire(len(communicators))
        self._own = threading.local()
        self.Tensor = self.Parameter = type(self)
        self.nn = self.distributed = self.cuda = self

    def begin(self, rank, backend):
        """Make this thread a rank."""
        self._own.rank, self._own.backend = rank, backend
        self._own.stream = backend.device.cuda_stream()

    def get_backend_config(self, group):
        assert group == "the group"
        return self._config

    def get_rank(self, _):
        return self._own.rank

    def get_world_size(self, _):
        return len(self._communicators)

    def current_device(self):
        return self._own.rank

    def device(self, name):
        kind, _, index = name.partition(":")
        return SimpleNamespace(type=kind, index=int(index) if index else None)

    def zeros(self, size, *, dtype, device):
        return self._made(np.zeros(size, dtype), device)

    def empty(self, shape, *, dtype, device):
        return self._made(np.empty(shape, dtype), device)

    def _made(self, host, device):
        assert device == f"cuda:{self._own.rank}"
        return self._own.backend.put(host).view(Tensor)

    def from_numpy(self, host):
        assert type(host) is np.ndarray
        return HostTensor(host, self._made)

    def all_gather(self, tensors, tensor, group=None):
        assert group == "the group"
        states = np.frombuffer(self.gloo.exchange(self._own.rank, tensor.host.tobytes()))
        for target, row in zip(tensors, states.reshape(len(tensors), -1), strict=True):
            target.host[...] = row

    def from_dlpack(self, array):
        assert type(array) is DeviceArray
        return array.view(Tensor)

    def all_reduce(self, tensor, group=None):
        assert group == "the group"
        on_host = isinstance(tensor, HostTensor)
        host = tensor.host if on_host else np.array(tensor)
        wire = self.gloo if on_host else self._communicators[self._own.rank]._wire
        states = np.frombuffer(wire.exchange(self._own.rank, host.tobytes()))
        host[...] = states.reshape(-1, host.size).sum(axis=0)
        if not on_host:
            tensor[...] = host

    def current_stream(self, device):
        assert device == f"cuda:{self._own.rank}"
        return SimpleNamespace(cuda_stream=self._own.stream)

    def ExternalStream(self, address, device):  # noqa: N802
        assert device == f"cuda:{self._own.rank}"
        return address

    @contextmanager
    def stream(self, address):
        before, self._own.stream = self._own.stream, address
        yield
        self._own.stream = before

    def all_gather_into_tensor(self, output_tensor, input_tensor, group=None):
        assert group == "the group"
        assert output_tensor.shape == (len(self._communicators) * input_tensor.numel(),)
        source, target = (array.ctypes.data for array in (input_tensor, output_tensor))
        own = self._communicators[self._own.rank]
        own.allGather(source, target, input_tensor.numel(), NCCL_FLOAT64, self._own.stream)


class HostTensor:
    """A tensor in host memory, of NumPy's."""

    def __init__(self, host, made):
        self.host, self._made = host, made

    def __iter__(self):
        return (HostTensor(row, self._made) for row in self.host)

    def to(self, device):
        return self._made(self.host, device)


class Tensor(DeviceArray):
    """A tensor, which gradkit sees as an array of its device."""

    def numel(self):
        return self.size

    def view(self, *shape):
        """The shape as PyTorch has it; NumPy's function of that name takes a type."""
        return super().view(*shape) if isinstance(shape[0], type) else self.reshape(shape)


class Tensors(Emulated):
    """Their library, which gives views of another type, as CuPy's arrays are of PyTorch's."""

    def view(self, array, *, write, detach=False):  # noqa: ARG002
        return on_device(np.asarray(array), array.backend)


register(Tensor, Tensors())


class DeviceRanks:
    """A group of emulated devices, one a rank."""

    def __init__(self, monkeypatch, size, kind="nccl"):
        self.size, self.wire = size, Wire(size)
        self.backends = [RankBackend(RankDevice(number)) for number in range(size)]
        monkeypatch.setattr(groups_device, "backend_on", self.backends.__getitem__)
        devices = [backend.device for backend in self.backends]
        self.communicators = [NcclCommunicator(self.wire, k, d) for k, d in enumerate(devices)]
        self._kind = kind
        if kind in ("torch", "both"):
            config = "cuda:nccl" if kind == "torch" else "cpu:gloo,cuda:nccl"
            self.torch = StubTorch(self.communicators, config)
            monkeypatch.setitem(sys.modules, "torch", self.torch)
            self.groups = list(range(size))  # made by the rank itself
        else:
            make = {
                "nccl": distributed.from_nccl,
                "cupyx": lambda c: distributed.from_cupyx(NCCLBackend(c)),
                "nccl4py": lambda c: distributed.from_nccl(Communicator(c)),
            }[kind]
            self.groups = list(map(make, self.communicators))

    def over(self, parts):
        """Put each rank's gradients on its device."""
        pairs = zip(self.backends, parts, strict=True)
        return [[None if g is None else own.put(g) for g in part] for own, part in pairs]

    def together(self, work):
        """``work(group)`` on every rank, and what each returned or raised."""
        if self._kind not in ("torch", "both"):
            return together(work, self.size, groups=self.groups)

        def as_process(rank):
            self.torch.begin(rank, self.backends[rank])
            return work(distributed.from_torch("the group"))

        return together(as_process, self.size, groups=self.groups)

    def results(self, work):
        """As ``together``, where no rank may raise."""
        found = self.together(work)
        for each in found:
            if isinstance(each, BaseException):
                raise each
        return found

    def put(self, rank, host):
        return self.backends[rank].put(np.asarray(host))
