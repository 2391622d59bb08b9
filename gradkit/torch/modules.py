"""The norms as modules, and a swap of PyTorch's for them and back.

Arguments and ``state_dict`` keys are those of ``torch.nn``.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from gradkit._calls.channels import MOMENTUM
from gradkit.distributed import Group
from gradkit.torch import norms

__all__ = [
    "AddLayerNorm",
    "AddRMSNorm",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "GatedRMSNorm",
    "GroupNorm",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "InvertibleLayerNorm",
    "InvertibleRMSNorm",
    "LayerNorm",
    "RMSNorm",
    "norms_left",
    "replace_norms",
    "restore_norms",
]

_Model = TypeVar("_Model", bound=nn.Module)
_Forward = TypeVar("_Forward", bound=Callable[..., Any])


def _leaf(forward: _Forward) -> _Forward:
    """Let ``torch.fx`` record a call of the module, as it does for modules of ``torch.nn``."""

    @wraps(forward)
    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            if isinstance(value, Proxy):
                tracer = value.tracer
                path = tracer.path_of_module(self)
                return tracer.create_proxy("call_module", path, args, kwargs)
        return forward(self, *args, **kwargs)

    return recorded  # type: ignore[return-value]


class _ScaleOffset(nn.Module):
    """Base of norms with ``scale_offset``, which is 0 for modules that were PyTorch's."""

    scale_offset: float = 0.0
    weight: Any

    def __init__(self, *args: Any, scale_offset: float = 0.0, **kwargs: Any):
        self.scale_offset = scale_offset  # before the weight gets its first values
        super().__init__(*args, **kwargs)
        if scale_offset and self.weight is None:
            raise ValueError(
                f"scale_offset is {scale_offset}, but elementwise_affine is false; leave one out"
            )

    def reset_parameters(self) -> None:
        """Let the weight and ``scale_offset`` make 1."""
        super().reset_parameters()  # type: ignore[misc]
        if self.scale_offset and self.weight is not None:
            nn.init.constant_(self.weight, 1 - self.scale_offset)

    def extra_repr(self) -> str:
        """The arguments."""
        more = f", scale_offset={self.scale_offset}" if self.scale_offset else ""
        return super().extra_repr() + more


class _LayerNorm(_ScaleOffset, nn.LayerNorm):
    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        scale_offset: float = 0.0,
    ):
        arguments = normalized_shape, eps, elementwise_affine, bias, device, dtype
        super().__init__(*arguments, scale_offset=scale_offset)


class _RMSNorm(_ScaleOffset, nn.RMSNorm):
    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        scale_offset: float = 0.0,
    ):
        arguments = normalized_shape, eps, elementwise_affine, device, dtype
        super().__init__(*arguments, scale_offset=scale_offset)


class LayerNorm(_LayerNorm):
    """``torch.nn.LayerNorm``, with its arguments, computed by :func:`layer_norm`.

    ``scale_offset``, a keyword, is that of :func:`layer_norm`.
    """

    @_leaf
    def forward(self, input: Tensor) -> Tensor:
        """Normalise the last dimensions."""
        shape, how = self.normalized_shape, (self.weight, self.bias, self.eps)
        return norms.layer_norm(input, shape, *how, scale_offset=self.scale_offset)


