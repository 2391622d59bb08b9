"""Rows of numbers by name, of which ranks may have different ones.

Ranks tell each other the names once; from then on each sends a row for every name that any of them
has, until one of them has a new name.
"""

from collections import Counter
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from gradkit._ranks.collective import SERIALS, SET_UP, Collective
from gradkit._ranks.ownership import Ownership, exchanged

Names: TypeAlias = tuple[Any, ...]  # strings or integers
Rows: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]

_ABSENT = -1.0  # in the place of a row that a rank has not
_MOST = 64  # exchanges that are remembered


class _Union(NamedTuple):
    """The names of all ranks. ``serial`` stands for them."""

    names: Names
    serial: int


_cache: dict[tuple[tuple[int, int], Names], _Union] = {}


def agreed(
    collective: Collective, call: str, names: Names, owned: Ownership | None
) -> tuple[Names, int]:
    """The names of all ranks, once all know them, and how many rows of one a rank has at most."""
    most = max(Counter(names).values(), default=1)
    if collective.alone:
        return tuple(dict.fromkeys(names)), most
    if owned is not None:
        call += " of parts"
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
    """Number that identifies all that this rank knows of the others."""
    if union is None or (owned is not None and owned.serial == SET_UP):
        return SET_UP
    by = 0 if owned is None else int(owned.serial)
    return float(SERIALS + (union.serial ^ by) % (1 << 50))


def _find(members: tuple[int, int], names: Names) -> _Union | None:
    """Return the last union for these names, or one that contains them."""
    last = _cache.get((members, names))
    if last is not None:
        return last
    for (others, _), union in reversed(_cache.copy().items()):  # ranks may be threads
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
    if len(_cache) >= _MOST:
        _cache.clear()
    _cache.pop((members, names), None)  # the last one comes last
    _cache[members, names] = _Union(union, int.from_bytes(digest))


def _letters(text: str) -> Any:
    """ASCII letters as numbers, which ranks can exchange."""
    padded = text.encode() + b" " * (-len(text) % 8)
    return np.frombuffer(padded, np.uint64).reshape(-1, 1)


def of_all(
    collective: Collective, names: Names, rows: Rows, union: Names, layers: int
) -> tuple[Names, Rows]:
    """Names that some rank has at present, in the order of ranks, and the rows of all for each.

    A rank sends layers, in each of which it has at most one row of a name, and the row's place.
    """
    column = {name: k for k, name in enumerate(union)}
    state = np.zeros((layers, len(union), rows.shape[1] + 1))
    state[:, :, -1] = _ABSENT
    before: Counter[Any] = Counter()
    for place, (name, row) in enumerate(zip(names, rows, strict=True)):
        state[before[name], column[name]] = *row, place
        before[name] += 1
    every = collective.rows(state.reshape(-1)).reshape(collective.size, *state.shape)
    present: dict[int, None] = {}
    for places in every[:, 0, :, -1]:
        order = np.argsort(places, kind="stable")
        present.update(dict.fromkeys(order[places[order] != _ABSENT].tolist()))
    rows_of_all = every.reshape(collective.size * layers, *state.shape[1:])[:, [*present], :-1]
    return tuple(union[k] for k in present), rows_of_all
