"""Tensors of one number in the place of a number: taken, or refused with what to pass."""

import pytest

from tests.interop.libraries import LIBRARIES, framework
from tests.operations import OPERATIONS, leaves, on


def numbers_of(operation):
    """The arguments that have a float for a default."""
    for name, parameter in operation.parameters.items():
        if type(parameter.default) is float:
            yield name, parameter.default
    yield from ((n, v) for n, v in operation.numbers.items() if type(v) is float)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_tensor_of_one_number(name):
    torch, operation = framework("torch"), OPERATIONS[name]
    make = LIBRARIES["torch"]().make
    lists = [(shape, "data") for shape, _ in operation.lists]
    for number, value in numbers_of(operation):
        given, plain = (operation.arguments(on(make), lists=lists) for _ in range(2))
        given[number] = torch.tensor(value, dtype=torch.float64)
        found, refused = called(operation, given)
        if refused:
            assert refused.startswith(f"{number} must be a real number, not Tensor; pass")
            assert ".item()" in refused
            continue
        expected = operation(**plain | {number: value})
        for got, ref in zip(leaves(found), leaves(expected), strict=True):
            if isinstance(ref, torch.Tensor):
                assert torch.equal(got, ref)


def called(operation, given):
    """What a call gave, and what its error said."""
    try:
        return operation(**given), ""
    except TypeError as error:
        return None, str(error)


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
