"""The plot of a training run: loss, gradient norm, test accuracy and misread digits."""

import math
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MultipleLocator, PercentFormatter

# Okabe and Ito's palette, whose colours colour-blind readers can tell apart.
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#555555"
SHOWN = 6  # misread digits


def plot(
    path: str | Path,
    *,
    title: str,
    subtitle: str,
    loss: list[float],
    norm_before: list[float],
    norm_after: list[float],
    max_norm: float,
    accuracy: list[float],
    without: tuple[list[float], list[float], list[float]],
    images: np.ndarray,
    labels: np.ndarray,
    predicted: np.ndarray,
) -> None:
    """Write the plot as a PNG.

    ``loss`` and the norms hold one number per step, ``accuracy`` one per epoch; ``without`` has
    loss, norm and accuracy of the same run without clipping; ``images``, ``labels`` and
    ``predicted`` are those of the test set.
    """
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
    figure = Figure(figsize=(12, 7.5), dpi=150, layout=layout, facecolor="white")
    heading, body = figure.subfigures(2, 1, height_ratios=(1, 11), squeeze=False).flat
    heading.text(0.012, 0.62, title, fontsize=15, fontweight="bold", va="center")
    heading.text(0.012, 0.12, subtitle, fontsize=10.5, color=GREY, va="center")
    left, right = body.subfigures(1, 2, width_ratios=(1.7, 1), squeeze=False).flat
    upper, lower = left.subplots(2, 1, sharex=True)
    plot_loss(upper, loss, without[0])
    plot_norms(lower, norm_before, norm_after, max_norm, without[1])
    top, bottom = right.subfigures(2, 1, squeeze=False).flat
    plot_accuracy(top.subplots(), accuracy, without[2])
    show_misread(bottom, images, labels, predicted)
    figure.savefig(path)


def plot_loss(axes: Axes, loss: list[float], without: Sequence[float] = ()) -> None:
    """The training loss, step by step and smoothed, and without clipping if that is given."""
    steps = np.arange(1, len(loss) + 1)
    axes.plot(steps, loss, color=BLUE, alpha=0.3, linewidth=0.9, label="each step")
    axes.plot(steps, smoothed(loss), color=BLUE, linewidth=2, label="smoothed")
    plot_without(axes, without)
    axes.set_ylabel("cross-entropy (nats per digit)")
    axes.legend(frameon=False, loc="lower left")
    log_scale(axes, [*loss, *smoothed(list(takewhile(math.isfinite, without)))])
    dress(axes, "Training loss")


def plot_norms(
    axes: Axes,
    before: list[float],
    after: list[float],
    max_norm: float,
    without: Sequence[float] = (),
) -> None:
    """The norm of all gradients together, before and after clipping, against the limit."""
    steps = np.arange(1, len(before) + 1)
    axes.fill_between(
        steps, before, after, color=ORANGE, alpha=0.25, linewidth=0, label="removed by clipping"
    )
    axes.plot(steps, after, color=BLUE, alpha=0.3, linewidth=0.9, label="after, each step")
    axes.plot(steps, smoothed(before), color=ORANGE, linewidth=2, label="before (smoothed)")
    axes.plot(steps, smoothed(after), color=BLUE, linewidth=2, label="after (smoothed)")
    plot_without(axes, without)
    axes.axhline(
        max_norm, color="black", linewidth=1, linestyle="--", label=f"max_norm = {max_norm:g}"
    )
    share = np.mean(np.asarray(before) > max_norm)
    axes.set_xlabel("training step")
    axes.set_ylabel("L2 norm of all gradients")
    axes.legend(frameon=False, loc="lower left", ncols=2)
    log_scale(axes, [*before, *after, *smoothed(list(takewhile(math.isfinite, without)))])
    axes.set_ylim(bottom=min(after) * 0.35)  # the legend is below the curves
    dress(axes, f"Gradient norm: {share:.0%} of the steps are clipped")


def plot_without(axes: Axes, values: Sequence[float]) -> None:
    """The run without clipping, if there is one, as far as its numbers are finite."""
    if values:
        finite = list(takewhile(math.isfinite, values))
        steps = np.arange(1, len(finite) + 1)
        axes.plot(steps, smoothed(finite), color=GREY, label="without clipping (smoothed)")


def plot_accuracy(axes: Axes, accuracy: list[float], without: list[float]) -> None:
    """The test accuracy after each epoch."""
    epochs = np.arange(1, len(accuracy) + 1)
    axes.plot(epochs, without, color=GREY, label="without clipping")
    axes.plot(epochs, accuracy, color=GREEN, linewidth=2, label="with clipping")
    axes.plot(epochs[-1], accuracy[-1], "o", color=GREEN, markersize=7, clip_on=False)
    axes.annotate(
        f"{accuracy[-1]:.1%}",
        (epochs[-1], accuracy[-1]),
        xytext=(0, -12),
        textcoords="offset points",
        ha="right",
        va="top",
        color=GREEN,
        fontsize=14,
        fontweight="bold",
    )
    axes.legend(frameon=False, loc="center right")
    axes.set_ylim(0.0, 1.0)
    axes.yaxis.set_major_locator(MultipleLocator(0.2))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlabel("epoch")
    axes.set_ylabel("test digits read correctly")
    dress(axes, "Test accuracy")


def show_misread(
    figure: SubFigure, images: np.ndarray, labels: np.ndarray, predicted: np.ndarray
) -> None:
    """The first test digits that the network got wrong."""
    wrong = np.flatnonzero(labels != predicted)
    shown = wrong[:SHOWN]
    count = f"{len(wrong)} of {len(labels)} test digits misread"
    figure.suptitle(
        count + (f"; the first {SHOWN}" if len(wrong) > SHOWN else ""),
        x=0.02,
        ha="left",
        fontsize=11,
    )
    for i, axes in enumerate(figure.subplots(2, SHOWN // 2).flat):
        axes.set_axis_off()
        if i < len(shown):
            axes.imshow(images[shown[i]], cmap="gray_r", interpolation="nearest")
            text = f"a {labels[shown[i]]}, read as {predicted[shown[i]]}"
            axes.set_title(text, fontsize=9, color=GREY, pad=4)


def smoothed(values: Sequence[float], width: float = 8.0) -> np.ndarray:
    """A line through each point's neighbours, fitted to logarithms; it lags at no end.

    ``width`` is the standard deviation of the neighbours' weights, in steps.
    """
    logs, steps = np.log(values), np.arange(len(values))
    away = steps - steps[:, None]
    weights = np.exp(-0.5 * (away / width) ** 2)
    total, first, second = ((weights * away**power).sum(axis=1) for power in (0, 1, 2))
    heights, moments = weights @ logs, (weights * away) @ logs
    spread = total * second - first**2
    line = (second * heights - first * moments) / np.where(spread > 0, spread, 1)
    return np.exp(np.where(spread > 0, line, logs))


def log_scale(axes: Axes, values: list[float]) -> None:
    """A logarithmic axis with plain numbers at 1, 2 and 5."""
    axes.set_yscale("log", subs=[2, 5])
    axes.set_ylim(min(values) * 0.7, max(values) * 1.2)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def dress(axes: Axes, title: str) -> None:
    """Add a title and a light grid, and remove the box."""
    axes.set_title(title, loc="left", fontsize=11)
    axes.margins(x=0.01)
    axes.grid(color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
