"""Norms over gradients that are spread over ranks: processes, or threads of one.

:func:`gradkit.grad_norm`, :func:`gradkit.clip_grad_norm` and
:func:`gradkit.clip_by_global_norm` take ``group``, a :class:`Group` of ranks. gradkit brings no
communication of its own: a group is made of what a program already uses. With mpi4py::

    group = gradkit.distributed.from_mpi(MPI.COMM_WORLD)
    gradkit.clip_grad_norm(own_grads, max_norm=1.0, group=group)

Every rank makes the same call on its own gradients, perhaps none, and gets the same bits. Ranks
that pass different limits, scales or other numbers raise :class:`gradkit.RankError`.
``replicas`` is the number of ranks that hold a copy of each gradient; copies count once.

:func:`gradkit.batch_norm` and :func:`gradkit.batch_norm_grad` take ``group`` too: their batch is
that of all ranks.

Groups over NCCL are :class:`DeviceGroup`: their numbers stay on the GPUs, and no call waits for
them. They have not yet run on GPUs::

    group = gradkit.distributed.from_nccl(communicator)
    gradkit.clip_grad_norm(own_grads, max_norm=1.0, group=group)
    group.check()  # once a step

Several GPUs of one process are ranks too: a thread for each of them, with
:func:`threads`, or with the communicators of ``cupy.cuda.nccl.NcclCommunicator.initAll``.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import numpy as np

from gradkit._calls import checks
from gradkit._open.shards import Parts
from gradkit._ranks import copies
from gradkit._ranks.collective import SET_UP, Collective
from gradkit._ranks.groups import DeviceGroup, Group
from gradkit._ranks.parts import leaves_of, parts_by_exchange, parts_by_placement

__all__ = [
    "DeviceGroup",
    "Group",
    "ShardedGrads",
    "check_copies",
    "from_cupyx",
    "from_jax",
    "from_mpi",
    "from_nccl",
    "from_torch",
    "shards_of",
    "threads",
]


for _protocol in (Group, DeviceGroup):
    _protocol.__module__ = __name__  # where people import them


def from_mpi(comm: Any) -> Group:
    """The ranks of an MPI communicator.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
        An intracommunicator, such as ``MPI.COMM_WORLD``.

    Returns
    -------
    Group
        Its numbers travel in host memory, also those of gradients on a GPU, with which it has not
        yet run.

    Raises
    ------
    TypeError
        ``comm`` is no communicator.
    ValueError
        ``comm`` is an intercommunicator, whose two sides do not gather their own numbers, or
        the null communicator.

    Examples
    --------
    Every process runs ``mpiexec -n 4 python train.py``::

        from mpi4py import MPI

        group = gradkit.distributed.from_mpi(MPI.COMM_WORLD)
        norm = gradkit.clip_grad_norm(own_grads, max_norm=1.0, group=group)
    """
    from gradkit._ranks.mpi import ranks_of

    return ranks_of(comm)


def from_torch(process_group: Any = None, *, device: Any = None) -> Group:
    """The ranks of a ``torch.distributed`` process group.

    Parameters
    ----------
    process_group : torch.distributed.ProcessGroup, optional
        Default: the one that ``init_process_group`` made.
    device : torch.device or str, optional
        Where the numbers travel. Default: in host memory if the group has a backend for it, gloo
        for example, or else on PyTorch's current CUDA device, by NCCL. If it has both, as
        "cpu:gloo,cuda:nccl", the hosts agree on each norm in host memory; if the gradients of all
        ranks then lie on GPUs, their sums travel by NCCL, and no host waits for its GPU.

    Returns
    -------
    Group
        For a CUDA device a :class:`DeviceGroup`, on PyTorch's streams. One with both backends has
        ``check()`` too, which raises if a rank failed on its own after all had agreed: keep the
        group, and call it once a step.

    Raises
    ------
    ValueError
        The program has not imported PyTorch.

    Examples
    --------
    With ``torchrun``, on the gradients of FSDP's parameters::

        torch.distributed.init_process_group()
        group = gradkit.distributed.from_torch()
        grads = gradkit.distributed.shards_of(model.named_parameters())
        norm = gradkit.clip_grad_norm(grads, max_norm=1.0, group=group)
    """
    _imported("torch", "from_torch")
    from gradkit._ranks.torch import ranks_of

    return ranks_of(process_group, device)


def from_cupyx(backend: Any) -> DeviceGroup:
    """The ranks of a ``cupyx.distributed`` backend.

    Parameters
    ----------
    backend : cupyx.distributed.NCCLBackend
        As ``cupyx.distributed.init_process_group`` returns it.

    Returns
    -------
    DeviceGroup
        On the device that was current when the backend was made.

    Raises
    ------
    TypeError
        ``backend`` is not CuPy's NCCL backend.

    Examples
    --------
    On each rank::

        backend = cupyx.distributed.init_process_group(size, rank)
        group = gradkit.distributed.from_cupyx(backend)
        gradkit.clip_grad_norm(own_grads, max_norm=1.0, group=group)
        group.check()  # once a step
    """
    from gradkit._ranks.nccl import CupyxRanks

    return CupyxRanks(backend)


def from_nccl(communicator: Any) -> DeviceGroup:
    """The ranks of an NCCL communicator.

    Parameters
    ----------
    communicator : cupy.cuda.nccl.NcclCommunicator or nccl.core.Communicator
        CuPy's, or that of NVIDIA's nccl4py.

    Returns
    -------
    DeviceGroup
        On the communicator's device.

    Raises
    ------
    TypeError
        ``communicator`` is neither.

    Examples
    --------
    On each rank::

        communicator = cupy.cuda.nccl.NcclCommunicator(size, unique_id, rank)
        group = gradkit.distributed.from_nccl(communicator)
        gradkit.clip_grad_norm(own_grads, max_norm=1.0, group=group)
        group.check()  # once a step
    """
    from gradkit._ranks.nccl import ranks_of

    return ranks_of(communicator)


def from_jax() -> Group:
    """The processes of a JAX program.

    Returns
    -------
    Group
        Those that ``jax.distributed.initialize`` has joined. Not to be used inside of ``jit``.

    Raises
    ------
    ValueError
        The program has not imported JAX.

    Examples
    --------
    ::

        jax.distributed.initialize()
        group = gradkit.distributed.from_jax()
        grads = gradkit.distributed.shards_of(grads)  # the parts that this process holds
        clipped, norm = gradkit.clip_by_global_norm(grads, max_norm=1.0, group=group)
    """
    _imported("jax", "from_jax")
    from gradkit._ranks.jax import JaxGroup

    return JaxGroup()


def threads(size: int, *, timeout: float = 60.0) -> list[Group]:
    """A group whose ranks are threads of this process, such as one for each device.

    Parameters
    ----------
    size : int
        How many ranks.
    timeout : float
        Seconds that a rank waits for the others, or infinity. Then all of them raise
        :class:`gradkit.RankError`, now and ever after.

    Returns
    -------
    list of Group
        One for each thread.

    Raises
    ------
    TypeError
        ``size`` is not an integer, or ``timeout`` not a number.
    ValueError
        ``size`` or ``timeout`` is not above 0.

    Examples
    --------
    >>> from concurrent.futures import ThreadPoolExecutor
    >>> import numpy as np, gradkit
    >>> grads = [[np.array([3.0])], [np.array([4.0])]]
    >>> with ThreadPoolExecutor(2) as pool:
    ...     groups = gradkit.distributed.threads(2)
    ...     norms = pool.map(lambda g, group: gradkit.grad_norm(g, group=group), grads, groups)
    >>> list(norms)
    [array(5.), array(5.)]
    """
    from gradkit._ranks.threads import groups

    count = checks.integer(size, "size")
    if not isinstance(timeout, (int, float)) or isinstance(timeout, bool):
        raise TypeError(f"timeout must be a number of seconds, not {type(timeout).__name__}")
    if count < 1:
        raise ValueError(f"size must be at least 1, not {count}")
    if not timeout > 0:
        raise ValueError(f"timeout must be above 0, not {timeout}")
    return list(groups(count, timeout))


class ShardedGrads(Parts):
    """A rank's own parts of gradients that are spread over ranks, by name.

    A dict like any other to functions that look at elements alone. Norms know from it of how many
    ranks each part is a copy, and refuse it without a group, also inside of other containers.

    Attributes
    ----------
    replicas : dict
        On how many ranks of the group each part lies, by the same names. Yours to change: for
        tied weights that two pipeline stages hold, say.
    """

    replicas: dict[Any, Any]


# Ranks hold copies of a plain tensor, or each has its own, or it lies on so many ranks.
Plain: TypeAlias = int | Literal["copies", "own"]
# The same for each: a dict by name, or a function of name and parameter.
PlainOfEach: TypeAlias = Plain | Mapping[Any, Plain] | Callable[[Any, Any], Plain | None]
Names: TypeAlias = Mapping[Any, str] | Callable[[Any, Any], str]


def shards_of(
    parameters: Any,
    *,
    attr: str = "grad",
    group: Group | None = None,
    names: Names | None = None,
    plain: PlainOfEach | None = None,
) -> ShardedGrads:
    """A rank's own parts of the gradients of sharded parameters, and how often each counts.

    With ``group`` this is a call that all its ranks make together, on meshes of any kind: data,
    tensor, expert and pipeline parallelism, hybrid sharding, tied weights. Ranks exchange what
    they hold: of each parameter its name and the indices of its part. Parts of one name with the
    same indices are copies, and the parts of each name must tile it. Each rank caches the result,
    so that later calls with such parameters exchange nothing. If the cache of some ranks misses,
    all ranks repeat the exchange in their next norm: take it right after this call. (With a
    :class:`DeviceGroup` all ranks raise an error instead.)

    Without ``group``, placements tell how many ranks of a gradient's own mesh hold it.

    Parameters
    ----------
    parameters : iterable of parameters or of (name, parameter) pairs, dict, or JAX arrays
        For example ``model.named_parameters()``, whose gradients are DTensors, as those of FSDP
        and tensor parallelism are. Or a dict or list of gradients themselves: JAX arrays, DTensors,
        tensors. Parameters without a gradient are left out of the result; a gradient that is
        ``None`` on one rank only is zero there, and its other copies count as often as before.
    attr : str
        The attribute that holds gradients.
    group : Group, optional
        All ranks over which the norm is to be taken.
    names : dict, or function of (name, parameter), optional
        With ``group``: what all ranks call a parameter, if that is not its name on this rank.
        Weights that two pipeline stages share have one name; layers that each stage counts from 0
        have different ones. Names missing in a dict stay as they are.
    plain : "copies", "own", int, or dict or function of (name, parameter) that says it of each
        What a tensor without placements is, which neither name nor shape nor values can tell.
        "copies": each rank that has the name holds a copy. "own": each rank's is another tensor,
        such as its experts, or its slice of a flat buffer. Without ``group`` the number of ranks on
        which it lies.

    Returns
    -------
    ShardedGrads
        The parts' own memory, not copies: what is written to them, is written to the gradients.

    Raises
    ------
    ValueError
        A DTensor holds partial sums; a gradient is a plain tensor and ``plain`` does not say what
        it is; two parameters have one name.
    TypeError
        A leaf has no such attribute and is no JAX array.
    RankError
        The parts of a gradient do not tile it, or another rank failed; on all ranks.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> import numpy as np, gradkit
    >>> parameters = {"w": SimpleNamespace(grad=np.array([3.0, 4.0]))}
    >>> grads = gradkit.distributed.shards_of(parameters, plain=2)
    >>> grads, grads.replicas
    ({'w': array([3., 4.])}, {'w': 2})

    The gradients of a model whose experts differ from rank to rank, here on one rank:

    >>> (group,) = gradkit.distributed.threads(1)
    >>> kinds = {"w": "copies", "expert": "own"}
    >>> parameters["expert"] = SimpleNamespace(grad=np.array([12.0]))
    >>> grads = gradkit.distributed.shards_of(parameters, group=group, plain=kinds)
    >>> gradkit.grad_norm(grads, group=group)
    array(13.)
    """
    if group is None:
        if names is not None:
            raise ValueError("names is for ranks that find out what they hold: pass group")
        return ShardedGrads(*parts_by_placement(leaves_of(parameters, attr), plain))
    with Collective(group) as collective:
        leaves = leaves_of(parameters, attr)
        by_name, ownership = parts_by_exchange(leaves, names, plain, collective)
        grads = ShardedGrads(by_name, {})
        grads.ownership, grads.replicas = ownership, ownership.replicas
        if ownership.serial == SET_UP:
            if not collective.alone:
                collective.gather("shards_of", np.zeros(0), SET_UP)
            ownership.exchange(collective)
    return grads


def check_copies(grads: Any, group: Group) -> None:
    """Raise an error if copies of a gradient, which several ranks hold, differ in bits.

    They do if an all-reduce was forgotten, or if one rank has skipped it: a norm that counts copies
    once is then wrong, and ranks' weights part. A call that all ranks make together. It reads every
    gradient on the host, and is for tests and the first steps of a run.

    Parameters
    ----------
    grads : ShardedGrads, or array, or iterable or nested dict/list/tuple of arrays
        What :func:`shards_of` returns with this ``group``; or gradients that every rank has
        completely, as in data parallelism, where each that is at the same place is a copy.
        Never written.
    group : Group
        The ranks.

    Raises
    ------
    RankError
        Copies differ. ``ranks`` says what each rank has: which of its gradients differ from those
        of other ranks, and with which ranks they agree.
    TypeError, ValueError
        As :func:`gradkit.grad_norm`; the parts of :func:`shards_of` without a group.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> from concurrent.futures import ThreadPoolExecutor
    >>> def check(value, group):
    ...     try:
    ...         gradkit.distributed.check_copies({"w": np.array([value])}, group)
    ...     except gradkit.RankError as error:
    ...         return error.ranks[2]
    >>> with ThreadPoolExecutor(3) as pool:
    ...     found = pool.map(check, [1.0, 2.0, 1.0], gradkit.distributed.threads(3))
    >>> [*found][0]
    "grads['w'] is as on ranks 0"
    """
    with Collective(group) as collective:
        copies.check(grads, collective)


def _imported(library: str, function: str) -> None:
    if library not in sys.modules:
        raise ValueError(f"{function} needs {library}, which this program has not imported")
