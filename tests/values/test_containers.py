"""Results in containers of the caller's types, which no library need know."""

from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

import gradkit

Pair = namedtuple("Pair", ["w", "b"])


class Half(NamedTuple("Half", [("w", Any), ("b", Any)])):
    """Its constructor takes something else."""

    def __new__(cls, whole):
        return super().__new__(cls, whole / 2, whole / 2)


class Named(dict):
    """Has more than its items."""

    def __init__(self, items=(), title="untitled"):
        super().__init__(items)
        self.title = title


class Rows(list):
    pass


class Fixed(tuple):
    __slots__ = ()


class Titled(tuple):
    pass


W, B = np.array([3.0, 0.0]), np.array([4.0])
ITEMS = {"w": W, "b": B}
KINDS = {
    "OrderedDict": OrderedDict(ITEMS),
    "defaultdict": defaultdict(list, ITEMS),
    "Counter": Counter(ITEMS),
    "dict's subclass": Named(ITEMS, "mine"),
    "namedtuple": Pair(W, B),
    "namedtuple of another constructor": Half._make([W, B]),
    "list's subclass": Rows([W, B]),
    "tuple's subclass": Titled([W, B]),
    "deque": deque([W, B], maxlen=3),
    "nested": OrderedDict(a=Pair(Rows([W]), None), none=None, b=defaultdict(int, b=Fixed([B]))),
    "without arrays": OrderedDict(a=Pair(None, ())),
}
KINDS["tuple's subclass"].title = "mine"
OTHERS = {"mapping proxy": MappingProxyType(ITEMS), "UserDict": UserDict(ITEMS)}
FUNCTIONS = {
    "clip_by_global_norm": lambda g: gradkit.clip_by_global_norm(g, 2.5)[0],
    "clip_by_global_norm, some": lambda g: gradkit.clip_by_global_norm(
        g, 2.5, count=lambda _, own: own.size > 1, clip=lambda _, own: own.size > 1
    )[0],
    "clip_by_block_norm": lambda g: gradkit.clip_by_block_norm(g, 2.5)[0],
    "norms of clip_by_block_norm": lambda g: gradkit.clip_by_block_norm(g, 2.5)[1],
    "clip_grad_block_norm": lambda g: gradkit.clip_grad_block_norm(g, 10.0),
    "clip_by_adaptive_norm": lambda g: gradkit.clip_by_adaptive_norm(g, g, 0.1)[0],
    "clip_grad_adaptive": lambda g: gradkit.clip_grad_adaptive(g, g, 10.0),
    "per_tensor_norms": gradkit.per_tensor_norms,
}


def plain(tree):
    """The same of plain dicts and lists."""
    if isinstance(tree, (dict, UserDict, MappingProxyType)):
        return {key: plain(branch) for key, branch in tree.items()}
    return list(map(plain, tree)) if isinstance(tree, (list, tuple, deque)) else tree


def assert_same_kinds(got, like, path="result"):
    if like is None or isinstance(like, np.ndarray):
        assert (got is None) == (like is None), path
        return
    assert type(got) is type(like), path
    assert len(got) == len(like), path
    assert getattr(got, "__dict__", None) == getattr(like, "__dict__", None), path
    assert getattr(got, "default_factory", None) is getattr(like, "default_factory", None), path
    assert getattr(got, "maxlen", None) == getattr(like, "maxlen", None), path
    if isinstance(like, dict):
        assert [*got] == [*like], path
        got, like = list(got.values()), list(like.values())
    for k, pair in enumerate(zip(got, like, strict=True)):
        assert_same_kinds(*pair, f"{path}[{k}]")


def arrays_in(tree):
    if isinstance(tree, dict):
        tree = list(tree.values())
    return [a for one in tree for a in arrays_in(one)] if isinstance(tree, list) else [tree]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_results_are_in_containers_of_the_same_types(kind, function):
    tree, call = KINDS[kind], FUNCTIONS[function]
    got = call(tree)
    assert_same_kinds(got, tree)
    for one, other in zip(*(arrays_in(plain(t)) for t in (got, call(plain(tree)))), strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(W, [3, 0])


@pytest.mark.parametrize("kind", OTHERS)
def test_other_mappings_become_dicts(kind):
    tree = OTHERS[kind]
    clipped, norm = gradkit.clip_by_global_norm([tree], 2.5)
    assert type(clipped[0]) is dict
    assert norm == 5
    np.testing.assert_array_equal(clipped[0]["b"], [2])


def test_functions_in_place_give_back_the_callers_own():
    tree = KINDS["nested"]
    assert gradkit.clip_grad_norm(tree, 100.0) == 5
    assert gradkit.accumulate_grads(tree, tree, do_update=False) is tree
    (given,) = gradkit.accumulate_grads((one for one in [tree]), [tree], do_update=False)
    assert_same_kinds(given, tree)
    assert given["a"].w[0] is W


def test_pairs_of_containers_of_other_types():
    """By key and by position, as always; results are of the gradients' types."""
    params = {"b": np.array([2.0]), "w": np.array([0.0, 1.0])}
    for kind in ("OrderedDict", "dict's subclass"):
        clipped, _ = gradkit.clip_by_adaptive_norm(KINDS[kind], params, 1.0)
        assert_same_kinds(clipped, KINDS[kind])
        np.testing.assert_allclose(clipped["w"], [1.0, 0.0])
        np.testing.assert_allclose(clipped["b"], [2.0])
    out = OrderedDict(b=np.empty(1), w=np.empty(2))
    assert gradkit.clip_by_global_norm(ITEMS, 2.5, out=(out, None))[0] is out
    np.testing.assert_array_equal(out["b"], [2])
    assert gradkit.names_of(KINDS["nested"]) == ["a.0.0", "b.b.0"]


class Frozen(dict):
    def __setitem__(self, key, value):
        raise RuntimeError("is frozen")


def test_a_type_of_which_no_other_can_be_made_is_named():
    tree = {"a": Frozen(ITEMS)}
    assert gradkit.grad_norm(tree) == 5
    assert gradkit.clip_grad_norm(tree, 10.0) == 5
    said = r"no tests\.values\.test_containers\.Frozen can be made .*is frozen.*pass a dict"
    for call in (FUNCTIONS["clip_by_global_norm"], FUNCTIONS["per_tensor_norms"]):
        with pytest.raises(TypeError, match=said):
            call(tree)
    out = {"a": {key: np.empty_like(array) for key, array in ITEMS.items()}}
    np.testing.assert_array_equal(
        gradkit.clip_by_global_norm(tree, 2.5, out=(out, None))[0]["a"]["b"], [2]
    )


def test_what_no_library_knows_is_no_container():
    with pytest.raises(TypeError, match=r"grads\['a'\] is a SimpleNamespace; expected an array"):
        gradkit.clip_by_global_norm({"a": SimpleNamespace(w=W)}, 1.0)
