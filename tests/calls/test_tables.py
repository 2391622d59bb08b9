"""The table of a list: all arrays of the caller's containers, read in one pass."""

import warnings
from collections import OrderedDict

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradkit
from gradkit import _host
from gradkit._open import trees
from gradkit._open.gradients import Gradients

COMPILED = _host.code
FLOATS = "float16", "bfloat16", "float32", "float64"
ROOM = np.zeros(240, np.uint8)

pytestmark = pytest.mark.skipif(COMPILED is None, reason="nothing is compiled")


def array_of(name):
    return np.ones((2, 3), ml_dtypes.bfloat16 if name == "bfloat16" else name)


leaves = st.one_of(st.none(), st.sampled_from(FLOATS).map(array_of))
containers = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=2), st.integers()), inner, max_size=3),
    ),
    max_leaves=8,
)


@given(tree=containers)
def test_leaves_are_those_of_the_containers_in_their_order(tree):
    table, own = COMPILED.table(tree, True), trees.leaves(trees.freeze(tree))
    assert (table is None) == (not own)
    if table is not None:
        assert all(a is b for a, b in zip(table.arrays, own, strict=True))
        assert all(a is b for a, b in zip(table, own, strict=True))
        assert len(table) == len(own)
        assert table[-1] is own[-1]
        assert table.is_flat == (type(tree) is list and len(tree) == len(own) and tree[0] is own[0])


@given(tree=containers, other=containers)
def test_places_are_alike_where_names_are(tree, other):
    """Of the same structure in the same order; a list and a tuple are alike, as names are."""
    two = [COMPILED.table(each, False) for each in (tree, other)]
    if None not in two:
        names = [gradkit.names_of(each) for each in (tree, other)]
        fits = COMPILED.fitting(*two, True) >= 0
        assert not fits or names[0] == names[1]
    own = COMPILED.table(tree, False)
    if own is not None:
        assert COMPILED.fitting(own, COMPILED.table(tree, False), True) > 0
        assert COMPILED.fitting(own, COMPILED.table(tree, False), False) == -1


@st.composite
def views(draw):
    """A part of the room, with gaps, reversed or empty."""
    dtype = draw(st.sampled_from((np.float16, np.float32, np.float64)))
    flat = ROOM[draw(st.integers(0, 29)) * 8 :].view(dtype)
    steps = [draw(st.sampled_from((1, 2, 3, -1, -2))) for _ in range(2)]
    rows = flat[: len(flat) // 4 * 4].reshape(-1, 4)[: draw(st.integers(0, 5))]
    return rows[:: steps[0], :: steps[1]]


@given(pairs=st.lists(st.tuples(views(), views()), min_size=1, max_size=3), may_be=st.booleans())
def test_lists_fit_whose_shapes_agree_and_whose_partners_can_be_written(pairs, may_be):
    pairs = [(a, a if (a.shape, a.strides) == (b.shape, b.strides) else b) for a, b in pairs]
    written, others = [a for a, _ in pairs], [b for _, b in pairs]
    read = [b for a, b in pairs if not (may_be and a is b)]
    found = COMPILED.fitting(*(COMPILED.table(each, False) for each in (written, others)), may_be)
    if all(a.shape == b.shape for a, b in pairs) and COMPILED.apart(written, read):
        kinds = {(FLOATS.index(a.dtype.name), FLOATS.index(b.dtype.name)) for a, b in pairs}
        assert found == sum(1 << 4 * own + other for own, other in kinds)
    else:
        assert found == -1


@given(written=st.lists(views(), min_size=1, max_size=4))
def test_a_list_is_written_if_its_arrays_lie_apart(written):
    assert (COMPILED.table(written, True) is not None) == COMPILED.apart(written, [])
    assert COMPILED.table(written, False) is not None


def test_what_is_unusual_has_no_table():
    a = np.zeros(3)
    itself: list = []
    itself.append(itself)
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    for other in (
        *(np.zeros(3, "i8"), np.zeros(3, ">f4"), np.ma.zeros(3), a.tolist(), 1.0, object(), itself),
        *(iter([a]), OrderedDict(w=a), a.view(type("Own", (np.ndarray,), {})), {"w": a}.values()),
    ):
        assert COMPILED.table([a, other], False) is None
    assert COMPILED.table([a, frozen], False) is not None
    assert COMPILED.table([a, frozen], True) is None


def test_a_table_keeps_what_it_was_made_of():
    """A list that another thread empties meanwhile, and arrays that nobody else holds."""
    grads = [np.full(3, 2.0), np.full(2, 3.0)]
    table = COMPILED.table(grads, False)
    grads.clear()
    assert [each.tolist() for each in table] == [[2.0] * 3, [3.0] * 2]
    assert [each.tolist() for each in table.picked([False, True])] == [[3.0] * 2]
    assert len(table.picked([False, False])) == 0


def test_a_container_that_changes_meanwhile_is_told():
    grads = {"w": np.ones(3), "b": [np.ones(2)]}
    held = Gradients(grads)
    grads["b"].append(np.ones(1))
    with pytest.raises(RuntimeError, match="grads changed while gradkit worked on its arrays"):
        held.tree  # noqa: B018 - a property
    held = Gradients(grads)
    grads["w"] = np.ones(3)
    with pytest.raises(RuntimeError, match="grads changed"):
        [*held.names()]


def test_a_shape_that_is_set_meanwhile_changes_no_table():
    """NumPy lets another thread set it while this one computes."""
    grad = np.arange(6.0)
    table = COMPILED.table([grad], False)
    with warnings.catch_warnings(action="ignore"):  # NumPy 2.5 has deprecated it
        grad.shape = 2, 3
    norm = np.zeros(())
    COMPILED.norms(table, 2.0, 1.0, False, norm, None)
    assert norm == np.sqrt(55)


def test_a_norm_is_not_written_into_a_gradient():
    """Gradients are read, and have a place in the table of arrays that must lie apart."""
    room = np.zeros(6)
    for out, other in ((room[2, ...], room[:3]), (room[5, ...], room[3:])):
        with pytest.raises(ValueError, match=r"out shares memory with grads\[1\]"):
            gradkit.grad_norm([np.ones(2), other], out=out)
        with pytest.raises(ValueError, match="norm_out shares memory with"):
            gradkit.accumulate_grads([np.zeros(3)], [other], norm_out=out)
    assert gradkit.grad_norm([np.full(4, 2.0)], out=room[5, ...]) == 4


def test_a_list_that_is_none_is_looked_at_by_name():
    for _ in range(2):  # also when there is a plan
        assert gradkit.grad_norm(None) == 0
        assert gradkit.clip_grad_norm(None, 1.0) == 0
        with pytest.raises(ValueError, match=r"buffers\[0\] has no counterpart"):
            gradkit.accumulate_grads([np.ones(2)], None)
        gradkit.grad_norm([np.ones(2)])


def test_dicts_that_do_not_fit_are_told_apart_by_name():
    """The plan says only that they do not fit: the error names the caller's containers."""
    buffers, grads = {"a": np.ones(2, "f2"), "b": np.ones(2)}, {"a": np.ones(2), "b": np.ones(2)}
    for _ in range(2):
        with pytest.raises(TypeError, match=r"grads\['a'\] has dtype float64 and buffers\['a'\]"):
            gradkit.accumulate_grads(buffers, grads)
        with pytest.raises(TypeError, match=r"params\['a'\] has dtype float64 and averages\['a'\]"):
            gradkit.ema_update(buffers, grads, 0.5)
