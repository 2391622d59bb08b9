"""Nested containers of gradients: their leaves, the leaves' names, and the way back."""

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, zip_longest
from operator import attrgetter
from types import GeneratorType
from typing import Any, TypeAlias

import numpy as np

from gradkit._arrays import framework_for, is_array
from gradkit._open.containers import Attribute, OpenedMapping, OpenedSequence, closed, opened
from gradkit._open.shards import Parts

IsLeaf = Callable[[Any], bool]
Keys: TypeAlias = tuple[Any, ...]

_NO_CONTAINERS = (str, bytes, bytearray, array)  # that iterate over their elements
_NO_TREES = (str, bool, int, float, np.generic)
_DEEPEST = 100  # containers in each other; Python has a thousand frames for all of a program


def freeze(tree: Any, is_leaf: IsLeaf = is_array, depth: int = 0) -> Any:
    """The same tree with every one-shot iterable (a generator, a dict view) made a list.

    Containers of other types than dict, list and tuple are opened: what is made of the tree by
    ``rebuild`` has them again.
    """
    if tree is None or is_leaf(tree) or isinstance(tree, _NO_CONTAINERS):
        return tree
    container = None if isinstance(tree, Parts) else opened(tree)
    if hasattr(tree, "shape") and not _is_around_one(tree, container):
        return tree  # an array that is not known, such as a sparse one
    tree = tree if container is None else container
    if not isinstance(tree, Iterable):
        return tree
    if depth == _DEEPEST:
        raise ValueError(
            f"a container holds itself, or there are more than {_DEEPEST} in each other"
        )
    _refuse_spent(tree)
    branches = tree.values() if isinstance(tree, Mapping) else tree
    frozen = [freeze(branch, is_leaf, depth + 1) for branch in branches]
    if isinstance(tree, Mapping):
        return _like_mapping(tree, frozen)
    return _like_sequence(tree, frozen) if isinstance(tree, (list, tuple)) else frozen


def _is_around_one(tree: Any, container: Any) -> bool:
    """True if the opened container holds one array, of the same shape as the object itself."""
    inner = [*container.values()] if isinstance(container, OpenedMapping) else []
    return len(inner) == 1 and getattr(inner[0], "shape", None) == tree.shape


def _refuse_spent(tree: Any) -> None:
    """Raise if a generator has nothing left to give, because something has read it before."""
    if isinstance(tree, GeneratorType) and tree.gi_frame is None:
        raise ValueError(
            f"the generator {tree.__qualname__} has been read before, and gives nothing more; "
            "pass a list, such as grads_of(parameters)"
        )


def leaves(tree: Any, is_leaf: IsLeaf = is_array) -> list[Any]:
    """Every leaf of a frozen tree in order; ``None`` leaves are skipped.

    What is neither a container nor ``None`` is a leaf too, so that the caller can name it
    in an error.
    """
    if type(tree) is list and all(map(is_leaf, tree)):
        return tree  # the common case costs one look at each element
    if is_leaf is is_array and _is_flat(tree):
        return list(tree.values())
    return [leaf for _, leaf in paths(tree, is_leaf)]


def names(tree: Any, root: str) -> Iterator[str]:
    """The expression that reaches each leaf of a frozen tree in order: ``grads['w'][2]``."""
    if _is_flat(tree):
        return (f"{root}[{key!r}]" for key in (tree if type(tree) is dict else range(len(tree))))
    return (path for path, _ in walk(tree, root))


def dotted_names(tree: Any, root: str) -> list[str]:
    """The keys and positions of each leaf of a frozen tree, joined by dots; all are different."""
    if type(tree) is dict and {*map(type, tree)} == {str} and "" not in tree and _is_flat(tree):
        return list(tree)  # the common case costs one look at each
    names: dict[str, None] = {}
    for keys, _ in paths(tree):
        name = ".".join(map(str, keys)) or root
        if name in names:
            raise ValueError(f"{root} has two gradients named {name!r}, by keys that contain dots")
        names[name] = None
    return list(names)


def rebuild(tree: Any, replacements: Iterator[Any], close: Callable[[Any], Any] = closed) -> Any:
    """The caller's container with its leaves replaced in order; ``None`` stays ``None``.

    ``close``: what makes a container of the caller's type; nothing, for another frozen tree.
    """
    if tree is None:
        return None
    if _is_flat(tree):
        branches = islice(replacements, len(tree))
        return list(branches) if type(tree) is list else dict(zip(tree, branches, strict=True))
    if isinstance(tree, Mapping) and not is_array(tree):
        return close(_like_mapping(tree, [rebuild(b, replacements, close) for b in tree.values()]))
    if isinstance(tree, (list, tuple)):
        return close(_like_sequence(tree, [rebuild(b, replacements, close) for b in tree]))
    return next(replacements)


