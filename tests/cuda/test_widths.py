"""Elements that one access of a norm moves: as row length and addresses allow."""

import math
import re

import numpy as np
import pytest

from gradkit._calls.channels import BatchNorm
from gradkit._calls.rows import (
    AddRmsNorm,
    GatedRmsNorm,
    GatedRmsNormGrad,
    InvertibleLayerNormGrad,
    LayerNorm,
    LayerNormGrad,
    RmsNormGrad,
)
from gradkit._cuda import CudaBackend
from gradkit._cuda.launch.grids import chunks_of, row_threads
from gradkit._cuda.row_gradient import LAYER, row_plans
from testbed.emulator import EmulatedDevice, IdleDevice
from tests.problems import launch
from tests.tolerances import DTYPES

pytestmark = pytest.mark.cuda
BF16 = DTYPES["bfloat16"]


class Asked(IdleDevice):
    """Remembers the numbers that kernels are compiled with."""

    def __init__(self):
        super().__init__(multiprocessors=4, max_shared_memory=227 << 10)
        self.macros = []

    def compile(self, source, options=()):
        text = " ".join(options)
        self.macros.append({m: int(n) for m, n in re.findall(r"-D(\w+)=(\d+)(?!\S)", text)})
        return super().compile(source, options)


def rows_at(gap, begin, width, dtype, rows=3):
    """Rows of a larger array, ``gap`` elements apart, from its element ``begin`` on."""
    whole = np.zeros(rows * (width + gap) + begin, dtype)[begin:]
    return whole.reshape(rows, width + gap)[:, :width]


def norm_of(kind, x, device):
    """Launch a norm on data that all lie as x does."""
    ones, statistic = device.xp.ones, np.float64 if x.itemsize == 8 else np.float32
    row, column = ones(len(x), statistic), ones(x.shape[1], x.dtype)
    known = {"dy": x, "x": x, "y": x, "gate": x, "scale": column, "bias": column}
    known |= {"mean": row, "inv_std": row, "activation": "silu", "norm_before_gate": True}
    outs = {
        LayerNorm: [x, row, row],
        LayerNormGrad: [x, column, column],
        InvertibleLayerNormGrad: [x, column, column],
        GatedRmsNorm: [x, row],
        GatedRmsNormGrad: [x, x, column],
    }[kind]
    given = {name: known[name] for name in kind.fields & known.keys()}
    launch(CudaBackend(device), kind, outs, **given)


def packs(kind, x):
    """The bytes of a pack of x, and of an access."""
    device = Asked()
    norm_of(kind, x, device)
    found = {
        (macros["VEC"] * x.itemsize, macros.get("PIECE", macros["VEC"]) * x.itemsize)
        for macros in device.macros
        if "VEC" in macros
    }
    return found if len(found) > 1 else {*found}.pop()


KINDS = [LayerNorm, LayerNormGrad, GatedRmsNorm, GatedRmsNormGrad]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dtype", "width", "size"),
    [
        *((BF16, width, 8) for width in (100, 300, 4100, 12300)),
        *((BF16, width, size) for width, size in ((768, 16), (98, 4), (63, 2), (8, 16))),
        *((np.float32, width, size) for width, size in ((100, 16), (50, 8), (15, 4))),
        *((np.float64, width, size) for width, size in ((50, 16), (3, 8))),
    ],
)
def test_accesses_are_as_wide_as_the_length_of_rows_allows(kind, dtype, width, size):
    assert packs(kind, rows_at(0, 0, width, dtype)) == (size, size)


