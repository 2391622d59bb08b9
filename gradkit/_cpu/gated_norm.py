"""RMS norm with an activated gate, compiled. Rows without elements are NumPy's."""

from gradkit import _numpy
from gradkit._calls.rows import GatedRmsNorm, GatedRmsNormGrad
from gradkit._cpu.compiled import gated_forward, gated_gradient
from gradkit._cpu.rows import types_of
from gradkit._threads import workers

__all__ = ["gated_rms_norm", "gated_rms_norm_grad"]


def gated_rms_norm(call: GatedRmsNorm) -> None:
    """Write ``y`` and ``inv_std``; ``y`` may be ``x`` or ``gate``."""
    if (types := types_of(call, call.x)) < 0:
        _numpy.gated_rms_norm(call)
        return
    numbers = types, workers(), call.axis, call.eps, call.scale_offset
    gating = call.activation == "silu", call.norm_before_gate
    gated_forward(*numbers + gating, call.x, call.gate, call.scale, call.y, call.inv_std)


def gated_rms_norm_grad(call: GatedRmsNormGrad) -> None:
    """Write ``dx``, ``dgate`` and ``dscale`` (``=``); ``dx`` may be ``dy`` or ``x``.

    ``dgate`` may be ``dy`` or ``gate``.
    """
    if (types := types_of(call, call.x)) < 0:
        _numpy.gated_rms_norm_grad(call)
        return
    numbers = types, workers(), call.axis, call.scale_offset
    gating = call.activation == "silu", call.norm_before_gate
    inputs = call.dy, call.x, call.gate, call.scale, call.inv_std
    gated_gradient(*numbers + gating + inputs, call.dx, call.dgate, call.dscale)
