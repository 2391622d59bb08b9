"""The norms over rows on a GPU."""

from gradkit._calls import rows as records
from gradkit._calls.rows import by_sample
from gradkit._cuda.launch.operations import OnDevice
from gradkit._cuda.row_forward import ForwardArrays, write_forward, write_inverse
from gradkit._cuda.row_gradient import LAYER, LAYER_OUTPUT, RMS, RMS_OUTPUT, write_gradient

MOST_SAMPLES = 65_535  # of one launch: of CUDA's grids the longest third side


class RowNorms(OnDevice):
    """Launches the kernels of norms over rows."""

    @by_sample(MOST_SAMPLES)
    def layer_norm(self, call: records.LayerNorm) -> None:
        """Write ``y``, ``mean`` and ``inv_std``; ``y`` may be ``x``."""
        arrays = ForwardArrays(call.x, call.scale, call.bias, call.y, call.mean, call.inv_std)
        write_forward(self.device, call, arrays)

    @by_sample(MOST_SAMPLES)
    def add_layer_norm(self, call: records.AddLayerNorm) -> None:
        """Write ``s = x + residual``, and as ``layer_norm`` of ``s``."""
        arrays = ForwardArrays(call.x, call.scale, call.bias, call.y, call.mean, call.inv_std)
        write_forward(self.device, call, arrays, call.residual, call.s)

    @by_sample(MOST_SAMPLES)
    def layer_norm_grad(self, call: records.LayerNormGrad) -> None:
        """Write ``dx``, ``dscale`` and ``dbias`` (``=``); ``dx`` may be ``dy`` or ``ds``."""
        inputs = call.dy, call.x, call.scale, None, call.mean, call.inv_std
        outputs = call.dx, call.dscale, call.dbias
        write_gradient(self.device, LAYER, call, inputs, outputs, call.ds, call.scale_offset)

    def layer_norm_inverse(self, call: records.LayerNormInverse) -> None:
        """Write ``x = (y - bias) / scale / inv_std + mean``; ``x`` may be ``y``."""
        write_inverse(self.device, call)

    def invertible_layer_norm_grad(self, call: records.InvertibleLayerNormGrad) -> None:
        """As ``layer_norm_grad``, with xhat computed from the output; ``dx`` may be ``dy``."""
        inputs = call.dy, call.y, call.scale, call.bias, None, call.inv_std
        outputs = call.dx, call.dscale, call.dbias
        write_gradient(self.device, LAYER_OUTPUT, call, inputs, outputs)

    @by_sample(MOST_SAMPLES)
    def rms_norm(self, call: records.RmsNorm) -> None:
        """Write ``y`` and ``inv_std``; ``y`` may be ``x``."""
        arrays = ForwardArrays(call.x, call.scale, None, call.y, None, call.inv_std)
        write_forward(self.device, call, arrays)

    @by_sample(MOST_SAMPLES)
    def add_rms_norm(self, call: records.AddRmsNorm) -> None:
        """Write ``s = x + residual``, and as ``rms_norm`` of ``s``."""
        arrays = ForwardArrays(call.x, call.scale, None, call.y, None, call.inv_std)
        write_forward(self.device, call, arrays, call.residual, call.s)

    @by_sample(MOST_SAMPLES)
    def rms_norm_grad(self, call: records.RmsNormGrad) -> None:
        """Write ``dx`` and ``dscale`` (``=``); ``dx`` may be ``dy`` or ``ds``."""
        inputs = call.dy, call.x, call.scale, None, None, call.inv_std
        outputs = call.dx, call.dscale, None
        write_gradient(self.device, RMS, call, inputs, outputs, call.ds, call.scale_offset)

    def invertible_rms_norm_grad(self, call: records.InvertibleRmsNormGrad) -> None:
        """As ``rms_norm_grad``, with xhat computed from the output; ``dx`` as there."""
        inputs = call.dy, call.y, call.scale, None, None, call.inv_std
        outputs = call.dx, call.dscale, None
        write_gradient(self.device, RMS_OUTPUT, call, inputs, outputs, call.ds, call.scale_offset)
