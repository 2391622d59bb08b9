"""Arguments of a call: of one library, on one device, or an error names the one that differs."""

import math
from array import array
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from numbers import Real
from typing import Any, NoReturn

import numpy as np

from gradkit._arrays import HOST, Framework, backend_of, framework_of, is_array
from gradkit._backend import Array, Number
from gradkit._calls import checks
from gradkit._calls.backend import Backend
from gradkit._calls.roles import Seed, Step
from gradkit._open import memory

_ONE = "one number"
_MOST_STEPS = np.iinfo(np.int64).max
# Hints on what to pass in place of objects that look like arrays, by their library.
_INSTEAD = {
    "pandas": "what its .to_numpy() returns",
    "scipy": "its .data, the elements that it stores",
    "tinygrad": "what its .numpy() returns",
}
RETURNED = "leave out=None and take the new arrays that are returned"


class Arguments:
    """The arrays of one call: all of one library, on one device.

    ``like`` is the array whose type and device new results have, ``backend`` what computes.
    ``numbers`` are arrays of one number, by name; ``counted`` the caller's step counts that the
    call writes.
    """

    __slots__ = ("backend", "counted", "framework", "like", "numbers")
    backend: Backend
    framework: Framework
    like: Any

    def __init__(self) -> None:
        self.numbers: list[tuple[str, Array]] = []
        self.counted: list[Any] = []

    def first(self) -> tuple[str, Array | None]:
        """The name and the view of the array that decides the library and the device."""
        raise NotImplementedError

    def view(self, array: Any, label: str, *, write: bool = False, detach: bool = False) -> Array:
        """A further argument as an array of this call's backend."""
        framework = known_framework(array, label)
        if framework is not self.framework:
            refuse_mixture(label, framework, self.first()[0], self.framework)
        if write:
            refuse_write(framework, label, RETURNED)
        return self._beside(view_of(framework, array, label, write=write, detach=detach), label)

    def are_views(self, arrays: Sequence[Any]) -> bool:
        """True if all may be written as they are, which is the common case; if not, see `view`."""
        kind, framework = type(self.like), self.framework
        return (
            {kind}.issuperset(map(type, arrays))
            and framework.computes_on(kind)
            and framework.on_one_device([self.like, *arrays])
        )

    def argument(self, array: Any, label: str, *, detach: bool = True) -> Array:
        """A further array that is read; a NumPy scalar may accompany those of any library."""
        if self.framework is not HOST and is_scalar(array):
            with self.on_stream():
                return backend_of(self.first()[1]).scalar(array)
        return self.view(array, label, detach=detach)

    def number(self, value: Any, label: str) -> Number:
        """One number: a float, or a 0-d float64 array where the call computes.

        One in host memory may be of any library, because the host waits for no device to read it.
        """
        if not is_array(value) or is_scalar(value):
            if self.framework is HOST and isinstance(value, np.ndarray):
                self.numbers.append((label, value))
            return checks.real(value, label)
        framework = known_framework(value, label)
        array = view_of(framework, value, label)
        checks.shape(array, (), label, _ONE)
        if _on_host(array) and array.dtype.kind in "iu":
            return checks.real(array, label)
        first_label, first = self.first()
        dtype = floating(array, label, framework)
        if first is None:  # nothing to compute on: the number's device does not matter
            return float(values_of(value, label))
        if _on_host(array) and not (framework is self.framework and _on_host(first)):
            return checks.real(array, label)
        if framework is not self.framework:
            refuse_mixture(label, framework, first_label, self.framework)
        view = self.near(array, label)
        self.numbers.append((label, array))
        return view if dtype == "float64" else self.backend.as_float64(view)

    def factor(self, value: Any, label: str) -> Number:
        """A number that is finite; one on the device is not looked at."""
        if type(value) is float and math.isfinite(value):
            return value
        factor = self.number(value, label)
        read = is_array(value) and not is_scalar(value) and self.first()[1] is None
        return factor if read or not isinstance(factor, float) else checks.finite(factor, label)

    def share(self, value: Any, label: str) -> Number:
        """A number from 0 to 1; one on the device is not looked at."""
        share = self.number(value, label)
        return checks.share(share, label) if isinstance(share, float) else share

    def flag(self, value: Any, label: str) -> Any:
        """A bool, or an array of one bool that is read on its device."""
        if checks.is_flag(value):
            return bool(value)
        if not is_array(value):
            kind = type(value).__qualname__
            raise TypeError(f"{label} must be a bool or a bool array, not {kind}")
        view = self.argument(value, label)
        if view.dtype != bool or view.size != 1:
            problem = f"{label} has dtype {view.dtype} and shape {view.shape}"
            raise TypeError(f"{problem}; expected one bool")
        return view

    def limit(self, value: Any, label: str) -> Number:
        """A number that is at least 0; one on the device is not looked at."""
        if type(value) is float and value >= 0:
            return value
        limit = self.number(value, label)
        return checks.nonnegative(limit, label) if isinstance(limit, float) else limit

    def rate(self, value: Any, label: str) -> Number:
        """A finite number that is at least 0; one on the device is not looked at."""
        rate = self.limit(value, label)
        return checks.finite(rate, label) if isinstance(rate, float) else rate

    def seed(self, value: Any, label: str) -> Seed:
        """An integer of 64 bits; one in an array on the device is read there."""
        if not is_array(value) or is_scalar(value):
            return checks.seed(value, label)
        framework = known_framework(value, label)
        view = view_of(framework, value, label)
        checks.shape(view, (), label, _ONE)
        if view.dtype not in ("int64", "uint64"):
            raise TypeError(f"{label} has dtype {view.dtype}; accepted: int64, uint64")
        if _on_host(view):
            return checks.seed(view[()], label)
        if framework is not self.framework:
            refuse_mixture(label, framework, self.first()[0], self.framework)
        return self.near(view, label)

    def count(self, value: Any, label: str) -> Step:
        """The number of a step, or an array that counts steps, which the call writes."""
        if not is_array(value) or isinstance(value, np.generic):
            return checks.step(value, label)
        framework = known_framework(value, label)
        if framework is not self.framework:
            refuse_mixture(label, framework, self.first()[0], self.framework)
        view = self.near(view_of(framework, value, label, write=True), label)
        checks.shape(view, (), label, _ONE)
        if view.dtype != np.int64:
            raise TypeError(f"{label} has dtype {view.dtype}; accepted: int64, or an int")
        memory.writable(view, label, "pass the number of the step as an int")
        if isinstance(view, np.ndarray) and not 0 <= view < _MOST_STEPS:
            allowed = "at least 0, the number of steps taken, and below 2**63 - 1"
            raise ValueError(f"{label} must be {allowed}, not {view!r}")
        self.counted.append(value)
        return view

    def indicator(self, value: Any, label: str) -> Array | None:
        """A bool, on the host, or an array of one number that is not 0 if it is true."""
        if value is None:
            return None
        if checks.is_flag(value):
            return np.asarray(float(value))
        if not is_array(value):
            kind = type(value).__qualname__
            hint = f"; pass bool({label})" if isinstance(value, Real) else ""
            raise TypeError(f"{label} must be a bool or an array of one number, not {kind}{hint}")
        view = self.argument(value, label)
        if view.dtype != bool:
            floating(view, label, self.framework)
        if view.size != 1:
            raise ValueError(f"{label} has shape {view.shape}; expected one number")
        self.numbers.append((label, view))
        return view.reshape(())

    def near(self, number: Array, label: str) -> Array:
        """A number where the call computes."""
        return self._beside(number, label)

    def _beside(self, view: Array, label: str) -> Array:
        if self.framework is HOST:
            return view
        first_label, first_view = self.first()
        if first_view is not None:
            check_device(view, label, first_view, first_label)
        return view

    def on_stream(self) -> AbstractContextManager[Any]:
        """A context whose work is queued on the caller's device and stream."""
        return self.framework.on_stream(self.like)

    def wrap(self, result: Array) -> Any:
        """A result as an array of the caller's type."""
        return self.framework.wrap(result, self.like)


