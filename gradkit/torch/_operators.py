"""The norms as operators, ``torch.ops.gradkit``, and as differentiable functions of them.

A norm is named by the records of its forward pass and of its gradient, from which its operators
follow.
"""

from gradkit._calls import channels, rows
from gradkit.torch._records import norm_of

# ``(x, scale, bias, axis, eps, scale_offset) -> y``; the backward pass reads x.
LAYER_NORM = norm_of("layer_norm", rows.LayerNorm, rows.LayerNormGrad)

# ``(x, scale, bias, axis, eps, scale_offset) -> y``; the backward pass reads y.
INVERTIBLE_LAYER_NORM = norm_of(
    "invertible_layer_norm", rows.LayerNorm, rows.InvertibleLayerNormGrad
)

# ``(x, residual, scale, bias, axis, eps, scale_offset) -> (y, s)``.
ADD_LAYER_NORM = norm_of("add_layer_norm", rows.AddLayerNorm, rows.LayerNormGrad, x="s")

# ``(x, scale, axis, eps, scale_offset) -> y``.
RMS_NORM = norm_of("rms_norm", rows.RmsNorm, rows.RmsNormGrad)

# ``(x, scale, axis, eps, scale_offset) -> y``; the backward pass reads y.
INVERTIBLE_RMS_NORM = norm_of("invertible_rms_norm", rows.RmsNorm, rows.InvertibleRmsNormGrad)

# ``(x, residual, scale, axis, eps, scale_offset) -> (y, s)``.
ADD_RMS_NORM = norm_of("add_rms_norm", rows.AddRmsNorm, rows.RmsNormGrad, x="s")

# ``(x, gate, scale, axis, eps, scale_offset, activation, norm_before_gate) -> y``.
GATED_RMS_NORM = norm_of("gated_rms_norm", rows.GatedRmsNorm, rows.GatedRmsNormGrad)

# ``(x, scale, bias, num_groups, eps, channel_axis) -> y``.
GROUP_NORM = norm_of("group_norm", channels.GroupNorm, channels.GroupNormGrad)

# ``(x, scale, bias, running_mean, running_var, momentum, eps, channel_axis) -> y``.
BATCH_NORM = norm_of("batch_norm", channels.BatchNorm, channels.BatchNormGrad)

# ``(x, scale, bias, mean, var, eps, channel_axis) -> y``.
BATCH_NORM_INFERENCE = norm_of(
    "batch_norm_inference", channels.BatchNormInference, channels.BatchNormInferenceGrad
)
