"""The spike guard on tensors of every framework: its state and its limits are of their type."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

import gradkit

NORMS = [9.0, 11.0, 10.0, 10.5, 300.0, 9.5]
RULE = {"warmup": 4}


def expected():
    state = gradkit.spike_guard_init()
    for norm in NORMS:
        state, limit = gradkit.spike_guard_update(state, norm, **RULE)
        yield state, limit


def test_the_class_follows_the_norms_of_gradients(lib):
    guard, limits = gradkit.SpikeGuard(**RULE), []
    for norm in NORMS:
        grads = {"w": lib.make(np.array([0.6 * norm], np.float32)), "unused": None}
        grads["b"] = lib.make(np.array([0.8 * norm], np.float32))
        total = gradkit.grad_norm(grads)
        limit = guard.update(total)
        assert isinstance(limit, lib.kind)
        clipped, _ = gradkit.clip_by_global_norm(grads, limit)
        limits.append(float(gradkit.grad_norm(clipped)))
    assert limits == pytest.approx([9, 11, 10, 10.5, 10.1, 9.5], rel=0.01)
    again = gradkit.SpikeGuard(**RULE)
    again.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    following = lib.make(np.array(9.75, lib.norm_dtype))
    assert float(again.update(following)) == float(guard.update(following))
    assert again.state_dict() == guard.state_dict()


def test_a_state_is_written_where_that_is_allowed(lib):
    guard = gradkit.SpikeGuard()
    norm = lib.make(np.array(9.0, lib.norm_dtype))
    guard.update(norm)
    state = guard._state
    guard.update(norm)
    assert (guard._state is state) == lib.mutable
    assert lib.read(guard._state).tolist() == [2, 9, 0]


def test_norms_of_two_frameworks_are_refused(torch, jax):
    guard = gradkit.SpikeGuard()
    guard.update(torch.tensor(9.0, dtype=torch.float64))
    with pytest.raises(TypeError, match="norm is a JAX array and state a torch array"):
        guard.update(jax.numpy.array(9.0))
    assert guard.state_dict()["count"] == 1


def test_pytorchs_own_norm_is_taken(torch):
    """It is a float32; and the state of a checkpoint by torch.save goes on."""
    import io

    guard = gradkit.SpikeGuard()
    grads = [torch.tensor([3.0, 4.0])]
    guard.update(torch.nn.utils.get_total_norm(grads))
    file = io.BytesIO()
    torch.save(guard.state_dict(), file)
    file.seek(0)
    again = gradkit.SpikeGuard()
    again.load_state_dict(torch.load(file))
    assert again.state_dict() == gradkit.SpikeGuard().state_dict() | {"count": 1, "mean": 5.0}


@pytest.mark.usefixtures("x64")
def test_with_x64_a_state_is_float64(jax):
    jnp = jax.numpy
    state = gradkit.spike_guard_init(jnp.ones(2))
    assert state.dtype == jnp.float64
    state, limit = gradkit.spike_guard_update(state, jnp.array(1e300), warmup=1)
    assert limit.dtype == state.dtype == jnp.float64
    assert state[1] == 1e300


class Narrow:
    """An array of a library that converts float64 to float32 when it imports it, as MLX does."""

    def __init__(self, exporter):
        self.host = np.from_dlpack(exporter).astype(np.float32)
        self.dtype, self.shape = self.host.dtype, self.host.shape
        self.host.flags.writeable = False

    def __array_namespace__(self):
        return SimpleNamespace(from_dlpack=Narrow)

    def __dlpack_device__(self):
        return self.host.__dlpack_device__()

    def __dlpack__(self, **asked):
        return self.host.__dlpack__(**asked)


def test_a_library_without_float64_has_float32_states():
    guard, limits = gradkit.SpikeGuard(**RULE), []
    for norm in NORMS:
        limit = guard.update(Narrow(np.array(norm)))
        assert isinstance(limit, Narrow)
        limits.append(float(limit.host))
    assert limits == pytest.approx([float(limit) for _, limit in expected()], rel=1e-5)
    assert guard.state_dict()["count"] == len(NORMS)
