"""PyTorch's tensors in calls like earlier ones, which are not opened: what may differ is looked at.

Each test makes a plain call first, after which a call's plan is known.
"""

import ctypes
from collections import deque
from functools import partial

import pytest

import gradkit
from gradkit._arrays import torch as adapter
from gradkit._arrays.torch import Torch

from .libraries import HAZARDS

SHAPE = 6, 8


def arguments(torch):
    """Arguments of a layer norm's gradient."""
    generator = torch.Generator().manual_seed(0)
    dy, x, scale = (torch.randn(shape, generator=generator) for shape in (SHAPE, SHAPE, SHAPE[1:]))
    _, mean, inv_std = gradkit.layer_norm(x, scale)
    return dy, x, scale, mean, inv_std


def outputs(torch):
    return torch.empty(SHAPE), torch.empty(SHAPE[1:]), torch.empty(SHAPE[1:])


def test_a_result_in_place_of_an_argument_makes_no_view(torch, monkeypatch):
    dy, *rest = arguments(torch)
    expected = gradkit.layer_norm_grad(dy, *rest)
    for known in (False, True):
        own = dy.clone()
        out = own, *outputs(torch)[1:]
        with monkeypatch.context() as patched:
            if known:
                patched.setattr(Torch, "view", None)
            found = gradkit.layer_norm_grad(own, *rest, out=out)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert own._version > 0
    for _ in range(2):
        with pytest.raises(ValueError, match=r"out\[0\] shares memory with x"):
            gradkit.layer_norm_grad(dy, *rest, out=(rest[0], *out[1:]))


def test_a_batch_norm_and_its_running_statistics_make_no_view(torch, monkeypatch):
    """Numbers that no plan depends on are checked all the same."""
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    running, copies = [(torch.zeros(8), torch.ones(8)) for _ in range(2)]

    def moved(momentum):
        gradkit.batch_norm(x, running_mean=running[0], running_var=running[1], momentum=momentum)
        with gradkit.use_cpu_backend("numpy"):
            on = [copy.numpy() for copy in copies]
            own = dict(zip(("running_mean", "running_var"), on, strict=True))
            gradkit.batch_norm(x.numpy(), **own, momentum=momentum)
        for a, b in zip(running, copies, strict=True):
            torch.testing.assert_close(a, b)

    moved(0.5)
    with monkeypatch.context() as patched:
        patched.setattr(Torch, "view", None)
        moved(1)
        with pytest.raises(ValueError, match="momentum must be from 0 to 1"):
            moved(1.5)
    assert running[0]._version == 2
    for _ in range(2):
        with pytest.raises(ValueError, match="needs CuPy arrays"):
            gradkit.batch_norm(x, engine="cudnn")


@pytest.fixture
def known(torch, monkeypatch):
    """Arguments of a call of a known plan; a second one makes no view."""
    given = arguments(torch)
    gradkit.layer_norm_grad(*given)
    gradkit.layer_norm_grad(*given, out=outputs(torch))
    with monkeypatch.context() as patched:
        patched.setattr(Torch, "view", None)
        gradkit.layer_norm_grad(*given)
        gradkit.layer_norm_grad(*given, out=outputs(torch))
    return given


def test_broadcast_tensors_are_read(torch, known):
    row = torch.randn(1, SHAPE[1])
    expected = gradkit.layer_norm_grad(row.repeat(SHAPE[0], 1), *known[1:])
    for _ in range(2):
        found = gradkit.layer_norm_grad(row.expand(SHAPE), *known[1:])
        assert all(map(torch.equal, found, expected))


def test_each_step_that_a_tensor_counts_is_a_write_of_it(torch):
    lists, step = [[torch.ones(3)] for _ in range(4)], torch.tensor(0)
    for number in (1, 2, 3):
        gradkit.adamw_update(*lists, step, lr=0.1)
        assert step == number
        assert step._version >= number
        assert all(lists[k][0]._version >= number for k in (0, 2, 3))


def test_what_no_plan_knows_is_a_write_too(torch):
    buffers, grads, rests = (deque([torch.ones(3)]) for _ in range(3))
    norms = torch.zeros(1, dtype=torch.float64)
    gradkit.accumulate_grads(buffers, grads, compensation=rests)
    gradkit.clip_grad_block_norm(buffers, 1.0, out=norms)
    assert [each._version for each in (*buffers, *rests, norms)] == [2, 1, 1]


def test_results_may_be_arguments_and_nothing_that_merely_overlaps(torch, known):
    expected = gradkit.layer_norm_grad(*known)
    whole = torch.empty(SHAPE[0] + 1, SHAPE[1])
    dy = whole[1:].copy_(known[0])
    for _ in range(2):
        with pytest.raises(ValueError, match=r"out\[0\] shares memory with dy without being dy"):
            gradkit.layer_norm_grad(dy, *known[1:], out=(whole[:-1], *outputs(torch)[1:]))
        assert torch.equal(dy, known[0])
    same = torch.empty(SHAPE[1])
    with pytest.raises(ValueError, match=r"out\[1\] and out\[2\] share memory"):
        gradkit.layer_norm_grad(*known, out=(None, same, same))
    made = gradkit.layer_norm_grad(dy, *known[1:], out=(dy, None, None))
    assert made[0] is dy
    assert dy._version > 0
    assert all(map(torch.equal, made, expected))


