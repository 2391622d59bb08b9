"""What type checkers see of gradkit: the caller's own arrays come out, and not ``Any``.

To add a function, take the pattern that fits its results, and a line in ``tests/typing``. A test
holds the names of parameters to those of the functions.

- A result has an argument's type and dtype (``y``, ``dx``, gradients that were scaled): one
  TypeVar, ``def rms_norm_grad(dy: _Array, x: _X, scale: _S, ...) -> tuple[_X, _S]``. ``None`` for
  a scale gives ``None`` for its gradient.
- A result is of the same library, and has another dtype or shape (norms, statistics): two
  overloads. The first is NumPy's, whose types have dtypes in them, the second all others', whose
  types have none. Only the argument that decides may differ between the two.
- A result is a container like ``grads``: the same for a gradient, a mapping and a sequence of them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, ValuesView
from typing import (
    Any,
    Literal,
    Protocol,
    SupportsIndex,
    TypeAlias,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

import numpy as np
from numpy.typing import NDArray

from gradkit import distributed as distributed
from gradkit._config import get_num_threads as get_num_threads
from gradkit._config import set_num_threads as set_num_threads
from gradkit._config import show_config as show_config
from gradkit._config import use_cpu_backend as use_cpu_backend
from gradkit.batch_normalization import last_engine as last_engine
from gradkit.distributed import Group, Reduce
from gradkit.errors import BackendUnavailableError as BackendUnavailableError
from gradkit.errors import CudnnError as CudnnError
from gradkit.errors import GradkitError as GradkitError
from gradkit.errors import KernelCompileError as KernelCompileError
from gradkit.errors import KernelLaunchError as KernelLaunchError
from gradkit.errors import NonFiniteNormError as NonFiniteNormError
from gradkit.errors import RankError as RankError

__version__: str

class _Array(Protocol):
    """An array of NumPy, CuPy, PyTorch, JAX, TensorFlow or any library that supports DLPack."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

_G_co = TypeVar("_G_co", covariant=True)

class _HasGrad(Protocol[_G_co]):
    @property
    def grad(self) -> _G_co | None: ...

_A = TypeVar("_A", bound=_Array)
_X = TypeVar("_X", bound=_Array)
_K = TypeVar("_K")
_S = TypeVar("_S", bound=_Array | None)
_B = TypeVar("_B", bound=_Array | None)

_Host: TypeAlias = np.ndarray[Any, Any]
_Float64: TypeAlias = NDArray[np.float64]
_H = TypeVar("_H", bound=_Host)

# Gradients: one array, or containers of them. An array is no container, though it is iterable.
# mypy does not solve `_Tree` where there is None; `_Flat[_A | None]` as an overload helps it.
_Tree: TypeAlias = (
    _A
    | Mapping[Any, _Tree[_A] | None]
    | Sequence[_Tree[_A] | None]
    | Iterator[_Tree[_A] | None]
    | ValuesView[_Tree[_A] | None]
)
_T = TypeVar("_T")
_Flat: TypeAlias = Mapping[Any, _T] | Sequence[_T] | Iterator[_T] | ValuesView[_T]
_Containers: TypeAlias = Mapping[Any, Any] | Sequence[Any] | Iterator[Any] | ValuesView[Any]
_C = TypeVar("_C", bound=Mapping[Any, Any] | Sequence[Any])

# Numbers. A limit, a scale or a flag may also be an array on the gradients' device.
_Real: TypeAlias = float | np.floating[Any] | np.integer[Any] | _Host
_Scalar: TypeAlias = _Real | _Array
_Flag: TypeAlias = bool | np.bool_ | _Host | _Array
_Order: TypeAlias = _Real | Literal["inf"]
_NonFinite: TypeAlias = Literal["propagate", "raise", "zero"]
_Engine: TypeAlias = Literal["cudnn", "cudnn-persistent", "native"]
_Outs: TypeAlias = tuple[_Array | None, ...]

class _Ranks(TypedDict, total=False):
    group: Group | None
    replicas: int | Mapping[Any, Any] | Sequence[Any]
    reduce: Reduce | None

