"""A collective call: it succeeds on all ranks of a group, or fails on all."""

import zlib
from contextlib import nullcontext
from functools import partial
from types import TracebackType
from typing import Any
from weakref import ref

import numpy as np

from gradkit._arrays import backend_of
from gradkit._calls import checks
from gradkit._open.arguments import known_framework, view_of
from gradkit._ranks.device import raise_if_any
from gradkit._ranks.groups import Group
from gradkit.errors import RankError

State = np.ndarray[Any, Any]  # float64 numbers of one rank

# First number of a header: 0 if a rank holds no parts that ranks have found out about.
_FAILED = 1.0
SET_UP = 2.0  # all are to find out about their parts
SERIALS = 3  # from here on: what ranks found out
MORE = 4  # numbers beside status and digest in what all ranks exchange first
STATE = 2 + MORE
_MOST = 4096  # numbers of all ranks that are worth less than the time of another message
_TEXT = 240  # bytes of what a rank says of itself


class Collective:
    """A context in which an error on one rank, before all have met, is raised on all of them.

    What ranks exchange first has one length whatever they call, so that two different calls
    end in an error and neither in a deadlock nor in numbers of another meaning. Without a group,
    or in one of a single rank, ``alone`` is true and nothing happens.
    """

    __slots__ = ("_exchanged", "_group", "_wire", "alone", "on_device")

    def __init__(self, group: Group | None):
        self._group = None if group is None else _checked(group)
        self.alone = self._group is None or self._group.size == 1
        self.on_device = not self.alone and getattr(self._group, "on_device", False)
        self._wire = None if self.alone else getattr(self._group, "wire", None)
        self._exchanged = self.alone

    @property
    def size(self) -> int:
        """Number of ranks."""
        return 1 if self._group is None else self._group.size

    @property
    def rank(self) -> int:
        """The rank that makes this call."""
        return 0 if self._group is None else self._group.rank

    @property
    def missing(self) -> bool:
        """True if there is no group, not even one of a single rank."""
        return self._group is None

    @property
    def has_both(self) -> bool:
        """True if numbers travel in host memory, and could between devices."""
        return not self.alone and hasattr(self._group, "between_devices")

    def between_devices(self, number: int) -> "Collective":
        """The same ranks on devices, this one on that of the number."""
        group: Any = self._group
        return Collective(group.between_devices(number))

    @property
    def adds(self) -> bool:
        """True if the group can add up."""
        return hasattr(self._group, "allreduce")

    @property
    def beside(self) -> Any:
        """An array on the group's device, if its numbers travel there: where faults are noted."""
        return getattr(self._group, "faults", None) if self.on_device else None

    def __enter__(self) -> "Collective":
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or self._exchanged:
            return
        self._exchanged = True
        header = np.zeros(2 + _room_on(self._wire))
        header[0] = _FAILED
        try:
            if self.on_device:
                self.queue(header)
            else:
                self.rows(header)
                self.say(_error_text(error))
        except Exception as another:
            error.add_note(f"The other ranks could not be told of it: {another}")

    def gather(
        self, call: str, state: State, serial: float = 0.0, *, of_names: bool = False
    ) -> State:
        """Every rank's numbers, a row each, once all have come to the same call.

        A state that has room beside the head takes one collective, a longer one two, after which
        there is room for as many. If a rank asks for a set-up by its ``serial``, or ranks have
        different ones, the result has no rows: all are to set up then, and come back.
        ``of_names``: only ranks that know the same names have as many numbers.
        """
        room, numbers = _room_on(self._wire), 0 if of_names else state.size
        fits = state.size <= room
        header = np.zeros(2 + room)
        header[:2] = serial, digest_of(call, numbers)
        if fits:
            header[2 : 2 + state.size] = state
        self._exchanged = True
        headers = self.rows(header)
        serials, calls = headers[:, 0], headers[:, 1]
        asks = serials == SET_UP
        like = calls[np.argmin(asks)] if serial == SET_UP else header[1]
        differ = (calls != like) & ~asks | ((serials == 0) != (serial == 0))
        self._raise_if_apart(serials == _FAILED, differ, _call_text(call, numbers))
        if asks.any() or (serials != serials[0]).any():
            return np.empty((0, state.size))
        if fits:
            return headers[:, 2 : 2 + state.size]
        if self._wire is not None and self.size * (2 + state.size) <= _MOST:
            _rooms[id(self._wire)] = ref(self._wire, partial(_forget, id(self._wire))), state.size
        return self.rows(state)

    def queue(self, state: Any) -> Any:
        """Every rank's numbers in device memory, where it is looked at whether all have met."""
        assert self._group is not None
        self._exchanged = True
        return self._group.allgather(state)

    def check(self) -> None:
        """Wait for the device; raise an error if a rank was at fault in what was queued."""
        if self.on_device:
            group: Any = self._group
            group.check()

    def _raise_if_apart(self, failed: State, differs: State, call: str) -> None:
        if self.on_device:  # other ranks may not wait here, and so cannot be asked
            raise_if_any(np.where(failed, 1.0, np.where(differs, 2.0, 0.0)))
        elif failed.any():
            texts = self.say("")
            at_fault = {int(rank): texts[rank] for rank in np.flatnonzero(failed)}
            raise RankError("another rank failed, and nothing was written on any", at_fault)
        elif differs.any():
            texts = self.say(call)
            raise RankError("ranks make different calls, and nothing was written on any",
                            dict(enumerate(texts)))  # fmt: skip

    def say(self, text: str) -> list[str]:
        """Gather a text of at most 240 bytes from every rank."""
        letters = np.zeros(_TEXT)
        encoded = text.encode(errors="replace")[:_TEXT]
        letters[: len(encoded)] = list(encoded)
        rows = self.rows(letters).astype(np.uint8)
        return [bytes(row).rstrip(b"\0").decode(errors="ignore") for row in rows]

    def total(self, state: State) -> State:
        """The sum of every rank's whole numbers, below 2^53; as ``rows``."""
        group: Any = self._group
        if self.alone:
            return state
        label = "what group.allreduce returned"
        total = self._answered(group.allreduce(state), label)
        checks.shape(total, state.shape, label, "the shape of its argument")
        return total

    def rows(self, state: State) -> State:
        """Every rank's numbers, a row each; only for ranks that are known to do the same."""
        if self.alone:
            return state[None]
        assert self._group is not None
        label = "what group.allgather returned"
        rows = self._answered(self._group.allgather(state), label)
        checks.shape(rows, (self.size, state.size), label, "a row for each rank")
        return rows

    def _answered(self, answer: Any, label: str) -> State:
        """Return a group's answer, which may be on a device, on the host."""
        if self.on_device:
            view = view_of(known_framework(answer, label), answer, label)
            answer = backend_of(view).read(view)
        return np.asarray(answer, np.float64)


