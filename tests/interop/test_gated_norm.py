"""Gated RMS norm beside the formulas of those who have one, in plain PyTorch."""

import pytest
import torch

import gradkit
import gradkit.torch

functional = torch.nn.functional

EPS = 1e-5


def values(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def mamba(x, gate, weight, *, before, group_size=None, activation=functional.silu):
    """``rms_norm_ref`` of Mamba-2: the gate first or last, and statistics of groups in a row."""
    if not before:
        x = x * activation(gate)
    parts = x.unflatten(-1, (-1, group_size or x.shape[-1]))
    y = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + EPS)
    y = y.flatten(-2) * weight
    return y * activation(gate) if before else y


def qwen3_next(x, gate, weight):
    """``Qwen3NextRMSNormGated`` of Hugging Face Transformers, which rounds before the weight."""
    dtype = x.dtype
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    y = weight * wide.to(dtype)
    return (y * functional.silu(gate.float())).to(dtype)


def check(ours, theirs, *given):
    given = [t.clone().requires_grad_() for t in given]
    found, expected = (f(*given) for f in (ours, theirs))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    weights = values(*found.shape, seed=7)
    slopes = (torch.autograd.grad((y * weights).sum(), given) for y in (found, expected))
    for got, ref in zip(*slopes, strict=True):
        torch.testing.assert_close(got, ref, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("activation", ["silu", "swish", "sigmoid"])
def test_the_formula_of_mamba_and_flash_linear_attention(activation, before):
    """Values and gradients; FLA's ``FusedRMSNormGated`` has both activations, norm first."""

    def theirs(x, gate, weight):
        own = torch.sigmoid if activation == "sigmoid" else functional.silu
        return mamba(x, gate, weight, before=before, activation=own)

    def ours(x, gate, weight):
        how = {"activation": activation, "norm_before_gate": before}
        return gradkit.torch.gated_rms_norm(x, gate, (16,), weight, EPS, **how)

    check(ours, theirs, values(3, 5, 16), values(3, 5, 16, seed=1), values(16, seed=2))


@pytest.mark.parametrize("before", [True, False])
def test_groups_of_mamba(before):
    """A weight of the whole row is multiplied with what the norm of groups gives."""

    def ours(x, gate, weight):
        parts = (t.unflatten(-1, (4, -1)) for t in (x, gate))
        y = gradkit.torch.gated_rms_norm(*parts, (8,), eps=EPS, norm_before_gate=before)
        return y.flatten(-2) * weight

    def theirs(x, gate, weight):
        return mamba(x, gate, weight, before=before, group_size=8)

    check(ours, theirs, values(6, 32), values(6, 32, seed=1), values(32, seed=2))


def test_the_formula_of_qwen3_next():
    """To what it rounds between; gradkit rounds once."""
    given = [values(9, 64, seed=k, dtype=torch.bfloat16) for k in range(2)]
    weight = 1 + values(64, seed=2, dtype=torch.bfloat16) / 4
    found = gradkit.torch.GatedRMSNorm(64, EPS, dtype=torch.bfloat16)
    with torch.no_grad():
        found.weight.copy_(weight)
        torch.testing.assert_close(
            found(*given), qwen3_next(*given, weight), rtol=2**-6, atol=1e-30
        )
