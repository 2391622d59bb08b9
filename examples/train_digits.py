"""Train a small network on handwritten digits with plain arrays and gradkit.

    python examples/train_digits.py [--backend numpy|cupy] [--output demo.png]

There is no framework here: parameters, gradients and activations are arrays, and the forward
and backward passes are written out. gradkit does the parts that are hard to get right by hand:

- batch norm, layer norm and RMS norm, forward and backward;
- accumulating the gradients of micro-batches;
- clipping all gradients together by their norm. The learning rate is one at which training
  diverges without that, in most runs: the program trains both ways, and says what each reaches.

The data are the 1,797 digits that come with scikit-learn (8 x 8 pixels, no download).
Read from top to bottom: the network, one training step, the run.
"""

import argparse
import importlib
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol, TypeAlias

import numpy as np
from sklearn.datasets import load_digits
from tqdm import tqdm

import gradkit
from gradkit.distributed import Group

Array: TypeAlias = Any  # numpy.ndarray or cupy.ndarray: the code is the same
Arrays: TypeAlias = dict[str, Array]

HIDDEN = 64
CLASSES = 10
BATCH = 128  # digits per step
MICRO_BATCH = 32  # digits per forward and backward pass
NOISE = 0.4  # standard deviation of the noise added to pixels between -1 and 1
LEARNING_RATE = 3.0  # at the start; decays to 0 along half a cosine; too large without clipping
MOMENTUM = 0.9
MAX_NORM = 0.5  # clip if the norm of all gradients together exceeds this
BATCH_NORM_EPS = 1e-5
RUNNING_RATE = 0.05  # how fast the running statistics follow the batches


# --- the network: three hidden layers, each with a different norm ------------------------------


