"""Norms, clipping and scaling of gradients that lie on several devices of one process.

Each device adds up its own gradients. The sums meet on the device of the first gradient, which
joins them as those of one device's blocks are joined, and each device scales its own gradients by
copies of the norm, the limit and the scale. Devices wait for each other's events, and the host for
none.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import cache
from typing import TypeAlias

import numpy as np

from gradkit._backend import Array, Number, OneDevice, Spread
from gradkit._cuda import CudaBackend
from gradkit._cuda.launch.device import Device, scratch
from gradkit._cuda.launch.list_norms import PART, join, joining, order_of
from gradkit._cuda.launch.tensor_lists import Plan, Step, launch, plan_of

Own: TypeAlias = tuple[CudaBackend, OneDevice]  # what computes on a device, and what lies there
Write: TypeAlias = Callable[[CudaBackend, OneDevice, Sequence[Array]], None]
# What launches on a device what is to be done to its gradients: the backend, these, and outputs.
Steps: TypeAlias = Callable[[CudaBackend, Sequence[Array], Sequence[Array]], list[Step]]

_FLOAT64 = np.dtype(np.float64)


class SeveralDevices(CudaBackend):
    """Computes on ``Spread`` gradients, each on its own device; on the first one all else.

    The first device is current when a function is called. Small arrays, such as norms and numbers,
    are on it.
    """

    def __init__(self, backends: Sequence[CudaBackend]):
        super().__init__(backends[0].device)
        self.backends = tuple(backends)

    def refuse_capture(self) -> None:
        """Raise if work on one of the devices is recorded instead of run."""
        for backend in self.backends:
            with backend.device.active():
                if backend.device.capturing():
                    raise RuntimeError(
                        "gradients lie on several devices, and a call on these cannot be captured "
                        "into a graph; capture a call for each device"
                    )

    def brought(self, number: Array, origin: int) -> Array:
        """A copy of an array that lies on one of the devices, given by its place among them."""
        copy = scratch(self.device, number.shape, number.dtype)
        carry(self.backends[origin].device, [number], self.device, [copy])
        return copy

    def warmup(self, operations: Iterable[str], dtypes: Set[str]) -> int:
        """Compile what operations on arrays of these dtypes need, for each device."""
        names = tuple(operations)
        return sum(backend.warmup(names, dtypes) for backend in self.backends)

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
        """``out = |scale| * (sum |g|^p)^(1/p)`` over all gradients, or one norm a gradient."""
        if per_tensor:

            def write(backend: CudaBackend, own: OneDevice, outs: Sequence[Array]) -> None:
                [by] = self._numbers([scale], backend)
                norms, flags = (*outs, None)[:2]
                backend.grad_norm(
                    own.views, norm_type, norms, per_tensor=True, scale=by, found_inf=flags
                )

            self._each(grads, [out] if found_inf is None else [out, found_inf], write)
        elif not any(plan.chunks for plan in self._plans(grads)):
            out.fill(0)
            if found_inf is not None:
                found_inf.fill(0)
        else:
            parts = self._parts(grads, norm_type)
            p, order = np.float64(norm_type), order_of(norm_type)
            table = self._plans(grads)[0].tables[0]
            joining(self.device, table, p, order, parts, len(parts), scale, out, found_inf)()

    def norm_parts(
        self,
        grads: Sequence[Array],
        norm_type: float,
        out: Array,
        *,
        per_tensor: bool = False,
        copies: Sequence[int] | None = None,
    ) -> None:
        """``out[k] = (hi, lo, scale)``: what ``grad_norm`` adds up, before the root."""
        if per_tensor:

            def write(backend: CudaBackend, own: OneDevice, outs: Sequence[Array]) -> None:
                counts = copies and own.of(copies)
                backend.norm_parts(own.views, norm_type, *outs, per_tensor=True, copies=counts)

            self._each(grads, [out], write)
            return
        parts = self._parts(grads, norm_type, copies)
        p, order = np.float64(norm_type), order_of(norm_type)
        table = self._plans(grads)[0].tables[0]
        join(self.device, table, p, order, parts, len(parts), None, out, False)

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
        """``outs = grads * (scale * clip_coefficient(norm))``, or zeros if either is not finite."""

        def steps(backend: CudaBackend, views: Sequence[Array], own: Sequence[Array]) -> list[Step]:
            factors = self._numbers([norm, max_norm, scale], backend)
            return backend.clip_steps(views, factors, eps, own, zero_nonfinite=zero_nonfinite)

        self._run(grads, outs, steps)

    def scale_grads(
        self, grads: Sequence[Array], coefficient: Number, outs: Sequence[Array]
    ) -> None:
        """``outs = grads * coefficient``; a coefficient of 1 keeps every bit."""

        def steps(backend: CudaBackend, views: Sequence[Array], own: Sequence[Array]) -> list[Step]:
            [factor] = self._numbers([coefficient], backend)
            return backend.scale_steps(views, factor, own)

        self._run(grads, outs, steps)

    def clip_grad_value(
        self, grads: Sequence[Array], clip_value: float, outs: Sequence[Array]
    ) -> None:
        """``outs = min(max(grads, -clip_value), clip_value)``; NaN stays NaN."""
        self._run(grads, outs, lambda own, *lists: own.value_steps(lists[0], clip_value, lists[1]))

    def zero_grad(self, grads: Sequence[Array]) -> None:
        """Write +0 over every element, NaN included."""
        self._run(grads, grads, lambda own, views, _: own.zero_steps(views))

    def _of(self, grads: Sequence[Array]) -> Iterator[Own]:
        assert isinstance(grads, Spread)  # nothing else has this backend
        return zip(self.backends, grads.devices, strict=True)

    def _run(self, grads: Sequence[Array], outs: Sequence[Array], steps: Steps) -> None:
        """Launch steps on each device, once those of all have been made: that is what may fail."""
        made = []
        for backend, own in self._of(grads):
            targets = own.views if outs is grads else own.of(outs)
            with backend.device.active():
                made.append((backend.device, steps(backend, own.views, targets)))
        for device, own_steps in made:
            with device.active():
                launch(own_steps)

    def _plans(self, grads: Sequence[Array]) -> list[Plan]:
        plans = []
        for backend, own in self._of(grads):
            with backend.device.active():
                plans.append(plan_of(backend.device, own.views))
        return plans

    def _numbers(self, numbers: Sequence[Number], backend: CudaBackend) -> Sequence[Number]:
        """Numbers for another device: copies of those that are on the first."""
        arrays = [number for number in numbers if not isinstance(number, float)]
        if backend.device is self.device or not arrays:
            return numbers
        with backend.device.active():
            copies = [scratch(backend.device, (), _FLOAT64) for _ in arrays]
        carry(self.device, arrays, backend.device, copies)
        copied = iter(copies)
        return [number if isinstance(number, float) else next(copied) for number in numbers]

    def _parts(
        self, grads: Sequence[Array], norm_type: float, copies: Sequence[int] | None = None
    ) -> Array:
        """A row (hi, lo, scale) for the gradients of each device."""
        parts = scratch(self.device, (len(self.backends), PART), _FLOAT64)
        for k, (backend, own) in enumerate(self._of(grads)):
            row, counts = parts[k : k + 1], copies and own.of(copies)
            with self._written(backend, [row]) as [made]:
                backend.norm_parts(own.views, norm_type, made, copies=counts)
        return parts

    def _each(self, grads: Sequence[Array], outs: Sequence[Array], write: Write) -> None:
        """Write rows for each gradient, which ``write`` makes on the device that it lies on."""
        rooms = [scratch(self.device, out.shape, _FLOAT64) for out in outs]
        order: list[int] = []
        for backend, own in self._of(grads):
            mine = slice(len(order), len(order) + len(own.positions))
            with self._written(backend, [room[mine] for room in rooms]) as made:
                write(backend, own, made)
            order += own.positions
        places = np.argsort(order)
        for out, room in zip(outs, rooms, strict=True):
            out[...] = room[self.device.xp.asarray(places)]

    @contextmanager
    def _written(self, backend: CudaBackend, targets: Sequence[Array]) -> Iterator[Sequence[Array]]:
        """Where a device, which is current meanwhile, writes what is to lie on the first."""
        if backend.device is self.device:
            yield targets
            return
        with backend.device.active():
            made = [scratch(backend.device, target.shape, _FLOAT64) for target in targets]
            yield made
        carry(backend.device, made, self.device, targets)


def carry(
    origin: Device, sources: Sequence[Array], device: Device, targets: Sequence[Array]
) -> None:
    """Copy small contiguous arrays to another device, in the order of both devices' streams.

    What has written the sources comes before, and what uses their memory again comes after.
    """
    with origin.active():
        written = origin.record()
    with device.active():
        device.wait(written)
        for source, target in zip(sources, targets, strict=True):
            device.fetch(source, origin.number, target)
        read = device.record()
    with origin.active():
        origin.wait(read)


@cache
def backend_of_several(backends: tuple[CudaBackend, ...]) -> SeveralDevices:
    """The backend of gradients on these devices, the first gradient's first."""
    return SeveralDevices(backends)