class AddLayerNorm(_LayerNorm):
    """:func:`add_layer_norm` with the arguments and parameters of :class:`LayerNorm`.

    Examples
    --------
    >>> import torch, gradkit.torch
    >>> norm = gradkit.torch.AddLayerNorm(2, eps=0.0)
    >>> y, s = norm(torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 1.0]]))
    >>> y.detach(), s.detach()
    (tensor([[-1.,  1.]]), tensor([[1., 3.]]))
    """

    @_leaf
    def forward(  # type: ignore[override]
        self, input: Tensor, residual: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Add, and normalise the last dimensions: both results."""
        shape, how = self.normalized_shape, (self.weight, self.bias, self.eps)
        return norms.add_layer_norm(input, residual, shape, *how, scale_offset=self.scale_offset)


class InvertibleLayerNorm(nn.LayerNorm):
    """``torch.nn.LayerNorm``, with its arguments, computed by :func:`invertible_layer_norm`."""

    @_leaf
    def forward(self, input: Tensor) -> Tensor:
        """Normalise the last dimensions."""
        return norms.invertible_layer_norm(
            input, self.normalized_shape, self.weight, self.bias, self.eps
        )


class RMSNorm(_RMSNorm):
    """``torch.nn.RMSNorm``, with its arguments, computed by :func:`rms_norm`.

    ``scale_offset``, a keyword, is that of :func:`rms_norm`.

    Examples
    --------
    >>> import torch, gradkit.torch
    >>> gradkit.torch.RMSNorm(2, scale_offset=1.0).weight.detach()
    tensor([0., 0.])
    """

    @_leaf
    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimensions."""
        shape, offset = self.normalized_shape, self.scale_offset
        return norms.rms_norm(x, shape, self.weight, self.eps, scale_offset=offset)


class InvertibleRMSNorm(_RMSNorm):
    """:class:`RMSNorm`, with its arguments, computed by :func:`invertible_rms_norm`."""

    @_leaf
    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimensions."""
        shape, offset = self.normalized_shape, self.scale_offset
        return norms.invertible_rms_norm(x, shape, self.weight, self.eps, scale_offset=offset)


class AddRMSNorm(_RMSNorm):
    """:func:`add_rms_norm` with the arguments and the parameter of :class:`RMSNorm`.

    Examples
    --------
    >>> import torch, gradkit.torch
    >>> norm = gradkit.torch.AddRMSNorm(2, eps=0.0)
    >>> y, s = norm(torch.tensor([[1.0, 4.0]]), torch.tensor([[2.0, 0.0]]))
    >>> s.detach()
    tensor([[3., 4.]])
    """

    @_leaf
    def forward(  # type: ignore[override]
        self, x: Tensor, residual: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Add, and normalise the last dimensions: both results."""
        shape, offset = self.normalized_shape, self.scale_offset
        return norms.add_rms_norm(x, residual, shape, self.weight, self.eps, scale_offset=offset)


class GatedRMSNorm(_RMSNorm):
    """:func:`gated_rms_norm` with the arguments and the parameter of :class:`RMSNorm`.

    ``activation`` and ``norm_before_gate``, keywords, are those of :func:`gated_rms_norm`.

    Examples
    --------
    >>> import torch, gradkit.torch
    >>> norm = gradkit.torch.GatedRMSNorm(2, eps=0.0, activation="sigmoid")
    >>> norm(torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 0.0]])).detach().round(decimals=4)
    tensor([[0.4243, 0.5657]])
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str = "silu",
        norm_before_gate: bool = True,
        scale_offset: float = 0.0,
    ):
        arguments = normalized_shape, eps, elementwise_affine, device, dtype
        super().__init__(*arguments, scale_offset=scale_offset)
        self.activation, self.norm_before_gate = activation, norm_before_gate

    @_leaf
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        """Normalise the last dimensions, before the product with the activated gate or after."""
        return norms.gated_rms_norm(
            x,
            gate,
            self.normalized_shape,
            self.weight,
            self.eps,
            activation=self.activation,
            norm_before_gate=self.norm_before_gate,
            scale_offset=self.scale_offset,
        )

    def extra_repr(self) -> str:
        """The arguments."""
        options = f"activation={self.activation!r}, norm_before_gate={self.norm_before_gate}"
        return f"{super().extra_repr()}, {options}"


class GroupNorm(nn.GroupNorm):
    """``torch.nn.GroupNorm``, with its arguments, computed by :func:`group_norm`."""

    @_leaf
    def forward(self, input: Tensor) -> Tensor:
        """Normalise the groups of each sample."""
        return norms.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


class _InstanceNorm(nn.modules.instancenorm._InstanceNorm):
    @_leaf
    def forward(self, input: Tensor) -> Tensor:
        """Normalise each channel of each sample."""
        return super().forward(input)

    def _apply_instance_norm(self, input: Tensor) -> Tensor:
        """Normalise samples; PyTorch's ``forward`` checks their shape and adds a batch's axis."""
        return norms.instance_norm(
            input,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training or not self.track_running_stats,
            self._weight(),
            self.eps,
        )

    def _weight(self) -> float:
        if self.running_mean is None:
            return MOMENTUM
        return 0.0 if self.momentum is None else self.momentum


class InstanceNorm1d(_InstanceNorm, nn.InstanceNorm1d):
    """``torch.nn.InstanceNorm1d``, with its arguments, computed by :func:`instance_norm`."""


class InstanceNorm2d(_InstanceNorm, nn.InstanceNorm2d):
    """``torch.nn.InstanceNorm2d``, with its arguments, computed by :func:`instance_norm`."""


class InstanceNorm3d(_InstanceNorm, nn.InstanceNorm3d):
    """``torch.nn.InstanceNorm3d``, with its arguments, computed by :func:`instance_norm`."""


def _with_group(initialise: Any) -> Signature:
    theirs = signature(initialise)
    group = Parameter("group", Parameter.KEYWORD_ONLY, default=None)
    return theirs.replace(parameters=[*theirs.parameters.values(), group])


class _BatchNormModule(nn.modules.batchnorm._BatchNorm):
    """``group``, a keyword or an attribute that may be set later, is that of ``batch_norm``."""

    group: Group | None = None

    def __init__(self, *args: Any, group: Group | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.group = group

    # As torch.nn.utils.skip_init looks at it. PyTorch's own arguments are those of its version.
    __init__.__signature__ = _with_group(nn.modules.batchnorm._BatchNorm.__init__)  # type: ignore[attr-defined]

    @_leaf
    def forward(self, input: Tensor) -> Tensor:
        """Normalise each channel, in training by the batch's own statistics."""
        self._check_input_dim(input)
        by_batch = self.training or (self.running_mean is None and self.running_var is None)
        momentum: float | Tensor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:  # the average of all batches
                momentum = 1 / self.num_batches_tracked.double()
        uses_running = not self.training or self.track_running_stats
        mean, var = (self.running_mean, self.running_var) if uses_running else (None, None)
        if mean is None and var is None:
            momentum = MOMENTUM
        how = by_batch, momentum, self.eps
        group = self.group if self.training else None
        return norms.batch_norm(input, mean, var, self.weight, self.bias, *how, group=group)


class BatchNorm1d(_BatchNormModule, nn.BatchNorm1d):
    """``torch.nn.BatchNorm1d``, with its arguments and ``group``, by :func:`batch_norm`."""


class BatchNorm2d(_BatchNormModule, nn.BatchNorm2d):
    """``torch.nn.BatchNorm2d``, with its arguments and ``group``, by :func:`batch_norm`."""


class BatchNorm3d(_BatchNormModule, nn.BatchNorm3d):
    """``torch.nn.BatchNorm3d``, with its arguments and ``group``, by :func:`batch_norm`."""


_OURS = {
    nn.LayerNorm: LayerNorm,
    nn.RMSNorm: RMSNorm,
    nn.GroupNorm: GroupNorm,
    nn.InstanceNorm1d: InstanceNorm1d,
    nn.InstanceNorm2d: InstanceNorm2d,
    nn.InstanceNorm3d: InstanceNorm3d,
    nn.BatchNorm1d: BatchNorm1d,
    nn.BatchNorm2d: BatchNorm2d,
    nn.BatchNorm3d: BatchNorm3d,
}
_THEIRS = {
    **{ours: theirs for theirs, ours in _OURS.items()},
    InvertibleLayerNorm: nn.LayerNorm,
    InvertibleRMSNorm: nn.RMSNorm,
}


def replace_norms(model: _Model) -> _Model:
    """Let gradkit compute the norms of a model.

    Every ``torch.nn.LayerNorm``, ``RMSNorm``, ``GroupNorm``, ``InstanceNorm1d`` to ``3d`` and
    ``BatchNorm1d`` to ``3d`` becomes the module of that name here. It stays the same object:
    parameters, buffers, hooks and ``state_dict`` keys are as before, and an optimiser of the model
    goes on. Subclasses are left alone, because they may compute something else, and so are other
    classes; :func:`norms_left` lists them. Call it before ``torch.compile``, ``fully_shard`` and
    the like.

    Parameters
    ----------
    model : torch.nn.Module
        **Written in place.**

    Returns
    -------
    model
        The same object.

    Examples
    --------
    >>> import torch, gradkit.torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    >>> type(gradkit.torch.replace_norms(model)[1])
    <class 'gradkit.torch.modules.LayerNorm'>
    """
    for module in model.modules():
        if type(module) in _OURS:
            module.__class__ = _OURS[type(module)]
    return model


def norms_left(model: nn.Module) -> dict[str, str]:
    """The norms of a model that :func:`replace_norms` leaves to others, and why.

    Parameters
    ----------
    model : torch.nn.Module
        Before :func:`replace_norms` or after it. Never written.

    Returns
    -------
    dict of str by str
        By its path in the model, what each module is that is a subclass of a norm of ``torch.nn``,
        or has "norm" in its class's name and is none of gradkit's. Empty if gradkit computes all.

    Examples
    --------
    >>> import torch, gradkit.torch
    >>> class LlamaRMSNorm(torch.nn.Module): ...
    >>> model = torch.nn.Sequential(torch.nn.LayerNorm(4), LlamaRMSNorm())
    >>> gradkit.torch.norms_left(model)
    {'1': 'LlamaRMSNorm is no norm of torch.nn that gradkit has'}
    """
    gradkit_norms = *_THEIRS, AddLayerNorm, AddRMSNorm, GatedRMSNorm
    reasons = {}
    for path, module in model.named_modules():
        kind = type(module)
        if kind in _OURS or isinstance(module, gradkit_norms):
            continue
        base = next((theirs for theirs in _OURS if isinstance(module, theirs)), None)
        if base is not None:
            reason = f"a subclass of torch.nn.{base.__name__}, which may compute something else"
            reasons[path] = f"{kind.__name__} is {reason}"
        elif isinstance(module, nn.modules.lazy.LazyModuleMixin) and "Norm" in kind.__name__:
            reason = "gets its shape in its first call; call replace_norms after that"
            reasons[path] = f"{kind.__name__} {reason}"
        elif "norm" in kind.__name__.lower() and not kind.__module__.startswith("torch.nn.utils."):
            reasons[path] = f"{kind.__name__} is no norm of torch.nn that gradkit has"
    return reasons


def restore_norms(model: _Model) -> _Model:
    """Let PyTorch compute the norms of a model again: undo :func:`replace_norms`.

    For what knows PyTorch's own norms only: ``torch.onnx.export``, ``torch.jit.script``, converters
    and runtimes. Modules stay the same objects, as in :func:`replace_norms`, and so do their
    parameters, buffers, ``training`` and all options. :class:`InvertibleLayerNorm` and
    :class:`InvertibleRMSNorm` become ``torch.nn.LayerNorm`` and ``RMSNorm`` too.
    :class:`AddLayerNorm`, :class:`AddRMSNorm`, :class:`GatedRMSNorm` and subclasses, of which
    PyTorch has none, are left alone.

    Parameters
    ----------
    model : torch.nn.Module
        **Written in place.**

    Returns
    -------
    model
        The same object.

    Raises
    ------
    ValueError
        A norm has a ``scale_offset`` or a ``group``, which PyTorch's have not. Nothing is written.

    Examples
    --------
    >>> import torch, gradkit.torch
    >>> model = gradkit.torch.replace_norms(torch.nn.Sequential(torch.nn.LayerNorm(4)))
    >>> type(gradkit.torch.restore_norms(model)[0])
    <class 'torch.nn.modules.normalization.LayerNorm'>
    """
    ours = {path: m for path, m in model.named_modules() if type(m) in _THEIRS}
    for path, module in ours.items():
        name = f"model.{path}" if path else "model"
        if getattr(module, "group", None) is not None:
            raise ValueError(f"{name} has a group, which PyTorch's norms have not; set it to None")
        if offset := getattr(module, "scale_offset", 0.0):
            raise ValueError(
                f"{name} has scale_offset {offset}, which PyTorch's norms have not; add it to the "
                "weight and set scale_offset to 0 first"
            )
    for module in ours.values():
        module.__class__ = _THEIRS[type(module)]
        for name in ("scale_offset", "group"):
            module.__dict__.pop(name, None)
    return model
