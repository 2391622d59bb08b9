"""Rows of numbers by name, of which ranks may have different ones.

Ranks tell each other the names once; from then on each sends a row for every name that any of them
has, until one of them has a new name.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from gradkit._ranks.collective import SERIALS, SET_UP, Collective
from gradkit._ranks.ownership import Ownership, exchanged

Names: TypeAlias = tuple[Any, ...]  # strings or integers
Rows: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]

_ABSENT = -1.0  # in the place of a row that a rank has not
_MOST = 64  # exchanges that are remembered


class _Union(NamedTuple):
    """The names of all ranks, and how many rows of one a rank has at most.

    ``serial`` stands for them.
    """

    names: Names
    layers: int
    serial: int


_cache: dict[tuple[tuple[int, int], Names], _Union] = {}


def of_all(
    collective: Collective,
    call: str,
    names: Names,
    rows: Callable[[], Rows],
    owned: Ownership | None,
) -> tuple[Names, Rows]:
    """Names that some rank has at present, in the order of ranks, and the rows of all for each.

    ``rows`` computes this rank's, once it knows which ranks hold what.
    """
    if collective.alone:
        own = _union_of([names], 0)
        return _present(_laid_out(names, rows(), own)[np.newaxis], own)
    if owned is not None:
        call += " of parts"
    members = collective.rank, collective.size
    while True:
        union = _find(members, names)
        serial = _serial(union, owned)
        state = np.empty((0, 0, 0))
        if union is not None and serial != SET_UP:
            state = _laid_out(names, rows(), union)
        every = collective.gather(call, state.reshape(-1), serial, of_names=True)
        if len(every):
            assert union is not None  # or all would set up
            return _present(every.reshape(len(every), *state.shape), union)
        if owned is not None:
            owned.exchange(collective)
        _set_up(collective, members, names)


def _laid_out(names: Names, rows: Rows, union: _Union) -> Rows:
    """A rank's rows and the place of each, in layers that have at most one row of a name."""
    column = {name: k for k, name in enumerate(union.names)}
    state = np.zeros((union.layers, len(union.names), rows.shape[1] + 1))
    state[:, :, -1] = _ABSENT
    before: Counter[Any] = Counter()
    for place, (name, row) in enumerate(zip(names, rows, strict=True)):
        state[before[name], column[name]] = *row, place
        before[name] += 1
    return state


def _present(every: Rows, union: _Union) -> tuple[Names, Rows]:
    """Names that are in what all ranks have laid out, and the rows of each."""
    present: dict[int, None] = {}
    for places in every[:, 0, :, -1]:
        order = np.argsort(places, kind="stable")
        present.update(dict.fromkeys(order[places[order] != _ABSENT].tolist()))
    rows_of_all = every.reshape(len(every) * union.layers, *every.shape[2:])[:, [*present], :-1]
    return tuple(union.names[k] for k in present), rows_of_all


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
    layers = _layers_of(names)
    for (others, _), union in reversed(_cache.copy().items()):  # ranks may be threads
        if others == members and {*names} <= {*union.names} and layers <= union.layers:
            return union
    return None


def _layers_of(names: Names) -> int:
    return max(Counter(names).values(), default=1)


def _union_of(names_of_all: Sequence[Names], serial: int) -> _Union:
    names = tuple(dict.fromkeys(chain.from_iterable(names_of_all)))
    return _Union(names, max(map(_layers_of, names_of_all)), serial)


def _set_up(collective: Collective, members: tuple[int, int], names: Names) -> None:
    """Exchange names, in a call that all ranks make together."""
    import json  # here: few processes need what these load
    from hashlib import blake2b

    every, owners = exchanged(collective, partial(_letters, json.dumps(names)))
    texts = (every[owners == rank].tobytes() for rank in range(collective.size))
    union = _union_of([tuple(json.loads(text)) for text in texts], 0)
    digest = blake2b(json.dumps(union).encode(), digest_size=6).digest()
    if len(_cache) >= _MOST:
        _cache.clear()
    _cache.pop((members, names), None)  # the last one comes last
    _cache[members, names] = union._replace(serial=int.from_bytes(digest))


def _letters(text: str) -> Any:
    """ASCII letters as numbers, which ranks can exchange."""
    padded = text.encode() + b" " * (-len(text) % 8)
    return np.frombuffer(padded, np.uint64).reshape(-1, 1)
