"""Statistics of gradients by name: of those given here, or of those of all ranks."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from gradkit import _numpy
from gradkit._backend import FLOAT64, Spec
from gradkit._calls.lists import STATS, STATS_PART, ListStats
from gradkit._calls.roles import Numbers
from gradkit._open import trees
from gradkit._open.gradients import Gradients
from gradkit._open.shards import Parts
from gradkit._ranks.named_rows import Names, of_all
from gradkit._ranks.norms import Ranks, beside, copies_of, ownership_of
from gradkit._ranks.ownership import Ownership

_SHARED = [0, 1, 3, 4, 7, 8, 9]  # of a row: what copies count a fraction of


def statistics_of(grads: Any, ranks: Ranks, out: Any) -> tuple[Names, Any]:
    """Names, and for each a row of statistics."""
    near = partial(beside, ranks, out, None)
    gradients = Gradients(grads, beside=near, several=True)
    with gradients.on_stream():
        copies_of(gradients, ranks)  # which refuses parts without a group
        owned = ownership_of(gradients, ranks)
        names = _names_of(gradients, owned)
        if ranks.collective.alone and len({*names}) == len(names):
            return names, _local(gradients, out)
        if out is not None:
            raise ValueError("out goes without group, whose ranks may have further gradients")
        backend = gradients.backend
        parts = backend.empty((len(names), STATS_PART), FLOAT64)
        backend.grad_stats(ListStats(grads=gradients.views, parts=parts))
        own = np.array(backend.read(parts))

        def rows() -> Any:
            return _shared(own, copies_of(gradients, ranks))

        all_names, every = of_all(ranks.collective, "grad_stats", names, rows, owned)
        results = gradients.outputs(
            None, (Spec("the statistics", (len(all_names), STATS), FLOAT64),)
        )
        results.views[0][...] = backend.as_float64(_numpy.stats_of(every))
        return all_names, results.results()[0]


def joined(backend: Any, parts: Any, copies: tuple[int, ...] | None) -> Any:
    """The statistics of devices whose gradients are alike, from what each has added up of them."""
    return backend.as_float64(_numpy.stats_of(_shared(np.array(backend.read(parts)), copies)))


def _shared(rows: Any, copies: Sequence[int] | None) -> Any:
    """Rows of gradients of which each copy counts a fraction."""
    if copies is None:
        return rows
    shared = rows.copy()
    shared[..., _SHARED] /= np.array(copies)[:, np.newaxis]
    return shared


def _local(gradients: Gradients, out: Any) -> Any:
    results = gradients.outputs(
        out, (Spec("the statistics", (len(gradients.arrays), STATS), FLOAT64),)
    )
    gradients.backend.grad_stats(ListStats(grads=gradients.views, stats=Numbers(results.views[0])))
    return results.results()[0]


def _names_of(gradients: Gradients, owned: Ownership | None) -> Names:
    """Name of each gradient on all ranks; parts of one have one name."""
    if owned is not None:
        present = zip(owned.parts, owned.places, strict=True)
        return tuple(part.name for part, place in present if place is not None)
    if gradients.is_flat:
        return tuple(map(str, range(len(gradients.arrays))))
    if isinstance(gradients.tree, Parts):
        return tuple(str(keys[0]) for keys, _ in trees.paths(gradients.tree))
    return tuple(trees.dotted_names(gradients.tree, "grads"))
