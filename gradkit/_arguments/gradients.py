"""A caller's gradients, opened: checked, seen as a backend's arrays, and with the way back."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from operator import attrgetter
from typing import Any, NoReturn

import numpy as np

from gradkit._arguments import checks, memory, trees
from gradkit._arguments.given import (
    RETURNED,
    Given,
    check_device,
    known_framework,
    refuse_mixture,
    refuse_write,
    same_device,
    view_of,
)
from gradkit._arguments.outputs import Named, Outputs
from gradkit._arguments.signatures import Spec
from gradkit._backend import Array, Borrowed, Views
from gradkit._dtypes import float_name
from gradkit._frameworks import HOST, Framework, backend_of, framework_for, is_array

_NOTHING = np.empty(0)
_HOST_BACKEND = HOST.backend_of(_NOTHING)
_dtype_of, _device_of = attrgetter("dtype"), attrgetter("data.device_id")
_simply_writable = attrgetter("flags.carray")  # in C order, aligned and writeable


class Gradients(Given):
    """The gradients of one call: all of one library, on one device.

    ``tree`` is the caller's container (one-shot iterables made into lists), ``arrays`` its
    leaves in order without the ``None`` ones, ``views`` the same memory as the backend's arrays.
    An empty list counts as NumPy's. ``write``: they will be written in place, and ``instead``
    says what to do if that cannot be. ``label`` is the argument's name.
    """

    __slots__ = ("_label", "_plain", "arrays", "tree", "views")

    def __init__(self, grads: Any, *, write: bool, instead: str = RETURNED, label: str = "grads"):
        self._label = label
        self.tree: Any
        self.arrays: list[Any]
        # What a thousand small gradients have in common is looked at once, and each by itself
        # only if something is unusual: the checks must not take longer than the work.
        kinds = set(map(type, grads)) if type(grads) is list else {type(None)}
        if all(map(framework_for, kinds)):
            self.tree = self.arrays = [*grads]
        else:
            self.tree = trees.freeze(grads, is_array)
            self.arrays = trees.leaves(self.tree, is_array)
            kinds = set(map(type, self.arrays))
        self._plain = kinds <= {np.ndarray}
        self.views: Sequence[Array] = self.arrays
        if self._plain:
            self.framework, self.backend = HOST, _HOST_BACKEND
        else:
            self.framework = self._framework(kinds)
            if write and self.framework.immutable:
                refuse_write(self.framework, self.name(0), instead)
            opened = self._opened(kinds, write)
            self.views = opened if isinstance(opened, Borrowed) else Views(opened)
            self.backend = backend_of(self.views[0])
        self.like = self.arrays[0] if self.arrays else _NOTHING
        self._check_elements()
        if write:
            self._check_writable()

    def names(self) -> Iterator[str]:
        """The expression that reaches each gradient: ``grads['layer1'][0]``."""
        return trees.names(self.tree, is_array, self._label)

    def name(self, index: int) -> str:
        """The expression that reaches one gradient; for many, `names` walks the tree once."""
        return next(islice(self.names(), index, None))

    def first(self) -> tuple[str, Array | None]:
        return (self.name(0), self.views[0]) if self.arrays else (self._label, None)

    def outputs(
        self, out: Any, specs: Sequence[Spec], *, apart: Iterable[Any] = (), label: str = "out"
    ) -> Outputs:
        """A call's further results, which share no memory with gradients or named arrays."""

        def inputs() -> Named:
            return list(chain(zip(self.names(), self.views, strict=True), apart))

        return Outputs(self, out, specs, inputs, label=label)

    def rebuilt(self, results: Iterable[Any]) -> Any:
        """Results, one a gradient, in the caller's own container."""
        return trees.rebuild(self.tree, is_array, iter(results))

    def returned(self, grads: Any) -> Any:
        """What an in-place function gives back: the caller's own object."""
        return self.tree if isinstance(grads, Iterator) else grads

    def wrote(self) -> None:
        """Tell the library that every gradient's memory was written."""
        self.framework.wrote(self.arrays)

    def _framework(self, kinds: Iterable[type]) -> Framework:
        found = set(map(framework_for, kinds))
        framework = found.pop()
        if framework is None or found:
            self._refuse_mixture()
        return framework

    def _refuse_mixture(self) -> NoReturn:
        named = zip(self.arrays, self.names(), strict=True)
        frameworks = [known_framework(array, name) for array, name in named]
        first = frameworks[0]
        index = next(i for i, framework in enumerate(frameworks) if framework is not first)
        refuse_mixture(self.name(index), frameworks[index], self.name(0), first)

    def _opened(self, kinds: set[type], write: bool) -> Sequence[Array]:
        framework = self.framework
        if len(kinds) == 1 and all(map(framework.computes_on, kinds)):
            if not framework.on_one_device(self.arrays):
                self._refuse_devices(self.arrays)
            return framework.columns(self.arrays) or self.arrays
        try:
            views = self.framework.views(self.arrays, write=write)
        except (TypeError, ValueError):
            for array, name in zip(self.arrays, self.names(), strict=True):  # to say which
                view_of(self.framework, array, name, write=write)
            raise
        if not isinstance(views, Borrowed) and set(map(type, views)) != {np.ndarray}:
            self._check_device(views)
        return views

    def _check_device(self, views: Sequence[Array]) -> None:
        if len(set(map(type, views))) != 1 or len(set(map(_device_of, views))) != 1:
            self._refuse_devices(views)

    def _refuse_devices(self, views: Sequence[Array]) -> None:
        for index, view in enumerate(views):
            if not same_device(view, views[0]):
                check_device(view, self.name(index), views[0], self.name(0))

    def _check_elements(self) -> None:
        if isinstance(self.views, Borrowed):  # only floating-point arrays are
            return
        if None not in map(float_name, set(map(_dtype_of, self.views))):
            return
        for view, name in zip(self.views, self.names(), strict=True):
            checks.floating(view, name)

    def _check_writable(self) -> None:
        if self.framework.known_disjoint(self.arrays, self.views):
            return
        if not (self._plain and all(map(_simply_writable, self.views))):
            for view, name in zip(self.views, self.names(), strict=True):
                flags = view.flags
                if not (flags.c_contiguous and getattr(flags, "writeable", True)):
                    checks.writable(view, name)
        pair = memory.first_overlap(self.backend, self.views)
        if pair is not None:
            first, second = map(self.name, pair)
            raise ValueError(
                f"{first} and {second} share memory, which would be written twice; pass each "
                "gradient once"
            )
