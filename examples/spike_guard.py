"""Train through a few poisoned batches, with and without gradkit's spike guard.

    python examples/spike_guard.py [--output spike_guard.png]

The network and the data are those of train_digits.py, without its fixed limit on the norm. In a
few steps the loss is summed over the batch instead of averaged, so that the gradients are a
hundred times too large. The guard knows the norms of the steps before, and clips the spikes.
"""

import argparse
import math
import sys
from dataclasses import dataclass, field

import numpy as np
from digits_plot import BLUE, GREY, ORANGE, dress, log_scale
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from train_digits import BATCH, Array, Digits, Network, Trainer, accuracy, batches

import gradkit

EPOCHS = 20
LEARNING_RATE = 0.05
POISONED = (60, 120, 121, 180)  # steps, the first of which is 0


@dataclass
class PoisonedTrainer(Trainer):
    """Scales some steps' gradients as if their loss had been a sum; clips spikes, and no others."""

    guard: gradkit.SpikeGuard | None = None
    limits: list[float] = field(default_factory=list)

    def clip(self) -> Array:
        """Clip to what the guard says, if there is one."""
        if len(self.limits) in POISONED:
            gradkit.scale_grads(self.grads, float(BATCH))
        norm = gradkit.grad_norm(self.grads)
        limit = math.inf if self.guard is None else self.guard.update(norm)
        gradkit.clip_grads_with_norm(self.grads, norm, limit)
        self.limits.append(float(limit))
        return norm


@dataclass
class Run:
    """One number for each step, and the accuracy at the end."""

    loss: list[float]
    norm: list[float]
    limit: list[float]
    accuracy: float

    @property
    def clipped(self) -> list[int]:
        """The steps whose gradients were clipped."""
        return [k for k, norm in enumerate(self.norm) if norm > self.limit[k]]


def train(guard: gradkit.SpikeGuard | None, epochs: int = EPOCHS, seed: int = 0) -> Run:
    """Train from the same start on the same batches."""
    digits = Digits.load(np, seed)
    network = Network.initialised(np, digits.train_x.shape[1], seed)
    trainer, rng = PoisonedTrainer(network, guard=guard), np.random.default_rng(seed)
    steps = [
        trainer.step(x, targets, LEARNING_RATE)
        for _ in range(epochs)
        for x, targets in batches(np, digits, rng)
    ]
    return Run(
        loss=[float(loss) for loss, _, _ in steps],
        norm=[float(norm) for _, norm, _ in steps],
        limit=trainer.limits,
        accuracy=accuracy(network, digits),
    )


def draw(path: str, without: Run, guarded: Run) -> None:
    """Write the plot of loss and norm."""
    figure = Figure(figsize=(10, 7), dpi=120, layout="constrained", facecolor="white")
    upper, lower = figure.subplots(2, 1, sharex=True)
    draw_runs(upper, without.loss, guarded.loss)
    upper.set_ylabel("cross-entropy (nats per digit)")
    dress(upper, "Training loss, with four poisoned steps")
    draw_runs(lower, without.norm, guarded.norm)
    lower.plot(guarded.limit, color=GREY, linewidth=1, label="the guard's limit")
    lower.set_xlabel("training step")
    lower.set_ylabel("L2 norm of all gradients")
    dress(lower, f"Gradient norm: the guard clips {len(guarded.clipped)} of {len(guarded.norm)}")
    for axes in (upper, lower):
        axes.legend(frameon=False, loc="upper left")
    figure.savefig(path)


def draw_runs(axes: Axes, without: list[float], guarded: list[float]) -> None:
    """Both runs, step by step."""
    for step in POISONED:
        axes.axvline(step, color="0.8", linewidth=1)
    axes.plot(without, color=ORANGE, linewidth=1, label="without a guard")
    axes.plot(guarded, color=BLUE, linewidth=1, label="with the guard")
    log_scale(axes, [*without, *guarded])


def main() -> int:
    """Train both ways, report and plot."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", default="spike_guard.png", metavar="PNG")
    args = parser.parse_args()
    without, guarded = train(None), train(gradkit.SpikeGuard())
    for name, run in (("without a guard", without), ("with the guard", guarded)):
        print(
            f"{name}: {len(run.clipped)} of {len(run.norm)} steps clipped, "
            f"last loss {run.loss[-1]:.3f}, test accuracy {run.accuracy:.1%}"
        )
    print(f"clipped with the guard: {', '.join(map(str, guarded.clipped))}")
    draw(args.output, without, guarded)
    print(f"wrote {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
