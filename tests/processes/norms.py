"""Checks of norms and clipping: each runs on every rank, and returns what all must have alike."""

from functools import partial

import numpy as np

import gradkit
from tests import oracles, tolerances
from tests.problems import one_or_each
from tests.ranks import INF, NAN, ORDERS

EXACT = (1, 2, INF)  # orders whose sums travel exactly
UNIT = tolerances.UNIT["float64"]


def bits(*arrays):
    """Every bit of some results."""
    return "".join(np.asarray(a).tobytes().hex() for a in arrays)


def bound(order):
    return 4 * UNIT if order in EXACT else tolerances.over_ranks(order)


def split(rng, values, size):
    """An uneven split of a vector: a list of gradients for each rank, often none."""
    cuts = np.sort(rng.integers(0, len(values) + 1, 2 * size - 1))
    if rng.random() < 0.3:
        cuts[:-1] = cuts[-1]  # all on two ranks
    pieces = np.split(values, cuts)
    return [[p for p in pieces[2 * k : 2 * k + 2] if p.size] for k in range(size)]


def draws(seed, count):
    """Vectors that all ranks draw alike: of any size, over many orders of magnitude."""
    for k in range(count):
        rng = np.random.default_rng((seed, k))
        spread = rng.choice([0, 3, 250])
        values = rng.standard_normal(rng.integers(1, 200)) * 10.0 ** rng.uniform(-spread, spread)
        yield rng, values


def own(place, parts):
    return [place.array(part) for part in parts[place.rank]]


def any_split(place, order):
    norms = []
    for rng, values in draws(1, 8):
        parts = split(rng, values, place.size)
        norms.append((gradkit.grad_norm(own(place, parts), order, group=place.group), values))
    for norm, values in norms:
        assert oracles.off_by(norm, oracles.norm([values], order)) <= bound(order)
    return bits(*(norm for norm, _ in norms))


def whole_numbers(place):
    """Each rank's own sum is exact, so nothing depends on how many ranks there are."""
    rows = np.random.default_rng(5).integers(-1000, 1000, (12, 100)) * 2.0**-300
    grads = [place.array(row) for row in rows[place.rank :: place.size]]
    norms = [gradkit.grad_norm(grads, order, group=place.group) for order in EXACT]
    for norm, order in zip(norms, EXACT, strict=True):
        assert oracles.off_by(norm, oracles.norm(rows, order)) <= UNIT
    return bits(*norms)


def bad_on_each(place, order):
    """NaN or an infinity on one rank, for every rank: MPI's maximum would lose NaN."""
    found = []
    for bad in (NAN, INF, -INF):
        for at in range(place.size):
            grads = [place.array([4.0 - place.rank, bad if place.rank == at else 1.0])]
            flag = place.array(0.0)
            norm = gradkit.grad_norm(grads, order, group=place.group, found_inf=flag)
            found.append((float(norm), abs(bad), float(flag)))
    for norm, expected, flag in found:
        assert flag == 1.0
        np.testing.assert_equal(norm, expected)
    return bits(*(norm for norm, _, _ in found))


def nothing_anywhere(place):
    norms = [gradkit.grad_norm([], order, group=place.group) for order in ORDERS]
    assert [float(norm) for norm in norms] == [0.0] * len(ORDERS)


def each_tensor(place, order):
    """Every tensor lies in shards on all ranks; the second has a NaN on the last."""
    rng = np.random.default_rng(7)
    shards = rng.standard_normal((place.size, 40, 3))
    shards[-1, 1, 0] = NAN
    grads = [place.array(shard) for shard in shards[place.rank]]  # 40: a collective of its own
    norms = gradkit.per_tensor_norms(grads, order, flat=True, group=place.group)
    assert np.isnan(float(norms[1]))
    for k in (0, *range(2, 40)):
        expected = oracles.norm([shards[:, k]], order)
        assert oracles.off_by(norms[k], expected) <= bound(order)
    return bits(norms)


def other_names(place):
    """Statistics of a tensor in shards on all ranks, one that each holds, and one of each."""
    rng = np.random.default_rng(11)
    shards = rng.standard_normal((place.size, 30)) * 1e3
    shards[-1, 0] = 0
    own = {"shards": shards[place.rank], "copies": shards[0], f"rank {place.rank}": [[NAN, 2.0]]}
    held = {name: place.array(values) for name, values in own.items()}
    replicas = {name: place.size if name == "copies" else 1 for name in own}
    stats = [gradkit.grad_stats(held, group=place.group, replicas=replicas) for _ in range(2)]
    names = "shards", "copies", *(f"rank {k}" for k in range(place.size))
    for found in stats:
        assert found.names == names
        for name, values in (("shards", shards), ("copies", shards[0])):
            row, size = found[name], float(np.abs(values).mean())
            assert oracles.off_by(row.norm, oracles.norm([values])) <= 8 * UNIT
            assert float(row.max) == np.abs(values).max()
            off = abs(float(row.mean) - oracles.wide(values).mean())
            assert off <= tolerances.grad_mean(size, tolerances.RUNS)
            assert float(row.zeros) == np.count_nonzero(values == 0)
        assert [float(found[name].nonfinite) for name in names[2:]] == [1.0] * place.size
    return bits(*(found.table for found in stats))


