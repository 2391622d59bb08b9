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
from gradkit._open.given import Given, known_framework
from gradkit._open.memory import Named
from gradkit._open.results import Results


class Share(Given):
    """The gradients of one device, or those on the host, to make results that lie there."""

    __slots__ = ("_first", "own")

    def __init__(self, own: OneDevice, arrays: Sequence[Any], name: str):
        super().__init__()
        self.own, self.like = own, arrays[own.positions[0]]
        self.framework = known_framework(self.like, name)
        self._first = name, own.views[0]
        self.backend = backend_of(own.views[0])

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
        given: Sequence[Any] | None,
        specs: Sequence[Spec],
        inputs: Callable[[], Named],
    ) -> "Twins":
        """The caller's arrays, or new ones."""
        labels = [f"out[{k}]" for k in range(len(specs))]
        every = []
        for share in shares:
            pick = share.own.of
            mine = None if given is None else tuple(pick(given))
            with share.on_stream():
                own = pick(specs)
                results = Results(share, mine, len(own), tuple(pick(labels)))
                if mine is not None:
                    results.check(own, inputs())
                results.make(own)
                every.append(results)
        return cls(shares, every)

    @property
    def views(self) -> list[Array]:
        """What is written, in the gradients' order."""
        return self._in_order(outputs.views for outputs in self.outputs)

    def results(self) -> list[Any]:
        """What the caller gets, in the gradients' order."""
        found = []
        for share, outputs in zip(self.shares, self.outputs, strict=True):
            with share.on_stream():
                found.append(outputs.results())
        return self._in_order(found)

    def _in_order(self, lists: Iterable[Sequence[Any]]) -> list[Any]:
        every: dict[int, Any] = {}
        for share, items in zip(self.shares, lists, strict=True):
            every |= zip(share.own.positions, items, strict=True)
        return [every[k] for k in range(len(every))]


def spread(views: Sequence[Array]) -> Spread:
    """Views by their devices."""
    positions: dict[Any, list[int]] = {}
    for k, view in enumerate(views):
        positions.setdefault(None if type(view) is np.ndarray else backend_of(view), []).append(k)
    places = {
        where: OneDevice(tuple(own), Views([views[k] for k in own]))
        for where, own in positions.items()
    }
    host = places.pop(None, None)
    return Spread(views, [*places.values()], host)


def backend_of_all(views: Spread) -> Backend:
    """What computes on gradients of several devices."""
    from gradkit._cuda.several_devices import backend_of_several

    backends: Any = tuple(backend_of(own.views[0]) for own in views.devices)
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
