"""Norms over gradients that are spread over processes.

:func:`gradkit.grad_norm`, :func:`gradkit.clip_grad_norm` and
:func:`gradkit.clip_by_global_norm` take ``reduce``: a callable that combines a value over all
ranks. With mpi4py::

    def reduce(value, op):
        return comm.allreduce(value, MPI.SUM if op == "sum" else MPI.MAX)
"""

from typing import Any, Literal, Protocol

__all__ = ["Reduce"]


class Reduce(Protocol):
    """Combines a value over all ranks.

    Its arguments are a float64 array and ``op``, which is "sum" or "max". The array is of the
    gradients' type, on their device, and 0-d (one element per gradient if ``per_tensor``). It
    returns the combined value, an array or a number, which must be the same on every rank.
    Every norm of any order calls it exactly twice, first with "max" and then with "sum", even
    if a rank has no gradients.
    """

    def __call__(self, value: Any, op: Literal["sum", "max"], /) -> Any:
        """The value combined over all ranks."""
