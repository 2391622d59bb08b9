"""The model of collectives: what its steps deliver, what it counts, and the page that it writes."""

import pytest

from benchmarks import ranks_model as model
from benchmarks import report


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 7, 8, 13, 64])
@pytest.mark.parametrize("algorithm", [model.bruck, model.ring])
def test_every_rank_gets_each_block_once(algorithm, ranks):
    steps = algorithm(ranks)
    for held in model.delivered(steps, ranks):
        assert sorted(held) == list(range(ranks))
    assert sum(model.allgather_sizes(steps)) == 48 * (ranks - 1)
    if algorithm is model.bruck:
        assert len(steps) == (ranks - 1).bit_length()


@pytest.mark.parametrize(
    ("ranks", "chosen"),
    [(8, "bruck"), (1706, "bruck"), (1707, "ring"), (8192, "bruck"), (16384, "ring")],
)
def test_what_mpich_chooses(ranks, chosen):
    assert model.mpich(ranks).__name__ == chosen


def test_time_is_latency_and_bytes():
    network = model.Network(2.0, 10.0)
    assert network.seconds([]) == 0.0
    assert network.seconds([30, 10]) == 2 * 2 + 4
    assert model.nccl_allgather(16) == pytest.approx((3.6 + 14 * 1.8 * 0.47 + 2.7) * 1e-6)


def test_exact_sums_are_added_on_the_way():
    assert model.exact_sizes(8, adds=True) == [48, 96, 192, 200, 200, 200]
    assert model.exact_sizes(8, adds=False) == [48, 96, 192, 200, 400, 800]


def test_the_page_has_the_tables():
    """``python -m benchmarks.ranks_model`` writes them."""
    for name, table in model.tables().items():
        assert report.in_page(model.PAGE, name) == table
    assert "| 16,384 |" in model.tables()["times"]
    assert "| 100 |" in report.in_page(model.PAGE, "times").splitlines()[-1]  # as the text says
