"""Train a small GPT in PyTorch: AMP, DistributedDataParallel, checkpoints, accuracy.

    python examples/train_gpt.py [--steps 400] [--dtype bfloat16] [--checkpoint gpt.pt] [--compare]
    torchrun --nproc-per-node 2 examples/train_gpt.py

The text is Python's own reference, as ``help()`` shows it; nothing is downloaded. The network has
0.4 million parameters and predicts the next character. gradkit is in two lines, ``replace_norms``
and ``clip_grad_norm_``: ``--compare`` trains a second time with PyTorch's. A run that was stopped
goes on if it is started again with the same ``--checkpoint``.

It needs PyTorch and tqdm.
"""

import argparse
import os
import time
from contextlib import nullcontext
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import gradkit.torch

CONTEXT, WIDTH, HEADS, LAYERS = 64, 96, 4, 3
BATCH = 32  # windows of CONTEXT characters per step, over all processes
RATE, WARMUP = 2e-3, 20
MAX_NORM = 1.0
SAVE_EVERY = 100  # steps
TEXT = "\n\n".join(topics.values())
CHARACTERS = sorted({*TEXT})


class Block(nn.Module):
    """Causal attention and a perceptron, each behind a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Of shape (windows, characters, WIDTH), as is the result."""
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """The logits of the next character, at each character of each window."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(CHARACTERS), WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(CHARACTERS))

    def forward(self, text: Tensor) -> Tensor:
        """From (windows, characters) to (windows, characters, logits)."""
        x = self.characters(text) + self.positions.weight[: text.shape[1]]
        return self.head(self.norm(self.blocks(x)))


class Result(NamedTuple):
    """Of a run: the loss of each step, the share of held-out characters predicted, the time."""

    losses: list[float]
    accuracy: float
    seconds: float


def windows(text: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Windows of a batch, the same in each process, and the characters that follow."""
    starts = torch.randint(len(text) - CONTEXT, (BATCH,), generator=torch.manual_seed(seed))
    rows = starts[:, None] + torch.arange(CONTEXT + 1)
    return text[rows[:, :-1]], text[rows[:, 1:]]


def train(options: argparse.Namespace, *, by_gradkit: bool) -> Result:
    """Train, on this process's share of each batch; all processes return the same accuracy."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    device = f"cuda:{rank}" if torch.cuda.is_available() else "cpu"
    index = {character: k for k, character in enumerate(CHARACTERS)}
    text = torch.tensor([index[character] for character in TEXT], device=device)
    text, held_out = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]

    torch.manual_seed(0)
    plain = GPT().to(device)
    if by_gradkit:
        gradkit.torch.replace_norms(plain)  # before DistributedDataParallel and torch.compile
    model = DistributedDataParallel(plain) if size > 1 else plain
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    dtype = getattr(torch, options.dtype)
    kind = device.partition(":")[0]
    amp = nullcontext() if dtype == torch.float32 else torch.autocast(kind, dtype)
    scaler = torch.amp.GradScaler(kind, enabled=dtype == torch.float16)
    parts: dict[str, Any] = {"model": plain, "optimizer": optimizer, "scaler": scaler}
    losses: list[float] = []
    if options.checkpoint and options.checkpoint.exists():
        saved = torch.load(options.checkpoint, map_location=device)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        losses = saved["losses"]

    begun = time.perf_counter()
    steps = range(len(losses), options.steps)
    for step in (bar := tqdm(steps, initial=steps.start, total=options.steps, disable=rank > 0)):
        for group in optimizer.param_groups:  # to 0 along a line, after a warm-up
            group["lr"] = RATE * min((step + 1) / WARMUP, 1 - step / options.steps)
        x, following = (part[rank::size] for part in windows(text, step))
        with amp:
            loss = functional.cross_entropy(model(x).flatten(0, 1).float(), following.flatten())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        # DistributedDataParallel has averaged the gradients: no group is needed.
        clip = gradkit.torch.clip_grad_norm_ if by_gradkit else nn.utils.clip_grad_norm_
        norm = clip(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if size > 1:
            dist.all_reduce(loss := loss.detach())
        losses.append(loss.item() / size)
        bar.set_postfix(loss=f"{losses[-1]:.3f}", norm=f"{float(norm):.2f}")
        if options.checkpoint and rank == 0 and (step + 1) % SAVE_EVERY == 0:
            save(options.checkpoint, losses, parts)
    if options.checkpoint and rank == 0:
        save(options.checkpoint, losses, parts)
    return Result(losses, accuracy(plain, held_out), time.perf_counter() - begun)


def save(path: Path, losses: list[float], parts: dict[str, Any]) -> None:
    """Write a checkpoint beside the old one, and then in its place: a stop leaves one of both."""
    states = {name: part.state_dict() for name, part in parts.items()}
    torch.save({"losses": losses, **states}, new := path.with_suffix(".new"))
    os.replace(new, path)


def accuracy(model: GPT, text: Tensor, batches: int = 20) -> float:
    """The share of characters that the model predicts, on fixed windows."""
    with torch.no_grad():
        right = [
            (model(x).argmax(-1) == following).float().mean().item()
            for x, following in (windows(text, seed) for seed in range(batches))
        ]
    return float(sum(right)) / batches


def main(arguments: list[str] | None = None) -> dict[str, Result]:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--checkpoint", type=Path, help="resume from this file if it exists")
    parser.add_argument("--compare", action="store_true", help="also train with PyTorch's norms")
    options = parser.parse_args(arguments)
    if options.compare and options.checkpoint:
        parser.error("a checkpoint is of one run: leave out --compare or --checkpoint")
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    results = {"gradkit": train(options, by_gradkit=True)}
    if options.compare:
        results["PyTorch"] = train(options, by_gradkit=False)
    if os.environ.get("RANK", "0") == "0":
        for name, (losses, right, seconds) in results.items():
            print(f"{name}: {len(losses)} steps, loss {losses[0]:.3f} -> {losses[-1]:.3f}, "
                  f"{right:.1%} of held-out characters, {seconds:.1f} s")  # fmt: skip
    if dist.is_initialized():
        dist.destroy_process_group()
    return results


if __name__ == "__main__":
    main()