@dataclass
class Network:
    """Parameters, running statistics, and the forward and backward passes.

    ``x -> linear, batch norm, ReLU -> linear, layer norm, ReLU -> linear, RMS norm, ReLU
    -> linear -> logits``, on arrays of B rows.
    """

    xp: ModuleType  # numpy or cupy
    params: Arrays
    running: Arrays  # batch norm's mean and variance over many batches, for testing
    group: Group | None = None  # ranks that share each micro-batch

    @classmethod
    def initialised(
        cls, xp: ModuleType, pixels: int, seed: int, dtype: str = "float32"
    ) -> "Network":
        """A network with random weights, the same on every backend."""
        rng = np.random.default_rng(seed)

        def weights(inputs: int, outputs: int) -> Array:
            scale = math.sqrt(2 / inputs)  # He et al., 2015
            return xp.asarray(rng.normal(0, scale, (inputs, outputs)), dtype=dtype)

        return cls(
            xp=xp,
            params={
                "weights1": weights(pixels, HIDDEN),
                "batch_norm_scale": xp.ones(HIDDEN, dtype),
                "batch_norm_bias": xp.zeros(HIDDEN, dtype),
                "weights2": weights(HIDDEN, HIDDEN),
                "layer_norm_scale": xp.ones(HIDDEN, dtype),
                "layer_norm_bias": xp.zeros(HIDDEN, dtype),
                "weights3": weights(HIDDEN, HIDDEN),
                "rms_norm_scale": xp.ones(HIDDEN, dtype),
                "weights4": weights(HIDDEN, CLASSES),
                "bias4": xp.zeros(CLASSES, dtype),
            },
            running={"mean": xp.zeros(HIDDEN, dtype), "var": xp.ones(HIDDEN, dtype)},
        )

    def loss_and_grads(self, x: Array, targets: Array, batch: int) -> tuple[Array, Arrays]:
        """The loss of a micro-batch and its gradients, by forward and backward pass.

        Both are shares of a mean over ``batch`` digits, so the shares of all micro-batches add
        up to the mean. ``targets`` are one-hot rows.
        """
        p, xp = self.params, self.xp

        # Forward. Each norm also returns the statistics that its backward pass needs.
        h1 = x @ p["weights1"]
        n1, mean1, inv_std1 = gradkit.batch_norm(
            h1,
            p["batch_norm_scale"],
            p["batch_norm_bias"],
            eps=BATCH_NORM_EPS,
            running_mean=self.running["mean"],
            running_var=self.running["var"],
            momentum=RUNNING_RATE,
            group=self.group,
        )
        a1 = xp.maximum(n1, 0)
        h2 = a1 @ p["weights2"]
        n2, mean2, inv_std2 = gradkit.layer_norm(h2, p["layer_norm_scale"], p["layer_norm_bias"])
        a2 = xp.maximum(n2, 0)
        h3 = a2 @ p["weights3"]
        n3, inv_std3 = gradkit.rms_norm(h3, p["rms_norm_scale"])
        a3 = xp.maximum(n3, 0)
        log_p = log_softmax(xp, a3 @ p["weights4"] + p["bias4"])
        loss = -(targets * log_p).sum() / batch

        # Backward: the same lines in reverse order. d_h1 is the gradient with respect to h1.
        g: Arrays = {}
        d_logits = (xp.exp(log_p) - targets) / batch
        g["weights4"] = a3.T @ d_logits
        g["bias4"] = d_logits.sum(axis=0)

        d_n3 = (d_logits @ p["weights4"].T) * (n3 > 0)
        d_h3, g["rms_norm_scale"] = gradkit.rms_norm_grad(d_n3, h3, p["rms_norm_scale"], inv_std3)
        g["weights3"] = a2.T @ d_h3

        d_n2 = (d_h3 @ p["weights3"].T) * (n2 > 0)
        d_h2, g["layer_norm_scale"], g["layer_norm_bias"] = gradkit.layer_norm_grad(
            d_n2, h2, p["layer_norm_scale"], mean2, inv_std2
        )
        g["weights2"] = a1.T @ d_h2

        d_n1 = (d_h2 @ p["weights2"].T) * (n1 > 0)
        d_h1, g["batch_norm_scale"], g["batch_norm_bias"] = gradkit.batch_norm_grad(
            d_n1, h1, p["batch_norm_scale"], mean1, inv_std1, group=self.group
        )
        g["weights1"] = x.T @ d_h1
        return loss, g

    def predict(self, x: Array) -> Array:
        """The most likely class of each row, with batch norm's running statistics."""
        p, xp = self.params, self.xp
        n1 = gradkit.batch_norm_inference(
            x @ p["weights1"],
            p["batch_norm_scale"],
            p["batch_norm_bias"],
            self.running["mean"],
            self.running["var"],
            eps=BATCH_NORM_EPS,
        )
        h2 = xp.maximum(n1, 0) @ p["weights2"]
        n2, _, _ = gradkit.layer_norm(h2, p["layer_norm_scale"], p["layer_norm_bias"])
        h3 = xp.maximum(n2, 0) @ p["weights3"]
        n3, _ = gradkit.rms_norm(h3, p["rms_norm_scale"])
        return (xp.maximum(n3, 0) @ p["weights4"] + p["bias4"]).argmax(axis=1)


