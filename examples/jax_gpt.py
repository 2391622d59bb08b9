"""Train a small GPT in JAX: bfloat16, all devices, checkpoints; the twin of train_gpt.py.

    python examples/jax_gpt.py [--steps 400] [--dtype bfloat16] [--checkpoint gpt.npz] [--compare]

The text is Python's own reference, as ``help()`` shows it; nothing is downloaded. The network has
0.4 million parameters and predicts the next character. Each device takes a part of each batch; on a
CPU, ``XLA_FLAGS=--xla_force_host_platform_device_count=2`` makes two of it. ``--compare`` trains a
second time with layer norms of JAX's own operations and optax's clipping. A run that was stopped
goes on if it is started again with the same ``--checkpoint``.

It needs JAX and optax.
"""

import argparse
import os
import time
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

import gradkit.jax
from gradkit.jax import transforms

CONTEXT, WIDTH, HEADS, LAYERS = 64, 96, 4, 3
BATCH = 32  # windows of CONTEXT characters per step, over all devices
RATE, WARMUP = 2e-3, 20
MAX_NORM = 1.0
SAVE_EVERY = 100  # steps
TEXT = "\n\n".join(topics.values())
CHARACTERS = sorted({*TEXT})


def initialised(key: jax.Array) -> Any:
    """The parameters, float32."""
    drawn = iter(jax.random.split(key, 3 + 4 * LAYERS))

    def matrix(rows: int, columns: int) -> jax.Array:
        return jax.random.normal(next(drawn), (rows, columns)) / rows**0.5

    def norm() -> dict[str, jax.Array]:
        return {"scale": jnp.ones(WIDTH), "bias": jnp.zeros(WIDTH)}

    def block() -> dict[str, Any]:
        weights = {"qkv": matrix(WIDTH, 3 * WIDTH), "out": matrix(WIDTH, WIDTH)}
        weights |= {"up": matrix(WIDTH, 4 * WIDTH), "down": matrix(4 * WIDTH, WIDTH)}
        return weights | {"norm1": norm(), "norm2": norm()}

    return {
        "characters": matrix(len(CHARACTERS), WIDTH),
        "positions": matrix(CONTEXT, WIDTH),
        "blocks": [block() for _ in range(LAYERS)],
        "norm": norm(),
        "head": matrix(WIDTH, len(CHARACTERS)),
    }


def jax_layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """Layer norm in JAX's own operations, for the comparison."""
    wide = x.astype(jnp.float32)
    mean, var = wide.mean(-1, keepdims=True), wide.var(-1, keepdims=True)
    return ((wide - mean) * jax.lax.rsqrt(var + 1e-5) * scale + bias).astype(x.dtype)


def logits(params: Any, text: jax.Array, layer_norm: Any, dtype: Any) -> jax.Array:
    """From (windows, characters) to (windows, characters, logits); products are in ``dtype``."""
    narrow = partial(jax.tree.map, lambda p: p.astype(dtype))
    x = narrow(params["characters"][text] + params["positions"])
    for block in params["blocks"]:
        norm1, norm2 = block["norm1"], block["norm2"]  # float32
        weights = narrow({name: block[name] for name in ("qkv", "out", "up", "down")})
        heads = layer_norm(x, **norm1) @ weights["qkv"]
        q, k, v = jnp.moveaxis(heads.reshape(*x.shape[:2], 3, HEADS, -1), 2, 0)
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        x += attended @ weights["out"]
        x += jax.nn.gelu(layer_norm(x, **norm2) @ weights["up"]) @ weights["down"]
    return (layer_norm(x, **params["norm"]) @ narrow(params["head"])).astype(jnp.float32)


class Result(NamedTuple):
    """Of a run: the loss of each step, the share of held-out characters predicted, the time."""

    losses: list[float]
    accuracy: float
    seconds: float


