"""Large results on the host, in any library's arrays: memory of earlier ones that nothing holds.

Each begins at a huge page, and PyTorch's own memory never does.
"""

import copy
import gc
import io
import os
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import gradkit
from gradkit import _host
from gradkit._arrays import framework_for
from gradkit._backend import LARGE
from tests.cpu.test_compiled import in_a_process

pytestmark = pytest.mark.skipif(not _host.is_compiled(), reason="compiled code keeps memory")

HUGE_PAGE = 1 << 21
MIB = 1 << 20
D = 1024
DTYPES = ["float16", "bfloat16", "float32", "float64"]


def address(array):
    """Address of an array on the host."""
    if hasattr(array, "data_ptr"):
        return array.data_ptr()
    return framework_for(type(array)).view(array, write=False).ctypes.data


def is_kept(array, page=HUGE_PAGE):
    return address(array) % page == 0


def data(torch, mib=5, dtype="float32", shape=(-1, D)):
    """Values that differ from one another, in so many MiB."""
    dtype = getattr(torch, dtype)
    count = mib * MIB // torch.empty(0, dtype=dtype).element_size()
    return torch.linspace(-2, 3, count).to(dtype).reshape(shape)


def normed(torch, mib=5):
    return gradkit.rms_norm(data(torch, mib))[0]


# Each way in


def _record(torch):
    x, scale = data(torch), torch.ones(D)
    y, mean, inv_std = gradkit.layer_norm(x, scale, scale)
    return y, gradkit.layer_norm_grad(x, x, scale, mean, inv_std)[0]


def _some_out(torch):
    x = data(torch)
    _, s = found = gradkit.add_rms_norm(x, x, out=(torch.empty_like(x), None, None))[:2]
    assert not is_kept(found[0])
    return (s,)


def _strided(torch):
    return gradkit.rms_norm(data(torch).repeat(1, 2)[:, ::2])[:1]


def _channels(torch):
    x = data(torch, shape=(-1, 64, 32, 32))
    last = x.to(memory_format=torch.channels_last)
    found = [gradkit.batch_norm(each)[0] for each in (x, last)]
    assert found[1].is_contiguous(memory_format=torch.channels_last)
    return [*found, gradkit.group_norm(last, 4)[0]]


def _list(torch):
    grads = [torch.ones(3), data(torch), data(torch, 9).t()]
    (small, *large), _ = gradkit.clip_by_global_norm(grads, 1.0)
    assert small.untyped_storage().resizable()
    assert all(each.is_contiguous() for each in large)
    return large


def _dict(torch):
    return gradkit.clip_by_global_norm({"b": torch.ones(3), "a": [data(torch)]}, 1.0)[0]["a"]


def _autograd(torch):
    import gradkit.torch as ours

    x, weight = data(torch).requires_grad_(), torch.ones(D, requires_grad=True)
    y, s = ours.add_layer_norm(x, x.detach(), (D,), weight)
    y.backward(data(torch))
    return y, s, x.grad


def _operators(torch):
    import gradkit.torch as ours

    x = data(torch).requires_grad_()
    y = torch.compile(lambda x: ours.rms_norm(x, (D,)), backend="aot_eager")(x)
    y.backward(data(torch))
    return y, x.grad


WAYS = [_record, _some_out, _strided, _channels, _list, _dict, _autograd, _operators]


@pytest.mark.parametrize("way", WAYS)
def test_they_have_kept_memory(torch, way):
    for _ in range(3):  # the first finds the plan
        for result in way(torch):
            assert is_kept(result)
            assert type(result) is torch.Tensor


@pytest.mark.parametrize("way", WAYS)
def test_the_next_ones_have_the_same_memory(torch, way):
    seen = []
    gc.freeze()  # or each search would go through all that other tests have left
    for _ in range(4):
        found = way(torch)
        seen.append({address(each) for each in found})
        del found
        gc.collect()  # graphs of compilers
    assert seen[1] == seen[2] == seen[3]


