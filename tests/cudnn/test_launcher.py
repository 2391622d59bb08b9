"""The launcher over a cuDNN that is NumPy: layouts, conversions, scratch, and what is passed."""

import numpy as np
import pytest

from gradkit._cuda.cudnn import batch_normalization as launcher
from gradkit._cuda.cudnn.face import name_of
from gradkit._cuda.cudnn.library import Cudnn
from gradkit.errors import CudnnError
from tests.cudnn import header
from tests.cudnn.cases import (
    COMBINATIONS,
    MIXTURES,
    SHAPES,
    Case,
    ForwardCase,
    InferenceCase,
    has_variance,
)
from tests.cudnn.fake import FakeCudnn, HostDevice

pytestmark = pytest.mark.cuda

TYPE_IDS = ["-".join(map(str, row)) for row in COMBINATIONS]
F32 = COMBINATIONS[0]


@pytest.fixture
def cudnn():
    return Cudnn(FakeCudnn())


def compute(cudnn, device, case):
    """Have the launcher compute a case of any kind."""
    getattr(launcher, case.operation)(cudnn, device, case.call())


@pytest.mark.sampled(13)
@pytest.mark.parametrize("types", COMBINATIONS, ids=TYPE_IDS)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("kind", [Case, ForwardCase, InferenceCase])
def test_every_shape_axis_and_mixture(cudnn, types, affine, kind):
    for shape, axis in ((each, k) for each in SHAPES for k in range(len(each))):
        if kind is ForwardCase and not has_variance(shape, axis):
            continue
        for layouts in MIXTURES:
            layouts = layouts if kind is Case else layouts[1:]
            case = kind(shape, axis, types, layouts=layouts, affine=affine)
            compute(cudnn, HostDevice(), case)
            case.check()
    assert not cudnn.bindings.descriptors


@pytest.mark.parametrize("layout", ["C", "rolled", "Fortran", "stepped"])
@pytest.mark.parametrize("kind", [Case, ForwardCase, InferenceCase])
def test_dx_may_be_dy_and_y_may_be_x(cudnn, kind, layout):
    for types in COMBINATIONS:
        case = kind((2, 3, 4, 5), 1, types, layouts=(layout,) * 3)
        if kind is Case:
            case.dx = case.dy
        else:
            case.y = case.x
        compute(cudnn, HostDevice(), case)
        case.check()


def test_broadcast_dy(cudnn):
    case = Case((4, 3, 2), 1, F32)
    case.dy = case._dy = np.broadcast_to(np.float32(0.25), (4, 3, 2))
    launcher.batch_norm_grad(cudnn, HostDevice(), case.call())
    case.check()