@pytest.mark.parametrize(
    ("dtype", "width", "size"),
    [
        *((BF16, width, size) for width, size in ((143, 2), (145, 16), (8191, 16), (8193, 2))),
        *((np.float32, width, 4) for width in (145, 4097)),
    ],
)
def test_gradients_find_packs_in_odd_rows_that_a_block_holds(dtype, width, size):
    """Of 16 bits, from the input. At strides or between packs they access them one by one."""
    x = rows_at(0, 0, width, dtype)
    assert packs(LayerNormGrad, x) == (size, size)
    apart = packs(LayerNormGrad, rows_at(1, 0, width, dtype))
    assert apart in ((size, x.itemsize), {(size, size), (size, x.itemsize)})
    assert packs(InvertibleLayerNormGrad, x) == (x.itemsize, x.itemsize)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        *((kind, {"scale_offset": 1.0}) for kind in (LayerNorm, AddRmsNorm, RmsNormGrad)),
        *((kind, {"samples": 2}) for kind in (LayerNorm, AddRmsNorm, LayerNormGrad)),
        *((kind, {"ds": None}) for kind in (RmsNormGrad, LayerNormGrad)),
        (LayerNormGrad, {"ds": None, "scale_offset": 1.0, "samples": 2}),
    ],
)
@pytest.mark.parametrize(
    ("dtype", "width", "gap", "variant"),
    [
        *((BF16, width, 0, "FURTHER") for width in (8, 768, 16384, 49152)),
        (np.float32, 100, 0, "FURTHER"),
        *((BF16, width, 0, "STRIDED") for width in (100, 145)),
        *((BF16, 768, gap, "STRIDED") for gap in (8, 1)),
    ],
)
@pytest.mark.parametrize("begin", [0, 1], ids=["aligned", "statistics between packs"])
def test_contiguous_rows_take_no_strides(kind, fields, dtype, width, gap, variant, begin):
    """Beside an offset, samples and another array neither, if they are packs of 16 bytes."""
    device, samples = Asked(), fields.get("samples", 1)
    x = rows_at(gap, 0, width, dtype, rows=4)
    x = np.lib.stride_tricks.as_strided(
        x, (samples, 4 // samples, width), (4 // samples * x.strides[0], *x.strides)
    )
    row = np.ones(begin + 4, np.float32)[begin:].reshape(x.shape[:2])
    column = np.ones((samples, 1, width), dtype)
    column = column if samples > 1 else column.reshape(width)
    known = dict.fromkeys(("dy", "x", "residual", "ds"), x) | {"scale": column, "bias": column}
    known |= {"mean": row, "inv_std": row, "scale_offset": 0.0} | {"axis": 2} | fields
    known["ds"] = x if "ds" in fields else None
    outs = {
        LayerNorm: [x, row, row],
        AddRmsNorm: [x, x, row],
        RmsNormGrad: [x, column],
        LayerNormGrad: [x, column, column],
    }[kind]
    call = {name: known[name] for name in kind.fields & known.keys()}
    launch(CudaBackend(device), kind, outs, **call)
    names = {"STRIDED", "FURTHER", "ADDED"}
    found = {name for macros in device.macros if "VEC" in macros for name in macros.keys() & names}
    added = kind is AddRmsNorm or "ds" in fields
    assert found == {variant, *(("ADDED",) if added else ())}


def test_odd_rows_of_one_pack_a_thread_have_short_blocks():
    """No width asks for more threads than the kernel is compiled for."""
    few, most, *_ = row_plans(LAYER, itemsize=2, vector=8, clusters=False)
    for packs in range(17, 1024):
        if chunks_of(packs, few.chunks, most.chunks, few.threads) == few.chunks:
            assert row_threads(packs, few.threads) <= 96


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("gap", "begin", "piece"),
    [(8, 0, 16), (8, 8, 16), (4, 0, 2), (1, 0, 2), (8, 4, 2), (8, 1, 2), (4, 2, 2)],
)
def test_rows_between_packs_are_accessed_one_by_one(kind, gap, begin, piece):
    """Packs stay those of the length, which the order of additions follows."""
    x = rows_at(gap, begin, 64, BF16)
    assert x.ctypes.data % 16 == 2 * begin % 16  # of NumPy, which aligns to 16 bytes at least
    found = packs(kind, x)
    pack_and_piece = 16, piece
    assert found in (pack_and_piece, {(16, 16), pack_and_piece})  # the grid is the whole packs'


