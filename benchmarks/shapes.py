"""The published shapes: the same on every machine, so that pages can be compared."""

Shape = tuple[int, ...]

# M rows of D
NORMS: list[tuple[int, int]] = [
    (8192, 1024),
    (16384, 4096),
    (2048, 4096),
    (131072, 128),
    (8192, 768),
    (65536, 1024),
    (1024, 12288),
    (4096, 4097),
    (128, 4096),
    (1, 4096),
]
HEADLINE = NORMS[0]

# The same on a GPU, the most important first
DEVICE_NORMS: list[tuple[int, int]] = [
    (16384, 4096),
    (65536, 1024),
    (8192, 8192),
    (4096, 16384),
    (131072, 128),
    (8192, 768),
    (8192, 5120),
    (1024, 12288),
    (2048, 4096),
    (128, 4096),
    (1, 4096),
    (4096, 4097),
]
TINY_NORMS = [(24, 64), (3, 129)]  # for the emulator

# Images of a ResNet-50's stages, batch first
IMAGES: list[Shape] = [
    (32, 64, 112, 112),
    (32, 256, 56, 56),
    (32, 512, 28, 28),
    (32, 1024, 14, 14),
    (32, 2048, 7, 7),
]


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
    d, hidden, keys = 4096, 14336, 1024
    layer = [
        (d, d),
        (keys, d),
        (keys, d),
        (d, d),
        (hidden, d),
        (hidden, d),
        (d, hidden),
        (d,),
        (d,),
    ]
    return [(128256, d), *(32 * layer), (d,), (128256, d)]


LISTS: dict[str, list[Shape]] = {
    "24 x 1024x1024": [(1024, 1024)] * 24,
    "GPT-2 124M": gpt2(),
    "ResNet-50": resnet50(),
    "MLP": [(784, 512), (512,), (512, 512), (512,), (512, 10), (10,)],
    "1000 x 256": [(256,)] * 1000,
    "10000 x 4096": [(4096,)] * 10000,
    "one of 200M, 2000 tiny": [(200_000_000,), *[(16,)] * 2000],
}

# The same on a GPU, the most important first
DEVICE_LISTS: dict[str, tuple[str, list[Shape]]] = {
    "GPT-2 124M": ("float32", gpt2()),
    "1000 x 256": ("float32", LISTS["1000 x 256"]),
    "Llama-3-8B": ("bfloat16", llama3_8b()),
    "one of 200M, 2000 tiny": ("float32", LISTS["one of 200M, 2000 tiny"]),
    "ResNet-50": ("float32", resnet50()),
    "10000 x 4096": ("float32", LISTS["10000 x 4096"]),
    "MLP": ("float32", LISTS["MLP"]),
}
TINY_LISTS: dict[str, tuple[str, list[Shape]]] = {
    "3 small": ("float32", [(700,), (3, 5), (64,)]),
    "100 x 16": ("bfloat16", [(16,)] * 100),
}

DEVICE_IMAGES: list[Shape] = [
    (32, 256, 56, 56),
    (256, 64, 112, 112),
    (256, 512, 28, 28),
    (32, 64, 112, 112),
    (32, 2048, 7, 7),
    (256, 256, 56, 56),
]
TINY_IMAGES = [(2, 8, 3, 3)]