@pytest.mark.parametrize("momentum", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("types", COMBINATIONS, ids=TYPE_IDS)
def test_running_statistics(cudnn, types, momentum):
    case = ForwardCase((4, 3, 5), 1, types)
    for dtype in set(types[1:]):
        call = case.call(**case.running(dtype, momentum))
        launcher.batch_norm(cudnn, HostDevice(), call)
        case.check()
        case.check_running()


@pytest.mark.parametrize(("momentum", "kept"), [(1.0, False), (0.0, True)])
def test_running_statistics_without_weight_are_left_out(cudnn, momentum, kept):
    case = ForwardCase((4, 3, 5), 1, F32)
    running = case.running("float32", momentum)
    (case.x if kept else running["running_mean"])[...] = np.nan
    launcher.batch_norm(cudnn, HostDevice(), case.call(**running))
    assert case.unmoved() == kept
    if not kept:
        case.check_running()


@pytest.mark.guarantee("Running statistics")
def test_a_failed_call_moves_no_running_statistics():
    cudnn = Cudnn(FakeCudnn(fails="CUDNN_STATUS_EXECUTION_FAILED"))
    case = ForwardCase((4, 3, 5), 1, F32)
    with pytest.raises(CudnnError, match="EXECUTION_FAILED"):
        launcher.batch_norm(cudnn, HostDevice(), case.call(**case.running("float32", 0.3)))
    assert case.unmoved()


def test_running_statistics_that_cudnn_would_round(cudnn):
    case = ForwardCase((4, 3, 5), 1, F32)
    call = case.call(**case.running("float64", 0.3))
    with pytest.raises(CudnnError, match="in float64 would be rounded") as caught:
        launcher.batch_norm(cudnn, HostDevice(), call)
    assert caught.value.unsupported
    assert case.unmoved()
    assert not cudnn.bindings.asked


class Recorder(FakeCudnn):
    """Keeps the arguments of batch norm by their names in the header, and the descriptors."""

    def batchNormalizationBackward(self, *args):
        self._keep("batchNormalizationBackward", args)

    def batchNormalizationForwardTraining(self, *args):
        self._keep("batchNormalizationForwardTraining", args)

    def batchNormalizationForwardInference(self, *args):
        self._keep("batchNormalizationForwardInference", args)

    def _keep(self, name, args):
        names = [label for _, label in header.parameters(name_of(name))]
        self.given = dict(zip(names, args, strict=True))
        self.described = {
            key: self.descriptors[number] for key, number in self.given.items() if "Desc" in key
        }


@pytest.mark.parametrize(
    ("shape", "axis", "dims", "strides"),
    [
        ((6, 3), 1, (6, 3, 1, 1), (3, 1, 1, 1)),
        ((2, 3, 5), 1, (2, 3, 5, 1), (15, 5, 1, 1)),
        ((2, 3, 4, 5), 1, (2, 3, 20, 1), (60, 20, 1, 1)),
        ((2, 4, 5, 3), 3, (2, 3, 20, 1), (60, 1, 3, 3)),
        ((2, 4, 5, 6, 3), 4, (2, 3, 120, 1), (360, 1, 3, 3)),
        ((3, 2, 4, 5), 0, (1, 3, 40, 1), (120, 40, 1, 1)),
        ((2, 4, 3, 5), 2, (8, 3, 5, 1), (15, 5, 1, 1)),
    ],
)
def test_dense_arrays_are_passed_where_they_lie(shape, axis, dims, strides):
    recorder, device = Recorder(), HostDevice()
    case = Case(shape, axis, F32)
    launcher.batch_norm_grad(Cudnn(recorder), device, case.call())
    given = recorder.given
    check_addresses(
        given,
        case,
        dy="dy",
        dx="dx",
        dBnScaleResult="dscale",
        dBnBiasResult="dbias",
        savedMean="mean",
        savedInvVariance="inv_std",
    )
    assert recorder.described["xDesc"] == (0, dims, strides)
    assert given["xDesc"] == given["dyDesc"] == given["dxDesc"]
    assert recorder.described["dBnScaleBiasDesc"][:2] == (0, (1, dims[1], 1, 1))
    assert given["mode"] == 1
    assert recorder.handles[given["handle"]] == device.cuda_stream()


def test_channels_last_strides_are_no_copy():
    recorder = Recorder()
    case = Case((2, 3, 4, 5), 1, F32, layouts=("rolled",) * 3)
    launcher.batch_norm_grad(Cudnn(recorder), HostDevice(), case.call())
    assert recorder.described["xDesc"] == (0, (2, 3, 20, 1), (60, 1, 3, 3))
    assert [recorder.given[k] for k in ("x", "dy", "dx")] == [
        a.ctypes.data for a in (case.x, case.dy, case.dx)
    ]


def check_addresses(given, case, **names):
    """Compare the pointers that cuDNN got with a case's arrays, by their names."""
    for key, name in {"x": "x", "bnScale": "scale", **names}.items():
        assert given[key] == getattr(case, name).ctypes.data, key


@pytest.mark.parametrize(
    ("kind", "statistics"),
    [
        (ForwardCase, {"resultSaveMean": "mean", "resultSaveInvVariance": "inv_std"}),
        (InferenceCase, {"estimatedMean": "mean", "estimatedVariance": "var"}),
    ],
)
def test_forward_arguments(kind, statistics):
    recorder = Recorder()
    case = kind((2, 3, 4), 1, F32)
    compute(Cudnn(recorder), HostDevice(), case)
    given = recorder.given
    check_addresses(given, case, y="y", bnBias="bias", **statistics)
    assert not given.get("resultRunningMean")
    assert not given.get("resultRunningVariance")
    assert given["epsilon"] == case.eps
    assert given["xDesc"] == given["yDesc"]


def test_persistent_only_channels_last():
    recorder = Recorder()
    last = Case((2, 4, 5, 3), 3, F32)
    launcher.batch_norm_grad(Cudnn(recorder), HostDevice(), last.call(), persistent=True)
    assert recorder.given["mode"] == 2
    for shape, axis in (((2, 3, 4, 5), 1), ((6, 3), 1)):
        first = Case(shape, axis, F32)
        with pytest.raises(ValueError, match="channels-last"):
            launcher.batch_norm_grad(Cudnn(recorder), HostDevice(), first.call(), persistent=True)


@pytest.mark.parametrize("text", ["CUDNN_STATUS_NOT_SUPPORTED", "CUDNN_STATUS_EXECUTION_FAILED"])
def test_a_failed_call_writes_nothing_into_its_inputs(text):
    cudnn = Cudnn(FakeCudnn(fails=text))
    case = Case((2, 3, 4), 1, F32)
    case.dx = case.dy
    with pytest.raises(CudnnError, match=text):
        launcher.batch_norm_grad(cudnn, HostDevice(), case.call())
    np.testing.assert_array_equal(case.dy, case._dy)
    assert not cudnn.bindings.descriptors


def test_sizes_that_no_descriptor_holds(cudnn):
    huge = np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), (2**31, 2), (0, 0))
    case = Case((4, 2), 1, F32)
    case.x = case.dy = case.dx = huge
    with pytest.raises(CudnnError, match="C int") as caught:
        launcher.batch_norm_grad(cudnn, HostDevice(), case.call())
    assert caught.value.unsupported
    case.x = case.dy = case.dx = np.empty((0, 2), np.float32)
    with pytest.raises(CudnnError, match="no elements") as caught:
        launcher.batch_norm_grad(cudnn, HostDevice(), case.call())
    assert caught.value.unsupported
    assert not cudnn.bindings.asked


def test_errors_survive_pickling():
    import pickle

    error = CudnnError("cudnnCreate", 1001, "CUDNN_STATUS_NOT_INITIALIZED")
    again = pickle.loads(pickle.dumps(error))
    assert (again.function, again.status, again.text) == ("cudnnCreate", 1001, error.text)
    assert str(again) == "cudnnCreate: CUDNN_STATUS_NOT_INITIALIZED (1001)"
    assert not again.unsupported
