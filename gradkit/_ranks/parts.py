"""Parameters as a rank has them: names, gradients, and which part of the whole each is."""

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

from gradkit._arrays import framework_of, is_array
from gradkit._open import trees
from gradkit._ranks.collective import Collective
from gradkit._ranks.ownership import Axes, Ownership, Part, whole_of

_SHOWN = 8  # names in an error


class Leaf(NamedTuple):
    """A parameter and its gradient, which may be ``None``; or a gradient by itself, twice."""

    name: Any
    parameter: Any
    grad: Any

    @property
    def tensor(self) -> Any:
        """The tensor whose placements tell which part of the whole a rank has."""
        return self.parameter if self.grad is None else self.grad


def leaves_of(parameters: Any, attr: str) -> list[Leaf]:
    """Every parameter, or gradient by itself, by its name."""
    leaves: dict[Any, Leaf] = {}
    for name, leaf in _named_leaves(parameters, attr):
        if name in leaves:
            raise ValueError(f"parameters has two parameters named {name!r}")
        grad = leaf
        if not _is_gradient(leaf, attr):
            grad = trees.gradient_of(leaf, attr, f"parameter {name!r} is")
        leaves[name] = Leaf(name, leaf, grad)
    parameters_by_name = {
        name: leaf.parameter for name, leaf in leaves.items() if leaf.parameter is not leaf.grad
    }
    trees.refuse_twice([*parameters_by_name.values()], "parameters", [*parameters_by_name])
    return [*leaves.values()]


def parts_by_placement(leaves: list[Leaf], plain: Any) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """The rank's own parts, and how many ranks of the gradient's own mesh hold each."""
    parts: dict[Any, Any] = {}
    replicas: dict[Any, Any] = {}
    for name, _, grad in leaves:
        if grad is not None:
            parts[name], replicas[name] = _part_by_placement(grad, name, plain)
    return parts, replicas


def parts_by_exchange(
    leaves: list[Leaf], names: Any, plain: Any, collective: Collective
) -> tuple[dict[Any, Any], Ownership]:
    """The rank's own parts, and what the ranks of a group know about them."""
    by_name: dict[Any, Any] = {}
    parts: list[Part] = []
    places: list[Any] = []
    key, undecided = [], []
    local_names: dict[str, Any] = {}  # names on all ranks
    for leaf in leaves:
        name = _name_on_all(names, leaf)
        if local_names.setdefault(str(name), leaf.name) != leaf.name:
            raise ValueError(
                f"names gives {name!r} to {local_names[str(name)]!r} and {leaf.name!r}"
            )
        kind = None if collective.alone or _says_where(leaf.tensor) else _kind(plain, leaf)
        if kind == "undecided":
            undecided.append(repr(leaf.name))
            continue
        arrays, runs, place = _placed(leaf, whole=kind == "copies" or collective.alone)
        if kind == "copies" and isinstance(name, int):
            raise ValueError(f"the copies at position {name} have no name; pass named parameters")
        where = place if isinstance(name, int) else ()
        shape = tuple(leaf.tensor.shape)
        parts += [Part(str(name), shape, where, None if kind == "own" else each) for each in runs]
        listed = isinstance(arrays, list)
        places += [None if leaf.grad is None else (leaf.name, listed)] * len(runs)
        key.append((name, shape, where, kind, tuple(runs)))
        if leaf.grad is not None and runs:
            by_name[leaf.name] = arrays
    _refuse(undecided)
    return by_name, Ownership(parts, places, tuple(key), collective)


def _refuse(undecided: list[str]) -> None:
    if undecided:
        more = f" and {len(undecided) - _SHOWN} more" if len(undecided) > _SHOWN else ""
        raise ValueError(
            f"{', '.join(undecided[:_SHOWN])}{more} are plain arrays, which do not say whether "
            'ranks hold copies of them; pass plain="copies", plain="own" if each rank\'s is a '
            "tensor of its own, or a dict or function that says it of each"
        )


def _name_on_all(names: Any, leaf: Leaf) -> Any:
    """Name of a parameter on all ranks."""
    if isinstance(names, Mapping):
        return names.get(leaf.name, leaf.name)
    return leaf.name if names is None else names(leaf.name, leaf.parameter)


