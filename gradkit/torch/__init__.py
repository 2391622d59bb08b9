"""gradkit for programs that differentiate with PyTorch; imported by those who want it.

Names and signatures are PyTorch's own, those of ``torch.nn``, ``torch.nn.functional`` and
``torch.nn.utils``. Everything works on gradkit's functions, which :mod:`gradkit` has for plain
tensors.
"""

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError("gradkit.torch needs PyTorch: pip install torch") from error

from gradkit._open.foreign import close_to_dynamo as _close_to_dynamo
from gradkit.torch import accumulation, clipping, export, modules, norms, statistics
from gradkit.torch.accumulation import *
from gradkit.torch.clipping import *
from gradkit.torch.export import *
from gradkit.torch.modules import *
from gradkit.torch.norms import *
from gradkit.torch.statistics import *

__all__: list[str] = []
__all__ += accumulation.__all__
__all__ += clipping.__all__
__all__ += export.__all__
__all__ += modules.__all__
__all__ += norms.__all__
__all__ += statistics.__all__

for _module in (accumulation, statistics):
    _close_to_dynamo(map(vars(_module).__getitem__, _module.__all__))
