"""The array arguments of one call: checked together, as native arrays, with the outputs."""

from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any, Protocol

from gradkit import _checks, _memory
from gradkit._arrays import Framework, Native, framework_of, named
from gradkit._dispatch import backend_of
from gradkit._dtypes import dtype_named, float_name

_OPTIONAL = ("scale", "bias")  # the arguments that may be absent

Spec = tuple[str, tuple[int, ...], str] | None  # an output's name, shape and dtype


class Call:
    """Array arguments by name, all of one framework; ``None`` stands for an absent one.

    ``call["x"]`` is the native array. The first argument decides the framework, the backend
    and what new results look like. Those named in ``write`` will be written in place.
    """

    def __init__(self, *, write: tuple[str, ...] = (), **arrays: Any):
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
            raise TypeError(
                f"{label} is a {framework.name} array, but {self._first} is a "
                f"{self.framework.name} array; the arrays of one call must be of one framework"
            )
        with named(lambda: label):
            return framework.view(array, write=write)

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
        self._inputs = list(inputs) if given_any else []
        self._reuse = reuse
        self.natives = [
            self._output(position, array, spec)
            for position, (array, spec) in enumerate(zip(self._given, specs, strict=True))
        ]
        written = [n for n, a in zip(self.natives, self._given, strict=True) if a is not None]
        if _memory.first_overlap(written) is not None:
            raise ValueError("two arrays in out share memory; each result needs its own")

    def results(self) -> tuple[Any, ...]:
        """The outputs as the caller's own objects, or as new arrays of the caller's type."""
        return tuple(map(self._result, self._given, self.natives))

    def _result(self, given: Any, native: Native) -> Any:
        framework = self._owner.framework
        if given is not None:
            framework.wrote(given)
            return given
        return None if native is None else framework.wrap(native, self._owner.like)

    def _output(self, position: int, array: Any, spec: Spec) -> Native:
        label = f"out[{position}]" if len(self._given) > 1 else "out"
        if spec is None:
            if array is not None:
                raise ValueError(f"{label} must be None: this call has no such result")
            return None
        name, shape, dtype = spec
        if array is None:
            empty, kind = self._owner.backend.empty, dtype_named(dtype)
            if self._like is not None and self._like[0] == position:
                return _memory.empty_in_order_of(self._like[1], lambda s: empty(s, kind))
            return empty(shape, kind)
        native = self._owner.view(array, label, write=True)
        _checks.shape(native, shape, label, f"the shape of {name}")
        if float_name(native.dtype) != dtype:
            raise TypeError(f"{label} has dtype {native.dtype}; {name} has dtype {dtype}")
        _checks.writable(native, label)
        alias = self._reuse[1] if self._reuse and self._reuse[0] == position else None
        for other, source in self._inputs:
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
