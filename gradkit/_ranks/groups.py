"""Groups of ranks, which gather numbers for norms."""

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from gradkit import _typing


class Group(Protocol):
    """The ranks that make a call together.

    The functions below return groups. Any object with these three attributes is one, too.

    Attributes
    ----------
    rank : int
        This rank, from 0 on.
    size : int
        Number of ranks.
    """

    rank: int
    size: int

    def allgather(self, state: np.ndarray[Any, Any], /) -> np.ndarray[Any, Any]:
        """Every rank's numbers.

        ``state`` is a float64 vector in host memory, of the same length on all ranks. The result
        has a row for each rank: float64, with the very bits that the rank passed.

        A group may also have ``allreduce``, which takes the same and returns the sum over ranks.
        ``exact=True`` uses it, so that a rank receives as much whatever their number; the numbers
        are whole and below 2^53, so that any order of additions gives the same. One with
        ``wire``, an object that stands for what connects its ranks (a communicator), takes a
        message less in calls that were made over it before; all ranks' groups have one.
        """


class DeviceGroup(Group, Protocol):
    """A group whose numbers travel between devices, while the host goes on.

    A norm is one collective on the caller's current stream, and may be captured into a CUDA
    graph. A call returns before anybody knows whether all ranks have met in it. If one failed, or
    made another call, the devices find out, and nothing is written on any rank: neither gradients
    nor ``out`` nor ``found_inf``. New results hold placeholders that must not be used: a norm
    is NaN, and :func:`gradkit.clip_by_global_norm` gives copies of the gradients. The rank that
    failed raises its own error. The others learn of it from :meth:`check`; call it once a step.

    The host waits if the call asks for it: with ``nonfinite="raise"``, which checks too, with
    ``exact=True``, and with ``per_tensor_norms`` and ``grad_stats``, because only ranks that agree
    may exchange numbers for each gradient.

    Gradients are on the group's device. A rank without any gets the norm there.

    Attributes
    ----------
    on_device : bool
        True.
    faults : float64 array on the device
        A number for each rank, 0 at first, which gradkit's kernels write: 1 for a rank that
        failed, 2 for one that made another call, 3 for one that passed another scale or limit.
    """

    on_device: bool
    faults: Any

    def allgather(self, state: Any, /) -> Any:
        """Every rank's numbers, without waiting for the device.

        ``state`` is a float64 vector on the device, or in host memory if the rank has failed or
        waits for the result. The result is a float64 array on the device, with a row for each
        rank, on the stream that is current in CuPy. If a graph captures the call, the memory is
        to live as long as the graph.
        """

    def check(self) -> None:
        """Wait for the device; raise :class:`gradkit.RankError` if a rank was at fault.

        It names the ranks at fault in all calls since the last check. A graph's replays count.
        """


if TYPE_CHECKING:
    OverRanks = Group | None  # that a norm or a batch is taken over
else:
    OverRanks = _typing.Name("Group")
