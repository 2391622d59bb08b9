"""The published shapes: the same on every machine, so that pages can be compared."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.devices import DTYPES, Device

Shape = tuple[int, ...]


def _shapes(text: str) -> list[Any]:
    return [tuple(map(int, word.split("x"))) for word in text.split()]


# M rows of D; on a GPU the most important first, as time may not suffice for all; for the emulator
CPU_NORMS: list[tuple[int, int]] = _shapes(
    "8192x1024 2048x4096 131072x128 8192x768 1024x12288 128x4096 1x4096"
)
GPU_NORMS: list[tuple[int, int]] = _shapes(
    "16384x4096 65536x1024 8192x8192 4096x16384 131072x128 8192x768 8192x5120 1024x12288 2048x4096"
    " 128x4096 1x4096 4096x4097"
)
TINY_NORMS: list[tuple[int, int]] = _shapes("24x64 3x129")

# Samples of a diffusion transformer, DiT-XL/2: batch, patches, width
CPU_SAMPLES: list[Shape] = _shapes("32x256x1152")
GPU_SAMPLES: list[Shape] = _shapes("256x256x1152 32x1024x1152")
TINY_SAMPLES: list[Shape] = _shapes("2x6x64")

# Images of a ResNet-50's stages, batch first
CPU_IMAGES: list[Shape] = _shapes(
    "32x2048x7x7 32x1024x14x14 32x512x28x28 32x256x56x56 32x64x112x112"
)
GPU_IMAGES: list[Shape] = _shapes(
    "32x256x56x56 256x64x112x112 256x512x28x28 32x64x112x112 32x2048x7x7 256x256x56x56"
)
TINY_IMAGES: list[Shape] = _shapes("2x8x3x3")


def gpt2() -> list[Shape]:
    """GPT-2 124M: 148 parameters."""
    d, layer = 768, []
    layer += [(d,), (d,), (d, 3 * d), (3 * d,), (d, d), (d,)]
    layer += [(d,), (d,), (d, 4 * d), (4 * d,), (4 * d, d), (d,)]
    return [(50257, d), (1024, d), *(12 * layer), (d,), (d,)]


def resnet50() -> list[Shape]:
    """ResNet-50: 161 parameters."""
    shapes: list[Shape] = [(64, 3, 7, 7), (64,), (64,)]
    into = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        out = 4 * width
        for block in range(blocks):
            for conv in ((width, into, 1, 1), (width, width, 3, 3), (out, width, 1, 1)):
                shapes += [conv, conv[:1], conv[:1]]
            if block == 0:
                shapes += [(out, into, 1, 1), (out,), (out,)]
            into = out
    return [*shapes, (1000, into), (1000,)]


def llama3_8b() -> list[Shape]:
    """Llama-3-8B: 291 parameters."""
    layer = _shapes(
        "4096x4096 1024x4096 1024x4096 4096x4096 14336x4096 14336x4096 4096x14336 4096 4096"
    )
    return [(128256, 4096), *(32 * layer), (4096,), (128256, 4096)]


LISTS: dict[str, list[Shape]] = {
    "24 x 1024x1024": [(1024, 1024)] * 24,
    "GPT-2 124M": gpt2(),
    "ResNet-50": resnet50(),
    "MLP": _shapes("784x512 512 512x512 512 512x10 10"),
    "1000 x 256": [(256,)] * 1000,
    "10000 x 4096": [(4096,)] * 10000,
    "one of 200M, 2000 tiny": [(200_000_000,), *[(16,)] * 2000],
    "Llama-3-8B": llama3_8b(),
}
LLAMA = "Llama-3-8B"
CPU_LISTS = {name: ("float32", shapes) for name, shapes in LISTS.items() if name != LLAMA}
_ON_GPU = "GPT-2 124M|1000 x 256|Llama-3-8B|one of 200M, 2000 tiny|ResNet-50|10000 x 4096|MLP"
GPU_LISTS = {
    name: ("bfloat16" if name == LLAMA else "float32", LISTS[name]) for name in _ON_GPU.split("|")
}
TINY_LISTS: dict[str, tuple[str, list[Shape]]] = {
    "3 small": ("float32", _shapes("700 3x5 64")),
    "100 x 16": ("bfloat16", [(16,)] * 100),
}


def list_bytes(shapes: Sequence[Shape], dtype: str) -> int:
    """Return the bytes of arrays of these shapes."""
    return sum(map(math.prod, shapes)) * DTYPES[dtype].itemsize


class Chosen(NamedTuple):
    """Sizes that a device measures; in ``others``, only the first shape is measured."""

    norms: list[tuple[int, int]]
    samples: list[Shape]
    images: list[Shape]
    lists: dict[str, tuple[str, list[Shape]]]
    dtype: str
    others: tuple[str, ...]

    def pairs(
        self, shapes: Sequence[Shape], others: Sequence[str], *, quick: bool
    ) -> list[tuple[Shape, str]]:
        """Return shapes and dtypes: all shapes (if quick, two), the first one in all dtypes."""
        first, *rest = [(shape, self.dtype) for shape in (shapes[:2] if quick else shapes)]
        return [first, *((shapes[0], other) for other in others), *rest]


_16_BITS = "bfloat16", ("float32", "float16")
_CHOSEN = {
    "cpu": Chosen(
        CPU_NORMS, CPU_SAMPLES, CPU_IMAGES, CPU_LISTS, "float32", ("bfloat16", "float16", "float64")
    ),
    "cuda": Chosen(GPU_NORMS, GPU_SAMPLES, GPU_IMAGES, GPU_LISTS, *_16_BITS),
    "emulated": Chosen(TINY_NORMS, TINY_SAMPLES, TINY_IMAGES, TINY_LISTS, *_16_BITS),
}


def chosen(device: Device) -> Chosen:
    """Return the shapes for a device."""
    return _CHOSEN[device.name]
