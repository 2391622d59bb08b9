"""Training-loop utilities for plain arrays.

Gradient clipping, accumulation and zeroing, and the backward passes of layer norm,
invertible layer norm, RMS norm, batch norm and group norm.
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
)
from gradkit import (
    distributed as distributed,
)
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

_close_to_dynamo(map(globals().__getitem__, __all__))
_close_to_dynamo(map(vars(distributed).__getitem__, distributed.__all__))
