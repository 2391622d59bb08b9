"""Gradients of which some lie in host memory, as offloaded ones do, and some on devices."""

import math
import signal

import numpy as np
import pytest

import gradkit
from gradkit._cuda import CudaBackend, several_devices
from tests.distributed.test_several_devices import drawn, first_device, memory
from tests.package.test_contract import refuse
from tests.ranks import INF, NAN, ORDERS, bits, f, results
from tests.several_devices import HOST, Devices

pytestmark = pytest.mark.emulated


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("place", [HOST, 0])
def test_what_is_not_finite_on_one_side_reaches_the_other(devices, place, bad, order):
    grads = [np.array([4.0]), devices.put(0, f(2.0)), devices.put(place, f(bad))]
    found = devices.put(0, 0.0)
    norm = float(gradkit.grad_norm(grads, order, found_inf=found))
    np.testing.assert_equal(norm, bad)
    assert float(found) == 1
    gradkit.clip_grad_norm(grads, 1.0, order, nonfinite="zero")
    assert [grad.tolist() for grad in grads] == [[0.0]] * 3


def test_nothing_on_the_device_or_nothing_on_the_host(devices):
    for hosts in ((f(), f(3.0, 4.0)), (f(3.0, 4.0), f()), (f(), f())):
        grads = devices.over([0, HOST], hosts)
        expected = 5.0 if sum(host.size for host in hosts) else 0.0
        assert float(gradkit.grad_norm(grads)) == expected
        assert float(gradkit.clip_grad_norm(grads, 1.0)) == expected


def test_a_norm_waits_for_no_device_and_a_clip_reads_numbers_alone(devices, monkeypatch):
    grads = devices.over([HOST, 0, 1, HOST], [f(3), f(4), f(0, 12), f(0)])
    scale = devices.put(1, 1.0)
    with monkeypatch.context() as closed:
        closed.setattr(CudaBackend, "read", refuse)
        norm = gradkit.grad_norm(grads, scale=scale)
        each = gradkit.per_tensor_norms(grads, flat=True)
        gradkit.grad_stats(grads)
    assert (float(norm), each.tolist()) == (13, [3, 4, 12, 0])
    reads, read = [], CudaBackend.read
    monkeypatch.setattr(
        CudaBackend, "read", lambda self, array: reads.append(array.shape) or read(self, array)
    )
    gradkit.clip_grad_norm(grads, 6.5)
    assert reads == [()]
    assert [grad.tolist() for grad in grads] == [[1.5], [2], [0, 6], [0]]


@pytest.mark.parametrize("on_device", [False, True])
def test_a_host_that_fails_leaves_devices_as_they_are(devices, monkeypatch, on_device):
    """And a device that does leaves the host as it is: what can fail comes before any write."""
    grads = devices.over([0, HOST], [f(3), f(4)])
    before = memory(grads)

    def failing(*_):
        raise MemoryError

    with monkeypatch.context() as failed:
        if on_device:
            failed.setattr(several_devices, "clip_steps", failing)
        else:
            failed.setattr("gradkit._host.backend", lambda: Failing)
        with pytest.raises(MemoryError):
            gradkit.clip_grad_norm(grads, 1.0)
    assert memory(grads) == before


class Failing:
    """A host backend whose last step finds no memory."""

    norm_parts = staticmethod(lambda call: gradkit._numpy.norm_parts(call))

    @staticmethod
    def clip_by_norm(_):
        raise MemoryError


def test_ctrl_c_comes_once_all_is_written(devices, monkeypatch):
    """Put off while the host and then the devices write."""
    grads, own = devices.over([0, HOST], [f(3), f(4)]), gradkit._host.backend()

    def interrupted(call):
        own.clip_by_norm(call)
        signal.raise_signal(signal.SIGINT)

    kind = type("Interrupted", (), {"__getattr__": lambda _, name: getattr(own, name)})
    host = kind()
    host.clip_by_norm = interrupted
    monkeypatch.setattr("gradkit._host.backend", lambda: host)
    # A job in the background ignores the signal.
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            gradkit.clip_grad_norm(grads, 2.5)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert [grad.tolist() for grad in grads] == [[1.5], [2.0]]


def test_ranks_with_gradients_on_both_sides():
    ranks = [Devices(1), Devices(2)]
    held = [ranks[0].over([HOST, 0], [f(1), f(2)]), ranks[1].over([1, HOST, 0], [f(4), f(6), f(8)])]
    norms = results(lambda g: np.array(gradkit.grad_norm(held[g.rank], group=g)), 2)
    assert len(bits(norms)) == 1
    assert float(norms[0]) == 11.0
    stats = results(lambda g: gradkit.grad_stats(held[g.rank], group=g), 2)
    assert np.array(stats[0].norm).tolist() == [math.sqrt(17), math.sqrt(40), 8.0]


@pytest.mark.guarantee("With `exact=True`")
@pytest.mark.parametrize("order", [1, 2])
def test_exact_norms_over_ranks(where, order):
    """Of lists whose second gradient is a copy on each of two ranks."""
    hosts = [host.astype(np.float32) for host in drawn()]
    copied, devices = [1, 2, 1, 1, 1, 1], [Devices(3), Devices(3)]
    held = [own.over(where, hosts) for own in devices]

    def norms_of(grads):
        options = {"exact": True, "replicas": copied}
        return results(lambda g: gradkit.grad_norm(grads[g.rank], order, group=g, **options), 2)

    found = norms_of(held)
    assert [*map(float, found)] == norms_of([hosts, hosts])
    assert found[0].backend is devices[0].backends[first_device(where)]


def test_what_is_refused(devices):
    on, host = devices.put(0, f(3)), f(4)
    before = memory([on, host])
    for call, message in (
        (lambda: gradkit.clip_grad_block_norm([on, host], 1.0), "must be of one framework"),
        (
            lambda: gradkit.clip_grad_norm([on, host, host], 1.0),
            r"\[1\] and grads\[2\] share memory",
        ),
        (
            lambda: gradkit.clip_grad_norm([host, on], 1.0, out=f(0)[0:1]),
            "out is a numpy array and",
        ),
        (lambda: gradkit.clip_grad_norm([host, on, np.ones(2, int)], 1.0), r"grads\[2\] has dtype"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            call()
    devices.all[0].is_captured = True
    with pytest.raises(RuntimeError, match="cannot be captured"):
        gradkit.grad_norm([host, on])
    devices.all[0].is_captured = False
    assert memory([on, host]) == before
