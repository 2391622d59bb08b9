"""Batch norm by cuDNN if it is installed and supports the case, otherwise by our own kernels."""

from functools import partial

from gradkit._backend import Array, Engine, Running
from gradkit._cuda.cudnn import batch_normalization as by_cudnn
from gradkit._cuda.cudnn import library
from gradkit._cuda.cudnn.engines import done_by_cudnn
from gradkit._cuda.launch import channels
from gradkit._cuda.launch.channels import (
    Forward,
    Gradient,
    combinations,
    combinations_with_running,
)
from gradkit._cuda.launch.operations import OnDevice
from gradkit._cuda.launch.warmup import asks_for
from gradkit.errors import BackendUnavailableError


class BatchNormalization(OnDevice):
    """Chooses the engine of each call."""

    @asks_for(combinations_with_running)
    def batch_norm(
        self,
        x: Array,
        scale: Array | None,
        bias: Array | None,
        channel_axis: int,
        eps: float,
        y: Array,
        mean: Array,
        inv_std: Array,
        engine: Engine | None = None,
        running: Running | None = None,
    ) -> Engine:
        """Write ``y``, ``mean`` and ``inv_std``; return the engine. ``running`` moves."""
        call = Forward(x, scale, bias, channel_axis, eps, y, mean, inv_std, running)
        moved = None if running is None else running.mean.dtype
        case = ("batch_norm", x.shape, x.strides, x.dtype, channel_axis, eps, moved)
        if done_by_cudnn(self.device, engine, partial(by_cudnn.batch_norm, call=call), case):
            return "cudnn"
        channels.batch_norm(self.device, call)
        return "native"

    @asks_for(partial(combinations, "batch_norm_grad"))
    def batch_norm_grad(
        self,
        dy: Array,
        x: Array,
        scale: Array | None,
        mean: Array,
        inv_std: Array,
        channel_axis: int,
        dx: Array,
        dscale: Array | None,
        dbias: Array | None,
        engine: Engine | None = None,
    ) -> Engine:
        """Write ``dx``, ``dscale`` and ``dbias``; return the engine. ``dx`` may be ``dy``."""
        call = Gradient(dy, x, scale, mean, inv_std, channel_axis, dx, dscale, dbias)
        case = ("batch_norm_grad", x.shape, x.strides, x.dtype, channel_axis)
        if done_by_cudnn(self.device, engine, partial(by_cudnn.batch_norm_grad, call=call), case):
            return "cudnn"
        channels.batch_norm_grad(self.device, call)
        return "native"

    def load_cudnn(self) -> None:
        """Load cuDNN if it is installed, and create this thread's handle."""
        with self.device.active():
            stream = self.device.cuda_stream()
            if stream is None:
                return
            try:
                library.cudnn().handles.get(self.device.number, stream)
            except BackendUnavailableError:
                return
