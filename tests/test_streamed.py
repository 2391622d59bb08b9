"""Results from some size on are computed in scratch and copied: the same bits."""

from contextlib import contextmanager

import numpy as np
import pytest

import gradkit
from gradkit._numpy import tiles, tuning
from gradkit._numpy.channels import Channels
from gradkit._numpy.groups import Groups

F32 = np.dtype(np.float32)


@contextmanager
def streamed(always):
    """Results of every size count as large, or none does; how arrays are cut is decided anew."""
    tiles._rows.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "STREAMED_BYTES", 1 if always else 1 << 40)
        with gradkit.use_cpu_backend("numpy"):
            yield
    tiles._rows.cache_clear()


def drawn(shape, seed):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def norms_of_rows(shape):
    """Layer and RMS norm and their gradients, over their own arguments too."""
    x, dy, scale = drawn(shape, 1), drawn(shape, 2), drawn(shape[1], 3)
    y, mean, inv_std = gradkit.layer_norm(x, scale, scale)
    found = [y, mean, inv_std, *gradkit.layer_norm_grad(dy, x, scale, mean, inv_std)]
    found += gradkit.rms_norm_grad(dy, x, scale, inv_std, ds=dy)
    own = x.copy()
    gradkit.layer_norm(own, scale, scale, out=(own, mean, inv_std))
    grad, ds = dy.copy(), dy.copy()
    into = np.empty_like(scale), np.empty_like(scale)
    gradkit.layer_norm_grad(grad, x, scale, mean, inv_std, out=(grad, *into))
    gradkit.layer_norm_grad(dy, x, scale, mean, inv_std, ds=ds, out=(ds, *into))
    return [*found, own, grad, ds]


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
    "rows": lambda: norms_of_rows((700, 300)),
    "long rows": lambda: norms_of_rows((3, 40_000)),
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
        rows = tiles.Rows(data.shape, 1, F32, native=True, gapless=True)
        channels = Channels((data,), 1, slice(None))
        groups = Groups((data,), 1, slice(0, 8), slice(0, 64), 1)
    (tile,), (block,) = channels.arrays, groups.arrays
    for place in (
        rows.target(data, room),
        channels.target(tile, channels.shaped(room, tile)),
        groups.target(block, room, block.shape),
    ):
        assert np.shares_memory(place, room if always else data)
