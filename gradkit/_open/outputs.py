"""A call's results: the caller's own arrays if ``out`` has them, new ones otherwise."""

from collections.abc import Callable, Sequence
from itertools import repeat
from operator import is_, is_not
from typing import Any

from gradkit._arrays import is_array
from gradkit._backend import Array, Spec
from gradkit._calls.backend import Backend
from gradkit._calls.layouts import check_result
from gradkit._calls.record import Described
from gradkit._open import memory
from gradkit._open.given import RETURNED, Given

Named = Sequence[tuple[str, Array]]
# The input that the first output may be; or for each output a tuple of the inputs that it may be.
Reuse = Array | tuple[tuple[Array | None, ...], ...]


class Outputs:
    """What a call writes and gives back.

    ``views`` are there to be written; ``results()`` are what the caller gets. An output may
    share memory with no input, except that it may be one of the very inputs that ``reuse`` has for
    it. ``label`` is the argument's name; several arguments have one each.
    """

    __slots__ = ("_arrays", "_given", "_label", "_owner", "views")
    views: list[Any]

    def __init__(
        self,
        owner: Given,
        out: Any,
        specs: Sequence[Spec | None],
        inputs: Callable[[], Named],
        reuse: Reuse = None,
        label: str | tuple[str, ...] = "out",
    ):
        self._owner = owner
        self._label = label
        self._given: tuple[Any, ...] = ()
        if out is None and owner.framework.returns_views:
            spec = specs[0] if len(specs) == 1 else None
            if spec is None or spec.order is not None:
                self.views = self._arrays = owner.backend.outputs(specs)
            else:
                self.views = self._arrays = [owner.backend.empty(spec.shape, spec.dtype)]
            return
        self._given = as_tuple(out, len(specs))
        self._arrays = list(self._given)
        self.views = [None] * len(specs) if out is None else self._checked(specs, inputs(), reuse)
        for position, spec in enumerate(specs):
            if spec is not None and self.views[position] is None:
                self.views[position] = self._new(position, spec)

    @property
    def fresh(self) -> bool:
        """Whether all memory is new, of which nobody knows yet."""
        return all(map(is_, self._given, repeat(None)))

    def named(self) -> list[tuple[str, Array]]:
        """What is written, by name."""
        return list(zip(self._labels(len(self.views)), self.views, strict=True))

    def results(self) -> list[Any]:
        """The outputs as the caller's own objects, or as new arrays of the caller's type."""
        framework, like = self._owner.framework, self._owner.like
        if any(map(is_not, self._given, repeat(None))):
            framework.wrote([array for array in self._given if array is not None])
        if framework.returns_views:
            return self._arrays
        return [
            framework.wrap(view, like) if array is None and view is not None else array
            for array, view in zip(self._arrays, self.views, strict=True)
        ]

    def _new(self, position: int, spec: Spec) -> Array:
        """A new output; the caller's array of that memory too, if the library made it."""
        owner, array = self._owner, None

        def allocate(shape: Any, dtype: Any) -> Array:
            nonlocal array
            made = owner.framework.empty(shape, dtype, owner.like)
            view, array = made or (owner.backend.empty(shape, dtype), None)
            return view

        view = spec.allocate(allocate)
        if array is not None and spec.order is not None:
            array = array.permute(spec.order[1])
        self._arrays[position] = view if owner.framework.returns_views else array
        return view

    def _checked(self, specs: Sequence[Spec | None], inputs: Named, reuse: Reuse) -> list[Any]:
        """Views of the caller's arrays, and ``None`` for what is to be allocated."""
        labels = self._labels(len(specs))
        plain = self._owner.are_views([array for array in self._given if array is not None])
        views = [
            None if array is None else self._view(array, spec, label, plain)
            for array, spec, label in zip(self._given, specs, labels, strict=True)
        ]
        pairs = zip(labels, views, strict=True)
        written = [(label, view) for label, view in pairs if view is not None]
        may_be = reuse if isinstance(reuse, tuple) else ((reuse,),)

        def allowed() -> list[tuple[Array | None, ...]]:
            given = (k for k, view in enumerate(views) if view is not None)
            return [may_be[k] if k < len(may_be) else () for k in given]

        refuse_overlaps(self._owner.backend, written, inputs, allowed)
        return views

    def _labels(self, count: int) -> Sequence[str]:
        label = self._label
        return labels_of(count, label) if isinstance(label, str) else label

    def _view(self, array: Any, spec: Spec | None, label: str, plain: bool) -> Array:
        view = array if plain else self._owner.view(array, label, write=True)
        check_result(Described.of(label, view), spec)
        memory.writable(view, label, RETURNED)
        return view


def refuse_overlaps(
    backend: Backend,
    written: Named,
    read: Named,
    may_be: Callable[[], Sequence[Sequence[Array | None]]],
) -> None:
    """Raise if an array that is written shares memory with another array of the call.

    Each may be one of the very inputs that ``may_be`` has for it.
    """
    outs, inputs = ([view for _, view in named] for named in (written, read))
    if _lie_apart(backend, outs, inputs):  # as they nearly always do
        return
    allowed = may_be()
    for position, index in memory.meetings(backend, outs, inputs):
        (label, view), (other, source) = written[position], read[index]
        own = [array for array in allowed[position] if array is not None]
        may = any(source is array for array in own)
        if may and memory.same_elements(backend, view, source):
            continue
        if memory.overlap(backend, view, source):
            names = [name for name, input_ in read if any(input_ is a for a in own)]
            rather = f" without being {' or '.join(names)} itself" if names else ""
            raise ValueError(f"{label} shares memory with {other}{rather}; pass another array")
    pair = memory.first_overlap(backend, outs)
    if pair is not None:
        shared = " and ".join(written[position][0] for position in pair)
        raise ValueError(f"{shared} share memory; each result needs its own")


def _lie_apart(backend: Backend, written: Sequence[Array], read: Sequence[Array]) -> bool:
    objects = {id(view) for view in written}
    if len(objects) < len(written) or not objects.isdisjoint(map(id, read)):
        return False
    return memory.lie_apart(backend, [*written, *read])


def labels_of(count: int, label: str = "out") -> Sequence[str]:
    """What the arrays in ``out`` are called."""
    return [f"{label}[{k}]" for k in range(count)] if count > 1 else [label]


def as_tuple(out: Any, count: int) -> tuple[Any, ...]:
    if out is None:
        return (None,) * count
    if count == 1 and is_array(out):
        return (out,)
    if not isinstance(out, tuple) or len(out) != count:
        wanted = f"a tuple of {count}" if count > 1 else "an array or a tuple of 1"
        given = f"a tuple of {len(out)}" if isinstance(out, tuple) else type(out).__qualname__
        raise TypeError(f"out must be {wanted} (None for what may be allocated), not {given}")
    return out
