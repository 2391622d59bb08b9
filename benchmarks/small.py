"""Calls on arrays so small that nearly all of the time is overhead."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from benchmarks import lists, rows
from benchmarks.devices import Device
from benchmarks.peers import Arguments
from benchmarks.timing import LAUNCH, OVERHEAD, Case

LOCAL = ("naive", "torch", "jax", "torch.compile", "liger")  # peers in this process


def cases(device: Device, *, quick: bool = False) -> Iterator[Case]:  # noqa: ARG001
    """Yield one call of each kind; on a GPU, compared with a launch that does nothing."""

    def one(name: str) -> Arguments:
        if name == "layer_norm_grad":
            return rows.gradient_arguments(device, name, (8, 64), "float32")
        if name == "accumulate_grad":
            buffer, grad = (device.normal((64,), "float32", seed) for seed in (0, 1))
            return {"buffer": buffer, "grad": grad}
        found = {"grads": [device.normal((64,), "float32")]}
        return found | {"limit": lists.fixed(1e9)} if name == "clip_grad_norm" else found

    tables = rows.TABLES | lists.TABLES
    for name, shape, written in (
        ("layer_norm_grad", "8x64", ()),
        ("grad_norm", "1 x 64", ()),
        ("clip_grad_norm", "1 x 64", ("grads", "limit")),
        ("accumulate_grad", "64", ("buffer",)),
        ("zero_grad", "1 x 64", ("grads",)),
    ):
        targets = {LAUNCH: 3.0} if device.name == "cuda" else {}
        case = Case(name, shape, "float32", tables[name], partial(one, name), 0, targets, written)
        yield replace(case, peers=LOCAL, note=OVERHEAD)
