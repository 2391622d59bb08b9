"""Batch norm by known statistics: by cuDNN if it can, which has no gradient of it."""

from functools import partial

from gradkit._backend import Array, Engine
from gradkit._cuda.cudnn import batch_normalization as by_cudnn
from gradkit._cuda.cudnn.engines import done_by_cudnn
from gradkit._cuda.launch import known_channels
from gradkit._cuda.launch.channels import combinations
from gradkit._cuda.launch.known_channels import Gradient, Inference
from gradkit._cuda.launch.operations import OnDevice
from gradkit._cuda.launch.warmup import asks_for


class InferenceBatchNormalization(OnDevice):
    """Chooses the engine of each call."""

    @asks_for(partial(combinations, "batch_norm_inference"))
    def batch_norm_inference(
        self,
        x: Array,
        scale: Array | None,
        bias: Array | None,
        mean: Array,
        var: Array,
        channel_axis: int,
        eps: float,
        y: Array,
        engine: Engine | None = None,
    ) -> Engine:
        """Write ``y``; return the engine. ``y`` may be ``x``."""
        call = Inference(x, scale, bias, mean, var, channel_axis, eps, y)
        case = ("batch_norm_inference", x.shape, x.strides, x.dtype, channel_axis, eps)
        run = partial(by_cudnn.batch_norm_inference, call=call)
        if done_by_cudnn(self.device, engine, run, case):
            return "cudnn"
        known_channels.batch_norm_inference(self.device, call)
        return "native"

    @asks_for(partial(combinations, "batch_norm_inference_grad"))
    def batch_norm_inference_grad(
        self,
        dy: Array,
        x: Array,
        scale: Array | None,
        mean: Array,
        var: Array,
        channel_axis: int,
        eps: float,
        dx: Array,
        dscale: Array | None,
        dbias: Array | None,
    ) -> None:
        """Write ``dx``, ``dscale`` and ``dbias``; ``dx`` may be ``dy``."""
        call = Gradient(dy, x, scale, mean, var, channel_axis, eps, dx, dscale, dbias)
        known_channels.batch_norm_inference_grad(self.device, call)