def floating(view: Array, label: str, framework: Framework) -> str:
    """As `checks.floating`; an error has the cast as the caller's library writes it."""
    try:
        return checks.floating(view, label)
    except TypeError as error:
        raise TypeError(framework.in_its_words(str(error))) from None


def known_framework(value: Any, label: str) -> Framework:
    """The library of an argument that must be an array."""
    framework = framework_of(value)
    if framework is None:
        instead = _instead_of(value, label)
        hint = f"; pass {instead}" if instead else ""
        raise TypeError(f"{label} is {_kind_of(value)}; expected an array{hint}")
    return framework


def _kind_of(value: Any) -> str:
    kind = "array.array" if isinstance(value, array) else type(value).__qualname__
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"


def _instead_of(value: Any, label: str) -> str | None:
    """Say what to pass in place of an object that is no array."""
    if hasattr(value, "parameters") or hasattr(value, "named_parameters"):
        return "grads_of(model.parameters())"
    if hasattr(value, "grad"):
        return f"{label}.grad, or grads_of(parameters) for a list of them"
    if isinstance(value, str):
        pairs = "named_grads_of(pairs) if these are (name, parameter) pairs"
        return pairs if label.endswith("]") else None
    if isinstance(value, (Mapping, list, tuple)) and label in ("buffer", "grad"):
        return "containers to accumulate_grads"
    if isinstance(value, (list, tuple, array, memoryview)):
        return f"np.asarray({label}, np.float32)"
    if isinstance(value, Real) and "[" in label:  # of what was taken for a container of arrays
        return f"np.asarray({label.rpartition('[')[0]}, np.float32)"
    return _INSTEAD.get(type(value).__module__.partition(".")[0])


