"""Gradients that lie on several devices of one process, or partly on the host.

For calls that accept them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np

from gradkit._arrays import backend_of
from gradkit._backend import Array, OneDevice, Spec, Spread, Views
from gradkit._calls.backend import Backend
from gradkit._open.arguments import Arguments, known_framework
from gradkit._open.memory import Named
from gradkit._open.results import Results


class Share(Arguments):
    """The gradients of one device, or those on the host, to make results that lie there."""

    __slots__ = ("_first", "part")

    def __init__(self, part: OneDevice, arrays: Sequence[Any], name: str):
        super().__init__()
        self.part, self.like = part, arrays[part.positions[0]]
        self.framework = known_framework(self.like, name)
        self._first = name, part.views[0]
        self.backend = backend_of(part.views[0])

    def first(self) -> tuple[str, Array]:
        return self._first


class Twins(NamedTuple):
    """Arrays like the gradients, each on the device of its gradient: as ``Results``."""

    shares: Sequence[Share]
    outputs: Sequence[Results]

    @classmethod
    def of(
        cls,
        shares: Sequence[Share],
        outs: Sequence[Any] | None,
        specs: Sequence[Spec],
        labels: Sequence[str],
        inputs: Callable[[], Named],
    ) -> "Twins":
        """The caller's arrays, or new ones."""
        every = []
        for share in shares:
            pick = share.part.of
            mine = None if outs is None else tuple(pick(outs))
            with share.on_stream():
                picked = pick(specs)
                own = () if mine is None else tuple(pick(labels))
                results = Results(share, mine, len(picked), own)
                if mine is not None:
                    results.check(picked, inputs())
                results.make(picked)
                every.append(results)
        return cls(shares, every)

    @property
    def views(self) -> list[Array]:
        """Arrays that are written, in the gradients' order."""
        return self._in_order(outputs.views for outputs in self.outputs)

    def results(self) -> list[Any]:
        """Results as the caller's arrays, in the gradients' order."""
        by_share = []
        for share, outputs in zip(self.shares, self.outputs, strict=True):
            with share.on_stream():
                by_share.append(outputs.results())
        return self._in_order(by_share)

    def _in_order(self, lists: Iterable[Sequence[Any]]) -> list[Any]:
        every: dict[int, Any] = {}
        for share, items in zip(self.shares, lists, strict=True):
            every |= zip(share.part.positions, items, strict=True)
        return [every[k] for k in range(len(every))]


def spread(views: Sequence[Array]) -> Spread:
    """Views by their devices."""
    positions: dict[Any, list[int]] = {}
    for k, view in enumerate(views):
        positions.setdefault(None if type(view) is np.ndarray else backend_of(view), []).append(k)
    places = {
        where: OneDevice(tuple(indices), Views([views[k] for k in indices]))
        for where, indices in positions.items()
    }
    host = places.pop(None, None)
    return Spread(views, [*places.values()], host)


def backend_of_all(views: Spread) -> Backend:
    """Return the backend of gradients on several devices."""
    from gradkit._cuda.several_devices import backend_of_several

    backends: Any = tuple(backend_of(part.views[0]) for part in views.devices)
    host: Any = None if views.host is None else backend_of(views.host.views[0])
    return backend_of_several(backends, host)


@contextmanager
def on_streams(shares: Sequence[Share], backend: Any) -> Iterator[None]:
    """A context in which each device has its caller's stream, and the first one is current."""
    with ExitStack() as stack:
        for share in reversed(shares):
            stack.enter_context(share.on_stream())
        backend.refuse_capture()
        yield
