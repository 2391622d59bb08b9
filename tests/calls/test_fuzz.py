"""Garbage for any parameter of any public function: a result or a typed error, never a crash.

And never a warning (they are errors here), and no byte of any array changed where a call fails.
"""

import array
import inspect
import io
import math
from decimal import Decimal
from fractions import Fraction
from functools import partial

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradkit
from tests import strategies as draw_
from tests.backends import Backend
from tests.bad_input.arguments import Factory, Parameter, good
from tests.layouts import LAYOUTS
from tests.operations import LISTS as OF_ARRAYS
from tests.operations import OPERATIONS
from tests.tolerances import DTYPES

EXPECTED = (TypeError, ValueError, gradkit.GradkitError)
FUNCTIONS = [
    *OPERATIONS,
    *("spike_guard_init", "grads_of", "named_grads_of", "names_of", "show_config"),
]
OTHER_DTYPES = (
    *(np.dtype(name) for name in (">f4", "g", "i1", "u8", "?", "F", "S3", "U2", "M8[s]", "V8")),
    np.dtype([("value", "f4")]),
    np.dtype(ml_dtypes.float8_e4m3fn),
)


class Grumpy:
    """Answers no question."""

    def __getattr__(self, name):
        raise AttributeError(name)

    def __repr__(self):
        raise ValueError("no name")


class Capsule:
    """Says that it speaks DLPack, and does not."""

    def __dlpack__(self, **_):
        raise BufferError("no memory")

    def __dlpack_device__(self):
        return (1, 0)


def endless():
    """A list that holds itself."""
    found = []
    found.append(found)
    return found


def deep(depth=10_000):
    """More lists in each other than Python has frames."""
    found = []
    for _ in range(depth):
        found = [found]
    return found


VALUES = (
    None, True, 0, 1, -1, 2, 10**400, -(10**400), 0.0, -0.0, 1.5, 5e-324, math.nan, math.inf,
    -math.inf, 1j, Decimal("0.5"), Fraction(1, 3), "", "sum", "raise", "zero", "same_kind", "dicts",
    b"\0", bytearray(8), array.array("d", [1.0]), memoryview(b"12345678"), ..., NotImplemented,
    int, len, print, np, object(), Grumpy(), Capsule(), Parameter(), range(3), slice(None),
    frozenset({1}), io.StringIO("1\n2\n"), ValueError("x"), lambda *_: None, lambda x, _: x,
    np.float16(0.5), np.float64(math.nan), np.int8(3), np.bool_(True), np.str_("x"),
    np.datetime64("2020-01-01"), np.array(None), np.array([1.0, "x", None], object),
    np.ma.masked_array([1.0, 2.0], [True, False]), np.rec.array([(1.0,)], dtype=[("a", "f8")]),
    ml_dtypes.bfloat16(2),
)  # fmt: skip
MAKERS = (lambda: iter([1.0, None]), lambda: (x for x in "ab"), lambda: {1: None})
CONTAINERS = {*OF_ARRAYS, "parameters", "named_parameters", "out"}  # what may be some


@st.composite
def arrays(draw, a):
    """An array of any dtype, floating or not, in any layout, writable or not."""
    name = draw(st.sampled_from([*DTYPES, *OTHER_DTYPES]))
    shape = tuple(draw(st.lists(st.sampled_from((0, 1, 2, 4, 6, 7)), max_size=4)))
    if name in DTYPES:
        host = draw(st.sampled_from(list(LAYOUTS.values())))(draw_.values(shape, name))
    else:
        host = np.zeros(shape, name)
    kind = draw(st.integers(0, 7))
    if kind == 0 and a.backend.has_read_only:
        return a.read_only(host)
    if kind == 1:
        return a.stretched(host.dtype, shape)
    return a.windows("float32") if kind == 2 else a(host)


@st.composite
def views(draw, a):
    """Some of the memory of an array that is an argument already."""
    known = [array for array in a.arrays if array.ndim]
    if not known:
        return None
    view = draw(st.sampled_from((
        lambda x: x, lambda x: x[...], lambda x: x[::-1], lambda x: x.T, lambda x: x[..., :1],
        lambda x: x[..., ::2], lambda x: x[:1], lambda x: x.reshape(-1), lambda x: x[..., None],
    )))  # fmt: skip
    return view(draw(st.sampled_from(known)))


def garbage(a, label):
    """Whatever a caller could get wrong, in containers or not."""
    one = st.sampled_from(VALUES) | st.sampled_from(MAKERS).map(lambda make: make())
    one = one | arrays(a) | views(a)
    several = st.lists(one, max_size=3)
    nested = several | several.map(tuple) | st.dictionaries(st.sampled_from("xy"), one, max_size=2)
    several = nested | st.lists(nested, max_size=2).map(tuple)
    if label in CONTAINERS:
        several = several | st.builds(endless) | st.builds(deep)
    return one | several


@pytest.mark.sampled(7)
@pytest.mark.parametrize("function", FUNCTIONS)
@given(data=st.data())
def test_garbage(backend, function, data):
    a = Factory(backend)
    call = getattr(gradkit, function)
    parameters = list(inspect.signature(call).parameters)
    arguments = {"mode": "dicts"} if function == "show_config" else good(function, a)
    for label in data.draw(
        st.lists(st.sampled_from(parameters), min_size=1, max_size=3, unique=True)
    ):
        arguments[label] = data.draw(garbage(a, label), label)
    before = a.memory()
    try:
        call(**arguments)
    except EXPECTED:
        failed = True
    else:
        failed = False
    assert a.memory() == before or not failed


@pytest.mark.parametrize("value", [Capsule, Grumpy, Parameter, lambda: None])
@pytest.mark.parametrize("function", OPERATIONS)
def test_each_argument_as_an_object_that_answers_nothing(function, value):
    a = Factory(Backend())
    for label in inspect.signature(getattr(gradkit, function)).parameters:
        arguments = {**good(function, a), label: value()}
        before = a.memory()
        try:
            getattr(gradkit, function)(**arguments)
        except EXPECTED:
            assert a.memory() == before, label


@pytest.mark.parametrize("make", [endless, deep, partial(deep, 100)])
def test_containers_without_end(make):
    message = "a container holds itself, or there are more than 100 in each other"
    for call in (gradkit.zero_grad, gradkit.grads_of, lambda g: gradkit.clip_grad_norm([g], 1.0)):
        with pytest.raises(ValueError, match=message):
            call(make())
        call(deep(98))


@pytest.mark.parametrize("value", [10**400, -(10**400), Fraction(10**400)])
def test_numbers_larger_than_any_float(value):
    with pytest.raises(ValueError, match="max_norm is larger than any float"):
        gradkit.clip_coefficient(1.0, value)


@pytest.mark.parametrize("value", [None, 1, "yes"])
def test_a_flag_is_a_bool(backend, value):
    grads = [backend.asarray(np.ones(3))]
    with pytest.raises(TypeError, match=f"flat must be a bool, not {type(value).__name__}"):
        gradkit.per_tensor_norms(grads, flat=value)
    assert gradkit.per_tensor_norms(grads, flat=np.bool_(True)).shape == (1,)
