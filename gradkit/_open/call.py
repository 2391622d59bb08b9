"""The named arrays of one call."""

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from gradkit._arrays import backend_of, framework_for
from gradkit._backend import Array, Spec
from gradkit._open.given import (
    RETURNED,
    Given,
    known_framework,
    refuse_write,
    view_of,
)
from gradkit._open.outputs import Outputs, Reuse

Arrays = TypeVar("Arrays", bound=tuple[Any, ...])  # a named tuple

_NONE = type(None)


class Call(Given, Generic[Arrays]):
    """Arrays by name, all of one library; ``None`` stands for an absent one.

    ``arrays`` is the named tuple ``given`` with views in place of the caller's arrays. The first
    argument decides the library, the backend and what new results look like. ``write``: it will
    be written in place, and ``instead`` says what to do if that cannot be. ``detach``: accept
    arrays that take part in differentiation, because no gradient is meant.
    """

    __slots__ = ("arrays",)

    def __init__(
        self, given: Arrays, *, write: bool = False, instead: str = RETURNED, detach: bool = True
    ):
        super().__init__()
        self.like = given[0]
        kinds = set(map(type, given))
        kinds.discard(_NONE)
        if len(kinds) == 1 and self._take(given, *kinds):
            return
        if not write and self._view_all(given, kinds, detach=detach):
            return
        labels: tuple[str, ...] = given._fields  # type: ignore[attr-defined]
        self.framework = known_framework(self.like, labels[0])
        if write:
            refuse_write(self.framework, labels[0], instead)
        view = view_of(self.framework, self.like, labels[0], write=write, detach=detach)
        self.arrays = type(given)(view, *given[1:])
        others = (
            array if array is None else self.argument(array, label, detach=detach)
            for label, array in zip(labels[1:], given[1:], strict=True)
        )
        self.arrays = type(given)(view, *others)
        self.backend = backend_of(view)

    def _take(self, given: Arrays, kind: type) -> bool:
        """Arrays as they are, which is the common case: all of one type that a backend takes."""
        framework = framework_for(kind)
        if framework is None or self.like is None or not framework.computes_on(kind):
            return False
        if not framework.on_one_device([array for array in given if array is not None]):
            return False  # which of them is found out with the names at hand
        self.framework, self.backend = framework, framework.backend_of(given[0])
        self.arrays = given
        return True

    def _view_all(self, given: Arrays, kinds: set[type], *, detach: bool) -> bool:
        """Views of arrays that are all of one library; of what is refused, the name is missing."""
        framework = framework_for(type(self.like))
        if framework is None or any(framework_for(kind) is not framework for kind in kinds):
            return False
        try:
            views: list[Any] = [
                a if a is None else framework.view(a, write=False, detach=detach) for a in given
            ]
        except (TypeError, ValueError):
            return False
        kinds = set(map(type, views)) - {_NONE}
        if len(kinds) > 1 or not self._take(type(given)(*views), *kinds):
            return False
        self.framework = framework
        return True

    def first(self) -> tuple[str, Array | None]:
        return self.arrays._fields[0], self.arrays[0]  # type: ignore[attr-defined]

    def outputs(self, out: Any, specs: Sequence[Spec | None], *, reuse: Reuse = None) -> Outputs:
        """The call's outputs, which may be the inputs that ``reuse`` has for them."""
        return Outputs(self, out, specs, self._inputs, reuse)

    def _inputs(self) -> list[tuple[str, Array]]:
        labels: tuple[str, ...] = self.arrays._fields  # type: ignore[attr-defined]
        named = zip(labels, self.arrays, strict=True)
        return [*((label, view) for label, view in named if view is not None), *self.numbers]
