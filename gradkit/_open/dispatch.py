"""Run an operation: open its arrays, find its plan, make its results, compute, hand back."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from gradkit._arrays import HOST, backend_of, framework_for
from gradkit._backend import Array, Spec
from gradkit._calls.backend import Backend
from gradkit._calls.record import Call, Described, Plan
from gradkit._open import memory
from gradkit._open.given import RETURNED, Given, known_framework, refuse_write, view_of
from gradkit._open.outputs import as_tuple, labels_of, refuse_overlaps

# Writes the results of a call on a backend.
Compute: TypeAlias = Callable[[Any, Backend], None]

_NONE = type(None)
_NUMPY = {np.ndarray, _NONE}
_MOST = 4096  # plans that are remembered before all are forgotten
_plans: dict[Any, Plan] = {}


def run(call: Call, out: Any = None, compute: Compute | None = None) -> Any:
    """The results of a call as arrays of the caller's type, written to ``out`` if it has them.

    ``compute``: what computes them, if that is not the call by itself.
    """
    opened = Opened(call, out)
    if opened.framework is HOST:  # which has no streams
        return opened.results(compute)
    with opened.on_stream():
        return opened.results(compute)


def write(call: Call, *results: Array | None, backend: Backend | None = None) -> None:
    """Compute a call on a backend's own arrays, which are known to fit and to lie apart.

    This is the inner door, for those who bring memory for results and a current stream, such as a
    callback of XLA. ``backend``: what computes, if it is not the one that the arrays belong to.
    """
    opened = Opened(call, backend=backend, outs=results)
    call.__dict__.update(zip(call.result_names, results, strict=True))
    opened.compute()


class Opened(Given):
    """A call whose arrays are a backend's, all of one library, and whose plan is known.

    The first argument decides the library, the backend and what new results look like. Arguments
    may take part in differentiation: only their values count.
    """

    __slots__ = ("_in_place", "_out", "_outs", "call")

    def __init__(
        self,
        call: Call,
        out: Any = None,
        *,
        backend: Backend | None = None,
        outs: tuple[Array | None, ...] = (),
    ):
        self.numbers = []
        self.call = call
        given = call.arrays(call)
        self.like = given[0]
        kinds = set(map(type, given))
        if backend is not None:  # the arrays are its own
            self.framework, self.backend = HOST, backend
        elif kinds <= _NUMPY and self.like is not None:
            self.framework, self.backend = HOST, HOST.backend_of(self.like)
        else:
            given = self._views(given, kinds)
        # The caller's arrays for results, and their views; both empty if all results are new.
        self._out: tuple[Any, ...] = ()
        self._outs = outs
        if out is not None:
            self._out = as_tuple(out, len(call.results))
            self._outs = self._views_of_out()
        # The caller's arrays that are written in place, by the names of their views.
        self._in_place: dict[str, Any] = self._open_in_place() if call.in_place else {}
        call.plan = plan = self._plan(given)
        call.__dict__.update(plan.options)
        for name, check in call.passing.items():
            setattr(call, name, check(getattr(call, name), self))
        if type(call).check_values is not Call.check_values:
            call.check_values()

    def _plan(self, views: tuple[Array | None, ...]) -> Plan:
        """The plan of the call: one look-up, unless there was none like it."""
        call = self.call
        options = call.options(call)
        key: list[Any] = [type(call), self.backend, *options, *map(type, options)]
        moved = [getattr(call, name) for name in self._in_place]
        for view in (*views, *self._outs, *moved):
            key.append(None if view is None else (view.shape, view.dtype, view.strides))
        signature = tuple(key)
        try:
            plan = _plans.get(signature)
        except TypeError:  # an option that has no hash: nearly always one that is refused
            return _decide(call, self._outs)
        if plan is None:
            plan = _decide(call, self._outs)
            if len(_plans) >= _MOST:
                _plans.clear()
            _plans[signature] = plan
        return plan

    def results(self, compute: Compute | None = None) -> Any:
        """What the caller gets, once the backend has computed it."""
        call, specs = self.call, self.call.plan.results
        if self._outs or self._in_place:
            self._check_memory()
        elif self.framework.returns_views:
            made = self.backend.outputs(specs)
            call.__dict__.update(zip(call.result_names, made, strict=True))
            self.compute(compute)
            return made[0] if len(made) == 1 else tuple(made)
        arrays, views = self._made(specs)
        call.__dict__.update(zip(call.result_names, views, strict=True))
        self.compute(compute)
        written = [array for array in self._out if array is not None]
        written += self._in_place.values()
        if written:
            self.framework.wrote(written)
        results = [
            self.wrap(view) if array is None and view is not None else array
            for array, view in zip(arrays, views, strict=True)
        ]
        return results[0] if len(results) == 1 else tuple(results)

    def compute(self, compute: Compute | None = None) -> None:
        """Have the results written."""
        call, backend = self.call, self.backend
        for name in call.plan.widened:
            setattr(call, name, backend.as_float64(getattr(call, name)))
        if compute is None:
            call.compute(backend)
        else:
            compute(call, backend)

    def first(self) -> tuple[str, Array | None]:
        name = self.call.arguments[0].name
        return name, getattr(self.call, name)

    def _views(self, given: tuple[Any, ...], kinds: set[type]) -> tuple[Array | None, ...]:
        """The arguments as a backend's arrays; an error names the one that is refused."""
        kinds.discard(_NONE)
        views = self._views_at_once(given, kinds)
        call, names = self.call, [argument.name for argument in self.call.arguments]
        if views is None:
            self.framework = known_framework(self.like, names[0])
            first = view_of(self.framework, self.like, names[0], detach=True)
            call.__dict__[names[0]] = first
            others = (
                array if array is None else self.argument(array, name)
                for name, array in zip(names[1:], given[1:], strict=True)
            )
            views = (first, *others)
        self.backend = backend_of(views[0])
        call.__dict__.update(zip(names, views, strict=True))
        return views

    def _views_at_once(
        self, given: tuple[Any, ...], kinds: set[type]
    ) -> tuple[Array | None, ...] | None:
        """Views of arrays that are all of one library, on one device; ``None`` if they are not."""
        framework = framework_for(type(self.like))
        if framework is None or any(framework_for(kind) is not framework for kind in kinds):
            return None
        self.framework, views = framework, given
        if not (len(kinds) == 1 and framework.computes_on(*kinds)):
            try:
                views = tuple(
                    a if a is None else framework.view(a, write=False, detach=True) for a in given
                )
            except (TypeError, ValueError):
                return None
        present = [view for view in views if view is not None]
        own = framework_for(type(present[0]))
        alike = len(set(map(type, present))) == 1
        return views if alike and own is not None and own.on_one_device(present) else None

    def _views_of_out(self) -> tuple[Array | None, ...]:
        """The caller's arrays for results as the backend's."""
        if self.are_views([array for array in self._out if array is not None]):
            return self._out
        labels = labels_of(len(self._out))
        return tuple(
            None if array is None else self.view(array, label, write=True)
            for array, label in zip(self._out, labels, strict=True)
        )

    def _open_in_place(self) -> dict[str, Any]:
        """The caller's arrays that are written in place, which become views in the call."""
        found = {}
        for name, _, instead in self.call.in_place:
            array = getattr(self.call, name)
            if array is not None:
                refuse_write(self.framework, name, instead)
                setattr(self.call, name, self.view(array, name, write=True))
                found[name] = array
        return found

    def _check_memory(self) -> None:
        """Raise unless results can be written where the caller wants them."""
        call, labels = self.call, labels_of(len(self.call.results))
        written = [
            (label, view)
            for label, view in zip(labels, self._outs, strict=False)
            if view is not None
        ]
        written += [(name, getattr(call, name)) for name in self._in_place]
        for label, view in written:
            memory.writable(view, label, RETURNED)
        names = [argument.name for argument in call.arguments]
        read = [
            (name, view)
            for name, view in zip(names, call.arrays(call), strict=True)
            if view is not None
        ]
        refuse_overlaps(self.backend, written, [*read, *self.numbers], self._may_be)

    def _may_be(self) -> list[list[Array | None]]:
        """For each array in ``out`` the arguments whose memory it may have."""
        pairs = zip(self.call.results, self._outs, strict=False)
        allowed = [
            [getattr(self.call, name) for name in result.may_be]
            for result, view in pairs
            if view is not None
        ]
        return allowed + [[] for _ in self._in_place]

    def _made(self, specs: Sequence[Spec | None]) -> tuple[list[Any], list[Array | None]]:
        """Results as the caller's arrays, ``None`` for those that are yet to be wrapped, and views.

        New ones are made for those that the caller has no array for.
        """
        arrays: list[Any] = list(self._out) or [None] * len(specs)
        views: list[Array | None] = list(self._outs) or [None] * len(specs)
        for k, spec in enumerate(specs):
            if spec is not None and views[k] is None:
                views[k], arrays[k] = self._new(spec)
        return arrays, views

    def _new(self, spec: Spec) -> tuple[Array, Any]:
        """A new result: a view, and the caller's array of that memory if the library made it."""
        array = None

        def allocate(shape: Any, dtype: Any) -> Array:
            nonlocal array
            made = self.framework.empty(shape, dtype, self.like)
            view, array = made or (self.backend.empty(shape, dtype), None)
            return view

        view = spec.allocate(allocate)
        if array is not None and spec.order is not None:
            array = array.permute(spec.order[1])
        return view, view if self.framework.returns_views else array


def _decide(call: Call, outs: Sequence[Array | None]) -> Plan:
    """The plan of an opened call, which sees descriptions in the place of arrays."""
    described = call.described(Described.of)
    labels = labels_of(len(outs))
    for name, label, out in zip(call.result_names, labels, outs, strict=False):
        described.__dict__[name] = None if out is None else Described.of(label, out)
    return call.layout.plan(described)
