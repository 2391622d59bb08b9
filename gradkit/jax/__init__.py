"""gradkit inside JAX's transformations: ``jit``, ``grad``, ``scan``, ``vmap`` and ``shard_map``.

Import it where you want it; ``import gradkit`` imports neither it nor JAX::

    import gradkit.jax

    loss = lambda w, x: gradkit.jax.rms_norm(x, w).sum()
    grads = jax.jit(jax.grad(loss))(w, x)
    grads, norm = gradkit.jax.clip_by_global_norm(grads, max_norm=1.0)

Norms return their output, those of a residual sum the sum too, and batch norm statistics. JAX
differentiates them: once, in reverse mode. Lists of gradients are pytrees.
:mod:`gradkit.jax.transforms` has gradient transformations for optax.

On the CPU XLA calls compiled code (``jax.ffi``). What has none, and CUDA devices, with CuPy on
XLA's stream, call back into gradkit, which computes on XLA's own buffers
(``jax.experimental.buffer_callback``); JAX 0.6.0 does not have that yet, and copies
(``jax.pure_callback``).
"""

try:
    import jax as _jax
except ImportError as error:
    raise ImportError("gradkit.jax needs JAX 0.6 or newer: pip install jax") from error
if _jax.__version_info__ < (0, 6):
    raise ImportError(f"gradkit.jax needs JAX 0.6 or newer, and this is {_jax.__version__}")

from gradkit.jax import (
    accumulation,
    block_clipping,
    channel_norms,
    clipping,
    norms,
    statistics,
    updates,
)
from gradkit.jax.accumulation import *
from gradkit.jax.block_clipping import *
from gradkit.jax.channel_norms import *
from gradkit.jax.clipping import *
from gradkit.jax.norms import *
from gradkit.jax.statistics import *
from gradkit.jax.updates import *

__all__: list[str] = []
__all__ += accumulation.__all__
__all__ += block_clipping.__all__
__all__ += channel_norms.__all__
__all__ += clipping.__all__
__all__ += norms.__all__
__all__ += statistics.__all__
__all__ += updates.__all__
