"""One contract: both backends have each function of ``gradkit._backend``, and nothing else does.

And the one door from device to host: who reads what a device holds.
"""

import ast
import inspect
from pathlib import Path

import numpy as np
import pytest

import gradkit
from gradkit import _numpy
from gradkit._calls.backend import OPERATIONS, Services, names_in, operations_of
from gradkit._calls.channels import ChannelOperations
from gradkit._calls.lists import ListOperations
from gradkit._calls.rows import RowOperations
from gradkit._cuda import CudaBackend
from tests.calls.test_dispatch import every_call
from tests.devices.emulated import DeviceArray, emulated_backend, on_device

PACKAGE = Path(gradkit.__file__).parent
CONTRACTS = (Services, ChannelOperations, ListOperations, RowOperations)
FUNCTIONS = [(contract, name) for contract in CONTRACTS for name in names_in(contract)]


def parameters(function):
    """(name, kind, default) of each parameter but ``self``, without annotations."""
    found = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, p.default) for p in found if p.name != "self"]


@pytest.mark.parametrize(("contract", "name"), FUNCTIONS, ids=[name for _, name in FUNCTIONS])
def test_backends_have_the_contracts_parameters(contract, name):
    promised = parameters(getattr(contract, name))
    assert parameters(getattr(CudaBackend, name)) == promised
    if name == "empty":  # NumPy's own, which says so itself
        assert _numpy.empty(3, "f4").shape == (3,)
    else:
        assert parameters(getattr(_numpy, name)) == promised
        assert inspect.getdoc(getattr(_numpy, name))


def test_every_function_that_computes_is_in_the_contract():
    """Every operation that a public function runs exists, and each is run by one."""
    run = {name for public in gradkit.__all__ for name in operations_of(public)}
    assert run == set(OPERATIONS)


def test_modules_have_no_functions_name():
    """``from gradkit import x`` means one thing."""
    modules = {path.stem for path in PACKAGE.rglob("*.py")}
    assert not modules & {*gradkit.__all__, *OPERATIONS} - {"warmup"}


def calls_of(method):
    """The files of gradkit in which a method of this name is called, on whatever it may be."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            if called and node.func.attr == method:
                yield path.relative_to(PACKAGE).as_posix()


def test_read_is_the_only_door_from_device_to_host():
    """Only the files below call it, and none uses another of CuPy's doors."""
    readers = {
        "_open/clipping.py",
        "_open/arguments.py",  # for state_dict
        "_ranks/batches.py",
        "_ranks/blocks.py",
        "_ranks/collective.py",  # for callers who wait
        "_ranks/copies.py",  # which is for tests
        "_ranks/norms.py",
        "_ranks/device.py",  # in `check`
        "_ranks/statistics.py",
        "_cuda/lists.py",  # for exact sums
        "_cuda/several_devices.py",  # to scale what is on the host
        "_cuda/cudnn/search.py",
    }  # the last one reads a file
    assert set(calls_of("read")) == readers
    assert set(calls_of("asnumpy")) == {"_cuda/launch/operations.py"}
    on_host = {
        "ownership.py",
        "copies.py",
        "exact_norms.py",
        "torch.py",
        "named_rows.py",
        "statistics.py",
    }  # what ranks exchanged
    for method in ("item", "tolist"):
        files = {*calls_of(method)} - {f"_ranks/{file}" for file in on_host}
        files -= {"spikes.py"}  # of a state that was read for a checkpoint
        files -= {"statistics.py"}  # of what was read for a log
        files -= {"torch/accumulation.py"}  # of which gradients DDP's ranks have
        assert {file.partition("/")[0] for file in files} <= {"_numpy"}
    waiting = {"_arrays/cuda.py"}  # for streams that it cannot order
    waiting |= {"_ranks/device.py"}
    assert set(calls_of("synchronize")) == waiting


def refuse(*_):
    raise AssertionError("a device's value was made a Python number")


def close_doors(monkeypatch):
    """Have arrays of a device refuse to be looked at."""
    for door in ("__float__", "__int__", "__bool__", "__index__", "__iter__", "item", "tolist"):
        monkeypatch.setattr(DeviceArray, door, refuse, raising=False)


@pytest.mark.emulated
@pytest.mark.parametrize("name", every_call(np.array))
def test_nothing_else_looks_at_a_devices_values(monkeypatch, name):
    """Arrays of the device, results and scratch among them, that cannot be looked at."""
    backend = emulated_backend(multiprocessors=1)
    empty = CudaBackend.empty
    monkeypatch.setattr(
        CudaBackend, "empty", lambda self, *args: on_device(empty(self, *args), self)
    )

    def a(host):
        return on_device(backend.device.xp.asarray(host), backend)

    call = every_call(a)[name]
    close_doors(monkeypatch)
    call()


@pytest.mark.emulated
def test_raising_reads_two_arrays_whatever_the_list(monkeypatch):
    """One copy of all norms, and one more to name the gradients at fault."""
    backend = emulated_backend(multiprocessors=1)
    grads = [on_device(backend.device.xp.asarray(np.full(3, k)), backend) for k in (1.0, np.nan)]
    reads = []
    read = CudaBackend.read
    monkeypatch.setattr(
        CudaBackend, "read", lambda self, array: reads.append(array.shape) or read(self, array)
    )
    gradkit.per_tensor_norms(grads[:1] * 3, nonfinite="raise", flat=True)
    assert reads == [(3,)]
    with pytest.raises(gradkit.NonFiniteNormError, match=r"grads\[1\]"):
        gradkit.grad_norm(grads, nonfinite="raise")
    assert reads == [(3,), (), (2,)]
