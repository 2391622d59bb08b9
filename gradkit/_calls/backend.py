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

    def zero_grad(self, grads: Sequence[Array]) -> None:
        """Write +0 over every element, NaN included."""

    def grad_norm(
        self,
        grads: Sequence[Array],
        norm_type: float,
        out: Array,
        *,
        per_tensor: bool = False,
        scale: Number = 1.0,
        found_inf: Array | None = None,
    ) -> None:
        """``out = |scale| * (sum |g|^p)^(1/p)`` over all gradients, or one norm per gradient.

        ``found_inf``, a contiguous float64 array of out's shape, becomes 1 where an element is NaN
        or infinite, and 0 elsewhere.
        """

    def norm_parts(
        self,
        grads: Sequence[Array],
        norm_type: float,
        out: Array,
        *,
        per_tensor: bool = False,
        copies: Sequence[int] | None = None,
    ) -> None:
        """What ``grad_norm`` adds up, before the root: for each norm a row (hi, lo, scale).

        A row stands for ``(hi + lo) * scale^p``; for p = infinity ``hi`` is the norm. ``hi`` is
        finite if all elements are. ``out`` is contiguous and float64. ``copies``: each gradient's
        sum is divided by its number.
        """

    def rank_state(
        self,
        grads: Sequence[Array],
        norm_type: float,
        digest: float,
        out: Array,
        *,
        scale: Number = 1.0,
        copies: Sequence[int] | None = None,
    ) -> None:
        """``out = (0, digest, |scale|, hi, lo, scale of the sums)``, the last 3 as ``norm_parts``.

        It stands for a rank that did not fail, whose call has that digest. ``out`` is a contiguous
        float64 vector. What ``join_ranks`` runs is compiled here, before ranks exchange anything.
        """

    def join_ranks(
        self,
        states: Array,
        digest: float,
        norm_type: float,
        out: Array,
        found_inf: Array | None,
        *,
        scale: Number,
        max_norm: Number,
        fresh: bool,
        faults: Array,
        factors: Array,
    ) -> None:
        """The norm of all ranks' gradients, from a row of ``rank_state`` for each.

        ``factors = (norm, scale, max_norm)``, for ``clip_by_norm``. If a rank's first number is
        not 0, or its digest is not ``digest``, then ``out`` (NaN if ``fresh``) and ``found_inf``
        stay as they are, ``factors = (0, 1, inf)``, which clip nothing, and ``faults[rank]``
        becomes 1 or 2, if it was 0. All are float64, and contiguous but for ``states``.
        """

    def norm_shares(self, norm: Array, largest: Array, norm_type: float, out: Array) -> None:
        """``out = (norm / largest)^p``: this rank's term of a norm over ranks.

        For p = infinity there is no sum: ``out`` is 0, or NaN if this rank's norm is, because
        "max" may have dropped it.
        """

    def norm_of_shares(self, total: Array, largest: Array, norm_type: float, out: Array) -> None:
        """``out = largest * total^(1/p)``: the norm over all ranks."""

    def clip_coefficient(self, norm: Array, max_norm: Number, eps: float, out: Array) -> None:
        """``out = min(1, max_norm / max(norm, eps))``; a NaN norm stays NaN.

        A negative ``max_norm`` in an array gives NaN.
        """

    def clip_by_norm(
        self,
        grads: Sequence[Array],
        norm: Array,
        max_norm: Number,
        eps: float,
        outs: Sequence[Array],
        *,
        scale: Number = 1.0,
        zero_nonfinite: bool,
    ) -> None:
        """``outs = grads * (scale * clip_coefficient(norm))``; ``norm`` is that of scale * grads.

        A coefficient of 0 gives 0 for every finite gradient, whatever the scale.
        ``zero_nonfinite``: zeros if the norm or the scale is not finite.
        """

    def scale_grads(
        self, grads: Sequence[Array], coefficient: Number, outs: Sequence[Array]
    ) -> None:
        """``outs = grads * coefficient``; a coefficient of 1 keeps every bit."""

    def clip_grad_value(
        self, grads: Sequence[Array], clip_value: float, outs: Sequence[Array]
    ) -> None:
        """``outs = min(max(grads, -clip_value), clip_value)``; NaN stays NaN."""

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


class Backend(Services, Operations, ChannelOperations, RowOperations, Protocol):
    """What computes on arrays of one kind, on one device."""


def names_in(*contracts: type) -> tuple[str, ...]:
    """The functions that contracts list."""
    return tuple(name for each in contracts for name in vars(each) if not name.startswith("_"))


OPERATIONS = names_in(Operations, ChannelOperations, RowOperations)


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