# --- norms and clipping of all gradients together --------------------------------------------

class _Norm(_Ranks, total=False):
    scale: _Scalar
    nonfinite: _NonFinite
    found_inf: _Host | _Array | None

class _GradNorm(_Norm, total=False):
    per_tensor: bool
    out: _Array | None

class _EachNorm(TypedDict, total=False):
    scale: _Scalar
    nonfinite: _NonFinite
    group: Group | None
    replicas: int | Mapping[Any, Any] | Sequence[Any]
    found_inf: _Host | _Array | None
    out: _Array | None

class _Clip(_Norm, total=False):
    eps: _Real

class _ClipInPlace(_Clip, total=False):
    out: _Array | None

class _ClipCopies(_Clip, total=False):
    out: tuple[Any, _Array | None] | None

@overload
def grad_norm(
    grads: _Tree[_Host], norm_type: _Order = 2.0, **options: Unpack[_GradNorm]
) -> _Float64: ...
@overload
def grad_norm(
    grads: _Flat[_A | None], norm_type: _Order = 2.0, **options: Unpack[_GradNorm]
) -> _A: ...
@overload
def grad_norm(grads: _Tree[_A], norm_type: _Order = 2.0, **options: Unpack[_GradNorm]) -> _A: ...
@overload
def grad_norm(grads: _Containers, norm_type: _Order = 2.0, **options: Unpack[_GradNorm]) -> Any: ...
@overload
def clip_grad_norm(
    grads: _Tree[_Host],
    max_norm: _Scalar,
    norm_type: _Order = 2.0,
    **options: Unpack[_ClipInPlace],
) -> _Float64: ...
@overload
def clip_grad_norm(
    grads: _Flat[_A | None],
    max_norm: _Scalar,
    norm_type: _Order = 2.0,
    **options: Unpack[_ClipInPlace],
) -> _A: ...
@overload
def clip_grad_norm(
    grads: _Tree[_A], max_norm: _Scalar, norm_type: _Order = 2.0, **options: Unpack[_ClipInPlace]
) -> _A: ...
@overload
def clip_grad_norm(
    grads: _Containers, max_norm: _Scalar, norm_type: _Order = 2.0, **options: Unpack[_ClipInPlace]
) -> Any: ...
@overload
def clip_by_global_norm(
    grads: _H, max_norm: _Scalar, norm_type: _Order = 2.0, **options: Unpack[_ClipCopies]
) -> tuple[_H, _Float64]: ...
@overload
def clip_by_global_norm(
    grads: Mapping[_K, _H],
    max_norm: _Scalar,
    norm_type: _Order = 2.0,
    **options: Unpack[_ClipCopies],
) -> tuple[dict[_K, _H], _Float64]: ...
@overload
def clip_by_global_norm(
    grads: list[_H] | Iterator[_H],
    max_norm: _Scalar,
    norm_type: _Order = 2.0,
    **options: Unpack[_ClipCopies],
) -> tuple[list[_H], _Float64]: ...
@overload
def clip_by_global_norm(
    grads: _A, max_norm: _Scalar, norm_type: _Order = 2.0, **options: Unpack[_ClipCopies]
) -> tuple[_A, _A]: ...
@overload
def clip_by_global_norm(
    grads: Mapping[_K, _A],
    max_norm: _Scalar,
    norm_type: _Order = 2.0,
    **options: Unpack[_ClipCopies],
) -> tuple[dict[_K, _A], _A]: ...
@overload
def clip_by_global_norm(
    grads: list[_A] | Iterator[_A],
    max_norm: _Scalar,
    norm_type: _Order = 2.0,
    **options: Unpack[_ClipCopies],
) -> tuple[list[_A], _A]: ...
@overload
def clip_by_global_norm(
    grads: _C, max_norm: _Scalar, norm_type: _Order = 2.0, **options: Unpack[_ClipCopies]
) -> tuple[_C, Any]: ...
@overload
def clip_coefficient(
    norm: _Host | float | np.floating[Any],
    max_norm: _Scalar,
    *,
    eps: _Real = 1e-6,
    out: _Array | None = None,
) -> _Float64: ...
@overload
def clip_coefficient(
    norm: _A, max_norm: _Scalar, *, eps: _Real = 1e-6, out: _Array | None = None
) -> _A: ...

