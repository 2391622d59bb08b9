from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from gradkit._calls.roles import Flags, Norm

def instruction_sets() -> list[str]: ...
def instruction_set() -> str: ...
def use_instruction_set(name: str, /) -> None: ...

# What XLA calls by itself: capsules by name.
xla_handlers: dict[str, Any]

# So many bytes, undefined, that are kept for the next ones when nothing holds them.
def memory(size: int, /) -> np.ndarray[Any, np.dtype[np.uint8]]: ...

# From now on a call may use so many threads.
def use_threads(count: int, /) -> None: ...
def use_openmp(parallel: int, number: int, most: int, /) -> None: ...
def calls_of(work: Callable[[], object], /) -> list[tuple[Any, ...]]: ...

# The functions of norm layers have the names of operations, by which gradkit/_cpu/norms.py finds
# them; below are those of lists.

def norms(
    grads: Sequence[Any],
    norm_type: float,
    by: float,
    per_tensor: bool,
    norm: Norm,
    found_inf: Flags | None,
    /,
) -> None: ...
def stats(grads: Sequence[Any], parts: bool, rows: Any, /) -> None: ...
def norm_parts(
    grads: Sequence[Any],
    norm_type: float,
    per_tensor: bool,
    copies: Sequence[int] | None,
    rows: Any,
    /,
) -> None: ...
def unit_norms(
    grads: Sequence[Any],
    axes: Sequence[tuple[int, ...]],
    norm_type: float,
    mean: bool,
    norms: Any,
    /,
) -> None: ...
def scale_units(grads: Sequence[Any], outs: Sequence[Any], axes: Any, factors: Any, /) -> None: ...
def scale(grads: Sequence[Any], outs: Sequence[Any], factor: float, /) -> None: ...
def clamp(grads: Sequence[Any], outs: Sequence[Any], limit: float, /) -> None: ...
def zero(grads: Sequence[Any], /) -> None: ...
def accumulate(
    buffers: Sequence[Any],
    grads: Sequence[Any],
    scale: float,
    overwrite: bool,
    norm: Norm | None,
    grad_norm: Norm | None,
    /,
) -> None: ...
def compensate(
    buffers: Sequence[Any],
    grads: Sequence[Any],
    compensation: Sequence[Any],
    scale: float,
    overwrite: bool,
    /,
) -> None: ...
def average(averages: Sequence[Any], params: Sequence[Any], decay: float, /) -> None: ...
def adamw(
    params: Sequence[Any],
    grads: Sequence[Any],
    moments: Sequence[Any],
    variances: Sequence[Any],
    numbers: np.ndarray[Any, Any],
    key: int,
    offsets: Sequence[int] | None,
    /,
) -> None: ...
def sgd(
    params: Sequence[Any],
    grads: Sequence[Any],
    momenta: Sequence[Any] | None,
    lr: float,
    scale: float,
    momentum: float,
    decay: float,
    nesterov: bool,
    key: int,
    offsets: Sequence[int] | None,
    /,
) -> None: ...
def accumulate_at_random(
    buffers: Sequence[Any],
    grads: Sequence[Any],
    scale: float,
    overwrite: bool,
    key: int,
    offsets: Sequence[int],
    /,
) -> None: ...
def exact_sums(
    order: int,
    arrays: list[Any],
    dtypes: list[int],
    rows: list[int],
    count: int,
    out: Any,
) -> None: ...
def spike_guard(
    states: Any,
    norms: Any,
    limits: Any,
    decay: float,
    threshold: float,
    warmup: float,
    clips: bool,
    /,
) -> None: ...

# The arrays of a list, read in one pass over the caller's containers.
class Table(Sequence[Any]):
    arrays: list[Any]
    tree: Any
    is_flat: bool
    are_tensors: bool
    device: int  # -1: the host
    addresses: tuple[int, ...]
    layout: bytes
    known: object
    plan: Any
    def __len__(self) -> int: ...
    def __getitem__(self, k: Any, /) -> Any: ...
    def pairs_with(self, other: Table, /) -> int: ...
    def picked(self, chosen: Iterable[Any], /) -> Table: ...
    def like(self, arrays: list[Any], /) -> Table: ...

def table(tree: Any, written: bool, /) -> Table | None: ...
def leaves(tree: Any, /) -> tuple[list[Any], bool] | None: ...
def apart(written: Sequence[Any], read: Sequence[Any], /) -> bool: ...
def fitting(written: Table, others: Table, may_be: bool, /) -> int: ...
def meetings(written: Sequence[Any], read: Sequence[Any], /) -> list[tuple[int, int]]: ...
def signature(
    backend: Any,
    options: tuple[Any, ...],
    arrays: Sequence[Any],
    written: int,
    /,
) -> tuple[Any, ...] | None: ...
def known(
    plans: dict[Any, Any],
    backend: Any,
    call: Any,
    names: tuple[Any, ...],
    outs: tuple[Any, ...],
    /,
) -> Any: ...

# Tensors, of the types that are said to describe themselves. Devices are numbered as in DLPack.
def use_tensors(tensor: type, parameter: type, exchange_api: Any, views: Any, /) -> bool: ...
def use_places(host: int, cuda: int, /) -> None: ...
def use_device_arrays(kind: type, /) -> None: ...

# A tensor in such memory, without gaps; strides are in elements.
def new_tensor(shape: tuple[int, ...], strides: tuple[int, ...], dtype: int, /) -> Any: ...
def described_tensors(tensors: tuple[Any, ...], written: int, /) -> bytes | None: ...
