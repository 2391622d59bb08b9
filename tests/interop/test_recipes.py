"""The guide's recipes beside what frameworks have for the same purpose, step by step."""

import copy
import importlib
import re
from pathlib import Path

import numpy as np
import pytest

import gradkit

GUIDE = Path(__file__).parents[2] / "docs/guide.md"


def recipe(name):
    """A function that the guide defines."""
    text = re.search(rf"^def {name}\(.*?(?=\n\n\n)", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    scope = {}
    exec(text.group(), scope)
    return scope[name]


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD"])
def test_a_fused_optimiser_of_pytorch_skips_a_step(torch, name):
    weight = torch.nn.Parameter(torch.ones(3))
    more = {"momentum": 0.9} if name == "SGD" else {}
    optimizer = getattr(torch.optim, name)([weight], lr=0.1, weight_decay=0.1, fused=True, **more)
    optimizer.found_inf = found_inf = torch.zeros(())
    for value in (1.0, np.nan, np.inf, 2.0):
        weight.grad = torch.full((3,), value)
        before = weight.detach().clone(), copy.deepcopy(optimizer.state[weight])
        gradkit.clip_grad_norm(gradkit.grads_of([weight]), 1.0, found_inf=found_inf)
        optimizer.step()
        assert bool(found_inf) == (not np.isfinite(value))
        assert torch.equal(weight, before[0]) == bool(found_inf)
        if found_inf:
            torch.testing.assert_close(optimizer.state[weight], before[1], rtol=0, atol=0)


def test_zeros_move_an_optimiser_of_optax_and_apply_if_finite_does_not(jax):
    optax, transforms = map(importlib.import_module, ("optax", "gradkit.jax.transforms"))
    zeroed = optax.chain(transforms.clip_by_global_norm(1.0, nonfinite="zero"), optax.adamw(0.1))
    left = optax.chain(transforms.clip_by_global_norm(1.0), optax.adamw(0.1))
    for optimizer, moves in ((zeroed, True), (optax.apply_if_finite(left, 10), False)):
        params = jax.numpy.ones(3)
        updates, state = optimizer.update(jax.numpy.ones(3), optimizer.init(params), params)
        params = optax.apply_updates(params, updates)
        updates, after = optimizer.update(jax.numpy.full(3, np.nan), state, params)
        assert bool(updates.any()) == moves
        if not moves:
            same = jax.tree.map(np.array_equal, after.inner_state, state.inner_state)
            assert jax.tree.all(same)


@pytest.mark.parametrize("max_norm", [1e9, 0.5])
def test_a_loss_scale_as_torch_amp_keeps_it(torch, max_norm):
    """Overflows at some steps, so that scales shrink and grow and steps are left out."""
    steps, lr = 40, 0.1
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=3)
    theirs = torch.nn.Linear(6, 3)
    ours = torch.nn.Linear(6, 3)
    ours.load_state_dict(theirs.state_dict())
    optimiser = torch.optim.SGD(theirs.parameters(), lr=lr)
    loss_scale, good_steps = scaler.get_scale(), 0
    next_loss_scale = recipe("next_loss_scale")
    generator = torch.Generator().manual_seed(0)
    skipped = 0
    for step in range(steps):
        x = torch.randn(8, 6, generator=generator)
        if step in (5, 6, 20):
            x[0, 0] = torch.inf if step == 6 else 1e38
        scaler.scale(theirs(x).square().mean()).backward()
        scaler.unscale_(optimiser)
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
        scaler.step(optimiser)
        scaler.update()
        optimiser.zero_grad()

        (loss_scale * ours(x).square().mean()).backward()
        found_inf = torch.zeros((), dtype=torch.float32)
        grads = gradkit.grads_of(ours.parameters())
        gradkit.clip_grad_norm(
            grads, max_norm, scale=1 / loss_scale, nonfinite="zero", found_inf=found_inf
        )
        with torch.no_grad():
            for parameter, grad in zip(ours.parameters(), grads, strict=True):
                parameter -= lr * grad  # zeros, where the step is left out
                parameter.grad = None
        skipped += int(found_inf)
        loss_scale, good_steps = next_loss_scale(loss_scale, good_steps, found_inf, interval=3)
        assert loss_scale == scaler.get_scale()
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)
    assert 3 <= skipped < steps / 2


@pytest.mark.parametrize("max_norm", [1.0, 5.0, 5.0000005, 6.0])
def test_pytorchs_own_formula(torch, max_norm):
    """Also for norms at the limit and just below it, which PyTorch clips a little."""
    theirs = [torch.nn.Parameter(torch.zeros(2, dtype=torch.float64)) for _ in range(2)]
    for parameter, values in zip(theirs, ([3.0, 0.0], [0.0, 4.0]), strict=True):
        parameter.grad = torch.tensor(values, dtype=torch.float64)
    grads = [parameter.grad.clone() for parameter in theirs]
    gradkit.clip_grad_norm(grads, max_norm, eps_mode="add")
    torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    for mine, parameter in zip(grads, theirs, strict=True):
        torch.testing.assert_close(mine, parameter.grad, rtol=1e-15, atol=0)


def test_functional_twins_of_jax(jax):
    """Limits and scales as JAX arrays; a flag is the finiteness of the largest magnitude."""
    grads = {"w": jax.numpy.asarray([3.0, 4.0])}
    limit, scale = jax.numpy.asarray(5.0), jax.numpy.asarray(2.0)
    clipped, norm = gradkit.clip_by_global_norm(grads, limit, scale=scale)
    assert float(norm) == 10
    np.testing.assert_array_equal(clipped["w"], [3, 4])
    with pytest.raises(TypeError, match=r"found_inf is a JAX array.*grad_norm\(grads, inf\)"):
        gradkit.grad_norm(grads, found_inf=jax.numpy.asarray(False))
    huge = {"w": jax.numpy.full(100, 3e38)}
    assert not np.isfinite(gradkit.grad_norm(huge))  # JAX narrows it to float32
    assert np.isfinite(gradkit.grad_norm(huge, np.inf))
