"""The list kernels' own tests: how lists travel, paths, grids, schedules, traffic, 2^32.

The suite that all backends share covers values, dtypes, layouts and meaning.
"""

import math
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradkit
from gradkit import _host
from gradkit._backend import Views
from gradkit._calls.lists import EmaUpdate
from gradkit._cuda import CudaBackend, list_tables
from gradkit._cuda.launch.buffers import upload
from gradkit._cuda.launch.device import scratch
from gradkit._cuda.launch.kernels import kernels_in, source_of
from gradkit._cuda.launch.strides import pair_of
from gradkit._cuda.list_sums import add
from gradkit._cuda.list_tables import CAPACITY, DIMS, plan_of, steps
from gradkit._cuda.list_units import joining_threads
from gradkit._dtypes import FLOATS
from gradkit.errors import NonFiniteNormError
from testbed.emulator import EmulatorFault, IdleDevice
from testbed.emulator.memory import sparse_array
from testbed.emulator.runtime import SCHEDULES
from tests import oracles, tolerances
from tests import strategies as draw_
from tests.backends import KernelDevice, kernel_mark
from tests.combinations import Asked, combinations
from tests.cuda.lists import run
from tests.devices.emulated import on_device
from tests.layouts import LAYOUTS
from tests.problems import one_or_each
from tests.tolerances import DTYPES, assert_all_same_bits, assert_same_bits

pytestmark = kernel_mark

ORDERS = (1.0, 2.0, 3.0, math.inf)
OPERATIONS = (
    *("accumulate_grad", "accumulate_grad_v2", "accumulate_grads", "zero_grad"),
    *("grad_norm", "norm_shares", "norm_of_shares", "clip_coefficient", "clip_by_norm"),
    *("scale_grads", "clip_grad_value", "unit_norms", "clip_units", "ema_update"),
)
ASKED = Asked(*OPERATIONS)
nothing_else_is_asked_for = ASKED.fixture


class Device(KernelDevice):
    """Knows what was compiled and uploaded; can play a stream that is being captured."""

    recording = False

    def __init__(self, **options):
        super().__init__(**options)
        self.uploads = 0

    def compile(self, source, options=()):
        ASKED.note(source, options)
        return super().compile(source, options)

    def upload(self, host):
        self.uploads += 1
        return super().upload(host)

    def capturing(self):
        return self.recording


@pytest.fixture
def device():
    return Device(multiprocessors=1)


def put(device, hosts):
    return [device.xp.asarray(host) for host in hosts]


def norm_of(device, grads, p=2.0, **options):
    shape = (len(grads),) if options else ()
    out = device.xp.empty(shape, np.float64)
    run(device, "grad_norm", grads=grads, norm_type=p, norm=out, **options)
    return out


def mixed(count, seed=0):
    """A list of small arrays that takes turns among the dtypes, with empty ones between."""
    rng = np.random.default_rng(seed)
    names = sorted(DTYPES)
    sizes = rng.integers(0, 6, count) * rng.integers(1, 9, count)
    return [rng.standard_normal(size).astype(DTYPES[names[k % 4]]) for k, size in enumerate(sizes)]


# How lists travel


@pytest.mark.sampled(3)
@pytest.mark.parametrize("count", [CAPACITY - 1, CAPACITY, CAPACITY + 1, 33, 1025])
@pytest.mark.parametrize("p", ORDERS)
def test_lists_of_any_length(device, count, p):
    hosts = mixed(count)
    grads = put(device, hosts)
    bound = tolerances.norm(p, tolerances.PAIRS, runs=True)
    assert oracles.off_by(float(norm_of(device, grads, p)), oracles.norm(hosts, p)) <= bound
    each = norm_of(device, grads, p, per_tensor=True)
    for got, host in zip(each, hosts, strict=True):
        assert oracles.off_by(float(got), oracles.norm([host], p)) <= bound
    assert device.uploads == (count > CAPACITY)


@pytest.mark.parametrize(
    ("count", "capacity", "size"),
    [(1, CAPACITY, 4000), (CAPACITY, CAPACITY, 4000), (CAPACITY + 1, 0, 32)],
)
def test_what_a_list_takes_of_the_parameter_block(device, count, capacity, size):
    table = plan_of(device, put(device, [np.ones(3)] * count)).table
    assert table.capacity == capacity
    assert (table.argument.dtype, table.argument.size) == (f"V{size}", 1)  # CuPy describes no field
    assert table.argument.tobytes() == table.fields.tobytes()
    if capacity:
        assert table.alone.argument.tobytes() == table.argument.tobytes()[:440]
        assert table.alone.capacity == 1
    else:
        assert table.alone is table


