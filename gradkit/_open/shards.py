"""A rank's own parts of gradients that are spread over ranks."""

from collections.abc import Iterator, Mapping
from typing import Any


class Parts(dict[Any, Any]):
    """Base class of ``gradkit.distributed.ShardedGrads``, for the code below it."""

    replicas: dict[Any, Any]  # on how many ranks each part lies
    ownership: Any = None  # what the ranks of a group found out, and `replicas` follow from

    def __init__(self, parts: Mapping[Any, Any], replicas: Mapping[Any, Any]):
        super().__init__(parts)
        self.replicas = dict(replicas)

    def like(self, parts: Mapping[Any, Any]) -> "Parts":
        """Other arrays in the place of these, which lie on as many ranks."""
        others = type(self)(parts, self.replicas)
        if self.ownership is not None:
            others.ownership, others.replicas = self.ownership, self.replicas
        return others


def replicas_in(tree: Any) -> Any:
    """Number of ranks that hold each gradient, read from a frozen tree's parts; 1 without parts."""
    if isinstance(tree, Parts):
        return tree.replicas
    if isinstance(tree, Mapping):
        branches = {key: replicas_in(branch) for key, branch in tree.items()}
        return branches if any(each != 1 for each in branches.values()) else 1
    if isinstance(tree, (list, tuple)):
        below = [replicas_in(branch) for branch in tree]
        return below if any(each != 1 for each in below) else 1
    return 1


def parts_in(tree: Any) -> Iterator[Parts]:
    """All parts in a frozen tree."""
    if isinstance(tree, Parts):
        yield tree
    elif isinstance(tree, (Mapping, list, tuple)):
        for branch in tree.values() if isinstance(tree, Mapping) else tree:
            yield from parts_in(branch)


def ownership_in(tree: Any) -> Any:
    """Ownership that a group found for the parts in a frozen tree, if any; two are an error."""
    owned = [parts.ownership for parts in parts_in(tree) if parts.ownership is not None]
    if len(owned) > 1:
        raise ValueError(
            "grads holds two results of shards_of with a group; pass all parameters to one call"
        )
    return owned[0] if owned else None
