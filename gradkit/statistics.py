"""Statistics of gradients by name, for logs."""

from collections.abc import Iterator, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from gradkit._open.arguments import values_of
from gradkit._open.foreign import answers
from gradkit._ranks.collective import NOBODY, Collective
from gradkit._ranks.groups import OverRanks
from gradkit._ranks.norms import Ranks
from gradkit._ranks.statistics import statistics_of
from gradkit._typing import GradTree, Out, Replicas, X

__all__ = ["GradStat", "GradStats", "grad_stats"]

_Number = TypeVar("_Number")


class GradStat(NamedTuple, Generic[_Number]):
    """The statistics of one gradient: 0-d arrays.

    Attributes
    ----------
    norm : 0-d array
        The 2-norm.
    max : 0-d array
        The largest magnitude.
    mean : 0-d array
        The mean of the elements.
    zeros : 0-d array
        How many elements are 0.
    nonfinite : 0-d array
        How many elements are NaN or infinite.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> norm, *_ = gradkit.grad_stats({"w": np.array([3.0, 4.0])})["w"]
    >>> norm
    array(5.)
    """

    norm: _Number
    max: _Number
    mean: _Number
    zeros: _Number
    nonfinite: _Number


class GradStats(Mapping[str, GradStat[_Number]]):
    """Statistics of gradients by name: a mapping of names to :class:`GradStat`.

    Its values are 0-d arrays, on the gradients' device: nothing waits for the device until one is
    looked at. :meth:`as_dict` brings all to the host in one copy.

    Attributes
    ----------
    names : tuple of str
        As :func:`names_of` gives them.
    table : float64 array of shape (k, 5)
        All numbers: a row for each gradient, a column for each statistic.
    norm, max, mean, zeros, nonfinite : float64 array of shape (k,)
        The columns of ``table``.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> stats = gradkit.grad_stats({"w": np.array([3.0, -4.0, 0.0]), "b": np.array([np.nan])})
    >>> stats["w"].max, stats.nonfinite.sum()
    (array(4.), np.float64(1.0))
    """

    def __init__(self, names: tuple[str, ...], table: _Number):
        self.names, self.table = names, table
        self._places: dict[str, int] = {}

    def __getitem__(self, name: str) -> GradStat[_Number]:
        if not self._places:
            self._places = {each: k for k, each in enumerate(self.names)}
        table: Any = self.table
        row = self._places[name]
        return GradStat(*(table[..., row, column] for column in range(len(GradStat._fields))))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        """The names, whose numbers a device may still be computing."""
        return f"GradStats({', '.join(self.names)})"

    @property
    def norm(self) -> _Number:
        """The 2-norms."""
        return self._column(0)

    @property
    def max(self) -> _Number:
        """The largest magnitudes."""
        return self._column(1)

    @property
    def mean(self) -> _Number:
        """The means."""
        return self._column(2)

    @property
    def zeros(self) -> _Number:
        """Number of elements that are 0."""
        return self._column(3)

    @property
    def nonfinite(self) -> _Number:
        """Number of elements that are NaN or infinite."""
        return self._column(4)

    def as_dict(self) -> dict[str, dict[str, float]]:
        """All statistics as Python's numbers by gradient and by statistic; counts are ints.

        Waits for the device: one copy.
        """
        rows = values_of(self.table, "table").tolist()
        return {name: _numbers(row) for name, row in zip(self.names, rows, strict=True)}

    def _column(self, index: int) -> _Number:
        table: Any = self.table
        return table[..., index]


def _numbers(row: list[float]) -> dict[str, float]:
    *sums, zeros, nonfinite = row
    return dict(zip(GradStat._fields, (*sums, int(zeros), int(nonfinite)), strict=True))


@answers
def grad_stats(
    grads: GradTree[X],
    *,
    group: OverRanks = None,
    replicas: Replicas = 1,
    out: Out = None,
) -> GradStats[X]:
    """Norm, largest magnitude, mean, zeros and non-finite elements of each gradient, by name.

    All five in one pass over the memory. Without a group nothing waits for a device.

    Parameters
    ----------
    grads : array, or iterable or nested dict/list/tuple of arrays
        float16, bfloat16, float32 or float64, of any shape; dtypes may be mixed. Never written.
        They may lie on several devices, as in :func:`grad_norm`. ``None`` has no statistics.
    group : Group, optional
        The statistics are those of the gradients of all its ranks, which make this call together.
        Every rank gets all names, in the order of ranks. A rank need not have a gradient of each
        name; gradients of one name on several ranks are parts of one gradient. The ranks exchange
        names once, and then a message a call (two in the first, and if all ranks' numbers
        together are more than 32 KiB); the host waits for the device.
    replicas : int, or container of ints like ``grads``
        As in :func:`grad_norm`: number of ranks that hold a copy of each gradient.
    out : float64 array of shape (k, 5), optional
        Where the statistics of k gradients are written; not with a group of several ranks.

    Returns
    -------
    GradStats
        The statistics by name, as float64 arrays of the gradients' type on their device. Norms have
        the bits of :func:`per_tensor_norms`. Means are sums of error-free additions; no
        intermediate overflows or underflows. NaN and infinities make norm, maximum and mean what
        they are in NumPy, and are counted. Of no elements all statistics are 0.

    Raises
    ------
    TypeError
        A leaf is not a floating-point array; arrays are of two frameworks.
    ValueError
        Two gradients have one name; ``out`` has another shape, shares memory with a gradient, or
        goes with a group.
    RankError
        With ``group``: another rank failed, or makes another call.

    References
    ----------
    Megatron-LM's ``num_zeros_in_grad``, ``torch._foreach_norm``.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> grads = {"w": np.array([3.0, -4.0, 0.0, 0.0]), "b": [np.array([2.0], np.float16)]}
    >>> stats = gradkit.grad_stats(grads)
    >>> stats.names, stats.norm
    (('w', 'b.0'), array([5., 2.]))
    >>> stats.as_dict()["w"]
    {'norm': 5.0, 'max': 4.0, 'mean': -0.25, 'zeros': 2, 'nonfinite': 0}
    """
    with NOBODY if group is None else Collective(group) as collective:
        return GradStats(*statistics_of(grads, Ranks(collective, replicas), out))