class _ClipKnown(TypedDict, total=False):
    scale: _Scalar
    eps: _Real
    nonfinite: _NonFinite

@overload
def clip_grads_with_norm(
    grads: Iterator[_A], norm: _Scalar, max_norm: _Scalar, **options: Unpack[_ClipKnown]
) -> list[_A]: ...
@overload
def clip_grads_with_norm(
    grads: _A, norm: _Scalar, max_norm: _Scalar, **options: Unpack[_ClipKnown]
) -> _A: ...
@overload
def clip_grads_with_norm(
    grads: _C, norm: _Scalar, max_norm: _Scalar, **options: Unpack[_ClipKnown]
) -> _C: ...
@overload
def scale_grads(grads: Iterator[_A], coefficient: _Scalar) -> list[_A]: ...
@overload
def scale_grads(grads: _A, coefficient: _Scalar) -> _A: ...
@overload
def scale_grads(grads: _C, coefficient: _Scalar) -> _C: ...
@overload
def clip_grad_value(grads: Iterator[_A], clip_value: _Real) -> list[_A]: ...
@overload
def clip_grad_value(grads: _A, clip_value: _Real) -> _A: ...
@overload
def clip_grad_value(grads: _C, clip_value: _Real) -> _C: ...

# --- each gradient by a norm of its own ------------------------------------------------------

_Along: TypeAlias = int | Iterable[int] | None
_Axis: TypeAlias = _Along | Mapping[Any, Any] | list[Any] | Callable[[str, Any], _Along]

class _Adaptive(TypedDict, total=False):
    eps: _Real
    axis: _Axis
    nonfinite: _NonFinite

class _AdaptiveInPlace(_Adaptive, total=False):
    out: _Array | None

class _AdaptiveCopies(_Adaptive, total=False):
    out: tuple[Any, _Array | None] | None

class _BlockInPlace(_AdaptiveInPlace, total=False):
    rms: bool

class _BlockCopies(_AdaptiveCopies, total=False):
    rms: bool

