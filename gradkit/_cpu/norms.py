"""The norms, compiled: each function in C++ takes the fields of its record in their order.

The dtypes come first, then numbers, arguments and results. Arrays without elements are NumPy's.
"""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import gradkit._cpu.compiled as compiled
from gradkit import _numpy
from gradkit._calls import channels, roles, rows
from gradkit._calls.record import Call
from gradkit._dtypes import float_of

_AS_THEY_ARE = "axis channel_axis num_groups eps scale_offset norm_before_gate momentum count"
# Numbers that compiled code takes, by their fields.
NUMBERS = {name: name for name in _AS_THEY_ARE.split()} | {"activation": "silu"}
_ENGINES = dict.fromkeys(("batch_norm", "batch_norm_grad", "batch_norm_inference"), "native")
# The dtypes of a call, as kernels/cpu/module.cpp has them, and those of roles.
_DATA, _KNOWN, _PARAMETER, _RESULT, _RUNNING = range(5)
_KINDS = {
    roles.Data: _DATA,
    **dict.fromkeys(roles.PARAMETERS, _PARAMETER),
    **dict.fromkeys(roles.RUNNING, _RUNNING),
}


def compiled_norm(name: str) -> Callable[[Any], Any]:
    """The operation of a backend that has this name; it returns the engine, if it has one."""
    record = _record(name)
    numbers = [NUMBERS[field] for field in record.__annotations__ if field in NUMBERS]
    arrays = *record.array_names, *record.result_names
    fields = attrgetter(*numbers, *arrays, *(["var"] if record is channels.BatchNorm else []))
    function, engine = getattr(compiled, name), _ENGINES.get(name)

    def compute(call: Any) -> Any:
        types = call.plan.launcher
        if types is None:
            types = call.plan.launcher = _types_of(call)
        if types < 0:
            return getattr(_numpy, name)(call)
        function(types, *fields(call))
        return engine

    compute.__name__ = name
    return compute


def _record(name: str) -> type[Call]:
    kind = "".join(map(str.capitalize, name.split("_")))
    return getattr(rows, kind, None) or getattr(channels, kind)


def _types_of(call: Any) -> int:
    """The dtypes of a call as one number; -1 if it has no elements. Decided once for each plan.

    Results of one role have one dtype, as have arguments; of what is absent it does not matter.
    """
    if not getattr(call, call.layout.data).size:
        return -1
    codes: dict[int, int] = {}
    for field in call.results:
        if field.role is not roles.Data:
            _note(codes, call, field, _RESULT, _KINDS.get(field.role, _RESULT))
    for field in (*call.arguments, *call.in_place):
        _note(codes, call, field, _KINDS.get(field.role, _KNOWN))
    return sum(code << 2 * kind for kind, code in codes.items())


def _note(codes: dict[int, int], call: Any, field: Any, *kinds: int) -> None:
    array = getattr(call, field.name)
    if array is not None:
        for kind in kinds:
            codes.setdefault(kind, float_of(array.dtype).code)
