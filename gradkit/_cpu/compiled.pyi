from collections.abc import Callable, Sequence
from typing import Any

def instruction_sets() -> list[str]: ...
def instruction_set() -> str: ...
def use_instruction_set(name: str, /) -> None: ...

# What XLA calls by itself, on so many threads at most: capsules by name.
xla_handlers: dict[str, Any]

def use_threads(count: int, /) -> None: ...
def calls_of(work: Callable[[], object], /) -> list[tuple[Any, ...]]: ...
def forward(
    types: int,
    threads: int,
    axis: int,
    eps: float,
    scale_offset: float,
    x: Any,
    residual: Any,
    scale: Any,
    bias: Any,
    y: Any,
    s: Any,
    mean: Any,
    inv_std: Any,
    /,
) -> None: ...
def gradient(
    types: int,
    threads: int,
    axis: int,
    from_output: bool,
    centred: bool,
    scale_offset: float,
    dy: Any,
    source: Any,
    scale: Any,
    bias: Any,
    mean: Any,
    inv_std: Any,
    ds: Any,
    dx: Any,
    dscale: Any,
    dbias: Any,
    /,
) -> None: ...
def inverse(
    types: int,
    threads: int,
    axis: int,
    y: Any,
    scale: Any,
    bias: Any,
    mean: Any,
    inv_std: Any,
    x: Any,
    /,
) -> None: ...
def gated_forward(
    types: int,
    threads: int,
    axis: int,
    eps: float,
    scale_offset: float,
    silu: bool,
    before: bool,
    x: Any,
    gate: Any,
    scale: Any,
    y: Any,
    inv_std: Any,
    /,
) -> None: ...
def gated_gradient(
    types: int,
    threads: int,
    axis: int,
    scale_offset: float,
    silu: bool,
    before: bool,
    dy: Any,
    x: Any,
    gate: Any,
    scale: Any,
    inv_std: Any,
    dx: Any,
    dgate: Any,
    dscale: Any,
    /,
) -> None: ...
def channel_norm(
    types: int,
    threads: int,
    axis: int,
    groups: int,
    eps: float,
    momentum: float,
    x: Any,
    scale: Any,
    bias: Any,
    mean: Any,
    var: Any,
    y: Any,
    saved_mean: Any,
    saved_inv_std: Any,
    saved_var: Any,
    running_mean: Any,
    running_var: Any,
    /,
) -> None: ...
def channel_gradient(
    types: int,
    threads: int,
    axis: int,
    groups: int,
    eps: float,
    count: float,
    dy: Any,
    x: Any,
    scale: Any,
    mean: Any,
    inv_std: Any,
    var: Any,
    of_product: Any,
    of_dy: Any,
    dx: Any,
    sum_product: Any,
    sum_dy: Any,
    /,
) -> None: ...
def norms(
    grads: Sequence[Any],
    norm_type: float,
    by: float,
    per_tensor: bool,
    threads: int,
    norm: Any,
    found_inf: Any,
    /,
) -> None: ...
def stats(grads: Sequence[Any], threads: int, parts: bool, rows: Any, /) -> None: ...
def norm_parts(
    grads: Sequence[Any],
    norm_type: float,
    per_tensor: bool,
    copies: Sequence[int] | None,
    threads: int,
    rows: Any,
    /,
) -> None: ...
def unit_norms(
    grads: Sequence[Any],
    axes: Sequence[tuple[int, ...]],
    norm_type: float,
    mean: bool,
    threads: int,
    norms: Any,
    /,
) -> None: ...
def scale_units(
    grads: Sequence[Any], outs: Sequence[Any], axes: Any, factors: Any, threads: int, /
) -> None: ...
def scale(grads: Sequence[Any], outs: Sequence[Any], factor: float, threads: int, /) -> None: ...
def clamp(grads: Sequence[Any], outs: Sequence[Any], limit: float, threads: int, /) -> None: ...
def zero(grads: Sequence[Any], threads: int, /) -> None: ...
def accumulate(
    buffers: Sequence[Any],
    grads: Sequence[Any],
    scale: float,
    overwrite: bool,
    threads: int,
    norm: Any,
    grad_norm: Any,
    /,
) -> None: ...
def compensate(
    buffers: Sequence[Any],
    grads: Sequence[Any],
    compensation: Sequence[Any],
    scale: float,
    overwrite: bool,
    threads: int,
    /,
) -> None: ...
def average(
    averages: Sequence[Any], params: Sequence[Any], decay: float, threads: int, /
) -> None: ...
def accumulate_at_random(
    buffers: Sequence[Any],
    grads: Sequence[Any],
    scale: float,
    overwrite: bool,
    threads: int,
    key: int,
    offsets: Sequence[int],
    /,
) -> None: ...
def exact_sums(
    instruction_set: str,
    threads: int,
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
def apart(written: Sequence[Any], read: Sequence[Any], /) -> bool: ...
def meetings(written: Sequence[Any], read: Sequence[Any], /) -> list[tuple[int, int]]: ...
def plain(arrays: Sequence[Any], dtypes: set[Any], written: bool, /) -> bool: ...
def described(arrays: Sequence[Any], written: int, /) -> tuple[Any, ...] | None: ...
