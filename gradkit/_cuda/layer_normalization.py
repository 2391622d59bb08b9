"""Layer norm and invertible layer norm on a GPU."""

from functools import partial

from gradkit._backend import Array
from gradkit._cuda.launch.operations import OnDevice
from gradkit._cuda.launch.row_forward import (
    forward_combinations,
    inverse_combinations,
    write_forward,
    write_inverse,
)
from gradkit._cuda.launch.row_gradient import (
    INVERTIBLE,
    LAYER,
    Inputs,
    Outputs,
    combinations,
    write_gradient,
)
from gradkit._cuda.launch.warmup import asks_for


class LayerNormalization(OnDevice):
    """Launches the kernels of layer norm."""

    @asks_for(partial(forward_combinations, centred=True))
    def layer_norm(
        self,
        x: Array,
        scale: Array | None,
        bias: Array | None,
        axis: int,
        eps: float,
        y: Array,
        mean: Array,
        inv_std: Array,
        *,
        scale_offset: float = 0.0,
    ) -> None:
        """Write ``y``, ``mean`` and ``inv_std``; ``y`` may be ``x``."""
        arrays = x, scale, bias, axis, eps, y, mean, inv_std
        write_forward(self.device, *arrays, scale_offset=scale_offset)

    @asks_for(partial(forward_combinations, centred=True, added=True))
    def add_layer_norm(
        self,
        x: Array,
        residual: Array,
        scale: Array | None,
        bias: Array | None,
        axis: int,
        eps: float,
        y: Array,
        s: Array,
        mean: Array,
        inv_std: Array,
        *,
        scale_offset: float = 0.0,
    ) -> None:
        """Write ``s = x + residual``, and as ``layer_norm`` of ``s``."""
        arrays = x, scale, bias, axis, eps, y, mean, inv_std
        write_forward(self.device, *arrays, scale_offset=scale_offset, residual=residual, s=s)

    @asks_for(partial(combinations, LAYER))
    def layer_norm_grad(
        self,
        dy: Array,
        x: Array,
        scale: Array | None,
        mean: Array,
        inv_std: Array,
        axis: int,
        dx: Array,
        dscale: Array | None,
        dbias: Array | None,
        *,
        ds: Array | None = None,
        scale_offset: float = 0.0,
    ) -> None:
        """Write ``dx``, ``dscale`` and ``dbias`` (``=``); ``dx`` may be ``dy`` or ``ds``."""
        inputs, outputs = Inputs(dy, x, scale, None, mean, inv_std), Outputs(dx, dscale, dbias)
        write_gradient(self.device, LAYER, axis, inputs, outputs, ds=ds, scale_offset=scale_offset)

    @asks_for(inverse_combinations)
    def layer_norm_inverse(
        self,
        y: Array,
        scale: Array | None,
        bias: Array | None,
        mean: Array,
        inv_std: Array,
        axis: int,
        x: Array,
    ) -> None:
        """Write ``x = (y - bias) / scale / inv_std + mean``; ``x`` may be ``y``."""
        write_inverse(self.device, y, scale, bias, mean, inv_std, axis, x)

    @asks_for(partial(combinations, INVERTIBLE))
    def invertible_layer_norm_grad(
        self,
        dy: Array,
        y: Array,
        scale: Array | None,
        bias: Array | None,
        inv_std: Array,
        axis: int,
        dx: Array,
        dscale: Array | None,
        dbias: Array | None,
    ) -> None:
        """As ``layer_norm_grad``, with xhat computed from the output; ``dx`` may be ``dy``."""
        inputs = Inputs(dy, y, scale, bias, None, inv_std)
        write_gradient(self.device, INVERTIBLE, axis, inputs, Outputs(dx, dscale, dbias))
