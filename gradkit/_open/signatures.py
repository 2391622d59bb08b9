"""What shapes, dtypes and strides alone decide about a call, decided once.

That its arguments fit together, how many rows it has and what its outputs are is the same for
every call on arrays like these: only addresses and values differ.
"""

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from gradkit._backend import Shape

Plan = TypeVar("Plan")

_MOST = 4096  # signatures that a decision remembers before it starts anew
_UNKNOWN = object()


class Described(NamedTuple):
    """All that a decision may know of an argument."""

    label: str
    shape: Shape
    dtype: np.dtype[Any]
    strides: Shape | None

    @property
    def ndim(self) -> int:
        """How many axes there are."""
        return len(self.shape)


class Signatures(Generic[Plan]):
    """``decide(given, *options)``, remembered for each signature of ``given``.

    ``given`` is a named tuple of arrays; a field with a default may be ``None``. ``decide`` sees
    descriptions in the arrays' place, so that nothing else can enter a decision and no array is
    kept. Safe to call from several threads: at worst, two of them decide the same.
    """

    def __init__(self, decide: Callable[..., Plan], *, strides: bool = False):
        self._decide = decide
        self._strides = strides
        self._known: dict[Any, Any] = {}

    def __call__(self, given: Any, *options: Any) -> Plan:
        """The plan for a call."""
        arrays: list[Any]
        if self._strides:
            arrays = [a if a is None else (a.shape, a.dtype, a.strides) for a in given]
        else:
            arrays = [a if a is None else (a.shape, a.dtype) for a in given]
        key = (*arrays, *options, *map(type, options))  # 1 and 1.0 are different options
        try:
            known = self._known.get(key, _UNKNOWN)
        except TypeError:  # an option that has no hash is about to be refused
            known = _UNKNOWN
        if known is not _UNKNOWN:
            decided: Plan = known
            return decided
        plan: Plan = self._decide(self._described(given), *options)
        if len(self._known) >= _MOST:
            self._known.clear()
        self._known[key] = plan
        return plan

    def _described(self, given: Any) -> Any:
        return type(given)(
            *(
                self._description(label, array, optional=label in given._field_defaults)
                for label, array in zip(given._fields, given, strict=True)
            )
        )

    def _description(self, label: str, array: Any, *, optional: bool) -> Described | None:
        if array is None:
            if optional:
                return None
            raise TypeError(f"{label} is a NoneType; expected an array")
        strides = array.strides if self._strides else None
        return Described(label, array.shape, array.dtype, strides)
