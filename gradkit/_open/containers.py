"""Containers that are no plain dict, list or tuple: what is in them, and others of their type."""

import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, ValuesView
from copy import copy
from functools import partial
from operator import is_
from typing import Any, TypeAlias

# Makes a container of branches by key, or of branches in order.
Make: TypeAlias = Callable[[Any], Any]

_PLAIN = {dict, list, tuple}
_STANDARD = {OrderedDict, defaultdict, deque}


class OpenedMapping(dict[Any, Any]):
    """The branches of a container by key, and how one of its type is made of others."""

    __slots__ = ("make",)

    def __init__(self, branches: Mapping[Any, Any], make: Make):
        super().__init__(branches)
        self.make = make

    def like(self, branches: Mapping[Any, Any]) -> "OpenedMapping":
        return OpenedMapping(branches, self.make)


class OpenedSequence(list[Any]):
    """The same of a container that has positions."""

    __slots__ = ("make",)

    def __init__(self, branches: Iterable[Any], make: Make):
        super().__init__(branches)
        self.make = make

    def like(self, branches: Iterable[Any]) -> "OpenedSequence":
        return OpenedSequence(branches, self.make)


class Attribute(str):
    """A key by which a branch is reached as an attribute."""

    __slots__ = ()


def opened(tree: Any) -> OpenedMapping | OpenedSequence | None:
    """A container of another type, if it is one; none is imported to find that out."""
    kind = type(tree)
    if kind in _PLAIN:
        return None
    if isinstance(tree, (OpenedMapping, OpenedSequence)):
        return tree
    if not (kind in _STANDARD or _is_named_tuple(tree)):
        for flatten in (_by_jax, _by_optree, _by_torch):
            container = flatten(tree)
            if container is not None:
                return container
    if isinstance(tree, dict):
        return OpenedMapping(tree, partial(_filled, tree))
    if isinstance(tree, (list, tuple, deque)):
        return OpenedSequence(tree, partial(_filled, tree))
    return None


def closed(container: Any) -> Any:
    """A container of the caller's type, of what it had and now holds."""
    if not isinstance(container, (OpenedMapping, OpenedSequence)):
        return container
    return container.make(container)


def _filled(tree: Any, branches: Any) -> Any:
    """A container like one of the standard library's, or of a type that is made from it."""
    kind = type(tree)
    try:
        if isinstance(tree, tuple):
            like = _tuple_like(tree, branches)
        else:
            like = copy(tree)
            for key, branch in branches.items() if isinstance(tree, dict) else enumerate(branches):
                like[key] = branch
        if type(like) is kind and len(like) == len(branches):
            return like
        why = f"a copy of one is a {type(like).__name__} of {len(like)} items"
    except Exception as error:  # the caller's type's own
        why = f"{type(error).__name__}: {error}"
    raise TypeError(
        f"no {kind.__module__}.{kind.__qualname__} can be made for results ({why}); pass a dict or "
        "a list, or register the type with jax.tree_util.register_pytree_node"
    )


def _tuple_like(tree: Any, branches: list[Any]) -> Any:
    kind = type(tree)
    if _is_named_tuple(tree):
        like = kind._make(branches)  # not its constructor, which may take something else
    else:
        try:
            like = tuple.__new__(kind, branches)
        except TypeError:  # a structure of C's
            return kind(branches)
    getattr(like, "__dict__", {}).update(getattr(tree, "__dict__", {}))
    return like


def _is_named_tuple(tree: Any) -> bool:
    return isinstance(tree, tuple) and hasattr(tree, "_fields") and hasattr(tree, "_make")


def _by_jax(tree: Any) -> OpenedMapping | OpenedSequence | None:
    util = getattr(sys.modules.get("jax"), "tree_util", None)
    # JAX warns of an iterator that is a leaf, and will refuse it.
    if util is None or isinstance(tree, (Iterator, ValuesView)):
        return None
    pairs, structure = util.tree_flatten_with_path(tree, is_leaf=lambda each: each is not tree)
    if len(pairs) == 1 and not pairs[0][0]:
        return None
    keys = [_key_of(path[0]) for path, _ in pairs]
    return _registered(tree, [branch for _, branch in pairs], keys, structure.unflatten)


def _key_of(entry: Any) -> Any:
    """A key as ``jax.tree_util`` has it."""
    if hasattr(entry, "name"):
        return Attribute(entry.name)
    return getattr(entry, "key", getattr(entry, "idx", entry))


def _by_optree(tree: Any) -> OpenedMapping | OpenedSequence | None:
    optree = sys.modules.get("optree")
    if optree is None or optree.tree_is_leaf(tree):
        return None
    branches, metadata, keys, unflatten = optree.tree_flatten_one_level(tree)
    return _registered(tree, branches, list(keys), partial(unflatten, metadata))


def _by_torch(tree: Any) -> OpenedMapping | OpenedSequence | None:
    pytree = sys.modules.get("torch.utils._pytree")
    if pytree is None:
        return None
    branches, structure = pytree.tree_flatten(tree, is_leaf=lambda each: each is not tree)
    if structure.is_leaf():
        return None
    unflatten = partial(pytree.tree_unflatten, treespec=structure)
    return _registered(tree, branches, list(range(len(branches))), unflatten)


def _registered(
    tree: Any, branches: Sequence[Any], keys: list[Any], unflatten: Make
) -> OpenedMapping | OpenedSequence:
    """A container that a library knows, opened by the caller's keys in the caller's order."""
    if isinstance(tree, (list, tuple)) and len(tree) == len(branches):
        return OpenedSequence(branches, unflatten)
    order = keys
    if isinstance(tree, Mapping) and len(tree) == len(branches):
        if {*tree} == {*keys}:
            order = [*tree]
        elif all(map(is_, tree.values(), branches)):  # the library has no keys
            order = keys = [*tree]
    by_key = dict(zip(keys, branches, strict=True))
    in_order = {key: by_key[key] for key in order}
    return OpenedMapping(in_order, lambda values: unflatten([values[key] for key in keys]))
