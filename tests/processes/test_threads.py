"""The checks that need no library, over threads of this process."""

import pytest

from tests.processes import training
from tests.processes.groups import contract
from tests.ranks import results


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_group_of_threads_moves_bits(size):
    results(lambda group: contract(group, list(range(size)), group.rank), size)


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_data_parallelism_takes_the_step_of_the_whole_batch(size):
    """However unevenly the batch is split; this is the code of docs/guide.md."""

    def work(group):
        def add_up(array):
            array[...] = group.allgather(array.reshape(-1)).sum(axis=0).reshape(array.shape)

        return training.step(group.rank, size, add_up)

    assert len(set(results(work, size))) == 1
