"""Results from some size on are computed in scratch and copied: the same bits."""

from contextlib import contextmanager

import numpy as np
import pytest

import gradkit
from gradkit._numpy import tuning
from gradkit._numpy.channels import Channels
from gradkit._numpy.groups import Groups


@contextmanager
def streamed(always):
    """Results of every size count as large, or none does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "STREAMED_BYTES", 1 if always else 1 << 40)
        with gradkit.use_cpu_backend("numpy"):
            yield


def drawn(shape, seed):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def norms_of_channels(shape):
    x, dy, scale = drawn(shape, 1), drawn(shape, 2), drawn(shape[1], 3)
    found = []
    for norm in (
        lambda: (gradkit.batch_norm(x, scale, scale), gradkit.batch_norm_grad),
        lambda: (gradkit.group_norm(x, 2, scale, scale), gradkit.group_norm_grad),
    ):
        (y, mean, inv_std), gradient = norm()
        found += [y, mean, inv_std, *gradient(dy, x, scale, mean, inv_std)]
        grad = dy.copy()
        into = np.empty_like(scale), np.empty_like(scale)
        gradient(grad, x, scale, mean, inv_std, out=(grad, *into))
        found.append(grad)
    return found


CASES = {
    "channels": lambda: norms_of_channels((8, 6, 50, 30)),
    "few": lambda: norms_of_channels((4, 6, 3)),
}


@pytest.mark.parametrize("case", CASES)
def test_the_bits_are_the_same(case):
    with streamed(always=False):
        expected = [array.tobytes() for array in CASES[case]()]
    with streamed(always=True):
        assert [array.tobytes() for array in CASES[case]()] == expected


@pytest.mark.parametrize("always", [False, True], ids=["small", "large"])
def test_where_results_are_computed(always):
    data, room = np.zeros((512, 64), np.float32), np.empty(1 << 15, np.float32)
    with streamed(always):
        channels = Channels((data,), 1, slice(None))
        groups = Groups((data,), 1, slice(0, 8), slice(0, 64), 1)
    (tile,), (block,) = channels.arrays, groups.arrays
    for place in (
        channels.target(tile, channels.shaped(room, tile)),
        groups.target(block, room, block.shape),
    ):
        assert np.shares_memory(place, room if always else data)
