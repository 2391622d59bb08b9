"""The real libraries, up to where a GPU is needed. ``make test-cudnn`` has both installed.

``GRADKIT_CUDNN=8`` or ``=9`` says which one must be there; without it, what is there is tested
and the rest skipped.
"""

import ctypes
import importlib.util
import os
import re
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from gradkit._cuda import CudaBackend
from gradkit._cuda.channels import ChannelNorms
from gradkit._cuda.cudnn import batch_normalization, bindings9, engines, face, library, search
from gradkit._cuda.cudnn.descriptions import Dense
from gradkit._dtypes import FLOATS
from gradkit.errors import CudnnError
from tests.backends import has_gpu
from tests.cudnn import header
from tests.cudnn.cases import COMBINATIONS, SHAPES, Case, ForwardCase
from tests.cudnn.fake import HostDevice

REQUIRED = os.environ.get("GRADKIT_CUDNN")
if REQUIRED is None and importlib.util.find_spec("cupy") is None:
    pytest.skip("cupy is not installed", allow_module_level=True)
pytestmark = pytest.mark.cudnn
NOT_INITIALIZED = {"cupy.cuda.cudnn": 1, "ctypes": 1001}
NOT_SUPPORTED = {"cupy.cuda.cudnn": 9, "ctypes": 3000}


@pytest.fixture(scope="module")
def cudnn():
    """The process' cuDNN, found as a user's is."""
    import cupy  # noqa: F401

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            return library.cudnn()
        except library.BackendUnavailableError as error:
            if REQUIRED is not None:
                raise
            pytest.skip(str(error))


@pytest.fixture(scope="module")
def no_gpu():
    if has_gpu():
        pytest.skip("there is a GPU; test_gpu.py has these cases")


def _read_back(bindings, descriptor):
    """(data type, dims, strides) out of a descriptor, by cuDNN itself."""
    numbers = [ctypes.c_int() for _ in range(9)]
    library = ctypes.CDLL(bindings.path)
    status = library.cudnnGetTensor4dDescriptor(
        ctypes.c_void_p(descriptor), *(ctypes.byref(n) for n in numbers)
    )
    assert status == 0
    kind, *sizes = (n.value for n in numbers)
    return kind, tuple(sizes[:4]), tuple(sizes[4:])


def test_the_binding_is_the_one_for_this_cupy(cudnn):
    import cupy

    major = int(cupy.__version__.split(".")[0])
    version = cudnn.bindings.getVersion()
    if REQUIRED is not None:
        assert library.version_text(version).startswith(REQUIRED)
        assert cudnn.bindings.name == {"8": "cupy.cuda.cudnn", "9": "ctypes"}[REQUIRED]
    if major >= 14:
        assert cudnn.bindings.name == "ctypes"
    assert Path(cudnn.bindings.path).name.startswith(
        f"libcudnn.so.{library.version_text(version)[0]}"
    )
    assert library.describe() == {
        "loaded": True,
        "version": library.version_text(version),
        "binding": cudnn.bindings.name,
        "path": cudnn.bindings.path,
    }


def test_without_a_gpu_a_handle_is_a_typed_error(cudnn, no_gpu):
    with pytest.raises(CudnnError, match="cudnnCreate: CUDNN_STATUS_NOT_INITIALIZED") as caught:
        cudnn.bindings.create()
    assert caught.value.status == NOT_INITIALIZED[cudnn.bindings.name]
    assert not caught.value.unsupported


