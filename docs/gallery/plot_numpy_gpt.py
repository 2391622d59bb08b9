"""
A GPT on plain arrays
=====================

A GPT of 0.4 million parameters learns to write Python's reference, a character at a time.

::

    python examples/numpy_gpt.py [--steps 400] [--checkpoint gpt.npz] [--plot]

Everything is in one file: the forward and the backward pass, gradients of micro-batches added up,
clipping, AdamW, running averages of the parameters, checkpoints, and at the end a text that the
averages write. If PyTorch is installed, its time for the same steps is measured too. The text is
what ``help()`` shows; nothing is downloaded. train_gpt.py and jax_gpt.py use a framework.

A run that was stopped goes on if it is started again with the same ``--checkpoint``, and ends with
the bits that it would have had.

In shapes, B is windows of text, T characters of a window, N = B * T rows, V different characters,
and W the width.
"""

import argparse
import math
import os
import platform
import re
import time
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np  # on the host: draws batches and the first parameters
import numpy as xp  # computes all the rest; or: import cupy as xp
from tqdm import tqdm

import gradkit

CONTEXT, WIDTH, HEADS, LAYERS = 64, 96, 4, 3
BATCH, MICRO_BATCH = 32, 8  # windows of a step, and of a forward and backward pass
RATE, WARMUP = 4e-3, 20
BETA1, BETA2, ADAM_EPS, WEIGHT_DECAY = 0.9, 0.99, 1e-8, 0.1
MAX_NORM = 1.0
NORMS = "scale", "bias"  # parameters without weight decay
AVERAGED = 0.98  # decay of the running averages
SAVE_EVERY = 100  # steps
TEXT = "\n\n".join(topics.values())
CHARACTERS = sorted({*TEXT})

Array = Any  # of xp
Arrays = dict[str, Array]


def initialised(seed: int = 0, dtype: str = "float32") -> Arrays:
    """The parameters by kind; those of all layers are one array."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> Array:
        return xp.asarray(rng.normal(0, 0.05, shape), dtype=dtype)

    return {
        "characters": normal(len(CHARACTERS), WIDTH),  # of what comes in and what goes out
        "positions": normal(CONTEXT, WIDTH),
        "scale": xp.ones((2 * LAYERS + 1, WIDTH), dtype),  # a norm before each sublayer, and one
        "bias": xp.zeros((2 * LAYERS + 1, WIDTH), dtype),  # after the last
        "qkv": normal(LAYERS, WIDTH, 3 * WIDTH),
        "out": normal(LAYERS, WIDTH, WIDTH),
        "up": normal(LAYERS, WIDTH, 4 * WIDTH),
        "down": normal(LAYERS, 4 * WIDTH, WIDTH),
    }


# %%
# The network
# -----------
# Each function returns a result and the function of its backward pass, which takes the result's
# gradient, writes the parameters' gradients into a dict like theirs, and returns the input's.


def gpt(p: Arrays, text: Array) -> tuple[Array, Callable[[Array], Arrays]]:
    """Return the logits of each next character, (N, V), for characters (B, T)."""
    added = p["characters"][text.ravel()]
    stream = xp.tile(p["positions"][: text.shape[1]], (len(text), 1))
    backwards = []
    for layer in range(LAYERS):
        for k, sublayer in ((2 * layer, attention), (2 * layer + 1, perceptron)):
            n, stream, norm_backward = add_norm(p, k, added, stream)
            added, sublayer_backward = sublayer(p, layer, n)
            backwards.append((norm_backward, sublayer_backward))
    n, _, last_backward = add_norm(p, 2 * LAYERS, added, stream)

    def backward(d_logits: Array) -> Arrays:
        g = {name: xp.empty_like(value) for name, value in p.items()}
        d_stream = last_backward(g, d_logits @ p["characters"], None)
        for norm_backward, sublayer_backward in reversed(backwards):
            d_n = sublayer_backward(g, d_stream)
            d_stream = norm_backward(g, d_n, d_stream)
        g["positions"] = d_stream.reshape(*text.shape, WIDTH).sum(axis=0)
        g["characters"] = d_logits.T @ n + one_hot(text, d_stream.dtype).T @ d_stream
        return g

    return n @ p["characters"].T, backward


def add_norm(p: Arrays, k: int, added: Array, stream: Array) -> tuple[Array, Array, Any]:
    """Add a sublayer's output to the stream; return the norm of the sum, and the sum."""
    n, stream, mean, inv_std = gradkit.add_layer_norm(added, stream, p["scale"][k], p["bias"][k])

    def backward(g: Arrays, d_n: Array, d_stream: Array | None) -> Array:
        # The gradient through the norm, plus the one along the stream: that of both summands.
        d_stream, g["scale"][k], g["bias"][k] = gradkit.layer_norm_grad(
            d_n, stream, p["scale"][k], mean, inv_std, ds=d_stream
        )
        return d_stream

    return n, stream, backward


