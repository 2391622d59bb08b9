"""The types in gradkit's public signatures.

A result with an argument's type is an array of the argument's library. The types of most libraries
contain no dtype, and are exact. NumPy's contain a dtype and a shape, and a result may have others
than the argument whose type it has: statistics of float16 data are float32. Docstrings name them.

- ``X``, ``Y``: an array; as a result the same one, or a new one like it.
- ``S``, ``B``: a scale and a bias, or ``None``; a gradient has the type of what it belongs to.
- ``T``: one array or any container of gradients; as a result a container of the same type. For a
  generator, functions return a list, which the type does not say.
- ``Container[T, X]``: a dict or list ``T`` of arrays ``X``.
- ``GradTree[X]``: gradients ``X``, as one array or up to three containers deep.
- ``HostTree``, ``H``: NumPy's gradients, in containers of any depth.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, ValuesView
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray


class AnyArray(Protocol):
    """An array of NumPy, CuPy, PyTorch, JAX, TensorFlow or any library that supports DLPack."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        """The array's memory in a capsule."""


Host: TypeAlias = np.ndarray[Any, Any]
Float64: TypeAlias = NDArray[np.float64]

X = TypeVar("X", bound=AnyArray)
Y = TypeVar("Y", bound=AnyArray)
X_co = TypeVar("X_co", covariant=True)
T_co = TypeVar("T_co", covariant=True)
S = TypeVar("S", bound=AnyArray | None)
B = TypeVar("B", bound=AnyArray | None)

# An array is no container, though it is iterable.
_Item = TypeVar("_Item")
_Of: TypeAlias = Mapping[Any, _Item] | Sequence[_Item] | Iterator[_Item] | ValuesView[_Item]
Tree: TypeAlias = AnyArray | _Of[Any]
T = TypeVar("T", bound=Tree)
# Spelt out, because mypy solves no recursive type that has None in it.
_Tree1: TypeAlias = Mapping[Any, X | None] | Sequence[X | None]
_Tree2: TypeAlias = Mapping[Any, X | _Tree1[X] | None] | Sequence[X | _Tree1[X] | None]
GradTree: TypeAlias = X | _Of[X | None] | _Of[X | _Tree2[X] | None]
HostTree: TypeAlias = Host | _Of["HostTree | None"]
H = TypeVar("H", bound=HostTree)


class Container(Protocol[T_co, X_co]):
    """A dict or list: its type, and that of its gradients."""

    def copy(self) -> T_co:
        """The same, new."""

    def __getitem__(self, key: Any, /) -> X_co:
        """A gradient."""


class HasGrad(Protocol[X_co]):
    """A parameter with its gradient."""

    @property
    def grad(self) -> X_co | None:
        """The gradient."""


# Numbers. A limit, a scale or a flag may also be an array on the gradients' device.
Real: TypeAlias = float | np.floating[Any] | np.integer[Any] | Host
Scalar: TypeAlias = Real | AnyArray
Flag: TypeAlias = bool | np.bool_ | Host | AnyArray
FoundInf: TypeAlias = Host | AnyArray | None
Order: TypeAlias = Real | Literal["inf"]
Casting: TypeAlias = Literal["safe", "same_kind"]
Rounding: TypeAlias = Literal["nearest", "stochastic"]
Seed: TypeAlias = int | np.integer[Any] | Host | AnyArray
Offsets: TypeAlias = int | Mapping[Any, Any] | list[Any]
Replicas: TypeAlias = int | Mapping[Any, Any] | Sequence[Any]

# What a norm sums over: an axis, several, or all; for all gradients alike, in a container like
# theirs, or by a function of a gradient's name and array.
Along: TypeAlias = int | Iterable[int] | None
Axis: TypeAlias = Along | Mapping[Any, Any] | list[Any] | Callable[[str, Any], Along]

# Of each gradient whether it is meant: a container like theirs, or a function of name and array.
Chosen: TypeAlias = Mapping[Any, Any] | list[Any] | Callable[[str, Any], bool] | None

# A limit for all gradients, or one for each: in a container, by a function, in a vector.
Limits: TypeAlias = Scalar | Mapping[Any, Any] | list[Any] | Callable[[str, Any], Scalar]

# Where results are written, of which each may be None.
Outs: TypeAlias = tuple[AnyArray | None, ...] | None
TreeOut: TypeAlias = tuple[Any, AnyArray | None] | None