@overload
def clip_grad_block_norm(
    grads: _Host, max_norm: _Scalar, norm_type: _Order = 2.0, **options: Unpack[_BlockInPlace]
) -> _Float64: ...
@overload
def clip_grad_block_norm(
    grads: Mapping[_K, _Host],
    max_norm: _Scalar,
    norm_type: _Order = 2.0,
    **options: Unpack[_BlockInPlace],
) -> dict[_K, _Float64]: ...
@overload
def clip_grad_block_norm(
    grads: list[_H] | Iterator[_H],
    max_norm: _Scalar,
    norm_type: _Order = 2.0,
    **options: Unpack[_BlockInPlace],
) -> list[_Float64]: ...
@overload
def clip_grad_block_norm(
    grads: Iterator[_A],
    max_norm: _Scalar,
    norm_type: _Order = 2.0,
    **options: Unpack[_BlockInPlace],
) -> list[_A]: ...
@overload
def clip_grad_block_norm(
    grads: _A, max_norm: _Scalar, norm_type: _Order = 2.0, **options: Unpack[_BlockInPlace]
) -> _A: ...
@overload
def clip_grad_block_norm(
    grads: _C, max_norm: _Scalar, norm_type: _Order = 2.0, **options: Unpack[_BlockInPlace]
) -> _C: ...
@overload
def clip_by_block_norm(
    grads: _H, max_norm: _Scalar, norm_type: _Order = 2.0, **options: Unpack[_BlockCopies]
) -> tuple[_H, _Float64]: ...
@overload
def clip_by_block_norm(
    grads: Mapping[_K, _H],
    max_norm: _Scalar,
    norm_type: _Order = 2.0,
    **options: Unpack[_BlockCopies],
) -> tuple[dict[_K, _H], dict[_K, _Float64]]: ...
@overload
def clip_by_block_norm(
    grads: list[_H] | Iterator[_H],
    max_norm: _Scalar,
    norm_type: _Order = 2.0,
    **options: Unpack[_BlockCopies],
) -> tuple[list[_H], list[_Float64]]: ...
@overload
def clip_by_block_norm(
    grads: Iterator[_A],
    max_norm: _Scalar,
    norm_type: _Order = 2.0,
    **options: Unpack[_BlockCopies],
) -> tuple[list[_A], list[_A]]: ...
@overload
def clip_by_block_norm(
    grads: _A, max_norm: _Scalar, norm_type: _Order = 2.0, **options: Unpack[_BlockCopies]
) -> tuple[_A, _A]: ...
@overload
def clip_by_block_norm(
    grads: _C, max_norm: _Scalar, norm_type: _Order = 2.0, **options: Unpack[_BlockCopies]
) -> tuple[_C, _C]: ...
@overload
def clip_grad_adaptive(
    grads: _Host, params: Any, clipping: _Scalar = 0.01, **options: Unpack[_AdaptiveInPlace]
) -> _Float64: ...
@overload
def clip_grad_adaptive(
    grads: Mapping[_K, _Host],
    params: Any,
    clipping: _Scalar = 0.01,
    **options: Unpack[_AdaptiveInPlace],
) -> dict[_K, _Float64]: ...
@overload
def clip_grad_adaptive(
    grads: list[_H] | Iterator[_H],
    params: Any,
    clipping: _Scalar = 0.01,
    **options: Unpack[_AdaptiveInPlace],
) -> list[_Float64]: ...
@overload
def clip_grad_adaptive(
    grads: Iterator[_A],
    params: Any,
    clipping: _Scalar = 0.01,
    **options: Unpack[_AdaptiveInPlace],
) -> list[_A]: ...
@overload
def clip_grad_adaptive(
    grads: _A, params: Any, clipping: _Scalar = 0.01, **options: Unpack[_AdaptiveInPlace]
) -> _A: ...
@overload
def clip_grad_adaptive(
    grads: _C, params: Any, clipping: _Scalar = 0.01, **options: Unpack[_AdaptiveInPlace]
) -> _C: ...
@overload
def clip_by_adaptive_norm(
    grads: _H, params: Any, clipping: _Scalar = 0.01, **options: Unpack[_AdaptiveCopies]
) -> tuple[_H, _Float64]: ...
@overload
def clip_by_adaptive_norm(
    grads: Mapping[_K, _H],
    params: Any,
    clipping: _Scalar = 0.01,
    **options: Unpack[_AdaptiveCopies],
) -> tuple[dict[_K, _H], dict[_K, _Float64]]: ...
@overload
def clip_by_adaptive_norm(
    grads: list[_H] | Iterator[_H],
    params: Any,
    clipping: _Scalar = 0.01,
    **options: Unpack[_AdaptiveCopies],
) -> tuple[list[_H], list[_Float64]]: ...
@overload
def clip_by_adaptive_norm(
    grads: Iterator[_A],
    params: Any,
    clipping: _Scalar = 0.01,
    **options: Unpack[_AdaptiveCopies],
) -> tuple[list[_A], list[_A]]: ...
@overload
def clip_by_adaptive_norm(
    grads: _A, params: Any, clipping: _Scalar = 0.01, **options: Unpack[_AdaptiveCopies]
) -> tuple[_A, _A]: ...
@overload
def clip_by_adaptive_norm(
    grads: _C, params: Any, clipping: _Scalar = 0.01, **options: Unpack[_AdaptiveCopies]
) -> tuple[_C, _C]: ...

# --- where gradients come from, and what each is called ---------------------------------------