OTHERS = {"NumPy's": (lambda out: out.numpy(), "one framework")}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("hazard", HAZARDS | OTHERS)
def test_what_cannot_be_written_or_read_is_refused_by_name(torch, known, hazard):
    """Of a subclass or fake, a tensor is of another framework than the others."""
    spoil, said = (HAZARDS | OTHERS)[hazard]
    said = f"({said}|has dtype|one framework)"
    out = torch.full(SHAPE, 3.0)
    for _ in range(2):
        with pytest.raises((TypeError, ValueError), match=rf"^out\[0\] .*{said}"):
            gradkit.layer_norm_grad(*known, out=(spoil(out), *outputs(torch)[1:]))
    assert (out.detach() == 3).all()
    if hazard == "requires grad":  # which may be read
        return
    out = outputs(torch)[0].fill_(3)
    for _ in range(2):
        spoiled = spoil(known[1].clone())
        with pytest.raises(
            (TypeError, ValueError), match=rf"x .*{said}|mean has dtype|dy has shape"
        ):
            gradkit.layer_norm_grad(known[0], spoiled, *known[2:], out=(out, None, None))
    assert (out == 3).all()


def test_parameters_are_read_and_new_results_require_no_grad(torch, known):
    dy, x, scale, *rest = known
    expected = gradkit.layer_norm_grad(*known)
    given = dy, x.clone().requires_grad_(), torch.nn.Parameter(scale.clone()), *rest
    for _ in range(2):
        found = gradkit.layer_norm_grad(*given)
        assert not any(tensor.requires_grad for tensor in found)
        assert all(map(torch.equal, found, expected))


def test_a_parameter_is_no_gradient_of_a_known_accumulation(torch):
    for _ in range(2):
        buffer, grad = torch.zeros(3), torch.ones(3)
        assert gradkit.accumulate_grad(buffer, grad) is buffer
        assert buffer.tolist() == [1, 1, 1]
        assert (buffer._version, grad._version) == (1, 0)
        for written, read in ((buffer.requires_grad_(), grad), (grad, buffer)):
            with pytest.raises(TypeError, match="requires grad"):
                gradkit.accumulate_grad(written, read)
        assert (buffer.tolist(), grad.tolist()) == ([1, 1, 1], [1, 1, 1])


def test_results_move_the_version_counters_of_what_was_there(torch, known):
    out = outputs(torch)
    before = [tensor._version for tensor in out]
    found = gradkit.layer_norm_grad(*known, out=(*out[:2], None))
    assert [tensor._version for tensor in out] == [before[0] + 1, before[1] + 1, before[2]]
    assert found[0] is out[0]
    assert found[2]._version == 0


@pytest.mark.filterwarnings("ignore:torch.from_numpy results are registered as constants")
def test_what_takes_part_in_a_call_makes_and_sees_results_as_before(torch, known):
    """A mode, a transform, and a tracer."""
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            Counting.seen += 1
            return function(*args, **(kwargs or {}))

    expected = gradkit.layer_norm_grad(*known)
    with Counting():
        found = gradkit.layer_norm_grad(*known)
    assert all(map(torch.equal, found, expected))
    traced = torch.jit.trace(
        lambda t: t * gradkit.layer_norm_grad(*known)[0], known[0], check_trace=False
    )
    assert torch.equal(traced(known[1]), known[1] * expected[0])
    found = torch.func.vmap(lambda t: t * gradkit.layer_norm_grad(*known)[0].sum())(known[0])
    assert torch.equal(found, known[0] * expected[0].sum())
    made = make_fx(lambda t: t * gradkit.layer_norm_grad(*known)[0])(known[0])
    assert torch.equal(made(known[1]), known[1] * expected[0])


def test_the_reference_computes_if_it_is_chosen(torch, known, monkeypatch):
    """Plans of both backends are apart."""
    from gradkit import _numpy

    asked = []
    monkeypatch.setattr(
        _numpy,
        "layer_norm_grad",
        lambda call, run=_numpy.layer_norm_grad: (asked.append(call), run(call)),
    )
    expected = gradkit.layer_norm_grad(*known)
    assert not asked
    with gradkit.use_cpu_backend("numpy"):
        for count in (1, 2):
            found = gradkit.layer_norm_grad(*known)
            assert len(asked) == count
    for tensor, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(tensor, wanted)
    gradkit.layer_norm_grad(*known)
    assert len(asked) == 2


# On which device a tensor lies, as it describes itself


