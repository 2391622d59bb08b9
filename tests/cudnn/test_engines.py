"""The choice of engine, with our own kernels standing for themselves as the NumPy reference."""

import os
import types
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import gradkit
from gradkit import _numpy
from gradkit._cuda import CudaBackend
from gradkit._cuda.channels import ChannelNorms
from gradkit._cuda.cudnn import engines, library
from gradkit.errors import BackendUnavailableError, CudnnError
from tests.cudnn.cases import COMBINATIONS, Case, ForwardCase, InferenceCase, error_in_child
from tests.cudnn.fake import HostDevice

pytestmark = pytest.mark.cuda

F32 = COMBINATIONS[0]
DEVICE = HostDevice()


@pytest.fixture(autouse=True)
def native(monkeypatch):
    """Counts the calls of our own kernels."""
    calls = []

    def stand_in(name):
        def launcher(_, call):
            calls.append(name)
            getattr(_numpy, name)(call)

        return launcher

    for name in ("batch_norm", "batch_norm_grad", "batch_norm_inference"):
        own = "_inference" if name == "batch_norm_inference" else f"_{name}"
        monkeypatch.setattr(ChannelNorms, own, stand_in(name))
    return calls


@pytest.fixture
def missing(monkeypatch):
    monkeypatch.setattr(engines, "_warned", False)
    error = BackendUnavailableError("cuDNN is away. pip install it")
    monkeypatch.setattr(library, "_library", error)


def _both(engine=None, shape=(4, 3, 2), *, checked=True):
    backend = CudaBackend(DEVICE)
    for kind in (Case, ForwardCase):
        case = kind(shape, 1, F32)
        ran = case.run(backend, engine)
        if checked:
            case.check()
        yield ran


@pytest.mark.parametrize("engine", [None, "cudnn"])
def test_cudnn_where_it_is(install, native, engine):
    cudnn = install()
    assert list(_both(engine)) == ["cudnn", "cudnn"]
    assert not native
    assert {(mode, stream) for _, _, mode, stream in cudnn.bindings.calls} == {(1, 7)}


def test_known_statistics_by_cudnn_where_it_is(install, native):
    cudnn, backend = install(most=4), CudaBackend(DEVICE)
    for shape, engine, ran in [
        ((4, 3, 2), None, "cudnn"),
        ((4, 3, 2), "cudnn", "cudnn"),
        ((4, 3, 2), "native", "native"),
        ((5, 3, 2), None, "native"),
        ((5, 3, 2), None, "native"),
    ]:
        case = InferenceCase(shape, 1, F32)
        assert case.run(backend, engine) == ran
        case.check()
    assert cudnn.bindings.asked == 3  # a refused case is not asked for again
    assert native == ["batch_norm_inference"] * 3


def test_running_statistics_move_once_whoever_moves_them(install, native):
    """cuDNN; our own code if it fails, or would round them, of which other cases know nothing."""
    cudnn, backend = install(), CudaBackend(DEVICE)
    for dtype, ran in (("float64", "native"), ("float32", "cudnn"), ("float64", "native")):
        case = ForwardCase((4, 3, 2), 1, F32)
        assert case.run(backend, **case.running(dtype, 0.3)) == ran
        case.check_running()
        case.check()
    cudnn.bindings.fails = "CUDNN_STATUS_NOT_SUPPORTED"
    case = ForwardCase((4, 3, 9), 1, F32)
    assert case.run(backend, **case.running("float32", 0.3)) == "native"
    case.check_running()


def test_persistent_is_for_those_who_ask(install, native):
    cudnn = install()
    case = Case((2, 4, 5, 3), 3, F32)
    ran = case.run(CudaBackend(DEVICE), "cudnn-persistent")
    case.check()
    assert [mode for _, _, mode, _ in cudnn.bindings.calls] == [2]
    assert ran == "cudnn"
    assert not native


