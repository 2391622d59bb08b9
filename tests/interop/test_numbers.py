"""Tensors of one number in the place of a number: taken, or refused with what to pass."""

import numpy as np
import pytest

import gradkit
from gradkit._open import dispatch
from tests.interop.libraries import LIBRARIES, framework
from tests.operations import OPERATIONS, leaves, on


def numbers_of(operation):
    """The arguments that have a float for a default."""
    for name, parameter in operation.parameters.items():
        if type(parameter.default) is float:
            yield name, parameter.default
    yield from ((n, v) for n, v in operation.numbers.items() if type(v) is float)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_tensor_of_one_number(name, dtype):
    torch, operation = framework("torch"), OPERATIONS[name]
    make = LIBRARIES["torch"]().make
    lists = [(shape, "data") for shape, _ in operation.lists]
    for number, value in numbers_of(operation):
        given, plain = (operation.arguments(on(make), lists=lists) for _ in range(2))
        given[number] = tensor = torch.tensor(value, dtype=getattr(torch, dtype))
        found, refused = called(operation, given)
        if refused:
            assert refused.startswith(f"{number} must be a real number, not Tensor; pass")
            assert ".item()" in refused
            continue
        expected = operation(**plain | {number: tensor.item()})
        for got, ref in zip(leaves(found), leaves(expected), strict=True):
            if isinstance(ref, torch.Tensor):
                assert torch.equal(got, ref)


def called(operation, given):
    """Return a call's result, and its error's message."""
    try:
        return operation(**given), ""
    except TypeError as error:
        return None, str(error)


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_an_integer_is_a_number(library):
    """A count of tokens, in host memory."""
    make = LIBRARIES[library]().make
    for count in (2, 3):
        grads, number = make(np.array([3.0, 4.0], np.float32)), make(np.array(count))
        scaled, norm = gradkit.clip_by_global_norm(grads, number, scale=number)
        assert norm == 5 * count
        np.testing.assert_allclose(np.asarray(scaled), np.array([0.6, 0.8]) * count, rtol=1e-6)
    with pytest.raises(ValueError, match="max_norm must be at least 0, not -1"):
        gradkit.clip_by_global_norm(grads, make(np.array(-1)))


def test_jit_traces_a_python_integer():
    jax, theirs = framework("jax"), framework("gradkit.jax")
    grads = [np.array([3.0, 4.0], np.float32)]
    (clipped,), norm = jax.jit(theirs.clip_by_global_norm)(grads, 1)
    (added,) = jax.jit(theirs.accumulate_grads)(grads, grads, scale=2)
    (kept,) = theirs.accumulate_grads(grads, grads, do_update=np.array(False))  # as NumPy's verdict
    assert norm == 5
    np.testing.assert_array_equal(kept, grads[0])
    np.testing.assert_allclose([clipped, added], [[0.6, 0.8], [9, 12]], rtol=1e-6)


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "group_norm", "batch_norm"])
def test_numbers_of_norms_that_are_differentiated(name):
    """By name, of tensors, of JAX's arrays and of what it traces."""
    torch, ours = framework("torch"), framework("gradkit.torch")
    jax, theirs = framework("jax"), framework("gradkit.jax")
    further = {"group_norm": (2,), "batch_norm": (None, None, None, None, True)}
    x, eps = torch.ones(3, 4), torch.tensor(1e-5)
    given = further.get(name, ((4,),))
    refused = r"^eps must be a real number, not .*(its \.item\(\)|which is being traced)"
    with pytest.raises(TypeError, match=refused):
        getattr(ours, name)(x, *given, eps=eps)

    def traced(eps):
        return getattr(theirs, name)(jax.numpy.ones((3, 4)), *further.get(name, ())[:1], eps=eps)

    for run in (traced, jax.jit(traced)):
        with pytest.raises(TypeError, match=refused):
            run(jax.numpy.float32(1e-5))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_tensor_of_one_number_is_read_in_each_call(dtype, monkeypatch):
    """On the road of plain numbers, whether or not it is the tensor of the last call."""
    torch = framework("torch")
    number, step = torch.ones((), dtype=getattr(torch, dtype)), torch.tensor(0)
    verdict = torch.tensor(True)

    def moved(by, count):
        own = [[torch.full((3,), k)] for k in (1.0, 2.0, 0.0, 0.0)]
        gradkit.adamw_update(*own, count, lr=by, scale=by, verdict=verdict)
        gradkit.accumulate_grads(*own[:2], scale=by)
        return float(gradkit.clip_grad_norm(own[0], by)), own[0][0].tolist()

    moved(number, step)
    monkeypatch.setattr(dispatch, "_run_by_name", None)
    for value in (0.5, 0.25, 0.5):
        number.fill_(value)
        count, version = int(step), step._version
        assert moved(number, step) == moved(value, count + 1)
        assert step._version > version
    verdict.fill_(False)
    assert moved(number, step) == moved(0.5, 5)
    assert int(step) == 4
    monkeypatch.undo()
    with pytest.raises(TypeError, match="lr"):
        moved(number.requires_grad_(), 1)


def test_a_number_in_an_array_beside_a_tensor_that_requires_grad():
    norm = framework("torch").tensor(3.0, requires_grad=True)
    for _ in range(2):
        assert bool(gradkit.step_verdict(norm, limit=np.array(10.0)))
        assert float(gradkit.clip_coefficient(norm, np.array(1.5))) == 0.5
