"""Gradients of norms of which some are wanted, and biases without a scale."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradkit
from tests.operations import OPERATIONS, on
from tests.tolerances import assert_same_bits

GRADIENTS = [each for each in OPERATIONS.values() if each.results[:1] == ("dx",)]
EACH = pytest.mark.parametrize("operation", GRADIENTS, ids=lambda each: each.name)
ROWS = [(3, 7), (40, 64), (2, 5, 16)]
WIDE = (2, 33_000)  # which compiled code reads window by window
CHANNELS = [(9, 6), (4, 12, 35), (2, 3, 5, 8)]


@pytest.mark.guarantee("Only what is wanted")
@EACH
@given(data=st.data())
def test_results_have_the_same_bits_whichever_others_are_wanted(backend, operation, data):
    rows = [*ROWS, WIDE] if backend.on_host else ROWS
    shape = data.draw(st.sampled_from(rows if operation.family == "rows" else CHANNELS), "shape")
    types = data.draw(st.sampled_from(operation.types), "types")
    names = st.sampled_from(operation.results)
    wanted = tuple(data.draw(st.lists(names, min_size=1, unique=True), "wanted"))
    past = "with ds" if "with ds" in operation.variants and data.draw(st.booleans(), "ds") else ""
    call = operation.arguments(on(backend.asarray), types, shape, variant=past)
    every = operation.function(**call)
    own = [np.zeros_like(backend.asnumpy(each)) for each in every]
    named = zip(operation.results, own, strict=True)
    into = tuple(backend.asarray(each) if name in wanted else None for name, each in named)
    for out in (None, into):
        found = operation.function(**call, wanted=wanted, out=out)
        for name, one, other in zip(operation.results, found, every, strict=True):
            if name in wanted:
                assert_same_bits(backend.asnumpy(one), backend.asnumpy(other))
            else:
                assert one is None


@EACH
def test_names_that_it_does_not_have(backend, operation):
    call = operation.arguments(on(backend.asarray))
    for wanted, error, said in (
        ((), ValueError, "wanted is empty; pass one or more of 'dx'"),
        (("dx", "dmean"), ValueError, "wanted has 'dmean'; pass one or more of 'dx'"),
        ("dx", TypeError, r"wanted must be a tuple of names, such as \('dx',\), not 'dx'"),
        (["dx"], TypeError, r"wanted must be a tuple of names, such as \('dx',\), not \['dx'\]"),
    ):
        with pytest.raises(error, match=said):
            operation.function(**call, wanted=wanted)
    with pytest.raises(ValueError, match="wanted has 'dscale', but scale is None; leave one out"):
        operation.function(**call | {"scale": None}, wanted=("dx", "dscale"))
    out = call["dy"], *[None] * (len(operation.results) - 1)
    with pytest.raises(ValueError, match=r"out\[0\] must be None: this call has no such result"):
        operation.function(**call, wanted=("dscale",), out=out)


BIASES = {"layer_norm": ROWS, "group_norm": CHANNELS, "batch_norm": CHANNELS}


@pytest.mark.guarantee("A bias alone")
@pytest.mark.parametrize("name", BIASES)
@given(data=st.data())
def test_a_bias_alone_is_as_one_beside_a_scale_of_ones(backend, name, data):
    forward, gradient = OPERATIONS[name], OPERATIONS[f"{name}_grad"]
    types = data.draw(st.sampled_from(forward.types), "types")
    shape = data.draw(st.sampled_from(BIASES[name]), "shape")
    call = forward.arguments(on(backend.asarray), types, shape)
    ones = backend.asarray(np.ones_like(backend.asnumpy(call["scale"])))
    y, *statistics = forward.function(**call | {"scale": None})
    expected = forward.function(**call | {"scale": ones})[0]
    assert_same_bits(backend.asnumpy(y), backend.asnumpy(expected))
    given = {
        "dy": gradient.arguments(on(backend.asarray), types, shape)["dy"],
        "x": call["x"],
        **dict(zip(("mean", "inv_std"), statistics, strict=True)),
    }
    every = gradient.function(**given, scale=ones)
    into = None, None, backend.asarray(np.zeros_like(backend.asnumpy(every[2])))
    wanted = {"scale": None, "wanted": ("dx", "dbias")}
    for out in (into, None) if types[2] == types[0] else (into,):
        found = gradient.function(**given, **wanted, out=out)
        assert found[1] is None
        for k in (0, 2):
            assert_same_bits(backend.asnumpy(found[k]), backend.asnumpy(every[k]))


def test_a_bias_of_each_sample_needs_a_scale(backend):
    x, bias = (backend.asarray(np.ones(s, np.float32)) for s in ((3, 4, 8), (3, 1, 8)))
    with pytest.raises(ValueError, match=r"bias has shape \(3, 1, 8\)"):
        gradkit.layer_norm(x, None, bias)
