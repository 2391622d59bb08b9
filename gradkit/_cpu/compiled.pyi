from typing import Any

def instruction_sets() -> list[str]: ...
def instruction_set() -> str: ...
def use_instruction_set(name: str, /) -> None: ...
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
