"""What every array library is asked for.

A *native* array is what a backend computes on: ``numpy.ndarray`` or ``cupy.ndarray``. An
adapter says how one of the caller's arrays is seen as a native array without a copy, and how
a native result goes back as the caller's own type.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

Native: TypeAlias = Any  # numpy.ndarray, or cupy.ndarray, which cannot be imported here

NOTHING: AbstractContextManager[None] = nullcontext()


class Framework:
    """One array library. Subclasses override what differs.

    Errors say what an array is, without its name: the caller knows that and puts it in front.
    """

    name = ""
    module = ""  # the top-level module that must have been imported for an array to exist
    immutable = False  # whether users may count on arrays never changing

    def owns(self, kind: type) -> bool:
        """Whether arrays of this type are this framework's."""
        raise NotImplementedError

    def view(self, array: Any, *, write: bool, detach: bool = False) -> Native:
        """The array's own memory as a native array.

        ``detach`` where only the values of an array that takes part in differentiation are
        wanted; otherwise such an array is refused, since a gradient was meant.
        """
        raise NotImplementedError

    def views(self, arrays: Sequence[Any], *, write: bool) -> Sequence[Native]:
        """What ``view`` gives for each of many arrays; an error need not say for which."""
        return [self.view(array, write=write) for array in arrays]

    def empty(
        self,
        backend: ModuleType,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        like: Any,  # noqa: ARG002
    ) -> tuple[Native, Any]:
        """Memory for a new result on the device of ``like``.

        With the caller's array that shows it, or ``None`` if ``wrap`` makes that afterwards.
        """
        return backend.empty(shape, dtype), None

    def wrap(self, native: Native, like: Any) -> Any:
        """A native result as an array of the caller's type, on the device of ``like``."""
        raise NotImplementedError

    def wrote(self, arrays: Sequence[Any]) -> None:
        """Told after the memory of some of the caller's arrays was written."""

    def running(self, like: Any) -> AbstractContextManager[Any]:  # noqa: ARG002
        """Where work on arrays like this one has to be queued: their device and stream."""
        return NOTHING

    def apart(self, arrays: Sequence[Any]) -> bool:  # noqa: ARG002
        """Whether arrays are known, at a glance, to be writable and to share no memory."""
        return False

    def widest(self) -> str:
        """The widest floating dtype that arrays of this framework can have."""
        return "float64"
