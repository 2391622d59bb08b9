"""The types in gradkit's public signatures.

Type checkers read the first half of this module. At run time its second half is in their place:
names, with which ``help`` and ``inspect.signature`` print a signature in a few lines. A name does
not say that an argument may be ``None`` if that is its default.

A result with an argument's type is an array of the argument's library. The types of most libraries
contain no dtype, and are exact. NumPy's contain a dtype and a shape, and a result may have others
than the argument whose type it has: norms are float64, and statistics of float16 data are float32.
Docstrings name them.

- ``X``, ``Y``: an array; as a result the same one, or a new one like it.
- ``N``: an array of norms; as a result a new one like it, or for a Python number NumPy's.
- ``S``, ``B``: a scale and a bias, or ``None``; a gradient has the type of what it belongs to.
- ``T``: one array or any container of gradients; as a result a container of the same type. For a
  generator, functions return a list, which the type does not say. ``A``: the same of any arrays.
- ``GradTree[X]``: gradients ``X``, as one array or up to three containers deep.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, ValuesView
    from typing import Literal, Protocol, SupportsIndex, TypeAlias

    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import TypeVar

    from gradkit._backend import Engine as Engine

    class AnyArray(Protocol):
        """An array of NumPy, CuPy, PyTorch, JAX, TensorFlow or any library with DLPack."""

        def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
            """The array's memory in a capsule."""

    Host: TypeAlias = np.ndarray[Any, Any]
    Float64: TypeAlias = NDArray[np.float64]
    Norm: TypeAlias = Any  # an array of the gradients' library, where no type says which that is

    X = TypeVar("X", bound=AnyArray)
    Y = TypeVar("Y", bound=AnyArray)
    X_co = TypeVar("X_co", covariant=True)
    N = TypeVar("N", bound=AnyArray, default=Float64)
    S = TypeVar("S", bound=AnyArray | None)
    B = TypeVar("B", bound=AnyArray | None)

    # An array is no container, though it is iterable.
    _Item = TypeVar("_Item")
    _Of: TypeAlias = Mapping[Any, _Item] | Sequence[_Item] | Iterator[_Item] | ValuesView[_Item]
    Tree: TypeAlias = AnyArray | _Of[Any]
    Arrays: TypeAlias = Tree
    T = TypeVar("T", bound=Tree)
    A = TypeVar("A", bound=Arrays)
    # Spelt out, because mypy solves no recursive type that has None in it.
    _Tree1: TypeAlias = Mapping[Any, X | None] | Sequence[X | None]
    _Tree2: TypeAlias = Mapping[Any, X | _Tree1[X] | None] | Sequence[X | _Tree1[X] | None]
    GradTree: TypeAlias = X | _Of[X | None] | _Of[X | _Tree2[X] | None]

    class HasGrad(Protocol[X_co]):
        """A parameter with its gradient."""

        @property
        def grad(self) -> X_co | None:
            """The gradient."""

    # Numbers. A limit, a scale or a flag may also be an array on the gradients' device.
    Plain: TypeAlias = float | np.floating[Any] | np.integer[Any]
    Number: TypeAlias = Plain | Host
    Scalar: TypeAlias = Number | AnyArray
    Flag: TypeAlias = bool | np.bool_ | Host | AnyArray
    FoundInf: TypeAlias = Host | AnyArray | None
    Index: TypeAlias = SupportsIndex
    Order: TypeAlias = Number | Literal["inf"]
    EpsMode: TypeAlias = Literal["max", "add"]
    NonFinite: TypeAlias = Literal["propagate", "raise", "zero"]
    OnSpike: TypeAlias = Literal["clip", "skip"]
    Casting: TypeAlias = Literal["safe", "same_kind"]
    Rounding: TypeAlias = Literal["nearest", "stochastic"]
    Seed: TypeAlias = int | np.integer[Any] | Host | AnyArray
    Step: TypeAlias = int | np.integer[Any] | Host | AnyArray
    Offsets: TypeAlias = int | Mapping[Any, Any] | list[Any]
    Replicas: TypeAlias = int | Mapping[Any, Any] | Sequence[Any]

    # Axes that a norm sums over: one, several, or all; for all gradients alike, in a container like
    # theirs, or by a function of a gradient's name and array.
    Along: TypeAlias = int | Collection[int] | None
    Axis: TypeAlias = Along | Mapping[Any, Any] | list[Any] | Callable[[str, Any], Along]

    # The key of each gradient's block: in a container, or by a function of name and array.
    Blocks: TypeAlias = Mapping[Any, Any] | list[Any] | Callable[[str, Any], Any] | None

    # A bool for each gradient: in a container, or by a function of name and array.
    Chosen: TypeAlias = Mapping[Any, Any] | list[Any] | Callable[[str, Any], bool] | None

    # A limit for all gradients, or one for each: in a container, by a function, in a vector.
    Limits: TypeAlias = Scalar | Mapping[Any, Any] | list[Any] | Callable[[str, Any], Scalar]

    Wanted: TypeAlias = tuple[str, ...] | None  # results, by name

    # Where results are written, of which each may be None.
    Out: TypeAlias = AnyArray | None
    Outs: TypeAlias = tuple[AnyArray | None, ...] | None
    TreeOut: TypeAlias = tuple[Any, AnyArray | None] | None

else:

    class Name:
        """An annotation that prints as a name."""

        def __init__(self, name):
            self.name = name

        def __repr__(self):
            return self.name

        def __getitem__(self, of):
            return self

        def __or__(self, other):
            return Name(f"{self} | {other}")

        def __ror__(self, other):
            return Name(f"{other} | {self}")

    AnyArray = X = Y = N = Norm = FoundInf = Out = Name("Array")
    S = B = Name("Array | None")
    T = Tree = GradTree = Name("Grads")
    A = Arrays = Name("Arrays")
    HasGrad = Name("HasGrad")
    Plain = Number = Order = Name("float")
    Index = Name("int")
    EpsMode = NonFinite = OnSpike = Casting = Rounding = Engine = Name("str")
    Scalar = Name("Scalar")
    Flag = Name("bool | Array")
    Seed = Step = Name("int | Array")
    Offsets = Name("Offsets")
    Replicas = Name("Ints")
    Along = Axis = Name("Axis")
    Blocks = Name("Blocks")
    Chosen = Name("Mask")
    Limits = Name("Limits")
    Wanted = Name("tuple[str, ...] | None")
    Outs = TreeOut = Name("Outs")
