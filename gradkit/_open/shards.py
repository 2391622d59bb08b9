"""A rank's own parts of gradients that are spread over ranks."""

from collections.abc import Mapping
from typing import Any


class Parts(dict[Any, Any]):
    """What ``gradkit.distributed.ShardedGrads`` is to the code below it."""

    replicas: dict[Any, Any]  # on how many ranks each part lies

    def __init__(self, parts: Mapping[Any, Any], replicas: Mapping[Any, Any]):
        super().__init__(parts)
        self.replicas = dict(replicas)


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


def holds_shards(tree: Any) -> bool:
    """Whether there are parts in a frozen tree."""
    if isinstance(tree, Parts):
        return True
    branches = tree.values() if isinstance(tree, Mapping) else tree
    return isinstance(tree, (Mapping, list, tuple)) and any(map(holds_shards, branches))
