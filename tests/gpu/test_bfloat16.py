"""Arrays of bfloat16 that have to be copied, also by CuPy 13, whose own kernels know no bfloat16.

PyTorch's tensors are lent to any CuPy as such arrays.
"""

from types import SimpleNamespace

import numpy as np
import pytest

import gradkit
from tests.backends import ON_GPU
from tests.tolerances import DTYPES

pytestmark = ON_GPU
BFLOAT16 = DTYPES["bfloat16"]


def arrays(move):
    """Arrays by name, each as ``move`` makes it of one of NumPy's."""
    rng = np.random.default_rng(0)
    shapes = {"dy": (6, 8), "x": (6, 8), "scale": (8,), "room": (6, 16), "images": (4, 8, 3, 3)}
    drawn = {name: rng.normal(1, 0.5, shape).astype(BFLOAT16) for name, shape in shapes.items()}
    drawn |= {"inv_std": np.ones((6, 1), np.float32), "columns": np.ones((8, 1), np.float32)}
    drawn |= {"empty": np.ones((4, 0), BFLOAT16), "limit": np.array(0.25, BFLOAT16)}
    return SimpleNamespace(**{name: move(array) for name, array in drawn.items()})


def there(host):
    """On the device, of bfloat16 by its bits."""
    import cupy

    bits = cupy.asarray(host.view(f"u{host.itemsize}"))
    return cupy.ndarray(host.shape, host.dtype, bits.data, bits.strides)


def back(array):
    import cupy

    bits = cupy.asnumpy(array.view(f"u{array.itemsize}"))
    return bits.view(array.dtype)


def into_columns(a):
    gradkit.rms_norm(a.x, a.scale, out=(a.room[:, ::2], None))
    return a.room


def of_no_samples(a):
    """Zeros in every other column."""
    nothing, statistics = a.images[:0], a.inv_std[:0].reshape(0, 2)
    out = None, a.room[0, ::2], None
    gradkit.group_norm_grad(nothing, nothing, a.scale, statistics, statistics, out=out)
    return a.room


def in_place(a):
    gradkit.clip_grad_norm([a.x[:, ::2], a.scale[::-1]], a.limit)
    return a.x, a.scale


CALLS = {
    "rms_norm": lambda a: gradkit.rms_norm(a.x[:, ::2], a.scale[::2]),
    "rms_norm, out": into_columns,
    "rms_norm of no columns": lambda a: gradkit.rms_norm(a.empty),
    "layer_norm": lambda a: gradkit.layer_norm(a.x.T, a.scale[:6]),
    "layer_norm_grad": lambda a: gradkit.layer_norm_grad(
        a.dy[:, ::2], a.x[:, ::2], a.scale[::2], a.inv_std, a.inv_std
    ),
    "invertible_rms_norm_grad": lambda a: gradkit.invertible_rms_norm_grad(
        a.dy.T, a.x.T, a.scale[5::-1], a.columns
    ),
    "gated_rms_norm": lambda a: gradkit.gated_rms_norm(a.x[::-1], a.dy[:, ::-1], a.scale[::-1]),
    "batch_norm": lambda a: gradkit.batch_norm(
        a.images.transpose(0, 1, 3, 2)[..., ::-1], a.scale, engine="native"
    ),
    "batch_norm_inference": lambda a: gradkit.batch_norm_inference(
        a.images, a.scale[::-1], a.scale, a.scale[::-1], a.scale, engine="native"
    ),
    "group_norm_grad of no samples": of_no_samples,
    "group_norm": lambda a: gradkit.group_norm(a.images.transpose(0, 1, 3, 2), 2, a.scale[::-1]),
    "clip_grad_norm": in_place,
    "accumulate_grad": lambda a: gradkit.accumulate_grad(a.x[:, ::2], a.dy[:, 1::2]),
}


@pytest.mark.parametrize("name", CALLS)
def test_values(name):
    results = [CALLS[name](arrays(move)) for move in (there, lambda array: array)]
    got, expected = (each if isinstance(each, tuple) else (each,) for each in results)
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == other.dtype
        wide = [np.asarray(each).astype(np.float64) for each in (back(one), other)]
        np.testing.assert_allclose(*wide, rtol=2e-2, atol=2e-2)


def test_numbers_are_rounded_to_the_nearest():
    """Ties to the even one; a NaN stays one, and what is too large becomes infinite."""
    from gradkit._cuda.launch.buffers import as_readable, assign

    halfway = [1 + k / 256 for k in (1, 3)]
    host = np.array([*halfway, -1 - 2**-8 - 2**-20, 3e38, 3.4e38, np.inf, np.nan, 0, -0.0], "f4")
    host = np.append(host, np.array([0x7F800001, 0xFFFFFFFF, 1, 0x8000], "u4").view("f4"))
    with np.errstate(over="ignore", invalid="ignore"):
        expected = host.astype(BFLOAT16)
    made = there(np.zeros(2 * host.size, BFLOAT16))[::2]
    assign(made, there(host))
    np.testing.assert_array_equal(back(made).astype("f4"), expected.astype("f4"))
    np.testing.assert_array_equal(np.signbit(back(made)[7:9]), [False, True])
    wide = as_readable(made)
    assert wide.dtype == np.float32
    np.testing.assert_array_equal(back(wide), expected.astype("f4"))
    again = there(np.zeros(host.size, np.float32))
    assign(again, made)
    np.testing.assert_array_equal(back(again), back(wide))
