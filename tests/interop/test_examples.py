"""Every example runs on the CPU, and learns."""

import re
import runpy
from pathlib import Path

import pytest

from .libraries import framework

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"
EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name, *needed):
    for module in needed:
        framework(module)
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        ("torch_training_loop", ("torch",)),
        ("jax_training_step", ("jax",)),
        ("cupy_training_loop", ()),
        ("thinc_model", ("thinc",)),
    ],
)
def test_a_training_loop_learns(name, needed):
    losses = load(name, *needed)(steps=60)
    assert len(losses) == 60
    assert losses[-1] < 0.25 * losses[0]


def test_the_torch_loop_takes_the_steps_of_pytorchs_own_clipping(torch, monkeypatch):
    """The same losses, but for the 1e-6 that PyTorch adds to the norm."""
    import gradkit

    main = load("torch_training_loop")
    ours = main(steps=20, max_norm=0.1)

    def theirs(grads, max_norm):
        holders = [torch.zeros_like(g).requires_grad_() for g in grads]
        for holder, grad in zip(holders, grads, strict=True):
            holder.grad = grad
        return torch.nn.utils.clip_grad_norm_(holders, max_norm)

    monkeypatch.setattr(gradkit, "clip_grad_norm", theirs)
    assert main(steps=20, max_norm=0.1) == pytest.approx(ours, rel=1e-4)


@pytest.mark.usefixtures("torch")
def test_autograd_functions_pass_gradcheck():
    assert load("torch_autograd_norms")()


def test_autograd_functions_refuse_to_be_differentiated_twice(torch):
    names = runpy.run_path(str(EXAMPLES / "torch_autograd_norms.py"))
    x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    y = names["RMSNorm"].apply(x, torch.ones(3, dtype=torch.float64), 1e-6)
    (dx,) = torch.autograd.grad((y**2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_the_code_of_the_page_runs():
    blocks = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        framework(re.search(r"import (\w+)", block)[1])
        names = {}
        exec(block, names)
        grads = names.get("grads") or names["gradkit"].grads_of(names["model"].parameters())
        assert float(names["norm"]) > 1
        assert float(names["gradkit"].grad_norm(grads)) == pytest.approx(1, rel=1e-5)
