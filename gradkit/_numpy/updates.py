"""Steps of optimisers, on NumPy arrays."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from gradkit._calls.lists import AdamwUpdate, SgdUpdate
from gradkit._calls.roles import Step
from gradkit._dtypes import accumulation_name
from gradkit._numpy.at_random import key_of, random_bits, rounded_at_random
from gradkit._numpy.blocks import BLOCK, Array, blocks, part
from gradkit._numpy.writes import store, whole

__all__ = ["adamw_update", "sgd_update"]


class AdamwNumbers(NamedTuple):
    """Factors of a step of AdamW; ``kernels/updates.cuh`` has the same fields."""

    scale: float
    moment_step: float  # 1 - beta1; below 1/2, -beta1: the moment begins at the gradient
    variance_kept: float
    variance_share: float
    rate: float  # lr / (1 - beta1^step)
    root: float  # 1 / sqrt(1 - beta2^step)
    eps: float
    decay: float  # lr * weight_decay


def adamw_numbers(call: AdamwUpdate, step: int) -> AdamwNumbers:
    """The numbers of a step, by the operations of ``kernels/adamw_numbers.cu``."""
    lr = float(call.lr)
    rate = lr / (1 - power(call.beta1, step))
    root = 1 / math.sqrt(1 - power(call.beta2, step))
    share = 1 - call.beta1
    steps = share - 1 if share > 0.5 else share, call.beta2, 1 - call.beta2
    return AdamwNumbers(float(call.scale), *steps, rate, root, call.eps, lr * call.weight_decay)


def power(base: float, exponent: int) -> float:
    """A power by repeated squares, whose bits do not depend on a library."""
    result, square = 1.0, base
    while exponent > 0:
        if exponent & 1:
            result *= square
        square *= square
        exponent >>= 1
    return result


def next_step(step: Step) -> int:
    """The number of the step that is taken."""
    return step if isinstance(step, int) else int(step) + 1


def count(step: Step, number: int) -> None:
    """Keep the number of the step that was taken, if an array has it."""
    if not isinstance(step, int):
        step[...] = number


def adamw_update(call: AdamwUpdate) -> None:
    """If ``verdict``, parameters after a step of AdamW, and its moments."""
    if not call.verdict:
        return
    number = next_step(call.step)
    numbers = adamw_numbers(call, number)
    with whole():
        for write, param, grad, moment, variance in _parts(call, call.moments, call.variances):
            by = AdamwNumbers(*map(param.dtype.type, numbers))
            g = grad * by.scale
            m = (moment if by.moment_step > 0 else g) + (g - moment) * by.moment_step
            v = variance * by.variance_kept + g * g * by.variance_share
            change = m / (np.sqrt(v) * by.root + by.eps) * by.rate
            write(param - (change + param * by.decay if by.decay else change), m, v)
        count(call.step, number)


def sgd_update(call: SgdUpdate) -> None:
    """If ``verdict``, parameters after a step of SGD, and their momenta."""
    if not call.verdict:
        return
    numbers = float(call.lr), float(call.scale), call.momentum, call.weight_decay
    with whole():
        for write, param, grad, *momenta in _parts(call, *filter(None, [call.momenta])):
            lr, scale, momentum, decay = map(param.dtype.type, numbers)
            change = grad * scale
            if decay:
                change = change + param * decay
            moved = [momentum_block * momentum + change for momentum_block in momenta]
            if moved:
                change = change + moved[0] * momentum if call.nesterov else moved[0]
            write(param - change * lr, *moved)


def _parts(call: AdamwUpdate | SgdUpdate, *states: Sequence[Array]) -> Iterator[Any]:
    """Blocks side by side as they are computed with, behind what writes all but gradients."""
    key = None if call.seed is None else key_of(call.seed)
    counters = call.offsets or [0] * len(call.params)
    for counter, *arrays in zip(counters, call.params, call.grads, *states, strict=True):
        wide = np.dtype(accumulation_name(arrays[0].dtype.name))
        for index in blocks(arrays[0].shape, BLOCK // 4):
            parts = [part(array, index) for array in arrays]
            yield _Out(key, counter, [parts[0], *parts[2:]]), *(each.astype(wide) for each in parts)
            counter += parts[0].size


class _Out(NamedTuple):
    """Writes a parameter, rounded by random bits if there is a key, and states."""

    key: int | None
    counter: int
    into: list[Array]

    def __call__(self, param: Array, *states: Array) -> None:
        target, *others = self.into
        if self.key is None:
            store(param, target)
        else:
            bits = random_bits(self.key, self.counter, target.size).reshape(target.shape)
            target.view(np.uint16)[...] = rounded_at_random(
                param.astype(np.float64), bits, target.dtype
            )
        for state, other in zip(states, others, strict=True):
            store(state, other)
