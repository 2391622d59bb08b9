"""What a norm costs inside PyTorch's autograd beyond gradkit's own calls.

Run ``python benchmarks/bench_torch.py [--check | --gpt]`` with PyTorch installed. Each case is a
forward and a backward pass on 8 rows of 64 elements (or channels), so that nearly all of the time
is overhead:

- ``direct``: the two calls of gradkit on the same tensors.
- ``+ engine``: the same, then PyTorch's ``x.view_as(x)`` and its backward pass. In one round with
  the calls, because the engine by itself finds all that it needs in the caches.
- ``bare``: a ``torch.autograd.Function`` that makes the two calls and checks nothing.
- ``gradkit.torch`` and ``torch``: the function of each, and ``torch.autograd.grad``.

``beyond`` is ``gradkit.torch`` less ``+ engine``; ``own`` is less ``bare``, which is itself more
than 15 us above ``+ engine``. ``--check`` fails if ``own`` is above 15 us. Each number is the best
of many rounds, in which all take turns; a check takes more rounds where a norm seems slow, because
other programs can only add to a time.

``--gpt`` takes training steps of a small GPT instead, with PyTorch's norms and with ours, eagerly
and by ``torch.compile``, which needs a C++ compiler.
"""

import argparse
import copy
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import gradkit
import gradkit.torch as ours

ROWS, ELEMENTS = 8, 64
LIMIT = 15.0  # microseconds
ROUNDS, CALLS, TRIES = 200, 20, 10
Calls = dict[str, Callable[[], object]]


class Norm(NamedTuple):
    """A norm in three ways.

    ``forward`` maps tensors to y and what ``gradient`` wants behind dy, x and scale.
    """

    tensors: tuple[torch.Tensor, ...]
    forward: Callable[..., Any]
    gradient: Callable[..., Any]
    ours: Callable[..., torch.Tensor]
    theirs: Callable[..., torch.Tensor]


def layer_norm() -> Norm:
    """Layer norm with scale and bias."""
    x, w, b = _inputs()
    functional = torch.nn.functional.layer_norm
    return Norm(
        (x, w, b),
        gradkit.layer_norm,
        gradkit.layer_norm_grad,
        lambda x, w, b: ours.layer_norm(x, (ELEMENTS,), w, b),
        lambda x, w, b: functional(x, (ELEMENTS,), w, b),
    )


def rms_norm() -> Norm:
    """RMS norm with a scale."""
    x, w, _ = _inputs()
    functional = torch.nn.functional.rms_norm
    return Norm(
        (x, w),
        gradkit.rms_norm,
        gradkit.rms_norm_grad,
        lambda x, w: ours.rms_norm(x, (ELEMENTS,), w, 1e-6),
        lambda x, w: functional(x, (ELEMENTS,), w, 1e-6),
    )


def group_norm() -> Norm:
    """Group norm with scale and bias."""
    functional = torch.nn.functional.group_norm
    return Norm(
        _inputs(),
        lambda x, w, b: gradkit.group_norm(x, 8, w, b),
        gradkit.group_norm_grad,
        lambda x, w, b: ours.group_norm(x, 8, w, b),
        lambda x, w, b: functional(x, 8, w, b),
    )


def batch_norm() -> Norm:
    """Batch norm with scale, bias and running statistics."""
    mean, var = torch.zeros(ELEMENTS), torch.ones(ELEMENTS)
    functional = torch.nn.functional.batch_norm
    return Norm(
        _inputs(),
        lambda x, w, b: gradkit.batch_norm(x, w, b, running_mean=mean, running_var=var),
        gradkit.batch_norm_grad,
        lambda x, w, b: ours.batch_norm(x, mean, var, w, b, True),
        lambda x, w, b: functional(x, mean, var, w, b, True),
    )


def frozen_batch_norm() -> Norm:
    """Batch norm by running statistics."""
    mean, var = torch.zeros(ELEMENTS), torch.ones(ELEMENTS)
    functional = torch.nn.functional.batch_norm
    return Norm(
        _inputs(),
        lambda x, w, b: (gradkit.batch_norm_inference(x, w, b, mean, var), mean, var),
        gradkit.batch_norm_inference_grad,
        lambda x, w, b: ours.batch_norm(x, mean, var, w, b),
        lambda x, w, b: functional(x, mean, var, w, b),
    )


