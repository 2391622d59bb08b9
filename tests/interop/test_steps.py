"""Skipped steps with the optimisers of PyTorch, and verdicts of every framework."""

import copy
import itertools

import numpy as np
import pytest

import gradkit


def test_a_verdict_is_of_the_norms_library(lib):
    """A bool on its device, whatever the library."""
    norm, limit = (lib.make(np.array(value, lib.norm_dtype)) for value in (5.0, 4.0))
    for given, expected in (({}, True), ({"limit": limit}, False), ({"limit": 5.0}, True)):
        verdict = gradkit.step_verdict(norm, **given)
        assert isinstance(verdict, lib.kind)
        assert lib.dtype(verdict) == "bool"
        assert lib.device(verdict) == lib.device(norm)
        assert tuple(verdict.shape) == ()
        assert bool(verdict) is expected
    found = lib.make(np.array(True))
    assert not bool(gradkit.step_verdict(norm, found_inf=found))


def live(model, optimizer):
    """Every tensor of a training: parameters, buffers, moments and step counts."""
    return {"model": model.state_dict(), "moments": list(optimizer.state.values())}


def bits(torch, state):
    flat = [*state["model"].values(), *(t for each in state["moments"] for t in each.values())]
    return [t.detach().clone().reshape(-1).view(torch.uint8) for t in flat]


@pytest.mark.guarantee("A step is skipped")
@pytest.mark.parametrize("amsgrad", [False, True])
def test_adamw_of_pytorch_with_a_copy_that_is_brought_back(torch, amsgrad):
    """A run whose bad steps are skipped has the bits of a run that never saw them."""

    def run(sizes):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).bfloat16()
        with torch.no_grad():
            model[0].bias.copy_(torch.tensor([0.0, -0.0, 1.0, -1.0]))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=amsgrad)
        taken = []
        for size, seed in sizes:
            rng = torch.Generator().manual_seed(seed)
            for p in model.parameters():
                p.grad = size * torch.randn(p.shape, generator=rng).bfloat16()
            norm = gradkit.grad_norm(gradkit.grads_of(model.parameters()))
            verdict = gradkit.step_verdict(norm, limit=50.0)
            if not optimizer.state:  # the first step makes it
                optimizer.step()
                continue
            saved = copy.deepcopy(live(model, optimizer))
            optimizer.step()
            gradkit.keep_if(~verdict, saved, live(model, optimizer))
            taken.append(bool(verdict))
        return bits(torch, live(model, optimizer)), taken

    good = [(1.0, seed) for seed in range(6)]
    odd = [*good[:3], (np.nan, 9), (np.inf, 9), (1e4, 9), *good[3:]]
    found, taken = run(odd)
    expected, _ = run(good)
    assert taken == [True, True, False, False, False, True, True, True]
    assert all(itertools.starmap(torch.equal, zip(found, expected, strict=True)))


@pytest.mark.guarantee("A step is skipped")
@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD"])
def test_a_fused_optimiser_skips_by_a_verdict_and_folds_the_clip_in(torch, name):
    """``found_inf`` from the verdict, ``grad_scale`` from the clip: no pass over gradients."""
    more = {"momentum": 0.9} if name == "SGD" else {}
    make = getattr(torch.optim, name)
    weights = [torch.nn.Parameter(torch.tensor([1.0, -0.0, 2.0])) for _ in range(2)]
    ours, theirs = (make([w], lr=0.1, weight_decay=0.1, fused=True, **more) for w in weights)
    for size in (1.0, 30.0, np.nan, 1e5, 2.0):
        grads = [torch.full((3,), size) for _ in range(2)]
        for weight, grad in zip(weights, grads, strict=True):
            weight.grad = grad
        norm = gradkit.grad_norm(grads[:1])
        verdict = gradkit.step_verdict(norm, limit=100.0)
        before = weights[0].detach().clone(), copy.deepcopy(ours.state[weights[0]])
        ours.found_inf = (~verdict).float()
        ours.grad_scale = (1 / gradkit.clip_coefficient(norm, 5.0)).float()
        ours.step()
        if verdict:
            torch.nn.utils.clip_grad_norm_(weights[1], 5.0)
            theirs.step()
            torch.testing.assert_close(weights[0], weights[1])
        else:
            assert torch.equal(weights[0].view(torch.int32), before[0].view(torch.int32))
            torch.testing.assert_close(ours.state[weights[0]], before[1], rtol=0, atol=0)
    assert bool(verdict)


@pytest.mark.parametrize("name", ["int8", "int16", "uint16", "uint32", "uint64"])
def test_integers_of_every_size_are_copied(torch, name):
    dtype = getattr(torch, name)
    new, old = torch.arange(3).to(dtype), torch.zeros(3).to(dtype)
    gradkit.keep_if(True, [new], [old])
    assert torch.equal(old.view(torch.uint8), new.view(torch.uint8))
