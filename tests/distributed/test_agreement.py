"""Ranks agree on everything that changes results: one that differs in one argument is found out."""

import inspect

import numpy as np
import pytest

import gradkit
from gradkit._ranks.norms import _LEFT_OUT, Wanted
from gradkit.distributed import shards_of
from tests.device_ranks import DeviceRanks
from tests.meshes import plain
from tests.ranks import NAN, f, results, together

BY_BLOCKS = "clip_grad_block_norm", "clip_by_block_norm"
NORMS = (
    *("grad_norm", "per_tensor_norms", "clip_grad_norm", "clip_by_global_norm", "grad_stats"),
    *BY_BLOCKS,
)
# What another rank may pass, by argument.
OTHER = {
    "norm_type": 1.0,
    "max_norm": 2.5,
    "scale": 0.5,
    "eps": 0.125,
    "eps_mode": "add",
    "nonfinite": "zero",
    "exact": True,
    "clip": [True, False],
    "count": [True, False],
}
# What is a rank's own. The last of them are deprecated.
OWN = {"grads", "group", "replicas", "found_inf", "out", "flat", "reduce", "per_tensor"}
OWN |= {"axis", "rms", "blocks"}  # ranks exchange keys
BATCH_NORMS = {
    "batch_norm": {
        "scale": None,
        "bias": None,
        "eps": 0.125,
        "running": None,
        "momentum": 0.5,
    },
    "batch_norm_grad": {"scale": None, "wanted": ("dx",)},
}
OWN_OF_BATCH = {"x", "dy", "mean", "inv_std", "channel_axis", "out", "engine", "group"}


def arguments_of(name):
    return inspect.signature(inspect.unwrap(getattr(gradkit, name))).parameters.keys()


def test_every_argument_of_every_function_is_known():
    """So that a new one is agreed on, or said to be a rank's own."""
    over_ranks = {name for name in gradkit.__all__ if callable(getattr(gradkit, name))}
    over_ranks = {
        name
        for name in over_ranks
        if inspect.isfunction(getattr(gradkit, name)) and "group" in arguments_of(name)
    }
    assert over_ranks == {*NORMS, *BATCH_NORMS}
    for name in NORMS:
        assert arguments_of(name) <= OTHER.keys() | OWN, name
    for name, others in BATCH_NORMS.items():
        known = {"running_mean", "running_var"} | others.keys() | OWN_OF_BATCH
        assert arguments_of(name) <= known, name


def test_a_new_field_takes_part_by_itself():
    wanted = Wanted("grad_norm", gradkit.clipping.rule_of(2.0, 0.0, "propagate"), 1.0)
    told = {"norm_type", *wanted._fields, *wanted.rule._fields} - _LEFT_OUT
    assert told == {"norm_type", "scale", "max_norm", "eps", "policy", "exact"}
    for name in wanted.rule._fields:
        other = wanted._replace(rule=wanted.rule._replace(**{name: 0.75}))
        assert str(other) != str(wanted)


def norm_arguments(name):
    """Of the norms: which arguments of each can differ."""
    return [(name, argument) for argument in arguments_of(name) if argument in OTHER]


def differing(work, size=3):
    """Rank 1 alone differs: all raise, and nothing is written; all of them may do what it does."""
    for error in together(lambda group: work(group, group.rank == 1), size):
        assert isinstance(error, gradkit.RankError), error
        assert "different calls" in str(error)
        assert [*error.ranks] == [*range(size)]
        assert error.ranks[0] == error.ranks[2] != error.ranks[1]
    for which in (False, True):
        results(lambda group, which=which: work(group, which), size)


@pytest.mark.guarantee("Over ranks")
@pytest.mark.parametrize(
    ("name", "argument"), [pair for name in NORMS for pair in norm_arguments(name)]
)
def test_a_rank_with_another_argument_ends_the_call_on_all(backend, name, argument):
    """Of the second gradient all ranks hold a copy, so that they choose alike."""
    call, chooses = getattr(gradkit, name), argument in ("clip", "count")
    held = [[backend.asarray(np.float32([3, k])) for k in range(2)] for _ in range(3)]
    before = [[backend.memory(g) for g in own] for own in held]

    def work(group, other):
        given = {"group": group, "replicas": [1, 3]}
        if "max_norm" in arguments_of(name):
            given["max_norm"] = 1e9
        if name in BY_BLOCKS:
            given["blocks"] = [0, 1]
        if argument == "eps_mode":
            given["eps"] = 0.125
        if other:
            given[argument] = OTHER[argument]
        elif chooses:
            given[argument] = [group.rank == 0, True]  # of the first there is one on each rank
        call(held[group.rank], **given)

    for error in together(lambda group: work(group, group.rank == 1), 3):
        assert isinstance(error, gradkit.RankError), error
    assert [[backend.memory(g) for g in own] for own in held] == before
    differing(work)


