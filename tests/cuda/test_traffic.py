"""Bytes that kernels move through global memory: each operation's floor, and its partial sums.

The emulator counts every thread's own accesses. Arrays of the data's size must come to their
floor to the byte; what several threads of a block read alike (a row's statistics) counts once
for each of them, and is left out of the sums here.
"""

import numpy as np
import pytest

import gradkit
from gradkit._calls.channels import (
    BatchNorm,
    BatchNormGrad,
    BatchNormInference,
    BatchNormInferenceGrad,
)
from gradkit._calls.rows import GatedRmsNormGrad, LayerNorm, RmsNorm
from gradkit._cuda import CudaBackend
from testbed.emulator import EmulatedDevice
from tests.cuda.lists import run
from tests.devices.emulated import emulated_backend, on_device
from tests.operations import ROW_GRADIENTS, records
from tests.problems import LAYER_TYPES, launch, make
from tests.tolerances import DTYPES

pytestmark = pytest.mark.emulated

SHARED = {"mean", "inv_std", "sums", "norm", "means"}  # read by many threads alike
NARROW = next(types for types in LAYER_TYPES if types[0] == "bfloat16" == types[2])


class Counting(EmulatedDevice):
    """Counts the bytes of memory that launchers take."""

    taken = 0

    def empty(self, shape, dtype):
        array = super().empty(shape, dtype)
        self.taken += array.nbytes
        return array


class Meter:
    """A backend on the emulator, and what its launches moved."""

    def __init__(self, **options):
        self.device = Counting(**{"multiprocessors": 2} | options)
        self.run = CudaBackend(self.device)

    def empty(self, *likes):
        return [self.device.xp.empty(like.shape, like.dtype) for like in likes]

    def put(self, *hosts):
        return [self.device.xp.asarray(host) for host in hosts]

    def moved(self, *kernels):
        """``{array: (bytes read, bytes written)}`` of all launches, without what is shared."""
        found = {}
        for (kernel, array), counts in self.device.total_traffic.by_array.items():
            assert kernel in kernels, kernel
            if array not in SHARED:
                before = found.get(array, (0, 0))
                found[array] = tuple(a + b for a, b in zip(before, counts, strict=True))
        return {array: counts for array, counts in found.items() if any(counts)}


def row_gradient(meter, norm, problem, axis):
    """Run one of the three; how many parameter gradients it has."""
    p = problem
    dx, dscale, dbias = meter.empty(p.x, p.scale, p.scale)
    kind = NORMS[norm]
    outs = (dx, dscale, dbias)[: len(kind.results)]
    launch(meter.run, kind, outs, **(vars(p) | {"axis": axis, "y": p.x}))
    return len(outs) - 1


NORMS = {name: record for name, record in records("rows").items() if name in ROW_GRADIENTS}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("types", [LAYER_TYPES[0], NARROW], ids=str)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("shape", [(40, 512), (96, 64), (9, 1027), (4, 10239), (3, 14336)], ids=str)
def test_rows_that_fit_are_read_once(norm, shape, types):
    """3 M D elements; and each block's partial sums, written once and read once."""
    meter = Meter()
    p = make(shape, types)
    planes = row_gradient(meter, norm, p, 1)
    moved = meter.moved("layer_norm_grad", "column_sums")
    sums = np.dtype(np.float32).itemsize * planes * shape[1]  # a block's
    written, read = moved["partials"][::-1]
    blocks = written // sums
    assert 1 <= blocks <= shape[0]
    assert written == read == blocks * sums
    assert moved["dy"] == moved["source"]
    # Packs of odd rows of 16 bits lie in two of memory, one of which the cache has by then.
    read, written = moved["dy"]
    odd = shape[1] == 1027 and types is NARROW and not norm.startswith("invertible")
    assert p.x.nbytes <= read <= (2 if odd else 1) * p.x.nbytes
    assert written == 0
    assert moved["dx"] == (0, p.x.nbytes)
    assert moved["first"] == (0, p.scale.nbytes)
    assert moved.get("second", (0, 0)) == (0, p.scale.nbytes * (planes - 1))
    # Kept in registers: once for each of a block's rows at a time, not for each row. Long rows,
    # elements one by one and divisions may leave too few, and the cache has it: for the sums, and
    # again for dx.
    copies, rest = divmod(moved["scale"][0], p.scale.nbytes)
    assert rest == 0
    if shape[1] in (64, 512) and not norm.startswith("invertible"):
        assert copies % blocks == 0 < copies <= shape[0]
    else:
        assert blocks <= copies <= 2 * (shape[0] + blocks)


