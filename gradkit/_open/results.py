"""A call's results: the caller's own arrays if ``out`` has them, new ones otherwise."""

from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from operator import is_
from typing import Any

import numpy as np

from gradkit._arrays import HOST, is_array
from gradkit._backend import Array, Spec
from gradkit._calls.backend import Backend
from gradkit._calls.layouts import check_result
from gradkit._calls.record import Described
from gradkit._open import memory
from gradkit._open.arguments import RETURNED, Arguments
from gradkit._open.memory import Named

_NUMPY = {np.ndarray, type(None)}
MayBe = Callable[[], Sequence[Sequence[Array | None]]]


class Results:
    """Outputs of a call.

    ``views`` are the caller's arrays as the backend's, and after ``make`` all that is written;
    ``results()`` are what the caller gets. ``label`` is the argument's name; several arguments have
    one each.
    """

    __slots__ = ("_arrays", "_backend", "_callers", "_label", "_library", "_like", "fresh", "views")
    views: list[Any]
    fresh: bool  # whether all memory is new, of which nobody knows yet

    def __init__(
        self, owner: Arguments, out: Any, count: int, label: str | tuple[str, ...] = "out"
    ):
        # Not the owner, which has its results: a circle's memory waits for Python's collector.
        self._library, self._like, self._backend = owner.framework, owner.like, owner.backend
        self._label = label
        if out is None:
            self._callers: tuple[Any, ...] = (None,) * count
            self.views, self.fresh = [None] * count, True
            return
        self._callers = as_tuple(out, count, label)
        self.fresh = all(map(is_, self._callers, repeat(None)))
        plain = owner.framework is HOST and _NUMPY.issuperset(map(type, self._callers))
        if plain or owner.are_views([array for array in self._callers if array is not None]):
            self.views = list(self._callers)
        else:
            self.views = [
                None if array is None else owner.view(array, name, write=True)
                for array, name in zip(self._callers, self._labels(), strict=True)
            ]

    def named(self) -> list[tuple[str, Array]]:
        """Arrays that are written, with their names."""
        pairs = zip(self._labels(), self.views, strict=True)
        return [(name, view) for name, view in pairs if view is not None]

    def check(self, specs: Sequence[Spec | None], inputs: Named) -> None:
        """Raise unless the caller's arrays fit, and share memory with no input and each other."""
        for name, view, spec in zip(self._labels(), self.views, specs, strict=True):
            if view is not None:
                check_result(Described.of(name, view), spec)
        # Of arguments that are no results.
        own = [name for name in self._labels() if not name.startswith("out")]
        instead = dict.fromkeys(own, "pass a new one")
        refuse(self._backend, self.named(), inputs, instead=instead)

    def make(self, specs: Sequence[Spec | None]) -> None:
        """Make the results that the caller has no array for."""
        if self._library.returns_views and self.fresh:
            self.views = self._arrays = self._backend.outputs(specs)
            return
        self._arrays = list(self._callers)
        for position, spec in enumerate(specs):
            if spec is not None and self.views[position] is None:
                self.views[position] = self._new(position, spec)

    def results(self) -> list[Any]:
        """The results as the caller's own objects, or as new arrays of the caller's type."""
        library, like = self._library, self._like
        if library.returns_views:
            return self._arrays
        if not self.fresh:
            library.wrote([array for array in self._callers if array is not None])
        return [
            library.wrap(view, like) if array is None and view is not None else array
            for array, view in zip(self._arrays, self.views, strict=True)
        ]

    def _new(self, position: int, spec: Spec) -> Array:
        """A new result; the caller's array of that memory too, if the library made it."""
        pair = self._library.empty(spec, self._like)
        view, array = pair or (self._backend.outputs([spec])[0], None)
        self._arrays[position] = view if self._library.returns_views else array
        return view

    def _labels(self) -> Sequence[str]:
        label = self._label
        return labels_of(len(self._callers), label) if isinstance(label, str) else label


def refuse(
    backend: Backend,
    written: Named,
    read: Named,
    may_be: MayBe | None = None,
    instead: Mapping[str, str] = {},
) -> None:
    """Raise unless each array that is written can be, and shares no memory with another.

    It may be one of the very inputs that ``may_be`` has for it, whatever else that input is.
    """
    if memory.plainly_apart([view for _, view in written], [view for _, view in read]):
        return
    for name, view in written:
        memory.writable(view, name, instead.get(name, RETURNED))
    if _lie_apart(backend, written, read):
        return
    outs, inputs = ([view for _, view in named] for named in (written, read))
    allowed = may_be() if may_be is not None else [()] * len(outs)
    for position, index in memory.meetings(backend, outs, inputs):
        (label, view), (other, source) = written[position], read[index]
        permitted = [array for array in allowed[position] if array is not None]
        if memory.same_elements(backend, view, source) and any(
            memory.same_elements(backend, view, array) for array in permitted
        ):
            continue
        if memory.overlap(backend, view, source):
            names = [name for name, input_ in read if any(input_ is a for a in permitted)]
            rather = f" without being {' or '.join(names)} itself" if names else ""
            raise ValueError(f"{label} shares memory with {other}{rather}; pass another array")
    pair = memory.first_overlap(backend, outs)
    if pair is not None:
        shared = " and ".join(written[position][0] for position in pair)
        raise ValueError(f"{shared} share memory; each result needs its own")


def _lie_apart(backend: Backend, written: Named, read: Named) -> bool:
    """True if a quick look shows that no array that is written shares memory with another."""
    every = [view for _, view in (*written, *read)]
    objects = set(map(id, every[: len(written)]))
    if len(objects) < len(written) or not objects.isdisjoint(map(id, every[len(written) :])):
        return False
    return memory.lie_apart(backend, every)


def labels_of(count: int, label: str = "out") -> Sequence[str]:
    """Names of the arrays in ``out``."""
    return [f"{label}[{k}]" for k in range(count)] if count > 1 else [label]


def as_tuple(out: Any, count: int, label: str | tuple[str, ...] = "out") -> tuple[Any, ...]:
    """The arrays of ``out``, one for each result."""
    if count == 1 and is_array(out):
        return (out,)
    if not isinstance(out, tuple) or len(out) != count:
        if isinstance(label, str) and label != "out":
            kind = type(out).__qualname__
            raise TypeError(f"{label} must be an array that the result is written to, not {kind}")
        wanted = f"a tuple of {count}" if count > 1 else "an array or a tuple of 1"
        passed = f"a tuple of {len(out)}" if isinstance(out, tuple) else type(out).__qualname__
        raise TypeError(f"out must be {wanted} (None for what may be allocated), not {passed}")
    return out
