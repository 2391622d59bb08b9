"""A rank's own parts of gradients that are spread over ranks."""

from collections.abc import Iterator, Mapping
from typing import Any


class Parts(dict[Any, Any]):
    """What ``gradkit.distributed.ShardedGrads`` is to the code below it."""

    replicas: dict[Any, Any]  # on how many ranks each part lies
    ownership: Any = None  # what the ranks of a group found out, and `replicas` follow from

    def __init__(self, parts: Mapping[Any, Any], replicas: Mapping[Any, Any]):
        super().__init__(parts)
        self.replicas = dict(replicas)

    def like(self, parts: Mapping[Any, Any]) -> "Parts":
        """Other arrays in the place of these, which lie on as many ranks."""
        made = type(self)(parts, self.replicas)
        if self.ownership is not None:
            made.ownership, made.replicas = self.ownership, self.replicas
        return made


def replicas_in(tree: Any) -> Any:
    """On how many ranks gradients lie, as a frozen tree says it of its parts; 1 if it has none."""
    if isinstance(tree, Parts):
        return tree.replicas
    if isinstance(tree, Mapping):
        said = {key: replicas_in(branch) for key, branch in tree.items()}
        return said if any(each != 1 for each in said.values()) else 1
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
    """What a group found out of the parts in a frozen tree, if it did; an error if it did twice."""
    found = [parts.ownership for parts in parts_in(tree) if parts.ownership is not None]
    if len(found) > 1:
        raise ValueError(
            "grads holds two results of shards_of with a group; pass all parameters to one call"
        )
    return found[0] if found else None
