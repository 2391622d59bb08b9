"""gradkit's norms as ``torch.autograd.Function``: RMS norm, and layer norm that saves no input.

``InvertibleLayerNorm`` saves its output, which the next layer keeps anyway, instead of its
input; the backward pass recomputes the normalised input. No element of its scale may be 0.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

import gradkit


class RMSNorm(torch.autograd.Function):
    """``y = x / rms(x) * scale`` over the last dimension."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
        """Save the input."""
        y, inv_std = gradkit.rms_norm(x, scale, eps=eps)
        ctx.save_for_backward(x, scale, inv_std)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """dx, dscale, and nothing for eps."""
        return *gradkit.rms_norm_grad(dy, *ctx.saved_tensors), None


class InvertibleLayerNorm(torch.autograd.Function):
    """Layer norm over the last dimension; its backward pass reads the output."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Save the output."""
        y, _, inv_std = gradkit.layer_norm(x, scale, bias, eps=eps)
        ctx.save_for_backward(y, scale, bias, inv_std)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """dx, dscale, dbias, and nothing for eps."""
        return *gradkit.invertible_layer_norm_grad(dy, *ctx.saved_tensors), None


def main() -> bool:
    """Check both against finite differences, and the layer norm against PyTorch's own."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        values = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return values.requires_grad_()

    x, bias = random(5, 7), random(7)
    scale = (random(7).detach().abs() + 0.5).requires_grad_()
    checked = torch.autograd.gradcheck(RMSNorm.apply, (x, scale, 1e-6))
    checked &= torch.autograd.gradcheck(InvertibleLayerNorm.apply, (x, scale, bias, 1e-5))

    dy = random(5, 7).detach()
    ours = torch.autograd.grad(InvertibleLayerNorm.apply(x, scale, bias, 1e-5), (x, scale), dy)
    reference = torch.nn.functional.layer_norm(x, (7,), scale, bias)
    theirs = torch.autograd.grad(reference, (x, scale), dy)
    error = max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))
    print(f"gradcheck: {checked}; largest difference from torch's layer norm: {error:.1e}")
    return bool(checked and error < 1e-12)


if __name__ == "__main__":
    main()
