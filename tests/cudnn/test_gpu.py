"""cuDNN at work.

The same cases, bounds and reference as without one, and what only a GPU can show: PyTorch's
cuDNN, the batch limits, streams, threads, graphs. ``make test-gpu``.
"""

import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from gradkit import last_engine
from gradkit._dtypes import dtype_named
from gradkit.errors import CudnnError
from tests.backends import Backend, has_gpu, span
from tests.cudnn.cases import (
    COMBINATIONS,
    MIXTURES,
    SHAPES,
    Case,
    ForwardCase,
    InferenceCase,
    error_in_child,
)

if not has_gpu():
    pytest.skip("no CUDA device", allow_module_level=True)
pytestmark = [pytest.mark.gpu, pytest.mark.cudnn]
F32, F16 = COMBINATIONS[0], COMBINATIONS[2]
LARGER = [(8, 64, 14, 14), (32, 16, 7, 7), (4, 130, 33), (257, 96)]
REAL = [row for row in MIXTURES if "misaligned" not in row]
ARRAYS = ("dy", "x", "scale", "bias", "mean", "var", "inv_std", "dx", "dscale", "dbias", "y")


@pytest.fixture(scope="module")
def cupy():
    import cupy

    return cupy


@pytest.fixture(scope="module")
def backend(cupy):
    """The CUDA backend of the first device, with a cuDNN."""
    from gradkit._cuda import backend_of
    from gradkit._cuda.cudnn import library

    try:
        library.cudnn()
    except library.BackendUnavailableError as error:
        pytest.skip(str(error))
    return backend_of(cupy.empty(1))


def _up(cupy, array):
    """A host array on the device with its strides and the gaps between its elements."""
    low, high = span(array)
    room = cupy.asarray(np.frombuffer(Backend().memory(array), np.uint8))
    start = room.data + (array.ctypes.data - low)
    assert room.nbytes == high - low
    return cupy.ndarray(array.shape, array.dtype, start, array.strides)


def _run(cupy, backend, case, engine=None):
    """A case's call with every array on the device; the case then holds the results."""
    host = {name: getattr(case, name) for name in ARRAYS if hasattr(case, name)}
    there = {id(a): _up(cupy, a) for a in host.values() if a is not None}
    case.call(engine, lambda array: there.get(id(array))).compute(backend)
    for name, array in host.items():
        if array is not None:
            setattr(case, name, cupy.asnumpy(there[id(array)]))
    return case


def _taken(cupy, backend, case, engine):
    try:
        _run(cupy, backend, case, engine)
    except CudnnError as error:
        if not error.unsupported:
            raise
        return False
    return True


def _has(cupy, dtype):
    return dtype != dtype_named("bfloat16") or int(cupy.__version__.split(".")[0]) >= 14


@pytest.mark.parametrize("engine", ["cudnn", "native"])
@pytest.mark.parametrize("types", COMBINATIONS, ids=lambda row: "-".join(map(str, row)))
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("kind", [Case, ForwardCase, InferenceCase])
def test_every_combination_shape_axis_and_layout(cupy, backend, kind, types, affine, engine):
    if not all(_has(cupy, dtype) for dtype in types):
        pytest.skip(f"CuPy {cupy.__version__} has no bfloat16")
    for shape in SHAPES + LARGER:
        for axis in range(len(shape)):
            for layouts in REAL if shape in SHAPES else REAL[:1]:
                layouts = layouts if kind is Case else layouts[1:]
                case = kind(shape, axis, types, layouts=layouts, affine=affine)
                if _taken(cupy, backend, case, engine):
                    assert last_engine() == engine  # before NumPy computes the reference
                    case.check()
                else:
                    assert dtype_named("bfloat16") in types, "cuDNN takes all others"


@pytest.mark.parametrize("types", [F32, F16])
def test_persistent_channels_last(cupy, backend, types):
    for shape in ((8, 14, 14, 64), (4, 5, 6, 7, 3)):
        case = _run(cupy, backend, Case(shape, len(shape) - 1, types), "cudnn-persistent")
        assert last_engine() == "cudnn"
        case.check()


@pytest.mark.parametrize("layout", ["C", "rolled"])
def test_dx_may_be_dy(cupy, backend, layout):
    case = Case((8, 6, 5, 4), 1, F32, layouts=(layout,) * 3)
    case.dx = case.dy
    _run(cupy, backend, case, "cudnn").check()