def values_of(array: Any, label: str) -> np.ndarray[Any, Any]:
    """An array's values on the host, for which this waits."""
    framework = known_framework(array, label)
    view = view_of(framework, array, label, detach=True)
    with framework.on_stream(array):
        return backend_of(view).read(view)


def view_of(
    framework: Framework, array: Any, label: str, *, write: bool = False, detach: bool = False
) -> Array:
    """An argument as an array that a backend computes on; an error begins with its name."""
    try:
        return framework.view(array, write=write, detach=detach)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{label} {error}") from error.__cause__


def refuse_mixture(label: str, framework: Framework, first: str, expected: Framework) -> NoReturn:
    """Raise because two arguments belong to two libraries."""
    raise TypeError(
        f"{label} is a {framework.name} array and {first} a {expected.name} array; the arrays of "
        "one call must be of one framework"
    )


def refuse_write(framework: Framework, label: str, instead: str) -> None:
    """Raise if users of a library rely on its arrays never changing."""
    if framework.immutable:
        raise TypeError(
            f"{label} is a {framework.name} array, whose memory is never written; {instead}"
        )


def check_device(view: Array, label: str, first: Array, first_label: str) -> None:
    """Raise unless a backend can compute on both views together."""
    if not same_device(view, first):
        raise ValueError(f"{first_label} and {label} are on different devices")


def same_device(a: Array, b: Array) -> bool:
    """True if two views can be computed on together."""
    if type(a) is not type(b):
        return False
    if type(a) is np.ndarray:
        return True
    framework = framework_of(a)
    return framework is not None and framework.on_one_device((a, b))


def _on_host(view: Array) -> bool:
    return framework_of(view) is HOST


def is_scalar(value: Any) -> bool:
    """True if a value is a NumPy scalar or 0-d array, which any library's arrays may meet."""
    return isinstance(value, np.generic) or (type(value) is np.ndarray and value.ndim == 0)
