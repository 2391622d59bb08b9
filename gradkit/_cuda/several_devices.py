"""Norms, clipping and scaling of gradients that lie on several devices of one process.

Each device adds up its own gradients. The sums meet on the device of the first gradient, which
joins them as those of one device's blocks are joined, and each device scales its own gradients by
copies of the norm, the limit and the scale. Devices wait for each other's events, and the host for
none.

The host adds up gradients in its own memory, and uploads the sum. To scale them it has to wait for
the norm.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, TypeAlias

import numpy as np

from gradkit._backend import Array, OneDevice, Spread
from gradkit._calls import lists as records
from gradkit._calls.backend import Backend
from gradkit._cuda import CudaBackend
from gradkit._cuda.launch.buffers import fill
from gradkit._cuda.launch.device import Device, scratch
from gradkit._cuda.list_norms import PART, NormPartials
from gradkit._cuda.list_tables import ListPlan, Step, launch, plan_of
from gradkit._cuda.lists import clip_steps, scale_steps, value_steps, zero_steps
from gradkit._numpy.interrupts import Uninterrupted

Own: TypeAlias = tuple[CudaBackend, OneDevice]  # what computes on a device, and what lies there

_LISTS = {"grads", "outs", "copies", "rows"}  # fields with an item for each gradient
_NUMBERS: dict[type, tuple[str, ...]] = {  # fields that may lie on the first device
    records.GradNorm: ("scale",),
    records.ClipByNorm: ("norm", "max_norm", "scale"),
    records.ScaleGrads: ("coefficient",),
}
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

    def bring(self, number: Array, origin: int) -> Array:
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
            self._each("grad_norm", call, "norm", "found_inf")
        elif self.host is None and not any(plan.chunks for plan in self._plans(call.grads)):
            fill(self.device, norm, 0)
            if found_inf is not None:
                fill(self.device, found_inf, 0)
        else:
            self._parts(call).joining(self.device, call.scale, norm, found_inf)()

    def norm_parts(self, call: records.NormParts) -> None:
        """``parts[k] = (hi, lo, scale)``: what ``grad_norm`` adds up, before the root."""
        if call.per_tensor:
            self._each("norm_parts", call, "parts")
        else:
            self._parts(call).join(self.device, None, call.parts, False)

    def grad_stats(self, call: records.ListStats) -> None:
        """A row of ``stats`` for each gradient, or of ``parts`` what it is computed from."""
        self._each("grad_stats", call, "stats", "parts")

    def exact_sums(self, call: records.ExactSums) -> None:
        """Write ``sums``, which are in host memory: this waits for all devices."""
        total = np.zeros_like(call.sums)
        for backend, own in self._everywhere(call.grads):
            with nullcontext() if backend is self.host else backend.device.active():
                backend.exact_sums(self._part(call, backend, own))
            total += call.sums
        call.sums[...] = total

    def clip_by_norm(self, call: records.ClipByNorm) -> None:
        """``outs = grads * (scale * coefficient)``, or zeros if either is not finite."""
        self._run("clip_by_norm", call, clip_steps)

    def scale_grads(self, call: records.ScaleGrads) -> None:
        """``outs = grads * coefficient``; a coefficient of 1 keeps every bit."""
        self._run("scale_grads", call, scale_steps)

    def clip_grad_value(self, call: records.ClipGradValue) -> None:
        """``outs = min(max(grads, -clip_value), clip_value)``; NaN stays NaN."""
        self._run("clip_grad_value", call, value_steps)

    def zero_grad(self, call: records.ZeroGrad) -> None:
        """Write +0 over every element, NaN included."""
        self._run("zero_grad", call, zero_steps)

    def _of(self, grads: Sequence[Array]) -> Iterator[Own]:
        assert isinstance(grads, Spread)  # nothing else has this backend
        return zip(self.backends, grads.devices, strict=True)

    def _everywhere(self, grads: Sequence[Array]) -> Iterator[tuple[Any, OneDevice]]:
        yield from self._of(grads)
        assert isinstance(grads, Spread)
        if grads.host is not None:
            yield self.host, grads.host

    def _run(self, name: str, call: Any, steps_of: Callable[[Device, Any], list[Step]]) -> None:
        """Launch steps on each device, once those of all have been made: that is what may fail.

        Before that the host computes its own, once it has read the numbers.
        """
        launches = []
        for backend, own in self._of(call.grads):
            part = self._part(call, backend, own)
            with backend.device.active():
                launches.append((backend.device, steps_of(backend.device, part)))
        host = call.grads.host
        own_call = None if host is None else self._part(call, self.host, host)
        with nullcontext() if own_call is None else Uninterrupted():
            if own_call is not None:
                getattr(self.host, name)(own_call)
            for device, own_steps in launches:
                with device.active():
                    launch(own_steps)

    def _part(self, call: Any, backend: Any, own: OneDevice) -> Any:
        """The part of a call that lies on a device or on the host, with its numbers there."""
        names = _NUMBERS.get(type(call), ())
        numbers = self._numbers([getattr(call, name) for name in names], backend)
        changed = dict(zip(names, numbers, strict=True))
        for name in _LISTS & call.fields:
            each = getattr(call, name)
            changed[name] = own.views if each is call.grads else each and own.of(each)
        return call.replaced(**changed)

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

    def _parts(self, call: records.GradNorm | records.NormParts) -> NormPartials:
        """A row (hi, lo, scale) for the gradients of each device, and of the host."""
        order, copies = call.norm_type, getattr(call, "copies", None)
        rows = len(self.backends) + (self.host is not None)
        parts = scratch(self.device, (rows, PART), _FLOAT64)
        every = records.NormParts(grads=call.grads, norm_type=order, parts=parts, copies=copies)
        for k, (backend, own) in enumerate(self._everywhere(call.grads)):
            with self._written(backend, [parts[k : k + 1]]) as [row]:
                backend.norm_parts(self._part(every, backend, own).replaced(parts=row))
        return NormPartials(self._plans(call.grads)[0].table, order, parts, rows)

    def _each(self, name: str, call: Any, *results: str) -> None:
        """Have rows written for each gradient on the device that it lies on, and gather them."""
        outs = {key: getattr(call, key) for key in results if getattr(call, key) is not None}
        gathered = [scratch(self.device, out.shape, _FLOAT64) for out in outs.values()]
        order: list[int] = []
        for backend, own in self._everywhere(call.grads):
            mine = slice(len(order), len(order) + len(own.positions))
            with self._written(backend, [array[mine] for array in gathered]) as targets:
                part = self._part(call, backend, own)
                getattr(backend, name)(part.replaced(**dict(zip(outs, targets, strict=True))))
            order += own.positions
        places = np.argsort(order)
        for out, array in zip(outs.values(), gathered, strict=True):
            out[...] = array[self.device.xp.asarray(places)]

    @contextmanager
    def _written(self, backend: Any, targets: Sequence[Array]) -> Iterator[Sequence[Array]]:
        """Yield memory in which the current device writes results that are to lie on the first."""
        if backend is self.host:
            memory = [np.empty(target.shape) for target in targets]
            yield memory
            for target, values in zip(targets, memory, strict=True):
                target[...] = self.as_float64(values)
            return
        if backend.device is self.device:
            yield targets
            return
        with backend.device.active():
            memory = [scratch(backend.device, target.shape, _FLOAT64) for target in targets]
            yield memory
        carry(backend.device, memory, self.device, targets)


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
