"""Training-loop utilities for plain arrays.

norms       grad_norm, per_tensor_norms, grad_stats
clipping    clip_grad_norm, clip_by_global_norm, clip_grads_with_norm, clip_coefficient,
            clip_grad_value, clip_grad_block_norm, clip_by_block_norm, clip_grad_adaptive,
            clip_by_adaptive_norm, scale_grads
spikes      SpikeGuard, spike_guard_init, spike_guard_update, step_verdict, keep_if
gradients   accumulate_grads, accumulate_grad, accumulate_grad_v2, zero_grad,
            grads_of, named_grads_of, names_of
steps       adamw_update, sgd_update
averages    ema_update
layer norm  layer_norm, layer_norm_grad, add_layer_norm,
            layer_norm_inverse, invertible_layer_norm_grad
RMS norm    rms_norm, rms_norm_grad, add_rms_norm, invertible_rms_norm_grad,
            gated_rms_norm, gated_rms_norm_grad
batch norm  batch_norm, batch_norm_grad, batch_norm_inference, batch_norm_inference_grad
group norm  group_norm, group_norm_grad
settings    warmup, set_num_threads, get_num_threads, use_cpu_backend, show_config, last_engine

``help(gradkit.clip_grad_norm)`` has shapes, dtypes, errors and an example, as of each of them.
``gradkit.distributed`` creates groups of ranks; ``gradkit.torch`` and ``gradkit.jax``, separate
imports, are for those libraries' autograd.
"""

from gradkit import (
    _config,
    _warmup,
    accumulation,
    averaging,
    batch_normalization,
    block_clipping,
    clipping,
    errors,
    gradients,
    group_normalization,
    layer_normalization,
    rms_normalization,
    spikes,
    statistics,
    steps,
    updates,
)
from gradkit import distributed as distributed
from gradkit._config import *
from gradkit._open.foreign import close_to_dynamo as _close_to_dynamo
from gradkit._warmup import *
from gradkit.accumulation import *
from gradkit.averaging import *
from gradkit.batch_normalization import *
from gradkit.block_clipping import *
from gradkit.clipping import *
from gradkit.errors import *
from gradkit.gradients import *
from gradkit.group_normalization import *
from gradkit.layer_normalization import *
from gradkit.rms_normalization import *
from gradkit.spikes import *
from gradkit.statistics import *
from gradkit.steps import *
from gradkit.updates import *

__version__ = "0.1.0.dev0"

__all__: list[str] = []
__all__ += _config.__all__
__all__ += _warmup.__all__
__all__ += accumulation.__all__
__all__ += averaging.__all__
__all__ += batch_normalization.__all__
__all__ += block_clipping.__all__
__all__ += clipping.__all__
__all__ += errors.__all__
__all__ += gradients.__all__
__all__ += group_normalization.__all__
__all__ += layer_normalization.__all__
__all__ += rms_normalization.__all__
__all__ += spikes.__all__
__all__ += statistics.__all__
__all__ += steps.__all__
__all__ += updates.__all__

for _name in __all__:
    if not isinstance(globals()[_name], type):
        globals()[_name].__module__ = __name__  # where people import it, and what help says
_close_to_dynamo(map(globals().__getitem__, __all__))
_close_to_dynamo(map(vars(distributed).__getitem__, distributed.__all__))


def __dir__() -> list[str]:
    """List what users call, which the Tab key completes, without the modules that hold it."""
    apart = {"__version__", "distributed", "jax", "torch"} & globals().keys()
    return [*__all__, *apart]
