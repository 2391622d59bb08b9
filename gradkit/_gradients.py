"""A caller's gradients, opened: checked, seen as native arrays, and with the way back."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from operator import attrgetter
from types import ModuleType
from typing import Any, NoReturn

import numpy as np

from gradkit import _checks, _memory, _tree
from gradkit._arrays import (
    HOST,
    Framework,
    Native,
    framework_of,
    is_array,
    refuse_write,
    same_device,
    view_of,
)
from gradkit._call import RETURNED, Outputs, Spec
from gradkit._dispatch import backend_of
from gradkit._dtypes import float_name

_NOTHING = np.empty(0)
_dtype_of = attrgetter("dtype")
_simply_writable = attrgetter("flags.carray")  # in C order, aligned and writeable


class Gradients:
    """The gradients of one call: all of one framework, on one device.

    ``tree`` is the caller's container (one-shot iterables made into lists), ``arrays`` its
    leaves in order without the ``None`` ones, ``natives`` the same memory as native arrays.
    An empty list counts as NumPy's. ``instead`` says what to do where gradients cannot be
    written.
    """

    def __init__(self, grads: Any, *, write: bool, label: str = "grads", instead: str = RETURNED):
        self._label = label
        self.tree: Any
        self.arrays: list[Any]
        # What a thousand small gradients have in common is looked at once, and each by itself
        # only where something is unusual: the checks must not outlast the work.
        if _is_list_of_arrays(grads):
            self.tree = self.arrays = [*grads]
        else:
            self.tree = _tree.freeze(grads, is_array)
            self.arrays = _tree.leaves(self.tree, is_array)
        examples = _one_of_each_type(self.arrays)
        self._plain = [*map(type, examples)] == [np.ndarray]
        self.framework = HOST if self._plain else self._find_framework(examples)
        if write and self.framework.immutable:
            refuse_write(self.framework, self.name(0), instead)
        self.natives: Sequence[Native] = self.arrays if self._plain else self._views(write)
        self.backend: ModuleType = backend_of(self.natives[0] if self.natives else _NOTHING)
        self._check_elements()
        if write:
            self._check_writable()

    def name(self, index: int) -> str:
        """The expression that reaches one gradient: ``grads['layer1'][0]``."""
        return _tree.name_of(self.tree, is_array, index, self._label)

    @property
    def like(self) -> Any:
        """The array whose type and device new results have."""
        return self.arrays[0] if self.arrays else _NOTHING

    def view(self, array: Any, label: str, *, write: bool) -> Native:
        """A further argument as a native array; of the same framework."""
        framework = framework_of(array)
        if framework is not self.framework:
            found = type(array).__qualname__ if framework is None else f"{framework.name} array"
            raise TypeError(f"{label} is a {found}; expected an array as {self._label} has them")
        if write:
            refuse_write(framework, label, RETURNED)
        native = view_of(framework, array, label, write=write)
        if self.natives and not same_device(native, self.natives[0]):
            raise ValueError(f"{label} and {self.name(0)} are on different devices")
        return native

    def running(self) -> AbstractContextManager[Any]:
        """Where the call's work has to be queued: the caller's device and stream."""
        return self.framework.running(self.like)

    def outputs(
        self, out: Any, specs: Sequence[Spec], *, apart: Iterable[tuple[str, Native]] = ()
    ) -> Outputs:
        """A call's further results, which share no memory with the gradients or with ``apart``."""
        names = (name for name, _ in _tree.walk(self.tree, is_array, self._label))
        own = zip(names, self.natives, strict=True)
        return Outputs(self, out, specs, chain(own, apart))

    def wrap(self, native: Native) -> Any:
        """A native result as the caller's own array type."""
        return self.framework.wrap(native, self.like)

    def rebuilt(self, results: Iterable[Any]) -> Any:
        """Results, one a gradient, in the caller's own container."""
        return _tree.rebuild(self.tree, is_array, iter(results))

    def returned(self, grads: Any) -> Any:
        """What an in-place function gives back: the caller's own object."""
        return self.tree if isinstance(grads, Iterator) else grads

    def wrote(self) -> None:
        """Tell the framework that every gradient's memory was written."""
        self.framework.wrote(self.arrays)

    def _find_framework(self, examples: Iterable[Any]) -> Framework:
        found = set(map(framework_of, examples))
        framework = found.pop() if found else HOST
        if framework is None or found:
            self._refuse_mixture()
        return framework

    def _refuse_mixture(self) -> NoReturn:
        first: dict[Framework, int] = {}
        for index, array in enumerate(self.arrays):
            framework = framework_of(array)
            if framework is None:
                raise TypeError(
                    f"{self.name(index)} is a {type(array).__qualname__}; accepted: floating-point "
                    "arrays, None, and lists, tuples, dicts or iterables of them"
                )
            first.setdefault(framework, index)
        (one, i), (other, j) = list(first.items())[:2]
        raise TypeError(
            f"{self.name(j)} is a {other.name} array and {self.name(i)} a {one.name} array; the "
            "arrays of one call must be of one framework"
        )

    def _views(self, write: bool) -> Sequence[Native]:
        try:
            natives = self.framework.views(self.arrays, write=write)
        except (TypeError, ValueError):
            for index, array in enumerate(self.arrays):  # once more, to say which
                view_of(self.framework, array, self.name(index), write=write)
            raise
        if set(map(type, natives)) != {np.ndarray}:
            self._check_device(natives)
        return natives

    def _check_device(self, natives: Sequence[Native]) -> None:
        if len(natives) < 2:
            return
        if len(set(map(type, natives))) == 1:
            on_host = isinstance(natives[0], np.ndarray)
            device = attrgetter("device" if on_host else "data.device_id")
            if len(set(map(device, natives))) == 1:
                return
        for index, native in enumerate(natives):
            if not same_device(native, natives[0]):
                raise ValueError(f"{self.name(0)} and {self.name(index)} are on different devices")

    def _check_elements(self) -> None:
        if None not in map(float_name, set(map(_dtype_of, self.natives))):
            return
        for index, native in enumerate(self.natives):
            _checks.floating(native, self.name(index))

    def _check_writable(self) -> None:
        if self.framework.apart(self.arrays):
            return
        if not (self._plain and all(map(_simply_writable, self.natives))):
            for index, native in enumerate(self.natives):
                flags = native.flags
                if not (flags.c_contiguous and getattr(flags, "writeable", True)):
                    _checks.writable(native, self.name(index))
        pair = _memory.first_overlap(self.natives)
        if pair is not None:
            first, second = map(self.name, pair)
            raise ValueError(
                f"{first} and {second} share memory, which would be written twice; pass each "
                "gradient once"
            )


def _is_list_of_arrays(grads: Any) -> bool:
    return type(grads) is list and all(map(is_array, _one_of_each_type(grads)))


def _one_of_each_type(values: Sequence[Any]) -> Iterable[Any]:
    return dict(zip(map(type, values), values, strict=True)).values()
