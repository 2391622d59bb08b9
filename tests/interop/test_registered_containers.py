"""Containers that JAX, optree or PyTorch know as pytrees come back as what they were."""

import dataclasses
import warnings
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gradkit

from .libraries import framework

Pair = namedtuple("Pair", ["w", "b"])
LIBRARIES = ("jax", "optree", "torch")


@cache
def kinds_of(library):
    """Types that this library alone knows, and how it describes a tree."""

    class FrozenMapping(Mapping):
        """A mapping that is no dict, such as flax's FrozenDict, in whose order keys are kept."""

        def __init__(self, items):
            self._items = dict(items)

        def __getitem__(self, key):
            return self._items[key]

        def __iter__(self):
            return iter(self._items)

        def __len__(self):
            return len(self._items)

    @dataclasses.dataclass(frozen=True)
    class Layer:
        w: Any
        none: Any
        b: Any
        name: str

    class Rows(list):
        """A list of a type that is registered."""

    class Bag:
        """No mapping and no sequence, and it can be iterated over."""

        def __init__(self, *items):
            self.items = items

        def __iter__(self):
            return iter(self.items)

    class Box:
        """Around one array, whose shape it has, such as flax's Param."""

        def __init__(self, value):
            self.value = value

        @property
        def shape(self):
            return self.value.shape

    def by_keys(tree):
        keys = sorted(tree) if library != "torch" else list(tree)
        return [tree[key] for key in keys], tuple(keys)

    registered = {
        FrozenMapping: (by_keys, lambda keys, own: FrozenMapping(zip(keys, own, strict=True))),
        Layer: (lambda t: ([t.b, t.none, t.w], t.name), lambda n, own: Layer(*own[::-1], n)),
        Rows: (lambda t: (list(t), None), lambda _, own: Rows(own)),
        Bag: (lambda t: (list(t.items), None), lambda _, own: Bag(*own)),
        Box: (lambda t: ([t.value], None), lambda _, own: Box(*own)),
    }
    structure = REGISTER[library](registered)
    own = {kind.__name__: kind for kind in registered}
    return SimpleNamespace(structure=structure, **own)


def with_jax(registered):
    util = framework("jax").tree_util
    for kind, (flatten, unflatten) in registered.items():
        if kind.__name__ == "Layer":
            util.register_dataclass(kind, ["b", "none", "w"], ["name"])
        elif issubclass(kind, Mapping):

            def with_keys(tree, flatten=flatten):
                branches, keys = flatten(tree)
                return [(util.DictKey(k), b) for k, b in zip(keys, branches, strict=True)], keys

            util.register_pytree_with_keys(kind, with_keys, unflatten, flatten)
        else:
            util.register_pytree_node(kind, flatten, unflatten)
    return util.tree_structure


def with_optree(registered):
    optree = framework("optree")
    everywhere = getattr(optree.registry, "__GLOBAL_NAMESPACE")
    for kind, (flatten, unflatten) in registered.items():
        by_key = (lambda t, f=flatten: (*f(t), f(t)[1])) if issubclass(kind, Mapping) else flatten
        optree.register_pytree_node(kind, by_key, unflatten, namespace=everywhere)
    return lambda tree: optree.tree_structure(tree, none_is_leaf=True)


def with_torch(registered):
    framework("torch")
    from torch.utils import _pytree

    for kind, (flatten, unflatten) in registered.items():
        _pytree.register_pytree_node(kind, flatten, lambda own, aux, make=unflatten: make(aux, own))
    return lambda tree: _pytree.tree_flatten(tree)[1]


REGISTER = {"jax": with_jax, "optree": with_optree, "torch": with_torch}


def trees_of(kinds, arrays):
    """Trees of the arrays w and b, in each kind of container."""
    w, b = arrays
    return {
        "mapping": kinds.FrozenMapping({"w": w, "b": b}),
        "dataclass": kinds.Layer(w, None, b, "first"),
        "list": kinds.Rows([w, b]),
        "iterable": kinds.Bag(w, b),
        "boxes": kinds.Bag(kinds.Box(w), kinds.Box(b)),
        "empty": kinds.Bag(),
        "nested": OrderedDict(
            z=kinds.FrozenMapping({"w": Pair(w, None), "a": kinds.Rows([])}),
            a=defaultdict(list, {"b": kinds.Layer(kinds.Bag(None, b), None, (), "second")}),
        ),
    }


