"""Train a transformer block with a convolutional stem on handwritten digits, with plain arrays.

    python examples/train_transformer.py [--backend numpy|cupy]

The norms of today's models, in NumPy's own terms and without a framework:

- group norm behind a convolution, channels last;
- RMS norm with a residual: one call adds a sublayer's output to the stream and normalises it, and
  one call gives the gradient of both;
- scales that are stored as their difference from 1 (``scale_offset=1``);
- QK-norm: queries and keys are normalised where they lie in a fused projection, head by head.

The gradients of a step's micro-batches are added up and clipped by gradkit; AdamW is written out.
The data and their split are those of train_digits.py.
"""

import argparse
import math
import sys
import time
from dataclasses import dataclass, field
from types import ModuleType

import numpy as np
from tqdm import tqdm
from train_digits import (
    BATCH,
    CLASSES,
    Array,
    Arrays,
    Digits,
    accuracy,
    array_module,
    batches,
    log_softmax,
)

import gradkit

PIXELS = 8  # in each direction
CHANNELS, GROUPS = 32, 8  # of the convolution
PATCH = 2  # pixels in each direction that become one token
TOKENS = (PIXELS // PATCH) ** 2
WIDTH, HEADS = 64, 4
HEAD = WIDTH // HEADS
HIDDEN = 2 * WIDTH
MICRO_BATCH = 64
LEARNING_RATE = 3e-3  # at the start; decays to 0 along half a cosine
BETA1, BETA2, ADAM_EPS, WEIGHT_DECAY = 0.9, 0.99, 1e-8, 0.05
MAX_NORM = 1.0


# --- the network -------------------------------------------------------------------------------


@dataclass
class Network:
    """Parameters, and the forward and backward passes.

    Arrays of activations are (digits, tokens, features); the stream ``s`` is what residual
    connections add to, and sublayers read its norm::

        s0 = patches(relu(group_norm(conv(x)))) @ embedding + positions
        s1 = s0 + attention(rms_norm(s0))
        s2 = s1 + silu(rms_norm(s1) @ up) @ down
        logits = mean over tokens of rms_norm(s2) @ out + bias
    """

    xp: ModuleType  # numpy or cupy
    params: Arrays

    @classmethod
    def initialised(cls, xp: ModuleType, seed: int, dtype: str = "float32") -> "Network":
        """A network with random weights, the same on every backend."""
        rng = np.random.default_rng(seed)

        def weights(inputs: int, *outputs: int) -> Array:
            return xp.asarray(rng.normal(0, inputs**-0.5, (inputs, *outputs)), dtype=dtype)

        def zeros(*shape: int) -> Array:
            return xp.zeros(shape, dtype)

        return cls(
            xp,
            {
                "conv": weights(9, CHANNELS),
                "conv_scale": xp.ones(CHANNELS, dtype),
                "conv_bias": zeros(CHANNELS),
                "embedding": weights(PATCH**2 * CHANNELS, WIDTH),
                "positions": xp.asarray(rng.normal(0, 0.1, (TOKENS, WIDTH)), dtype=dtype),
                "attention_scale": zeros(WIDTH),  # scales of RMS norm: the difference from 1
                "qkv": weights(WIDTH, 3 * WIDTH),
                "q_scale": zeros(HEAD),
                "k_scale": zeros(HEAD),
                "attention_out": weights(WIDTH, WIDTH),
                "mlp_scale": zeros(WIDTH),
                "up": weights(WIDTH, HIDDEN),
                "down": weights(HIDDEN, WIDTH),
                "final_scale": zeros(WIDTH),
                "out": weights(WIDTH, CLASSES),
                "bias": zeros(CLASSES),
            },
        )

    def loss_and_grads(self, x: Array, targets: Array, batch: int) -> tuple[Array, Arrays]:
        """The loss of a micro-batch and its gradients, as shares of a mean over ``batch``."""
        p, xp = self.params, self.xp
        saved = self._forward(x)
        logits = saved["mean"] @ p["out"] + p["bias"]
        log_p = log_softmax(xp, logits)
        loss = -(targets * log_p).sum() / batch
        return loss, self._backward(saved, (xp.exp(log_p) - targets) / batch)

    def predict(self, x: Array) -> Array:
        """The most likely class of each digit."""
        return (self._forward(x)["mean"] @ self.params["out"] + self.params["bias"]).argmax(axis=1)

    def _forward(self, x: Array) -> Arrays:
        """Everything that the backward pass needs, by name."""
        p, xp, f = self.params, self.xp, {}

        f["windows"] = windows(xp, x.reshape(-1, PIXELS, PIXELS))
        f["conv"] = f["windows"] @ p["conv"]
        f["stem"], f["conv_mean"], f["conv_inv_std"] = gradkit.group_norm(
            f["conv"], GROUPS, p["conv_scale"], p["conv_bias"], channel_axis=-1
        )
        f["patches"] = to_patches(xp.maximum(f["stem"], 0))
        f["s0"] = f["patches"] @ p["embedding"] + p["positions"]

        f["n0"], f["inv0"] = gradkit.rms_norm(f["s0"], p["attention_scale"], scale_offset=1.0)
        f["qkv"] = (f["n0"] @ p["qkv"]).reshape(len(x), TOKENS, 3, HEADS, HEAD)
        q, k, v = heads_of(f["qkv"])
        # The norms read rows of HEAD elements out of the projection, where they lie.
        f["q"], f["inv_q"] = gradkit.rms_norm(q, p["q_scale"], scale_offset=1.0)
        f["k"], f["inv_k"] = gradkit.rms_norm(k, p["k_scale"], scale_offset=1.0)
        f["weights"] = softmax(xp, xp.matmul(f["q"], f["k"].swapaxes(-1, -2)) / math.sqrt(HEAD))
        f["mixed"] = from_heads(xp.matmul(f["weights"], v))
        attention = f["mixed"] @ p["attention_out"]

        f["n1"], f["s1"], f["inv1"] = gradkit.add_rms_norm(
            attention, f["s0"], p["mlp_scale"], scale_offset=1.0
        )
        f["up"] = f["n1"] @ p["up"]
        f["gate"] = 1 / (1 + xp.exp(-f["up"]))
        mlp = (f["up"] * f["gate"]) @ p["down"]

        f["n2"], f["s2"], f["inv2"] = gradkit.add_rms_norm(
            mlp, f["s1"], p["final_scale"], scale_offset=1.0
        )
        f["mean"] = f["n2"].mean(axis=1)
        return f

    def _backward(self, f: Arrays, d_logits: Array) -> Arrays:
        """The gradients of all parameters: the forward pass' lines in reverse order."""
        p, xp, g = self.params, self.xp, {}

        g["out"], g["bias"] = f["mean"].T @ d_logits, d_logits.sum(axis=0)
        d_mean = (d_logits @ p["out"].T) / TOKENS
        d_n2 = xp.broadcast_to(d_mean[:, None], f["n2"].shape)
        # One gradient for both summands of s2: the sublayer's output, and the stream before it.
        d_s2, g["final_scale"] = gradkit.rms_norm_grad(
            d_n2, f["s2"], p["final_scale"], f["inv2"], scale_offset=1.0
        )
        g["down"] = product(f["up"] * f["gate"], d_s2)
        d_act = d_s2 @ p["down"].T
        d_up = d_act * f["gate"] * (1 + f["up"] * (1 - f["gate"]))
        g["up"] = product(f["n1"], d_up)
        # What comes along the stream joins what comes through the norm.
        d_s1, g["mlp_scale"] = gradkit.rms_norm_grad(
            d_up @ p["up"].T, f["s1"], p["mlp_scale"], f["inv1"], scale_offset=1.0, ds=d_s2
        )

        g["attention_out"] = product(f["mixed"], d_s1)
        d_mixed = to_heads(d_s1 @ p["attention_out"].T)
        q, k, v = heads_of(f["qkv"])
        d_qkv = xp.empty_like(f["qkv"])
        d_q, d_k, d_v = heads_of(d_qkv)
        d_v[...] = xp.matmul(f["weights"].swapaxes(-1, -2), d_mixed)
        d_weights = xp.matmul(d_mixed, v.swapaxes(-1, -2))
        total = (d_weights * f["weights"]).sum(axis=-1, keepdims=True)
        d_scores = f["weights"] * (d_weights - total) / math.sqrt(HEAD)
        d_nq, d_nk = xp.matmul(d_scores, f["k"]), xp.matmul(d_scores.swapaxes(-1, -2), f["q"])
        # Written into the fused projection's gradient, where they belong.
        _, g["q_scale"] = gradkit.rms_norm_grad(
            d_nq, q, p["q_scale"], f["inv_q"], scale_offset=1.0, out=(d_q, None)
        )
        _, g["k_scale"] = gradkit.rms_norm_grad(
            d_nk, k, p["k_scale"], f["inv_k"], scale_offset=1.0, out=(d_k, None)
        )
        d_qkv = d_qkv.reshape(len(d_qkv), TOKENS, 3 * WIDTH)
        g["qkv"] = product(f["n0"], d_qkv)
        d_s0, g["attention_scale"] = gradkit.rms_norm_grad(
            d_qkv @ p["qkv"].T, f["s0"], p["attention_scale"], f["inv0"], scale_offset=1.0, ds=d_s1
        )

        g["positions"] = d_s0.sum(axis=0)
        g["embedding"] = product(f["patches"], d_s0)
        d_stem = from_patches(d_s0 @ p["embedding"].T) * (f["stem"] > 0)
        d_conv, g["conv_scale"], g["conv_bias"] = gradkit.group_norm_grad(
            d_stem, f["conv"], p["conv_scale"], f["conv_mean"], f["conv_inv_std"], channel_axis=-1
        )
        g["conv"] = product(f["windows"], d_conv)
        return g


def windows(xp: ModuleType, images: Array) -> Array:
    """The 3 x 3 pixels around each pixel: (digits, 8, 8) to (digits, 8, 8, 9)."""
    padded = xp.pad(images, ((0, 0), (1, 1), (1, 1)))
    return xp.stack(
        [padded[:, i : i + PIXELS, j : j + PIXELS] for i in range(3) for j in range(3)], axis=-1
    )


def to_patches(stem: Array) -> Array:
    """(digits, 8, 8, channels) to (digits, tokens, features of a patch)."""
    side = PIXELS // PATCH
    tiles = stem.reshape(len(stem), side, PATCH, side, PATCH, CHANNELS)
    return tiles.swapaxes(2, 3).reshape(len(stem), TOKENS, PATCH**2 * CHANNELS)


def from_patches(patches: Array) -> Array:
    """The way back."""
    side = PIXELS // PATCH
    tiles = patches.reshape(len(patches), side, side, PATCH, PATCH, CHANNELS)
    return tiles.swapaxes(2, 3).reshape(len(patches), PIXELS, PIXELS, CHANNELS)


def heads_of(qkv: Array) -> list[Array]:
    """Queries, keys and values, each (digits, heads, tokens, HEAD): views of the projection."""
    return [qkv[:, :, part].swapaxes(1, 2) for part in range(3)]


def to_heads(mixed: Array) -> Array:
    """(digits, tokens, WIDTH) to (digits, heads, tokens, HEAD)."""
    return mixed.reshape(len(mixed), TOKENS, HEADS, HEAD).swapaxes(1, 2)


def from_heads(heads: Array) -> Array:
    """The way back."""
    return heads.swapaxes(1, 2).reshape(len(heads), TOKENS, WIDTH)


def softmax(xp: ModuleType, scores: Array) -> Array:
    """The softmax of each row, without overflow."""
    powers = xp.exp(scores - scores.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def product(inputs: Array, d_outputs: Array) -> Array:
    """The gradient of a weight matrix, summed over digits and places."""
    rows = inputs.reshape(-1, inputs.shape[-1])
    return rows.T @ d_outputs.reshape(len(rows), -1)


# --- one training step -------------------------------------------------------------------------


@dataclass
class Trainer:
    """AdamW over micro-batches, with clipping by norm."""

    network: Network
    grads: Arrays = field(init=False)
    first: Arrays = field(init=False)
    second: Arrays = field(init=False)
    steps: int = 0

    def __post_init__(self) -> None:
        """Make the buffers that every step reuses."""
        xp, params = self.network.xp, self.network.params
        self.grads = {name: xp.empty_like(value) for name, value in params.items()}
        self.first = {name: xp.zeros_like(value) for name, value in params.items()}
        self.second = {name: xp.zeros_like(value) for name, value in params.items()}

    def step(self, x: Array, targets: Array, learning_rate: float) -> tuple[Array, Array]:
        """One update from one batch; its loss, and the norm of its gradients before clipping."""
        loss = 0.0
        for start in range(0, len(x), MICRO_BATCH):
            part = slice(start, start + MICRO_BATCH)
            share, grads = self.network.loss_and_grads(x[part], targets[part], len(x))
            loss = loss + share
            gradkit.accumulate_grads(self.grads, grads, overwrite=start == 0)
        norm = gradkit.clip_grad_norm(self.grads, max_norm=MAX_NORM)

        self.steps += 1
        rate = learning_rate * math.sqrt(1 - BETA2**self.steps) / (1 - BETA1**self.steps)
        for name, param in self.network.params.items():
            grad, first, second = self.grads[name], self.first[name], self.second[name]
            first += (1 - BETA1) * (grad - first)
            second += (1 - BETA2) * (grad * grad - second)
            if param.ndim == 2:
                param *= 1 - learning_rate * WEIGHT_DECAY
            param -= rate * first / (self.network.xp.sqrt(second) + ADAM_EPS)
        return loss, norm


def train(network: Network, digits: Digits, epochs: int, seed: int) -> list[float]:
    """The loss of each step."""
    trainer, rng = Trainer(network), np.random.default_rng(seed)
    per_epoch = len(digits.train_x) // BATCH
    losses = []
    with tqdm(range(epochs), unit="epoch", desc="training") as bar:
        for epoch in bar:
            for step, (x, targets) in enumerate(batches(network.xp, digits, rng)):
                progress = (epoch + step / per_epoch) / epochs
                rate = LEARNING_RATE * 0.5 * (1 + math.cos(math.pi * progress))
                losses.append(trainer.step(x, targets, rate)[0])
            bar.set_postfix(loss=f"{float(losses[-1]):.3f}")
    return [float(loss) for loss in losses]  # on a GPU, the host waits here


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train a transformer block with plain arrays.")
    parser.add_argument("--backend", choices=("auto", "numpy", "cupy"), default="auto")
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--min-accuracy", type=float, default=0.95)
    return parser.parse_args()


def main() -> int:
    """Train and report; return 1 if the accuracy is too low."""
    args = arguments()
    xp = array_module(args.backend)
    digits = Digits.load(xp, args.seed)
    network = Network.initialised(xp, args.seed)

    start = time.perf_counter()
    losses = train(network, digits, args.epochs, args.seed)
    seconds = time.perf_counter() - start

    reached = accuracy(network, digits)
    print(
        f"{xp.__name__}: {len(losses)} steps in {seconds:.1f} s; loss {losses[0]:.2f} at first, "
        f"{losses[-1]:.2f} at last; test accuracy {reached:.2%}"
    )
    if reached < args.min_accuracy:
        print(f"FAILED: test accuracy below {args.min_accuracy:.2%}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
