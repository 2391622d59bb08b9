"""Statistics of gradients by name: of those given here, or of those of all ranks.

Ranks may hold gradients of different names. They tell each other the names once; from then on each
sends a row for every name that any of them has, until one of them has a new name.
"""

from collections import Counter
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from gradkit import _numpy
from gradkit._backend import FLOAT64, Spec
from gradkit._calls.lists import STATS, STATS_PART, ListStats
from gradkit._calls.roles import Numbers
from gradkit._open import trees
from gradkit._open.gradients import Gradients
from gradkit._open.shards import Parts
from gradkit._ranks.collective import SERIALS, SET_UP, Collective
from gradkit._ranks.norms import Ranks, beside, copies_of, ownership_of
from gradkit._ranks.ownership import Ownership, exchanged

Names: TypeAlias = tuple[str, ...]
Rows: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]  # a row for each gradient

_SHARED = [0, 1, 3, 4, 7, 8, 9]  # of a row: what copies count a fraction of
_PLACE, _ABSENT = STATS_PART, -1.0  # behind a row: which of the rank's it is, or that it is none
_MOST = 64  # exchanges that are remembered


class _Union(NamedTuple):
    """The names of all ranks. ``serial`` stands for them."""

    names: Names
    serial: int


_known: dict[tuple[tuple[int, int], Names], _Union] = {}


def statistics_of(grads: Any, ranks: Ranks, out: Any) -> tuple[Names, Any]:
    """Names, and for each a row of statistics."""
    near = partial(beside, ranks, out, None)
    held = Gradients(grads, beside=near, several=True)
    with held.on_stream():
        owned, copies = ownership_of(held, ranks), copies_of(held, ranks)
        names = _names_of(held, owned)
        if ranks.collective.alone and len({*names}) == len(names):
            return names, _own(held, out)
        if out is not None:
            raise ValueError("out goes without group, whose ranks may have further gradients")
        backend = held.backend
        parts = backend.empty((len(names), STATS_PART), FLOAT64)
        backend.grad_stats(ListStats(grads=held.views, parts=parts))
        rows = np.array(backend.read(parts))
        union, layers = _agreed(ranks.collective, names, owned)
        copies = copies_of(held, ranks)  # which ranks may not have known before
        if copies is not None:
            rows[:, _SHARED] /= np.array(copies)[:, np.newaxis]
        found, every = _of_all(ranks.collective, names, rows, union, layers)
        made = held.outputs(None, (Spec("the statistics", (len(found), STATS), FLOAT64),))
        made.views[0][...] = backend.as_float64(_numpy.stats_of(every))
        return found, made.results()[0]


def joined(backend: Any, parts: Any, copies: tuple[int, ...] | None) -> Any:
    """The statistics of devices whose gradients are alike, from what each has added up of them."""
    rows = np.array(backend.read(parts))
    if copies is not None:
        rows[..., _SHARED] /= np.array(copies)[:, np.newaxis]
    return backend.as_float64(_numpy.stats_of(rows))


def _own(held: Gradients, out: Any) -> Any:
    made = held.outputs(out, (Spec("the statistics", (len(held.arrays), STATS), FLOAT64),))
    held.backend.grad_stats(ListStats(grads=held.views, stats=Numbers(made.views[0])))
    return made.results()[0]


def _names_of(held: Gradients, owned: Ownership | None) -> Names:
    """What all ranks call each gradient; parts of one have one name."""
    if owned is not None:
        present = zip(owned.parts, owned.places, strict=True)
        return tuple(part.name for part, place in present if place is not None)
    if held.is_flat:
        return tuple(map(str, range(len(held.arrays))))
    if isinstance(held.tree, Parts):
        return tuple(str(keys[0]) for keys, _ in trees.paths(held.tree))
    return tuple(trees.dotted_names(held.tree, "grads"))


def _agreed(collective: Collective, names: Names, owned: Ownership | None) -> tuple[Names, int]:
    """The names of all ranks, once all know them, and how many parts of one a rank has at most."""
    most = max(Counter(names).values(), default=1)
    if collective.alone:
        return tuple(dict.fromkeys(names)), most
    call = "grad_stats of parts" if owned is not None else "grad_stats"
    members = collective.rank, collective.size
    while True:
        union = _find(members, names)
        serial = _serial(union, owned)
        every = collective.gather(call, np.array([float(most)]), serial)
        if len(every):
            assert union is not None  # or all would set up
            return union.names, int(every.max())
        if owned is not None:
            owned.exchange(collective)
        _set_up(collective, members, names)


def _serial(union: _Union | None, owned: Ownership | None) -> float:
    """What stands for all that this rank knows of the others."""
    if union is None or (owned is not None and owned.serial == SET_UP):
        return SET_UP
    by = 0 if owned is None else int(owned.serial)
    return float(SERIALS + (union.serial ^ by) % (1 << 50))


def _find(members: tuple[int, int], names: Names) -> _Union | None:
    """What ranks said last of such names, or of more."""
    found = _known.get((members, names))
    if found is not None:
        return found
    for (others, _), union in reversed(_known.items()):
        if others == members and {*names} <= {*union.names}:
            return union
    return None


def _set_up(collective: Collective, members: tuple[int, int], names: Names) -> None:
    """Exchange names, in a call that all ranks make together."""
    import json  # here: few processes need what these load
    from hashlib import blake2b

    every, owners = exchanged(collective, partial(_letters, json.dumps(names)))
    texts = (every[owners == rank].tobytes() for rank in range(collective.size))
    union = tuple(dict.fromkeys(name for text in texts for name in json.loads(text)))
    digest = blake2b(json.dumps(union).encode(), digest_size=6).digest()
    if len(_known) >= _MOST:
        _known.clear()
    _known.pop((members, names), None)  # the last one comes last
    _known[members, names] = _Union(union, int.from_bytes(digest))


def _letters(text: str) -> Any:
    """ASCII letters as numbers, which ranks can exchange."""
    padded = text.encode() + b" " * (-len(text) % 8)
    return np.frombuffer(padded, np.uint64).reshape(-1, 1)


def _of_all(
    collective: Collective, names: Names, rows: Rows, union: Names, layers: int
) -> tuple[Names, Rows]:
    """Names that some rank has at present, in the order of ranks, and the rows of all for each.

    A rank sends layers, in each of which it has at most one row of a name, and the row's place.
    """
    column = {name: k for k, name in enumerate(union)}
    state = np.zeros((layers, len(union), STATS_PART + 1))
    state[:, :, _PLACE] = _ABSENT
    before: Counter[str] = Counter()
    for place, (name, row) in enumerate(zip(names, rows, strict=True)):
        state[before[name], column[name]] = *row, place
        before[name] += 1
    every = collective.rows(state.reshape(-1)).reshape(collective.size, *state.shape)
    held: dict[int, None] = {}
    for places in every[:, 0, :, _PLACE]:
        order = np.argsort(places, kind="stable")
        held.update(dict.fromkeys(order[places[order] != _ABSENT].tolist()))
    found = every.reshape(collective.size * layers, *state.shape[1:])[:, [*held], :STATS_PART]
    return tuple(union[k] for k in held), found
