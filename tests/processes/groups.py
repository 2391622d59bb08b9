"""Checks of groups: what an adapter must do, halves of ranks, several frameworks."""

import sys
from itertools import product

import numpy as np
import pytest

import gradkit
from tests import oracles
from tests.processes.norms import EXACT, bits, bound, draws, own, split


def state(length, rank):
    """Numbers of a rank whose every bit counts: those that a narrower type or a sum would lose."""
    rng = np.random.default_rng((length, rank))
    numbers = rng.standard_normal(length)
    special = [-0.0, 5e-324, 1e308, -np.inf, _nan(rank), 1 / 3]
    numbers[: len(special)] = special[:length]
    return numbers


def _nan(rank):
    """One with a payload."""
    return np.array(0x7FF8_0000_0000_1234 + rank, np.uint64).view(np.float64)


def contract(group, members, rank):
    """An adapter moves bits: all collectives first, then the assertions."""
    sent = [state(length, rank) for length in (6, 1, 241, 6)]
    rows = [group.allgather(one) for one in sent]
    assert (group.rank, group.size) == (members.index(rank), len(members))
    for own_numbers, got in zip(sent, rows, strict=True):
        length = own_numbers.size
        assert (got.dtype, got.shape) == (np.float64, (group.size, length))
        assert bits(got) == "".join(bits(state(length, other)) for other in members)
        assert bits(own_numbers) == bits(state(length, rank))


def all_ranks(place):
    contract(place.group, list(range(place.size)), place.rank)


def halves(place):
    """Each half has a norm of its own; the last one's group may count backwards."""
    contract(place.half, place.half_members, place.rank)
    found = []
    for rng, values in draws(2, 3):
        parts = split(rng, values, place.size)
        norm = gradkit.grad_norm(own(place, parts), group=place.half)
        found.append((norm, [g for rank in place.half_members for g in parts[rank]]))
    for norm, grads in found:
        assert oracles.off_by(norm, oracles.norm(grads)) <= bound(2)


def not_a_member(place):
    with pytest.raises(ValueError, match="not in process_group"):
        gradkit.distributed.from_torch(place.other_half)


def several_frameworks(place):
    """NumPy, PyTorch and JAX on one rank each: every number below is one of float32 too."""
    if place.rank == 1:
        import torch

        grads = [torch.tensor([3.0, -1.5], dtype=torch.bfloat16)]
    elif place.rank == 2:
        import jax.numpy as jnp

        grads = [jnp.array([0.25]), jnp.array([2.0], jnp.float16)]
    else:
        grads = [np.array([4.0])]
    norms = [float(gradkit.grad_norm(grads, order, group=place.group)) for order in EXACT]
    clipped, _ = gradkit.clip_by_global_norm(grads, 4.0, norm_type=np.inf, group=place.group)
    assert type(clipped[0]) is type(grads[0])
    assert norms[0] == 3 + 1.5 + 0.25 + 2 + 4
    assert abs(norms[1] - (9 + 2.25 + 0.0625 + 4 + 16) ** 0.5) <= 2.0**-24 * norms[1]
    assert norms[2] == 4.0


def sharded_arrays(place):
    """On how many processes each part of an array lies, as its sharding says."""
    jax = sys.modules["jax"]
    whole = np.arange(1.0, 1 + 3 * place.size, dtype=np.float32)

    def spread(kind, *axes):
        mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(kind,))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
        return jax.make_array_from_callback(whole.shape, sharding, whole.__getitem__)

    kinds = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit
    for group, kind in product((None, place.group), kinds):
        arrays = {"copy": spread(kind), "part": spread(kind, "x")}
        grads = gradkit.distributed.shards_of(arrays, group=group)
        norm = gradkit.grad_norm(grads, group=place.group)
        assert grads.replicas == {"copy": [place.size], "part": [1]}
        np.testing.assert_allclose(float(norm), np.sqrt(2 * whole.astype(float) @ whole), rtol=1e-6)
    own = {"own": jax.numpy.ones(3)}  # of this process alone, which its sharding cannot tell
    for kind, expected in (("own", place.size), ("copies", 1)):
        grads = gradkit.distributed.shards_of(own, group=place.group, plain=kind)
        norm = gradkit.grad_norm(grads, 1, group=place.group)
        assert float(norm) == 3 * expected


def without_float64(place):
    """JAX has no float64 here, and the sums keep all of it: 1 + 2^-50 on each rank."""
    import jax
    import jax.numpy as jnp

    assert not jax.config.jax_enable_x64
    small = gradkit.grad_norm(np.array([1 + 2.0**-50]), 1, group=place.group)
    arrays = [jnp.array([3.0]), jnp.array([-4.0], jnp.bfloat16)]
    norm = gradkit.grad_norm(arrays, group=place.group)
    clipped, _ = gradkit.clip_by_global_norm(arrays, 5.0 * place.size**0.5 / 2, group=place.group)
    assert float(small) == place.size * (1 + 2.0**-50)
    assert isinstance(norm, jax.Array)
    assert abs(float(norm) - 5 * place.size**0.5) <= 2.0**-23 * float(norm)
    assert [float(g[0]) for g in clipped] == [1.5, -2.0]
    return bits(small, norm)


ALL = {"an adapter moves bits": all_ranks}
HALVES = {"halves of the ranks": halves}
