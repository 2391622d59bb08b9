"""Which kernels an operation can ask for, and compiling them before it does."""

import os
from collections.abc import Iterable, Iterator, Set
from concurrent.futures import ThreadPoolExecutor

from gradkit._cuda import accumulation, batch_normalization, clipping, engines, normalization
from gradkit._cuda.device import Device
from gradkit._cuda.layout import Macros
from gradkit._cuda.loading import kernel, kernels_in
from gradkit._dtypes import accumulation_name

_MODULES = (accumulation, batch_normalization, clipping, normalization)

_ROW_GRADIENT = ("layer_norm_grad", "layer_norm_grad_wide", "column_sums")
_FILES: dict[str, tuple[str, ...]] = {
    "accumulate_grad": ("accumulate",),
    "accumulate_grad_v2": ("accumulate",),
    "batch_norm": ("batch_norm",),
    "batch_norm_grad": ("batch_norm_grad",),
    "clip_by_global_norm": ("norm", "coefficients", "scale"),
    "clip_coefficient": ("coefficients",),
    "clip_grad_norm": ("norm", "coefficients", "scale"),
    "clip_grad_value": ("clip_value",),
    "grad_norm": ("norm", "coefficients"),
    "invertible_layer_norm_grad": _ROW_GRADIENT,
    "layer_norm": ("layer_norm",),
    "layer_norm_grad": _ROW_GRADIENT,
    "layer_norm_inverse": ("layer_norm_inverse",),
    "rms_norm": ("layer_norm",),
    "rms_norm_grad": _ROW_GRADIENT,
    "scale_grads": ("scale",),
    "zero_grad": ("zero",),
}
# Where operations share a file: the macros that are one's own.
_FORMS: dict[str, Macros] = {
    "invertible_layer_norm_grad": {"FROM_OUTPUT": 1, "CENTRED": 1},
    "layer_norm": {"CENTRED": 1},
    "layer_norm_grad": {"FROM_OUTPUT": 0, "CENTRED": 1},
    "rms_norm": {"CENTRED": 0},
    "rms_norm_grad": {"FROM_OUTPUT": 0, "CENTRED": 0},
}


def combinations() -> Iterator[tuple[str, Macros]]:
    """Every kernel file, and the macros that it can be compiled with."""
    for module in _MODULES:
        yield from module.combinations()


def needed(operations: Iterable[str], dtypes: Set[str]) -> list[tuple[str, Macros]]:
    """Those of the combinations that operations on arrays of some dtypes can ask for."""
    forms = [(_FILES[name], _FORMS.get(name, {})) for name in operations]

    def asked(file: str, macros: Macros) -> bool:
        return any(
            file in files and all(macros.get(name, value) == value for name, value in form.items())
            for files, form in forms
        )

    return [(f, macros) for f, macros in combinations() if asked(f, macros) and _of(macros, dtypes)]


def warm_up(device: Device, operations: Iterable[str], dtypes: Set[str]) -> int:
    """Compile what operations need, on all cores; how many combinations that are."""
    names = set(operations)
    combined = needed(names, dtypes)

    def load(combination: tuple[str, Macros]) -> None:
        file, macros = combination
        with device.active():
            for name in kernels_in(file):
                kernel(device, file, name, **macros)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(load, combined))  # raises the first error
    if names & {"batch_norm", "batch_norm_grad"}:
        engines.warm_up(device)
    return len(combined)


def _of(macros: Macros, dtypes: Set[str]) -> bool:
    """Whether a combination is for data of these dtypes.

    Absent parameters count as arrays of the statistics' dtype.
    """
    data = {macros[name] for name in ("DATA_T", "GRAD", "BUFFER") if name in macros}
    sums = {accumulation_name(name) for name in dtypes}
    return (
        data <= dtypes
        and macros.get("ACC_T") in {None, *sums}
        and macros.get("PARAM_T") in {None, *dtypes, macros.get("STAT_T", macros.get("ACC_T"))}
    )
