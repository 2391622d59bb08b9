"""Steps of optimisers on a GPU."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from gradkit._backend import Array
from gradkit._calls.lists import AdamwUpdate, SgdUpdate
from gradkit._calls.roles import Flag, Grads
from gradkit._cuda.launch.device import Device, scratch
from gradkit._cuda.launch.kernels import FLAGS, either, kernel
from gradkit._cuda.list_sums import either_seed, joined, kinds_of, part_of
from gradkit._cuda.list_tables import Counted, Step, plan_of, steps
from gradkit._dtypes import float_name
from gradkit._numpy.updates import AdamwNumbers, adamw_numbers

_ADAMW, _NUMBERS, _SGD = "adamw_update", "adamw_numbers", "sgd_update"  # kernels, and their files


def adamw_steps(device: Device, call: AdamwUpdate) -> Iterator[Step]:
    """Launches of ``adamw_update``, one for each combination of dtypes.

    A launch of one thread comes before it if the device holds a number or counts the steps.
    """
    if call.verdict is False:
        return
    computed, numbers = None, np.zeros(len(AdamwNumbers._fields))
    if isinstance(call.step, int) and isinstance(call.lr, float) and isinstance(call.scale, float):
        numbers[:] = adamw_numbers(call, call.step)
    else:
        computed = scratch(device, numbers.size, np.dtype(np.float64))
        yield _computing(device, call, computed)
    arguments = _verdict(call.verdict), computed, numbers.view(f"V{numbers.nbytes}").reshape(())
    for places in kinds_of(call.params, call.grads, call.moments):
        part = call if len(places) == len(call.params) else part_of(call, places)
        states = part.moments, part.variances
        yield from _updating(device, part, _ADAMW, arguments, states, STATE=_name(part.moments))


def sgd_steps(device: Device, call: SgdUpdate) -> Iterator[Step]:
    """Launches of ``sgd_update``, likewise."""
    if call.verdict is False:
        return
    factors = np.float64(call.momentum), FLAGS[call.nesterov], np.float64(call.weight_decay)
    arguments = *either(call.lr), *factors, *either(call.scale), _verdict(call.verdict)
    states = () if call.momenta is None else (call.momenta,)
    for places in kinds_of(call.params, call.grads, *states):
        part = call if len(places) == len(call.params) else part_of(call, places)
        momenta = () if part.momenta is None else (part.momenta,)
        macros = {"MOMENTA": len(momenta), "STATE": _name(momenta[0] if momenta else part.params)}
        yield from _updating(device, part, _SGD, arguments, momenta, **macros)


def _computing(device: Device, call: AdamwUpdate, computed: Array) -> Step:
    """The launch of ``adamw_numbers``, which also counts the step."""
    step = (None, np.int64(call.step)) if isinstance(call.step, int) else (call.step, np.int64(0))
    factors = map(np.float64, (call.beta1, call.beta2, call.eps, call.weight_decay))
    arguments = _verdict(call.verdict), *step, *either(call.lr), *either(call.scale), *factors
    return partial(kernel(device, _NUMBERS, _NUMBERS), (1,), (1,), (*arguments, computed))


def _updating(
    device: Device,
    call: AdamwUpdate | SgdUpdate,
    name: str,
    arguments: tuple[Any, ...],
    states: Sequence[Grads],
    **macros: Any,
) -> list[Step]:
    """Launches that move parameters of one dtype by a list of further_arrays.cuh."""
    sources, further = joined(call.grads, *states), len(states)
    if call.seed is not None:
        sources, further = Counted(sources, call.params, call.offsets), further + 1
    table = plan_of(device, sources, joined(*[call.params] * (1 + further))).table
    for state in states:
        device.pointers(state, write=True)  # an emulator checks what is written
    macros |= {"PARAM": _name(call.params), "GRAD": _name(call.grads)}
    macros["AT_RANDOM"] = int(call.seed is not None)
    return steps(device, table, name, name, *arguments, *either_seed(call.seed), **macros)


def _verdict(verdict: Flag) -> Array | None:
    return None if isinstance(verdict, bool) else verdict


def _name(arrays: Grads) -> str:
    return float_name(arrays[0].dtype) or ""
