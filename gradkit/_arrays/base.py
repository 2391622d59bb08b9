"""The interface to an array library.

Backends compute on *views*: a view is the memory of one of the caller's arrays as a
``numpy.ndarray`` or ``cupy.ndarray``, without a copy. An adapter makes views, and turns results
back into arrays of the caller's type.
"""

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from gradkit._backend import Array, Shape, Spec
from gradkit._calls.backend import Backend
from gradkit._calls.record import Plan
from gradkit.errors import BackendUnavailableError

NOTHING: AbstractContextManager[None] = nullcontext()
HOW_TO_INSTALL_CUPY = "in a checkout of gradkit: pip install '.[cuda12]', or '.[cuda13]'"


class Framework:
    """One array library. Subclasses override what differs.

    Error messages omit the array's name: the caller knows it and puts it in front.
    """

    name = ""
    module = ""  # the top-level module, which is imported before any array exists
    immutable = False  # whether its arrays are immutable
    returns_views = False  # whether results are the arrays that a backend made, unchanged

    def owns(self, kind: type) -> bool:
        """True if arrays of this type belong to this library."""
        raise NotImplementedError

    def view(self, array: Any, *, write: bool, detach: bool = False) -> Array:
        """The array's own memory as an array that a backend computes on.

        ``write``: the caller's memory will be written, so that the view says if it is read-only.
        ``detach``: accept an array that requires grad, and use only its values. Otherwise such
        an array is an error, because a gradient is expected.
        """
        raise NotImplementedError

    def in_its_words(self, text: str) -> str:
        """An error's text, whose casts are NumPy's, with this library's."""
        return text

    def computes_on(self, kind: type) -> bool:
        """True if arrays of this type are views already."""
        return False

    def on_one_device(self, views: Iterable[Array]) -> bool:
        """True if all of these views, which are arrays of this library, are on one device."""
        return True

    def views(self, arrays: Sequence[Any], *, write: bool) -> Sequence[Array]:
        """The ``view`` of each of many arrays; an error need not say of which."""
        return [self.view(array, write=write) for array in arrays]

    def alike(self, arrays: list[Any]) -> list[Any] | None:
        """New arrays of the shapes and dtypes of a table's; ``None``: use ``empty``."""
        return None

    def known_backend(self, device: int) -> Backend | None:
        """Backend of the CUDA device of that number, if that is known without a view."""
        return None

    def backend_of(self, view: Array) -> Backend:
        """The backend that computes on a view, if views are arrays of this library."""
        kind = type(view)
        raise BackendUnavailableError(
            f"no backend computes on {kind.__module__}.{kind.__qualname__}; pass NumPy arrays, or "
            f"CuPy's; {HOW_TO_INSTALL_CUPY}"
        )

    def new(self, shape: Shape, dtype: np.dtype[Any], like: Any) -> Any:
        """A new array on the device of ``like``; ``None``: use the backend's."""
        return None

    def outputs(self, specs: Sequence[Spec | None], table: Any) -> tuple[list[Any], list[Any]]:
        """New results of a call on a table's arrays: as the backend takes them, and the caller."""
        raise NotImplementedError

    def results(self, plan: Plan, arrays: Sequence[Any]) -> Sequence[Any]:
        """New arrays for all that a plan misses, contents undefined.

        ``arrays`` are those of the call, which may be absent.
        """
        raise NotImplementedError

    def compute(self, call: Any, arrays: Sequence[Any], results: Sequence[Any]) -> None:
        """Have the plan's backend write results; the call has these arrays and these results."""
        raise NotImplementedError

    def empty(self, spec: Spec, like: Any) -> tuple[Array, Any] | None:
        """Memory for a new result on the device of ``like``; ``None``: use the backend's.

        Returns a view, and the caller's array of that memory (``None`` if ``wrap`` makes it).
        """
        return None

    def wrap(self, result: Array, like: Any) -> Any:
        """A result as an array of the caller's type, on the device of ``like``."""
        raise NotImplementedError

    def wrote(self, arrays: Sequence[Any]) -> None:
        """Called after some of the caller's arrays have been written."""

    def on_stream(self, like: Any) -> AbstractContextManager[Any]:
        """A context that queues work on the device and stream of an array like this."""
        return NOTHING

    def parts(self, vector: Any, shapes: Iterable[Shape]) -> Iterable[Any]:
        """Views of a vector's elements, one behind the other, in these shapes."""
        start = 0
        for shape in shapes:
            stop = start + math.prod(shape)
            yield vector[start:stop].reshape(shape) if shape else vector[start, ...]
            start = stop

    def widest(self, like: Any) -> str:
        """The widest floating dtype that arrays of this library can have, where ``like`` is."""
        return "float64"
