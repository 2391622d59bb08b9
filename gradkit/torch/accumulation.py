"""The sum of a model's gradients over micro-batches."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

import gradkit
from gradkit.torch import clipping

__all__ = ["GradAccumulator"]


class GradAccumulator:
    """Adds up parameters' gradients over micro-batches, in float32 or float64.

    16-bit gradients lose what is small beside their sum. Here sums of them are float32 until
    the end. With losses that are summed over tokens, and ``scale=1 / tokens`` at the end,
    a step is that of the whole batch, however unequal its micro-batches are.

    Parameters
    ----------
    parameters : torch.nn.Module, or iterable of Tensor
        Those without a gradient in a step are left without one. DTensors are accepted as by
        :func:`clip_grad_norm_`.

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
        module = isinstance(parameters, torch.nn.Module)
        self._parameters = clipping.listed(parameters.parameters() if module else parameters)  # type: ignore[union-attr,arg-type]
        self._sums: dict[int, Tensor] = {}  # by position, kept from step to step
        self._added: dict[int, None] = {}  # those of this step, in the order of the parameters

    def __repr__(self) -> str:
        return f"GradAccumulator({len(self._parameters)} parameters, {len(self._added)} added to)"

    def add(self) -> None:
        """Add the parameters' ``grad`` to the sums, and set it to ``None``.

        Raises
        ------
        TypeError, ValueError
            As :func:`gradkit.accumulate_grads`. Neither sums nor gradients are changed.
        """
        found = {k: p.grad.detach() for k, p in enumerate(self._parameters) if p.grad is not None}
        parts = dict(zip(found, clipping.local(found), strict=True))
        for k, grad in found.items():
            if k not in self._sums:
                self._sums[k] = torch.empty_like(grad, dtype=_wide(grad.dtype))
        for first in (True, False):
            chosen = [k for k in found if (k not in self._added) == first]
            gradkit.accumulate_grads(
                clipping.local({k: self._sums[k] for k in chosen}),
                [parts[k] for k in chosen],
                overwrite=first,
            )
        for k in found:
            self._parameters[k].grad = None
        self._added |= dict.fromkeys(found)

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
        chosen = sorted(self._added)
        held = clipping.spread(self._parameters, {k: self._sums[k] for k in chosen})
        try:
            norm = clipping.norm_by(
                gradkit.clip_grad_norm,
                held,
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


def _wide(dtype: Any) -> Any:
    return torch.float64 if dtype == torch.float64 else torch.float32