@pytest.mark.parametrize(("gap", "begin"), [(0, 1), (0, 2), (0, 4), (1, 0), (6, 2), (12, 4)])
@pytest.mark.parametrize("dtype", [BF16, np.float32])
def test_pieces_give_the_bits_of_packs(gap, begin, dtype):
    """Nothing beside the rows is written either."""
    rng, device = np.random.default_rng(3), EmulatedDevice(multiprocessors=2)
    numbers = rng.standard_normal((5, 104)).astype(dtype)
    row, column = rng.random(5).astype(np.float32), numbers[0].copy()

    def gradients(place):
        dy, x, dx = place(), place(), place()
        dy[...], x[...] = numbers, numbers[::-1]
        outs = [dx, np.empty_like(column), np.empty_like(column)]
        given = {"dy": dy, "x": x, "scale": column, "mean": row, "inv_std": row}
        launch(CudaBackend(device), LayerNormGrad, outs, **given)
        around = dx.base.copy() if dx.base is not None else dx.copy()
        return [*outs, around]

    plain = gradients(lambda: np.empty((5, 104), dtype))
    apart = gradients(lambda: rows_at(gap, begin, 104, dtype, rows=5))
    for one, other in zip(plain[:3], apart[:3], strict=True):
        assert one.tobytes() == other.tobytes()
    assert np.count_nonzero(apart[3]) == np.count_nonzero(apart[0])


@pytest.mark.parametrize(
    ("shape", "axis", "size"),
    [((2, 3, 14, 14), 1, 8), ((2, 3, 7, 7), 1, 2), ((2, 3, 3, 2), 1, 4), ((2, 3, 4, 100), 3, 8)],
)
def test_accesses_are_as_wide_as_images_allow(shape, axis, size):
    device, x = Asked(), np.zeros(shape, BF16)
    channels = np.ones(shape[axis], np.float32)
    outs = [x, channels, channels.copy()]
    given = {"scale": channels, "bias": channels, "channel_axis": axis, "engine": "native"}
    launch(CudaBackend(device), BatchNorm, outs, x=x, **given)
    assert {2 * macros["VEC"] for macros in device.macros if "VEC" in macros} == {size}
    assert math.prod(shape) % (size // 2) == 0


@pytest.mark.sampled(5)
@pytest.mark.parametrize("width", [145, 147, 149, 151, 1031, 4097])
@pytest.mark.parametrize("dtype", [BF16, np.float32])
@pytest.mark.parametrize("kind", [LayerNormGrad, RmsNormGrad])
def test_odd_rows_have_the_same_bits_wherever_they_begin(kind, dtype, width):
    """Alone, in place of dy, behind one element and at strides; nothing beside them changes."""
    rng = np.random.default_rng(3)
    dy, x, ds = (rng.standard_normal((9, width)).astype(dtype) for _ in range(3))
    row = rng.random((2, 9)).astype(np.float64 if dtype is np.float64 else np.float32)
    scale = rng.standard_normal(width).astype(dtype)

    def gradients(rows=slice(None), gap=0, begin=0, ds=None):
        """In place of dy, which lies in the array that is returned too, as x does in one."""
        places = [rows_at(gap, begin, width, dtype, rows=len(dy[rows])) for _ in range(2)]
        for place, numbers in zip(places, (dy, x), strict=True):
            place[...] = numbers[rows]
        known = {"dy": places[0], "x": places[1], "scale": scale, "ds": ds}
        known |= {"mean": row[0, rows].copy(), "inv_std": row[1, rows].copy()}
        sums = [np.empty_like(scale) for _ in range(1 + (kind is LayerNormGrad))]
        outs = [places[0], *sums]
        given = {name: known[name] for name in kind.fields & known.keys()}
        launch(CudaBackend(EmulatedDevice(multiprocessors=2)), kind, outs, **given)
        return outs

    every = gradients()
    for gap, begin in ((0, 1), (2, 3), (8, 0)):
        found = gradients(gap=gap, begin=begin)
        for one, other in zip(every, found, strict=True):
            assert one.tobytes() == other.tobytes()
        found[0][...] = 0
        assert not np.any(found[0].base)
    for k in range(9):
        assert gradients(slice(k, k + 1))[0].tobytes() == every[0][k].tobytes()
    assert np.array_equal(gradients(ds=np.zeros_like(ds))[0], every[0])
    added, apart = gradients(ds=ds)[0].astype(np.float64), ds.astype(np.float64) + every[0]
    assert np.allclose(added, apart, rtol=0, atol=2**-6 * np.abs(apart).max())
