"""Norms over gradients that are spread over processes.

Every norm function takes ``reduce``: one callable that combines a value over all ranks.
With MPI it is a line::

    def reduce(value, op):
        return comm.allreduce(value, MPI.SUM if op == "sum" else MPI.MAX)
"""

from typing import Any, Literal, Protocol

__all__ = ["Reduce"]


class Reduce(Protocol):
    """Combines a value over all ranks.

    Called with a float64 array on the gradients' device, of the gradients' own type (0-d; of
    one element a gradient with ``per_tensor=True``), and with ``op`` "sum" or "max". Returns
    the combined value, an array or a number, the same on every rank. It is called exactly
    twice for every norm, whatever a rank holds and whatever the norm's order, first with
    "max" and then with "sum".
    """

    def __call__(self, value: Any, op: Literal["sum", "max"], /) -> Any:
        """The value combined over all ranks."""
