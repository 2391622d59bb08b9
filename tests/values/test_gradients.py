"""Sources and names of gradients, and their norms in the caller's structure."""

from collections import namedtuple
from types import SimpleNamespace

import numpy as np
import pytest

import gradkit
from gradkit import NonFiniteNormError

Two = namedtuple("Two", "first second")


def f(*numbers):
    return np.array(numbers, np.float32)


def test_grads_of(backend):
    a, b = backend.asarray(f(1.0)), backend.asarray(f(2.0))
    first, frozen, last = (SimpleNamespace(grad=g) for g in (a, None, b))
    for parameters in (
        [first, frozen, last],
        (p for p in (first, frozen, last)),
        {"layer": [first, None], "rest": (frozen, last)},
    ):
        found = gradkit.grads_of(parameters)
        assert [id(g) for g in found] == [id(a), id(b)]
    assert gradkit.grads_of(last)[0] is b
    assert gradkit.grads_of([]) == []
    gradkit.clip_grad_norm(gradkit.grads_of([first, last]), 0.0)
    np.testing.assert_array_equal(backend.asnumpy(first.grad), [0.0])


def test_gradients_of_another_attribute(backend):
    main, own = backend.asarray(f(3.0)), backend.asarray(f(1.0))
    parameter = SimpleNamespace(grad=own, main_grad=main)
    assert gradkit.grads_of([parameter], attr="main_grad")[0] is main
    assert gradkit.grads_of({"w": (parameter,)}, attr="main_grad")[0] is main
    assert gradkit.named_grads_of({"w": parameter}, attr="main_grad")["w"] is main
    with pytest.raises(TypeError, match=r"parameters holds a SimpleNamespace, .* no \.main_grad"):
        gradkit.grads_of([parameter, SimpleNamespace(grad=own)], attr="main_grad")
    for wrong in ("main grad", "a.b", "", None):
        with pytest.raises(TypeError, match=r"attr is .*attribute's name"):
            gradkit.grads_of([parameter], attr=wrong)


def test_named_gradients(backend):
    a, b = backend.asarray(f(3.0)), backend.asarray(f(4.0))
    named = {"layer.w": a, "frozen": None, "b": b}
    named = {name: SimpleNamespace(grad=grad) for name, grad in named.items()}
    for parameters in (
        named,
        named.items(),
        iter(named.items()),
        [[*pair] for pair in named.items()],
    ):
        found = gradkit.named_grads_of(parameters)
        assert [(name, id(grad)) for name, grad in found.items()] == [
            ("layer.w", id(a)),
            ("b", id(b)),
        ]
    assert gradkit.named_grads_of([]) == {}
    b[...] = np.nan
    with pytest.raises(NonFiniteNormError, match=r"grads\['b'\]"):
        gradkit.clip_grad_norm(gradkit.named_grads_of(named), 1.0, nonfinite="raise")


def test_what_is_no_named_parameter():
    one = SimpleNamespace(grad=f(1.0))
    with pytest.raises(ValueError, match="two parameters named 'w'"):
        gradkit.named_grads_of([("w", SimpleNamespace(grad=None)), ("w", one)])
    for wrong in (one, ("w",), (1, one), "ab"):
        with pytest.raises(TypeError, match="no pair of a name and a parameter"):
            gradkit.named_grads_of([("v", one), wrong])
    with pytest.raises(TypeError, match=r"named_parameters\['w'\] is a int, which has no .grad"):
        gradkit.named_grads_of({"w": 3})


def trees(make):
    a, b, c = (make(f(*range(1, n))) for n in (2, 3, 4))
    yield a, ["grads"]
    yield [a, None, (b, c)], ["0", "2.0", "2.1"]
    yield {"x": None, "layer": {"w": a, 7: [b]}, "y": Two(None, c)}, ["layer.w", "layer.7.0", "y.1"]
    yield [], []


def test_gradients_in_the_place_of_parameters():
    """They would give no gradients, and a norm of 0."""
    gradient = SimpleNamespace(grad=None, requires_grad=False)

    class Parameter(SimpleNamespace):
        pass

    frozen = Parameter(grad=None, requires_grad=False)
    used = Parameter(grad=f(1.0), requires_grad=True)
    assert gradkit.grads_of([frozen]) == []
    assert gradkit.named_grads_of({"w": frozen}) == {}
    assert len(gradkit.grads_of([frozen, used, gradient])) == 1
    for call in (
        lambda: gradkit.grads_of([gradient, gradient]),
        lambda: gradkit.grads_of({"w": gradient}),
        lambda: gradkit.named_grads_of({"w": gradient}),
    ):
        with pytest.raises(TypeError, match=r"parameters holds tensors that take no gradients"):
            call()


