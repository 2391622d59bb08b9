"""What ``gradkit.jax`` costs beyond the same calls on NumPy arrays.

Run ``python benchmarks/bench_jax.py [--check]`` with JAX installed. Arrays are so small that nearly
all of the time is overhead: a forward and a backward pass of a norm in one jitted function, and a
clip. Beside it:

- ``direct``: gradkit's functions on NumPy arrays.
- ``jax``: the same formula in JAX's own functions, jitted.
- ``nothing``: a jitted function with as many callbacks, which do nothing: what JAX itself takes.
- ``in turn``: ``nothing`` and then ``direct``, of which each finds the processor's caches full of
  the other's code. Callbacks that compute cannot be expected to take less.

Each number is the best of many rounds, in which the five take turns. ``--check`` fails if a norm's
two passes take more than 15 us beyond ``direct``, and more than ``in turn`` as well.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.buffer_callback import buffer_callback

import gradkit
import gradkit.jax

ROWS, COLUMNS, TENSORS = 8, 64, 10
LIMIT = 15.0  # microseconds beyond the direct calls of a forward and a backward pass
WAYS = ("direct", "gradkit.jax", "jax", "nothing", "in turn")
ROUNDS, CALLS = 150, 20


def direct_norm(dy: Any, x: Any, scale: Any) -> Any:
    """RMS norm's passes on NumPy arrays."""
    y, inv_std = gradkit.rms_norm(x, scale)
    return y, gradkit.rms_norm_grad(dy, x, scale, inv_std)


def passes(norm: Callable[..., Any]) -> Callable[..., Any]:
    """A norm's passes in one jitted function."""

    @jax.jit
    def both(dy: Any, x: Any, scale: Any) -> Any:
        y, backward = jax.vjp(norm, x, scale)
        return y, backward(dy)

    return both


def by_jax(x: Any, scale: Any) -> Any:
    """RMS norm in JAX's own functions."""
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def clip_by_jax(grads: Any) -> Any:
    """Clipping in JAX's own functions."""
    norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in grads))
    return [g * jnp.minimum(1.0, 1.0 / norm) for g in grads], norm


def nothing(count: int) -> Callable[..., Any]:
    """A jitted function with callbacks that leave their results as they are."""

    @jax.jit
    def call(*arrays: Any) -> Any:
        leaves = jax.tree.leaves(arrays)
        for _ in range(count):
            like = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
            aliases = {k: k for k in range(len(leaves))}
            leaves = buffer_callback(_idle, like, input_output_aliases=aliases)(*leaves)
        return leaves

    return call


def _idle(context: Any, outs: Any, *ins: Any) -> None:
    pass


def in_turn(*calls: Callable[[], object]) -> None:
    """One call after the other."""
    for call in calls:
        jax.block_until_ready(call())


def best_times(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Microseconds per call, the best round of each; the calls take turns."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(ROUNDS):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(CALLS):
                jax.block_until_ready(call())
            best[name] = min(best[name], (time.perf_counter() - start) / CALLS * 1e6)
    return best


def measure() -> dict[str, dict[str, float]]:
    """The times of a norm's passes and of a clip, each in four ways."""
    rng = np.random.default_rng(0)
    rows = [rng.normal(size=(ROWS, COLUMNS)).astype(np.float32) for _ in range(2)]
    norm = [*rows, np.ones(COLUMNS, np.float32)]
    grads = [rng.normal(size=COLUMNS).astype(np.float32) for _ in range(TENSORS)]
    clip = jax.jit(partial(gradkit.jax.clip_by_global_norm, max_norm=1.0))
    ways: dict[str, dict[str, tuple[Callable[..., Any], list[Any]]]] = {
        "rms_norm and its gradient": {
            "direct": (direct_norm, norm),
            "gradkit.jax": (passes(gradkit.jax.rms_norm), norm),
            "jax": (passes(by_jax), norm),
            "nothing": (nothing(2), norm),
        },
        "clip_by_global_norm": {
            "direct": (partial(gradkit.clip_by_global_norm, max_norm=1.0), [grads]),
            "gradkit.jax": (clip, [grads]),
            "jax": (jax.jit(clip_by_jax), [grads]),
            "nothing": (nothing(1), [grads]),
        },
    }
    return {name: best_times(bound(calls)) for name, calls in ways.items()}


def bound(calls: dict[str, tuple[Callable[..., Any], list[Any]]]) -> dict[str, Callable[[], Any]]:
    """The calls with their arguments, and two of them in turn."""
    ready = {
        way: partial(call, *(given if way == "direct" else jax.tree.map(jnp.array, given)))
        for way, (call, given) in calls.items()
    }
    return {**ready, "in turn": partial(in_turn, ready["nothing"], ready["direct"])}


def main() -> int:
    """Print the table; return 1 if ``--check`` finds a norm above both limits."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help=f"fail above {LIMIT} us, and above what is in turn"
    )
    check = parser.parse_args().check
    print(f"us a call, {ROWS} x {COLUMNS} float32, {TENSORS} gradients, JAX {jax.__version__}")
    print(f"{'':26}" + "".join(f"{way:>13}" for way in (*WAYS, "beyond")))
    failed = False
    for name, times in measure().items():
        beyond = times["gradkit.jax"] - times["direct"]
        print(f"{name:26}" + "".join(f"{t:13.1f}" for t in (*map(times.get, WAYS), beyond)))
        slow = beyond > LIMIT and times["gradkit.jax"] > times["in turn"]
        failed = failed or ("gradient" in name and slow)
    return int(check and failed)


if __name__ == "__main__":
    sys.exit(main())
