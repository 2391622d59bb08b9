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
        self,
        x: Array,
        scale: Array | None,
        axis: int,
        eps: float,
        y: Array,
        inv_std: Array,
        *,
        scale_offset: float = 0.0,
    ) -> None:
        """Write ``y`` and ``inv_std``; ``y`` may be ``x``."""
        arrays = x, scale, None, axis, eps, y, None, inv_std
        write_forward(self.device, *arrays, scale_offset=scale_offset)

    @asks_for(partial(forward_combinations, centred=False, added=True))
    def add_rms_norm(
        self,
        x: Array,
        residual: Array,
        scale: Array | None,
        axis: int,
        eps: float,
        y: Array,
        s: Array,
        inv_std: Array,
        *,
        scale_offset: float = 0.0,
    ) -> None:
        """Write ``s = x + residual``, and as ``rms_norm`` of ``s``."""
        arrays = x, scale, None, axis, eps, y, None, inv_std
        write_forward(self.device, *arrays, scale_offset=scale_offset, residual=residual, s=s)

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
        *,
        ds: Array | None = None,
        scale_offset: float = 0.0,
    ) -> None:
        """Write ``dx`` and ``dscale`` (``=``); ``dx`` may be ``dy`` or ``ds``."""
        inputs, outputs = Inputs(dy, x, scale, None, None, inv_std), Outputs(dx, dscale, None)
        write_gradient(self.device, RMS, axis, inputs, outputs, ds=ds, scale_offset=scale_offset)
