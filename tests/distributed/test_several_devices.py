"""Gradients on several devices of one process, in one call, and in host memory beside them."""

import math
import re
from itertools import chain, zip_longest
from pathlib import Path

import numpy as np
import pytest

import gradkit
from gradkit._cuda import CudaBackend, several_devices
from tests import oracles, tolerances
from tests.cuda.test_traffic import in_tables
from tests.device_ranks import NcclCommunicator, Wire
from tests.devices.emulated import DeviceArray
from tests.package.test_contract import close_doors, refuse
from tests.problems import one_or_each
from tests.ranks import INF, NAN, ORDERS, bits, f, flat, results
from tests.several_devices import HOST, Devices
from tests.tolerances import DTYPES, assert_same_bits

pytestmark = pytest.mark.emulated


def drawn():
    rng = np.random.default_rng(1)
    names = [*DTYPES, "float32", "float64"]
    return [rng.standard_normal(30 * k).astype(DTYPES[name]) for k, name in enumerate(names)]


def first_device(where):
    return next(place for place in where if place != HOST)


def interleaved(parts):
    """(device, gradient) in turns, beginning with the first device that has one."""
    turns = zip_longest(*([(k, g) for g in part] for k, part in enumerate(parts)))
    return [pair for turn in turns for pair in turn if pair and pair[1] is not None]


def spread(devices, parts):
    pairs = interleaved(parts)
    return devices.over([k for k, _ in pairs], [g for _, g in pairs])


def copies(grads):
    return [g.copy() if type(g) is np.ndarray else g.backend.put(np.array(g)) for g in grads]


def memory(*lists):
    return [array.tobytes() for array in chain(*lists)]


# Norms


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("by", ["number", "array"])
def test_norms(devices, where, order, by):
    """Of all, on the first device; and of each in the list's order, with the flags."""
    hosts, first = drawn(), first_device(where)
    grads = devices.over(where, hosts)
    scale = devices.put(where[1] if where[1] != HOST else first, -0.5) if by == "array" else -0.5
    found = devices.put(first, np.ones(1, bool))
    norm = gradkit.grad_norm(grads, order, scale=scale, found_inf=found)
    assert (type(norm), norm.shape, found.tolist()) == (DeviceArray, (), [False])
    assert norm.backend is devices.backends[first]
    halved = [host * 0.5 for host in hosts]
    assert oracles.off_by(float(norm), oracles.norm(halved, order)) <= 2.0**-39
    grads[4][3] = hosts[4][3] = NAN
    found, out = devices.put(first, np.ones(6, np.float16)), devices.put(first, np.zeros(12))[::2]
    options = {"scale": scale, "flat": True}
    assert gradkit.per_tensor_norms(grads, order, found_inf=found, out=out, **options) is out
    for got, host in zip(out, hosts, strict=True):
        assert oracles.off_by(2 * float(got), oracles.norm([host], order)) <= 2.0**-39
    assert found.tolist() == [0, 0, 0, 0, 1, 0]
    again = gradkit.per_tensor_norms(grads, order, **options)
    assert again.backend is devices.backends[first]
    assert memory([again]) == memory([np.array(out)])


def test_bits_are_those_of_one_device(devices):
    """Sums of whole numbers, which are exact wherever they are taken."""
    rows = np.random.default_rng(5).integers(-1000, 1000, (6, 100)) * 2.0**-300
    for order in (1, 2, INF):
        norm = gradkit.grad_norm(devices.over([HOST, 0, 1] * 2, rows), order)
        assert bits([norm]) == bits([gradkit.grad_norm(list(rows), order)])


def test_statistics(devices, where):
    grads, first = devices.over(where, drawn()), first_device(where)
    stats = gradkit.grad_stats(grads)
    assert stats.table.backend is devices.backends[first]
    alone = [np.array(gradkit.grad_stats([grad]).table[0]) for grad in grads]
    assert_same_bits(np.array(stats.table), np.array(alone))
    out = devices.put(first, np.zeros((6, 10)))[:, ::2]
    assert gradkit.grad_stats(grads, out=out).table is out
    assert_same_bits(np.array(out), np.array(alone))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("value", [0.5, -3.0, NAN, INF])
