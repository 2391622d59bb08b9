"""The README's and the tutorial's pictures: `make pictures` writes them into docs/pictures/.

``layers.svg`` shows the path of a call, ``training.png`` the results of
`examples/train_digits.py` with and without clipping, ``clipping.png`` the losses of the tutorial.
"""

import math
import re
import sys
from html import escape
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from PIL import Image
from PIL.PngImagePlugin import PngInfo

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "docs" / "_ext")]

import digits_plot  # noqa: E402  # examples are no package
import train_digits  # noqa: E402
from legends import under_legends  # noqa: E402

PICTURES = ROOT / "docs" / "pictures"
EPOCHS = 40  # as `make demo`
WIDTH, ROW, GAP, MARGIN = 860, 62, 18, 12
BLUE, GREEN, ORANGE, GREY = "#d8e9f5", "#d9efe6", "#fbe5d6", "#eeeeee"


class Box(NamedTuple):
    """A directory: its name, what is in it, and its colour."""

    title: str
    text: str
    colour: str


LAYERS = (
    [Box("your arrays", "NumPy, CuPy, PyTorch, JAX, TensorFlow, any DLPack: no copy", GREY)],
    [
        Box("torch/", "optional: autograd, torch.compile, modules", BLUE),
        Box("jax/", "optional: inside jit, grad, vmap; optax", BLUE),
    ],
    [Box("gradkit/*.py", "the public functions: each creates a record and runs it", BLUE)],
    [
        Box("_open/", "opens a call: arrays, trees, plans, results", BLUE),
        Box("_arrays/", "a file per array library", BLUE),
        Box("_ranks/", "norms over ranks and devices", BLUE),
    ],
    [Box("_calls/", "a record per operation, the input of every backend", BLUE)],
    [
        Box("_numpy/, _cpu/", "on CPUs: NumPy's calls; compiled C++", GREEN),
        Box("_cuda/, kernels/", "CUDA C++ kernels, launchers; cuDNN", ORANGE),
    ],
    [
        Box("your cores", "the same bits on any number of them", GREY),
        Box("your GPU", "status: see Verification", GREY),
        Box("testbed/", "the kernels on a CPU: source and PTX", ORANGE),
    ],
)


def layers() -> str:
    """The directories, row by row, as an SVG that reads on light and on dark pages."""
    height = len(LAYERS) * (ROW + GAP) - GAP + 2 * MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="sans-serif" text-anchor="middle" role="img">',
        "<title>The path of a call through gradkit</title>",
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="white"/>',
    ]
    for number, row in enumerate(LAYERS):
        y = MARGIN + number * (ROW + GAP)
        width = (WIDTH - 2 * MARGIN - GAP * (len(row) - 1)) / len(row)
        for place, box in enumerate(row):
            parts += drawn(box, MARGIN + place * (width + GAP), y, width)
        if number:
            parts.append(f'<path d="M{WIDTH / 2 - 6} {y - GAP + 5}h12l-6 8z" fill="#555555"/>')
    return "\n".join([*parts, "</svg>", ""])


def drawn(box: Box, x: float, y: float, width: float) -> list[str]:
    """One directory."""
    middle = x + width / 2
    return [
        f'<rect x="{x:g}" y="{y}" width="{width:g}" height="{ROW}" rx="6" fill="{box.colour}"/>',
        f'<text x="{middle:g}" y="{y + 26}" font-size="16" font-weight="bold" fill="#222222">'
        f"{escape(box.title)}</text>",
        f'<text x="{middle:g}" y="{y + 47}" font-size="13.5" fill="#333333">'
        f"{escape(box.text)}</text>",
    ]


def training() -> tuple[Figure, str]:
    """Loss and accuracy of the demo, and the picture's alternative text."""
    digits = train_digits.Digits.load(np, 0)

    def run(max_norm: float) -> train_digits.History:
        network = train_digits.Network.initialised(np, digits.train_x.shape[1], 0)
        return train_digits.train(network, digits, EPOCHS, 0, max_norm)

    history = run(train_digits.MAX_NORM)
    with np.errstate(all="ignore"):  # as training diverges, numbers overflow
        without = run(math.inf)
    figure = Figure(figsize=(7.4, 3.2), dpi=150, layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2)
    digits_plot.plot_loss(left, history.loss, without.loss)
    digits_plot.plot_accuracy(right, history.accuracy, without.accuracy)
    left.set_xlabel("training step")
    between_curves = {"loc": "center right", "bbox_to_anchor": (1.02, 0.71), "borderpad": 0.1}
    left.legend(frameon=False, fontsize=9, handlelength=1.2, labelspacing=0.3, **between_curves)
    reached, lost = history.accuracy[-1], without.accuracy[-1]
    return figure, f"The demo reads {reached:.1%} of the test digits; without clipping {lost:.1%}"


def clipping() -> tuple[Figure, str]:
    """The losses of the tutorial's own code, and the picture's alternative text."""
    page = (ROOT / "docs" / "tutorial.md").read_text()
    tutorial: dict[str, Any] = {}
    exec("".join(re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)), tutorial)
    figure = Figure(figsize=(6.4, 3), dpi=150, layout="constrained", facecolor="white")
    axes = figure.subplots()
    for rate, max_norm, colour, name in (
        (2, math.inf, "#D55E00", "rate 2, not clipped"),
        (0.2, math.inf, "#555555", "rate 0.2, not clipped"),
        (2, 0.25, "#0072B2", "rate 2, clipped to a norm of 0.25"),
    ):
        losses = tutorial["train"](rate, max_norm)
        axes.semilogy(losses, color=colour, linewidth=2, label=name)
    axes.set_ylim(0.08, 2)
    axes.set_yticks([0.1, 0.2, 0.5, 1, 2], ["0.1", "0.2", "0.5", "1", "2"])
    axes.minorticks_off()
    axes.set_xlabel("training step")
    axes.set_ylabel("loss")
    axes.spines[["right", "top"]].set_visible(False)
    axes.grid(color="0.9")
    axes.legend(frameon=False)
    reached = f"At a rate of 2 the loss reaches {losses[-1]:.3f} with clipping"
    return figure, f"{reached}, and explodes without it"


def save(name: str, figure: Figure, text: str) -> None:
    """Write a picture in a quarter of the size, with the text that pages say of it.

    A legend over a line is an error.
    """
    if lines := under_legends(figure):
        raise ValueError(f"{name}: a legend lies over {', '.join(lines)}")
    written, said = BytesIO(), PngInfo()
    figure.savefig(written)
    said.add_text("Description", text)
    image = Image.open(written).convert("P", palette=Image.Palette.ADAPTIVE, colors=64)
    image.save(PICTURES / name, optimize=True, pnginfo=said)


def main() -> None:
    """Write all of them."""
    PICTURES.mkdir(exist_ok=True)
    (PICTURES / "layers.svg").write_text(layers())
    save("training.png", *training())
    save("clipping.png", *clipping())


if __name__ == "__main__":
    main()
