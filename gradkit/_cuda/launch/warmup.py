"""Which kernels an operation may need, and how they are compiled in advance."""

import os
from collections.abc import Callable, Iterable, Iterator, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from gradkit._cuda.launch.device import Device
from gradkit._cuda.launch.kernels import Combination, Macros, kernel, kernels_in
from gradkit._dtypes import accumulation_name

Operation = TypeVar("Operation", bound=Callable[..., Any])

_COMBINATIONS: dict[str, Callable[[], Iterable[Combination]]] = {}
_USED_ON: dict[str, Callable[[Device, Macros], bool]] = {}  # for a kernel file that needs it


def asks_for(
    combinations: Callable[[], Iterable[Combination]],
    **used_on: Callable[[Device, Macros], bool],
) -> Callable[[Operation], Operation]:
    """Note which kernels, with which macros, an operation may need.

    ``used_on``: for a kernel file, whether a device asks for it with some macros; default: yes.
    """

    def note(operation: Operation) -> Operation:
        _COMBINATIONS[operation.__name__] = combinations
        _USED_ON.update(used_on)
        return operation

    return note


def combinations(*operations: str) -> Iterator[Combination]:
    """What operations (default: all) may need, each combination once."""
    seen = set()
    for name in sorted(operations or _COMBINATIONS):
        for file, macros in _COMBINATIONS[name]():
            key = (file, *sorted(macros.items()))
            if key not in seen:
                seen.add(key)
                yield file, macros


def needed(operations: Iterable[str], dtypes: Set[str]) -> list[Combination]:
    """The combinations that operations on arrays of these dtypes may need."""
    return [(file, macros) for file, macros in combinations(*operations) if _is_for(macros, dtypes)]


def is_used_on(device: Device, file: str, macros: Macros) -> bool:
    """Whether a device asks for a kernel file with these macros."""
    return file not in _USED_ON or _USED_ON[file](device, macros)


def warmup(device: Device, operations: Iterable[str], dtypes: Set[str]) -> int:
    """Compile what operations need, on all cores; return how many combinations."""
    combined = [each for each in needed(operations, dtypes) if is_used_on(device, *each)]

    def load(combination: Combination) -> None:
        file, macros = combination
        with device.active():
            for name in kernels_in(file):
                kernel(device, file, name, **macros)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(load, combined))  # raises the first error
    return len(combined)


def _is_for(macros: Macros, dtypes: Set[str]) -> bool:
    """Whether a combination is for data of these dtypes.

    An absent scale or bias counts as an array of the statistics' dtype.
    """
    data = {macros[name] for name in ("DATA_T", "GRAD", "BUFFER") if name in macros}
    sums = {accumulation_name(name) for name in dtypes}
    return (
        data <= dtypes
        and macros.get("ACC_T") in {None, *sums}
        and macros.get("STAT_T") in {None, *dtypes, *sums}
        and macros.get("PARAM_T") in {None, *dtypes, macros.get("STAT_T", macros.get("ACC_T"))}
    )