def test_a_scale_on_either_device(devices, value, which, order):
    grads = spread(devices, [[f(0.0)], [f(4.0, 3.0)]])
    norm = float(gradkit.grad_norm(grads, order, scale=devices.put(which, np.float32(value))))
    expected = abs(value) * float(oracles.norm(grads, order))
    assert norm == pytest.approx(expected, rel=1e-14, nan_ok=True)


@pytest.mark.parametrize("parts", [[[f()], [f(), f()]], [[f()], [f(3.0, 4.0)]]], ids=["all", "one"])
@pytest.mark.parametrize("order", ORDERS)
def test_gradients_without_elements(devices, parts, order):
    grads = spread(devices, parts)
    expected = float(oracles.norm(flat(parts), order))
    assert float(gradkit.grad_norm(grads, order)) == pytest.approx(expected, rel=1e-14)
    norms = gradkit.per_tensor_norms(grads, order, flat=True)
    assert norms.tolist() == pytest.approx([float(oracles.norm([g], order)) for g in grads])
    nothing, found = devices.put(1, NAN), devices.put(0, 7.0)
    norm = float(gradkit.grad_norm(grads, order, scale=nothing, found_inf=found))
    assert (norm == 0) == (expected == 0)  # as on one device, NaN times no elements is 0
    assert float(found) == 0
    assert float(gradkit.clip_grad_norm(grads, 0.5, order)) == pytest.approx(expected, rel=1e-14)


# Clipping


@pytest.mark.guarantee("Over several devices")
@pytest.mark.sampled(4)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("most", ["number", 0, 1, 2])
@pytest.mark.parametrize("by", ["number", 0, 1])
@pytest.mark.parametrize("how", ["in place", "functional", "with norm"])
def test_clipping(devices, where, how, by, most, order):
    """Each where it lies, with the bits of clipping it by itself by the norm of all."""
    hosts = drawn()
    grads = devices.over(where, hosts)
    before = copies(grads)
    limit = devices.put(most, np.float32(1.5)) if most in where else 1.5
    scale = devices.put(by, -2.5) if by in where else -2.5
    if how == "functional":
        found, norm = gradkit.clip_by_global_norm(grads, limit, order, scale=scale)
        assert memory(grads) == memory(before)
    elif how == "with norm":
        norm = gradkit.grad_norm(grads, order, scale=scale)
        found = gradkit.clip_grads_with_norm(grads, norm, limit, scale=scale)
        assert found is grads
    else:
        norm, found = gradkit.clip_grad_norm(grads, limit, order, scale=scale), grads
    scaled = [2.5 * host.astype(float) for host in hosts]
    assert oracles.off_by(float(norm), oracles.norm(scaled, order)) <= 2.0**-39
    for grad, got in zip(before, found, strict=True):
        assert type(got) is type(grad)
        assert getattr(got, "backend", None) is getattr(grad, "backend", None)
        gradkit.clip_grads_with_norm(grad, float(norm), max_norm=1.5, scale=-2.5)
        assert_same_bits(np.array(got), np.array(grad))


@pytest.mark.parametrize("by", ["number", 0, 1, 2])
def test_scaling_clamping_and_zeroing(devices, where, by):
    factor = devices.put(by, -0.3) if by in where else -0.3
    for change, alone in (
        (lambda grads: gradkit.scale_grads(grads, factor), lambda g: gradkit.scale_grads(g, -0.3)),
        *[(lambda grads: gradkit.clip_grad_value(grads, 0.25),) * 2, (gradkit.zero_grad,) * 2],
    ):
        grads = devices.over(where, drawn())
        before = copies(grads)
        assert change(grads) is grads
        for got, grad in zip(grads, before, strict=True):
            alone([grad])
            assert_same_bits(np.array(got), np.array(grad))