def attention(p: Arrays, layer: int, n: Array) -> tuple[Array, Any]:
    """Let each character read those up to it: softmax(q k^T / sqrt(W / HEADS)) v, in each head."""
    t = min(CONTEXT, len(n))
    qkv = (n @ p["qkv"][layer]).reshape(-1, t, 3, HEADS, WIDTH // HEADS)
    q, k, v = heads_of(qkv)
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(WIDTH // HEADS)
    scores = xp.where(xp.tri(t, dtype=bool), scores, -math.inf)
    weights = xp.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed = (weights @ v).swapaxes(1, 2).reshape(len(n), WIDTH)

    def backward(g: Arrays, d_out: Array) -> Array:
        g["out"][layer] = mixed.T @ d_out
        d_mixed = (d_out @ p["out"][layer].T).reshape(-1, t, HEADS, WIDTH // HEADS).swapaxes(1, 2)
        d_weights = d_mixed @ v.swapaxes(-1, -2)
        d_scores = weights * (d_weights - (d_weights * weights).sum(axis=-1, keepdims=True))
        d_scores /= math.sqrt(WIDTH // HEADS)
        d_qkv = xp.empty_like(qkv)
        d_q, d_k, d_v = heads_of(d_qkv)
        d_q[...] = d_scores @ k
        d_k[...] = d_scores.swapaxes(-1, -2) @ q
        d_v[...] = weights.swapaxes(-1, -2) @ d_mixed
        d_qkv = d_qkv.reshape(len(n), 3 * WIDTH)
        g["qkv"][layer] = n.T @ d_qkv
        return d_qkv @ p["qkv"][layer].T

    return mixed @ p["out"][layer], backward


def heads_of(qkv: Array) -> list[Array]:
    """Queries, keys and values, each (B, HEADS, T, W / HEADS): views of (B, T, 3, HEADS, ...)."""
    return [qkv[:, :, part].swapaxes(1, 2) for part in range(3)]


def perceptron(p: Arrays, layer: int, n: Array) -> tuple[Array, Any]:
    """Apply GELU between two products: u / 2 * (1 + tanh(c * (u + a * u^3))), as GPT-2 does."""
    a, c = 0.044715, math.sqrt(2 / math.pi)
    u = n @ p["up"][layer]
    tanh = xp.tanh(c * (u + a * u * u * u))
    gelu = 0.5 * u * (1 + tanh)

    def backward(g: Arrays, d_out: Array) -> Array:
        g["down"][layer] = gelu.T @ d_out
        slope = 0.5 * (1 + tanh + u * (1 - tanh * tanh) * c * (1 + 3 * a * u * u))
        d_u = d_out @ p["down"][layer].T * slope
        g["up"][layer] = n.T @ d_u
        return d_u @ p["up"][layer].T

    return gelu @ p["down"][layer], backward


def loss_and_grads(p: Arrays, text: Array, following: Array) -> tuple[Array, Arrays]:
    """The cross-entropy, summed over the characters of some windows, and its gradients."""
    logits, backward = gpt(p, text)
    logits -= logits.max(axis=1, keepdims=True)
    log_p = logits - xp.log(xp.exp(logits).sum(axis=1, keepdims=True))
    right = one_hot(following, log_p.dtype)
    return -(right * log_p).sum(), backward(xp.exp(log_p) - right)


def one_hot(text: Array, dtype: Any) -> Array:
    """Rows (N, V) that have a 1 for their character."""
    return xp.eye(len(CHARACTERS), dtype=dtype)[text.ravel()]


# %%
# Training
# --------


def windows(text: Array, seed: int) -> tuple[Array, Array]:
    """Windows of a batch, (BATCH, CONTEXT), and the characters that follow each of theirs."""
    starts = np.random.default_rng(seed).integers(len(text) - CONTEXT, size=BATCH)
    rows = text[xp.asarray(starts[:, None] + np.arange(CONTEXT + 1))]
    return rows[:, :-1], rows[:, 1:]


def encoded() -> Array:
    """All of the text, as indices of characters."""
    index = {character: k for k, character in enumerate(CHARACTERS)}
    return xp.asarray([index[character] for character in TEXT])


def rate(step: int, steps: int) -> float:
    """The learning rate: to 0 along a line, after a warm-up."""
    return RATE * min((step + 1) / WARMUP, 1 - step / steps)


class Training:
    """Parameters, what AdamW keeps of their gradients, and their running averages."""

    def __init__(self, params: Arrays) -> None:
        self.params = params
        self.averages = {name: value.copy() for name, value in params.items()}
        self.first = {name: xp.zeros_like(value) for name, value in params.items()}
        self.second = {name: xp.zeros_like(value) for name, value in params.items()}
        self.grads = {name: xp.empty_like(value) for name, value in params.items()}
        self.losses: list[float] = []

    def step(self, text: Array, following: Array, learning_rate: float) -> Array:
        """Take a step; return the norm of the mean gradient, before clipping."""
        loss = 0.0
        for start in range(0, len(text), MICRO_BATCH):
            part = slice(start, start + MICRO_BATCH)
            share, grads = loss_and_grads(self.params, text[part], following[part])
            gradkit.accumulate_grads(self.grads, grads, overwrite=start == 0)
            loss = loss + share
        # The sum becomes the mean in the pass that clips.
        norm = gradkit.clip_grad_norm(self.grads, MAX_NORM, scale=1 / text.size)
        self.losses.append(float(loss) / text.size)
        self.adamw(len(self.losses), learning_rate)
        decay = min(AVERAGED, len(self.losses) / (len(self.losses) + 10))  # forgets the start
        gradkit.ema_update(self.averages, self.params, decay)
        return norm

    def adamw(self, step: int, learning_rate: float) -> None:
        """Take AdamW's step in two calls: norms have no weight decay."""
        others = [name for name in self.params if name not in NORMS]
        trees = self.params, self.grads, self.first, self.second
        for names, decay in ((NORMS, 0.0), (others, WEIGHT_DECAY)):
            params, grads, first, second = ([of[name] for name in names] for of in trees)
            gradkit.adamw_update(
                *(params, grads, first, second, step),
                lr=learning_rate,
                betas=(BETA1, BETA2),
                eps=ADAM_EPS,
                weight_decay=decay,
            )

    def _parts(self) -> dict[str, Arrays]:
        return {name: getattr(self, name) for name in ("params", "averages", "first", "second")}

    def save(self, path: Path) -> None:
        """Write a checkpoint beside the old one, and then in its place: a stop leaves one."""
        arrays = {
            f"{of}.{name}": a for of, part in self._parts().items() for name, a in part.items()
        }
        with (new := path.with_suffix(".new")).open("wb") as file:
            xp.savez(file, losses=xp.asarray(self.losses), **arrays)
        os.replace(new, path)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint."""
        with xp.load(path) as saved:
            self.losses = saved["losses"].tolist()
            for of, part in self._parts().items():
                for name, array in part.items():
                    array[...] = saved[f"{of}.{name}"]


def train(text: Array, steps: int, checkpoint: Path | None = None) -> tuple[Training, float]:
    """Train, from a checkpoint if there is one; also return how many tokens a second."""
    training = Training(initialised())
    if checkpoint and checkpoint.exists():
        training.load(checkpoint)
    todo = range(len(training.losses), steps)
    begun = time.perf_counter()
    with tqdm(todo, initial=todo.start, total=steps, disable=None) as bar:
        for step in bar:
            norm = training.step(*windows(text, step), rate(step, steps))
            bar.set_postfix(loss=f"{training.losses[-1]:.3f}", norm=f"{float(norm):.2f}")
            if checkpoint and (step + 1) % SAVE_EVERY == 0:
                training.save(checkpoint)
    seconds = time.perf_counter() - begun
    if checkpoint:
        training.save(checkpoint)
    return training, len(todo) * BATCH * CONTEXT / seconds


def written(p: Arrays, start: str, length: int, seed: int = 0) -> str:
    """Continue a text, a character at a time."""
    rng, text = np.random.default_rng(seed), [CHARACTERS.index(character) for character in start]
    for _ in range(length):
        logits, _ = gpt(p, xp.asarray([text[-CONTEXT:]]))
        # The largest of the logits plus Gumbel noise is a draw from their softmax.
        noise = xp.asarray(rng.gumbel(size=len(CHARACTERS)))
        text.append(int((logits[-1] / 0.8 + noise).argmax()))
    return "".join(CHARACTERS[k] for k in text)


# %%
# AdamW as expressions
# --------------------
# ``Training.adamw`` without gradkit: each operation makes an array, and reads it again.


def adamw_by_expressions(training: Training, step: int, learning_rate: float) -> None:
    """The same step."""
    for name, param in training.params.items():
        grad, first, second = training.grads[name], training.first[name], training.second[name]
        first += (1 - BETA1) * (grad - first)
        second += (1 - BETA2) * (grad * grad - second)
        if name not in NORMS:
            param *= 1 - learning_rate * WEIGHT_DECAY
        mean, square = first / (1 - BETA1**step), second / (1 - BETA2**step)
        param -= learning_rate * mean / (xp.sqrt(square) + ADAM_EPS)


def milliseconds(adamw: Callable[[Training, int, float], None], training: Training) -> float:
    """The median time of a step that moves no parameter."""
    times = []
    for _ in range(21):
        begun = time.perf_counter()
        adamw(training, len(training.losses) + 1, 0.0)
        float(training.params["scale"][0, 0])  # waits for a device
        times.append(time.perf_counter() - begun)
    return 1000 * sorted(times)[10]


# %%
# The same in PyTorch
# -------------------


def torch_loss(p: dict[str, Any], text: Any, following: Any) -> Any:
    """The same loss, whose backward pass is PyTorch's own."""
    from torch.nn import functional as F  # noqa: N812

    b, t = text.shape
    s = p["characters"][text] + p["positions"]
    for layer in range(LAYERS):
        n = F.layer_norm(s, (WIDTH,), p["scale"][2 * layer], p["bias"][2 * layer])
        heads = (n @ p["qkv"][layer]).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        s = s + mixed.transpose(1, 2).reshape(b, t, WIDTH) @ p["out"][layer]
        n = F.layer_norm(s, (WIDTH,), p["scale"][2 * layer + 1], p["bias"][2 * layer + 1])
        s = s + F.gelu(n @ p["up"][layer], approximate="tanh") @ p["down"][layer]
    n = F.layer_norm(s, (WIDTH,), p["scale"][-1], p["bias"][-1])
    logits = (n @ p["characters"].T).flatten(0, 1)
    return F.cross_entropy(logits, following.flatten(), reduction="sum")


def torch_speed(steps: int) -> float:
    """Tokens a second of the same steps in PyTorch, on as many cores."""
    import torch

    text, device = encoded(), "cpu" if xp is np else "cuda"
    p = {name: torch.tensor(value.tolist(), device=device) for name, value in initialised().items()}
    for value in p.values():
        value.requires_grad_()
    optimizer = torch.optim.AdamW(
        p.values(), RATE, betas=(BETA1, BETA2), weight_decay=WEIGHT_DECAY, fused=True
    )
    averages = [value.detach().clone() for value in p.values()]
    begun = 0.0
    for step in range(-3, steps):
        if step == 0:  # the three before it warmed up
            begun = time.perf_counter()
        batch = [torch.tensor(part.tolist(), device=device) for part in windows(text, step + 3)]
        optimizer.zero_grad()
        total = 0.0
        for x, following in zip(*(part.split(MICRO_BATCH) for part in batch), strict=True):
            loss = torch_loss(p, x, following) / batch[0].numel()
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(p.values(), MAX_NORM)
        optimizer.step()
        for average, value in zip(averages, p.values(), strict=True):
            average.lerp_(value.detach(), 1 - AVERAGED)
    return steps * BATCH * CONTEXT / (time.perf_counter() - begun)


# %%
# A run
# -----
# This page was built with ``--steps 40 --plot``: too few steps for words. The output names the
# machine.


def machine() -> str:
    """The processor's name, if the system tells, and the number of its cores."""
    file = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", file.read_text()) if file.exists() else []
    return f"{[*names, platform.machine()][0]}, {os.cpu_count()} cores"


def plot(losses: list[float]) -> None:
    """Show the loss of each step."""
    import matplotlib.pyplot as plt

    _, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    axes.plot(losses)
    axes.set(xlabel="step", ylabel="loss, nats a character", title="A GPT on plain arrays")
    plt.show()


def main(arguments: list[str] | None = None) -> Training:
    """Train and report as the command line says."""
    parser = argparse.ArgumentParser(description="Train a GPT on plain arrays.")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--checkpoint", type=Path, help="resume from this file if it exists")
    parser.add_argument("--plot", action="store_true", help="show the losses")
    options = parser.parse_args(arguments)
    training, speed = train(encoded(), options.steps, options.checkpoint)
    losses = training.losses
    print(f"{len(losses)} steps, loss {losses[0]:.3f} -> {losses[-1]:.3f} nats a token")
    print(f"On {machine()}:")
    print(f"gradkit and {xp.__name__}: {speed:,.0f} tokens/s")
    ours, theirs = (milliseconds(f, training) for f in (Training.adamw, adamw_by_expressions))
    print(f"AdamW: {ours:.2f} ms a step, as expressions {theirs:.2f} ms")
    try:
        print(f"PyTorch: {torch_speed(min(options.steps, 20)):,.0f} tokens/s")
    except ModuleNotFoundError:
        print("PyTorch is not installed")
    print(written(training.averages, "The ", 300))
    if options.plot:
        plot(losses)
    return training


if __name__ == "__main__":
    main()