ROWS_IN_PART = [
    *(((rows, width), LAYER_TYPES[0]) for rows, width in ((40, 512), (2, 16392))),
    *(((rows, width), LAYER_TYPES[0]) for rows, width in ((9, 1027), (40, 54), (2, 16387))),
    *(((rows, width), NARROW) for rows, width in ((9, 1027), (40, 54), (3, 161))),
]


@pytest.mark.guarantee("Only what is wanted")
@pytest.mark.parametrize("wanted", [("dx",), ("dscale",)], ids=str)
@pytest.mark.parametrize(("shape", "types"), ROWS_IN_PART, ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_what_is_not_wanted_moves_no_byte(norm, shape, types, wanted):
    """Of ``dx`` alone no partial sums, and without it neither ``dx`` nor what that takes.

    Rows of packs, of single elements or fewer than a pack has, and odd ones of 16 bits.
    """
    p, meter = make(shape, types), Meter()
    likes = {"dx": p.x, "dscale": p.scale, "dbias": p.scale}
    names = NORMS[norm].result_names
    outs = [meter.empty(likes[name])[0] if name in wanted else None for name in names]
    given = vars(p) | {"axis": 1, "y": p.x}
    launch(meter.run, NORMS[norm], outs, **given, wanted=wanted)
    every = Meter().empty(*(likes[name] for name in names))
    launch(Meter().run, NORMS[norm], every, **given)
    for one, other in zip(outs, every, strict=True):
        assert one is None or one.tobytes() == other.tobytes()
    kernels = "layer_norm_grad", "column_sums", "row_sums_of_gradient", "apply_gradient"
    moved = meter.moved(*kernels)
    once = 1 if shape[1] < 16384 or wanted != ("dx",) else 2  # long rows take sums first
    assert moved["dy"] == moved["source"]
    # Packs of odd rows lie in two of memory.
    most = 2 if types is NARROW and shape[1] % 2 else once
    assert once * p.x.nbytes <= moved["dy"][0] <= most * p.x.nbytes
    assert moved["dy"][1] == 0
    if wanted == ("dx",):
        assert moved["dx"] == (0, p.x.nbytes)
        assert not {"partials", "first", "second"} & moved.keys()
    else:
        assert "dx" not in moved
        assert meter.device.taken == moved["partials"][1]
        assert moved["first"] == (0, p.scale.nbytes)
        assert "second" not in moved


@pytest.mark.guarantee("Only what is wanted")
@pytest.mark.parametrize("wanted", [("dx",), ("dgate",), ("dscale",), ("dx", "dscale")], ids=str)
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("width", [64, 1027, 16392])
def test_what_is_not_wanted_of_gated_norms_moves_no_byte(width, before, wanted):
    """Long rows are read for their means too, but not if nothing that is wanted takes those."""
    p, meter = make((3, width), LAYER_TYPES[0], centred=False), Meter()
    likes = {"dx": p.x, "dgate": p.x, "dscale": p.scale}
    outs = [meter.empty(like)[0] if name in wanted else None for name, like in likes.items()]
    gating = {"gate": p.dy.copy(), "activation": "silu", "norm_before_gate": before}
    given = vars(p) | {"axis": 1, **gating}
    launch(meter.run, GatedRmsNormGrad, outs, **given, wanted=wanted)
    every = Meter().empty(*likes.values())
    launch(Meter().run, GatedRmsNormGrad, every, **given)
    for one, other in zip(outs, every, strict=True):
        assert one is None or one.tobytes() == other.tobytes()
    moved = meter.moved("gated_rms_norm_grad", "column_sums")
    takes_means = "dx" in wanted or ("dgate" in wanted and not before)
    visits = 2 if width == 16392 and takes_means else 1
    assert moved["dy"] == moved["x"] == moved["gate"] == (visits * p.x.nbytes, 0)
    for name in ("dx", "dgate"):
        assert moved.get(name) == ((0, p.x.nbytes) if name in wanted else None)
    assert ("partials" in moved) == ("first" in moved) == ("dscale" in wanted)
    assert meter.device.taken <= 8 * p.scale.nbytes * ("dscale" in wanted)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape", [(3, 16392), (2, 14337)], ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_longer_rows_are_read_twice(norm, shape):
    """5 M D elements."""
    meter = Meter()
    p = make(shape, LAYER_TYPES[0])
    row_gradient(meter, norm, p, 1)
    moved = meter.moved("row_sums_of_gradient", "apply_gradient", "column_sums")
    assert moved["dy"] == moved["source"] == (2 * p.x.nbytes, 0)
    assert moved["dx"] == (0, p.x.nbytes)
    assert moved["partials"][0] == moved["partials"][1]


@pytest.mark.parametrize("types", [LAYER_TYPES[0], NARROW], ids=str)
@pytest.mark.parametrize(("centred", "passes"), [(True, 3), (False, 2)])
def test_forward_reads_once_what_registers_hold(centred, passes, types):
    """512 threads hold 4 packs each; a longer row is read for each sum, and again for y."""
    vector = 16 // DTYPES[types[0]].itemsize
    held = 512 * 4 * vector
    for width, reads, zeros in ((held, 1, False), (held, 1, True), (held + vector, passes, False)):
        meter = Meter()
        p = make((2, width), types, centred=centred)
        if zeros:  # no squares, and nothing lost
            p.x[:] = 0
        y, mean, inv_std = meter.empty(p.x, p.mean, p.inv_std)
        if centred:
            launch(meter.run, LayerNorm, [y, mean, inv_std], **vars(p))
        else:
            launch(meter.run, RmsNorm, [y, inv_std], **vars(p))
        moved = meter.moved("layer_norm")
        assert moved["x"] == (reads * p.x.nbytes, 0)
        assert moved["y"] == (0, p.x.nbytes)


@pytest.mark.parametrize("value", ["normal", 0, 3])
@pytest.mark.parametrize("shape", [(4, 9, 8, 16), (4, 16, 9, 8), (4, 16, 9, 9)], ids=str)
def test_batch_norm_takes_three_passes(shape, value):
    """One for the statistics; equal elements need no second."""
    meter = Meter()
    p = make(shape, batch=True, axis=shape.index(16))
    if value != "normal":
        p.x[:] = value
    y, mean, inv_std = meter.empty(p.x, p.mean, p.inv_std)
    launch(meter.run, BatchNorm, [y, mean, inv_std], **vars(p), channel_axis=p.axis)
    moved = meter.moved("channel_moments", "finish_moments", "normalize")
    assert moved["x"] == (2 * p.x.nbytes, 0)
    assert moved["y"] == (0, p.x.nbytes)


@pytest.mark.parametrize("last", [False, True])
def test_batch_norm_gradient_takes_five_passes(last):
    """Both sums need all of dy and x before the first dx: 5 n elements."""
    meter = Meter()
    shape = (4, 9, 9, 16) if last else (4, 16, 9, 8)
    rng = np.random.default_rng(0)
    dy, x = meter.put(*(rng.standard_normal(shape).astype(np.float32) for _ in range(2)))
    if last:
        dy, x = (array.transpose(0, 3, 1, 2) for array in (dy, x))
    scale, mean, inv_std = meter.put(*(np.ones(16, np.float32) for _ in range(3)))
    dscale, dbias = meter.empty(scale, scale)
    (dx,) = meter.put(np.empty(shape, np.float32))
    dx = dx.transpose(0, 3, 1, 2) if last else dx
    given = {"dy": dy, "x": x, "scale": scale, "mean": mean, "inv_std": inv_std}
    launch(meter.run, BatchNormGrad, [dx, dscale, dbias], **given)
    moved = meter.moved("sum_channels", "finish_channels", "apply_channels")
    assert moved["dy"] == moved["x"] == (2 * x.nbytes, 0)
    assert moved["dx"] == (0, x.nbytes)
    written, read = moved["partials"][::-1]
    assert written == read
    assert written % (2 * 8 * 16) == 0
    assert moved["dscale"] == moved["dbias"] == (0, scale.nbytes)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_by_known_statistics_takes_one_pass(last, affine):
    """Its gradient too: no dx waits for a sum, and dx alone needs no x."""
    shape, axis = ((4, 9, 9, 16), 3) if last else ((4, 16, 9, 8), 1)
    rng = np.random.default_rng(0)
    hosts = [rng.standard_normal(shape).astype(np.float32) for _ in range(2)]
    hosts += [np.ones(16, np.float32)] * 3
    meter = Meter()
    _, x, scale, mean, var = meter.put(*hosts)
    (y,) = meter.empty(x)
    known = {"mean": mean, "var": var, "channel_axis": axis, "scale": scale if affine else None}
    launch(meter.run, BatchNormInference, [y], x=x, bias=known["scale"], **known)
    moved = meter.moved("infer")
    assert (moved["x"], moved["y"]) == ((x.nbytes, 0), (0, x.nbytes))
    meter = Meter()
    dy, x, scale, mean, var = meter.put(*hosts)
    dx, *parameters = meter.empty(x, scale, scale)
    known |= {"mean": mean, "var": var, "scale": scale if affine else None}
    outs = [dx, *(parameters if affine else (None, None))]
    launch(meter.run, BatchNormInferenceGrad, outs, dy=dy, x=x, **known)
    moved = meter.moved("infer_gradient", *(["finish_parameters"] if affine else []))
    assert moved["dy"] == (x.nbytes, 0)
    assert moved["dx"] == (0, x.nbytes)
    assert moved.get("x") == ((x.nbytes, 0) if affine else None)
    if affine:
        assert moved["partials"][0] == moved["partials"][1]
        meter = Meter()
        dy, x, scale, mean, var = meter.put(*hosts)
        known |= {"mean": mean, "var": var, "scale": scale, "wanted": ("dscale",)}
        outs = [None, meter.empty(scale)[0], None]
        launch(meter.run, BatchNormInferenceGrad, outs, dy=dy, x=x, **known)
        moved = meter.moved("infer_gradient", "finish_parameters")
        assert moved["dy"] == moved["x"] == (x.nbytes, 0)
        assert not {"dx", "dbias"} & moved.keys()
        assert meter.device.taken == moved["partials"][1]
        assert moved["dscale"] == (0, scale.nbytes)


# Lists: the arrays' addresses travel in the list, so that the launch's sums stand for them.

MIXED = [("bfloat16", 6000), ("float32", 1 << 13), ("float16", 37), ("float64", 5000)]


def gradients(meter):
    grads = meter.put(*(np.ones(size, DTYPES[name]) for name, size in MIXED))
    return grads, sum(grad.nbytes for grad in grads)


def test_a_norm_reads_everything_once():
    """And writes 3 doubles for each block's chunks, which the second launch reads."""
    meter = Meter()
    grads, size = gradients(meter)
    out = meter.device.xp.empty((), np.float64)
    run(meter.device, "grad_norm", grads=grads, norm_type=2.0, norm=out)
    total = meter.device.total_traffic
    partials = total.by_array["norm_partials", "partials"][1]
    chunks = sum(-(-grad.nbytes // 4096) for grad in grads)
    assert partials == -(-chunks // 8) * 3 * 8
    assert total.by_array["norm_finish", "partials"] == (partials, 0)
    assert (total.read, total.written) == (size + partials, partials + out.nbytes)


def test_clipping_that_scales_reads_and_writes_everything_once():
    meter = Meter()
    grads, size = gradients(meter)
    norm = meter.put(np.float64(8.0))[0]
    run(meter.device, "clip_by_norm", grads=grads, norm=norm, max_norm=1.0)
    total = meter.device.total_traffic
    shared = total.by_array["clip_by_norm", "norm"][0]
    assert (total.read - shared, total.written) == (size, size)


def test_clipping_that_need_not_scale_touches_nothing():
    meter = Meter()
    grads, _ = gradients(meter)
    norm = meter.put(np.float64(8.0))[0]
    run(meter.device, "clip_by_norm", grads=grads, norm=norm, max_norm=9.0)
    total = meter.device.total_traffic
    assert (total.read, total.written) == (total.by_array["clip_by_norm", "norm"][0], 0)


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_units_are_read_once_for_their_norms_and_once_more_to_be_scaled(axis):
    """Of two gradients one is within its limit: it is not read again."""
    meter = Meter()
    grads = meter.put(np.full((30, 301), 2.0, np.float32), np.full((301, 30), 1.0, np.float32))
    axes = (0, 1) if axis is None else (axis,)
    count = sum(grad.size // np.prod([grad.shape[k] for k in axes]) for grad in grads)
    norms = meter.device.xp.empty(int(count), np.float64)
    units = {"grads": grads, "norms": norms, "axes": (axes, axes)}
    run(meter.device, "unit_norms", norm_type=2.0, mean=True, **units)
    size = sum(grad.nbytes for grad in grads)
    total = meter.device.total_traffic
    partials = total.by_array["unit_norm_partials", "partials"][1]
    assert total.by_array["unit_norm_finish", "partials"] == (partials, 0)
    assert (total.read, total.written) == (size + partials, partials + norms.nbytes)
    before, size = (total.read, total.written), grads[0].nbytes
    run(meter.device, "clip_units", max_norm=1.5, **units)
    shared = total.by_array["clip_units", "norms"][0]
    assert (total.read - shared - before[0], total.written - before[1]) == (size, size)


def in_tables(device):
    """Bytes read and written of what kernels find through a table: the elements of lists."""
    total = device.total_traffic
    others = np.sum([*total.by_array.values(), (0, 0)], axis=0)
    return total.read - others[0], total.written - others[1]


@pytest.mark.parametrize("nonfinite", ["propagate", "zero"])
def test_a_whole_clip_is_two_reads_and_a_write(nonfinite):
    """With a loss scale, its flag and the limit on the device: they come in the same passes."""
    cuda = emulated_backend(multiprocessors=2)

    def put(host):
        return on_device(cuda.device.xp.asarray(host), cuda)

    grads = [put(np.ones(size, DTYPES[name])) for name, size in MIXED]
    scale, limit, found = (put(np.array(number)) for number in (0.5, 1.0, 7.0))
    norm = gradkit.clip_grad_norm(grads, limit, scale=scale, found_inf=found, nonfinite=nonfinite)
    assert float(norm) > 1
    assert found == 0
    size = sum(grad.nbytes for grad in grads)
    assert in_tables(cuda.device) == (2 * size, size)


def test_adaptive_clipping_is_three_reads_and_a_write():
    """Of gradients twice, and of parameters once."""
    cuda = emulated_backend(multiprocessors=2)
    hosts = [np.full((60, 301), 2.0, np.float32), np.ones((301, 60), np.float32)]
    grads, params = ([on_device(cuda.device.xp.asarray(h), cuda) for h in hosts] for _ in range(2))
    gradkit.clip_grad_adaptive(grads, params, 0.5, axis=1)
    size = sum(grad.nbytes for grad in grads)
    assert in_tables(cuda.device) == (3 * size, size)


@pytest.mark.parametrize(("into", "of"), [("float32", "float32"), ("float32", "bfloat16")])
def test_accumulating_moves_three_arrays(into, of):
    meter = Meter()
    buffer, grad = meter.put(np.ones(9001, DTYPES[into]), np.ones(9001, DTYPES[of]))
    run(meter.device, "accumulate_grad", buffer=buffer, grad=grad)
    total = meter.device.total_traffic
    assert (total.read, total.written) == (buffer.nbytes + grad.nbytes, buffer.nbytes)
    # What overwrites does not read the buffer.
    run(meter.device, "accumulate_grad_v2", buffer=buffer, grad=grad, overwrite=True)
    assert (meter.device.traffic.read, meter.device.traffic.written) == (grad.nbytes, buffer.nbytes)


@pytest.mark.parametrize("of", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("update", "overwrite", "read", "written"),
    [(True, False, True, True), (True, True, False, True), (False, False, True, False)],
)
def test_a_list_is_added_and_normed_in_one_pass(of, update, overwrite, read, written):
    """The norm of the result costs its partial sums, and no further look at a buffer."""
    meter = Meter()
    buffers = meter.put(*(np.ones(n, np.float32) for n in (9001, 37)))
    grads = meter.put(*(np.ones(n, DTYPES[of]) for n in (9001, 37)))
    norm = meter.device.xp.empty((), np.float64)
    given = {"buffers": buffers, "grads": grads, "do_update": update, "overwrite": overwrite}
    run(meter.device, "accumulate_grads", scale=0.5, norm=norm, **given)
    into, addend = (sum(a.nbytes for a in arrays) for arrays in (buffers, grads))
    total = meter.device.total_traffic
    partials = total.by_array["accumulate_grads", "partials"][1]
    assert partials == 2 * 3 * 8  # ten chunks are those of two blocks
    assert total.read == read * into + update * addend + partials
    assert total.written == written * into + partials + norm.nbytes


def test_scaling_reads_and_writes_everything_once():
    meter = Meter()
    grads, size = gradients(meter)
    run(meter.device, "scale_grads", grads=grads, coefficient=2.0)
    total = meter.device.total_traffic
    assert (total.read, total.written) == (size, size)


def test_zeroing_only_writes():
    meter = Meter()
    grads, size = gradients(meter)
    run(meter.device, "zero_grad", grads=grads)
    total = meter.device.total_traffic
    assert (total.read, total.written) == (0, size)