def log_softmax(xp: ModuleType, logits: Array) -> Array:
    """The logarithm of the softmax of each row, without overflow."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - xp.log(xp.exp(shifted).sum(axis=1, keepdims=True))


# --- one training step: accumulate, clip, update ----------------------------------------------


@dataclass
class Trainer:
    """SGD with momentum over micro-batches, with clipping by norm."""

    network: Network
    max_norm: float = MAX_NORM
    grads: Arrays = field(init=False)
    velocity: Arrays = field(init=False)

    def __post_init__(self) -> None:
        """Make the buffers that every step reuses."""
        xp, params = self.network.xp, self.network.params
        self.grads = {name: xp.empty_like(value) for name, value in params.items()}
        self.velocity = {name: xp.zeros_like(value) for name, value in params.items()}

    def step(self, x: Array, targets: Array, learning_rate: float) -> tuple[Array, Array, Array]:
        """One update from one batch; the loss, and the gradient norm before and after clipping.

        All three stay on the device: on a GPU, the host never waits here.
        """
        loss = 0.0
        for start in range(0, len(x), MICRO_BATCH):
            part = slice(start, start + MICRO_BATCH)
            share, grads = self.network.loss_and_grads(x[part], targets[part], len(x))
            loss = loss + share
            for name, grad in grads.items():
                # The first micro-batch overwrites the last step's gradients: no zeroing pass.
                gradkit.accumulate_grad_v2(self.grads[name], grad, overwrite=start == 0)

        before = self.clip()
        after = gradkit.grad_norm(self.grads)  # only for the plot

        gradkit.sgd_update(
            self.network.params, self.grads, self.velocity, lr=learning_rate, momentum=MOMENTUM
        )
        return loss, before, after

    def clip(self) -> Array:
        """Clip the gradients, and return their norm before that."""
        return gradkit.clip_grad_norm(self.grads, max_norm=self.max_norm)


# --- the run: data, epochs, verdict -----------------------------------------------------------


@dataclass
class Digits:
    """The digits as rows of 64 pixels, shuffled and split, on the backend's device."""

    train_x: Array
    train_targets: Array  # one-hot
    test_x: Array
    test_labels: Array

    @classmethod
    def load(cls, xp: ModuleType, seed: int) -> "Digits":
        """Four fifths to train on, one fifth to test on."""
        pixels, labels = load_digits(return_X_y=True)
        order = np.random.default_rng(seed).permutation(len(labels))
        x, labels = pixels[order].astype(np.float32) / 8 - 1, labels[order]  # 0..16 to -1..1
        split = len(labels) * 4 // 5
        one_hot = np.eye(CLASSES, dtype=np.float32)[labels[:split]]
        arrays = (x[:split], one_hot, x[split:], labels[split:])
        return cls(*(xp.asarray(array) for array in arrays))


@dataclass
class History:
    """Data of the plot: one number per step, or one per epoch."""

    loss: list[float] = field(default_factory=list)
    norm_before: list[float] = field(default_factory=list)
    norm_after: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)


def train(
    network: Network, digits: Digits, epochs: int, seed: int, max_norm: float = MAX_NORM
) -> History:
    """Train for some epochs, with a progress bar in a terminal."""
    trainer, history = Trainer(network, max_norm), History()
    rng = np.random.default_rng(seed)
    per_epoch = len(digits.train_x) // BATCH
    name = "training" if max_norm < math.inf else "the same without clipping"
    with tqdm(range(epochs), unit="epoch", desc=name, disable=None) as bar:
        for epoch in bar:
            measured = []
            for step, (x, targets) in enumerate(batches(network.xp, digits, rng)):
                progress = (epoch + step / per_epoch) / epochs
                rate = LEARNING_RATE * 0.5 * (1 + math.cos(math.pi * progress))
                measured.append(trainer.step(x, targets, rate))
            for loss, before, after in measured:  # on a GPU, the host waits here
                history.loss.append(float(loss))
                history.norm_before.append(float(before))
                history.norm_after.append(float(after))
            history.accuracy.append(accuracy(network, digits))
            bar.set_postfix(loss=f"{history.loss[-1]:.3f}", test=f"{history.accuracy[-1]:.1%}")
    return history


def batches(
    xp: ModuleType, digits: Digits, rng: np.random.Generator
) -> Iterator[tuple[Array, Array]]:
    """One epoch in random order, with noise on the pixels, so no image is ever repeated."""
    order = rng.permutation(len(digits.train_x))
    for start in range(0, len(order) - BATCH + 1, BATCH):
        rows = xp.asarray(order[start : start + BATCH])
        x = digits.train_x[rows]
        noise = rng.standard_normal(x.shape, dtype=np.float32)
        yield x + NOISE * xp.asarray(noise), digits.train_targets[rows]


class Predicts(Protocol):
    """A network that has learnt to read."""

    def predict(self, x: Array) -> Array:
        """The most likely class of each row."""


def accuracy(network: Predicts, digits: Digits) -> float:
    """The share of test digits that the network reads correctly."""
    return float((network.predict(digits.test_x) == digits.test_labels).mean())