def test_a_parameter_that_occurs_twice():
    """Weights that are tied, in a list that was put together: their gradient would count twice."""
    tied, other = (SimpleNamespace(grad=f(value)) for value in (3.0, 4.0))
    twice = r"parameters\[0\] and parameters\[2\] are one parameter"
    for parameters in ([tied, other, tied], {"a": tied, "b": [other, tied]}):
        with pytest.raises(ValueError, match=twice):
            gradkit.grads_of(parameters)
    with pytest.raises(ValueError, match=r"named_parameters\['a'\] and named_parameters\['c'\]"):
        gradkit.named_grads_of({"a": tied, "b": other, "c": tied})
    tied.grad = None
    with pytest.raises(ValueError, match=twice):
        gradkit.grads_of([tied, other, tied])


def test_names_are_one_a_gradient():
    with pytest.raises(ValueError, match=r"grads has two gradients named 'a\.b'"):
        gradkit.names_of({"a.b": f(1.0), "a": {"b": f(2.0)}})


def test_names_count_what_has_a_norm(backend):
    for grads, names in trees(backend.asarray):
        assert gradkit.names_of(grads) == names
        assert gradkit.per_tensor_norms(grads, flat=True).shape == (len(names),)
    assert gradkit.names_of(iter([f(1.0), None, f(2.0)])) == ["0", "2"]
    assert gradkit.names_of({"": f(1.0)}) == ["grads"]
    with pytest.raises(TypeError, match=r"grads\['a'\]\[1\] is an int; expected an array"):
        gradkit.names_of({"a": [f(1.0), 3]})


@pytest.mark.parametrize("p", [1.0, 2.0, np.inf])
def test_norms_in_the_callers_structure(backend, p):
    for grads, names in trees(backend.asarray):
        norms = gradkit.per_tensor_norms(grads, p)
        flat = gradkit.per_tensor_norms(grads, p, flat=True)
        found = gradkit._open.trees.leaves(norms, gradkit._arrays.is_array)
        assert gradkit.names_of(norms) == names
        assert [float(norm) for norm in found] == backend.asnumpy(flat).tolist()
        assert all(norm.shape == () and str(norm.dtype) == "float64" for norm in found)
    last = list(trees(backend.asarray))[2][0]
    norms = gradkit.per_tensor_norms(last, p)
    assert norms["x"] is None
    assert type(norms["y"]) is Two
    assert norms["y"].first is None


def test_norms_are_elements_of_out(backend):
    out = backend.asarray(np.zeros(2))
    grads = (backend.asarray(f(3.0, 4.0)), backend.asarray(f(2.0)))
    first, second = gradkit.per_tensor_norms((grad for grad in grads), out=out)
    assert (float(first), float(second)) == (5.0, 2.0)
    assert backend.asnumpy(out).tolist() == [5.0, 2.0]
    out[...] = 9
    assert float(first) == 9.0
    with pytest.raises(ValueError, match="out has shape"):
        gradkit.per_tensor_norms(grads, out=backend.asarray(np.zeros(3)))


def test_norms_of_each_take_what_one_norm_takes(backend):
    grads = {"w": backend.asarray(np.array([3.0, 4.0])), "b": (None, backend.asarray(f(np.inf)))}
    found = backend.asarray(np.zeros(2, bool))
    norms = gradkit.per_tensor_norms(grads, scale=-0.5, found_inf=found)
    assert float(backend.asnumpy(norms["w"])) == 2.5
    assert norms["b"][0] is None
    assert backend.asnumpy(found).tolist() == [False, True]
    nothing = [backend.asarray(np.zeros((0, n))) for n in (3, 4)]
    gradkit.per_tensor_norms(nothing, found_inf=found)
    assert backend.asnumpy(found).tolist() == [False, False]
    flat = gradkit.per_tensor_norms(grads, np.inf, flat=True)
    np.testing.assert_array_equal(backend.asnumpy(flat), [4, np.inf])
    said = r"norm is inf; non-finite gradients: grads\['b'\]\[1\], grads\['c'\]\."
    with pytest.raises(gradkit.NonFiniteNormError, match=said):
        gradkit.per_tensor_norms(grads | {"c": backend.asarray(f(np.nan))}, nonfinite="raise")