@pytest.mark.parametrize("kind", [Case, ForwardCase, InferenceCase])
@pytest.mark.parametrize(("shape", "layout"), [((2, 3, 4, 5), "rolled"), ((6, 3), "C")])
def test_channels_last_are_ours_unless_cudnn_is_asked_for(install, native, kind, shape, layout):
    cudnn, backend = install(), CudaBackend(DEVICE)
    for engine, ran in ((None, "native"), ("cudnn", "cudnn")):
        case = kind(shape, 1, F32, layouts=(layout,) * 3)
        assert case.run(backend, engine) == ran
        case.check()
    assert (len(native), cudnn.bindings.asked) == (1, 1)


@pytest.mark.parametrize("wanted", [("dx",), ("dscale",), ("dx", "dbias")], ids=str)
def test_gradients_of_parameters_alone_are_ours_unless_cudnn_is_asked_for(install, native, wanted):
    """With cuDNN all of them are computed: results that are not wanted go to scratch."""
    install()
    backend = CudaBackend(DEVICE)
    for engine in (None, "cudnn"):
        every, case = (Case((4, 3, 2), 1, F32) for _ in range(2))
        for name in {*case.kind.result_names}.difference(wanted):
            setattr(case, name, None)
        ran = case.run(backend, engine, wanted=wanted)
        assert ran == ("cudnn" if engine or "dx" in wanted else "native")
        every.run(backend, ran)
        for name in wanted:
            np.testing.assert_array_equal(getattr(case, name), getattr(every, name))
    assert native.count("batch_norm_grad") == (0 if "dx" in wanted else 2)


def test_native_does_not_even_look_for_cudnn(monkeypatch, native):
    monkeypatch.setattr(library, "_library", None)
    monkeypatch.setattr(library, "_find", lambda: pytest.fail("looked for cuDNN"))
    assert list(_both("native")) == ["native", "native"]
    assert native == ["batch_norm_grad", "batch_norm"]


def test_limits_are_the_librarys_and_are_asked_for_once(install, native):
    cudnn = install(most=8)
    for batch, ran in ((7, "cudnn"), (8, "cudnn"), (9, "native")):
        for _ in range(3):
            assert list(_both(None, (batch, 3, 2))) == [ran, ran]
    assert cudnn.bindings.asked == 2 * (3 + 3 + 1)
    with pytest.raises(CudnnError, match="NOT_SUPPORTED"):
        next(_both("cudnn", (9, 3, 2)))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy, of means of nothing
def test_what_has_no_elements_is_ours(install):
    cudnn = install()
    assert list(_both(None, (0, 3, 2), checked=False)) == ["native", "native"]
    assert not cudnn.bindings.asked


@pytest.mark.guarantee("cuDNN absent")
def test_a_missing_cudnn_is_warned_of_once(missing, native):
    with pytest.warns(RuntimeWarning, match="pip install it.*own kernels"):
        assert next(_both()) == "native"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(_both()) == ["native", "native"]
    assert len(native) == 3
    with pytest.raises(BackendUnavailableError, match="pip install it"):
        next(_both("cudnn"))


@pytest.mark.filterwarnings("ignore:cuDNN failed")
@pytest.mark.parametrize(
    "text", ["EXECUTION_FAILED", "NOT_SUPPORTED", "INTERNAL_ERROR", "BAD_PARAM", "ARCH_MISMATCH"]
)
def test_a_failed_case_is_not_tried_again(install, text):
    cudnn = install(fails=f"CUDNN_STATUS_{text}")
    for shape in ((4, 3, 2), (4, 3, 2), (5, 3, 2)):
        assert list(_both(None, shape)) == ["native", "native"]
    assert cudnn.bindings.asked == 2 * 2
    with pytest.raises(CudnnError, match=text):
        next(_both("cudnn"))  # who asks for cuDNN by name gets it
    assert cudnn.bindings.asked == 2 * 2 + 1