@overload
def grads_of(
    parameters: Iterable[_HasGrad[_A]] | Mapping[Any, _HasGrad[_A]], *, attr: Literal["grad"] = ...
) -> list[_A]: ...
@overload
def grads_of(parameters: Any, *, attr: str = "grad") -> list[Any]: ...
@overload
def named_grads_of(
    named_parameters: Mapping[str, _HasGrad[_A]], *, attr: Literal["grad"] = ...
) -> dict[str, _A]: ...
@overload
def named_grads_of(
    named_parameters: Iterable[tuple[str, _HasGrad[_A]]], *, attr: Literal["grad"] = ...
) -> dict[str, _A]: ...
@overload
def named_grads_of(named_parameters: Any, *, attr: str = "grad") -> dict[str, Any]: ...
def names_of(grads: _Array | _Containers) -> list[str]: ...
@overload
def per_tensor_norms(
    grads: _Tree[_Host] | _Flat[_Host | None],
    norm_type: _Order = 2.0,
    *,
    flat: Literal[True],
    **options: Unpack[_EachNorm],
) -> _Float64: ...
@overload
def per_tensor_norms(
    grads: _Tree[_A] | _Flat[_A | None],
    norm_type: _Order = 2.0,
    *,
    flat: Literal[True],
    **options: Unpack[_EachNorm],
) -> _A: ...
@overload
def per_tensor_norms(
    grads: _Host,
    norm_type: _Order = 2.0,
    *,
    flat: Literal[False] = False,
    **options: Unpack[_EachNorm],
) -> _Float64: ...
@overload
def per_tensor_norms(
    grads: Mapping[_K, _Host],
    norm_type: _Order = 2.0,
    *,
    flat: Literal[False] = False,
    **options: Unpack[_EachNorm],
) -> dict[_K, _Float64]: ...
@overload
def per_tensor_norms(
    grads: list[_H] | Iterator[_H],
    norm_type: _Order = 2.0,
    *,
    flat: Literal[False] = False,
    **options: Unpack[_EachNorm],
) -> list[_Float64]: ...
@overload
def per_tensor_norms(
    grads: Iterator[_A],
    norm_type: _Order = 2.0,
    *,
    flat: Literal[False] = False,
    **options: Unpack[_EachNorm],
) -> list[_A]: ...
@overload
def per_tensor_norms(
    grads: _A,
    norm_type: _Order = 2.0,
    *,
    flat: Literal[False] = False,
    **options: Unpack[_EachNorm],
) -> _A: ...
@overload
def per_tensor_norms(
    grads: _C,
    norm_type: _Order = 2.0,
    *,
    flat: Literal[False] = False,
    **options: Unpack[_EachNorm],
) -> _C: ...
def warmup(arrays: _Array | _Containers, *operations: Callable[..., Any]) -> int: ...

# --- accumulation ----------------------------------------------------------------------------

def accumulate_grad(
    buffer: _X,
    grad: _Array,
    *,
    do_update: _Flag = True,
    scale: _Real | None = None,
    casting: Literal["safe", "same_kind"] = "safe",
) -> _X: ...
def accumulate_grad_v2(
    buffer: _X,
    grad: _Array,
    *,
    overwrite: _Flag = False,
    casting: Literal["safe", "same_kind"] = "safe",
) -> tuple[bool, _X]: ...

class _Accumulate(TypedDict, total=False):
    scale: _Scalar
    overwrite: _Flag
    do_update: _Flag
    norm_out: _Array | None

@overload
def accumulate_grads(
    buffers: Iterator[_A], grads: _Array | _Containers, **options: Unpack[_Accumulate]
) -> list[_A]: ...
@overload
def accumulate_grads(
    buffers: _A, grads: _Array | _Containers, **options: Unpack[_Accumulate]
) -> _A: ...
@overload
def accumulate_grads(
    buffers: _C, grads: _Array | _Containers, **options: Unpack[_Accumulate]
) -> _C: ...
@overload
def zero_grad(grads: Iterator[_A]) -> list[_A]: ...
@overload
def zero_grad(grads: _A) -> _A: ...
@overload
def zero_grad(grads: _C) -> _C: ...

# --- a limit that follows the norms ----------------------------------------------------------

class SpikeGuard:
    def __init__(
        self, *, decay: _Real = 0.97, threshold: _Real = 2.5, warmup: SupportsIndex = 25
    ) -> None: ...
    @overload
    def update(self, norm: _Host | float | np.floating[Any]) -> _Float64: ...
    @overload
    def update(self, norm: _A) -> _A: ...
    def state_dict(self) -> dict[str, float]: ...
    def load_state_dict(self, state_dict: Mapping[str, float]) -> None: ...

