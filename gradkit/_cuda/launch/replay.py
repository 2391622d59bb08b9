"""The launches of a plan's calls: noted in one call, and made again in calls like it.

What a call decides on its way to the device follows from its plan, from plain numbers that no plan
depends on, from whether arrays are aligned, and from where the arrays of lists lie. If all that is
as it was, only addresses are new: those of its arrays, and of memory that its launches share.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import attrgetter, itemgetter, or_
from typing import Any, NamedTuple

import numpy as np

from gradkit import _host
from gradkit._backend import Address
from gradkit._calls import engines
from gradkit._calls.record import Call
from gradkit._cuda.launch.buffers import VECTOR_BYTES
from gradkit._cuda.launch.device import Device, Notes, noting
from gradkit._cuda.launch.kernels import Launch

_PLAIN = {bool, float, int, type(None)}


class Replay:
    """Computes the calls of a plan on a device.

    If numbers or lists are others each time, calls are noted ever more rarely.
    """

    __slots__ = ("_compute", "_device", "_launched", "_others")

    def __init__(self, compute: Callable[[Call], None], device: Device):
        self._compute, self._device, self._others = compute, device, 0
        self._launched: _Launched | None = None

    def __call__(self, call: Call) -> None:
        """Have a call's results written."""
        device, launched = self._device, self._launched
        if device.capturing():
            self._compute(call)
        elif launched is None or not launched.again(call, device):
            self._others += 1
            if self._others & self._others - 1:
                self._compute(call)
                return
            with noting() as notes:
                self._compute(call)
            self._launched = _launched_by(call, notes) or launched


class _Launched(NamedTuple):
    """Launches of a call, and all that they depend on beside the plan."""

    numbers: Sequence[tuple[str, Any]]  # that are plain
    dtypes: Sequence[tuple[str, Any]]  # of those in arrays
    lists: Sequence[tuple[str, Any]]  # by what stands for their addresses
    addresses: Callable[[Call], Sequence[int]]
    aligned: int  # how many of these addresses are: not those of numbers
    rooms: Sequence[int]  # bytes of memory that launches share
    constants: Sequence[Any]
    by_engine: bool  # whether a call says which engine it is for
    # Each with what picks its arguments from addresses, memory and constants, in this order.
    launches: Sequence[tuple[Launch, Callable[[Sequence[Any]], Sequence[Any]]]]

    def again(self, call: Call, device: Device) -> bool:
        """Launch the same for a call, if that is right."""
        for name, number in self.numbers:
            given = getattr(call, name)
            if given is not number and (
                type(given) is not type(number)
                or given != number
                or not number  # zeros that are equal may differ in sign
            ):
                return False
        for name, dtype in self.dtypes:
            if getattr(getattr(call, name), "dtype", None) is not dtype:
                return False
        for name, known in self.lists:
            if getattr(call, name).known is not known:
                return False
        addresses = self.addresses(call)
        if reduce(or_, addresses[: self.aligned], 0) % VECTOR_BYTES:
            return False
        given = (*addresses, *map(device.allocate, self.rooms), *self.constants)
        try:
            for launch, pick in self.launches:
                launch.start(pick(given))
        except device.launch_errors as error:
            raise launch.refused(error) from error
        if self.by_engine:
            engines.ran("native")
        return True


def _launched_by(call: Call, notes: Notes) -> _Launched | None:
    """Launches of a call; None if it did anything else, or if arguments' sources are unknown."""
    lists = {each.name: getattr(call, each.name) for each in call.lists}
    tables = {name: each for name, each in lists.items() if isinstance(each, _host.Table)}
    own = all(any(each is table for table in tables.values()) for each in notes.lists)
    if notes.others or not (notes.launches and own):
        return None
    numbers = {name: getattr(call, name) for name in call.passing}
    plain = {name: number for name, number in numbers.items() if type(number) in _PLAIN}
    names = [*call.ordered_names, *call.result_names, *(numbers.keys() - plain.keys())]
    arrays = {name: array for name in names if (array := getattr(call, name)) is not None}
    try:
        addresses = [_address_of(array) for array in arrays.values()]
        arguments = _Arguments(addresses, notes.rooms)
        launches = [(launch, arguments.picker(given)) for launch, given in notes.launches]
    except LookupError:
        return None
    aligned = len(arrays.keys() - numbers.keys())
    if not _tell_apart([*arrays.values()], addresses, aligned):
        return None
    return _Launched(
        [*plain.items()],
        [(name, array.dtype) for name, array in arrays.items() if name in numbers],
        [(name, table.known) for name, table in tables.items()],
        _reader(arrays),
        aligned,
        [size for _, size in notes.rooms],
        arguments.constants,
        "engine" in call.numbers,
        launches,
    )


def _tell_apart(arrays: Sequence[Any], addresses: Sequence[int], aligned: int) -> bool:
    """True if addresses tell which array they are of, and are aligned where that counts.

    In another call two arrays may be apart that begin together, if they are not one.
    """
    at = dict(zip(addresses, arrays, strict=True))
    one = all(at[address] is array or not address for address, array in zip(addresses, arrays))  # noqa: B905
    return one and not reduce(or_, addresses[:aligned], 0) % VECTOR_BYTES


def _address_of(memory: Any) -> int:
    """The address of an array or a pointer on a device; a ``LookupError`` of anything else."""
    if type(memory) is Address:
        return memory
    address: int | None = getattr(getattr(memory, "data", memory), "ptr", None)
    if address is None:
        raise LookupError
    return address


def _reader(arrays: Mapping[str, Any]) -> Callable[[Call], Sequence[int]]:
    """A function that reads the addresses of a call's arrays of such types."""
    if not arrays:
        return lambda _: ()
    names = [
        name if type(array) is Address else f"{name}.data.ptr" for name, array in arrays.items()
    ]
    return attrgetter(*names, names[0])  # of one alone it would not make a tuple


class _Arguments:
    """The place of each argument of launches among addresses, memory and constants."""

    def __init__(self, addresses: Sequence[int], rooms: Sequence[tuple[Any, int]]):
        count = len(addresses) + bool(addresses)  # the reader has one more
        self.constants: list[Any] = []
        self._first = count + len(rooms)  # of the constants
        self._addresses = {address: k for k, address in enumerate(addresses) if address}
        for k, (memory, _) in enumerate(rooms, count):
            self._addresses[_address_of(memory)] = k

    def picker(self, arguments: Sequence[Any]) -> Callable[[Sequence[Any]], Sequence[Any]]:
        """A function that picks these; a ``LookupError`` if nobody knows where one is from."""
        places = [self._place(argument) for argument in arguments]
        if len(places) == 1:
            return itemgetter(slice(places[0], places[0] + 1))
        return itemgetter(*places)

    def _place(self, argument: Any) -> int:
        if argument is None or isinstance(argument, np.generic) or type(argument) is np.ndarray:
            address = 0
        else:
            address = _address_of(argument)
        if address:
            return self._addresses[address]
        self.constants.append(argument)
        return self._first + len(self.constants) - 1