@pytest.mark.parametrize("places", [[0, 1, 0], [HOST, 0, HOST]])
def test_results_go_where_out_says(devices, places):
    """The caller's container, and its arrays, each where its gradient lies."""
    a, b, c = grads = devices.over(places, [f(3, 0), f(4), f(12)])
    tree, expected = {"first": [a, None], "second": (b, c)}, [[1.5, 0], [2], [6]]
    clipped, _ = gradkit.clip_by_global_norm(tree, 6.5)
    assert [clipped["first"][1], type(clipped["second"])] == [None, tuple]
    made = (clipped["first"][0], *clipped["second"])
    assert [g.tolist() for g in made] == expected
    assert list(map(type, made)) == list(map(type, grads))
    room, total = copies(grads), devices.put(0, 0.0)
    out = {"second": tuple(room[1:]), "first": [room[0], None]}
    found, norm = gradkit.clip_by_global_norm(tree, 6.5, out=(out, total))
    assert found is out
    assert norm is total
    assert [g.tolist() for g in room] == expected
    assert float(total) == 13


@pytest.mark.parametrize("second", [1, HOST])
def test_policies(devices, second):
    grads = devices.over([0, second, 0], [f(1), f(NAN), f(3)])
    before, out = memory(grads), devices.put(0, 7.0)
    with pytest.raises(gradkit.NonFiniteNormError) as caught:
        gradkit.clip_grad_norm(grads, 1.0, nonfinite="raise", out=out)
    assert caught.value.names == ("grads[1]",)
    assert (memory(grads), float(out)) == (before, 7.0)
    fine = [grads[0], devices.put(second, f(4)), grads[2]]
    assert gradkit.clip_grad_norm(fine, 1.0, nonfinite="raise", out=out) is out
    assert float(out) == pytest.approx(math.sqrt(26))


def test_gradients_within_the_limit_keep_every_bit(devices):
    odd = np.array([1 << 63, 1, 0x3FF0000000000001], np.uint64).view(np.float64)
    grads = spread(devices, [[odd], [f(0.1), odd]])
    before = memory(grads)
    gradkit.clip_grad_norm(grads, 1e3)
    assert memory(grads) == before


def test_a_clip_is_two_reads_and_a_write(devices):
    grads = spread(devices, [[np.ones(90_001, np.float32)], [np.ones(70_000, np.float32)]])
    gradkit.clip_grad_norm(grads, 1.0, scale=0.5)
    for device, grad in zip(devices.all, grads, strict=True):
        assert in_tables(device) == (2 * grad.nbytes, grad.nbytes)
    assert [device.fetched for device in devices.all] == [24, 8]  # a sum, and the norm


def test_nothing_is_read_from_a_device(devices, monkeypatch):
    """Neither by gradkit's own door nor by looking at an array."""
    grads = spread(devices, [[f(3, 0)], [f(4)]])
    limit, scale = devices.put(1, 1.0), devices.put(0, 0.5)
    out, found = devices.put(0, 0.0), devices.put(0, 9.0)
    options = {"scale": scale, "found_inf": found}
    with monkeypatch.context() as closed:
        closed.setattr(CudaBackend, "read", refuse)
        close_doors(closed)
        gradkit.grad_norm(grads, **options)
        gradkit.clip_by_global_norm(grads, limit, **options)
        norm = gradkit.clip_grad_norm(grads, limit, out=out, **options)
    assert norm is out
    assert (float(norm), float(found)) == (2.5, 0)
    assert [grad.tolist() for grad in grads] == [[3 * 0.5 * (1 / 2.5), 0], [4 * 0.5 * (1 / 2.5)]]
    assert [device.waits for device in devices.all] == [0, 0]


def test_a_list_is_uploaded_once_for_each_device(devices):
    """However often it comes again, and by whichever function."""
    hosts = [np.full(3, k, np.float32) for k in range(300)]
    grads = devices.over([k % 2 for k in range(300)], hosts)
    assert float(gradkit.grad_norm(grads)) == float(gradkit.grad_norm(hosts))
    for _ in range(3):
        gradkit.clip_grad_norm(grads, 1.0)
    gradkit.per_tensor_norms(grads, flat=True)
    gradkit.grad_norm(grads[::2])  # the first device's alone
    assert [device.uploads for device in devices.all] == [1, 1]


# Groups, each of whose ranks has several devices