class _Guard(TypedDict, total=False):
    decay: _Real
    threshold: _Real
    warmup: SupportsIndex
    out: _Outs | None

@overload
def spike_guard_init(like: _Host | None = None) -> _Float64: ...
@overload
def spike_guard_init(like: _A) -> _A: ...
@overload
def spike_guard_update(
    state: _Host, norm: _Scalar, **options: Unpack[_Guard]
) -> tuple[_Float64, _Float64]: ...
@overload
def spike_guard_update(state: _A, norm: _Scalar, **options: Unpack[_Guard]) -> tuple[_A, _A]: ...

# --- layer norm and RMS norm -----------------------------------------------------------------

class _Rows(TypedDict, total=False):
    axis: SupportsIndex
    out: _Outs | None

class _RowsForward(_Rows, total=False):
    eps: _Real
    scale_offset: _Real

class _RowsGrad(_Rows, total=False):
    ds: _Array | None
    scale_offset: _Real

@overload
def layer_norm(
    x: _H, scale: _Array | None = None, bias: _Array | None = None, **options: Unpack[_RowsForward]
) -> tuple[_H, NDArray[Any], NDArray[Any]]: ...
@overload
def layer_norm(
    x: _A, scale: _Array | None = None, bias: _Array | None = None, **options: Unpack[_RowsForward]
) -> tuple[_A, _A, _A]: ...
@overload
def add_layer_norm(
    x: _H,
    residual: _Array,
    scale: _Array | None = None,
    bias: _Array | None = None,
    **options: Unpack[_RowsForward],
) -> tuple[_H, _H, NDArray[Any], NDArray[Any]]: ...
@overload
def add_layer_norm(
    x: _A,
    residual: _Array,
    scale: _Array | None = None,
    bias: _Array | None = None,
    **options: Unpack[_RowsForward],
) -> tuple[_A, _A, _A, _A]: ...
def layer_norm_grad(
    dy: _Array, x: _X, scale: _S, mean: _Array, inv_std: _Array, **options: Unpack[_RowsGrad]
) -> tuple[_X, _S, _S]: ...
def layer_norm_inverse(
    y: _X,
    scale: _Array | None,
    bias: _Array | None,
    mean: _Array,
    inv_std: _Array,
    *,
    axis: SupportsIndex = -1,
    out: _Array | None = None,
) -> _X: ...
def invertible_layer_norm_grad(
    dy: _Array, y: _X, scale: _S, bias: _B, inv_std: _Array, **options: Unpack[_Rows]
) -> tuple[_X, _S, _B]: ...
@overload
def rms_norm(
    x: _H, scale: _Array | None = None, **options: Unpack[_RowsForward]
) -> tuple[_H, NDArray[Any]]: ...
@overload
def rms_norm(
    x: _A, scale: _Array | None = None, **options: Unpack[_RowsForward]
) -> tuple[_A, _A]: ...
@overload
def add_rms_norm(
    x: _H, residual: _Array, scale: _Array | None = None, **options: Unpack[_RowsForward]
) -> tuple[_H, _H, NDArray[Any]]: ...
@overload
def add_rms_norm(
    x: _A, residual: _Array, scale: _Array | None = None, **options: Unpack[_RowsForward]
) -> tuple[_A, _A, _A]: ...
def rms_norm_grad(
    dy: _Array, x: _X, scale: _S, inv_std: _Array, **options: Unpack[_RowsGrad]
) -> tuple[_X, _S]: ...

# --- group norm ------------------------------------------------------------------------------

class _Channels(TypedDict, total=False):
    channel_axis: SupportsIndex
    out: _Outs | None

class _Apply(_Channels, total=False):
    eps: _Real

