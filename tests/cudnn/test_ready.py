"""Calls like one whose arrays cuDNN took as they are: nothing is described again."""

import numpy as np
import pytest

from gradkit._cuda import CudaBackend
from gradkit.errors import CudnnError
from tests.cudnn.cases import COMBINATIONS, Case, ForwardCase, InferenceCase
from tests.cudnn.fake import HostDevice
from tests.layouts import LAYOUTS

pytestmark = pytest.mark.cuda

KINDS = Case, ForwardCase, InferenceCase
SHAPE, F32, HALF = (4, 3, 2), COMBINATIONS[0], COMBINATIONS[2]
DEVICE = HostDevice()


def compute(case, plan=None, engine=None, **more):
    """Have a backend make the case's call, of a plan; what computed, and the plan."""
    call = case.call(engine, **more)
    if plan is not None:
        call.plan = plan
    return getattr(CudaBackend(DEVICE), case.operation)(call), call.plan


def native(monkeypatch, case):
    """Count the calls of our own kernels, which compute nothing here."""
    calls, own = [], "_inference" if case is InferenceCase else f"_{case.operation}"
    monkeypatch.setattr(CudaBackend, own, lambda _, call: calls.append(call))
    return calls


@pytest.mark.parametrize("engine", [None, "cudnn"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_next_call_is_described_by_the_first(install, monkeypatch, kind, engine):
    cudnn = install()
    ran, plan = compute(kind(SHAPE, 1, F32), engine=engine)
    assert ran == "cudnn"
    assert len(cudnn.bindings.descriptors) == 2
    monkeypatch.setattr(cudnn.bindings, "createTensorDescriptor", None)
    for seed in (5, 6):
        case = kind(SHAPE, 1, F32, seed=seed)
        assert compute(case, plan, engine)[0] == "cudnn"
        case.check()
    assert cudnn.bindings.asked == 3
    del plan
    assert not cudnn.bindings.descriptors


def test_the_algorithm_and_the_stream_are_those_of_the_call(install, monkeypatch):
    cudnn = install()
    _, plan = compute(Case((2, 4, 5, 3), 3, F32), engine="cudnn-persistent")
    monkeypatch.setattr(DEVICE.current, "stream", 9, raising=False)
    case = Case((2, 4, 5, 3), 3, F32)
    compute(case, plan, "cudnn-persistent")
    case.check()
    assert [(mode, stream) for _, _, mode, stream in cudnn.bindings.calls] == [(2, 7), (2, 9)]


def misaligned(array):
    memory = np.empty(array.nbytes + 20, np.uint8)
    start = -memory.ctypes.data % 16 + 4
    made = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    made[...] = array
    return made


@pytest.mark.parametrize("name", ["x", "dy", "dx"])
def test_an_address_that_no_kernel_takes_is_looked_at(install, name):
    cudnn = install()
    _, plan = compute(Case(SHAPE, 1, F32))
    case = Case(SHAPE, 1, F32, seed=5)
    setattr(case, name, misaligned(getattr(case, name)))
    assert compute(case, plan)[0] == "cudnn"
    case.check()
    assert cudnn.bindings.asked == 2


def test_a_result_in_place_of_an_argument_is_looked_at(install):
    install()
    _, plan = compute(Case(SHAPE, 1, F32))
    case = Case(SHAPE, 1, F32, seed=5)
    case.dx = case.dy
    assert compute(case, plan)[0] == "cudnn"
    case.check()


@pytest.mark.parametrize(
    ("kind", "types", "affine"),
    [
        (Case, HALF, True),
        (Case, F32, False),
        (ForwardCase, F32, False),
        (InferenceCase, F32, False),
    ],
)
def test_what_was_copied_is_copied_again(install, kind, types, affine):
    cudnn, plan = install(), None
    for seed in (5, 6):
        case = kind(SHAPE, 1, types, affine=affine, seed=seed)
        _, plan = compute(case, plan)
        case.check()
    assert cudnn.bindings.asked == 2


@pytest.mark.parametrize("name", ["scale", "mean", "inv_std", "dscale", "dbias"])
def test_vectors_with_gaps_are_copied_in_each_call(install, name):
    install()
    plan = None
    for seed in (5, 6):
        case = Case(SHAPE, 1, F32, seed=seed)
        setattr(case, name, LAYOUTS["stepped"](getattr(case, name)))
        ran, plan = compute(case, plan)
        assert ran == "cudnn"
        case.check()


@pytest.mark.parametrize(("layout", "described"), [("C", 1), ("stepped", 4)])
def test_running_statistics_move_in_each_call(install, monkeypatch, layout, described):
    """They move in place, if cuDNN takes them so and both terms have a weight."""
    cudnn, plan, makes = install(), None, []
    create = cudnn.bindings.createTensorDescriptor
    monkeypatch.setattr(
        cudnn.bindings, "createTensorDescriptor", lambda: makes.append(1) or create()
    )
    for momentum in (0.3, 0.6, 0.1, 0.3):
        case = ForwardCase(SHAPE, 1, F32)
        ran, plan = compute(case, plan, **case.running("float32", momentum, layout))
        assert ran == "cudnn"
        case.check()
        case.check_running()
    assert len(makes) == 2 * described


@pytest.mark.parametrize("first", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("momentum", [0.0, 0.3, 1.0])
def test_a_term_without_weight_is_left_out_of_each_call(install, first, momentum):
    install()
    case = ForwardCase(SHAPE, 1, F32)
    _, plan = compute(case, **case.running("float32", first, "C"))
    case = ForwardCase(SHAPE, 1, F32)
    running = case.running("float32", momentum, "C")
    if momentum == 0:
        case.x[...] = np.nan
    elif momentum == 1:
        running["running_mean"][...] = running["running_var"][...] = np.nan
    assert compute(case, plan, **running)[0] == "cudnn"
    if momentum == 0:
        assert case.unmoved()
    else:
        case.check_running()


@pytest.mark.guarantee("Running statistics")
@pytest.mark.filterwarnings("ignore:cuDNN failed")
def test_running_statistics_that_may_have_moved_do_not_move_twice(install, monkeypatch):
    cudnn, calls = install(), native(monkeypatch, ForwardCase)
    case = ForwardCase(SHAPE, 1, F32)
    running = case.running("float32", 0.3, "C")
    _, plan = compute(case, **running)
    cudnn.bindings.fails = "CUDNN_STATUS_EXECUTION_FAILED"
    with pytest.raises(CudnnError, match="EXECUTION_FAILED"):
        compute(ForwardCase(SHAPE, 1, F32), plan, **running)
    assert not calls
    assert compute(ForwardCase(SHAPE, 1, F32), plan, **running)[0] == "native"
    cudnn.bindings.fails = None
    _, plan = compute(ForwardCase((5, 3, 2), 1, F32), **running)
    cudnn.bindings.fails = "CUDNN_STATUS_NOT_SUPPORTED"  # which comes before anything is launched
    assert compute(ForwardCase((5, 3, 2), 1, F32), plan, **running)[0] == "native"
    assert len(calls) == 2


@pytest.mark.filterwarnings("ignore:cuDNN failed")
@pytest.mark.parametrize("kind", KINDS)
def test_a_call_that_fails_later_is_ours_and_not_tried_again(install, monkeypatch, kind):
    cudnn, calls = install(), native(monkeypatch, kind)
    _, plan = compute(kind(SHAPE, 1, F32))
    cudnn.bindings.fails = "CUDNN_STATUS_EXECUTION_FAILED"
    asked = []
    for _ in range(3):
        assert compute(kind(SHAPE, 1, F32), plan)[0] == "native"
        asked.append(cudnn.bindings.asked)
    assert len(calls) == 3
    assert asked == [3, 3, 3]  # as it was ready, and once more to say why not
    with pytest.raises(CudnnError, match="EXECUTION_FAILED"):
        compute(kind(SHAPE, 1, F32), plan, "cudnn")


@pytest.mark.filterwarnings("ignore:cuDNN failed")
def test_a_call_that_memory_ran_out_for_is_ready_again(install, monkeypatch):
    cudnn, calls = install(), native(monkeypatch, Case)
    _, plan = compute(Case(SHAPE, 1, F32))
    cudnn.bindings.fails = "CUDNN_STATUS_ALLOC_FAILED"
    assert compute(Case(SHAPE, 1, F32), plan)[0] == "native"
    cudnn.bindings.fails = None
    assert compute(Case(SHAPE, 1, F32), plan)[0] == "cudnn"
    assert len(cudnn.bindings.descriptors) == 2
    monkeypatch.setattr(cudnn.bindings, "createTensorDescriptor", None)
    assert compute(Case(SHAPE, 1, F32), plan)[0] == "cudnn"
    assert len(calls) == 1


def test_a_cudnn_that_is_not_the_process_s_any_more_is_not_called(install):
    first = install()
    _, plan = compute(Case(SHAPE, 1, F32))
    second = install()
    assert compute(Case(SHAPE, 1, F32), plan)[0] == "cudnn"
    assert (first.bindings.asked, second.bindings.asked) == (1, 1)
