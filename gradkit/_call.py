"""The array arguments of one call: checked together, as native arrays, with the outputs."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, Protocol

from gradkit import _checks, _memory
from gradkit._arrays import (
    HOST,
    Framework,
    Native,
    beside,
    framework_of,
    is_scalar,
    refuse_write,
    same_device,
    view_of,
)
from gradkit._dispatch import backend_of
from gradkit._dtypes import dtype_named, float_name

_OPTIONAL = ("scale", "bias")  # the arguments that may be absent

Spec = tuple[str, tuple[int, ...], str] | None  # an output's name, shape and dtype
RETURNED = "leave out=None and take the new arrays that are returned"


class Call:
    """Array arguments by name, all of one framework; ``None`` stands for an absent one.

    ``call["x"]`` is the native array. The first argument decides the framework, the backend
    and what new results look like. Those named in ``write`` will be written in place;
    ``instead`` says what to do where that cannot be. ``detach``: arrays that take part in
    differentiation are welcome, as they are where no gradient is meant.
    """

    def __init__(
        self,
        *,
        write: tuple[str, ...] = (),
        instead: str = RETURNED,
        detach: bool = True,
        **arrays: Any,
    ):
        self._instead, self._detach = instead, detach
        self._first, self.like = next(iter(arrays.items()))
        self.framework = _framework_of(self.like, self._first)
        self._natives: dict[str, Native] = dict.fromkeys(arrays)
        for label, array in arrays.items():
            if array is not None or label not in _OPTIONAL:
                self._natives[label] = self.view(array, label, write=label in write)
        self.backend: ModuleType = backend_of(self[self._first])

    def __getitem__(self, label: str) -> Native:
        return self._natives[label]

    def view(self, array: Any, label: str, *, write: bool) -> Native:
        """An argument as a native array, once it is known to be of the call's framework."""
        framework = _framework_of(array, label)
        if framework is not self.framework:
            if is_scalar(array) and not write:
                with self.running():
                    return beside(array, self[self._first])
            raise TypeError(
                f"{label} is a {framework.name} array, but {self._first} is a "
                f"{self.framework.name} array; the arrays of one call must be of one framework"
            )
        if write:
            refuse_write(framework, label, self._instead)
        detach = self._detach and not write
        native = view_of(framework, array, label, write=write, detach=detach)
        if not (
            framework is HOST or label == self._first or same_device(native, self[self._first])
        ):
            raise ValueError(f"{label} and {self._first} are on different devices")
        return native

    def running(self) -> AbstractContextManager[Any]:
        """Where the call's work has to be queued: the caller's device and stream."""
        return self.framework.running(self.like)

    def dtype(self, *labels: str) -> str | None:
        """The one floating dtype of the arguments that are present, by name."""
        found: tuple[str, str] | None = None
        for label in labels:
            if self[label] is None:
                continue
            name = _checks.floating(self[label], label)
            if found and found[1] != name:
                raise TypeError(
                    f"{label} has dtype {name} and {found[0]} has dtype {found[1]}; they must agree"
                )
            found = found or (label, name)
        return found[1] if found else None

    def expect_dtype(self, label: str, expected: str) -> None:
        """Raise unless an argument has one certain dtype."""
        if float_name(self[label].dtype) != expected:
            raise TypeError(f"{label} has dtype {self[label].dtype}; accepted: {expected}")

    def outputs(
        self,
        out: Any,
        specs: Sequence[Spec],
        *,
        reuse: tuple[int, str] | None = None,
        laid_out: tuple[int, str] | None = None,
    ) -> "Outputs":
        """The call's outputs.

        ``reuse`` is the position of one and the input that it may be, ``laid_out`` that of one
        and the input whose order in memory it gets where it is new.
        """
        present = ((label, native) for label, native in self._natives.items() if native is not None)
        like = None if laid_out is None else (laid_out[0], self[laid_out[1]])
        return Outputs(self, out, specs, present, reuse, like)


class Owner(Protocol):
    """What outputs need to know of the call that they belong to."""

    framework: Framework
    backend: ModuleType

    @property
    def like(self) -> Any:
        """The array whose type and device new results have."""

    def view(self, array: Any, label: str, *, write: bool) -> Native:
        """An argument as a native array of the call's framework."""


