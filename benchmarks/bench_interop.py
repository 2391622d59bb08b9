"""What a call on ten small tensors costs beyond the same call on NumPy arrays.

Run ``python benchmarks/bench_interop.py [--check]`` with PyTorch installed. The tensors have 64
elements each, so nearly all of the time is overhead. There are two baselines:

- ``memory``: NumPy arrays over the tensors' own memory. The difference is the cost of converting
  tensors and returning results; ``--check`` fails if it is above 10 us.
- ``owned``: NumPy arrays that own their memory, which need no search for shared memory.

Each number is the best of many rounds, in which the three take turns.
"""

import argparse
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

import gradkit

TENSORS, ELEMENTS = 10, 64
LIMIT = 10.0  # microseconds per call with ten tensors
ROUNDS, CALLS = 150, 50

OPERATIONS: dict[str, Callable] = {
    "grad_norm": gradkit.grad_norm,
    "clip_grad_norm": lambda g: gradkit.clip_grad_norm(g, 1e9),
    "scale_grads": lambda g: gradkit.scale_grads(g, 1.0),
    "zero_grad": gradkit.zero_grad,
    "clip_by_global_norm": lambda g: gradkit.clip_by_global_norm(g, 1e9),
}


def best_times(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Microseconds per call, the best round of each; the calls take turns."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(ROUNDS):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            best[name] = min(best[name], (time.perf_counter() - start) / CALLS * 1e6)
    return best


def measure() -> dict[str, dict[str, float]]:
    """Each operation's time on tensors and on both baselines."""
    tensors = [torch.randn(ELEMENTS) for _ in range(TENSORS)]
    memory = [tensor.numpy() for tensor in tensors]
    owned = [np.array(array) for array in memory]
    inputs = {"owned": owned, "memory": memory, "torch": tensors}
    return {
        name: best_times({kind: lambda g=g, f=f: f(g) for kind, g in inputs.items()})
        for name, f in OPERATIONS.items()
    }


def main() -> int:
    """Print the table; return 1 if ``--check`` finds a time above the limit."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help=f"fail above {LIMIT} us")
    check = parser.parse_args().check
    print(f"us a call, {TENSORS} tensors of {ELEMENTS} float32, PyTorch {torch.__version__}")
    print(f"{'':20} {'owned':>8} {'memory':>8} {'torch':>8} {'beyond memory':>14} {'owned':>8}")
    worst = 0.0
    for name, t in measure().items():
        beyond = t["torch"] - t["memory"]
        worst = max(worst, beyond)
        print(
            f"{name:20} {t['owned']:8.1f} {t['memory']:8.1f} {t['torch']:8.1f} "
            f"{beyond:14.1f} {t['torch'] - t['owned']:8.1f}"
        )
    return int(check and worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