def test_descriptors_are_made_and_say_what_they_were_told(cudnn):
    """All that the launcher makes for every case, read back out of cuDNN."""
    bindings, seen = cudnn.bindings, []

    class Watch:
        def __getattr__(self, name):
            return getattr(bindings, name)

        def deriveBNTensorDescriptor(self, derived, source, mode):
            bindings.deriveBNTensorDescriptor(derived, source, mode)
            seen.append((_read_back(bindings, source), _read_back(bindings, derived)))

        def create(self):
            return 1

        def setStream(self, handle, stream):
            pass

        def batchNormalizationBackward(self, *arguments):
            pass

    watched = library.Cudnn(Watch())
    try:
        for types_ in COMBINATIONS:
            for shape in SHAPES:
                for axis in range(len(shape)):
                    for layouts in (("C",) * 3, ("rolled",) * 3):
                        case = Case(shape, axis, types_, layouts=layouts)
                        launcher = batch_normalization.batch_norm_grad
                        with np.errstate(all="ignore"):  # nothing was written into scratch
                            launcher(watched, HostDevice(), case.call())
                        layout = Dense.of(case.x, axis)
                        kind = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 9}
                        data, parameter = seen[-1]
                        assert data == (kind[str(case.x.dtype)], layout.dims, layout.strides)
                        wide = int(case.x.dtype == np.float64)
                        assert parameter[:2] == (wide, (1, shape[axis], 1, 1))
    finally:
        watched.handles._all.clear()
    assert len(seen) > 400


@pytest.mark.parametrize(
    ("dims", "text"),
    [
        ((65536, 32767, 1, 1), None),
        ((65536, 32768, 1, 1), "CUDNN_STATUS_NOT_SUPPORTED"),
        ((0, 3, 1, 1), "CUDNN_STATUS_BAD_PARAM"),
    ],
)
def test_the_limits_of_a_descriptor_are_the_librarys(cudnn, dims, text):
    bindings = cudnn.bindings
    descriptor = bindings.createTensorDescriptor()
    _, c, h, w = dims
    sizes = (*dims, c * h * w, h * w, w, 1)
    try:
        if text is None:
            bindings.setTensor4dDescriptorEx(descriptor, 0, *sizes)
            assert _read_back(bindings, descriptor) == (0, dims, sizes[4:])
            return
        with pytest.raises(CudnnError, match=f"^cudnnSetTensor4dDescriptorEx: {text}") as caught:
            bindings.setTensor4dDescriptorEx(descriptor, 0, *sizes)
        assert caught.value.unsupported == ("NOT_SUPPORTED" in text)
        if caught.value.unsupported:
            assert caught.value.status == NOT_SUPPORTED[bindings.name]
    finally:
        bindings.destroyTensorDescriptor(descriptor)


def test_without_a_handle_it_runs_on_our_own_kernels(cudnn, no_gpu, monkeypatch):
    """A whole call with a library that cannot work here: warned of once, and right."""
    from gradkit import _numpy

    monkeypatch.setattr(engines, "_warned", False)
    for name in ("batch_norm", "batch_norm_grad"):
        reference = getattr(_numpy, name)
        monkeypatch.setattr(ChannelNorms, f"_{name}", lambda _, call, run=reference: run(call))
    backward, forward = (kind((2, 3, 4), 1, COMBINATIONS[0]) for kind in (Case, ForwardCase))
    with pytest.warns(RuntimeWarning, match="CUDNN_STATUS_NOT_INITIALIZED"):
        backward.run(CudaBackend(HostDevice()))
    forward.run(CudaBackend(HostDevice()))  # warnings are errors here
    backward.check()
    forward.check()
    case = Case((2, 3, 4), 1, COMBINATIONS[0])
    with pytest.raises(CudnnError, match="CUDNN_STATUS_NOT_INITIALIZED"):
        case.run(CudaBackend(HostDevice()), "cudnn")


def test_batch_norm_itself_is_there(cudnn):
    """A null handle is refused by the function's own checks, in the sub-library that has it."""
    library = ctypes.CDLL(cudnn.bindings.path)
    library.cudnnGetErrorString.restype = ctypes.c_char_p
    for name in ("ForwardTraining", "ForwardInference", "Backward"):
        name = f"cudnnBatchNormalization{name}"
        function = getattr(library, name)
        function.argtypes = bindings9.PROTOTYPES[name]
        status = function(*(0 for _ in function.argtypes))
        assert library.cudnnGetErrorString(status).startswith(b"CUDNN_STATUS_BAD_PARAM")