@pytest.mark.parametrize("name", BY_BLOCKS)
def test_limits_of_blocks_are_compared_one_by_one(backend, name):
    held = [backend.asarray(f(3.0)), backend.asarray(f(4.0))]

    def work(group, other):
        limits = {"a": 1e9, "b": 2e9 if other else 1e9}
        getattr(gradkit, name)(held, limits, blocks=["a", "b"], group=group)

    differing(work)


@pytest.mark.parametrize("argument", ["max_norm", "scale"])
def test_numbers_in_arrays_are_compared_by_value(backend, argument):
    """A number and an array are alike if their values are, also where there is no gradient."""
    held = [[backend.asarray(f(3.0))], [], [backend.asarray(f(4.0))]]

    def work(group, other):
        value = 0.25 if other else 0.5
        given = {"max_norm": 1.0, argument: value}
        if group.rank != 2:
            given[argument] = backend.asarray(np.array(value, np.float32))
        gradkit.clip_grad_norm(held[group.rank], **given, group=group)

    differing(work)


@pytest.mark.parametrize("kind", ["nccl", "both"])
@pytest.mark.parametrize("argument", ["max_norm", "scale", "eps"])
@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.emulated
def test_devices_compare_numbers_that_no_host_knows(monkeypatch, argument, where, kind):
    """Nothing is written, and ``check`` names who differs; the same values are one call."""
    ranks = DeviceRanks(monkeypatch, 3, kind)
    held = ranks.over([[f(3, 0)], [f(NAN)], [f(4)]])
    before = [g.tobytes() for own in held for g in own]

    def work(group, other):
        given = {"max_norm": 0.5, "scale": 0.5, "eps": 1e-6}
        if other:
            given[argument] = 0.25
        if where == "device" and argument != "eps" and group.rank != 2:
            given[argument] = ranks.put(group.rank, np.float32(given[argument]))
        norm = gradkit.clip_grad_norm(held[group.rank], **given, group=group)
        try:
            group.check()
        except gradkit.RankError as error:
            return error.ranks
        return float(norm)

    found = ranks.together(lambda group: work(group, group.rank == 1))
    assert [g.tobytes() for own in held for g in own] == before
    if argument == "eps" and kind == "both":  # hosts have told each other
        assert {type(error) for error in found} == {gradkit.RankError}
    else:
        said = "made another call" if argument == "eps" else "passed another scale or max_norm"
        assert found == [{1: said}, {0: said, 2: said}, {1: said}]
    held[1][0][...] = 0
    norm = 5 * (0.25 if argument == "scale" else 0.5)
    assert ranks.results(lambda group: work(group, True)) == [norm] * 3


def test_ranks_choose_alike_among_what_all_of_them_hold():
    """And found out that they do: parts of one name, or copies; each has experts of its own."""
    weights = {"a": "copies", "b": "copies", "expert": "own"}

    def work(group, other):
        own = {name: plain(f(3.0)) for name in weights}
        grads = shards_of(own, group=group, plain=weights.get)
        chosen = {"a": True, "b": not other, "expert": group.rank == 0}
        for argument in ("clip", "count"):
            gradkit.clip_grad_norm(grads, 1.0, **{argument: chosen}, group=group)

    differing(work)


@pytest.mark.guarantee("Over ranks")
@pytest.mark.parametrize(
    ("name", "argument"),
    [(name, argument) for name, others in BATCH_NORMS.items() for argument in others],
)
def test_a_batch_norm_with_another_argument_ends_the_call_on_all(backend, name, argument):
    x, ones = np.arange(12.0).reshape(4, 3), np.ones(3)
    running = [[backend.asarray(np.full(3, 7.0)) for _ in range(2)] for _ in range(3)]
    before = [[backend.memory(array) for array in pair] for pair in running]

    def work(group, other):
        given = {"scale": ones, "bias": ones, "running": running[group.rank], "momentum": 0.25}
        if name == "batch_norm_grad":
            given = {"dy": x, "scale": ones, "mean": ones, "inv_std": ones}
        if other:
            given[argument] = BATCH_NORMS[name][argument]
            for needed in {"scale": ["bias"], "running": ["momentum"]}.get(argument, []):
                given.pop(needed, None)
        pair = given.pop("running", None)
        if pair is not None:
            given |= dict(zip(("running_mean", "running_var"), pair, strict=True))
        arrays = {
            name: backend.asarray(value) if type(value) is np.ndarray else value
            for name, value in given.items()
        }
        getattr(gradkit, name)(x=backend.asarray(x), group=group, **arrays)

    for error in together(lambda group: work(group, group.rank == 1), 3):
        assert isinstance(error, gradkit.RankError), error
    assert [[backend.memory(array) for array in pair] for pair in running] == before
    differing(work)
