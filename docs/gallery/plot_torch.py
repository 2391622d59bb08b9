r"""
Norms of PyTorch's 16-bit gradients
===================================

gradkit accepts PyTorch's tensors without a copy, and returns tensors.
``torch.nn.utils.get_total_norm`` returns a norm in the gradients' dtype: for float16 gradients it
is infinite above 65,504, and for bfloat16 gradients it has 8 bits. :func:`gradkit.grad_norm`
returns float64.
"""

import matplotlib.pyplot as plt
import torch

import gradkit

torch.manual_seed(0)
magnitudes = 10.0 ** torch.arange(-7, 4.1, 0.25)
parts = [torch.randn(1000) for _ in range(64)]


def error(norm, grads):
    """Relative to the norm in float64; the least that the plot shows is 1e-17."""
    exact = torch.linalg.vector_norm(torch.cat(grads).double())
    off = abs(float(norm) / float(exact) - 1)
    return max(off, 1e-17) if off < 1 else 1.0


# %%
# 64 gradients of 1000 elements, of each magnitude that float16 has.

figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
for dtype, colour in ((torch.float16, "C1"), (torch.bfloat16, "C2")):
    lists = [[(part * magnitude).to(dtype) for part in parts] for magnitude in magnitudes]
    name = str(dtype).removeprefix("torch.")
    theirs = [error(torch.nn.utils.get_total_norm(grads), grads) for grads in lists]
    ours = [error(gradkit.grad_norm(grads), grads) for grads in lists]
    axes.loglog(magnitudes, theirs, "--", color=colour, label=f"PyTorch, {name}", linewidth=2)
    axes.loglog(
        magnitudes,
        ours,
        color=colour if dtype is torch.bfloat16 else "C0",
        label=f"gradkit, {name}",
        linewidth=2,
    )
axes.set_xlabel("standard deviation of the gradients' elements")
axes.set_ylabel("relative error of the norm")
axes.legend(frameon=False, loc="center left")
axes.set_title("Total norm of 64,000 elements")

# %%
# In a training loop one line changes; ``examples/torch_training_loop.py`` is a complete program::
#
#     # Before: norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
#     norm = gradkit.clip_grad_norm(gradkit.grads_of(model.parameters()), max_norm)

assert max(ours) < 1e-6 < max(theirs)
