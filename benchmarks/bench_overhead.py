"""The cost of a call apart from its arithmetic: small arrays, imports, working memory."""

import os
import resource
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import numpy as np

import gradkit
from benchmarks import bench_batch_norm, gpu_peers, norms
from benchmarks import peers as peers_
from benchmarks.harness import LAUNCH, OURS, Case
from benchmarks.places import Arrays

IMPORT_MS = 50.0
MEMORY_MIB = 16.0


def cases(peers: Sequence[Any], *, quick: bool) -> Iterator[Case]:  # noqa: ARG001
    """Calls on arrays so small that nearly all of the time is overhead."""
    local = [peer for peer in peers if peer.name != "onnxruntime"]
    given = norms.rows((8, 64), np.float32, centred=True)
    yield _case("layer_norm_grad", "8x64", local, gradkit.layer_norm_grad, **given)
    grads = [np.ones(64, np.float32)]
    yield _case("grad_norm", "1 x 64", local, gradkit.grad_norm, grads=grads)
    clip = lambda grads, limit: gradkit.clip_grad_norm(grads, limit())  # noqa: E731
    yield _case("clip_grad_norm", "1 x 64", local, clip, grads=grads, limit=lambda: 1e9)
    pair = {"buffer": np.zeros(64, np.float32), "grad": np.zeros(64, np.float32)}
    yield _case("accumulate_grad", "64", local, gradkit.accumulate_grad, **pair)


def _case(name: str, shape: str, local: Sequence[Any], call: Any, **given: Any) -> Case:
    return Case(
        operation=name,
        shape=shape,
        dtype="float32",
        bytes=0,
        calls={OURS: lambda: call(**given), **peers_.calls(local, name, **given)},
        note="overhead",
        repeats=50,
    )


def device_cases(place: Arrays, peers: Sequence[Any]) -> Iterator[Case]:
    """The same on a device, compared with one launch of a kernel that does nothing."""
    rows = norms.device_rows(place, (8, 64), "float32", centred=True)
    vector, other = place.normal((64,), "float32"), place.normal((64,), "float32", 1)
    clip = lambda grads, limit: gradkit.clip_grad_norm(grads, limit())  # noqa: E731
    grads = {"grads": [vector]}
    pair = {"buffer": vector, "grad": other}
    launch = place.launch()
    for name, shape, call, given in (
        ("zero_grad", "1 x 64", gradkit.zero_grad, grads),
        ("accumulate_grad", "64", gradkit.accumulate_grad, pair),
        ("layer_norm_grad", "8x64", gradkit.layer_norm_grad, rows),
        ("grad_norm", "1 x 64", gradkit.grad_norm, grads),
        ("clip_grad_norm", "1 x 64", clip, grads | {"limit": lambda: 1e9}),
    ):
        calls = {OURS: partial(call, **given), **gpu_peers.calls(peers, name, **given)}
        yield Case(
            operation=name,
            shape=shape,
            dtype="float32",
            bytes=0,
            calls=calls if launch is None else calls | {LAUNCH: launch},
            targets={LAUNCH: 3.0},
            note="overhead",
        )


def imports(rounds: int = 15) -> dict[str, float]:
    """Milliseconds of processor time per import, medians of fresh processes.

    Bytecode is always written and used, as for an installed package.
    """
    times: dict[str, list[float]] = {"numpy": [], "gradkit": []}
    with tempfile.TemporaryDirectory(prefix="gradkit-bench-") as bytecode:
        environment = os.environ | {"PYTHONPYCACHEPREFIX": bytecode, "PYTHONDONTWRITEBYTECODE": ""}
        for number in range(-1, rounds):  # the first one writes the bytecode
            for name, found in times.items():
                before = _processor_time_of_children()
                command = [sys.executable, "-c", f"import {name}"]
                subprocess.run(command, check=True, env=environment)
                if number >= 0:
                    found.append(1e3 * (_processor_time_of_children() - before))
    found = {name: round(median(values), 1) for name, values in times.items()}
    return found | {"added": round(found["gradkit"] - found["numpy"], 1), "at most": IMPORT_MS}


def _processor_time_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def memory() -> dict[str, float]:
    """The most MiB that operations allocate beyond their outputs, on arrays of 32 and 128 MiB."""
    found = {}
    for size in (8192, 32768):
        given = norms.rows((size, 1024), np.float32, centred=True)
        out = tuple(np.empty_like(given[name]) for name in ("x", "scale", "scale"))
        call = lambda given=given, out=out: gradkit.layer_norm_grad(**given, out=out)  # noqa: E731
        found[f"layer_norm_grad {size}x1024"] = _peak(call)
        grads = [given["x"]]
        found[f"clip_grad_norm {size}x1024"] = _peak(
            lambda grads=grads: gradkit.clip_grad_norm(grads, 1e-3)
        )
    given = bench_batch_norm.arguments((32, 256, 56, 56), np.float32)
    out = tuple(np.empty_like(given[name]) for name in ("x", "scale", "scale"))
    found["batch_norm_grad 32x256x56x56"] = _peak(lambda: gradkit.batch_norm_grad(**given, out=out))
    return found | {"at most": MEMORY_MIB}


def _peak(call: Callable[[], object]) -> float:
    from gradkit._numpy import scratch

    scratch._spare.clear()  # count what is kept from call to call too
    tracemalloc.start()
    try:
        call()
        return round(tracemalloc.get_traced_memory()[1] / 2**20, 2)
    finally:
        tracemalloc.stop()
