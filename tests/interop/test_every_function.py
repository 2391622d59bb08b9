"""Every function on arrays of every framework: NumPy's results, in the caller's own type."""

import numpy as np
import pytest

import gradkit
from tests.backends import Backend
from tests.interop.libraries import LIBRARIES
from tests.operations import OPERATIONS, leaves, on
from tests.sequences import check_calls_in_a_row

RUNNING = {"running_mean", "running_var"}
NEVER_WRITTEN = "whose memory is never written|returns new arrays"


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("computing", ["compiled", "numpy"])
def test_results_are_numpys_and_of_the_callers_type(computing, library, name):
    """In the first call of a kind, which makes its plan, and in the second, which finds it."""
    with gradkit.use_cpu_backend(computing):
        for _ in range(2):
            check(LIBRARIES[library](), OPERATIONS[name])


def check(lib, operation):
    wide = operation.family == "numbers"
    written = {operation.writes, *(RUNNING if operation.function is gradkit.batch_norm else ())}
    lists = [(shape, "data") for shape, _ in operation.lists]
    for dtype in lib.dtypes:
        for types in [each for each in operation.types if each[0] == dtype][:1]:
            for variant in ("", *operation.variants):
                given, hosts = (
                    operation.arguments(on(put), types, variant=variant, lists=lists)
                    for put in (lib.make, np.array)
                )
                if written & given.keys() and not lib.mutable:
                    with pytest.raises(TypeError, match=NEVER_WRITTEN):
                        operation(**given)
                    continue
                before = versions(given.get(operation.writes))
                found, expected = operation(**given), operation(**hosts)
                after = versions(given.get(operation.writes))
                assert all(new > old for new, old in zip(after, before, strict=True))
                for got, ref in zip(leaves(found), leaves(expected), strict=True):
                    same(lib, getattr(got, "table", got), getattr(ref, "table", ref), wide)
                assert [each is given.get(operation.writes) for each in found] == [
                    each is hosts.get(operation.writes) for each in expected
                ]
                arrays = zip(leaves(given), leaves(hosts), strict=True)
                for got, ref in ((a, b) for a, b in arrays if isinstance(b, np.ndarray)):
                    np.testing.assert_array_equal(lib.read(got), ref.astype(lib.dtype(got)))


class Tensors(Backend):
    """PyTorch's tensors in the place of a backend's arrays."""

    name = "compiled"

    def __init__(self):
        self.lib = LIBRARIES["torch"]()

    def asarray(self, array):
        return self.lib.make(array)

    def asnumpy(self, array):
        return self.lib.read(array) if isinstance(array, self.lib.kind) else np.array(array)

    def assign(self, array, values):
        array[...] = self.lib.make(np.array(values))

    def memory(self, array):
        return f"{array.dtype} {self.lib.read(array).tobytes()}"


@pytest.mark.parametrize("family", sorted({each.family for each in OPERATIONS.values()}))
def test_calls_say_nothing_of_the_next(family):
    check_calls_in_a_row(Tensors(), family)


def versions(written):
    """How often PyTorch knows its tensors to have been written: autograd compares that."""
    return [leaf._version for leaf in leaves(written) if hasattr(leaf, "_version")]


def same(lib, got, ref, wide):
    """A result is of the framework, on its device, and has the reference's bits.

    Where the framework has no float64, a result may be rounded to float32 once more.
    """
    if not isinstance(ref, (np.ndarray, np.generic)):
        assert got is ref or type(got) is type(ref)
        return
    assert isinstance(got, lib.kind)
    assert lib.device(got) == lib.device(lib.make(np.ones(1, np.float32)))
    narrow = ref.dtype == np.float64 and lib.norm_dtype == "float32"
    assert lib.dtype(got) == ("float32" if narrow else str(ref.dtype))
    assert tuple(got.shape) == ref.shape
    close = 1e-5 if narrow or (wide and lib.norm_dtype == "float32") else 0
    np.testing.assert_allclose(lib.read(got), ref.astype(float), rtol=close)
