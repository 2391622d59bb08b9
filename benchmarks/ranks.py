"""Norms and clipping over four processes beside PyTorch's own, on DTensors.

``python -m benchmarks.ranks [--quick]`` runs both on gloo, on the same shards, in turns. It prints
a table: the median time of a call on rank 0, the median over rounds of PyTorch's time divided by
gradkit's, and what a rank hands to the network in a call. Processes of one machine say nothing of a
network's latency; the counts hold anywhere.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import gradkit

RANKS, QUICK_RANKS = 4, 2
ROUNDS = 41
# Name, number of tensors and their shape; the first axis is split over the ranks.
SHAPES = (("8 x 256", 8, (256,)), ("100 x 16384", 100, (128, 128)), ("8 x 1 Mi", 8, (1024, 1024)))
HEAD = "| gradients | call | gradkit ms | PyTorch ms | ratio | gradkit sends | PyTorch sends |"


class Counted:
    """gradkit's group, and what this rank handed to it."""

    def __init__(self) -> None:
        self._group = gradkit.distributed.from_torch()
        self.rank, self.size = self._group.rank, self._group.size
        self.sent: list[int] = []

    def allgather(self, state: np.ndarray[Any, Any], /) -> np.ndarray[Any, Any]:
        """The group's own, counted."""
        self.sent.append(state.nbytes)
        return self._group.allgather(state)


class Collectives(TorchDispatchMode):
    """The bytes of every collective that PyTorch's own operators start."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note a collective's input. A DTensor's operators come again, on its local part."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func.namespace.endswith("c10d_functional") and "wait" not in func.__name__:
            self.sent.append(args[0].numel() * args[0].element_size())
        return func(*args, **kwargs or {})


def run(number: int, store: str, *, quick: bool) -> None:
    """Measure as one of all ranks; the first one prints."""
    size = QUICK_RANKS if quick else RANKS
    torch.set_num_threads(1)
    gradkit.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=number, world_size=size)
    for name, count, shape in SHAPES[:1] if quick else SHAPES:
        group = Counted()
        for call, (ours, theirs) in calls(count, shape, group).items():
            line = measured(ours, theirs, 3 if quick else ROUNDS)
            sent = counts(ours, theirs, group)
            if number == 0:
                print(f"| {name} | {call} | {line} | {sent} |", flush=True)
    dist.barrier()


def calls(count: int, shape: tuple[int, ...], group: Counted) -> dict[str, tuple[Any, Any]]:
    """Return gradkit's call and PyTorch's, on parameters that hold DTensors as gradients."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    params = []
    for _ in range(count):
        param = distribute_tensor(torch.zeros(shape), mesh, [Shard(0)]).requires_grad_()
        param.grad = distribute_tensor(torch.randn(shape), mesh, [Shard(0)])
        params.append(param)
    grads = [param.grad for param in params]
    shards, utils = [grad.to_local() for grad in grads], torch.nn.utils
    expected = utils.get_total_norm(grads).full_tensor()
    own = gradkit.grad_norm(shards, group=group).float()
    torch.testing.assert_close(own, expected, rtol=1e-4, atol=0)  # PyTorch adds up in float32
    limits = (float(expected) * 0.999**k for k in range(10**6))  # so that each call scales
    return {
        "norm": (
            lambda: gradkit.grad_norm(shards, group=group),
            lambda: utils.get_total_norm(grads).full_tensor(),
        ),
        "clip, scaling": (
            lambda: gradkit.clip_grad_norm(shards, next(limits), group=group),
            lambda: utils.clip_grad_norm_(params, next(limits)).full_tensor(),
        ),
        "clip, not scaling": (
            lambda: gradkit.clip_grad_norm(shards, 1e9, group=group),
            lambda: utils.clip_grad_norm_(params, 1e9).full_tensor(),
        ),
    }


def measured(ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int) -> str:
    """Both in turns, in alternating order: their medians and the ratio's."""
    times = np.zeros((rounds, 2))
    for number in range(-1, rounds):  # the first one only warms up
        for which in (0, 1) if number % 2 else (1, 0):
            dist.barrier()
            start = time.perf_counter()
            (ours, theirs)[which]()
            if number >= 0:
                times[number, which] = time.perf_counter() - start
    mine, other = np.median(times, axis=0) * 1e3
    return f"{mine:.2f} | {other:.2f} | {np.median(times[:, 1] / times[:, 0]):.2f}"


def counts(ours: Callable[[], Any], theirs: Callable[[], Any], group: Counted) -> str:
    """Collectives and bytes of one call of each."""
    group.sent.clear()
    ours()
    with Collectives() as collectives:
        theirs()
    return " | ".join(f"{len(s)}: {sum(s)} bytes" for s in (group.sent, collectives.sent))


def main(options: list[str]) -> int:
    """Start all ranks; 0 if none fails."""
    print(HEAD, "|---" * 7 + "|", sep="\n", flush=True)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        store = (Path(folder) / "store").as_uri()
        command = [sys.executable, "-m", "benchmarks.ranks", *options]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        ranks = [
            stack.enter_context(subprocess.Popen([*command, store, str(k)], env=environment))
            for k in range(QUICK_RANKS if "--quick" in options else RANKS)
        ]
        stack.callback(lambda: [process.kill() for process in ranks])
        return max((abs(process.wait(timeout=600)) for process in ranks), default=0)


if __name__ == "__main__":
    given = [option for option in sys.argv[1:] if option != "--quick"]
    if given:
        run(int(given[1]), given[0], quick="--quick" in sys.argv)
        os._exit(0)  # gloo's threads may abort a process whose Python takes itself down
    else:
        sys.exit(main(sys.argv[1:]))
