"""Nested containers of gradients: their leaves, the leaves' names, and the way back."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any, TypeAlias

IsLeaf = Callable[[Any], bool]
Keys: TypeAlias = tuple[Any, ...]

_DEEPEST = 100  # containers in each other; Python has a thousand frames for all of a program


def freeze(tree: Any, is_leaf: IsLeaf, depth: int = 0) -> Any:
    """The same tree with every one-shot iterable (a generator, a dict view) made a list."""
    if tree is None or is_leaf(tree):
        return tree
    if not isinstance(tree, Iterable) or isinstance(tree, (str, bytes, bytearray)):
        return tree
    if hasattr(tree, "shape"):  # an array that is not known: a sparse one, say
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
    return [leaf for _, leaf in paths(tree, is_leaf)]


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


def gradients_of(parameters: Any, attr: str) -> list[Any]:
    """The gradient of every leaf that has one, by the attribute's name."""
    if isinstance(parameters, Iterator):
        parameters = list(parameters)
    if type(parameters) in (list, tuple):
        try:  # the common case, such as model.parameters(), costs one look at each element
            return [grad for grad in map(attrgetter(attr), parameters) if grad is not None]
        except AttributeError:  # something else is among them
            pass

    def is_parameter(value: Any) -> bool:
        return hasattr(value, attr)

    tree = freeze(parameters, is_parameter)
    found = [gradient_of(leaf, attr, "parameters holds") for leaf in leaves(tree, is_parameter)]
    return [grad for grad in found if grad is not None]


def gradient_of(parameter: Any, attr: str, label: str) -> Any:
    """One parameter's gradient."""
    try:
        return getattr(parameter, attr)
    except AttributeError as error:
        kind = type(parameter).__qualname__
        raise TypeError(f"{label} a {kind}, which has no .{attr}") from error


def walk(tree: Any, is_leaf: IsLeaf, root: str) -> Iterator[tuple[str, Any]]:
    """Every leaf of a frozen tree behind the expression that reaches it from ``root``."""
    return ((expression(root, keys), leaf) for keys, leaf in paths(tree, is_leaf))


def expression(root: str, keys: Keys) -> str:
    """What reaches a leaf in Python: ``grads['w'][2]``."""
    return root + "".join(f"[{key!r}]" for key in keys)


def paths(tree: Any, is_leaf: IsLeaf, keys: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Every leaf of a frozen tree behind the keys and positions that lead to it."""
    if tree is None:
        return
    if is_leaf(tree):
        yield keys, tree
    elif isinstance(tree, Mapping):
        for key, branch in tree.items():
            yield from paths(branch, is_leaf, (*keys, key))
    elif isinstance(tree, (list, tuple)):
        for position, branch in enumerate(tree):
            yield from paths(branch, is_leaf, (*keys, position))
    else:
        yield keys, tree


def _like_mapping(tree: Mapping[Any, Any], branches: list[Any]) -> Any:
    return dict(zip(tree, branches, strict=True))


def _like_sequence(tree: list[Any] | tuple[Any, ...], branches: list[Any]) -> Any:
    if isinstance(tree, list):
        return branches
    if hasattr(tree, "_fields"):  # a namedtuple takes its fields one by one
        return type(tree)(*branches)
    return tuple(branches)
