"""The contract between the public functions and the backends: ``Backend``.

``gradkit._numpy`` (a module) and ``gradkit._cuda.CudaBackend`` (one object per device) have every
function here with the same name and parameters. mypy checks that in ``gradkit._arrays``, which
returns them, and ``tests/package/test_contract.py`` compares the signatures.

Arguments are validated: arrays are the backend's own (``numpy.ndarray`` or ``cupy.ndarray``),
shapes and dtypes are compatible, and no output shares memory with an input, except that ``dx`` may
be ``dy`` or ``ds``, ``y`` and ``x`` may be one array, ``s`` may be ``x`` or ``residual``, ``outs``
may be ``grads``, ``next_state`` may be ``state``, ``next_mean`` and ``next_var`` may be
``running_mean`` and ``running_var``, and ``buffer`` may be ``grad``. The caller has made the
arrays' device and stream current.
An operation writes its outputs and returns nothing unless its docstring says so. Only ``read``
waits for a device.
"""

from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any, Protocol, TypeVar, get_type_hints

import numpy as np

from gradkit._backend import Array, Shape, Spec
from gradkit._calls.channels import ChannelOperations
from gradkit._calls.lists import ListOperations
from gradkit._calls.record import Record
from gradkit._calls.rows import RowOperations


class Services(Protocol):
    """Services that public functions need from a backend, besides operations."""

    def empty(self, shape: Shape, dtype: np.dtype[Any]) -> Array:
        """A new array whose contents are undefined."""

    def outputs(self, specs: Sequence[Spec | None]) -> list[Array | None]:
        """New arrays as these specs say, whose contents are undefined."""

    def scalar(self, value: Any) -> Array:
        """A NumPy scalar or 0-d array as a 0-d array of the backend."""

    def as_float64(self, value: Any) -> Array:
        """A number or an array as a float64 array of the backend."""

    def take(self, array: Array, places: Array) -> Array:
        """A vector's elements at these places, which are a NumPy array of int64."""

    def address(self, array: Array) -> int:
        """The address of an array's first element."""

    def read(self, array: Array) -> np.ndarray[Any, Any]:
        """An array's values on the host: the only call that waits for a device."""

    def takes_memory(self, call: Any) -> bool:
        """True if later calls of this call's plan need no arrays of the backend's own kind.

        On a device addresses suffice, and on the host any memory that compiled code can read.
        """

    def warmup(self, operations: Iterable[str], dtypes: Set[str]) -> int:
        """Compile what operations on arrays of these dtypes need; return how many combinations."""


class NeedsArrays(Exception):  # noqa: N818 - no error: the call is made again
    """Raised before anything is written by a call that was given memory, and needs arrays."""


class Backend(Services, ChannelOperations, ListOperations, RowOperations, Protocol):
    """A backend: computes on arrays of one kind, on one device."""


def names_in(*contracts: type) -> tuple[str, ...]:
    """The functions that contracts list."""
    return tuple(name for each in contracts for name in vars(each) if not name.startswith("_"))


OPERATIONS = names_in(ChannelOperations, ListOperations, RowOperations)


def record_of(operation: str) -> type[Record]:
    """The record that an operation takes."""
    return get_type_hints(getattr(Backend, operation))["call"]


Function = TypeVar("Function", bound=Callable[..., Any])

# The operations that a public function runs, unless that is the one of its own name.
_RUNS: dict[str, tuple[str, ...]] = {}


def runs(*operations: str) -> Callable[[Function], Function]:
    """Note which operations a public function runs, for ``warmup``."""

    def note(function: Function) -> Function:
        _RUNS[function.__name__] = operations
        return function

    return note


def operations_of(name: str) -> tuple[str, ...]:
    """The operations that a public function runs; none if it computes nothing."""
    default = (name,) if name in OPERATIONS else ()
    return _RUNS.get(name, default)
