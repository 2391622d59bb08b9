"""Parts of gradients that each rank holds: found out by one exchange, then remembered.

A rank says of each gradient two numbers of 64 bits: a digest of its name, and the signature of the
part that the rank holds. Copies are gradients of one name and one signature.

Signatures tell more. Each index along each axis is given a random point of a prime field, the same
on all ranks; the signature of a part is the product over axes of ``point(stop) - point(start)``,
summed over its runs of indices. It is additive: the signatures of parts that tile the whole add up
to that of the whole, and those of any others do not, but for one in 2^60 cases (Schwartz, Zippel).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from gradkit._ranks.collective import SERIALS, SET_UP, Collective
from gradkit.errors import RankError

Runs: TypeAlias = tuple[tuple[int, int], ...]  # of indices along an axis: (start, stop)
Axes: TypeAlias = tuple[Runs, ...]
Numbers: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]

_PRIME = (1 << 61) - 1
_MOST = 64  # exchanges that are remembered


class Part(NamedTuple):
    """A gradient's name on all ranks, and which part of the whole a rank holds.

    ``mesh``: the ranks that it is spread over, if it has but a position for a name. ``axes``: the
    indices along each axis, or ``None`` for a tensor that only this rank has.
    """

    name: str
    shape: tuple[int, ...]
    mesh: tuple[int, ...]
    axes: Axes | None

    def __str__(self) -> str:
        """The part as an index expression."""
        axes = ("+".join(f"{a}:{b}" for a, b in runs) or "nothing" for runs in self.axes or ())
        where = f" on ranks {self.mesh}" if self.mesh else ""
        return f"{self.name}[{', '.join(axes)}] of {self.shape}{where}"

    def numbers(self) -> tuple[int, int]:
        """The digest of the name, and the signature."""
        return _digest(self.name), self._signature(self.axes or ())

    def whole(self) -> int:
        """The signature of the whole gradient."""
        return self._signature(whole_of(self.shape))

    def _signature(self, axes: Axes) -> int:
        field = f"{self.name}, {self.mesh}"
        product = 1
        for axis, runs in enumerate(axes):
            points = (
                _digest(f"{axis}, {stop}", field) - _digest(f"{axis}, {start}", field)
                for start, stop in runs
            )
            product = product * sum(points) % _PRIME
        return product


def whole_of(shape: Sequence[int]) -> Axes:
    """All indices of each axis."""
    return tuple(((0, length),) for length in shape)


def chunk_of(runs: Runs, pieces: int, index: int, splits: int = 1) -> Runs:
    """The share of an axis' indices that one of so many ranks gets, as ``torch.chunk`` cuts.

    ``splits``: indices are first cut into so many chunks, and a rank gets its share of each.
    """
    if splits > 1:
        chunks = (chunk_of(runs, splits, k) for k in range(splits))
        return tuple(run for chunk in chunks for run in chunk_of(chunk, pieces, index))
    length = sum(stop - start for start, stop in runs)
    step = -(-length // pieces)
    first, last = index * step, min((index + 1) * step, length)
    cuts, before = [], 0
    for start, stop in runs:
        cut = max(start, start + first - before), min(stop, start + last - before)
        if cut[0] < cut[1]:
            cuts.append(cut)
        before += stop - start
    return tuple(cuts)


class Ownership:
    """The parts that one rank holds, and on how many ranks each lies.

    ``replicas`` has the latter by name: a number, or a list for each that is in several parts.
    ``places`` are their keys there, and whether each is in a list; ``None`` for what has no
    gradient. ``on_all``: whether each rank has the gradient of that name, or a part of it.
    ``serial`` stands for what all ranks said. Ranks whose serials differ exchange again.
    """

    def __init__(self, parts: Sequence[Part], places: Sequence[Any], key: Any, ranks: Collective):
        self.parts, self.places = parts, places
        self.members = ranks.rank, ranks.size
        self.replicas: dict[Any, Any] = {}
        self._key = key, self.members
        nothing = SET_UP, [1] * len(parts), [False] * len(parts)
        self.serial, self._counts, self.on_all = _cache.get(self._key, nothing)
        self._fill()

    def exchange(self, ranks: Collective) -> None:
        """Find out what ranks hold, in a call that all of them make together."""
        from hashlib import blake2b  # here: few processes need what it loads

        every, owners = exchanged(ranks, self._numbers)
        rows = every[owners == ranks.rank]
        named = np.isin(every[:, 0], rows[:, 0])  # as those that this rank holds
        copies = Counter(map(tuple, every[named].tolist()))
        names = every[named, 0].tolist()
        holders = Counter(name for name, _ in {*zip(names, owners[named].tolist(), strict=True)})
        self._check(ranks, copies)
        listed = map(tuple, rows.tolist())
        numbers = [None if part.axes is None else next(listed) for part in self.parts]
        self._counts = [1 if each is None else copies[each] for each in numbers]
        self.on_all = [each is not None and holders[each[0]] == ranks.size for each in numbers]
        digest = blake2b(every.tobytes() + owners.tobytes(), digest_size=6).digest()
        self.serial = float(SERIALS + int.from_bytes(digest))
        if len(_cache) >= _MOST:
            _cache.clear()
        _cache[self._key] = self.serial, self._counts, self.on_all
        self._fill()

    def present(self) -> list[Part]:
        """The parts that other ranks may hold too."""
        return [part for part in self.parts if part.axes is not None]

    def _numbers(self) -> Numbers:
        return np.array([part.numbers() for part in self.present()], np.uint64).reshape(-1, 2)

    def _fill(self) -> None:
        """Put the counts where ``replicas`` has them."""
        self.replicas.clear()
        for place, count in zip(self.places, self._counts, strict=True):
            if place is not None:
                name, listed = place
                if listed:
                    self.replicas.setdefault(name, []).append(count)
                else:
                    self.replicas[name] = count

    def _check(self, ranks: Collective, distinct: Iterable[tuple[int, ...]]) -> None:
        """Raise on all ranks unless the parts of each gradient tile it."""
        sums: Counter[int] = Counter()
        for name, signature in distinct:
            sums[name] += signature
        wrong = [p for p in self.present() if (sums[_digest(p.name)] - p.whole()) % _PRIME]
        first = min(wrong, key=lambda part: part.name, default="")
        by_rank = {rank: text for rank, text in enumerate(ranks.say(str(first))) if text}
        if by_rank:
            raise RankError(
                "the parts of a gradient do not tile it: one is on no rank, two overlap, or its "
                "name stands for different gradients",
                by_rank,
            )


_cache: dict[Any, tuple[float, list[int], list[bool]]] = {}


def exchanged(collective: Collective, compute: Callable[[], Numbers]) -> tuple[Numbers, Numbers]:
    """The rows of all ranks, one below another, and the rank of each; ranks have any number.

    An error of ``compute`` on one rank is an error on all.
    """
    failure = None
    try:
        numbers = compute()
    except Exception as error:
        numbers, failure = np.zeros((0, 1), np.uint64), error
    sizes = np.array([-1 if failure else len(numbers), numbers.shape[1]], np.float64)
    lengths, columns = collective.rows(sizes).astype(int).T
    if failure:
        raise failure
    if lengths.min() < 0:
        failed = np.flatnonzero(lengths < 0).tolist()
        raise RankError("another rank failed", dict.fromkeys(failed, "its own error says why"))
    padded = np.zeros((max(1, lengths.max()), columns[0]), np.uint64)
    padded[: len(numbers)] = numbers
    rows = np.ascontiguousarray(collective.rows(padded.reshape(-1).view(np.float64)))
    table = rows.view(np.uint64).reshape(len(lengths), *padded.shape)
    every = np.concatenate([row[:length] for row, length in zip(table, lengths, strict=True)])
    return every, np.repeat(np.arange(len(lengths), dtype=np.uint64), lengths)


def _digest(text: str, field: str = "") -> int:
    """A number below the prime."""
    from hashlib import blake2b  # here: few processes need what it loads

    key = blake2b(field.encode(), digest_size=16).digest() if field else b""
    return int.from_bytes(blake2b(text.encode(), digest_size=8, key=key).digest()) % _PRIME