@overload
def group_norm(
    x: _H,
    num_groups: SupportsIndex,
    scale: _Array | None = None,
    bias: _Array | None = None,
    **options: Unpack[_Apply],
) -> tuple[_H, NDArray[Any], NDArray[Any]]: ...
@overload
def group_norm(
    x: _A,
    num_groups: SupportsIndex,
    scale: _Array | None = None,
    bias: _Array | None = None,
    **options: Unpack[_Apply],
) -> tuple[_A, _A, _A]: ...
def group_norm_grad(
    dy: _Array, x: _X, scale: _S, mean: _Array, inv_std: _Array, **options: Unpack[_Channels]
) -> tuple[_X, _S, _S]: ...

# --- batch norm ------------------------------------------------------------------------------

class _Batch(_Channels, total=False):
    engine: _Engine | None
    group: Group | None

class _BatchForward(_Batch, total=False):
    eps: _Real
    running_mean: _Array | None
    running_var: _Array | None
    momentum: _Real

@overload
def batch_norm(
    x: _H, scale: _Array | None = None, bias: _Array | None = None, **options: Unpack[_BatchForward]
) -> tuple[_H, NDArray[Any], NDArray[Any]]: ...
@overload
def batch_norm(
    x: _A, scale: _Array | None = None, bias: _Array | None = None, **options: Unpack[_BatchForward]
) -> tuple[_A, _A, _A]: ...
def batch_norm_grad(
    dy: _Array, x: _X, scale: _S, mean: _Array, inv_std: _Array, **options: Unpack[_Batch]
) -> tuple[_X, _S, _S]: ...
def batch_norm_inference(
    x: _X,
    scale: _Array | None,
    bias: _Array | None,
    mean: _Array,
    var: _Array,
    *,
    channel_axis: SupportsIndex = 1,
    eps: _Real = 1e-5,
    out: _Array | None = None,
    engine: _Engine | None = None,
) -> _X: ...
def batch_norm_inference_grad(
    dy: _Array, x: _X, scale: _S, mean: _Array, var: _Array, **options: Unpack[_Apply]
) -> tuple[_X, _S, _S]: ...
def update_running_statistics(
    running_mean: _X,
    running_var: _A,
    mean: _Array,
    var: _Array,
    count: _Scalar,
    *,
    momentum: _Real = 0.1,
    out: _Outs | None = None,
) -> tuple[_X, _A]: ...
@overload
def batch_norm_stats(
    x: _Host, **options: Unpack[_Channels]
) -> tuple[_Float64, _Float64, _Float64]: ...
@overload
def batch_norm_stats(x: _A, **options: Unpack[_Channels]) -> tuple[_A, _A, _A]: ...
@overload
def combine_stats(
    means: _Host, variances: _Array, counts: _Array, *, out: _Outs | None = None
) -> tuple[_Float64, _Float64, _Float64]: ...
@overload
def combine_stats(
    means: _A, variances: _Array, counts: _Array, *, out: _Outs | None = None
) -> tuple[_A, _A, _A]: ...
@overload
def batch_norm_apply(
    x: _H,
    scale: _Array | None,
    bias: _Array | None,
    mean: _Array,
    var: _Array,
    **options: Unpack[_Apply],
) -> tuple[_H, NDArray[Any], NDArray[Any]]: ...
@overload
def batch_norm_apply(
    x: _A,
    scale: _Array | None,
    bias: _Array | None,
    mean: _Array,
    var: _Array,
    **options: Unpack[_Apply],
) -> tuple[_A, _A, _A]: ...
@overload
def batch_norm_grad_sums(
    dy: _Array, x: _Host, mean: _Array, inv_std: _Array, **options: Unpack[_Channels]
) -> tuple[_Float64, _Float64]: ...
@overload
def batch_norm_grad_sums(
    dy: _Array, x: _A, mean: _Array, inv_std: _Array, **options: Unpack[_Channels]
) -> tuple[_A, _A]: ...
def batch_norm_grad_apply(
    dy: _Array,
    x: _X,
    scale: _Array | None,
    mean: _Array,
    inv_std: _Array,
    sum_dy_xhat: _Array,
    sum_dy: _Array,
    count: _Scalar,
    *,
    channel_axis: SupportsIndex = 1,
    out: _Array | None = None,
) -> _X: ...