def plain(values: Any) -> Any:
    """The same with lists for tuples, and dicts or lists for containers of other types."""
    if values is None or isinstance(values, _NO_TREES) or callable(values) or is_array(values):
        return values
    container = opened(values)
    tree = values if container is None else container
    if isinstance(tree, Mapping):
        return {key: plain(branch) for key, branch in tree.items()}
    return list(map(plain, tree)) if isinstance(tree, (list, tuple)) else values


def spread(prefix: Any, tree: Any, label: str, other: str) -> Iterator[Any]:
    """Yield the value for each leaf of a frozen tree, from a container that may end above them.

    The prefix has dicts and lists like the tree's containers, down to values that hold for all
    leaves below. ``label`` and ``other`` are what errors call the two.
    """
    if not isinstance(prefix, (Mapping, list)):
        for _ in leaves(tree):
            yield prefix
        return
    if tree is None:
        return
    if is_array(tree):
        raise ValueError(f"{label} is a {type(prefix).__name__}, but {other} is an array")
    branches = dict(_branches(tree))
    values = dict(_branches(prefix))
    if isinstance(tree, Mapping) != isinstance(prefix, Mapping) or branches.keys() != values.keys():
        raise ValueError(
            f"{label} has {_summary(prefix)}, but {other} has {_summary(tree)}; dicts and lists "
            "must be like the containers that they are for"
        )
    kinds = set(map(type, values.values()))
    if _is_flat(tree) and not any(issubclass(kind, (Mapping, list)) for kind in kinds):
        yield from map(values.__getitem__, branches)
        return
    for key, branch in branches.items():
        names = (expression(name, (key,)) for name in (label, other))
        yield from spread(values[key], branch, *names)


def partners(tree: Any, other: Any, label: str, other_label: str) -> Iterator[tuple[str, Any]]:
    """The leaf of another frozen tree at the place of each leaf, behind its name.

    Lists must be of one length; dicts of the other tree may have more entries.
    """
    if tree is None:
        return
    if is_array(tree):
        if not is_array(other):
            raise ValueError(f"{other_label} has no array for {label}")
        yield other_label, other
        return
    branches, others = dict(_branches(tree)), {}
    same_kind = isinstance(tree, Mapping) == isinstance(other, Mapping)
    if same_kind and isinstance(other, (Mapping, list, tuple)) and not is_array(other):
        others = dict(_branches(other))
    missing = branches.keys() - others.keys()
    if missing or not (isinstance(tree, Mapping) or len(others) == len(branches)):
        raise ValueError(
            f"{other_label} has {_summary(other)}, but {label} has {_summary(tree)}; each gradient "
            "needs its parameter at the same place"
        )
    for key, branch in branches.items():
        names = (expression(name, (key,)) for name in (label, other_label))
        yield from partners(branch, others[key], *names)


def in_order_of(tree: Any, other: Any) -> Any:
    """The other frozen tree with the entries of its dicts in the order of the tree's.

    Where the two differ in keys or lengths, it stays as it is.
    """
    if is_array(tree) or is_array(other):
        return other
    if isinstance(tree, Mapping) and isinstance(other, Mapping) and tree.keys() == other.keys():
        branches = [in_order_of(branch, other[key]) for key, branch in tree.items()]
        return _like_mapping(other, branches, tree.keys())
    sequences = isinstance(tree, (list, tuple)) and isinstance(other, (list, tuple))
    if sequences and len(tree) == len(other):
        pairs = zip(tree, other, strict=True)
        return _like_sequence(other, [in_order_of(*pair) for pair in pairs])
    return other


def check_structure(names: Iterable[str], wanted: Iterable[str], label: str, other: str) -> None:
    """Raise unless the names of two trees' leaves are the same, after their labels."""
    for leaf, name in zip_longest(names, wanted):
        if None in (leaf, name) or leaf.removeprefix(label) != name.removeprefix(other):
            message = f"{label} must have the same structure as {other}"
            raise ValueError(f"{message}; {name or leaf} has no counterpart")


def _is_flat(tree: Any) -> bool:
    """True if a list or a dict has nothing but arrays, as most have; each costs one look."""
    kind = type(tree)
    branches = tree if kind is list else tree.values() if kind is dict else (None,)
    return None not in map(framework_for, map(type, branches))


def _branches(tree: Any) -> Iterable[tuple[Any, Any]]:
    return tree.items() if isinstance(tree, Mapping) else enumerate(tree)