def _headers(cudnn):
    folder = Path(cudnn.bindings.path).parent.parent / "include"
    if not folder.is_dir():
        pytest.skip("this cuDNN came without its headers")
    text = "\n".join(path.read_text() for path in sorted(folder.glob("cudnn_*.h")))
    return re.sub(r"/\*.*?\*/|//[^\n]*", " ", text + (folder / "cudnn.h").read_text(), flags=re.S)


@pytest.mark.parametrize("function", header.PROTOTYPES)
def test_the_table_is_the_installed_header(cudnn, function):
    found = re.findall(rf"CUDNNWINAPI\s+{function}\((.*?)\);", _headers(cudnn), flags=re.S)
    declared = {
        tuple(
            re.sub(r"\s*\*\s*", " *", " ".join(p.replace("const ", " ").split()))
            for p in text.split(",")
        )
        for text in found
    }
    assert declared == {tuple(p.strip() for p in header.PROTOTYPES[function].split(","))}


def test_constants_are_the_installed_headers(cudnn):
    text = _headers(cudnn)
    numbers = dict(re.findall(r"\b(CUDNN_(?:DATA|BATCHNORM)_\w+)\s*=\s*(\d+)", text))
    names = {"float32": "FLOAT", "float64": "DOUBLE", "float16": "HALF", "bfloat16": "BFLOAT16"}
    for dtype, row in FLOATS.items():
        assert row.cudnn == int(numbers[f"CUDNN_DATA_{names[dtype]}"]), dtype
    assert int(numbers["CUDNN_BATCHNORM_SPATIAL"]) == face.SPATIAL
    assert int(numbers["CUDNN_BATCHNORM_SPATIAL_PERSISTENT"]) == face.SPATIAL_PERSISTENT
    (epsilon,) = set(re.findall(r"#define CUDNN_BN_MIN_EPSILON (\S+)", text))
    assert float(epsilon) == face.BN_MIN_EPSILON


def test_cupys_own_signatures(cudnn):
    """The order in which CuPy's functions take what the face passes them."""
    if cudnn.bindings.name != "cupy.cuda.cudnn":
        pytest.skip("CuPy 14 has none")
    from cupy.cuda import cudnn as module

    for function in header.PROTOTYPES:
        name = function.removeprefix("cudnn")
        declared = re.search(
            r"\((.*?)\)", getattr(module, name[0].lower() + name[1:]).__doc__ or ""
        )
        if declared is None:
            pytest.skip("this CuPy does not tell its functions' signatures")
        names = [p.split()[-1] for p in declared[1].split(",") if p.strip()]
        wanted = [label for kind, label in header.parameters(function)]
        if header.ctype(header.parameters(function)[0][0]) is not ctypes.c_void_p:
            wanted = []
        assert names == [{"streamId": "stream"}.get(label, label) for label in wanted]


def test_cupys_binding_recovers_from_an_import_without_the_library(cudnn):
    """``import cupy.cuda.cudnn`` without cuDNN leaves an empty module that stays imported."""
    if cudnn.bindings.name != "cupy.cuda.cudnn":
        pytest.skip("CuPy 14 has none")
    import subprocess

    script = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "import cupy.cuda.cudnn as module\n"
        "assert not hasattr(module, 'getVersion')\n"
        "from gradkit._cuda.cudnn import library\n"
        "print(library.cudnn().bindings.getVersion())\n"
    )
    root = str(Path(__file__).resolve().parents[2])
    answer = subprocess.check_output(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": root}, text=True
    )
    assert int(answer) == cudnn.bindings.getVersion()


def test_where_it_comes_from(cudnn):
    """The four places give the same file where they give any."""
    soname = f"libcudnn.so.{library.version_text(cudnn.bindings.getVersion())[0]}"
    answers = {name: find(soname) for name, find in search.places()}
    assert answers["already loaded"] == cudnn.bindings.path
    assert answers["PyPI packages"] in (None, cudnn.bindings.path)
    assert answers["cuda-pathfinder"] in (None, cudnn.bindings.path)
