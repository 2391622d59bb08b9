"""Cost of one norm over many ranks on a network: ``python -m benchmarks.ranks_model``.

Writes the tables of docs/scaling.md, whose text has the assumptions.
A model, never a measurement. Each collective is a list of steps in which every rank sends one
message at the same time. A step takes the network's latency, and the message's bytes divided by
the bandwidth. ``delivered`` plays the steps of an allgather rank by rank, so that what is counted
is what arrives.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks import report

PAGE = Path(__file__).parents[1] / "docs" / "scaling.md"
STATE = 48  # bytes of a rank: six float64 numbers
EXACT = 200  # and of an exact sum: 24 digits, and what is not finite
RANKS = tuple(2**k for k in range(3, 15))
_MPICH_POWER_OF_TWO, _MPICH_ANY = 524288, 81920  # bytes of all ranks from which MPICH takes a ring
GPUS = 8  # of a node


class Step(NamedTuple):
    """Every rank sends blocks to the rank at a distance: its first ones or its newest one."""

    distance: int
    blocks: int
    newest: bool = False


class Network(NamedTuple):
    """A message takes ``latency`` seconds and its bytes divided by ``bandwidth``."""

    latency: float
    bandwidth: float

    def seconds(self, sizes: list[int]) -> float:
        """Time of messages that are sent one after another."""
        return len(sizes) * self.latency + sum(sizes) / self.bandwidth


# Cray Aries, as Piz Daint's operators publish it: OSU latency 1.30 us, OSU bandwidth 9607 MB/s.
ARIES = Network(1.30e-6, 9607e6)


def bruck(ranks: int) -> list[Step]:
    """Steps of Bruck's algorithm: each doubles what a rank holds, until it is everything."""
    steps, held = [], 1
    while held < ranks:
        steps.append(Step(held, min(held, ranks - held)))
        held *= 2
    return steps


def ring(ranks: int) -> list[Step]:
    """Each step passes on what came in the one before."""
    return [Step(1, 1, newest=True)] * (ranks - 1)


def mpich(ranks: int) -> Callable[[int], list[Step]]:
    """The algorithm of MPICH for ``STATE`` bytes a rank (src/mpi/coll/coll_selection.json).

    Its recursive doubling sends as many messages and bytes as Bruck's algorithm.
    """
    power_of_two = ranks & (ranks - 1) == 0
    limit = _MPICH_POWER_OF_TWO if power_of_two else _MPICH_ANY
    return bruck if ranks * STATE < limit else ring


def delivered(steps: list[Step], ranks: int) -> list[list[int]]:
    """Ranks whose blocks each rank holds in the end, in the order of their arrival."""
    held = [[rank] for rank in range(ranks)]
    for step in steps:
        sent = [own[-1:] if step.newest else own[: step.blocks] for own in held]
        held = [own + sent[(rank + step.distance) % ranks] for rank, own in enumerate(held)]
    return held


def allgather_sizes(steps: list[Step], block: int = STATE) -> list[int]:
    """The bytes of a rank's messages."""
    return [step.blocks * block for step in steps]


def exact_sizes(ranks: int, *, adds: bool) -> list[int]:
    """Those of an exact norm: an allgather of heads, and then of sums, or an all-reduce of them."""
    heads = allgather_sizes(bruck(ranks))
    if adds:
        return heads + [EXACT] * math.ceil(math.log2(ranks))
    return heads + allgather_sizes(bruck(ranks), EXACT)


# NCCL's own model (src/graph/tuning.cc, protocol LL): microseconds of a start and of a step.
_RING_START, _RING_NVLINK, _RING_NETWORK = 3.6, 1.8 * 0.47, 2.7


def nccl_allgather(ranks: int) -> float:
    """Seconds of the latency of NCCL's ring over nodes of ``GPUS``."""
    nodes = max(1, ranks // GPUS)
    if nodes == 1:
        return (_RING_START + (ranks - 1) * 0.47) * 1e-6
    return (_RING_START + (ranks - nodes) * _RING_NVLINK + (nodes - 1) * _RING_NETWORK) * 1e-6


def microseconds(seconds: float) -> str:
    """Two figures, without an exponent."""
    value = seconds * 1e6
    digits = 1 - math.floor(math.log10(value))
    return f"{round(value, digits):,.{max(0, digits)}f}"


def row(ranks: int) -> list[str]:
    """Return a line of the page's table."""
    chosen, log = allgather_sizes(mpich(ranks)(ranks)), allgather_sizes(bruck(ranks))
    times = [ARIES.seconds(log), ARIES.seconds(chosen), nccl_allgather(ranks)]
    counts = f"{ranks:,}", f"{len(log)}", f"{sum(log):,}", f"{len(chosen):,}"
    return [*counts, *map(microseconds, times)]


def exact_row(ranks: int) -> list[str]:
    """Return a line of the table about exact norms."""
    found = [f"{ranks:,}"]
    for sizes in (exact_sizes(ranks, adds=adds) for adds in (True, False)):
        found += [f"{sum(sizes):,}", microseconds(ARIES.seconds(sizes))]
    return found


def tables() -> dict[str, str]:
    """Return the tables of the page, by the names of their places in it."""
    head = (
        "ranks | messages, logarithmic | bytes sent by a rank | messages, MPICH's choice "
        "| logarithmic | MPICH's choice | NCCL's ring"
    )
    return {
        "times": report.plain_table(head.split(" | "), map(row, RANKS)),
        "exact": report.plain_table(
            ["ranks", "added on the way: bytes sent", "us", "gathered: bytes sent", "us"],
            map(exact_row, RANKS),
        ),
    }


if __name__ == "__main__":
    report.replace_in_page(PAGE, tables())
