"""Bounds of calls that are not far ahead of every peer: ``python -m benchmarks.limits``.

Prints the milliseconds on one thread and on all: of the call, of the peer's on the same arrays, and
of what the call does in part, all in turns like a case.
"""

import argparse
import os
from collections.abc import Iterator
from functools import partial
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np

import gradkit
from benchmarks import channels, lists, rows
from benchmarks.devices import Call, Cpu
from benchmarks.peers import mapped, tensor, torch
from benchmarks.report import markdown
from benchmarks.shapes import LISTS, Shape, chosen

ROUNDS, IMAGES, GROUPS, ROWS = 21, (32, 2048, 7, 7), 32, (8192, 1024)
Calls = dict[str, Call]


def main() -> None:
    """Measure on one thread and on all, and print both."""
    argparse.ArgumentParser(prog="python -m benchmarks.limits", description=__doc__).parse_args()
    device, threads = Cpu(), len(os.sched_getaffinity(0))
    table: dict[tuple[str, str], list[str]] = {}
    for count in sorted({1, threads}):
        gradkit.set_num_threads(count)
        torch.set_num_threads(count)
        for name, calls in _subjects(device):
            device.drop()
            for what, seconds in _in_turns(device, calls).items():
                table.setdefault((name, what), []).append(f"{1e3 * seconds:.3g}")
    heads = ["row", "part", *(f"ms on {count}" for count in sorted({1, threads}))]
    print(markdown(heads, [[*key, *found] for key, found in table.items()]))


def _in_turns(device: Cpu, calls: Calls) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for turn in range(ROUNDS):
        for name in list(calls) if turn % 2 else reversed(calls):
            times[name].append(device.timer(calls[name]))
    return {name: median(row) for name, row in times.items()}


def _subjects(device: Cpu) -> Iterator[tuple[str, Calls]]:
    for dtype in ("float32", "bfloat16"):
        for name in ("batch_norm_inference", "group_norm"):
            yield f"{name} 32x2048x7x7 {dtype}", _images(device, name, dtype)
        yield f"group_norm_grad 32x2048x7x7 {dtype}", _group_gradient(device, dtype)
    for shape in chosen(device).images[:3]:
        yield f"batch_norm_grad {'x'.join(map(str, shape))} float32", _gradient(device, shape)
    for name in ("layer_norm", "rms_norm"):
        yield f"{name} 8192x1024 float32", _fresh(device, name)
    for dtype in ("float16", "bfloat16"):
        yield f"layer_norm_grad 8192x1024 {dtype}", _rows(device, dtype)
    for name in ("MLP", "24 x 1024x1024"):
        yield f"clip_grad_norm, scaling {name}", _clipping(device, name)
    for dtype in ("float32", "bfloat16"):
        yield f"sums and averages 4096x4096 {dtype}", _sums(device, dtype)


def _images(device: Cpu, name: str, dtype: str) -> Calls:
    """The same bytes in longer lines, and copied."""
    given = channels.norm_arguments(device, name, IMAGES, dtype)
    x, y = given["x"], np.empty_like(given["x"])
    numbers = {k: v for k, v in given.items() if k not in ("x", "num_groups")}
    grouped = {"num_groups": GROUPS} if name == "group_norm" else {}

    def call(x: Any, into: Any) -> Call:
        of_channels = {k: v[: x.shape[1]] for k, v in numbers.items()}
        out = (into, None, None) if grouped else into
        return partial(getattr(gradkit, name), x, **of_channels, **grouped, out=out)

    long = (IMAGES[0], GROUPS, -1)
    return {
        "gradkit out=": call(x, y),
        "PyTorch": channels.TABLES[name]["torch"](SimpleNamespace(**mapped(tensor, given))),
        "lines of 3136 elements": call(x.reshape(long), y.reshape(long)),
        "NumPy copies x": partial(np.copyto, y.view(np.int8), x.view(np.int8)),
    }


def _group_gradient(device: Cpu, dtype: str) -> Calls:
    """The same bytes in longer lines, of which each has a sum."""
    given = channels.gradient_arguments(device, "group_norm_grad", IMAGES, dtype)
    peer = channels.TABLES["group_norm_grad"]["torch"](SimpleNamespace(**mapped(tensor, given)))
    long = (IMAGES[0], GROUPS, -1)
    lines = {k: v.reshape(long) if k in ("dy", "x") else v for k, v in given.items()}
    lines["scale"] = given["scale"][:GROUPS]
    out, out_of_lines = gradkit.group_norm_grad(**given), gradkit.group_norm_grad(**lines)
    return {
        "gradkit, new results": partial(gradkit.group_norm_grad, **given),
        "gradkit out=": partial(gradkit.group_norm_grad, **given, out=out),
        "PyTorch": peer,
        "lines of 3136 elements": partial(gradkit.group_norm_grad, **lines, out=out_of_lines),
        "the norm of dy and x": partial(gradkit.grad_norm, [given["dy"], given["x"]]),
    }


