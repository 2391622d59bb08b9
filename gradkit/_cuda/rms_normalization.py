"""RMS norm on a GPU."""

from functools import partial

from gradkit._backend import Array
from gradkit._cuda.launch.operations import OnDevice
from gradkit._cuda.launch.row_forward import forward_combinations, write_forward
from gradkit._cuda.launch.row_gradient import RMS, Inputs, Outputs, combinations, write_gradient
from gradkit._cuda.launch.warmup import asks_for


class RmsNormalization(OnDevice):
    """Launches the kernels of RMS norm."""

    @asks_for(partial(forward_combinations, centred=False))
    def rms_norm(
        self, x: Array, scale: Array | None, axis: int, eps: float, y: Array, inv_std: Array
    ) -> None:
        """Write ``y`` and ``inv_std``; ``y`` may be ``x``."""
        write_forward(self.device, x, scale, None, axis, eps, y, None, inv_std)

    @asks_for(partial(combinations, RMS))
    def rms_norm_grad(
        self,
        dy: Array,
        x: Array,
        scale: Array | None,
        inv_std: Array,
        axis: int,
        dx: Array,
        dscale: Array | None,
    ) -> None:
        """Write ``dx`` and ``dscale`` (``=``); ``dx`` may be ``dy``."""
        inputs = Inputs(dy, x, scale, None, None, inv_std)
        write_gradient(self.device, RMS, axis, inputs, Outputs(dx, dscale, None))
