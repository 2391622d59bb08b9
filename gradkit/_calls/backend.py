"""The contract between the public functions and the backends: ``Backend``.

``gradkit._numpy`` (a module) and ``gradkit._cuda.CudaBackend`` (one object per device) have every
function here with the same name and parameters. mypy checks that in ``gradkit._arrays``, which
returns them, and ``tests/test_contract.py`` compares the signatures.

Arguments are validated: arrays are the backend's own (``numpy.ndarray`` or ``cupy.ndarray``),
shapes and dtypes are compatible, and no output shares memory with an input, except that ``dx`` may
be ``dy`` or ``ds``, ``y`` and ``x`` may be one array, ``s`` may be ``x`` or ``residual``, ``outs``
may be ``grads``, ``following`` may be ``state``, ``next_mean`` and ``next_var`` may be
``running_mean`` and ``running_var``, and ``buffer`` may be ``grad``. The caller has made the
arrays' device and stream current.
An operation writes its outputs and returns nothing unless its docstring says so. Only ``read``
waits for a device.
"""

from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any, Protocol, TypeVar

import numpy as np

from gradkit._backend import Array, Axes, Number, Shape, Spec
from gradkit._calls.channels import ChannelOperations
from gradkit._calls.lists import ListOperations
from gradkit._calls.rows import RowOperations


class Services(Protocol):
    """What the public functions need from a backend besides operations."""

    def empty(self, shape: Shape, dtype: np.dtype[Any]) -> Array:
        """A new array whose contents are undefined."""

    def outputs(self, specs: Iterable[Spec | None]) -> list[Array | None]:
        """New arrays as these specs say, whose contents are undefined."""

    def scalar(self, value: Any) -> Array:
        """A NumPy scalar or 0-d array as a 0-d array of the backend."""

    def as_float64(self, value: Any) -> Array:
        """A number or an array as a float64 array of the backend."""

    def address(self, array: Array) -> int:
        """The address of an array's first element."""

    def read(self, array: Array) -> np.ndarray[Any, Any]:
        """An array's values on the host: the only call that waits for a device."""

    def warmup(self, operations: Iterable[str], dtypes: Set[str]) -> int:
        """Compile what operations on arrays of these dtypes need; return how many combinations."""


class Operations(Protocol):
    """What a backend computes, in the order of the public modules."""

    def accumulate_grad(
        self, buffer: Array, grad: Array, do_update: Array | bool, scale: float | None
    ) -> None:
        """``buffer += scale * grad`` (broadcast) if ``do_update``; with a scale, in float64."""

    def accumulate_grad_v2(self, buffer: Array, grad: Array, overwrite: Array | bool) -> None:
        """``buffer = grad`` if ``overwrite``, else ``buffer += grad``; both broadcast."""

    def accumulate_grads(
        self,
        buffers: Sequence[Array],
        grads: Sequence[Array],
        do_update: Array | bool,
        overwrite: Array | bool,
        scale: Number,
        norm: Array | None,
    ) -> None:
        """If ``do_update``, each ``buffer += scale * grad``, or ``= scale * grad`` to overwrite.

        ``norm`` becomes the 2-norm of the buffers after that, with the bits of ``grad_norm``.
        """

    def unit_norms(
        self, grads: Sequence[Array], norm_type: float, axes: Axes, out: Array, *, mean: bool
    ) -> None:
        """``out = (sum |g|^p)^(1/p)`` for each unit; ``mean``: of the mean of |g|^p.

        ``out`` is a contiguous float64 vector of all units: gradient by gradient, in C order. The
        norm of no elements is 0.
        """

    def clip_units(
        self,
        grads: Sequence[Array],
        norms: Array,
        max_norm: Number,
        eps: float,
        axes: Axes,
        outs: Sequence[Array],
        *,
        param_norms: Array | None = None,
        least: float = 0.0,
        zero_nonfinite: bool,
    ) -> None:
        """``outs = grads * clip_coefficient(norm)`` with the norm of each element's unit.

        Its limit is ``max_norm``, or with ``param_norms``, contiguous as ``norms``,
        ``max_norm * max(param_norm, least)``. ``zero_nonfinite``: zeros where the norm is not
        finite.
        """

    def spike_guard_update(
        self,
        state: Array,
        norm: Array,
        decay: float,
        threshold: float,
        warmup: int,
        following: Array,
        max_norm: Array,
    ) -> None:
        """Write the state after a norm, and the limit for it; ``following`` may be ``state``."""


class Backend(Services, Operations, ChannelOperations, ListOperations, RowOperations, Protocol):
    """What computes on arrays of one kind, on one device."""


def names_in(*contracts: type) -> tuple[str, ...]:
    """The functions that contracts list."""
    return tuple(name for each in contracts for name in vars(each) if not name.startswith("_"))


OPERATIONS = names_in(Operations, ChannelOperations, ListOperations, RowOperations)


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
    own = (name,) if name in OPERATIONS else ()
    return _RUNS.get(name, own)
