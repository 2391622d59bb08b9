"""Types of functions whose results depend on their first argument alone.

To type checkers each decorator makes a function an overloaded one, whose other parameters are those
of its own signature; when the code runs, it returns the function. NumPy's arrays come first: their
type has a dtype, which the result need not have.
"""

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, overload

import numpy as np
from numpy.typing import NDArray

from gradkit._typing import Container, Float64, GradTree, H, HostTree, Real, T, X

P = ParamSpec("P")
Value_co = TypeVar("Value_co", covariant=True)


class NormOfGrads(Protocol[P]):
    """Gradients to a number."""

    @overload
    def __call__(self, grads: HostTree, *args: P.args, **kwargs: P.kwargs) -> Float64: ...
    @overload
    def __call__(self, grads: GradTree[X], *args: P.args, **kwargs: P.kwargs) -> X: ...


class ClippedAndNorm(Protocol[P]):
    """Gradients to others in the same container, and a number."""

    @overload
    def __call__(self, grads: H, *args: P.args, **kwargs: P.kwargs) -> tuple[H, Float64]: ...
    @overload
    def __call__(
        self, grads: Container[T, X], *args: P.args, **kwargs: P.kwargs
    ) -> tuple[T, X]: ...
    @overload
    def __call__(self, grads: T, *args: P.args, **kwargs: P.kwargs) -> tuple[T, Any]: ...


class ArrayOfNorm(Protocol[P, Value_co]):
    """A norm to an array, which is NumPy's for a Python number."""

    @overload
    def __call__(self, norm: Real, *args: P.args, **kwargs: P.kwargs) -> Value_co: ...
    @overload
    def __call__(self, norm: X, *args: P.args, **kwargs: P.kwargs) -> X: ...


def norm_of_grads(function: Callable[Concatenate[Any, P], Any]) -> NormOfGrads[P]:
    """Type a function that returns an array of the gradients' type; of NumPy's, a float64 one."""
    return cast(NormOfGrads[P], function)


def clipped_and_norm(function: Callable[Concatenate[Any, P], Any]) -> ClippedAndNorm[P]:
    """Type a function that returns new gradients and a norm."""
    return cast(ClippedAndNorm[P], function)


def float64_of_norm(function: Callable[Concatenate[Any, P], Any]) -> ArrayOfNorm[P, Float64]:
    """Type a function that returns an array of the norm's type; of NumPy's, a float64 one."""
    return cast(ArrayOfNorm[P, Float64], function)


def bool_of_norm(function: Callable[Concatenate[Any, P], Any]) -> ArrayOfNorm[P, NDArray[np.bool_]]:
    """Type a function that returns an array of the norm's type; of NumPy's, one of bools."""
    return cast(ArrayOfNorm[P, NDArray[np.bool_]], function)
