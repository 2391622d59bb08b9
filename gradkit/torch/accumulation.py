"""The sum of a model's gradients over micro-batches."""

import gc
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed import all_reduce, get_world_size, is_available, is_initialized
from torch.nn.parallel import DistributedDataParallel

import gradkit
from gradkit.torch import clipping
from gradkit.torch._list_operators import norm_by

__all__ = ["GradAccumulator"]

_ENOUGH = 1 << 22  # elements for one exchange


class GradAccumulator:
    """Adds up parameters' gradients over micro-batches, in float32 or float64.

    16-bit gradients lose what is small beside their sum. Here sums of them are float32 until
    the end. With losses that are summed over tokens, and ``scale=1 / tokens`` at the end,
    a step is that of the whole batch, however unequal its micro-batches are.

    Parameters
    ----------
    parameters : torch.nn.Module, or iterable of Tensor
        Those without a gradient in a step are left without one. DTensors are accepted as by
        :func:`clip_grad_norm_`. Under ``DistributedDataParallel`` pass that module itself: its
        parameters do not tell which backward passes its ``no_sync`` has left out, and are refused.

    Notes
    -----
    With a ``DistributedDataParallel`` module :meth:`finish` is a collective of its ranks: it
    averages the sums over them, as the module does with gradients. What the module has averaged
    already stays as it is. So run every backward pass under its ``no_sync``: ranks then meet once
    a step, and their sums are added up in float32. Ranks may have different numbers of
    micro-batches. It waits for the device, to find out which gradients there are.

    Examples
    --------
    >>> import torch, gradkit.torch
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> accumulator = gradkit.torch.GradAccumulator(model)
    >>> x, tokens = torch.ones(5, 2), 0
    >>> for micro_batch in (x[:1], x[1:]):
    ...     model(micro_batch).sum().backward()
    ...     accumulator.add()
    ...     tokens += len(micro_batch)
    >>> norm = accumulator.finish(max_norm=10.0, scale=1 / tokens)
    >>> model.weight.grad
    tensor([[1., 1.]])
    >>> optimizer.step()
    >>> optimizer.zero_grad()
    """

    def __init__(self, parameters: torch.nn.Module | Iterable[Tensor]):
        module = parameters if isinstance(parameters, torch.nn.Module) else None
        tensors = parameters if module is None else module.parameters()  # type: ignore[assignment]
        self._parameters = clipping.parameters_in(tensors)
        modules = () if module is None else module.modules()
        self._replicated = [m for m in modules if isinstance(m, DistributedDataParallel)]
        _refuse_replicated(self._parameters, self._replicated)
        self._sums: dict[int, Tensor] = {}  # by position, kept from step to step
        self._added: dict[int, None] = {}  # those of this step, in the order of the parameters

    def __repr__(self) -> str:
        return f"GradAccumulator({len(self._parameters)} parameters, {len(self._added)} added to)"

    def _of(self, tensors: dict[int, Tensor], chosen: list[int]) -> clipping.Grads:
        return clipping.by_position({k: tensors[k] for k in chosen}, len(self._parameters))

    def add(self) -> None:
        """Add the parameters' ``grad`` to the sums, and set it to ``None``.

        Raises
        ------
        TypeError, ValueError
            As :func:`gradkit.accumulate_grads`. Neither sums nor gradients are changed.
        """
        grads = {k: p.grad.detach() for k, p in enumerate(self._parameters) if p.grad is not None}
        _refuse_shared(grads)
        parts: Any = clipping.local(grads)
        for k, grad in grads.items():
            if k not in self._added and not _is_sum_of(self._sums.get(k), grad):
                self._sums[k] = torch.empty_like(grad, dtype=_wide(grad.dtype))
        for first in (True, False):
            chosen = [k for k in grads if (k not in self._added) == first]
            gradkit.accumulate_grads(
                clipping.local(self._of(self._sums, chosen)),
                self._of(parts, chosen),
                overwrite=first,
            )
        for k in grads:
            self._parameters[k].grad = None
        self._added |= dict.fromkeys(grads)

    def finish(
        self,
        max_norm: float | Tensor = math.inf,
        norm_type: float = 2.0,
        *,
        scale: float | Tensor = 1.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Scale and clip the sums, and make them the parameters' ``grad``.

        Gradients that have not been added yet are added first. The next :meth:`add` begins anew;
        until then ``grad`` may be the memory of the sums.

        Parameters
        ----------
        max_norm, norm_type, error_if_nonfinite
            As in :func:`clip_grad_norm_`, for the norm of the scaled sums.
        scale : float, or 0-d Tensor
            As in :func:`gradkit.clip_grad_norm`: ``1 / tokens``, ``1 / loss_scale``.

        Returns
        -------
        0-d float64 Tensor
            The norm of the scaled sums, before clipping.

        Raises
        ------
        RuntimeError
            The norm is not finite and ``error_if_nonfinite`` is true. The sums are dropped, and
            every ``grad`` is ``None``.
        TypeError, ValueError
            As :func:`gradkit.clip_grad_norm`. The sums stay.
        """
        self.add()
        for module in self._replicated:
            if get_world_size(module.process_group) > 1:
                self._average(module)
        chosen = sorted(self._added)
        gradients = clipping.spread(self._parameters, self._of(self._sums, chosen))
        try:
            norm = norm_by(
                gradkit.clip_grad_norm,
                gradients,
                max_norm,
                norm_type=norm_type,
                error=error_if_nonfinite,
                scale=scale,
            )
        except RuntimeError as error:
            if isinstance(error.__cause__, gradkit.NonFiniteNormError):
                self._added.clear()
            raise
        for k in chosen:
            parameter = self._parameters[k]
            parameter.grad = self._sums[k].to(parameter.dtype)
        self._added.clear()
        return norm

    def _average(self, module: DistributedDataParallel) -> None:
        """Average the sums over the ranks of a module; those that no rank has stay away."""
        ranks, places = module.process_group, {id(p): k for k, p in enumerate(self._parameters)}
        indices = [
            places[id(p)]
            for name, p in module.module.named_parameters()
            if p.requires_grad and name not in module.parameters_to_ignore
        ]
        device = self._parameters[indices[0]].device
        holders = torch.tensor([float(k in self._added) for k in indices], device=device)
        all_reduce(holders, group=ranks)
        present = [k for k, count in zip(indices, holders.tolist(), strict=True) if count]
        for k in present:
            if k not in self._added:
                like = self._parameters[k]
                self._sums[k] = torch.zeros_like(like, dtype=_wide(like.dtype)).detach()
                self._added[k] = None
        for bucket in _buckets([self._sums[k] for k in present]):
            flat = torch.cat([total.reshape(-1) for total in bucket])
            all_reduce(flat, group=ranks)
            flat /= get_world_size(ranks)
            for total, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                total.copy_(part.view_as(total))


def _buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one dtype that travel together, of some megabytes while there are so many."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        bucket: list[Tensor] = []
        for tensor in tensors:
            if tensor.dtype == dtype:
                bucket.append(tensor)
                if sum(each.numel() for each in bucket) >= _ENOUGH:
                    yield bucket
                    bucket = []
        if bucket:
            yield bucket


def _refuse_replicated(parameters: list[Tensor], modules: list[DistributedDataParallel]) -> None:
    """Raise if parameters are those of another module that averages their gradients over ranks."""
    if not (is_available() and is_initialized()):
        return
    ids = set(map(id, parameters))
    for each in gc.get_objects():
        if (
            issubclass(type(each), DistributedDataParallel)
            and not any(each is one for one in modules)
            and not ids.isdisjoint(map(id, each.parameters()))  # its group may be gone otherwise
            and get_world_size(each.process_group) > 1
        ):
            raise ValueError(
                "parameters are those of a DistributedDataParallel module; pass that module, which "
                "tells what its no_sync has left to average"
            )


def _refuse_shared(grads: dict[int, Tensor]) -> None:
    """Raise if two parameters have one gradient, which would be added to two sums."""
    first: dict[int, int] = {}
    for k, grad in clipping.items(clipping.local(grads)):
        before = first.setdefault(grad.data_ptr(), k) if grad.numel() else k
        if before != k:
            raise ValueError(
                f"grads[{before}] and grads[{k}] share memory, which would count twice; give each "
                "parameter a gradient of its own"
            )


def _is_sum_of(total: Tensor | None, grad: Tensor) -> bool:
    """Return whether gradients fit a sum of earlier steps, since which a model may have moved."""
    wanted = grad.shape, grad.device, _wide(grad.dtype)
    return total is not None and (total.shape, total.device, total.dtype) == wanted


def _wide(dtype: Any) -> Any:
    return torch.float64 if dtype == torch.float64 else torch.float32