@pytest.mark.parametrize("batch", [65535, 65536, 131070, 131071, 880801, 880802, 1_200_000])
@pytest.mark.parametrize("tail", [(), (2,), (2, 2)])
@pytest.mark.parametrize("last", [False, True])
def test_batch_limits_are_probed(cupy, backend, batch, tail, last, record_property):
    """Right on either side of every limit that was ever reported, also if cuDNN refuses."""
    shape = (batch, *tail, 2) if last else (batch, 2, *tail)
    axis = len(shape) - 1 if last else 1
    for kind in (Case, ForwardCase):
        case = kind(shape, axis, F32)
        taken = _taken(cupy, backend, case, "cudnn")
        record_property(f"{kind.__name__} {shape}", taken)
        if not taken:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # a refusal is none
                _run(cupy, backend, case)
            assert last_engine() == "native"
        case.check()


@pytest.mark.parametrize("kind", [Case, ForwardCase, InferenceCase])
def test_channels_last_are_ours_by_default(cupy, backend, kind):
    for layouts, engine in ((("C",) * 3, "cudnn"), (("rolled",) * 3, "native")):
        layouts = layouts if kind is Case else layouts[1:]
        case = _run(cupy, backend, kind((8, 6, 5, 4), 1, F32, layouts=layouts))
        assert last_engine() == engine
        case.check()


def test_eight_threads_on_two_streams(cupy, backend):
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]

    def work(number):
        with streams[number % 2]:
            for step in range(25):
                case = Case((16, 8, 5, 5), 1, F32, seed=100 * number + step)
                _run(cupy, backend, case, "cudnn")
                case.check()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))


def test_work_goes_to_the_current_stream(cupy, backend):
    """A stream that is held up by other work holds up cuDNN's too."""
    stream = cupy.cuda.Stream(non_blocking=True)
    case = Case((64, 32, 16, 16), 1, F32)
    with stream:
        call = case.call("cudnn", lambda array: _up(cupy, array))
        call.compute(backend)  # makes the handle
        stream.synchronize()
        heavy = cupy.random.random((4096, 4096), dtype=np.float32)
        for _ in range(20):
            heavy = heavy @ heavy * np.float32(1e-4)
        call.compute(backend)
        assert not stream.done
        stream.synchronize()


def test_graph_capture(cupy, backend):
    """Captured once, replayed over new values in the same memory."""
    first, second = (Case((16, 8, 6, 6), 1, F32, seed=seed) for seed in (0, 1))
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        call = first.call("cudnn", lambda array: _up(cupy, array))
        call.compute(backend)  # the handle is made outside of the capture
        stream.synchronize()
        stream.begin_capture()
        call.compute(backend)
        graph = stream.end_capture()
        for argument in call.arguments:
            getattr(call, argument.name).set(getattr(second, argument.name))
        graph.launch()
        stream.synchronize()
        for name in call.result_names:
            setattr(second, name, cupy.asnumpy(getattr(call, name)))
    second.check()


def test_the_same_bits_again(cupy, backend):
    def bits():
        case = Case((32, 16, 14, 14), 1, F32)
        _run(cupy, backend, case, "cudnn")
        return [a.tobytes() for a in (case.dx, case.dscale, case.dbias)]

    assert bits() == bits()


def test_a_forked_child_gets_an_error_not_a_hang(cupy, backend):
    case = Case((4, 3, 2), 1, F32)
    _run(cupy, backend, case, "cudnn")
    handles = _handles()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert "does not survive the fork" in error_in_child(lambda: handles.get(0, 0))


def _handles():
    from gradkit._cuda.cudnn import library

    return library.cudnn().handles


@pytest.mark.interop
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_as_pytorchs_cudnn(cupy, backend, dtype, last):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available() or not torch.backends.cudnn.is_available():
        pytest.skip("no PyTorch with cuDNN")
    types = F32 if dtype == "float32" else (np.dtype("f2"), np.dtype("f4"), np.dtype("f4"))
    layouts = ("rolled",) * 3 if last else ("C",) * 3
    case, ours = (Case((8, 16, 9, 9), 1, types, layouts=layouts) for _ in range(2))
    form = torch.channels_last if last else torch.contiguous_format
    x, dy = (torch.from_numpy(a.copy()).cuda().to(memory_format=form) for a in (case.x, case.dy))
    scale, bias = (torch.from_numpy(a).cuda() for a in (case.scale, case.bias))
    _, mean, inv_std, reserve = torch.ops.aten.cudnn_batch_norm(
        x, scale, bias, None, None, True, 0.1, 1e-3
    )
    theirs = torch.ops.aten.cudnn_batch_norm_backward(
        x, dy, scale, None, None, mean, inv_std, 1e-3, reserve
    )
    case.dx, case.dscale, case.dbias = (t.cpu().numpy() for t in theirs)
    for one in (case, ours):  # the same statistics, and the same bound
        one.mean, one.inv_std = mean.cpu().numpy(), inv_std.cpu().numpy()
    _run(cupy, backend, ours, "cudnn")
    case.check()
    ours.check()