def _gradient(device: Cpu, shape: Shape) -> Calls:
    """The same bytes, read and written by a NumPy call."""
    given = channels.gradient_arguments(device, "batch_norm_grad", shape, "float32")
    out = gradkit.batch_norm_grad(**given)
    return {
        "gradkit, new results": partial(gradkit.batch_norm_grad, **given),
        "gradkit out=": partial(gradkit.batch_norm_grad, **given, out=out),
        "NumPy adds dy and x": partial(np.add, given["dy"], given["x"], out=out[0]),
        "the norm of dy and x": partial(gradkit.grad_norm, [given["dy"], given["x"]]),
    }


def _fresh(device: Cpu, name: str) -> Calls:
    """Into memory that is there already, and into new pages."""
    x, scale = device.normal(ROWS, "float32"), device.normal(ROWS[1:], "float32", 1)
    call, given = getattr(gradkit, name), [x, scale] if name == "rms_norm" else [x, scale, scale]
    peer, (like, *parameters) = getattr(torch.nn.functional, name), map(tensor, given)
    out = call(*given)

    def touch() -> None:
        np.empty(x.nbytes, np.uint8)[::4096] = 1

    return {
        "gradkit, new results": partial(call, *given),
        "gradkit out=": partial(call, *given, out=out),
        "PyTorch": partial(peer, like, ROWS[1:], *parameters),
        "a byte of each page of a new array": touch,
        "NumPy copies x": partial(np.copyto, out[0], x),
    }


def _rows(device: Cpu, dtype: str) -> Calls:
    """The same bytes read, and written as other bytes are read."""
    dy, x = (device.normal(ROWS, dtype, seed) for seed in range(2))
    scale, (_, mean, inv_std) = device.normal(ROWS[1:], "float32", 2), gradkit.layer_norm(x)
    given = {"dy": dy, "x": x, "scale": scale, "mean": mean, "inv_std": inv_std}
    out, peer = gradkit.layer_norm_grad(**given), rows.TABLES["layer_norm_grad"]["torch"]
    return {
        "gradkit, new results": partial(gradkit.layer_norm_grad, **given),
        "gradkit out=": partial(gradkit.layer_norm_grad, **given, out=out),
        "PyTorch": peer(SimpleNamespace(**mapped(tensor, given))),
        "the norm of dy and x": partial(gradkit.grad_norm, [dy, x]),
        "NumPy copies x": partial(np.copyto, out[0].view(np.int16), x.view(np.int16)),
    }


def _clipping(device: Cpu, name: str) -> Calls:
    given = lists.gradients(device, "float32", LISTS[name])
    grads, limit = given["grads"], float(gradkit.grad_norm(given["grads"]))
    own = [[grad.copy() for grad in grads] for _ in range(3)]
    with_grads = lists.parameters(mapped(tensor, own[1]))
    low = lists.falling(limit)
    return {
        "gradkit": lambda: gradkit.clip_grad_norm(own[0], low()),
        "PyTorch": lambda: torch.nn.utils.clip_grad_norm_(with_grads, low()),
        "the norm alone": partial(gradkit.grad_norm, grads),
        "NumPy multiplies all": lambda: [np.multiply(g, 1, out=g) for g in own[2]],
    }


def _sums(device: Cpu, dtype: str) -> Calls:
    """On the same arrays: where they lie makes as much of a difference as who adds."""
    buffer, grad = (device.normal((4096, 4096), dtype, seed) for seed in range(2))
    grad[...] = 0  # however often it is added
    into, of = tensor(buffer), tensor(grad)
    found: Calls = {
        "gradkit adds": partial(gradkit.accumulate_grad, buffer, grad),
        "PyTorch adds": partial(into.add_, of),
        "gradkit averages": partial(gradkit.ema_update, buffer, grad, lists.DECAY),
        "PyTorch averages": partial(torch._foreach_lerp_, [into], [of], 1 - lists.DECAY),
    }
    if dtype == "bfloat16":
        kept, wide = buffer.copy(), tensor(device.normal((4096, 4096), "float32"))
        keeping = partial(gradkit.accumulate_grad, buffer, grad, compensation=kept)
        found |= {"gradkit adds, compensated": keeping}
        found |= {"PyTorch adds to float32": partial(wide.add_, of)}
    return found


if __name__ == "__main__":
    main()