def _summary(tree: Any) -> str:
    """Describe a container in a few words, so that it can be compared with another."""
    if isinstance(tree, Mapping):
        return f"the keys {', '.join(map(repr, tree))}" if tree else "no keys"
    if isinstance(tree, (list, tuple)):
        return f"{len(tree)} items"
    return f"a {type(tree).__name__}"


def gradients_of(parameters: Any, attr: str) -> list[Any]:
    """The gradient of every leaf that has one, by the attribute's name."""
    if isinstance(parameters, Iterator):
        _refuse_spent(parameters)
        parameters = list(parameters)
    if type(parameters) in (list, tuple):
        try:  # the common case, such as model.parameters(), costs one look at each element
            grads = [grad for grad in map(attrgetter(attr), parameters) if grad is not None]
            if grads or not parameters:
                refuse_twice(parameters, "parameters")
                return grads
        except AttributeError:  # something else is among them
            pass

    def is_parameter(value: Any) -> bool:
        return hasattr(value, attr)

    every = leaves(freeze(parameters, is_parameter), is_parameter)
    every_grad = [gradient_of(leaf, attr, "parameters holds") for leaf in every]
    refuse_gradients(every, attr, "parameters")
    refuse_twice(every, "parameters")
    return [grad for grad in every_grad if grad is not None]


def gradient_of(parameter: Any, attr: str, label: str) -> Any:
    """One parameter's gradient."""
    try:
        return getattr(parameter, attr)
    except AttributeError:
        kind = type(parameter).__qualname__
        hint = ""
        if isinstance(parameter, str):
            hint = "; pass (name, parameter) pairs to named_grads_of"
        elif hasattr(parameter, "named_parameters"):
            hint = "; pass model.parameters()"
        raise TypeError(f"{label} a {kind}, which has no .{attr}{hint}") from None


def takes_no_gradient(value: Any, attr: str) -> bool:
    """True if a tensor cannot be a parameter, frozen ones included; it may be a gradient.

    Such a gradient may itself be differentiable (``create_graph=True``).
    """
    differentiable = getattr(value, "requires_grad", None)
    if differentiable and not (getattr(value, "is_leaf", True) or value.retains_grad):
        return True
    if differentiable is not False or getattr(value, attr) is not None:
        return False
    # A sharded tensor is made a parameter without a change of its type.
    named = any(kind.__name__ == "Parameter" for kind in type(value).__mro__)
    return not (named or getattr(value, "_is_param", False))


def refuse_gradients(values: Sequence[Any], attr: str, label: str) -> None:
    """Raise if what should be parameters are tensors of which none ever takes a gradient."""
    if values and all(takes_no_gradient(value, attr) for value in values):
        kind = type(values[0]).__qualname__
        raise TypeError(
            f"{label} holds tensors that take no gradients ({kind}); pass parameters, such as "
            "model.parameters(), or gradients themselves to a function such as "
            "gradkit.clip_grad_norm"
        )


def refuse_twice(parameters: Sequence[Any], label: str, names: Sequence[Any] | None = None) -> None:
    """Raise if a parameter occurs twice, as weights that are tied may."""
    if len({*map(id, parameters)}) == len(parameters):
        return
    first: dict[int, Any] = {}
    for place, parameter in zip(names or range(len(parameters)), parameters, strict=True):
        before = first.setdefault(id(parameter), place)
        if before != place:
            raise ValueError(
                f"{label}[{before!r}] and {label}[{place!r}] are one parameter, whose gradient "
                "would count twice; pass each parameter once"
            )


def walk(tree: Any, root: str) -> Iterator[tuple[str, Any]]:
    """Every leaf of a frozen tree behind the expression that reaches it from ``root``."""
    return ((expression(root, keys), leaf) for keys, leaf in paths(tree))


def expression(root: str, keys: Keys) -> str:
    """Return the Python expression of a leaf: ``grads['w'][2]``."""
    return root + "".join(f".{key}" if isinstance(key, Attribute) else f"[{key!r}]" for key in keys)


def paths(tree: Any, is_leaf: IsLeaf = is_array, keys: Keys = ()) -> Iterator[tuple[Keys, Any]]:
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


def _like_mapping(tree: Mapping[Any, Any], branches: list[Any], keys: Iterable[Any] = ()) -> Any:
    mapping = dict(zip(keys or tree, branches, strict=True))
    return tree.like(mapping) if isinstance(tree, (Parts, OpenedMapping)) else mapping


def _like_sequence(tree: list[Any] | tuple[Any, ...], branches: list[Any]) -> Any:
    if isinstance(tree, OpenedSequence):
        return tree.like(branches)
    return branches if isinstance(tree, list) else tuple(branches)