def test_a_list_of_as_many_dimensions_as_the_parameter_block_holds_is_not_uploaded(device):
    (room,) = put(device, [np.ones((5, 9), np.float32)])
    table = plan_of(device, [room[:, ::2]] * (DIMS // 2)).table
    assert table.capacity == CAPACITY


@pytest.mark.parametrize("spare", [-1, 0, 1])
def test_strided_lists_to_the_last_dimension_that_fits(device, spare):
    tensors = DIMS // 2
    rooms = put(device, [np.full((5, 9), -1, np.float32) for _ in range(tensors + 1)])
    grads = [room[:, ::2] for room in rooms[: tensors + min(0, spare)]]  # two dimensions each
    grads += [rooms[-1][0, ::2]] * max(0, spare)
    for k, grad in enumerate(grads):
        grad[...] = k
    run(device, "scale_grads", grads=grads, coefficient=0.5)
    for k, (grad, room) in enumerate(zip(grads, rooms, strict=False)):
        np.testing.assert_array_equal(grad, np.full(grad.shape, k / 2))
        if k < tensors:
            np.testing.assert_array_equal(room[:, 1::2], np.full((5, 4), -1))  # the gaps
    assert device.uploads == (spare > 0)


def test_a_list_is_uploaded_once_for_norm_and_scaling(device):
    grads = put(device, mixed(CAPACITY + 1))
    for _ in range(3):
        norm = norm_of(device, grads)
        run(device, "clip_by_norm", grads=grads, norm=norm, max_norm=0.5, eps=1e-6)
    assert device.uploads == 1
    norm_of(device, grads[1:] + grads[:1])
    assert device.uploads == 2


@pytest.mark.parametrize(("broken", "reads"), [([], 1), ([2], 2), (range(CAPACITY + 1), 2)])
@pytest.mark.parametrize("per_tensor", [True, False])
def test_raise_copies_all_norms_to_the_host_at_once(device, monkeypatch, per_tensor, broken, reads):
    """A second copy, of all largest elements, is for the names alone."""
    backend, copied, read = CudaBackend(device), [], CudaBackend.read

    def counting(self, array):
        copied.append(array.size)
        return read(self, array)

    monkeypatch.setattr(CudaBackend, "read", counting)
    hosts = [np.full(3, np.nan if k in broken else 1.0, np.float32) for k in range(CAPACITY + 1)]
    grads = [on_device(array, backend) for array in put(device, hosts)]
    expected = pytest.raises(NonFiniteNormError) if broken else nullcontext()
    with expected:
        one_or_each(grads, nonfinite="raise", each=per_tensor)
    assert copied == [len(grads) if per_tensor else 1, len(grads)][:reads]


@pytest.mark.parametrize("layouts", [["C"], ["reversed", "stepped"], ["C", "misaligned"]])
@pytest.mark.parametrize("count", [1, 5, CAPACITY + 1])
def test_the_same_properties_elsewhere_give_the_plan_of_a_new_list(device, count, layouts):
    """Only addresses, and so alignment, are looked at again."""
    hosts = [np.full((3, 1 + k % 4), k, np.float32) for k in range(count)]
    for turn in range(4):
        lists = [
            [LAYOUTS[layouts[(k + turn) % len(layouts)]](host) for k, host in enumerate(hosts)]
            for _ in range(2)
        ]
        found = []
        for _ in range(2):
            plans = plan_of(device, lists[0]), plan_of(device, *lists)
            found.append([content(plan.table) for plan in plans])
            list_tables._cuts._cached.clear()
            list_tables._plans._cached.clear()
        assert found[0] == found[1]
        plan_of(device, lists[1]), plan_of(device, *lists[::-1])  # the next turn's are kept


@pytest.mark.parametrize("threads", [32, 64, 256])
@pytest.mark.parametrize("count", [1, 31, 32, 33, 127, 128, 129, 255, 256, 257, 1100])
def test_any_number_of_parts_is_joined(threads, count):
    """A thread loads four at once, of which some are beyond the last."""
    parts = np.zeros((count, 3))
    parts[:, 0], parts[:, 2] = np.arange(count), 1
    norm, found = np.zeros(1), np.full(1, 7.0)
    macros = {"CAPACITY": CAPACITY, "ORDER": "SumOfSquares"}
    finish = list_tables.kernel(KernelDevice(), "norm", "norm_finish", **macros)
    numbers = np.uint32(count), None, np.float64(1)
    finish((1,), (threads,), (np.float64(2), parts, *numbers, norm, found))
    assert norm == np.sqrt(parts[:, 0].sum())
    assert found == 0


def test_norms_of_one_list_have_the_order_that_is_asked_for(device):
    host = np.array([3.0, -4.0, 12.0])
    grads = Views(put(device, [host]))
    for _ in range(2):
        for p in (2.0, 1.0, math.inf, 3.0):
            expected = np.linalg.norm(host, p)
            np.testing.assert_allclose(norm_of(device, grads, p), expected, rtol=1e-15)


def tabled(device, hosts):
    """Arrays as a table, of which a list takes addresses and a layout."""
    return _host.code.table(put(device, hosts), True)


needs_compiled = pytest.mark.skipif(_host.code is None, reason="nothing is compiled")


@needs_compiled
def test_each_stream_and_device_has_a_plan_of_its_own_of_a_table(device):
    other = Device(multiprocessors=1)
    lists = tabled(device, mixed(5))
    found = []
    for own, stream in ((device, 1), (device, 2), (other, 1), (device, 1)):
        own.stream, lists.plan = stream, None
        own.pointers = lambda arrays, *, write: arrays.addresses  # noqa: ARG005
        found.append(plan_of(own, lists))
    assert len(set(map(id, found))) == 3
    assert found[0] is found[3]


@needs_compiled
def test_a_capture_neither_uses_nor_leaves_a_plan_of_a_table(device):
    lists, found = tabled(device, mixed(120)), []
    for recording in (True, False, True, False):
        device.recording, lists.plan = recording, None
        found.append(plan_of(device, lists))
    assert device.uploads == 1
    assert [k for k, plan in enumerate(found) if plan is found[1]] == [1, 3]
    assert found[0].table.memory is not found[2].table.memory


class Unread(np.ndarray):
    """A number on the device, which the host would have to wait for."""

    def __eq__(self, _):
        raise AssertionError("compared on the host")

    __float__ = __bool__ = __eq__
    __hash__ = None


def test_the_host_does_not_wait_for_a_decay_on_the_device(device):
    averages, params = put(device, [np.zeros(3), np.full(3, 4.0)])
    (decay,) = put(device, [np.array(0.25)])
    call = EmaUpdate(averages=[averages], params=[params], decay=decay.view(Unread))
    CudaBackend(device).ema_update(call)
    np.testing.assert_array_equal(averages, [3, 3, 3])


def test_no_two_files_have_a_kernel_of_one_name():
    files = sorted({file for file, _ in combinations()})
    names = [name for file in files for name in kernels_in(file)]
    assert len(set(names)) == len(names) > len(files)


@pytest.mark.parametrize("count", [3, CAPACITY + 1])
@pytest.mark.parametrize(
    ("dtypes", "macro"), [(["bfloat16"], {"LIST_T=bf16"}), (["bfloat16", "float32"], set())]
)
def test_a_kernel_is_compiled_for_the_dtype_of_a_list(count, dtypes, macro):
    device = IdleDevice(multiprocessors=1)
    hosts = [np.ones(4, DTYPES[dtypes[k % len(dtypes)]]) for k in range(count)]
    norm_of(device, put(device, hosts))
    compiled = {options for source, options in device.compiled if source == source_of("norm")}
    [options] = compiled
    assert {option[2:] for option in options if option.startswith("-DLIST_T")} == macro


def test_what_was_used_last_is_kept_longest():
    used = list_tables._LastUsed(number=3, tensors=10)
    made = {name: SimpleNamespace(tensors=1) for name in "abcdef"} | {
        "large": SimpleNamespace(tensors=10)
    }

    def keep(name):
        used.keep(name, made[name])
        return [name for name in made if name in used._cached]

    assert [keep(name) for name in "abc"][-1] == ["a", "b", "c"]
    assert used.find("a") is made["a"]
    assert keep("d") == ["a", "c", "d"]
    assert keep("c") == ["a", "c", "d"]
    assert keep("e") == ["c", "d", "e"]
    assert used.find("a") is None
    assert used.find("d") is made["d"]
    assert keep("large") == ["large"]
    assert keep("f") == ["f"]
    assert used._tensors == 1


def content(table):
    """Every byte that kernels read of a table."""
    if table.memory is None:
        return table.fields.tobytes()
    counts = [int(table.fields[name]) for name in ("chunk_bytes", "tensors", "chunks")]
    return counts, table.memory.tobytes()


def test_each_stream_has_an_upload_of_its_own(device):
    """Nothing orders one stream behind the copy that another one waited for."""
    grads = put(device, mixed(120))
    for stream, uploads in ((1, 1), (2, 2), (1, 2), (2, 2)):
        device.stream = stream
        norm_of(device, grads)
        assert device.uploads == uploads


def test_a_capture_neither_uses_nor_leaves_a_plan(device):
    """The memory of one that was uploaded before may be freed before a replay."""
    grads = put(device, mixed(120))
    eager = plan_of(device, grads)
    device.recording = True
    captured = plan_of(device, grads)
    assert captured is not eager
    assert captured.table.memory is not eager.table.memory
    others = put(device, mixed(120))
    captured = plan_of(device, others)
    device.recording = False
    assert plan_of(device, others) is not captured
    assert plan_of(device, grads) is eager
    assert device.uploads == 2


def test_ten_thousand_tensors_take_three_launches():
    device = Device(multiprocessors=1)
    sizes = np.random.default_rng(1).integers(0, 4, 10_000)
    hosts = [np.full(size, k % 7, np.float32) for k, size in enumerate(sizes)]
    grads = put(device, hosts)
    norm = norm_of(device, grads)
    exact = math.sqrt(sum(int(h @ h) for h in hosts))
    assert abs(float(norm) / exact - 1) <= 2.0**-51
    run(device, "clip_by_norm", grads=grads, norm=norm, max_norm=exact / 2)
    assert device.total_traffic.launches == 3
    for got, host in zip(grads, hosts, strict=True):
        np.testing.assert_array_equal(got, host / 2)


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_chunks_of_many_batches(device, monkeypatch, name):
    """As lists of more than 64 MiB have them: a warp goes through one batch after another."""
    monkeypatch.setattr(list_tables, "_MANY_CHUNKS", 1)
    (grad,) = grads = put(device, [np.arange(1, 20_004).astype(DTYPES[name])])
    exact = grad.astype(np.float64)
    assert plan_of(device, grads).chunks == 1
    for order in (1, 2, math.inf):
        expected = np.linalg.norm(exact, order)
        assert float(norm_of(device, grads, order)) == pytest.approx(expected, rel=1e-15)
    for change, expected in (
        (
            lambda: run(device, "scale_grads", grads=grads, coefficient=0.5),
            exact / 2,
        ),
        (
            lambda: run(device, "clip_grad_value", grads=grads, clip_value=2048.0),
            np.minimum(exact / 2, 2048),
        ),
        (lambda: run(device, "zero_grad", grads=grads), exact * 0),
    ):
        change()
        np.testing.assert_array_equal(grad.astype(np.float64), expected)


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("way", ["packs", "strided", "accumulated", "accumulated singly"])
def test_sums_that_wait_in_floats_do_not_overflow(device, monkeypatch, way, p):
    """Neither those of many turns of a lane, nor those of all lanes together."""
    if way.startswith("accumulated") and p == 1:
        pytest.skip("accumulates with the 2-norm only")
    monkeypatch.setattr(list_tables, "_MANY_CHUNKS", 1)
    # Arrays that are not aligned alike are added and normed in two launches, for the bits' sake.
    monkeypatch.setattr(list_tables.ListPlan, "in_step", True)
    for size, exponent in ((1 << 9, 122.5), (1 << 16, 117.5), (1 << 20, 113.5)):
        if size > 1 << 16 and way in ("strided", "accumulated singly"):
            continue  # an element is a turn
        value = np.float32(2 ** (exponent / p))
        room = device.xp.empty(2 * size + 1, np.float32)
        grad = {"strided": room[::2], "accumulated singly": room[1:]}.get(way, room)[:size]
        grad[...] = value
        if way.startswith("accumulated"):
            (buffer,) = put(device, [np.zeros(size, np.float32)])
            norm = device.xp.empty((), np.float64)
            run(device, "accumulate_grads", buffers=[buffer], grads=[grad], norm=norm)
        else:
            norm = norm_of(device, [grad], p)
        assert abs(float(norm) / (float(value) * size ** (1 / p)) - 1) <= 2.0**-40


PARAMETERS = [4096, 32764]  # bytes that a launch has at most, before CUDA 12.1 and since


@pytest.mark.parametrize("parameter_bytes", PARAMETERS)
def test_a_captured_list_is_uploaded_in_parameters(parameter_bytes):
    device = Device(multiprocessors=1, parameter_bytes=parameter_bytes)
    hosts = mixed(2 * CAPACITY + 5)
    hosts += [np.arange(24.0).reshape(2, 3, 4)[:, ::2, ::3] for _ in range(DIMS)]
    eager = put(device, hosts)
    expected = norm_of(device, eager), norm_of(device, eager, per_tensor=True)
    run(device, "scale_grads", grads=eager, coefficient=0.3)
    device.recording, device.uploads = True, 0
    grads = put(device, hosts)
    assert_same_bits(norm_of(device, grads), expected[0])
    assert_same_bits(norm_of(device, grads, per_tensor=True), expected[1])
    run(device, "scale_grads", grads=grads, coefficient=0.3)
    assert_all_same_bits(grads, eager)
    assert device.uploads == 0
    # What a replay writes must not have been handed to anybody else.
    first, second = (scratch(device, 4, "float64") for _ in range(2))
    assert first.ctypes.data != second.ctypes.data


@pytest.mark.parametrize(("parameter_bytes", "launches"), [(PARAMETERS[0], 10), (PARAMETERS[1], 2)])
def test_launches_of_a_captured_clip_of_a_thousand(parameter_bytes, launches):
    """Two for the norm, one to scale, and those that bring 1000 rows of 40 bytes."""
    device = Device(multiprocessors=1, parameter_bytes=parameter_bytes)
    device.recording = True
    grads = Views(put(device, [np.full(2, k, np.float32) for k in range(1000)]))
    norm = norm_of(device, grads)
    run(device, "clip_by_norm", grads=grads, norm=norm, max_norm=1.0, eps=0.0)
    assert device.total_traffic.launches == launches + 3
    assert float(norm) == pytest.approx(math.sqrt(2 * sum(k * k for k in range(1000))))
    assert float(norm_of(device, grads)) == pytest.approx(1)


@pytest.mark.parametrize("words", [1, 509, 510, 511, 1020, 1021])
def test_parameters_bring_every_word(words):
    """510 travel with a launch, by two blocks of threads."""
    device, host = Device(), np.random.default_rng(words).integers(1, 1 << 62, words)
    device.recording = True
    found = upload(device, host)
    assert found.tobytes() == host.tobytes()
    assert device.total_traffic.launches == -(-words // 510)


@pytest.mark.parametrize("count", [CAPACITY, CAPACITY + 1])
def test_a_capture_compiles_nothing_that_the_same_call_has_used(count):
    device = IdleDevice(multiprocessors=1)
    copies = np.ones(count)
    for recording in (False, True):
        device.capturing = lambda now=recording: now
        for grads in (Views(put(device, [np.ones(4, np.float32)] * count)) for _ in range(2)):
            norm_of(device, grads)
            parts = device.xp.empty((count, 3), np.float64)
            options = {"parts": parts, "per_tensor": True, "copies": copies}
            run(device, "norm_parts", grads=grads, norm_type=2.0, **options)
        if not recording:
            compiled = len(device.compiled)
    assert len(device.compiled) == compiled > 0


@pytest.mark.guarantee("Captured")
def test_a_captured_list_with_more_dimensions_than_a_launch_takes(device):
    hosts = [np.arange(60.0).reshape(5, 12)[:, : k % 11 + 1 : 1 + k % 2] + k for k in range(130)]
    eager = [device.xp.asarray(np.repeat(host, 2, axis=1))[:, ::2] for host in hosts]
    grads = [device.xp.asarray(np.repeat(host, 2, axis=1))[:, ::2] for host in hosts]
    expected = norm_of(device, eager, per_tensor=True)
    run(device, "scale_grads", grads=eager, coefficient=0.3)
    device.recording = True
    assert_same_bits(norm_of(device, grads, per_tensor=True), expected)
    run(device, "scale_grads", grads=grads, coefficient=0.3)
    assert_all_same_bits(grads, eager)


@pytest.mark.parametrize(
    ("file", "kernel", "arguments"),
    [
        ("norm", "norm_partials", (np.float64(2), np.zeros((64, 3)), np.uint32(1))),
        (
            "clip_by_norm",
            "clip_by_norm",
            (np.full(1, 2.0), None, *np.ones(2), None, np.float64(1), np.uint32(0), np.uint32(1)),
        ),
        ("scale", "scale_grads", (None, np.float64(2), np.uint32(1))),
        ("clip_value", "clip_grad_value", (np.float64(0.5),)),
        ("zero", "zero_grad", ()),
    ],
)
@pytest.mark.parametrize(
    ("others", "number"),
    [(mixed(5), len(FLOATS)), ([], FLOATS["float64"].code)],
    ids=["of all", "of float32 alone"],
)
def test_an_unknown_dtype_traps_and_no_address_is_followed(
    device, file, kernel, arguments, others, number
):
    grads = put(device, [*others, np.ones(3000, np.float32)])
    table = plan_of(device, grads, grads).table
    fields = table.fields.copy()
    tensors = fields["at"][: len(grads)]
    tensors["dtype"] = number
    tensors["source"] = tensors["target"] = 1 << 40  # in no array: an access is another fault
    arrays = [device.xp.asarray(a) if isinstance(a, np.ndarray) else a for a in arguments]
    macros = {"ORDER": "SumOfSquares"} if file == "norm" else {}
    own = replace(table, fields=fields)
    with pytest.raises(EmulatorFault) as found:
        list_tables.launch(steps(device, own, file, kernel, *arrays, **macros))
    assert found.value.kind == "trap"


def test_a_captured_array_of_many_dimensions_that_cannot_be_merged(device):
    """Every other element along each of 17 axes: more than a list in parameters has."""
    host = np.arange(2.0**17).astype(np.float32)
    device.recording = True
    room = device.xp.asarray(np.repeat(host, 2))
    grad = np.lib.stride_tricks.as_strided(room, (2,) * 17, [8 << k for k in range(17)])
    run(device, "scale_grads", grads=[grad], coefficient=0.5)
    np.testing.assert_array_equal(room[::2], host / 2)
    np.testing.assert_array_equal(room[1::2], host)


# Strides


@given(data=st.data())
def test_dims_reach_every_element_once(data):
    shape = data.draw(draw_.shapes(2000))
    target = data.draw(draw_.arrays(shape, data.draw(draw_.names)))
    kept = shape[data.draw(st.integers(0, len(shape))) :]
    small = tuple(data.draw(st.sampled_from((1, n))) for n in kept)
    source = data.draw(draw_.arrays(small, data.draw(draw_.names)))
    pair = pair_of(source.ctypes.data, target.ctypes.data, source, target)
    found = set(_addresses(pair, source.itemsize, target.itemsize))
    expected = set(zip(_each(np.broadcast_to(source, shape)), _each(target), strict=True))
    assert found == expected
    assert pair.elements == target.size == len(expected)


def _addresses(pair, *sizes):
    dims = pair.dims or ((pair.elements, *sizes),)
    for i in range(pair.elements):
        source, target, rest = pair.source, pair.target, i
        for length, step, target_step in dims:
            rest, at = divmod(rest, length)
            source += at * step
            target += at * target_step
        yield source, target


def _each(array):
    offsets = np.zeros(array.shape, np.int64)
    for axis, stride in enumerate(array.strides):
        along = np.arange(array.shape[axis]) * stride
        offsets += along.reshape((-1,) + (1,) * (array.ndim - 1 - axis))
    return (offsets.reshape(-1) + array.ctypes.data).tolist()


@pytest.mark.parametrize("layout", ["C", "Fortran", "reversed", "rolled", "offset"])
def test_gapless_views_of_any_order_need_no_dims(layout):
    array = LAYOUTS[layout](np.zeros((6, 5, 4), np.float32))
    assert pair_of(array.ctypes.data, array.ctypes.data, array, array).dims == ()


# Paths


@pytest.mark.parametrize("name", sorted(DTYPES))
@pytest.mark.parametrize("offset", [0, 1, 3, 7])
def test_runs_are_read_in_packs_from_any_element_on(device, name, offset):
    dtype, size = DTYPES[name], 9000
    grad = device.xp.asarray(np.arange(size + offset) % 11).astype(dtype)
    grad = device.xp.asarray(grad)[offset:]
    device.pointer(grad)
    norm_of(device, [grad])
    partials = device.total_traffic.accesses
    assert partials < 1.5 * size * dtype.itemsize / 16 + 600
    exact = math.sqrt(sum(k * k for k in (np.arange(size + offset) % 11)[offset:].tolist()))
    assert abs(float(norm_of(device, [grad])) / exact - 1) <= 2.0**-51


@pytest.mark.parametrize("name", sorted(DTYPES))
@pytest.mark.parametrize(("into", "outof"), [(0, 0), (1, 1), (1, 0), (0, 3), (5, 5 + 8)])
def test_out_of_place_for_any_two_alignments(device, name, into, outof):
    dtype, size = DTYPES[name], 2500
    host = np.random.default_rng(0).standard_normal(size + outof).astype(dtype)
    grad = device.xp.asarray(host)[outof:]
    guard = device.xp.asarray(np.full(size + into + 3, -7.0, dtype))
    out = guard[into:-3]
    run(device, "scale_grads", grads=[grad], coefficient=1 / 3, outs=[out])
    expected = (host[outof:].astype(np.float64) * (1 / 3)).astype(dtype)
    tolerances.assert_ulps(out, expected, 0)
    assert (guard[:into] == -7).all()
    assert (guard[-3:] == -7).all()
    np.testing.assert_array_equal(grad, host[outof:])
    run(device, "scale_grads", grads=[grad], coefficient=1.0, outs=[out])
    assert_same_bits(out, host[outof:])


@pytest.mark.guarantee("Products rounded once")
@pytest.mark.parametrize(("name", "tie"), [("bfloat16", 2.0**-8), ("float16", 2.0**-11)])
def test_products_are_rounded_once(device, name, tie):
    for sign in (1.0, -1.0):
        for beside, rounded in ((2.0**-40, 1 + 2 * tie), (0.0, 1.0), (-(2.0**-40), 1.0)):
            (grad,) = put(device, [np.full(40, sign).astype(DTYPES[name])])
            run(device, "scale_grads", grads=[grad], coefficient=1 + tie + beside)
            np.testing.assert_array_equal(grad.astype(float), np.full(40, sign * rounded))


# Ranges


@pytest.mark.guarantee("Safe from overflow")
@pytest.mark.parametrize("p", [2.0, 3.0, 40.0, 0.5])
def test_magnitudes_from_one_end_of_float64_to_the_other(device, p):
    sizes = np.array([1e-300, 5e-324, 1e-160, 1.0, 1e155, 1e300])
    for hosts in (
        [sizes],
        [sizes[::-1].copy()],
        [np.repeat(sizes[:3], 40)],
        [sizes[:2], np.ones(3, np.float32), sizes[2:3]],
        [np.full(4, 1e-300), np.full(700, 1e-170), np.full(3, 1e290, np.float64)],
        [np.full(1000, 5e-324)],
        [2.0 ** np.array([479.0, 481, 479])],  # either side of where squares are scaled
        [2.0 ** np.array([-479.0, -481, -479])],
        [np.full(1 << 15, 1.5 * 2.0**504)],  # as they are, the sum of squares would overflow
        [np.full(1000, 1e154), np.full(10, 2.0**-130, np.float32)],
        [np.zeros(3, np.float32), np.full(1, 1e-170), np.zeros(3, np.float32)],
    ):
        got = float(norm_of(device, put(device, hosts), p))
        bound = tolerances.norm(p, tolerances.PAIRS, runs=True)
        assert oracles.off_by(got, oracles.norm(hosts, p)) <= bound + 2 * 5e-324 / max(got, 1e-322)


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", sorted(DTYPES))
def test_what_is_not_finite_reaches_the_norm_from_any_place(device, p, value, name):
    for at in (0, 1, 37, 511, 512, 2999):
        host = np.linspace(-3, 3, 3000).astype(DTYPES[name])
        host[at] = value
        grads = put(device, [np.full(5, 1e300), host, np.full(3, 1e-300)])
        got = float(norm_of(device, grads, p))
        assert math.isnan(got) if math.isnan(value) else got == math.inf


@pytest.mark.parametrize("terms", [np.full(1 << 14, 0.1), np.r_[1.0, np.full(511, 2.0**-54)]])
def test_what_additions_round_off_is_not_lost(device, terms):
    exact = math.fsum(terms.tolist())
    assert abs(float(norm_of(device, put(device, [terms]), 1.0)) - exact) <= math.ulp(exact)
    got = float(norm_of(device, put(device, [np.sqrt(terms)])))
    exact = math.sqrt(math.fsum((np.sqrt(terms) ** 2).tolist()))
    assert abs(got - exact) <= math.ulp(exact)


def test_a_number_may_lie_at_any_address(device):
    room = device.xp.asarray(np.zeros(12, np.uint8))
    number = room[1:9].view(np.float64).reshape(())
    number[...] = 0.5
    grads = put(device, [np.array([4.0]), np.array([2.0])])
    run(device, "scale_grads", grads=grads, coefficient=number)
    assert [float(grad[0]) for grad in grads] == [2.0, 1.0]


def test_flags_of_a_long_list_that_is_captured(device):
    hosts = [np.ones(3, np.float32) for _ in range(2 * CAPACITY + 5)]
    hosts[1][2], hosts[CAPACITY + 2][0] = np.inf, np.nan
    grads = put(device, hosts)
    flags = device.xp.empty((len(grads),), np.float64)
    device.recording = True
    norms = norm_of(device, grads, per_tensor=True, found_inf=flags)
    assert np.flatnonzero(flags).tolist() == [1, CAPACITY + 2]
    assert np.flatnonzero(~np.isfinite(norms)).tolist() == [1, CAPACITY + 2]


# Grids and schedules


def results(device):
    """Every kernel's results on lists with runs, strided and misaligned tensors."""
    hosts = [h for h in mixed(20, seed=5) if h.size]
    hosts += [np.random.default_rng(k).standard_normal(3000).astype(np.float32) for k in range(5)]
    grads = put(device, hosts)
    grads += [device.xp.asarray(np.arange(900.0).reshape(30, 30))[::2, ::3]]
    grads += [device.xp.asarray(np.arange(999, dtype=np.float32))[1:]]
    found = [norm_of(device, grads, p) for p in ORDERS]
    found += [norm_of(device, grads, p, per_tensor=True) for p in ORDERS]
    run(device, "clip_by_norm", grads=grads, norm=found[1], max_norm=0.37, eps=1e-6)
    found += [g.copy() for g in grads]
    run(device, "clip_grad_value", grads=grads, clip_value=1e-3)
    found += [g.copy() for g in grads]
    (buffer,) = put(device, [np.ones((30, 100), np.float32)])
    run(device, "accumulate_grad", buffer=buffer, grad=grads[-3][:100], scale=0.3)
    found.append(buffer.copy())
    run(device, "zero_grad", grads=grads)
    return [*found, *(g.copy() for g in grads)]


@pytest.fixture(scope="module")
def reference():
    return results(Device(multiprocessors=200))


@pytest.mark.guarantee("Any schedule", "Any GPU")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("grid", [1, 2, 3, None])
def test_same_bits_for_every_schedule_and_grid(reference, schedule, grid):
    device = Device(schedule=schedule, seed=grid or 0, multiprocessors=1, grid_limit=grid)
    assert_all_same_bits(results(device), reference)


def results_of_a_step(device):
    """Arrays that a training step's functions write, with numbers that the device holds."""
    backend = CudaBackend(device)
    rng = np.random.default_rng(8)
    shapes = [(30, 40), (7, 3, 5), (2, 3000), (1, 1), (65, 1), (3, 9)]
    types = [*DTYPES.values()] * len(shapes)
    hosts = [rng.standard_normal(s).astype(t) for s, t in zip(2 * shapes, types, strict=False)]

    def lie():
        grads = [on_device(array, backend) for array in put(device, hosts)]
        return [grad[:, ::-2] if k % 5 == 3 else grad for k, grad in enumerate(grads)]

    def number(value):
        return on_device(device.xp.asarray(np.array(value)), backend)

    def calls(grads):
        for axis in (0, -1, None):
            yield gradkit.clip_grad_block_norm(grads, number(0.9), axis=axis)
            yield gradkit.clip_grad_adaptive(grads, lie(), 0.2, axis=axis)
        yield gradkit.clip_grad_block_norm(grads, 0.01, rms=True)
        norm = number(0.0)
        gradkit.accumulate_grads(grads, lie(), scale=number(0.3), norm_out=norm)
        yield [norm]
        yield [gradkit.clip_grad_norm(grads, number(1.5), scale=number(0.7))]

    grads, found = lie(), []
    for written in calls(grads):
        found += [np.array(a) for a in (*written, *grads)]
    return found


@pytest.fixture(scope="module")
def reference_step():
    return results_of_a_step(Device())


@pytest.mark.sampled(7)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("grid", [1, 3, None])
def test_a_step_has_the_same_bits_for_every_schedule_and_grid(reference_step, schedule, grid):
    device = Device(schedule=schedule, seed=grid or 0, multiprocessors=1, grid_limit=grid)
    assert_all_same_bits(results_of_a_step(device), reference_step)


# Beyond 2^32


def test_elements_beyond_two_to_the_32():
    size = (1 << 32) + 12_345
    device = Device(multiprocessors=1 << 20)
    grad = sparse_array(size, np.float16)
    grad[-1], grad[12_344] = 3, 5  # the same element to 32 bits
    grad[20_000] = 7  # where 32 bits of what is left of the array end
    plan = plan_of(device, [grad], [grad])
    parts = scratch(device, plan.chunks * 3, "float64")
    with device.only_blocks([-1]):
        numbers = np.float64(2), parts, np.uint32(0)
        made = steps(device, plan.table, "norm", "norm_partials", *numbers, ORDER="SumOfSquares")
        list_tables.launch(made)
        assert parts[-3] == 9
        arguments = (None, np.float64(2), np.uint32(1))
        list_tables.launch(steps(device, plan.table, "scale", "scale_grads", *arguments))
    # The last chunks come first where work goes backwards, so block -1 does the first ones.
    assert (grad[-1], grad[12_344], grad[20_000]) == (3, 10, 14)
    with device.only_blocks([0]):
        list_tables.launch(steps(device, plan.table, "scale", "scale_grads", *arguments))
    assert (grad[-1], grad[12_344], grad[20_000]) == (6, 10, 14)


def test_strided_elements_beyond_two_to_the_32():
    size = (1 << 32) + 4096
    device = Device(multiprocessors=1 << 20)
    room = sparse_array(2 * size, np.uint8).view(np.float16)
    grad = sparse_array(2 * size, np.float16)[::2]
    assert room.size == size
    grad[-1] = 3
    plan = plan_of(device, [grad], [grad])
    assert plan.table.fields["at"]["dims"][0] == 1
    with device.only_blocks([-1]):
        list_tables.launch(steps(device, plan.table, "zero", "zero_grad"))
    assert grad[-1] == 0


def test_units_beyond_two_to_the_32():
    """In bytes between units, and in their number."""
    columns = (1 << 32) + 64
    device = Device(multiprocessors=1)
    room = sparse_array(3 * columns, np.float16)
    grad = np.lib.stride_tricks.as_strided(room, (3, 40), (2 * columns, 2))
    grad[:] = np.array([1, 2, 4])[:, None]
    made = device.xp.empty((3, 40), np.float16)
    norms = device.xp.empty(3, np.float64)
    run(device, "unit_norms", grads=[grad], norm_type=1.0, axes=((1,),), norms=norms)
    np.testing.assert_array_equal(norms, [40, 80, 160])
    run(device, "clip_units", grads=[grad], norms=norms, max_norm=20.0, axes=((1,),), outs=[made])
    np.testing.assert_array_equal(made, 0.5)
    run(device, "clip_units", grads=[made], norms=norms, max_norm=20.0, axes=((1,),), outs=[grad])
    np.testing.assert_array_equal(grad.T, np.tile([0.25, 0.125, 0.0625], (40, 1)))
    many = np.lib.stride_tricks.as_strided(np.zeros(1), (1 << 20, 1 << 13), (0, 0))
    with pytest.raises(ValueError, match=r"axis cuts gradients into 8589934592 pieces"):
        plan_of(device, [many], axes=((),))


@pytest.mark.parametrize("beside", [0, 64])
def test_units_of_more_chunks_than_threads_that_join_them(beside):
    """A warp where most units are small, a block where they are large."""
    device = Device(multiprocessors=2)
    large = np.ones((1, 270_000 if beside == 0 else 40_000), np.float32)
    grads = [device.xp.asarray(g) for g in (large, np.ones((beside, 2)))]
    axes, norms = ((1,), (1,)), device.xp.empty(1 + beside, np.float64)
    assert joining_threads(plan_of(device, grads, axes=axes).table) == (32 if beside else 256)
    run(device, "unit_norms", grads=grads, norm_type=1.0, axes=axes, norms=norms)
    np.testing.assert_array_equal(norms, [large.size, *[2] * beside])


@needs_compiled
def test_units_of_a_table_in_another_shape():
    """A plan knows only the number of elements of contiguous arrays."""
    device = Device()
    flat = device.xp.asarray(np.arange(1.0, 13.0))
    for rows in (3, 4, 3):
        view, norms = flat.reshape(rows, -1), device.xp.empty(rows, np.float64)
        table = _host.code.table([view], True)
        run(device, "unit_norms", grads=table, norm_type=1.0, axes=((1,),), norms=norms)
        np.testing.assert_array_equal(norms, view.sum(axis=1))


def test_units_of_records():
    """Rows that begin at odd addresses, all but the first."""
    records = np.zeros(5, [("flag", "u1"), ("row", np.float32, 7)])
    room = np.zeros(records.nbytes + 3, np.uint8)
    rows = np.ndarray(5, records.dtype, room, 3)["row"]
    rows[:] = draw_.values((5, 7), "float32")
    assert (rows.ctypes.data % 4, rows.strides[0] % 4) == (0, 1)
    device = Device()
    norms = device.xp.empty(5, np.float64)
    run(device, "unit_norms", grads=[rows], norm_type=2.0, axes=((1,),), norms=norms)
    np.testing.assert_allclose(norms, np.linalg.norm(rows.astype(np.float64), axis=1), rtol=1e-12)


@pytest.mark.parametrize("size", [1, 4096, 1 << 20, 1 << 30, (1 << 43) + 5])
def test_chunks_are_balanced_and_counted_by_an_int(size):
    grad = np.lib.stride_tricks.as_strided(np.zeros(1), (size,), (0,))
    plan = plan_of(KernelDevice(), [grad])
    each = int(plan.table.fields["chunk_bytes"])
    assert each % 16 == 0
    assert each <= 1 << 30
    assert plan.chunks == -(-size * 8 // each)
    assert each in (4096, 1 << 30) or 4096 < plan.chunks <= 8192


@pytest.mark.parametrize("begin", [0, 1, 2])
def test_a_sum_is_known_by_a_pair_whose_arrays_are_aligned(begin):
    """And that kernels walk forward, as they do all arrays of which they get the addresses."""
    room, device = np.zeros(64, np.float32), IdleDevice(multiprocessors=1)
    first = device.xp.asarray(room)[-(room.ctypes.data // 4) % 4 :]
    call = SimpleNamespace(plan=SimpleNamespace(launcher=None), grad=first[32:37])
    for buffer, known in (
        (first[1:6], False),
        (first[4:9][::-1], False),
        (first[8:13], True),
        (first[13:18], True),
    )[begin:]:
        call.buffer = buffer
        add(device, "accumulate_grad", call, None, np.float64(1))
        assert (call.plan.launcher is not None) == known
    table, _ = call.plan.launcher
    moved = table.at(48, 96).view(table.fields.dtype)["at"]
    assert (moved["source"], moved["target"]) == (48, 96)
    assert [moved[name] for name in ("count", "dims", "first_chunk")] == [5, 0, 0]
