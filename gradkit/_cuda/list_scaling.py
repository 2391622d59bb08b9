"""What scales, clamps and zeroes lists of arrays on a GPU: steps, with all their kernels made."""

import numpy as np

from gradkit._calls.lists import ClipByNorm, ClipGradValue, ScaleGrads, ZeroGrad
from gradkit._cuda.launch.device import Device
from gradkit._cuda.launch.numbers import FLAGS, either
from gradkit._cuda.list_tables import Step, plan_of, plan_steps

_CLIP = "clip_by_norm"  # the kernel, and its file: whoever clips does not wait for the others


def clip_steps(device: Device, call: ClipByNorm) -> list[Step]:
    """What launches ``clip_by_norm``: the coefficient is computed in the launch that scales."""
    numbers = (*either(call.max_norm), np.float64(call.eps), *either(call.scale))
    flags = FLAGS[call.zero_nonfinite], FLAGS[call.outs is call.grads]
    plan = plan_of(device, call.grads, call.outs)
    return plan_steps(device, plan, _CLIP, _CLIP, call.norm, *numbers, *flags)


def scale_steps(device: Device, call: ScaleGrads) -> list[Step]:
    """What launches ``scale_grads``."""
    in_place = call.outs is call.grads
    array, number = either(call.coefficient)
    if array is None and number == 1 and in_place:
        return []
    plan = plan_of(device, call.grads, call.outs)
    return plan_steps(device, plan, "scale", "scale_grads", array, number, FLAGS[in_place])


def value_steps(device: Device, call: ClipGradValue) -> list[Step]:
    """What launches ``clip_grad_value``."""
    limit, plan = np.float64(call.clip_value), plan_of(device, call.grads, call.outs)
    return plan_steps(device, plan, "clip_value", "clip_grad_value", limit)


def zero_steps(device: Device, call: ZeroGrad) -> list[Step]:
    """What launches ``zero_grad``."""
    return plan_steps(device, plan_of(device, call.grads, call.grads), "zero", "zero_grad")
