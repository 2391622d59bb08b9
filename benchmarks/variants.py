"""Time variants of the code for GPUs: ``python -m benchmarks.variants [CASE ...]``.

What another constant, another grid or another access would give, before it is built: each case runs
with each change to a launcher's module or to a kernel's text, in one process, beside a copy and
PyTorch's call. Results are not checked.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

import gradkit
from benchmarks import peers
from benchmarks.devices import Call, Cuda, Device
from gradkit import _cuda
from gradkit._cuda import list_tables, row_forward
from gradkit._cuda.launch import grids
from gradkit._cuda.launch.device import CupyDevice
from gradkit._open import dispatch

ROUNDS = 15


class Variant(NamedTuple):
    """Attributes of modules that are set, and texts of kernels that are replaced."""

    name: str
    attributes: tuple[tuple[Any, str, Any], ...] = ()
    texts: tuple[tuple[str, str], ...] = ()


def _stores(function: str) -> tuple[tuple[str, str], ...]:
    """Stores of 16 bytes by one of CUDA's functions for them."""
    plain = "reinterpret_cast<Part*>(to)[i / EACH] = part;"
    target = "reinterpret_cast<uint4*>(to) + i / EACH"
    wide = f"{function}({target}, *reinterpret_cast<const uint4*>(&part));"
    return ((plain, f"if constexpr (sizeof(Part) == 16) {wide} else {plain}"),)


def _a_block_each(places: Any, sms: int, rows: int, *given: Any, **more: Any) -> grids.RowBlocks:
    """As many blocks as rows need, and not as many as the device holds."""
    blocks = grids.row_blocks(places, sms, rows, *given, **more)
    return replace(blocks, count=-(-rows // blocks.rows))


def _chunks(many: int, blocks: int) -> Variant:
    attributes = (list_tables, "_MANY_CHUNKS", many), (list_tables, "_BLOCKS", blocks)
    return Variant(f"{many} chunks, {blocks} blocks a multiprocessor", attributes)


def _rows(chunks: int, *, each: bool) -> Variant:
    name = f"{chunks} packs a thread" + ", a block for each" * each
    grid = ((row_forward, "row_blocks", _a_block_each),) if each else ()
    return Variant(name, ((row_forward, "_FORWARD_CHUNKS", chunks), *grid))


STORES = [
    Variant("stores that leave L2 first", texts=_stores("__stcs")),
    Variant("stores through L2", texts=_stores("__stwt")),
]
LISTS = [_chunks(many, blocks) for many in (1 << 13, 1 << 16, 1 << 19) for blocks in (16, 1 << 16)]
ROWS = [_rows(chunks, each=each) for chunks in (4, 2, 1) for each in (False, True)]


class Case(NamedTuple):
    """Maker of a call of gradkit's and one of PyTorch's, and the variants of the former."""

    calls: Callable[[Device], tuple[Call, Call]]
    variants: list[Variant]


def _sum(device: Device, dtype: str) -> tuple[Call, Call]:
    buffer, grad = (device.normal((16384, 16384), dtype, seed) for seed in (0, 1))
    theirs = peers.tensor(buffer), peers.tensor(grad)
    return partial(gradkit.accumulate_grad, buffer, grad), partial(peers.torch.Tensor.add_, *theirs)


def _product(device: Device) -> tuple[Call, Call]:
    grads = device.normal((30000, 4096), "float32")
    theirs = partial(peers.torch.Tensor.mul_, peers.tensor(grads), 1.0001)
    return partial(gradkit.scale_grads, grads, 1.0001), theirs


def _norm(device: Device, name: str) -> tuple[Call, Call]:
    x, scale = device.normal((16384, 4096), "bfloat16"), device.normal((4096,), "bfloat16", 1)
    function = getattr(peers.torch.nn.functional, name)
    theirs = partial(function, peers.tensor(x), (4096,), peers.tensor(scale))
    return partial(getattr(gradkit, name), x, scale), theirs


CASES = {
    "accumulate_grad float32": Case(partial(_sum, dtype="float32"), LISTS + STORES),
    "accumulate_grad bfloat16": Case(partial(_sum, dtype="bfloat16"), LISTS + STORES),
    "scale_grads float32": Case(_product, LISTS + STORES),
    "rms_norm bfloat16": Case(partial(_norm, name="rms_norm"), ROWS + STORES),
    "layer_norm bfloat16": Case(partial(_norm, name="layer_norm"), ROWS + STORES),
}


@contextmanager
def applied(variant: Variant) -> Iterator[None]:
    """Compile and plan anew, with the variant's changes."""
    compile_text = CupyDevice.compile

    def compile_changed(self: CupyDevice, source: str, options: tuple[str, ...]) -> Any:
        for old, new in variant.texts:
            source = source.replace(old, new)
        return compile_text(self, source, options)

    with ExitStack() as stack:
        for module, name, value in variant.attributes:
            stack.enter_context(patch.object(module, name, value))
        stack.enter_context(patch.object(CupyDevice, "compile", compile_changed))
        backends = {number: _cuda.CudaBackend(CupyDevice(number)) for number in _cuda.backends}
        stack.enter_context(patch.dict(_cuda.backends, backends))
        stack.enter_context(patch.dict(dispatch._plans, clear=True))
        for cache in (list_tables._plans, list_tables._cuts):
            stack.enter_context(patch.object(cache, "find", lambda _: None))
        yield


def _print(device: Device, name: str, call: Call) -> None:
    try:
        for _ in range(3):
            call()
        seconds = median(device.timer(call) for _ in range(ROUNDS))
    except Exception as error:
        print(f"  {name:50} {type(error).__name__}: {error}")
    else:
        print(f"  {name:50} {seconds * 1e6:8.1f} us", flush=True)


def main() -> None:
    """Time the cases named on the command line, or all."""
    device = Cuda()
    _print(device, "copying 512 MiB", device.copy)
    for name in sys.argv[1:] or CASES:
        print(name)
        ours, theirs = CASES[name].calls(device)
        _print(device, "PyTorch", theirs)
        _print(device, "as it is", ours)
        for variant in CASES[name].variants:
            with applied(variant):
                _print(device, variant.name, ours)
        device.drop()


if __name__ == "__main__":
    main()
