"""Training steps of a small GPT with PyTorch's norms and with gradkit's.

``python -m benchmarks.gpt`` prints milliseconds of a core for both passes of four blocks, 8 samples
of 64 x 128, eagerly and by ``torch.compile``, which needs a C++ compiler. Other programs can only
add to a time, so the best of many rounds counts.
"""

import copy
import time
from collections.abc import Callable

import torch

import gradkit.torch

ROUNDS = 50


class Block(torch.nn.Module):
    """A block of a transformer, normalised before attention and before its MLP."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of shape (samples, length, width)."""
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norms[1](x))))


def main() -> None:
    """Print a line for each way."""
    torch.set_num_threads(1)
    theirs = torch.nn.Sequential(*(Block(128, 4) for _ in range(4)), torch.nn.LayerNorm(128))
    swapped = gradkit.torch.replace_norms(copy.deepcopy(theirs))
    x = torch.randn(8, 64, 128)

    def step(model: Callable[..., torch.Tensor]) -> Callable[[], object]:
        return lambda: model(x).square().mean().backward()

    calls = {"torch": step(theirs), "gradkit.torch": step(swapped)}
    calls |= {f"{name}, compiled": step(torch.compile(model))
              for name, model in (("torch", theirs), ("gradkit.torch", swapped))}  # fmt: skip
    times = dict.fromkeys(calls, float("inf"))
    for _ in range(ROUNDS):
        for name, call in calls.items():
            start = time.process_time()
            call()
            times[name] = min(times[name], (time.process_time() - start) * 1e3)
    for name, milliseconds in times.items():
        print(f"{name:24}{milliseconds:8.2f} ms")


if __name__ == "__main__":
    main()