class Outputs:
    """A call's results: the caller's own arrays where ``out`` has them, new ones elsewhere.

    ``natives`` are there to be written; ``results()`` are what the caller gets. An output may
    share memory with no input, except that the one at ``reuse[0]`` may be the very input
    named ``reuse[1]``.
    """

    def __init__(
        self,
        owner: Owner,
        out: Any,
        specs: Sequence[Spec],
        inputs: Iterable[tuple[str, Native]],
        reuse: tuple[int, str] | None = None,
        like: tuple[int, Native] | None = None,
    ):
        self._owner = owner
        self._like = like
        self._given = _as_tuple(out, len(specs))
        given_any = any(array is not None for array in self._given)
        self._inputs = (
            [(*pair, _memory.byte_range(pair[1])) for pair in inputs] if given_any else []
        )
        self._reuse = reuse
        self._arrays = list(self._given)  # new ones join where they exist before they are filled
        self.natives = [
            self._output(position, array, spec)
            for position, (array, spec) in enumerate(zip(self._given, specs, strict=True))
        ]
        written = [n for n, a in zip(self.natives, self._given, strict=True) if a is not None]
        if _memory.first_overlap(written) is not None:
            raise ValueError("two arrays in out share memory; each result needs its own")

    def results(self) -> tuple[Any, ...]:
        """The outputs as the caller's own objects, or as new arrays of the caller's type."""
        framework, like = self._owner.framework, self._owner.like
        written = [array for array in self._given if array is not None]
        if written:
            framework.wrote(written)
        return tuple(
            framework.wrap(native, like) if array is None and native is not None else array
            for array, native in zip(self._arrays, self.natives, strict=True)
        )

    def _new(self, position: int, shape: tuple[int, ...], dtype: str) -> Native:
        owner, places = self._owner, None
        if self._like is not None and self._like[0] == position:
            shape, places = _memory.in_memory_order(self._like[1])
        native, array = owner.framework.empty(owner.backend, shape, dtype_named(dtype), owner.like)
        if places is not None:
            native = native.transpose(places)
            array = None if array is None else array.permute(places)
        self._arrays[position] = array
        return native

    def _output(self, position: int, array: Any, spec: Spec) -> Native:
        if array is None:
            return None if spec is None else self._new(position, *spec[1:])
        label = f"out[{position}]" if len(self._given) > 1 else "out"
        if spec is None:
            raise ValueError(f"{label} must be None: this call has no such result")
        name, shape, dtype = spec
        native = self._owner.view(array, label, write=True)
        _checks.shape(native, shape, label, f"the shape of {name}")
        if float_name(native.dtype) != dtype:
            raise TypeError(f"{label} has dtype {native.dtype}; {name} has dtype {dtype}")
        _checks.writable(native, label)
        alias = self._reuse[1] if self._reuse and self._reuse[0] == position else None
        low, high = _memory.byte_range(native)
        for other, source, (start, end) in self._inputs:
            if end <= low or high <= start:  # as nearly always
                continue
            same = other == alias and _memory.same_elements(native, source)
            if not same and _memory.overlap(native, source):
                rather = f" without being {alias} itself" if alias else ""
                raise ValueError(f"{label} shares memory with {other}{rather}; pass another array")
        return native


def _framework_of(array: Any, label: str) -> Framework:
    framework = framework_of(array)
    if framework is None:
        raise TypeError(f"{label} must be an array, not {type(array).__qualname__}")
    return framework


def _as_tuple(out: Any, count: int) -> tuple[Any, ...]:
    if out is None:
        return (None,) * count
    if framework_of(out) is not None and count == 1:
        return (out,)
    if not isinstance(out, tuple) or len(out) != count:
        wanted = f"a tuple of {count}" if count > 1 else "an array or a tuple of 1"
        given = f"a tuple of {len(out)}" if isinstance(out, tuple) else type(out).__qualname__
        raise TypeError(f"out must be {wanted} (None for what may be allocated), not {given}")
    return out