def _kind(plain: Any, leaf: Leaf) -> str:
    """Kind of a plain tensor: "copies", "own" or "undecided"."""
    kind = plain
    if isinstance(plain, Mapping):
        kind = plain.get(leaf.name)
    elif callable(plain):
        kind = plain(leaf.name, leaf.parameter)
    if kind is None:
        return "undecided"
    if kind == 1 and not isinstance(kind, bool):
        return "own"
    if kind not in ("copies", "own"):
        raise ValueError(f'plain is {kind!r} for {leaf.name!r}; with a group: "copies" or "own"')
    return str(kind)


def _says_where(tensor: Any) -> bool:
    """True if placements tell which ranks hold what."""
    if _is_jax(tensor):
        return not tensor.is_fully_addressable
    return hasattr(tensor, "placements")


def _placed(leaf: Leaf, *, whole: bool) -> tuple[Any, list[Axes | None], Any]:
    """A rank's own array or arrays, the indices of each, and the ranks of its mesh."""
    tensor = leaf.tensor
    if _is_jax(tensor):
        from gradkit._ranks.jax import indices_of

        arrays, indices = indices_of(tensor)
        return arrays, [*indices], ()
    if hasattr(tensor, "placements"):
        from gradkit._ranks.torch import indices_in

        local, _ = _shard_of(tensor, leaf.name)
        return local, *_named(indices_in, leaf.name, tensor, local)
    return tensor, [whole_of(tensor.shape) if whole else None], ()


def _part_by_placement(grad: Any, name: Any, plain: Any) -> tuple[Any, Any]:
    """The rank's own part of a gradient or parts, and on how many ranks each lies."""
    if _is_jax(grad):
        from gradkit._ranks.jax import shards_of as shards_of_jax

        parts = shards_of_jax(grad)
        return [part for part, _ in parts], [count for _, count in parts]
    if hasattr(grad, "placements"):
        return _shard_of(grad, name)
    if framework_of(grad) is not None and plain is None:
        raise ValueError(
            f"the gradient of {name!r} is a plain array, which does not say on how many ranks it "
            "lies; pass plain=1 if each rank has its own, or how many ranks hold a copy of it"
        )
    if not isinstance(plain, int) and plain != "own":
        raise ValueError("plain is a number of ranks, unless ranks find it out: pass group")
    return grad, 1 if plain == "own" else plain


def _shard_of(tensor: Any, name: Any) -> tuple[Any, int]:
    from gradkit._ranks.torch import shard_of

    return shard_of(tensor, f"the gradient of {name!r}")


def _named(function: Callable[..., Any], name: Any, *arguments: Any) -> Any:
    """Call a function; an error of it names the gradient."""
    try:
        return function(*arguments)
    except ValueError as error:
        raise ValueError(f"the gradient of {name!r} {error}") from None


def _named_leaves(parameters: Any, attr: str) -> Iterator[tuple[Any, Any]]:
    """Every parameter or JAX array by its name, or by its position."""

    def is_leaf(value: Any) -> bool:
        return _is_jax(value) or hasattr(value, attr)

    tree = trees.freeze(parameters, is_leaf)
    if isinstance(tree, list) and all(_is_pair(item) for item in tree):
        pairs = [trees.paths(branch, is_leaf, (name,)) for name, branch in tree]
    else:
        pairs = [trees.paths(tree, is_leaf)]
    for keys, leaf in chain.from_iterable(pairs):
        yield keys[0] if len(keys) == 1 else ".".join(map(str, keys)), leaf


def _is_pair(item: Any) -> bool:
    return isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)


def _is_gradient(value: Any, attr: str) -> bool:
    """True if a leaf is no parameter, but a gradient itself."""
    if _is_jax(value):
        return True
    tensor = is_array(value) or hasattr(value, "placements")
    return tensor and hasattr(value, attr) and trees.takes_no_gradient(value, attr)


def _is_jax(value: Any) -> bool:
    return is_array(value) and hasattr(value, "addressable_shards")