# Without a group nothing happens, and entering this calls no function of Python's.
NOBODY = nullcontext(Collective(None))


# The longest states that ranks have sent, by the identity of what connects them: all remember
# the same, since they came to the same calls over it.
_rooms: dict[int, tuple[Any, int]] = {}


def _room_on(wire: Any) -> int:
    """Numbers beside status and digest in what all ranks exchange first over a connection."""
    return _rooms.get(id(wire), (None, MORE))[1]


def _forget(wire: int, _: Any) -> None:
    _rooms.pop(wire, None)


def digest_of(call: str, numbers: int) -> float:
    """A number that stands for a call and for how many numbers its ranks exchange."""
    return float(zlib.crc32(_call_text(call, numbers).encode()))


def _call_text(call: str, numbers: int) -> str:
    return f"{call}, {numbers} numbers a rank" if numbers else call


def _error_text(error: BaseException) -> str:
    """Return the text of an error. Never fails: the others wait for it."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


def _checked(group: Any) -> Group:
    wanted = ["rank", "size", "allgather"]
    if getattr(group, "on_device", False):
        wanted += ["faults", "check"]
    missing = [name for name in wanted if not hasattr(group, name)]
    if missing:
        raise TypeError(
            f"group is a {type(group).__qualname__} without {missing[0]}; pass what a function of "
            "gradkit.distributed returns, such as from_mpi(comm)"
        )
    return group
