"""4-D descriptors of arrays of every rank, channel axis and order of axes in memory."""

import itertools

import numpy as np
import pytest

from gradkit._cuda.cudnn.descriptions import Dense, channels_innermost

LENGTHS = (2, 3, 1, 5, 4)


@pytest.mark.parametrize("ndim", [2, 3, 4, pytest.param(5, marks=pytest.mark.slow)])
def test_a_descriptor_shows_each_channel_its_own_elements(ndim):
    for lengths in itertools.permutations(LENGTHS[:ndim]):
        for order in itertools.permutations(range(ndim)):
            back = np.argsort(order)
            dense = np.arange(np.prod(lengths)).reshape([lengths[a] for a in order])
            x = dense.transpose(back)
            for axis in range(ndim):
                layout = Dense.of(x, axis)
                view = x.transpose(layout.order)
                assert view.flags.c_contiguous
                seen = np.lib.stride_tricks.as_strided(
                    view, layout.dims, [s * x.itemsize for s in layout.strides]
                )
                assert seen.size == x.size
                assert np.array_equal(_channels(seen, 1), _channels(x, axis))


def _channels(x, axis):
    """The elements of each channel in ascending order."""
    return np.sort(np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1))


def test_channels_last():
    first = np.empty((2, 3, 4, 5))
    last = np.moveaxis(np.empty((2, 4, 5, 3)), -1, 1)
    assert not Dense.of(first, 1).channels_last
    assert Dense.of(last, 1).channels_last
    assert Dense.of(first, 3).channels_last
    assert not Dense.of(np.empty((6, 3)), 1).channels_last


@pytest.mark.parametrize(
    ("shape", "axis", "order", "innermost"),
    [
        ((2, 3, 4, 5), 1, (0, 1, 2, 3), False),
        ((2, 3, 4, 5), 1, (0, 2, 3, 1), True),
        ((2, 3, 4, 5), 3, (0, 1, 2, 3), True),
        ((2, 3, 4, 5), 1, (1, 0, 2, 3), False),
        ((6, 3), 1, (0, 1), True),
        ((6, 3), 0, (0, 1), False),
        ((6, 3, 1, 1), 1, (0, 1, 2, 3), True),
        ((6, 1, 2), 1, (0, 1, 2), False),
        ((0, 3, 2), 1, (0, 1, 2), False),
    ],
)
def test_channels_innermost(shape, axis, order, innermost):
    x = np.empty([shape[a] for a in order]).transpose(np.argsort(order))
    assert channels_innermost(x, axis) == innermost
    assert channels_innermost(x[::-1], axis) == innermost