def on_a_mesh(place, order, per_tensor):
    """With four ranks two by two: one gradient on all, one on a row of the mesh, one on one."""
    rng = np.random.default_rng(3)
    row, rows = place.rank // 2, (place.size + 1) // 2
    shared, pairs = rng.standard_normal(7), rng.standard_normal((rows, 5))
    single = rng.random((place.size, 3))
    grads = {"all": shared, "row": pairs[row], "one": single[place.rank]}
    replicas = {"all": place.size, "row": min(2, place.size - 2 * row), "one": 1}
    held = {name: place.array(grad) for name, grad in grads.items()}
    norm = one_or_each(held, order, each=per_tensor, group=place.group, replicas=replicas)
    wanted = [[shared], list(pairs), list(single)]
    wanted = wanted if per_tensor else [[g for part in wanted for g in part]]
    for got, parts in zip(np.reshape(norm, -1), wanted, strict=True):
        assert oracles.off_by(got, oracles.norm(parts, order)) <= bound(order) + 8 * UNIT
    return bits(norm)


def clipping(place, in_place):
    """By a power of two, so that it is exact: gradients of 3, 0 and 4, and a scale of 2."""
    parts = [[[3.0, 0.0]], *[[]] * (place.size - 2), [[4.0]]]
    parts = parts if place.size > 1 else [[[3.0, 0.0], [4.0]]]
    grads = own(place, parts)
    options = {"scale": 2.0, "group": place.group}
    if in_place:
        clipped, norm = grads, gradkit.clip_grad_norm(grads, 2.5, **options)
    else:
        clipped, norm = gradkit.clip_by_global_norm(grads, 2.5, **options)
    assert float(norm) == 10.0
    for after, part in zip(clipped, parts[place.rank], strict=True):
        np.testing.assert_array_equal(np.asarray(after), np.array(part) * 0.5)
    if not in_place:
        assert [np.asarray(g).tolist() for g in grads] == parts[place.rank]
    return bits(norm)


def scales_in_arrays(place):
    """Of one rank, and of one without gradients; the sign does not count."""
    last = place.rank == place.size - 1
    scale = place.array(-0.5) if place.rank == 0 or last else -0.5
    grads = [] if last else [place.array([8.0])]
    norm = gradkit.grad_norm(grads, 1, scale=scale, group=place.group)
    assert float(norm) == 4.0 * (place.size - 1)
    return bits(norm)


def policies(place):
    """A NaN on the last rank: what each policy does on every rank."""
    last = place.size - 1

    def grads():
        return [place.array([3.0]), place.array([NAN if place.rank == last else 4.0])]

    kept, zeroed, spread = grads(), grads(), grads()
    names = None
    try:
        gradkit.clip_grad_norm(kept, 1.0, nonfinite="raise", group=place.group)
    except gradkit.NonFiniteNormError as error:
        names = error.names
    gradkit.clip_grad_norm(zeroed, 1.0, nonfinite="zero", group=place.group)
    gradkit.clip_grad_norm(spread, 1.0, group=place.group)
    assert names == (("grads[1]",) if place.rank == last else ())
    assert bits(*kept) == bits(*grads())
    assert bits(*zeroed) == bits(0.0, 0.0)
    assert np.isnan(np.concatenate(spread)).all()


CHECKS = {
    **{f"any split, p = {p}": partial(any_split, order=p) for p in ORDERS},
    "whole numbers": whole_numbers,
    **{f"not finite on each rank, p = {p}": partial(bad_on_each, order=p) for p in ORDERS},
    "nothing anywhere": nothing_anywhere,
    **{f"each tensor, p = {p}": partial(each_tensor, order=p) for p in ORDERS},
    **{f"a mesh, p = {p}": partial(on_a_mesh, order=p, per_tensor=False) for p in ORDERS},
    **{f"each tensor on a mesh, p = {p}": partial(on_a_mesh, order=p, per_tensor=True)
       for p in (1, 2, INF)},
    "statistics of other names": other_names,
    "clip_grad_norm": partial(clipping, in_place=True),
    "clip_by_global_norm": partial(clipping, in_place=False),
    "scales in arrays": scales_in_arrays,
    "policies": policies,
}  # fmt: skip
