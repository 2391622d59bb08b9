"""Batch norm over ranks on tensors of every framework, and beside torch's of the whole batch."""

from itertools import pairwise

import numpy as np

import gradkit
from tests.ranks import results

CUTS = (0, 3, 3, 10)  # where the ranks' parts begin and end: one is empty


def hosts(shape=(10, 5, 4)):
    rng = np.random.default_rng(7)
    x, dy = rng.standard_normal((2, *shape)).astype(np.float32)
    scale, bias = rng.standard_normal((2, shape[1])).astype(np.float32)
    return x, dy, scale, bias


def passes_over_ranks(make):
    """Both passes on every rank, on arrays that ``make`` made beforehand."""
    x, dy, scale, bias = hosts()
    held = [
        tuple(map(make, (x[start:end], dy[start:end], scale, bias)))
        for start, end in pairwise(CUTS)
    ]

    def work(group):
        own_x, own_dy, *affine = held[group.rank]
        forward = gradkit.batch_norm(own_x, *affine, group=group)
        backward = gradkit.batch_norm_grad(own_dy, own_x, affine[0], *forward[1:], group=group)
        return *forward, *backward

    return held, results(work, len(held))


def test_results_are_the_callers(lib):
    held, found = passes_over_ranks(lib.make)
    _, expected = passes_over_ranks(np.array)
    for (x, *_), arrays, hosts_ in zip(held, found, expected, strict=True):
        for array, host in zip(arrays, hosts_, strict=True):
            assert isinstance(array, lib.kind)
            assert lib.dtype(array) == "float32"
            assert lib.device(array) == lib.device(x)
            np.testing.assert_array_equal(lib.read(array), host)


def test_ranks_may_be_of_different_frameworks(lib):
    x, *_ = hosts()
    held = lib.make(x[:3]), x[3:]
    (_, mean, inv_std), on_host = results(
        lambda g: gradkit.batch_norm(held[g.rank], group=g), len(held)
    )
    np.testing.assert_array_equal(lib.read(mean), on_host[1])
    np.testing.assert_array_equal(lib.read(inv_std), on_host[2])
