"""Calls of list operations as the CUDA backend gets them."""

from gradkit._calls import lists
from gradkit._calls.record import Plan
from gradkit._cuda import CudaBackend

# What a test does not say; results take the gradients' place.
USUAL = {
    "accumulate_grad": {"casting": "safe", "do_update": True, "scale": None},
    "accumulate_grad_v2": {"casting": "safe"},
    "accumulate_grads": {"do_update": True, "overwrite": False, "scale": 1.0},
    "clip_by_norm": {"eps": 0.0, "zero_nonfinite": False},
    "clip_units": {"eps": 0.0, "zero_nonfinite": False},
    "unit_norms": {"mean": False},
}
IN_PLACE = ("scale_grads", "clip_grad_value", "clip_by_norm", "clip_units")


def run(device, name, **given):
    """Run an operation on a device, by its name."""
    if name in IN_PLACE:
        given.setdefault("outs", given["grads"])
    kind = getattr(lists, name.title().replace("_", ""))
    call = kind(**USUAL.get(name, {}) | given)
    call.plan = Plan((), {})
    getattr(CudaBackend(device), name)(call)
