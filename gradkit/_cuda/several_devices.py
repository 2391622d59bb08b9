"""Norms, clipping and scaling of gradients that lie on several devices of one process.

Each device adds up its own gradients. The sums meet on the device of the first gradient, which
joins them as those of one device's blocks are joined, and each device scales its own gradients by
copies of the norm, the limit and the scale. Devices wait for each other's events, and the host for
none.

The host adds up gradients in its own memory, and uploads the sum. To scale them it has to wait for
the norm.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from functools import cache
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from gradkit._backend import Array, OneDevice, Spread
from gradkit._calls import lists as records
from gradkit._calls.backend import Backend
from gradkit._calls.roles import Grads
from gradkit._cuda import CudaBackend
from gradkit._cuda.launch.buffers import fill
from gradkit._cuda.launch.device import Device, scratch
from gradkit._cuda.list_norms import PART, NormPartials
from gradkit._cuda.list_tables import ListPlan, Step, launch, plan_of
from gradkit._cuda.lists import clip_steps, scale_steps, value_steps, zero_steps
from gradkit._numpy.interrupts import Uninterrupted

Own: TypeAlias = tuple[CudaBackend, OneDevice]  # what computes on a device, and what lies there
Write: TypeAlias = Callable[[Any, OneDevice, Sequence[Array]], None]
# What launches on a device what is to be done to its gradients: the backend, these, and outputs.
Steps: TypeAlias = Callable[[CudaBackend, Sequence[Array], Sequence[Array]], list[Step]]

_FLOAT64 = np.dtype(np.float64)


class SeveralDevices(CudaBackend):
    """Computes on ``Spread`` gradients, each on its own device; on the first one all else.

    The first device is current when a function is called. Small arrays, such as norms and numbers,
    are on it. ``host``: what computes on gradients in host memory, if there are some.
    """

    def __init__(self, backends: Sequence[CudaBackend], host: Backend | None = None):
        super().__init__(backends[0].device)
        self.backends, self.host = tuple(backends), host

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

    def grad_norm(self, call: records.GradNorm) -> None:
        """``norm = |scale| * (sum |g|^p)^(1/p)`` over all gradients, or one norm a gradient."""
        norm, found_inf = call.norm, call.found_inf
        if call.per_tensor:

            def write(backend: Any, own: OneDevice, outs: Sequence[Array]) -> None:
                [scale] = self._numbers([call.scale], backend)
                norms, flags = (*outs, None)[:2]
                here = call.replaced(grads=own.views, norm=norms, found_inf=flags, scale=scale)
                backend.grad_norm(here)

            self._each(call.grads, [norm] if found_inf is None else [norm, found_inf], write)
        elif self.host is None and not any(plan.chunks for plan in self._plans(call.grads)):
            fill(self.device, norm, 0)
            if found_inf is not None:
                fill(self.device, found_inf, 0)
        else:
            self._parts(call).joining(self.device, call.scale, norm, found_inf)()

    def norm_parts(self, call: records.NormParts) -> None:
        """``parts[k] = (hi, lo, scale)``: what ``grad_norm`` adds up, before the root."""
        if call.per_tensor:

            def write(backend: Any, own: OneDevice, outs: Sequence[Array]) -> None:
                counts = call.copies and own.of(call.copies)
                backend.norm_parts(call.replaced(grads=own.views, parts=outs[0], copies=counts))

            self._each(call.grads, [call.parts], write)
            return
        self._parts(call, call.copies).join(self.device, None, call.parts, False)

    def grad_stats(self, call: records.ListStats) -> None:
        """A row of ``stats`` for each gradient, or of ``parts`` what it is computed from."""
        names = [name for name in ("stats", "parts") if getattr(call, name) is not None]

        def write(backend: Any, own: OneDevice, outs: Sequence[Array]) -> None:
            made = dict(zip(names, outs, strict=True))
            backend.grad_stats(call.replaced(grads=own.views, **made))

        self._each(call.grads, [getattr(call, name) for name in names], write)

    def exact_sums(self, call: records.ExactSums) -> None:
        """Write ``sums``, which are in host memory: this waits for all devices."""
        total = np.zeros_like(call.sums)
        for backend, own in self._everywhere(call.grads):
            with nullcontext() if backend is self.host else backend.device.active():
                rows = own.of(call.rows)
                backend.exact_sums(call.replaced(grads=own.views, rows=rows))
            total += call.sums
        call.sums[...] = total

    def clip_by_norm(self, call: records.ClipByNorm) -> None:
        """``outs = grads * (scale * coefficient)``, or zeros if either is not finite."""

        def steps(backend: CudaBackend, grads: Grads, outs: Grads) -> list[Step]:
            norm, limit, by = self._numbers([call.norm, call.max_norm, call.scale], backend)
            here = call.replaced(grads=grads, norm=norm, max_norm=limit, scale=by, outs=outs)
            return clip_steps(backend.device, here)

        numbers = {"norm": call.norm, "max_norm": call.max_norm, "scale": call.scale}
        self._run("clip_by_norm", call, call.outs, steps, numbers)

    def scale_grads(self, call: records.ScaleGrads) -> None:
        """``outs = grads * coefficient``; a coefficient of 1 keeps every bit."""

        def steps(backend: CudaBackend, grads: Grads, outs: Grads) -> list[Step]:
            [factor] = self._numbers([call.coefficient], backend)
            return scale_steps(
                backend.device, call.replaced(grads=grads, coefficient=factor, outs=outs)
            )

        self._run("scale_grads", call, call.outs, steps, {"coefficient": call.coefficient})

    def clip_grad_value(self, call: records.ClipGradValue) -> None:
        """``outs = min(max(grads, -clip_value), clip_value)``; NaN stays NaN."""

        def steps(backend: CudaBackend, grads: Grads, outs: Grads) -> list[Step]:
            return value_steps(backend.device, call.replaced(grads=grads, outs=outs))

        self._run("clip_grad_value", call, call.outs, steps)

    def zero_grad(self, call: records.ZeroGrad) -> None:
        """Write +0 over every element, NaN included."""

        def steps(backend: CudaBackend, grads: Grads, _: Grads) -> list[Step]:
            return zero_steps(backend.device, records.ZeroGrad(grads=grads))

        self._run("zero_grad", call, None, steps)

    def _of(self, grads: Sequence[Array]) -> Iterator[Own]:
        assert isinstance(grads, Spread)  # nothing else has this backend
        return zip(self.backends, grads.devices, strict=True)

    def _everywhere(self, grads: Sequence[Array]) -> Iterator[tuple[Any, OneDevice]]:
        yield from self._of(grads)
        assert isinstance(grads, Spread)
        if grads.host is not None:
            yield self.host, grads.host

    def _run(
        self,
        name: str,
        call: Any,
        outs: Sequence[Array] | None,
        steps: Steps,
        numbers: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Launch steps on each device, once those of all have been made: that is what may fail.

        Before that the host computes its own, once it has read the numbers.
        """
        grads, made = call.grads, []
        for backend, own in self._of(grads):
            targets = own.views if outs is None or outs is grads else own.of(outs)
            with backend.device.active():
                made.append((backend.device, steps(backend, own.views, targets)))
        own_call = None if grads.host is None else self._of_host(call, outs, numbers)
        with nullcontext() if own_call is None else Uninterrupted():
            if own_call is not None:
                getattr(self.host, name)(own_call)
            for device, own_steps in made:
                with device.active():
                    launch(own_steps)

    def _of_host(
        self, call: Any, outs: Sequence[Array] | None, numbers: Mapping[str, Any]
    ) -> records.ListCall:
        """The part of a call that is the host's, which waits for numbers on a device."""
        own = call.grads.host
        changed = {name: self._on_host(number) for name, number in numbers.items()}
        if outs is not None:
            changed["outs"] = own.views if outs is call.grads else own.of(outs)
        found: records.ListCall = call.replaced(grads=own.views, **changed)
        return found

    def _on_host(self, number: Any) -> float:
        return number if isinstance(number, float) else float(self.read(number))

    def _plans(self, grads: Sequence[Array]) -> list[ListPlan]:
        plans = []
        for backend, own in self._of(grads):
            with backend.device.active():
                plans.append(plan_of(backend.device, own.views))
        return plans

    def _numbers(self, numbers: Sequence[Any], backend: Any) -> Sequence[Any]:
        """Numbers for another device: copies of those that are on the first."""
        if backend is self.host:
            return list(map(self._on_host, numbers))
        arrays = [number for number in numbers if not isinstance(number, float)]
        if backend.device is self.device or not arrays:
            return numbers
        with backend.device.active():
            copies = [scratch(backend.device, (), _FLOAT64) for _ in arrays]
        carry(self.device, arrays, backend.device, copies)
        copied = iter(copies)
        return [number if isinstance(number, float) else next(copied) for number in numbers]

    def _parts(
        self, call: records.GradNorm | records.NormParts, copies: Sequence[int] | None = None
    ) -> NormPartials:
        """A row (hi, lo, scale) for the gradients of each device, and of the host."""
        grads, norm_type = call.grads, call.norm_type
        rows = len(self.backends) + (self.host is not None)
        parts = scratch(self.device, (rows, PART), _FLOAT64)
        for k, (backend, own) in enumerate(self._everywhere(grads)):
            row, counts = parts[k : k + 1], copies and own.of(copies)
            with self._written(backend, [row]) as [made]:
                backend.norm_parts(
                    records.NormParts(
                        grads=own.views, norm_type=norm_type, parts=made, copies=counts
                    )
                )
        return NormPartials(self._plans(grads)[0].tables[0], norm_type, parts, rows)

    def _each(self, grads: Sequence[Array], outs: Sequence[Array], write: Write) -> None:
        """Write rows for each gradient, which ``write`` makes on the device that it lies on."""
        gathered = [scratch(self.device, out.shape, _FLOAT64) for out in outs]
        order: list[int] = []
        for backend, own in self._everywhere(grads):
            mine = slice(len(order), len(order) + len(own.positions))
            with self._written(backend, [array[mine] for array in gathered]) as made:
                write(backend, own, made)
            order += own.positions
        places = np.argsort(order)
        for out, array in zip(outs, gathered, strict=True):
            out[...] = array[self.device.xp.asarray(places)]

    @contextmanager
    def _written(self, backend: Any, targets: Sequence[Array]) -> Iterator[Sequence[Array]]:
        """Where a device, which is current meanwhile, writes what is to lie on the first."""
        if backend is self.host:
            made = [np.empty(target.shape) for target in targets]
            yield made
            for target, values in zip(targets, made, strict=True):
                target[...] = self.as_float64(values)
            return
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
def backend_of_several(
    backends: tuple[CudaBackend, ...], host: Backend | None = None
) -> SeveralDevices:
    """The backend of gradients on these devices, the first gradient's first, and on the host."""
    return SeveralDevices(backends, host)