@pytest.mark.filterwarnings("ignore:cuDNN failed")
def test_a_thread_without_a_handle_tries_each_case_once(install, monkeypatch):
    """Creating a handle takes longest, and fails if CUDA's and cuDNN's versions do not match."""
    cudnn, tried = install(), []

    def create():
        tried.append(1)
        raise CudnnError("cudnnCreate", 1001, "CUDNN_STATUS_NOT_INITIALIZED")

    monkeypatch.setattr(cudnn.bindings, "create", create)
    for _ in range(3):
        assert list(_both()) == ["native", "native"]
    assert len(tried) == 2


@pytest.mark.filterwarnings("ignore:cuDNN failed")
@pytest.mark.parametrize("text", ["ALLOC_FAILED", "INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"])
def test_a_case_that_memory_ran_out_for_is_tried_again(install, text):
    cudnn = install(fails=f"CUDNN_STATUS_{text}")
    assert list(_both()) == ["native", "native"]
    cudnn.bindings.fails = None
    assert list(_both()) == ["cudnn", "cudnn"]


@pytest.mark.guarantee("cuDNN fails")
def test_a_failing_cudnn_is_warned_of_once_and_never_a_wrong_answer(install, native):
    install(fails="CUDNN_STATUS_EXECUTION_FAILED")
    with pytest.warns(RuntimeWarning, match="EXECUTION_FAILED.*libcudnn") as caught:
        assert list(_both()) == ["native", "native"]
    assert len(caught) == 1
    with pytest.raises(CudnnError, match="EXECUTION_FAILED"):
        next(_both("cudnn"))


def test_no_cudnn_off_a_cuda_device(install):
    cudnn = install()
    backend = CudaBackend(types.SimpleNamespace(xp=np, cuda_stream=lambda: None))
    case = Case((4, 3), 1, F32)
    assert case.run(backend) == "native"
    case.check()
    assert not cudnn.bindings.asked
    with pytest.raises(BackendUnavailableError, match="CUDA device"):
        case.run(backend, "cudnn")


def test_eight_threads_each_know_their_engine(install):
    cudnn = install(most=4)

    def work(number):
        DEVICE.current.stream = 100 + number % 2
        ran = "cudnn" if number % 2 else "native"
        for _ in range(20):
            assert list(_both(None, (4 if number % 2 else 5, 3, 2))) == [ran, ran]

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    assert {stream for *_, stream in cudnn.bindings.calls} == {100, 101}


@pytest.mark.guarantee("CUDA after a fork")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_is_told_also_where_it_could_choose(install):
    install()
    assert next(_both()) == "cudnn"
    assert "does not survive the fork" in error_in_child(lambda: next(_both()))


def test_numpy_arrays_have_one_engine():
    x = np.arange(12.0).reshape(4, 3)
    for engine in (None, "native"):
        y, mean, inv_std = gradkit.batch_norm(x, engine=engine)
        dx, _, _ = gradkit.batch_norm_grad(y, x, None, mean, inv_std, engine=engine)
        assert np.abs(dx.sum(axis=0)).max() < 1e-14
        assert gradkit.last_engine() == "native"
    for engine in ("cudnn", "cudnn-persistent"):
        with pytest.raises(ValueError, match="CuPy arrays"):
            gradkit.batch_norm(x, engine=engine)
        with pytest.raises(ValueError, match="CuPy arrays"):
            gradkit.batch_norm_grad(y, x, None, mean, inv_std, engine=engine)
    with pytest.raises(ValueError, match=r"engine must be one of .*'native'.*'fast'"):
        gradkit.batch_norm(x, engine="fast")


def test_a_thread_that_ran_nothing_knows_no_engine():
    with ThreadPoolExecutor() as threads:
        assert threads.submit(gradkit.last_engine).result() is None


@pytest.mark.parametrize("axis", [1, -1])
def test_new_gradients_lie_in_memory_as_x_does(axis):
    x = np.moveaxis(np.random.default_rng(0).standard_normal((2, 4, 5, 3)), -1, 1)
    y, mean, inv_std = gradkit.batch_norm(x, channel_axis=axis)
    dx, _, _ = gradkit.batch_norm_grad(np.ones(x.shape), x, None, mean, inv_std, channel_axis=axis)
    assert y.strides == dx.strides == x.strides
