"""A caller's gradients, opened: checked, seen as a backend's arrays, and with the way back."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy
from itertools import chain, compress, islice, repeat
from operator import attrgetter, is_
from typing import Any, NoReturn, TypeAlias

import numpy as np

from gradkit import _host
from gradkit._arrays import (
    HOST,
    NOTHING,
    Framework,
    backend_of,
    framework_for,
    is_array,
    is_library_new,
)
from gradkit._backend import Array, Number, Shape, Spec, Spread, Views, picked
from gradkit._calls.backend import Backend
from gradkit._calls.roles import Grads
from gradkit._dtypes import float_name
from gradkit._host import chosen
from gradkit._open import memory, trees
from gradkit._open.arguments import (
    Arguments,
    check_device,
    floating,
    is_scalar,
    known_framework,
    refuse_mixture,
    refuse_write,
    same_device,
    view_of,
)
from gradkit._open.memory import Named
from gradkit._open.results import Results
from gradkit._open.several_devices import Share, Twins, backend_of_all, on_streams, spread
from gradkit._open.shards import parts_in

_NOTHING = np.empty(0)
_dtype_of, _shape_of = attrgetter("dtype"), attrgetter("shape")
_device_of = attrgetter("data.device_id")
_NUMPY = {np.ndarray}
_UNKNOWN = [None]  # in the place of leaves: no array

Beside: TypeAlias = Callable[[], Mapping[str, Any]]


class Gradients(Arguments):
    """The gradients of one call: all of one library, on one device or, if ``several``, on more.

    Then some may also be in host memory, as arrays of that library or of NumPy.

    ``tree`` is the caller's container (one-shot iterables made into lists), ``arrays`` its
    leaves in order without the ``None`` ones, ``views`` the same memory as the backend's arrays.
    An empty list is of the library and on the device of the first array ``beside`` it, which gives
    a call's other arguments by name, or else NumPy's. ``instead``: they will be written in place,
    and this says what to do if that cannot be. ``label`` is the argument's name. Gradients of
    several devices have a share for each, and results that are no gradients lie on the first's.
    ``floats``: they are floating-point arrays; else of any dtype whose elements are 1, 2, 4 or 8
    bytes.
    """

    __slots__ = (
        "_floats",
        "_instead",
        "_is_frozen",
        "_label",
        "_plain",
        "_several",
        "_tree",
        "arrays",
        "is_flat",
        "shares",
        "views",
    )
    arrays: list[Any]
    views: Grads
    shares: list[Share]

    def __init__(
        self,
        grads: Any,
        *,
        instead: str = "",
        label: str = "grads",
        beside: Beside | None = None,
        several: bool = False,
        floats: bool = True,
    ):
        self.numbers, self.counted = [], []
        self._label, self._instead, self._several, self._floats = label, instead, several, floats
        table = grads if isinstance(grads, _host.Table) else _table_of(grads, instead)
        if table is not None:  # nearly always
            self._tree, self._is_frozen, self._plain = table.tree, False, table.device < 0
            self.arrays, self.views, self.shares = table.arrays, table, []
            self.is_flat, self.like = table.is_flat, self.arrays[0]
            self.framework = known_framework(self.like, label)
            self.backend = backend_of_table(table, self.framework)
            return
        # A thousand small gradients are looked at together, and each by itself only if something
        # is unusual: the checks must not take longer than the work.
        self._tree, self._is_frozen = grads, False
        self.arrays, self.is_flat = _leaves_of(grads)
        kinds = set(map(type, self.arrays))
        frameworks = set(map(framework_for, kinds))
        if None in frameworks:  # containers of other types, or what is no array
            self._tree, self._is_frozen = trees.freeze(grads), True
            self.arrays = trees.leaves(self._tree)
            self.is_flat = self._tree is self.arrays
            kinds = set(map(type, self.arrays))
            frameworks = set(map(framework_for, kinds))
        self._plain = kinds <= _NUMPY
        self.views, self.shares = self.arrays, []
        if self._plain:
            self.framework, self.backend = HOST, chosen.get()
        else:
            self._see(kinds, frameworks)
        if self.shares:
            self.like = self.shares[0].like
        elif self.arrays:
            self.like = self.arrays[0]
        else:
            self.like = _NOTHING
            self._join({} if beside is None else beside())
        self._check()

    @property
    def tree(self) -> Any:
        """The caller's container, with every one-shot iterable made a list."""
        if self.is_flat:
            return self.arrays
        if not self._is_frozen:
            tree = trees.freeze(self._tree)
            leaves = trees.leaves(tree)
            if len(leaves) != len(self.arrays) or not all(map(is_, leaves, self.arrays)):
                raise RuntimeError(f"{self._label} changed while gradkit worked on its arrays")
            self._tree, self._is_frozen = tree, True
        return self._tree

    def names(self) -> Iterator[str]:
        """The expression that reaches each gradient: ``grads['layer1'][0]``."""
        return trees.names(self.tree, self._label)

    def each(self, values: Any, label: str) -> Iterator[Any]:
        """Values for each, from a function of name and array or from a container like theirs."""
        if callable(values):
            return map(values, trees.dotted_names(self.tree, self._label), self.arrays)
        if not isinstance(values, (Mapping, list)):
            return repeat(values, len(self.arrays))
        return iter(trees.spread(values, self.tree, label, self._label))

    def named(self) -> Iterator[tuple[str, Array]]:
        """Each gradient's name and view."""
        return zip(self.names(), self.views, strict=True)

    def dtypes(self) -> Iterable[Any]:
        """The dtype of each, as its library or NumPy has it."""
        views = self.views
        return map(_dtype_of, views.arrays if isinstance(views, _host.Table) else views)

    def shapes(self) -> Iterable[Shape]:
        """The shape of each."""
        views = self.views
        return map(_shape_of, views.arrays if isinstance(views, _host.Table) else views)

    def name(self, index: int) -> str:
        """The expression that reaches one gradient; for many, `names` walks the tree once."""
        if self.is_flat:
            return f"{self._label}[{index}]"
        return next(islice(trees.walk(self.tree, self._label), index, None))[0]

    def first(self) -> tuple[str, Array | None]:
        if self.shares:
            return self.shares[0].first()
        return (self.name(0), self.views[0]) if self.arrays else (self._label, None)

    def number(self, value: Any, label: str) -> Number:
        """As `Arguments.number`, but copy an array, since it may share memory with a gradient."""
        if type(value) is float:
            return value
        number = super().number(value, label)
        if isinstance(number, float) or not self._instead:
            return number
        duplicate = self.backend.empty((), number.dtype)
        duplicate[...] = number
        return duplicate

    def near(self, number: Array, label: str) -> Array:
        for place, share in enumerate(self.shares[1:], 1):
            if same_device(number, share.first()[1]):
                return self.backend.bring(number, place)  # type: ignore[attr-defined]
        return super().near(number, label)

    def on_stream(self) -> AbstractContextManager[Any]:
        if self._plain:
            return NOTHING
        if self.shares:
            return on_streams(self.shares, self.backend)
        return self.framework.on_stream(self.like)

    def outputs(
        self,
        out: Any,
        specs: Sequence[Spec],
        *,
        apart: Iterable[Any] = (),
        others: Iterable["Gradients"] = (),
        label: str | tuple[str, ...] = "out",
    ) -> Results:
        """A call's further results, which share no memory with gradients or named arrays.

        ``others`` are further lists of the call.
        """
        results = Results(self, out, len(specs), label)
        if out is not None:
            near = [each for each in (self, *others) if not each._lie_apart_from(results.views)]
            named = chain.from_iterable(each.named() for each in near)
            results.check(specs, [*named, *self.numbers, *apart])
        results.make(specs)
        return results

    def twins(
        self,
        out: tuple[Any, ...] | None,
        specs: Sequence[Spec],
        labels: tuple[str, ...],
        apart: Iterable[Any],
    ) -> Results | Twins:
        """The same for results like the gradients, each on the device of its own."""
        if self.shares:

            def inputs() -> Named:
                return [*self.named(), *self.numbers, *apart]

            return Twins.of(self.shares, out, specs, labels, inputs)
        return self.outputs(out, specs, apart=apart, label=labels)

    def refuse_overlap(self, view: Array, label: str) -> None:
        """Raise if an array that is read while these are written has bytes among theirs."""
        if self._lie_apart_from([view]):
            return
        for k, _ in memory.meetings(self.backend, self.views, [view]):
            raise ValueError(f"{label} overlaps {self.name(k)}; pass a copy")

    def _lie_apart_from(self, views: Iterable[Array | None]) -> bool:
        """True if a quick look shows that they share no memory with other arrays."""
        if self._plain:
            return memory.plainly_apart([*views], self.views)
        present = [view for view in views if view is not None]
        if not (present and isinstance(self.views, _host.Table)):
            return not present
        others = _host.code.table(present, False)
        return others is not None and _host.code.apart(self.views, others)

    def refuse_shards(self, hint: str) -> None:
        """Raise if some are parts of gradients, which lie on several ranks."""
        may_be_parts = not (isinstance(self.views, _host.Table) or self.is_flat)
        if may_be_parts and any(True for _ in parts_in(self.tree)):
            raise ValueError(f"{self._label} are this rank's parts of gradients; {hint}")

    def picked(self, chosen: Sequence[bool]) -> "Gradients":
        """Select gradients, in the same places: the others become ``None``."""
        leaves = (a if one else None for a, one in zip(self.arrays, chosen, strict=True))
        few = copy(self)
        few._tree = trees.rebuild(self.tree, leaves, close=lambda container: container)
        few._is_frozen, few.is_flat = True, False
        few.arrays = list(compress(self.arrays, chosen))
        few.views = picked(self.views, chosen)
        return few

    def rebuilt(self, results: Iterable[Any]) -> Any:
        """Results, one a gradient, in the caller's own container."""
        return trees.rebuild(self.tree, iter(results))

    def returned(self, grads: Any) -> Any:
        """Return the caller's own object, as in-place functions do."""
        return self.rebuilt(self.arrays) if isinstance(grads, Iterator) else grads

    def wrote(self) -> None:
        """Tell the library that every gradient's memory was written."""
        if self.framework.returns_views:
            return
        arrays = self.arrays
        if self._beside_host():
            arrays = [array for array in arrays if framework_for(type(array)) is self.framework]
        self.framework.wrote(arrays)  # a library that has arrays of its own

    def _join(self, beside: Mapping[str, Any]) -> None:
        for label, array in beside.items():
            if is_array(array) and not is_scalar(array):
                self.framework, self.like = known_framework(array, label), array
                self.backend = backend_of(view_of(self.framework, array, label, detach=True))
                return

    def _refuse_mixture(self) -> NoReturn:
        named = zip(self.arrays, self.names(), strict=True)
        frameworks = [known_framework(array, name) for array, name in named]
        first = frameworks[0]
        index = next(i for i, framework in enumerate(frameworks) if framework is not first)
        refuse_mixture(self.name(index), frameworks[index], self.name(0), first)

    def _see(self, kinds: set[type], frameworks: set[Framework | None]) -> None:
        """Make views of the arrays, and find what computes on them."""
        framework, *others = (frameworks - {HOST} if self._several else ()) or frameworks
        if framework is None or others:
            self._refuse_mixture()
        self.framework = framework
        opened: Sequence[Array]
        if self._instead and framework.immutable:
            refuse_write(framework, self.name(0), self._instead)
        if len(frameworks) > 1:
            opened = spread(self._viewed_beside_host())
        elif len(kinds) == 1 and all(map(framework.computes_on, kinds)):
            if framework.on_one_device(self.arrays):
                self.views = Views(self.arrays)
                self.backend = framework.backend_of(self.arrays[0])
                return
            opened = self._of_devices(self.arrays)
        else:
            opened = self._viewed()
        self.views = opened if isinstance(opened, Spread) else Views(opened)
        if isinstance(opened, Spread):
            self.shares = [
                Share(place, self.arrays, self.name(place.positions[0])) for place in opened.places
            ]
            self.backend = backend_of_all(opened)
        else:
            self.backend = backend_of(self.views[0])

    def _beside_host(self) -> bool:
        """True if arrays are of two libraries, of which NumPy is one."""
        return bool(self.shares) and self.shares[-1].framework is not self.framework

    def _viewed_beside_host(self) -> list[Array]:
        """The same of NumPy's arrays and those of a library that are on devices."""
        write = bool(self._instead)
        views = [
            view_of(known_framework(array, name), array, name, write=write)
            for array, name in zip(self.arrays, self.names(), strict=True)
        ]
        for array, view in zip(self.arrays, views, strict=True):
            if type(view) is np.ndarray and framework_for(type(array)) is not HOST:
                self._refuse_mixture()
        return views

    def _viewed(self) -> Grads:
        write = bool(self._instead)
        try:
            views = self.framework.views(self.arrays, write=write)
        except (TypeError, ValueError):
            for array, name in zip(self.arrays, self.names(), strict=True):  # to say which
                view_of(self.framework, array, name, write=write)
            raise
        kinds = set(map(type, views))
        if kinds - _NUMPY and (len(kinds) > 1 or len(set(map(_device_of, views))) > 1):
            return self._of_devices(views)
        return views

    def _of_devices(self, views: Sequence[Array]) -> Sequence[Array]:
        """Views that differ in their devices, if the call accepts that."""
        kind = type(views[0])
        if self._several and len(set(map(type, views)) - _NUMPY) == 1:
            return spread(views)
        for index, view in enumerate(views):
            if type(view) is not kind or not (self._several or same_device(view, views[0])):
                check_device(view, self.name(index), views[0], self.name(0))
        return views

    def _check(self) -> None:
        """Raise unless all are floating-point arrays, and can be written if they will be."""
        self._check_elements()
        if self._instead:
            self._check_writable()

    def _check_elements(self) -> None:
        if not self._floats:
            for view, name in zip(self.views, self.names(), strict=True):
                if view.dtype.hasobject or view.dtype.itemsize not in (1, 2, 4, 8):
                    raise TypeError(
                        f"{name} has dtype {view.dtype}; accepted: numbers and bools of up to 8 "
                        "bytes"
                    )
            return
        if None not in map(float_name, set(map(_dtype_of, self.views))):
            return
        for view, name in zip(self.views, self.names(), strict=True):
            floating(view, name, self.framework)

    def _check_writable(self) -> None:
        if memory.plainly_apart(self.views, ()):
            return
        for view, name in zip(self.views, self.names(), strict=True):
            memory.writable(view, name, self._instead)
        pair = memory.first_overlap(self.backend, self.views)
        if pair is not None:
            first, second = map(self.name, pair)
            raise ValueError(
                f"{first} and {second} share memory, which would be written twice; pass each "
                "gradient once"
            )


def backend_of_table(table: Any, framework: Framework) -> Backend:
    """Return the backend of a table's arrays."""
    if table.device < 0:
        return chosen.get()
    backend = framework.known_backend(table.device)
    return backend or backend_of(framework.view(table.arrays[0], write=False))


def _leaves_of(grads: Any) -> tuple[list[Any], bool]:
    """The leaves of plain dicts, lists and tuples, and whether it is a list of nothing else."""
    if type(grads) is list and None not in map(framework_for, set(map(type, grads))):
        return [*grads], True
    leaves = _host.code and _host.code.leaves(grads)
    return leaves or (_UNKNOWN, False)


def _table_of(grads: Any, instead: str) -> Any:
    if _host.code is None:
        return None
    table = _host.code.table(grads, bool(instead))
    if table is None and is_library_new():
        table = _host.code.table(grads, bool(instead))
    return table