def windows(text: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Windows of a batch, and the characters that follow."""
    starts = np.random.default_rng(seed).integers(len(text) - CONTEXT, size=(BATCH, 1))
    rows = starts + np.arange(CONTEXT + 1)
    return text[rows[:, :-1]], text[rows[:, 1:]]


def train(options: argparse.Namespace, *, by_gradkit: bool) -> Result:
    """Train on all devices."""
    index = {character: k for k, character in enumerate(CHARACTERS)}
    text = np.array([index[character] for character in TEXT], np.int32)
    text, held_out = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    layer_norm = gradkit.jax.layer_norm if by_gradkit else jax_layer_norm
    clip = transforms.clip_by_global_norm if by_gradkit else optax.clip_by_global_norm
    rate = optax.warmup_cosine_decay_schedule(0.0, RATE, WARMUP, max(options.steps, WARMUP + 1))
    optimizer = optax.chain(clip(MAX_NORM), optax.adamw(rate, weight_decay=0.1))
    predict = partial(logits, layer_norm=layer_norm, dtype=jnp.dtype(options.dtype))

    def loss(params: Any, x: jax.Array, following: jax.Array) -> jax.Array:
        each = optax.softmax_cross_entropy_with_integer_labels(predict(params, x), following)
        return jax.lax.pmean(each.mean(), "data")  # so that gradients are those of all devices

    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    own, same = PartitionSpec("data"), PartitionSpec()
    slopes = jax.shard_map(
        jax.value_and_grad(loss), mesh=mesh, in_specs=(same, own, own), out_specs=(same, same)
    )

    @partial(jax.jit, donate_argnums=0)
    def step(carry: Any, x: jax.Array, following: jax.Array) -> Any:
        params, state = carry
        value, grads = slopes(params, x, following)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    params = initialised(jax.random.key(0))
    carry: Any = params, optimizer.init(params)
    losses: list[float] = []
    if options.checkpoint and options.checkpoint.exists():
        losses, carry = restored(options.checkpoint, carry)
    begun = time.perf_counter()
    for k in range(len(losses), options.steps):
        carry, value = step(carry, *windows(text, k))
        losses.append(float(value))
        done = 30 * (k + 1) // options.steps
        bar = "#" * done + "." * (30 - done)
        print(f"\r{bar} {k + 1}/{options.steps}, loss {losses[-1]:.3f}", end="", flush=True)
        if options.checkpoint and (k + 1) % SAVE_EVERY == 0:
            save(options.checkpoint, losses, carry)
    print()
    if options.checkpoint:
        save(options.checkpoint, losses, carry)
    right = accuracy(jax.jit(predict), carry[0], held_out)
    return Result(losses, right, time.perf_counter() - begun)


def save(path: Path, losses: list[float], carry: Any) -> None:
    """Write a checkpoint beside the old one, and then in its place: a stop leaves one of both."""
    with (new := path.with_suffix(".new")).open("wb") as file:
        np.savez(file, np.array(losses), *jax.tree.leaves(carry))
    os.replace(new, path)


def restored(path: Path, carry: Any) -> tuple[list[float], Any]:
    """A checkpoint's losses, parameters and state, in the structure of new ones."""
    with np.load(path) as saved:
        losses, *leaves = saved.values()
    return losses.tolist(), jax.tree.unflatten(jax.tree.structure(carry), map(jnp.asarray, leaves))


def accuracy(predict: Any, params: Any, text: np.ndarray, batches: int = 20) -> float:
    """The share of characters that the model predicts, on fixed windows."""
    drawn = (windows(text, seed) for seed in range(batches))
    right = [(predict(params, x).argmax(-1) == following).mean() for x, following in drawn]
    return float(sum(right)) / batches


def main(arguments: list[str] | None = None) -> dict[str, Result]:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--checkpoint", type=Path, help="resume from this file if it exists")
    parser.add_argument("--compare", action="store_true", help="also train without gradkit")
    options = parser.parse_args(arguments)
    if options.compare and options.checkpoint:
        parser.error("a checkpoint is of one run: leave out --compare or --checkpoint")
    results = {"gradkit": train(options, by_gradkit=True)}
    if options.compare:
        results["JAX and optax"] = train(options, by_gradkit=False)
    for name, (losses, right, seconds) in results.items():
        print(f"{name}: {len(losses)} steps, loss {losses[0]:.3f} -> {losses[-1]:.3f}, "
              f"{right:.1%} of held-out characters, {seconds:.1f} s")  # fmt: skip
    return results


if __name__ == "__main__":
    main()