class _DLTensor(ctypes.Structure):
    _fields_ = (
        *(("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device", ctypes.c_int32)),
        *(("ndim", ctypes.c_int32), ("dtype", ctypes.c_uint32), ("shape", ctypes.c_void_p)),
        *(("strides", ctypes.c_void_p), ("byte_offset", ctypes.c_uint64)),
    )


_Describe = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(_DLTensor))


class _ExchangeApi(ctypes.Structure):
    _fields_ = (
        *(("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("older", ctypes.c_void_p)),
        *((name, ctypes.c_void_p) for name in ("allocate", "from_object", "to_object")),
        ("describe", _Describe),
    )


_CAPSULE = b"dlpack_exchange_api"
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_capsule_of = ctypes.pythonapi.PyCapsule_New
_capsule_of.restype = ctypes.py_object
_capsule_of.argtypes = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p


@pytest.fixture
def placed(torch):
    """Compiled code, and the device type and number that each tensor is said to lie on."""
    code, kinds, places = adapter._describing(), (torch.Tensor, torch.nn.Parameter), {}
    own = torch.Tensor.__dlpack_c_exchange_api__
    real = _ExchangeApi.from_address(_pointer_of(own, _CAPSULE))

    def describe(tensor, described):
        failed = real.describe(tensor, described)
        found = described.contents
        found.device_type, found.device = places.get(id(tensor), (1, 0))
        found.data, found.byte_offset = found.data - 8, 8
        return failed

    views = partial(adapter.Torch().views, write=False)
    stand_in = _ExchangeApi(real.major, real.minor, describe=_Describe(describe))
    capsule = _capsule_of(ctypes.addressof(stand_in), _CAPSULE, None)
    assert code.use_tensors(*kinds, capsule, views)
    yield code, places
    assert code.use_tensors(*kinds, own, views)


def test_only_tensors_on_one_device_of_the_right_type_are_used(torch, placed):
    code, places = placed
    first, second = torch.ones(4), torch.ones(4)

    def used():
        assert (code.described_tensors((first, None, second), 1) is None) == bool(places)
        table = code.table([first, second], True)
        if table is None or table.device < 0:
            return None
        return table.addresses, table.device

    assert used() is None
    for wrong in ((1, 0), (1, 1), (2, 0), (10, 1)):
        places.update({id(first): (2, 1), id(second): wrong})
        assert used() is None
        places.update({id(first): wrong, id(second): (2, 1)})
        assert used() is None
    places.update({id(first): (2, 1), id(second): (2, 1)})
    addresses = first.data_ptr(), second.data_ptr()
    assert used() == (addresses, 1)
    places.update({id(first): (2, 0), id(second): (2, 0)})
    assert used() == (addresses, 0)


def test_results_that_are_absent_leave_others_what_they_are(torch):
    """Inputs may be one tensor twice, or a parameter; results may not."""
    code, same, out = adapter._describing(), torch.nn.Parameter(torch.ones(8)), torch.ones(8)

    def seen(*arrays, written):
        return code.described_tensors(arrays, written)

    assert seen(None, None, same, same, written=2) is not None
    assert seen(None, out, same, same, written=2) is not None
    assert seen(None, same, out, written=2) is None
    assert seen(None, out, out[4:], written=2) is None


def test_lists_of_other_layouts_are_told_apart(torch):
    """Joined lists, too: a number of elements may be that of a dtype."""

    def layout(*tensors):
        return adapter._describing().table([*tensors], False).layout

    row, one, two = torch.ones(3), torch.ones(1), torch.ones(2, dtype=torch.bfloat16)
    assert layout(row.as_strided((1, 3), (7, 1))) == layout(row)  # there is one row
    assert layout(torch.ones(6)[::2]) != layout(row)
    assert layout(row) + layout(one, row) != layout(row, two) + layout(row)


def test_another_version_of_the_interface_is_not_used(torch):
    code, kinds = adapter._describing(), (torch.Tensor, torch.nn.Parameter)
    other = _ExchangeApi(2, 0)
    assert not code.use_tensors(*kinds, _capsule_of(ctypes.addressof(other), _CAPSULE, None), list)
    assert code.table([torch.ones(2)], True) is not None


def test_without_the_interface_tensors_are_seen_as_before(torch, known, monkeypatch):
    expected = gradkit.layer_norm_grad(*known)
    monkeypatch.setattr(adapter, "_describing", lambda: None)
    assert all(map(torch.equal, gradkit.layer_norm_grad(*known), expected))
    grads = [torch.full((3,), 2.0) for _ in range(3)]
    assert gradkit.clip_grad_norm(grads, 3.0).item() == 6
    assert grads[2].tolist() == [1, 1, 1]


def test_more_dimensions_than_arrays_have_are_refused_by_name(torch):
    zero = torch.ones([1] * 65)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^grads\[1\] .*dimension"):
            gradkit.zero_grad([torch.ones(1), zero])
        with pytest.raises(ValueError, match=r"^buffer .*dimension"):
            gradkit.accumulate_grad(zero, zero)
    assert zero.sum() == 1