def test_small_ones_have_pytorchs(torch):
    small = gradkit.rms_norm(torch.ones(LARGE // 8192, D))[0]
    assert small.untyped_storage().resizable()
    assert not is_kept(small)
    assert is_kept(gradkit.rms_norm(torch.ones(LARGE // 4096, D))[0], page=4096)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_those_of_small_ones(torch, dtype):
    x = data(torch, dtype=dtype)
    y, inv_std = gradkit.rms_norm(x)
    part, few = gradkit.rms_norm(x[-8:])
    assert (y.dtype, y.shape, y.stride()) == (x.dtype, x.shape, x.stride())
    assert torch.equal(y[-8:], part)
    assert torch.equal(inv_std[-8:], few)


@pytest.mark.parametrize("name", ["jax", "tensorflow"])
def test_other_libraries_have_it_too(request, name):
    lib = request.getfixturevalue({"jax": "jax", "tensorflow": "tf"}[name])
    make = lib.numpy.ones if name == "jax" else lib.ones
    x, seen = make((5 * MIB // 4096, D)), []
    gc.freeze()
    for _ in range(4):
        y = gradkit.rms_norm(x, eps=0.0)[0]
        assert is_kept(y)
        assert (np.asarray(y) == 1).all()
        seen.append(address(y))
        del y
        gc.collect()
    assert seen[1] in seen[2:]


# What holds it


@pytest.mark.guarantee("Bounded")
@pytest.mark.parametrize(
    "hold",
    [
        *(lambda y: y[5:6, ::3], lambda y: y.t(), lambda y: y.numpy()[3], lambda y: y.detach()),
        *(
            lambda y: y.untyped_storage(),
            np.from_dlpack,
            lambda y: y.view(y.new_empty(0).int().dtype),
        ),
        lambda y: y.clone().requires_grad_() * y,
    ],
    ids=["part", "axes", "numpy", "detached", "storage", "dlpack", "dtype", "graph"],
)
def test_what_holds_a_part_holds_it(torch, hold):
    first = normed(torch)
    where, holder = address(first), hold(first)
    del first
    assert address(normed(torch)) != where
    del holder
    assert address(normed(torch)) == where


def test_a_graph_holds_what_its_backward_pass_reads(torch):
    import gradkit.torch as ours

    x, weight = data(torch).requires_grad_(), torch.ones(D, requires_grad=True)
    hidden = ours.rms_norm(x, (D,))
    y = ours.invertible_layer_norm(hidden, (D,), weight)  # which keeps y
    expected = y.detach().clone()
    where = address(y)
    loss = (y * 2).sum()
    del y, hidden
    others = [normed(torch) for _ in range(3)]
    assert where not in map(address, others)
    for each in others:
        each.fill_(float("nan"))
    loss.backward()
    assert torch.isfinite(x.grad).all()
    torch.testing.assert_close(weight.grad, (2 * expected).sum(0), rtol=1e-3, atol=1e-2)
    del loss
    again = [x.grad, *(normed(torch) for _ in range(12))]  # the gradient below may have it
    assert where in map(address, again)


def test_a_chain_has_pytorchs_gradients(torch):
    import gradkit.torch as ours

    weights = [torch.full((D,), 1 + k / 4, requires_grad=True) for k in range(4)]
    found = []
    for norm in (torch.nn.functional.layer_norm, ours.layer_norm):
        x = y = data(torch).requires_grad_()
        for weight in weights:
            y = norm(y + x, (D,), weight)
        found.append(torch.autograd.grad(y, [x, *weights], data(torch)))
    for own, theirs in zip(*found, strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-3, atol=1e-3)


# What PyTorch does with a tensor


def test_they_are_plain_tensors(torch):
    y = normed(torch)
    assert (y._version, y._base, y.grad_fn, y.requires_grad) == (0, None, None, False)
    assert y.untyped_storage().nbytes() == y.nbytes
    assert y.storage_offset() == 0
    assert not y.is_inference()
    with torch.inference_mode():
        assert normed(torch).is_inference()


def test_versions_are_counted(torch):
    y, x = normed(torch), data(torch).requires_grad_()
    product = x * y
    gradkit.rms_norm(data(torch), out=(y, None))
    assert y._version == 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_they_are_copied_and_stored(torch):
    y, buffer = normed(torch), io.BytesIO()
    torch.save(y, buffer)
    buffer.seek(0)
    own = [copy.deepcopy(y), y.clone()]
    for each in (*own, pickle.loads(pickle.dumps(y)), torch.load(buffer)):
        assert torch.equal(each, y)
        assert not is_kept(each)
    assert all(each.untyped_storage().resizable() for each in own)


def test_they_go_to_shared_memory(torch):
    y = normed(torch)
    where, expected = address(y), y.clone()
    y.share_memory_()
    assert y.is_shared()
    assert torch.equal(y, expected)
    assert address(normed(torch)) == where  # which it has left


def test_they_change_places(torch):
    y, other, whole = normed(torch), torch.zeros(3), torch.zeros(2)
    where = address(y)
    torch.utils.swap_tensors(y, other)
    assert address(other) == where
    whole.set_(other)
    del y, other
    assert address(normed(torch)) != where
    whole.data = torch.zeros(2)
    assert address(normed(torch)) == where


def test_their_storage_keeps_its_size(torch):
    """As that of tensors from NumPy's arrays; the page about PyTorch says so."""
    y = normed(torch)
    for resize, size in ((y.untyped_storage().resize_, 0), (y.detach().resize_, 2 * y.numel())):
        with pytest.raises(RuntimeError, match="storage that is not resizable"):
            resize(size)
    assert y.resize_(2, D).shape == (2, D)
    torch.add(torch.ones(4), 1, out=y.resize_(0))
    assert y.tolist() == [2] * 4


# Threads, processes, and how much is kept


def test_threads_never_share_a_block(torch):
    start = threading.Barrier(4)
    x = data(torch)
    expected = gradkit.rms_norm(x)[0]

    def work(own):
        start.wait()
        for turn in range(6):
            y, z = (gradkit.rms_norm(x[: len(x) - (turn + k) % 3])[0] for k in range(2))
            y.fill_(own)
            if not (torch.equal(z, expected[: len(z)]) and bool((y == own).all())):
                return False
        return True

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))


def test_another_thread_may_drop_the_last_reference(torch):
    y = normed(torch)
    where, held = address(y), [y]
    del y
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert address(normed(torch)) == where


START = """
import os, resource, sys, threading, torch, gradkit
torch.set_num_threads(1)  # what OpenMP has started is not there after a fork
x = torch.ones(5 << 8, 1024)

def normed():
    return gradkit.rms_norm(x, eps=0.0)[0]

normed()
"""


@pytest.mark.usefixtures("torch")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
def test_a_child_and_its_parent_have_their_own():
    code = """
mine, free = normed(), normed()
where = free.data_ptr()
del free
child = os.fork()
if not child:
    gradkit.set_num_threads(1)
    theirs = normed()
    theirs.fill_(2)
    mine.fill_(3)
    os._exit(theirs.data_ptr() != where)
print(os.waitpid(child, 0)[1])
ours = normed()
print(ours.data_ptr() == where, bool((ours == 1).all()), bool((mine == 1).all()))
"""
    assert in_a_process(START + code).stdout.split() == ["0", "True", "True", "True"]


@pytest.mark.usefixtures("torch")
@pytest.mark.parametrize(
    "code",
    [
        "held = normed()",
        "sys.held = normed(); import atexit; atexit.register(normed)",
        "held = normed(); held.self = held",
    ],
)
def test_a_process_ends_that_holds_some(code):
    done = in_a_process(START + code)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.usefixtures("torch")
@pytest.mark.skipif(sys.platform != "linux", reason="/proc says what is held")
def test_200_calls_take_no_more_memory_than_two():
    code = """
def held():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) >> 8

def step():
    x.grad = None
    y = gradkit.torch.layer_norm(gradkit.torch.rms_norm(x, (1024,)), (1024,))
    y.backward(x.detach())
    gradkit.clip_by_global_norm([x.grad, y.detach()], 1.0)

import gradkit.torch
x.requires_grad_()
for _ in range(2):
    step()
before, faults = held(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(200):
    step()
print(held() - before, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)
"""
    grown, faults = map(int, in_a_process(START + code).stdout.split())
    assert grown <= 2
    assert faults < 2000  # a result has 1280 pages of 4 KiB
