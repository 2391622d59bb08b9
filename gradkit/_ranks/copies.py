"""Check that copies of gradients on several ranks have the same bits."""

from collections.abc import Iterator
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from gradkit._arrays import backend_of
from gradkit._backend import Array
from gradkit._open.gradients import Gradients
from gradkit._open.shards import Parts, ownership_in
from gradkit._ranks.collective import Collective
from gradkit._ranks.ownership import Numbers, Ownership, Part, exchanged
from gradkit.errors import RankError

Copy: TypeAlias = tuple[Part, Array | None]  # None: this rank has no gradient

# In place of a digest of bits.
_NONE, _EMPTY = 0, 2  # nothing has no copies that could differ, whatever its shape


def check(grads: Any, ranks: Collective) -> None:
    """Raise on all ranks unless all copies have the same bits."""
    gradients = Gradients(grads, several=True)
    owned: Ownership | None = ownership_in(gradients.tree)
    if owned is None:
        gradients.refuse_shards("pass what shards_of returns with a group")
    elif not isinstance(gradients.tree, Parts):
        raise ValueError("pass what shards_of returned as it is, in no other container")
    copies = list(_copies_of(gradients, owned))
    while not len(ranks.gather("check_copies", np.zeros(0), owned.serial if owned else 0.0)):
        assert owned is not None
        owned.exchange(ranks)
    every, owners = exchanged(ranks, partial(_digests, copies))
    bits: dict[tuple[int, int], dict[int, list[int]]] = {}
    for (name, signature, digest), owner in zip(every.tolist(), owners.tolist(), strict=True):
        bits.setdefault((name, signature), {}).setdefault(digest, []).append(owner)
    if all(len(each) == 1 for each in bits.values()):
        return
    rows = every[owners == ranks.rank].tolist()
    texts = [
        _copy_text(part, digest, bits[name, signature][digest], ranks.rank)
        for (part, _), (name, signature, digest) in zip(copies, rows, strict=True)
        if len(bits[name, signature]) > 1
    ]
    by_rank = {rank: text for rank, text in enumerate(ranks.say("; ".join(texts))) if text}
    raise RankError("copies of gradients differ in bits", by_rank)


def _copies_of(gradients: Gradients, owned: Ownership | None) -> Iterator[Copy]:
    """All that other ranks may hold a copy of, with this rank's array."""
    if owned is None:
        for name, array in gradients.named():
            yield Part(name, (), (), ()), array
        return
    views = iter(gradients.views)
    for part, place in zip(owned.parts, owned.places, strict=True):
        view: Array | None = None if place is None else next(views)
        if part.axes is not None:
            yield part, view


def _digests(copies: list[Copy]) -> Numbers:
    rows = [(*part.numbers(), _bits(view)) for part, view in copies]
    return np.array(rows, np.uint64).reshape(-1, 3)


def _bits(view: Array | None) -> int:
    """A digest of an array's dtype, shape and bytes."""
    from hashlib import blake2b  # here: few processes need what it loads

    if view is None:
        return _NONE
    if not view.size:
        return _EMPTY
    values = np.ascontiguousarray(backend_of(view).read(view))
    digest = blake2b(f"{values.dtype}, {values.shape}".encode(), digest_size=8)
    digest.update(values.reshape(-1).view(np.uint8).data)
    return int.from_bytes(digest.digest()) | 1


def _copy_text(part: Part, digest: int, alike: list[int], rank: int) -> str:
    """Say with which ranks a copy agrees."""
    if digest == _NONE:
        return f"{part.name} is None"
    others = ", ".join(str(each) for each in alike if each != rank)
    return f"{part.name} is as on {f'ranks {others}' if others else 'no other rank'}"
