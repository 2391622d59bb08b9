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
from gradkit._threads import workers

Compute: TypeAlias = Callable[..., tuple[Any, ...]]

_MOST = 1024  # calls that are remembered before all are forgotten
_PLAIN = {int, float, bool, str}


class KnownCalls:
    """The calls of one operation, which takes tensors and numbers.

    ``tensors`` and ``numbers`` are their places among the arguments; the first ``written`` tensors
    are written in place. ``run`` computes any call.
    """

    def __init__(self, run: Compute, tensors: Sequence[int], numbers: Sequence[int], written: int):
        self._run, self._places, self._written = run, tensors, written
        self._count = len(tensors) + len(numbers)
        self._tensors, self._numbers = _picker(tensors), _picker(numbers)
        self._known: dict[Any, Compute | None] = {}

    def find(self, args: tuple[Any, ...]) -> Compute | None:
        """What computes a call, without further checks, if there was one like it.

        Nobody else may take part in it: no mode, transform or tracer.
        """
        try:
            return self._known.get(self._key(args))
        except TypeError:  # a number without a hash
            return None

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        """Compute a call by its record."""
        results, key = self._run(*args), self._key(args)
        plain = key is not None and _PLAIN.issuperset(map(type, self._numbers(args)))
        if plain and key not in self._known:
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[key] = _noted(self._run, args, self._places[: self._written])
        return results

    def _key(self, args: tuple[Any, ...]) -> Any:
        if len(args) != self._count:
            return None
        seen = seen_on_host(args[0], self._tensors(args), self._written)
        if seen is None:
            return None
        numbers = self._numbers(args)
        return seen, numbers, *map(type, numbers), workers()


def _picker(places: Sequence[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    if len(places) > 1:
        return itemgetter(*places)
    return lambda items: tuple([items[k] for k in places])


def _noted(run: Compute, args: Sequence[Any], written: Sequence[int]) -> Compute | None:
    """What does the same, if ``run`` does nothing but one call of compiled code on these tensors.

    The call is noted down and not made, on tensors that differ from one another.
    """
    given = [each.detach() if isinstance(each, Tensor) else each for each in args]
    moved = [k for k in written if given[k] is not None]
    for k in moved:
        given[k] = given[k].clone()
    made: list[Tensor | None] = []
    before = engines.latest()
    engines.ran(None)
    calls = host.code.calls_of(lambda: made.extend(run(*given)))
    engine = engines.latest()
    if engine is None:
        engines.ran(before)
    if len(calls) != 1:
        return None
    name, *arguments = calls[0]
    count = sum(isinstance(each, int | float) for each in arguments)
    places = {id(each): k for k, each in enumerate((*given, *made)) if each is not None}
    places[id(None)] = -1  # behind all others
    found = [places.get(id(each)) for each in arguments[count:]]
    if None in found:  # a view
        return None
    function, arrays = partial(getattr(host.code, name), *arguments[:count]), itemgetter(*found)
    items, device = (*given, *made), given[0].device
    making = [making_of(each, items[: len(given) + k], device) for k, each in enumerate(made)]
    return _call_of(function, arrays, making, moved, engine)


def _call_of(
    function: Callable[..., None],
    arrays: Callable[[Sequence[Any]], Sequence[Any]],
    making: Sequence[Making],
    moved: Sequence[int],
    engine: str | None,
) -> Compute:
    """What makes results, and calls a function on those that it picks of arguments and results.

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
