"""Every argument in the place and of the type that the C header has for it."""

import ctypes
import types

import pytest

from gradkit._cuda.cudnn import bindings8, bindings9
from gradkit._cuda.cudnn.face import FUNCTIONS, name_of
from gradkit.errors import CudnnError
from tests.cudnn import header

# Another name than cuDNN's: what is loaded under that name is the process' cuDNN.
RECORDER = "librecorder.so"
FACE = {name_of(name): name for name in FUNCTIONS[1:]}


def test_the_header_is_whole():
    assert set(FACE) == set(header.PROTOTYPES) == set(bindings9.PROTOTYPES)


@pytest.mark.parametrize("function", header.PROTOTYPES)
def test_ctypes_prototypes_are_the_headers(function):
    assert list(bindings9.PROTOTYPES[function]) == [
        header.ctype(kind) for kind, _ in header.parameters(function)
    ]


def _values(function):
    """A value for each argument that could be no other's."""
    made = []
    for position, (kind, _) in enumerate(header.parameters(function)):
        if header.ctype(kind) is ctypes.c_double:
            made.append(position + 0.125)
        elif header.ctype(kind) is ctypes.c_int:
            made.append(-position - 1)
        elif header.ctype(kind) is ctypes.c_void_p:
            made.append(2**40 + position)  # more than an int holds
    return made


@pytest.mark.parametrize("function", header.PROTOTYPES)
def test_through_the_c_abi(function, build, tmp_path):
    path = build(tmp_path, version=92800, file=RECORDER)
    library = ctypes.CDLL(str(path))
    binding = bindings9.bindings_of(library, str(path))
    values = _values(function)
    made = getattr(binding, FACE[function])(*values)
    library.recorded.restype = ctypes.c_char_p
    assert library.recorded().decode() == " ".join(map(str, [function, *values]))
    assert made == (4711 if not values else None)


def test_a_status_becomes_the_librarys_own_text(build, tmp_path):
    path = build(tmp_path, version=92800, status=3, file=RECORDER)
    binding = bindings9.bindings_of(ctypes.CDLL(str(path)), str(path))
    for function, name in FACE.items():
        with pytest.raises(CudnnError, match=rf"^{function}: THREE \(3\)$") as caught:
            getattr(binding, name)(*_values(function))
        assert (caught.value.function, caught.value.status) == (function, 3)


class CuDNNError(RuntimeError):
    def __init__(self, status):
        super().__init__("cuDNN Error: CUDNN_STATUS_BAD_PARAM")
        self.status = status


def _cupy_module(function):
    functions = dict.fromkeys(FUNCTIONS, function)
    return types.SimpleNamespace(CuDNNError=CuDNNError, **functions)


@pytest.mark.parametrize("function", header.PROTOTYPES)
def test_cupys_functions_get_the_same_arguments(function):
    binding = bindings8.bindings_of(_cupy_module(lambda *args: args), "somewhere")
    values = _values(function)
    assert getattr(binding, FACE[function])(*values) == tuple(values)


@pytest.mark.parametrize("function", header.PROTOTYPES)
def test_cupys_errors_become_ours(function):
    def refuse(*args):
        raise CuDNNError(3)

    binding = bindings8.bindings_of(_cupy_module(refuse), "somewhere")
    with pytest.raises(CudnnError, match=rf"^{function}: CUDNN_STATUS_BAD_PARAM \(3\)$"):
        getattr(binding, FACE[function])()