def array_module(backend: str) -> ModuleType:
    """NumPy or CuPy; "auto" is CuPy if gradkit can compute on its arrays."""
    if backend == "numpy":
        return np
    try:
        cupy = importlib.import_module("cupy")
        gradkit.zero_grad(cupy.ones(1))
    except (ImportError, RuntimeError) as error:  # no CuPy, no device, or no kernels for it
        if backend == "cupy":
            sys.exit(f"train_digits.py: --backend cupy does not work here: {error}")
        return np
    else:
        return cupy


def retrained(
    digits: Digits, like: Network, args: argparse.Namespace, seed: int, max_norm: float
) -> History:
    """The history of a new network of that kind, from the start that a seed gives."""
    network = Network.initialised(like.xp, digits.train_x.shape[1], seed)
    with np.errstate(all="ignore"):  # as training diverges, numbers overflow
        return train(network, digits, args.epochs, seed, max_norm)


def draw(path: str, history: History, without: History, network: Network, digits: Digits) -> None:
    """Write the plot of a run, beside the one without clipping."""
    from digits_plot import plot  # matplotlib takes a second to import

    def host(array: Array) -> np.ndarray[Any, Any]:
        return np.asarray(array.get() if hasattr(array, "get") else array)  # CuPy has .get()

    plot(
        path,
        title="Learning to read digits with plain arrays",
        subtitle=(
            "batch norm, layer norm and RMS norm, forward and backward; "
            f"{len(history.loss)} steps of {BATCH // MICRO_BATCH} x {MICRO_BATCH} digits, "
            f"SGD with momentum; gradkit on {network.xp.__name__}"
        ),
        loss=history.loss,
        norm_before=history.norm_before,
        norm_after=history.norm_after,
        max_norm=MAX_NORM,
        accuracy=history.accuracy,
        without=(without.loss, without.norm_before, without.accuracy),
        images=host(digits.test_x).reshape(-1, 8, 8),
        labels=host(digits.test_labels),
        predicted=host(network.predict(digits.test_x)),
    )


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Train a small network on handwritten digits with plain arrays and gradkit."
    )
    parser.add_argument("--backend", choices=("auto", "numpy", "cupy"), default="auto")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=3, help="runs to compare, one a seed")
    parser.add_argument("--output", default="demo.png", metavar="PNG", help="where the plot goes")
    parser.add_argument("--no-plot", action="store_true")
    parser.add_argument(
        "--min-accuracy", type=float, default=0.95, help="fail below this test accuracy"
    )
    parsed = parser.parse_args()
    if parsed.epochs < 1:
        parser.error("--epochs must be at least 1")
    return parsed


def main() -> int:
    """Train, report, plot; return 1 if the accuracy is too low."""
    args = arguments()
    xp = array_module(args.backend)
    digits = Digits.load(xp, args.seed)
    network = Network.initialised(xp, digits.train_x.shape[1], args.seed)

    start = time.perf_counter()
    history = train(network, digits, args.epochs, args.seed)
    seconds = time.perf_counter() - start

    clipped = sum(norm > MAX_NORM for norm in history.norm_before)
    reached = history.accuracy[-1]
    print(
        f"{xp.__name__}: {len(history.loss)} steps in {seconds:.1f} s; "
        f"gradients clipped in {clipped} of them; "
        f"test accuracy {reached:.2%} on {len(digits.test_labels)} digits"
    )
    if not args.no_plot:
        # The same starts and the same batches; only the limit differs.
        without = retrained(digits, network, args, args.seed, math.inf)
        ends = [(reached, without.accuracy[-1])]
        for seed in range(args.seed + 1, args.seed + args.seeds):
            clipped_too, not_clipped = (
                retrained(digits, network, args, seed, limit) for limit in (MAX_NORM, math.inf)
            )
            ends.append((clipped_too.accuracy[-1], not_clipped.accuracy[-1]))
        means = np.mean(ends, axis=0)
        print(
            f"mean test accuracy of {len(ends)} runs: {means[0]:.1%} with clipping, "
            f"{means[1]:.1%} without"
        )
        draw(args.output, history, without, network, digits)
        print(f"wrote {args.output}")
    if reached < args.min_accuracy:
        print(f"FAILED: test accuracy below {args.min_accuracy:.2%}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