FUNCTIONS = {
    "clip_by_global_norm": lambda g: gradkit.clip_by_global_norm(g, 2.5)[0],
    "clip_by_block_norm": lambda g: gradkit.clip_by_block_norm(g, 2.5)[0],
    "norms of clip_by_block_norm": lambda g: gradkit.clip_by_block_norm(g, 2.5)[1],
    "clip_by_adaptive_norm": lambda g: gradkit.clip_by_adaptive_norm(g, g, 0.1)[0],
    "per_tensor_norms": gradkit.per_tensor_norms,
}
ARRAYS = {
    "numpy": lambda: [np.array([3.0, 0.0], "f4"), np.array([4.0], "f4")],
    "jax": lambda: list(map(framework("jax").numpy.asarray, ARRAYS["numpy"]())),
    "torch": lambda: list(map(framework("torch").from_numpy, ARRAYS["numpy"]())),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("arrays", ARRAYS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_results_are_in_containers_of_the_same_types(library, arrays, function):
    kinds, call = kinds_of(library), FUNCTIONS[function]
    ref = call(dict(zip("wb", ARRAYS[arrays](), strict=True)))
    trees, wanted = (trees_of(kinds, own) for own in (ARRAYS[arrays](), ref.values()))
    for name, tree in trees.items():
        found = call(tree)
        assert type(found) is type(tree)
        assert kinds.structure(found) == kinds.structure(tree) == kinds.structure(wanted[name])
        assert_same_leaves(found, wanted[name])


def assert_same_leaves(found, wanted):
    kind = type(wanted).__name__
    assert type(found).__name__ == kind
    if isinstance(wanted, Mapping):  # a registered one may be unflattened in another order
        found, wanted = [found[key] for key in wanted], list(wanted.values())
    elif kind == "Layer":
        assert found.name == wanted.name
        found, wanted = ([own.w, own.none, own.b] for own in (found, wanted))
    elif kind == "Box":
        found, wanted = [found.value], [wanted.value]
    elif wanted is None or not (kind == "Bag" or isinstance(wanted, (list, tuple))):
        np.testing.assert_array_equal(*([np.asarray(a)] for a in (found, wanted)))
        return
    for pair in zip(found, wanted, strict=True):
        assert_same_leaves(*pair)


@pytest.mark.parametrize("library", LIBRARIES)
def test_leaves_are_named_and_paired_by_key(library):
    kinds = kinds_of(library)
    w, b = ARRAYS["numpy"]()
    tree = kinds.FrozenMapping({"w": w, "b": b})
    assert gradkit.names_of(tree) == ["w", "b"]
    params = {"b": np.array([2.0], "f4"), "w": np.array([0.0, 1.0], "f4")}
    clipped, _ = gradkit.clip_by_adaptive_norm(tree, params, 1.0)
    np.testing.assert_allclose(clipped["w"], [1, 0])
    np.testing.assert_allclose(clipped["b"], [2])
    out = {"b": np.empty(1, "f4"), "w": np.empty(2, "f4")}
    gradkit.clip_by_global_norm(tree, 2.5, out=(out, None))
    np.testing.assert_array_equal(out["b"], [2])
    assert gradkit.clip_grad_norm(tree, 2.5) == 5
    np.testing.assert_array_equal(tree["w"], [1.5, 0])
    with pytest.raises(TypeError, match=r"grads\['w'\] has dtype int"):
        gradkit.grad_norm(kinds.FrozenMapping({"w": np.ones(2, int), "b": b}))
    sums = kinds.Bag(np.zeros(2), np.zeros(1))
    assert gradkit.accumulate_grads(sums, kinds.Bag(w, b)) is sums
    (given,) = gradkit.accumulate_grads((one for one in [sums]), [kinds.Bag(w, b)])
    assert type(given) is kinds.Bag
    np.testing.assert_array_equal(sums.items[0], 2 * w)


def test_attributes_are_named_as_such():
    kinds = kinds_of("jax")
    tree = kinds.Layer(np.ones(2, int), None, np.ones(1), "first")
    with pytest.raises(TypeError, match=r"grads\[0\]\.w has dtype int64"):
        gradkit.clip_by_global_norm([tree], 1.0)
    with pytest.raises(ValueError, match=r"params has no array for grads|params\.w has shape"):
        gradkit.clip_by_adaptive_norm(
            kinds.Layer(np.ones(2), None, np.ones(1), ""),
            kinds.Layer(np.ones(3), None, np.ones(1), ""),
            0.1,
        )
    assert gradkit.names_of([tree]) == ["0.b", "0.w"]


def test_sparse_arrays_are_no_containers():
    sparse = framework("jax.experimental.sparse")
    with pytest.raises(TypeError, match="grads is a BCOO; expected an array"):
        gradkit.grad_norm(sparse.BCOO.fromdense(np.eye(2, dtype="f4")))


def test_of_an_array_that_holds_another_shape_nothing_is_known(monkeypatch):
    kinds = kinds_of("jax")
    monkeypatch.setattr(kinds.Box, "shape", (2, 2))
    with pytest.raises(TypeError, match="Box; expected an array"):
        gradkit.grad_norm(kinds.Box(np.ones(3)))


@pytest.mark.parametrize(
    "one_shot", [iter, lambda g: (each for each in g), lambda g: dict(enumerate(g)).values()]
)
def test_jax_is_not_asked_about_iterators(one_shot):
    """It warns of each, and a later version will refuse them."""
    framework("jax")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert gradkit.grad_norm(one_shot([np.full(1, 3.0), np.full(1, 4.0)])) == 5


def test_steps_of_optax_and_functions_inside_of_jit():
    jax = framework("jax")
    optax = framework("optax")
    import gradkit.jax
    from gradkit.jax import transforms

    kinds = kinds_of("jax")
    params = trees_of(kinds, [jax.numpy.ones(2), jax.numpy.ones(1)])
    for name, tree in trees_of(kinds, ARRAYS["jax"]()).items():
        inside = jax.jit(lambda g: gradkit.jax.clip_by_global_norm(g, 2.5)[0])
        for clip in (FUNCTIONS["clip_by_global_norm"], inside):
            stepped = optax.apply_updates(params[name], clip(tree))
            assert kinds.structure(stepped) == kinds.structure(tree)
        added = gradkit.jax.accumulate_grads(tree, tree)
        assert kinds.structure(added) == kinds.structure(tree)
        optimizer = transforms.skip_steps(transforms.accumulate(optax.adam(0.1), 1))
        updates, _ = optimizer.update(tree, optimizer.init(params[name]), params[name])
        assert kinds.structure(updates) == kinds.structure(tree)
