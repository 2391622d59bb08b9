"""Calls on tensors in host memory that are like an earlier one: they need no record.

All that decides what compiled code is called with is looked up: dtypes, shapes and strides of the
tensors, and numbers. What it was called with is noted down in the first such call.
"""

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, TypeAlias

from torch import Tensor
from torch.autograd.graph import increment_version

from gradkit import _host as host
from gradkit._arrays.torch import Making, make_all, making_of, seen_on_host
from gradkit._calls import engines

Compute: TypeAlias = Callable[..., tuple[Any, ...]]

_MOST = 1024  # calls that are remembered before all are forgotten
_PLAIN = {int, float, bool, str}


class CachedCalls:
    """The calls of one operation, which takes tensors and numbers.

    ``tensors`` and ``numbers`` are their places among the arguments; the first ``written`` tensors
    are written in place. ``run`` computes any call.
    """

    def __init__(self, run: Compute, tensors: Sequence[int], numbers: Sequence[int], written: int):
        self._run, self._places, self._written = run, tensors, written
        self._count = len(tensors) + len(numbers)
        self._tensors, self._numbers = _picker(tensors), _picker(numbers)
        self._cached: dict[Any, Compute | None] = {}

    def find(self, args: tuple[Any, ...]) -> Compute | None:
        """Return the cached fast call for one like it, which needs no further checks, if any.

        Nobody else may take part in it: no mode, transform or tracer.
        """
        try:
            return self._cached.get(self._key(args))
        except TypeError:  # a number without a hash
            return None

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        """Compute a call by its record."""
        results, key = self._run(*args), self._key(args)
        plain = key is not None and _PLAIN.issuperset(map(type, self._numbers(args)))
        if plain and key not in self._cached:
            if len(self._cached) >= _MOST:
                self._cached.clear()
            self._cached[key] = _noted(self._run, args, self._places[: self._written])
        return results

    def _key(self, args: tuple[Any, ...]) -> Any:
        if len(args) != self._count:
            return None
        layouts = seen_on_host(args[0], self._tensors(args), self._written)
        if layouts is None:
            return None
        numbers = self._numbers(args)
        return layouts, numbers, *map(type, numbers)


def _picker(places: Sequence[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    if len(places) > 1:
        return itemgetter(*places)
    return lambda items: tuple([items[k] for k in places])


def _noted(run: Compute, args: Sequence[Any], written: Sequence[int]) -> Compute | None:
    """Return a fast call, if ``run`` makes but one call of compiled code on these tensors.

    The call is noted down and not made, on tensors that differ from one another.
    """
    inputs = [each.detach() if isinstance(each, Tensor) else each for each in args]
    moved = [k for k in written if inputs[k] is not None]
    for k in moved:
        inputs[k] = inputs[k].clone()
    results: list[Tensor | None] = []
    before = engines.latest()
    engines.ran(None)
    calls = host.code.calls_of(lambda: results.extend(run(*inputs)))
    engine = engines.latest()
    if engine is None:
        engines.ran(before)
    if len(calls) != 1:
        return None
    name, *arguments = calls[0]
    count = sum(isinstance(each, int | float) for each in arguments)
    places = {id(each): k for k, each in enumerate((*inputs, *results)) if each is not None}
    places[id(None)] = -1  # behind all others
    indices = [places.get(id(each)) for each in arguments[count:]]
    if None in indices:  # a view
        return None
    function, arrays = partial(getattr(host.code, name), *arguments[:count]), itemgetter(*indices)
    items, device = (*inputs, *results), inputs[0].device
    making = [making_of(each, items[: len(inputs) + k], device) for k, each in enumerate(results)]
    return _call_of(function, arrays, making, moved, engine)


def _call_of(
    function: Callable[..., None],
    arrays: Callable[[Sequence[Any]], Sequence[Any]],
    making: Sequence[Making],
    moved: Sequence[int],
    engine: str | None,
) -> Compute:
    """Return a function that makes results, picks arrays, and calls ``function`` on them.

    ``engine``: what computes, if it is a batch norm.
    """

    def compute(*args: Any) -> tuple[Any, ...]:
        items = [*args]
        make_all(making, items)
        results = (*items[len(args) :],)
        items.append(None)
        function(*arrays(items))
        if engine is not None:
            engines.ran(engine)
        if moved:
            increment_version([args[k] for k in moved])
        return results

    return compute
