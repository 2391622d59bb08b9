"""Checks of whole steps: the guide's recipe for data parallelism."""

import re
from itertools import pairwise
from pathlib import Path

import numpy as np

import gradkit
from tests.processes.norms import bits

GUIDE = Path(__file__).parents[2] / "docs" / "distributed.md"
ROWS = 23  # of a batch, which no number of ranks divides


def guide():
    """The names that the guide's recipe defines."""
    text = GUIDE.read_text()
    section = text[text.index("## Data parallelism") :]
    names = {"np": np, "gradkit": gradkit, "rng": np.random.default_rng(0)}
    exec(re.search(r"^```python\n(.*?)^```", section, re.M | re.S)[1], names)
    return names


def batch():
    """Numbers whose products add up exactly, in any order."""
    rng = np.random.default_rng(11)
    x, y = rng.integers(-8, 9, (ROWS, 3)) / 8, rng.integers(-8, 9, (ROWS, 2)) / 8
    return x, y, [rng.integers(-8, 9, (3, 2)) / 8]


def micro_batches(rng, rank, size):
    """A rank's part of an uneven split, in uneven pieces; rank 0 of many has none."""
    x, y, _ = batch()
    ends = np.sort(rng.integers(0, ROWS + 1, size - 1))
    ends[:1] = 0
    begin, stop = [0, *ends, ROWS][rank : rank + 2]
    cuts = [begin, *np.sort(rng.integers(begin, stop + 1, 3)), stop]
    return [(x[a:b], y[a:b]) for a, b in pairwise(cuts) if a < b]


def step(rank, size, add_up):
    """Every split gives the bits of one process with the whole batch."""
    train_step = guide()["train_step"]
    found = []
    for seed in range(4):
        x, y, params = batch()
        norm = train_step(params, micro_batches(np.random.default_rng(seed), rank, size), add_up)
        found.append((norm, params))
    x, y, whole = batch()
    alone = train_step(whole, [(x, y)], lambda _: None)
    assert float(alone) > 0.5  # so that it clips
    for norm, params in found:
        assert bits(norm, *params) == bits(alone, *whole)
    return bits(alone)


def data_parallelism(place):
    return step(place.rank, place.size, place.add_up)


CHECKS = {"data parallelism": data_parallelism}
