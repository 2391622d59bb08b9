"""Nested containers of gradients: their leaves, the leaves' names, and the way back."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any

IsLeaf = Callable[[Any], bool]

_grad_of = attrgetter("grad")

_DEEPEST = 100  # containers in each other; Python has a thousand frames for all of a program


def freeze(tree: Any, is_leaf: IsLeaf, depth: int = 0) -> Any:
    """The same tree with every one-shot iterable (a generator, a dict view) made a list."""
    if tree is None or is_leaf(tree):
        return tree
    if not isinstance(tree, Iterable) or isinstance(tree, (str, bytes, bytearray)):
        return tree
    if depth == _DEEPEST:
        raise ValueError(
            f"a container holds itself, or there are more than {_DEEPEST} in each other"
        )
    branches = tree.values() if isinstance(tree, Mapping) else tree
    frozen = [freeze(branch, is_leaf, depth + 1) for branch in branches]
    if isinstance(tree, Mapping):
        return _like_mapping(tree, frozen)
    return _like_sequence(tree, frozen) if isinstance(tree, (list, tuple)) else frozen


def leaves(tree: Any, is_leaf: IsLeaf) -> list[Any]:
    """Every leaf of a frozen tree in order; ``None`` leaves are skipped.

    What is neither a container nor ``None`` is a leaf too, so that the caller can name it
    in an error.
    """
    if type(tree) is list and all(map(is_leaf, tree)):
        return tree  # the common case costs one look at each element
    return [leaf for _, leaf in walk(tree, is_leaf, "")]


def names(tree: Any, is_leaf: IsLeaf, root: str) -> Iterator[str]:
    """The expression that reaches each leaf of a frozen tree in order: ``grads['w'][2]``."""
    return (path for path, _ in walk(tree, is_leaf, root))


def rebuild(tree: Any, is_leaf: IsLeaf, replacements: Iterator[Any]) -> Any:
    """The frozen tree with its leaves replaced in order; ``None`` stays ``None``."""
    if tree is None:
        return None
    if isinstance(tree, Mapping) and not is_leaf(tree):
        return _like_mapping(tree, [rebuild(b, is_leaf, replacements) for b in tree.values()])
    if isinstance(tree, (list, tuple)):
        return _like_sequence(tree, [rebuild(b, is_leaf, replacements) for b in tree])
    return next(replacements)


def gradients_of(parameters: Any) -> list[Any]:
    """The ``grad`` of every leaf that has one."""
    if isinstance(parameters, Iterator):
        parameters = list(parameters)
    if type(parameters) in (list, tuple):
        try:  # the common case, such as model.parameters(), costs one look at each element
            return [grad for grad in map(_grad_of, parameters) if grad is not None]
        except AttributeError:  # something else is among them
            pass

    def is_parameter(value: Any) -> bool:
        return hasattr(value, "grad")

    found = leaves(freeze(parameters, is_parameter), is_parameter)
    for leaf in found:
        if not is_parameter(leaf):
            raise TypeError(f"parameters holds a {type(leaf).__qualname__}, which has no .grad")
    return [leaf.grad for leaf in found if leaf.grad is not None]


def walk(tree: Any, is_leaf: IsLeaf, path: str) -> Iterator[tuple[str, Any]]:
    """Every leaf of a frozen tree behind the expression that reaches it from ``path``."""
    if tree is None:
        return
    if is_leaf(tree):
        yield path, tree
    elif isinstance(tree, Mapping):
        for key, branch in tree.items():
            yield from walk(branch, is_leaf, f"{path}[{key!r}]")
    elif isinstance(tree, (list, tuple)):
        for position, branch in enumerate(tree):
            yield from walk(branch, is_leaf, f"{path}[{position}]")
    else:
        yield path, tree


def _like_mapping(tree: Mapping[Any, Any], branches: list[Any]) -> Any:
    return dict(zip(tree, branches, strict=True))


def _like_sequence(tree: list[Any] | tuple[Any, ...], branches: list[Any]) -> Any:
    if isinstance(tree, list):
        return branches
    if hasattr(tree, "_fields"):  # a namedtuple takes its fields one by one
        return type(tree)(*branches)
    return tuple(branches)