def _inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(ROWS, ELEMENTS, requires_grad=True)
    return x, torch.nn.Parameter(torch.ones(ELEMENTS)), torch.nn.Parameter(torch.zeros(ELEMENTS))


def calls_of(norm: Norm) -> Calls:
    """Both passes, in each way."""
    tensors, plain = norm.tensors, [t.detach() for t in norm.tensors]
    x, dy = tensors[0], torch.ones(ROWS, ELEMENTS)

    def direct() -> None:
        _, *saved = norm.forward(*plain)
        norm.gradient(dy, *plain[:2], *saved)

    def direct_and_engine() -> None:
        direct()
        torch.autograd.grad(x.view_as(x), x, dy)

    class Bare(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
            y, *saved = norm.forward(*tensors)
            ctx.save_for_backward(*tensors[:2], *saved)
            return y

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> Any:
            return norm.gradient(dy, *ctx.saved_tensors)

    def through(function: Callable[..., torch.Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(function(*tensors), tensors, dy)

    return {
        "direct": direct,
        "+ engine": direct_and_engine,
        "bare": through(Bare.apply),
        "gradkit.torch": through(norm.ours),
        "torch": through(norm.theirs),
    }


def measure(calls: Calls, best: dict[str, float]) -> None:
    """Lower ``best``, microseconds per call, to the best of more rounds; the calls take turns."""
    for _ in range(ROUNDS):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            best[name] = min(best[name], (time.perf_counter() - start) / CALLS * 1e6)


def own(times: dict[str, float]) -> float:
    """What gradkit.torch takes that a bare function does not."""
    return times["gradkit.torch"] - times["bare"]


class Block(torch.nn.Module):
    """A block of a transformer, normalised before attention and before its MLP."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of shape (samples, length, width)."""
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norms[1](x))))


def steps_of_a_gpt() -> None:
    """Print milliseconds of a core for both passes of four blocks, 8 samples of 64 x 128."""
    theirs = torch.nn.Sequential(*(Block(128, 4) for _ in range(4)), torch.nn.LayerNorm(128))
    swapped = ours.replace_norms(copy.deepcopy(theirs))
    x = torch.randn(8, 64, 128)

    def step(model: Callable[..., torch.Tensor]) -> Callable[[], object]:
        return lambda: model(x).square().mean().backward()

    calls = {"torch": step(theirs), "gradkit.torch": step(swapped)}
    calls |= {"torch, compiled": step(torch.compile(theirs))}
    calls |= {"gradkit.torch, compiled": step(torch.compile(swapped))}
    times = dict.fromkeys(calls, float("inf"))
    for _ in range(ROUNDS):
        for name, call in calls.items():
            start = time.process_time()
            call()
            times[name] = min(times[name], (time.process_time() - start) * 1e3)
    for name, milliseconds in times.items():
        print(f"{name:24}{milliseconds:8.2f} ms")


def main() -> int:
    """Print the table; return 1 if ``--check`` finds ``own`` above the limit."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help=f"fail above {LIMIT} us")
    parser.add_argument("--gpt", action="store_true", help="steps of a small GPT instead")
    check, gpt = parser.parse_args().check, parser.parse_args().gpt
    torch.set_num_threads(1)
    if gpt:
        steps_of_a_gpt()
        return 0
    print(f"us for both passes, {ROWS} x {ELEMENTS} float32, PyTorch {torch.__version__}")
    slow = False
    for k, norm in enumerate((layer_norm, rms_norm, group_norm, batch_norm, frozen_batch_norm)):
        calls = calls_of(norm())
        times = dict.fromkeys(calls, float("inf"))
        if not k:
            print(" " * 18 + "".join(f"{name:>14}" for name in (*times, "beyond", "own")))
        for _ in range(TRIES if check else 1):
            measure(calls, times)
            if own(times) <= LIMIT:
                break
        slow |= own(times) > LIMIT
        row = *times.values(), times["gradkit.torch"] - times["+ engine"], own(times)
        print(f"{norm.__name__:18}" + "".join(f"{t:14.1f}" for t in row))
    return int(check and slow)


if __name__ == "__main__":
    sys.exit(main())