@pytest.mark.parametrize("per_tensor", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_ranks_of_several_devices_each(order, per_tensor):
    """Their numbers travel in host memory; a gradient on both ranks counts once."""
    ranks = [Devices(2), Devices(2)]
    shared, own = f(1, 2, 3), [f(4), f(5, 6)]
    held = [devices.over([0, 1], [shared, own[k]]) for k, devices in enumerate(ranks)]
    options = {"replicas": [2, 1], "each": per_tensor}

    def work(group):
        return np.array(one_or_each(held[group.rank], order, group=group, **options))

    found = results(work, 2)
    assert len(bits(found)) == 1
    wanted = [[shared], own] if per_tensor else [[shared, *own]]
    for got, grads in zip(found[0].reshape(-1), wanted, strict=True):
        bound = tolerances.over_ranks(order) + 2.0**-50
        assert oracles.off_by(got, oracles.norm(grads, order)) <= bound


def test_a_group_on_the_first_gradients_devices(monkeypatch):
    """Numbers stay on devices: those of the group go on to the others by copies."""
    from gradkit import distributed
    from gradkit._ranks import device as groups_device

    ranks, wire = [Devices(2), Devices(2)], Wire(2)
    held = [spread(devices, [[f(3, 0)], [f(4 + 8 * k)]]) for k, devices in enumerate(ranks)]
    first = [devices.backends[0] for devices in ranks]
    for number, backend in enumerate(first):
        backend.device.address = 0x1000 + number
    groups = []
    for k, backend in enumerate(first):
        monkeypatch.setattr(groups_device, "backend_on", lambda _, own=backend: own)
        communicator = NcclCommunicator(wire, k, backend.device)
        groups.append(distributed.from_nccl(communicator))

    def work(group):
        devices, own = ranks[group.rank], held[group.rank]
        limit = devices.put(1, 2.5)
        norm = gradkit.clip_grad_norm(own, limit, scale=2.0, group=group)
        group.check()
        return float(norm)

    expected = 2 * math.sqrt(9 + 16 + 9 + 144)
    assert results(work, 2, groups=groups) == [pytest.approx(expected)] * 2
    assert float(gradkit.grad_norm([np.array(g) for g in flat(held)])) == pytest.approx(2.5)


# What is refused


def wrong_arguments(devices, grads):
    far = Devices(3)
    far.backends = [*devices.backends, far.backends[2]]
    return {
        "a limit of another device": ({"max_norm": far.put(2, 1.0)}, "max_norm are on different"),
        "a scale of another device": ({"scale": far.put(2, 1.0)}, "scale are on different"),
        "a limit of the host's": ({"max_norm": np.ones(3)}, "expected .., one number"),
        "a norm on another device": ({"out": devices.put(1, 0.0)}, "out are on different devices"),
        "a flag on another device": ({"found_inf": devices.put(1, 0.0)}, "found_inf are on diff"),
        "out in a gradient": ({"out": grads[0][:1].reshape(())}, r"out shares memory with grads"),
        "a gradient twice": ({"grads": [*grads, grads[1]]}, r"\[1\] and grads\[3\] share memory"),
        "a gradient of ints": ({"grads": [*grads, devices.put(1, 3)]}, r"grads\[3\] has dtype"),
        "a gradient of the host's that is read-only": (
            {"grads": [*grads, np.frombuffer(bytes(8))]},
            r"grads\[3\] is read-only",
        ),
        "replicas": ({"replicas": 2}, "there is no group"),
    }


NAMES = list(wrong_arguments(Devices(2), [f(1), f(2)]))


@pytest.mark.guarantee("Over several devices")
@pytest.mark.parametrize("name", NAMES)
def test_an_error_writes_nothing(devices, name):
    grads = spread(devices, [[f(3, 0), f(12)], [f(4)]])
    wrong, match = wrong_arguments(devices, grads)[name]
    outs = [devices.put(0, 7.0), devices.put(0, 0.25)]
    before = memory(grads, outs)
    arguments = {"grads": grads, "max_norm": 1.0, "out": outs[0], "found_inf": outs[1]}
    with pytest.raises((TypeError, ValueError), match=match):
        gradkit.clip_grad_norm(**arguments | wrong)
    assert memory(grads, outs) == before


def test_clipped_gradients_belong_on_their_own_devices(devices):
    grads = spread(devices, [[f(3, 0), f(12)], [f(4)]])
    room = [devices.put(0, np.array(grad)) for grad in grads]
    before = memory(grads, room)
    with pytest.raises(ValueError, match=r"grads\[1\] and out\[0\]\[1\] are on different devices"):
        gradkit.clip_by_global_norm(grads, 1.0, out=(room, None))
    room[1] = grads[1]
    with pytest.raises(ValueError, match=r"out\[0\]\[1\] shares memory with grads\[1\]"):
        gradkit.clip_by_global_norm(grads, 1.0, out=(room, None))
    assert memory(grads, room[:1], room[2:]) == [*before[:3], before[3], before[5]]


@pytest.mark.parametrize("which", [0, 1])
def test_a_capture_is_refused(devices, which):
    grads = spread(devices, [[f(3, 0)], [f(4)]])
    before = memory(grads)
    devices.all[which].is_captured = True
    for function, *limit in (
        (gradkit.grad_norm,),
        (gradkit.clip_grad_norm, 1.0),
        (gradkit.clip_by_global_norm, 1.0),
    ):
        with pytest.raises(RuntimeError, match=r"several devices, and a call .* cannot be capt"):
            function(grads, *limit)
    assert memory(grads) == before
    assert [device.launches for device in devices.all] == [0, 0]


WRITING = {
    "clip_steps": lambda grads: gradkit.clip_grad_norm(grads, 1.0),
    "scale_steps": lambda grads: gradkit.scale_grads(grads, 0.5),
    "value_steps": lambda grads: gradkit.clip_grad_value(grads, 0.5),
    "zero_steps": gradkit.zero_grad,
}


@pytest.mark.guarantee("Over several devices")
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("phase", WRITING)
def test_a_device_that_fails_before_it_writes(devices, phase, which, monkeypatch):
    """Then no other has written either."""
    grads = spread(devices, [[f(3, 0)], [f(4)]])
    before = memory(grads)

    made = getattr(several_devices, phase)

    def fail(device, *arguments):
        if device is devices.all[which]:
            raise MemoryError("no room")
        return made(device, *arguments)

    monkeypatch.setattr(several_devices, phase, fail)
    with pytest.raises(MemoryError):
        WRITING[phase](grads)
    assert memory(grads) == before


@pytest.mark.parametrize(
    "call",
    [
        lambda grads: gradkit.clip_grad_block_norm(grads, 0.5),
        lambda grads: gradkit.clip_by_adaptive_norm(grads, grads),
        lambda grads: gradkit.accumulate_grads(grads, copies(grads)),
    ],
)
def test_other_functions_take_one_device(devices, call):
    grads = spread(devices, [[f(3, 0)], [f(4)]])
    before = memory(grads)
    with pytest.raises(ValueError, match=r"s\[0\] and \w+\[1\] are on different devices"):
        call(grads)
    assert memory(grads) == before


def test_results_lie_where_the_arrays_of_a_call_do(devices):
    x, y = (devices.put(number, np.ones((2, 4), np.float32)) for number in (0, 1))
    before = memory([x, y])
    with pytest.raises(ValueError, match=r"x and out\[0\] are on different devices"):
        gradkit.rms_norm(x, out=(y, None))
    assert memory([x, y]) == before


def test_the_code_of_the_page_runs(devices):
    page = (Path(__file__).parents[2] / "docs" / "distributed.md").read_text()
    blocks = re.findall(r"^```py\n(norm = .*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    for block, places in zip(blocks, ([0, 1], [HOST, 0]), strict=True):
        first, second = devices.over(places, [f(3), f(4)])
        names = {"gradkit": gradkit, "grads_on_gpu_0": [first], "grads_on_gpu_1": [second]}
        exec(block, names | {"offloaded_grads": [first], "grads_on_gpu": [second]}, names)
        assert float(names["norm"]) == 5
        assert [first.tolist(), second.tolist()] == [pytest.approx([0.6]), pytest.approx([0.8])]
