"""Every function on arrays of every framework: NumPy's results, in the caller's own type."""

from contextlib import nullcontext, suppress
from importlib import import_module
from inspect import signature

import numpy as np
import pytest

import gradkit
from gradkit._arrays import framework_of
from gradkit._open import dispatch
from testbed.emulator import EmulatedDevice
from tests.backends import Backend, CompiledCpu
from tests.bad_input.arguments import Factory, NoSuchArrayError, good
from tests.bad_input.test_bad_input import HERE, REFUSED
from tests.interop.libraries import LIBRARIES, framework
from tests.interop.test_cuda_tensors import cuda_tensors_on
from tests.operations import LISTS, OPERATIONS, leaves, leaving_nothing, on
from tests.sequences import (
    CONTAINERS,
    NORMS,
    check_calls_in_a_row,
    check_each_value_after_each_other,
)

RUNNING = {"running_mean", "running_var"}
TORCH = ["torch.nn.functional", "torch.nn.utils"]
NEVER_WRITTEN = "whose memory is never written|returns new arrays"


@pytest.mark.parametrize(
    ("module", "others", "different"),
    [
        ("gradkit.jax", ["gradkit"], set()),
        ("gradkit.jax.transforms", ["gradkit.jax"], set()),
        ("gradkit.torch", TORCH, set()),
        ("gradkit.torch", ["gradkit"], {"eps", *RUNNING}),
    ],
)
def test_defaults_are_those_of_the_function_of_that_name(module, others, different):
    framework(module.split(".")[1])
    ours, found = import_module(module), []
    for name in ours.__all__:
        for theirs in (getattr(import_module(other), name, None) for other in others):
            if theirs is not None and not isinstance(theirs, type):
                pair = [signature(f).parameters for f in (getattr(ours, name), theirs)]
                for label in pair[0].keys() & pair[1].keys() - different:
                    found.append(label)
                    assert pair[0][label].default == pair[1][label].default, (name, label)
    assert len(found) > 15


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("computing", ["compiled", "numpy"])
def test_results_are_numpys_and_of_the_callers_type(computing, library, name):
    """In the first call of a kind, which makes its plan, and in the second, which finds it.

    Lists are also in another container, of other shapes, and results in arrays of the caller's.
    """
    lib, operation = LIBRARIES[library](), OPERATIONS[name]
    lists = [(shape, "data") for shape, _ in operation.lists]
    with gradkit.use_cpu_backend(computing):
        check(lib, operation, lists)
        check(lib, operation, lists, out=lib.mutable and operation.family in NORMS)
        if {*operation.arrays} & {*LISTS}:
            check(lib, operation, [*lists, ((), "data"), ((0, 3), "data")], CONTAINERS["nested"])


def built(tree):
    """A tree of containers without what they hold."""
    if isinstance(tree, dict):
        return {key: built(each) for key, each in tree.items()}
    return type(tree)(map(built, tree)) if type(tree) in (list, tuple) else tree is None


def check(lib, operation, lists, contain=list, *, out=False):
    wide = operation.family == "numbers"
    written = {operation.writes, *(RUNNING if operation.function is gradkit.batch_norm else ())}
    for dtype in lib.dtypes:
        for types in [each for each in operation.types if each[0] == dtype][:1]:
            for variant in ("", *operation.variants):
                given, hosts = (
                    operation.arguments(on(put), types, variant=variant, lists=lists)
                    for put in (lib.make, np.array)
                )
                for own in (given, hosts):
                    own |= {n: contain(a) for n, a in own.items() if isinstance(a, list)}
                if written & given.keys() and not lib.mutable:
                    with pytest.raises(TypeError, match=NEVER_WRITTEN):
                        operation(**given)
                    continue
                before = versions(given.get(operation.writes))
                expected = operation(**hosts)
                if out:
                    outs = tuple(
                        None if each is None else lib.make(np.full_like(each, 7))
                        for each in leaves(expected)
                    )
                    given["out"] = outs if len(outs) > 1 else outs[0]
                with leaving_nothing():
                    found = operation(**given)
                assert not out or all(a is b for a, b in zip(leaves(found), outs, strict=True))
                given.pop("out", None)
                assert built([*found]) == built([*expected])
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


ON_DEVICES = [title for title in REFUSED if title.startswith("clipping and norms")]


class Tensors(Backend):
    """PyTorch's tensors in the place of a backend's arrays."""

    name = "compiled"
    has_read_only = False

    def asarray(self, array):
        torch, host = framework("torch"), super().asarray(array)
        if not host.flags.aligned or min(host.strides, default=0) < 0:
            host = host.copy()  # no tensor lies so
        if host.dtype.name != "bfloat16":
            return torch.from_numpy(host)
        return torch.from_numpy(host.view(np.int16)).view(torch.bfloat16)

    def asnumpy(self, array):
        return np.array(self._seen(array))

    def assign(self, array, values):
        array[...] = self.asarray(np.array(values))

    def memory(self, array):
        return super().memory(self._seen(array))

    def stretched(self, array, shape, strides):
        return array.as_strided(shape, [step // array.itemsize for step in strides])

    def _seen(self, array):
        halves = str(array.dtype) == "torch.bfloat16"
        return framework_of(array).view(array, write=False) if halves else np.asarray(array)


@pytest.mark.parametrize("family", sorted({each.family for each in OPERATIONS.values()}))
def test_calls_say_nothing_of_the_next(family):
    check_calls_in_a_row(Tensors(), family)


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_value_of_a_property_after_each_other(name):
    """With NumPy's bits."""
    check_each_value_after_each_other(Tensors(), name, CompiledCpu(), every=False)


@pytest.mark.parametrize(
    ("title", "on_host"),
    [(title, on) for title in REFUSED for on in (True, False) if on or title in ON_DEVICES],
)
def test_what_is_refused(title, on_host):
    """Of tensors, on a device lists of them: by the first call of a kind, and by one that is known.

    Of very many cells of a row some.
    """
    tensors = Tensors()
    made = [cell for cell in HERE[title] if can_be_made(cell, tensors)]
    assert len(made) > len(HERE[title]) / 3 or title.endswith("read-only")
    made = made[:: 1 + len(made) // 400]
    known = [n for n, each in OPERATIONS.items() if on_host or each.family == "lists"]
    with nullcontext() if on_host else cuda_tensors_on(EmulatedDevice(multiprocessors=1)):
        dispatch._plans.clear()
        for _ in range(2):
            for cell in made:
                cell.check(tensors)
            for name in {cell.call.function for cell in made} & {*known}:
                for _ in range(2):
                    OPERATIONS[name](**good(name, Factory(tensors)))


def can_be_made(cell, backend):
    """False of arrays of which the library has none, such as read-only or of negative strides."""
    with suppress(NoSuchArrayError, TypeError, ValueError):
        return bool(cell.call.arguments(Factory(backend)))
    return False


def versions(written):
    """Number of writes to each tensor that PyTorch has counted: autograd compares that."""
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
