"""``gradkit.torch``'s clipping and accumulation beside ``torch.nn.utils``."""

import copy
import itertools
import math
from functools import partial

import pytest

import gradkit

from .libraries import framework

torch = framework("torch")
ours = framework("gradkit.torch")
utils = framework("torch.nn.utils")
compiling = framework("torch._dynamo.testing")


def parameters(*dtypes, seed=0):
    """Parameters with gradients, one without."""
    generator = torch.Generator().manual_seed(seed)
    found = [torch.nn.Parameter(torch.zeros(3, 5, dtype=dtype)) for dtype in dtypes]
    for p in found:
        p.grad = torch.randn(3, 5, generator=generator).to(p.dtype)
    return [*found, torch.nn.Parameter(torch.zeros(2))]


def twins(given):
    found = copy.deepcopy(given)
    for twin, parameter in zip(found, given, strict=True):
        twin.grad = None if parameter.grad is None else parameter.grad.clone()
    return found


def assert_same(given, expected, **bounds):
    for p, q in zip(given, expected, strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, **bounds)


NAN, INF = math.nan, math.inf
MIXED = (torch.float32, torch.float16, torch.float64, torch.bfloat16)


@pytest.mark.parametrize("max_norm", [0.5, 100.0, 0])
@pytest.mark.parametrize("norm_type", [2.0, 1, 3.5, float("inf"), "inf"])
def test_clip_grad_norm_is_torchs(norm_type, max_norm):
    """But for the 1e-6 that PyTorch adds to the norm, and the norm's dtype."""
    given = parameters(torch.float32, torch.float64)
    expected = twins(given)
    addresses = [p.grad.data_ptr() for p in given[:-1]]
    norm = ours.clip_grad_norm_(iter(given), max_norm, norm_type)
    wanted = utils.clip_grad_norm_(expected, max_norm, norm_type)
    torch.testing.assert_close(norm, wanted.double(), rtol=1e-6, atol=0)
    assert norm.dtype == torch.float64
    assert_same(given, expected, rtol=1e-5, atol=1e-7)
    assert [p.grad.data_ptr() for p in given[:-1]] == addresses


def test_gradients_that_need_no_clipping_keep_their_bits():
    given = parameters(*MIXED)
    norm = ours.get_total_norm([p.grad for p in given[:-1]])
    expected = twins(given)
    ours.clip_grad_norm_(given, float(norm))
    assert_same(given, expected, rtol=0, atol=0)


def test_an_exact_norm_is_that_of_gradkit():
    given = parameters(torch.float32, torch.float16)
    grads = [p.grad for p in given if p.grad is not None]
    expected = gradkit.grad_norm(grads, exact=True)
    cut = [part.clone() for grad in grads for part in grad.reshape(-1).split(3)]
    assert torch.equal(gradkit.grad_norm(cut, exact=True), expected)
    assert torch.equal(ours.clip_grad_norm_(given, 0.5, exact=True), expected)
    given = parameters(torch.float64)
    doubles = [p.grad for p in given if p.grad is not None]
    for call in (partial(ours.clip_grad_norm_, given, 0.5), partial(ours.get_total_norm, doubles)):
        for exact in (call, torch.compile(call, backend="eager", fullgraph=True)):
            with pytest.raises(TypeError, match="is float64, whose squares are not exact"):
                exact(exact=True)


def test_the_two_halves_are_the_whole():
    given, other = parameters(*MIXED), parameters(*MIXED)
    norm = ours.get_total_norm([p.grad for p in given[:-1]], foreach=True)
    assert ours.clip_grads_with_norm_(given, 0.5, norm, foreach=False) is None
    assert torch.equal(ours.clip_grad_norm_(other, 0.5), norm)
    assert_same(given, other, rtol=0, atol=0)


def test_a_norm_of_torch_goes_into_the_second_half():
    given = parameters(torch.float32)
    expected = twins(given)
    norm = utils.get_total_norm([p.grad for p in given if p.grad is not None])
    ours.clip_grads_with_norm_(given, 0.5, norm)
    utils.clip_grads_with_norm_(expected, 0.5, norm)
    assert_same(given, expected, rtol=1e-5, atol=1e-7)


def test_clip_grad_value_is_torchs():
    given = parameters(*MIXED)
    given[0].grad[0, 0] = torch.nan
    expected = twins(given)
    assert ours.clip_grad_value_(given, 0.3) is None
    utils.clip_grad_value_(expected, 0.3)
    assert_same(given, expected, rtol=0, atol=0, equal_nan=True)


def test_nothing_to_clip():
    frozen = torch.nn.Parameter(torch.zeros(2))
    for norm in (
        ours.clip_grad_norm_([frozen], 1.0),
        ours.clip_grad_norm_([], 1.0),
        ours.get_total_norm([]),
    ):
        assert isinstance(norm, torch.Tensor)
        assert (norm.dtype, norm.shape, norm.item()) == (torch.float64, (), 0)
    ours.clip_grads_with_norm_([frozen], 1.0, torch.tensor(1.0))
    ours.clip_grad_value_([frozen], 1.0)


def test_one_tensor_is_a_list_of_one():
    (given, _), (expected, _) = parameters(torch.float32), parameters(torch.float32)
    assert float(ours.get_total_norm(given.grad)) == pytest.approx(given.grad.norm().item())
    ours.clip_grad_norm_(given, 0.5)
    ours.clip_grad_norm_([expected], 0.5)
    assert torch.equal(given.grad, expected.grad)
    ours.clip_grad_value_(given, 0.1)
    ours.clip_grads_with_norm_(expected, 0.05, total_norm=1.0)
    assert given.grad.abs().max() <= 0.1


def test_a_generator_that_was_used_up_is_told_of():
    empty = (p for p in ())
    with pytest.warns(UserWarning, match="nothing is clipped") as caught:
        ours.clip_grad_norm_(empty, 1.0)
    assert caught[0].filename == __file__


def test_gradients_under_differentiation_are_clipped():
    x = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    (x.grad,) = torch.autograd.grad(x.square().sum(), x, create_graph=True)
    assert x.grad.requires_grad
    assert ours.clip_grad_norm_([x], 1.0).item() == 10
    torch.testing.assert_close(x.grad.detach(), torch.tensor([0.6, 0.8]))


@pytest.mark.parametrize("count", [None, 0], ids=["gradients", "none"])
def test_bad_arguments_change_nothing(count):
    given = parameters(torch.float32)[:count]
    before = twins(given)
    for call in (
        lambda: ours.clip_grad_norm_(given, -1.0),
        lambda: ours.clip_grad_norm_(given, 1.0, 0.0),
        lambda: ours.clip_grad_value_(given, -1.0),
        lambda: ours.clip_grads_with_norm_(given, float("nan"), total_norm=1.0),
    ):
        with pytest.raises(ValueError, match="must be"):
            call()
    for call in (partial(ours.clip_grad_norm_, max_norm=1.0), ours.grad_stats):
        for option in ({"names": lambda name, _: name}, {"plain": "copies"}):
            with pytest.raises(ValueError, match="names and plain are for ranks"):
                call(given, **option)
    assert_same(given, before, rtol=0, atol=0)


# Accumulation


def _model(dtype=torch.float32):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)).to(
        dtype
    )


def test_unequal_micro_batches_are_the_whole_batch():
    model = _model(torch.float64)
    x = torch.randn(11, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    accumulator = ours.GradAccumulator(model)
    for step in range(3):
        whole = copy.deepcopy(model)
        whole(x).square().mean(1).mean().backward()
        norm = ours.clip_grad_norm_(whole.parameters(), 0.01)
        for rows in (x[:1], x[1:9]):
            model(rows).square().mean(1).sum().backward()
            accumulator.add()
            assert all(p.grad is None for p in model.parameters())
        model(x[9:]).square().mean(1).sum().backward()
        found = accumulator.finish(0.01, scale=torch.tensor(1 / 11, dtype=torch.float64))
        torch.testing.assert_close(found, norm)
        assert_same(list(model.parameters()), list(whole.parameters()))
        model.zero_grad(set_to_none=step == 0)


def test_sums_of_16_bit_gradients_lose_nothing():
    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    accumulator = ours.GradAccumulator([weight])
    for value in (256.0, *[1.0] * 256):  # 256 + 1 is 256 in bfloat16
        weight.grad = torch.full((2,), value, dtype=torch.bfloat16)
        accumulator.add()
    accumulator.finish()
    assert weight.grad.dtype == torch.bfloat16
    assert weight.grad.tolist() == [512, 512]


def test_parameters_without_a_gradient_stay_without_one():
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(3)]
    accumulator = ours.GradAccumulator(iter(weights))
    weights[0].grad = torch.tensor([3.0])
    accumulator.add()
    assert repr(accumulator) == "GradAccumulator(3 parameters, 1 added to)"
    weights[2].grad = torch.tensor([4.0])
    assert accumulator.finish(1.75, 1).item() == 7
    assert [None if w.grad is None else w.grad.item() for w in weights] == [0.75, None, 1.0]
    for weight in weights:
        weight.grad = None
    weights[1].grad = torch.tensor([2.0])
    assert accumulator.finish().item() == 2
    assert [w.grad is None for w in weights] == [True, False, True]
    assert ours.GradAccumulator(_model()).finish().item() == 0


def test_sums_that_are_not_finite_are_dropped():
    weight = torch.nn.Parameter(torch.zeros(2))
    accumulator = ours.GradAccumulator([weight])
    weight.grad = torch.tensor([1.0, torch.inf])
    with pytest.raises(RuntimeError, match=r"grads\[0\]"):
        accumulator.finish(1.0, error_if_nonfinite=True)
    assert weight.grad is None
    weight.grad = torch.ones(2)
    with pytest.raises(ValueError, match="max_norm"):
        accumulator.finish(-1.0)
    assert weight.grad is None
    accumulator.finish()  # a bad argument leaves the sums
    assert weight.grad.tolist() == [1, 1]


# What is passed in the place of parameters


def given():
    """A frozen parameter, and two with gradients."""
    weights = [torch.nn.Parameter(torch.zeros(2), requires_grad=k > 0) for k in range(3)]
    weights[1].grad, weights[2].grad = torch.tensor([3.0, 4.0]), torch.tensor([0.0, 12.0])
    return weights


TAKERS = {
    "clip_grad_norm": lambda p: ours.clip_grad_norm_(p, 1.0),
    "clip_grad_value": lambda p: ours.clip_grad_value_(p, 1.0),
    "clip_grads_with_norm": lambda p: ours.clip_grads_with_norm_(p, 1.0, torch.tensor(13.0)),
    "accumulate_grads": lambda p: ours.GradAccumulator(p).finish(1.0),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("kind", ["plain", "one", "differentiable"])
@pytest.mark.parametrize("taker", TAKERS)
def test_gradients_are_no_parameters(taker, kind):
    """They would have no gradient, and nothing would be clipped."""
    grads = gradkit.grads_of(given())
    if kind == "differentiable":
        x = torch.ones(2, requires_grad=True)
        grads = torch.autograd.grad((x**3).sum(), [x], create_graph=True)
    with pytest.raises(TypeError, match=r"pass parameters, .* or gradients .* gradkit.clip_grad_"):
        TAKERS[taker](grads[0] if kind == "one" else grads)
    assert grads[0].tolist() == [3, 3 if kind == "differentiable" else 4]


@pytest.mark.parametrize("taker", TAKERS)
def test_parameters_without_gradients(taker):
    """Of a first step, or frozen; a leaf need not be a Parameter. There is nothing to clip."""
    weights = [torch.nn.Parameter(torch.ones(2), requires_grad=wanted) for wanted in (True, False)]
    for some in (weights, weights[1:], [torch.ones(2, requires_grad=True)], []):
        assert TAKERS[taker](some) in (None, 0)


@pytest.mark.parametrize("taker", [*TAKERS, "grads_of", "named_grads_of", "shards_of"])
def test_tied_weights_are_one_parameter(taker):
    """Its gradient counts once."""
    call = TAKERS | {
        "grads_of": gradkit.grads_of,
        "named_grads_of": lambda p: gradkit.named_grads_of(zip("abcd", p, strict=True)),
        "shards_of": lambda p: gradkit.distributed.shards_of(p, plain="own"),
    }
    weights = given()
    match = r"parameters\[(1|'b')\] and (named_)?parameters\[(3|'d')\] are one parameter"
    with pytest.raises(ValueError, match=match):
        call[taker]([*weights, weights[1]])
    assert weights[1].grad.tolist() == [3, 4]


def test_two_parameters_with_one_gradient_are_not_added_up():
    weights = given()
    accumulator = ours.GradAccumulator(weights)
    weights[0].grad = weights[2].grad
    with pytest.raises(ValueError, match=r"grads\[0\] and grads\[2\] share memory"):
        accumulator.finish(1.0)
    weights[0].grad = None
    assert accumulator.finish(1.0).item() == 13


@pytest.mark.parametrize("taker", TAKERS)
def test_errors_count_frozen_parameters(taker):
    """So that a position is the parameter's."""
    weights = given()
    weights[2] = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    weights[2].grad = torch.zeros(2, dtype=torch.complex64)
    with pytest.raises((TypeError, ValueError), match=r"grads\[2\] "):
        TAKERS[taker](weights)


@pytest.mark.parametrize("accumulates", [False, True])
def test_a_norm_that_is_not_finite_names_the_parameter(accumulates):
    weights = given()
    weights[2].grad[0] = torch.nan
    finish = ours.GradAccumulator(weights).finish
    call = finish if accumulates else partial(ours.clip_grad_norm_, weights)
    with pytest.raises(RuntimeError, match=r"grads\[2\]"):
        call(1.0, error_if_nonfinite=True)


def test_the_values_of_parameters_are_averaged():
    """As the error says."""
    weights, averages = given(), [torch.ones(2) for _ in range(3)]
    with pytest.raises(TypeError, match=r"params\[1\].*for its values pass its \.detach\(\)"):
        gradkit.ema_update(averages, weights, 0.5)
    gradkit.ema_update(averages, [weight.detach() for weight in weights], 0.5)
    assert [average.tolist() for average in averages] == [[0.5, 0.5]] * 3


# DTensors


@pytest.fixture
def mesh(tmp_path):
    """One process, which is all ranks of a mesh."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    distributed.destroy_process_group()


def _sharded(mesh, *values):
    from torch.distributed.tensor import Shard, distribute_tensor

    placements = [Shard(0)] * mesh.ndim
    found = []
    for value in values:
        p = torch.nn.Parameter(distribute_tensor(torch.zeros_like(value), mesh, placements))
        p.grad = distribute_tensor(value.clone(), mesh, placements)
        found.append(p)
    return found


@pytest.mark.parametrize("whole", [True, False], ids=["mesh of two dimensions", "of one"])
def test_dtensors(mesh, whole):
    chosen = mesh if whole else mesh["shard"]
    given = _sharded(chosen, torch.tensor([3.0]), torch.tensor([4.0]))
    total = lambda: ours.get_total_norm([p.grad for p in given])  # noqa: E731
    assert total() == torch.compile(total, backend="eager")() == 5
    norm = ours.clip_grad_norm_(given, 2.5)
    assert type(norm) is torch.Tensor
    assert norm.item() == 5
    assert [p.grad.to_local().item() for p in given] == [1.5, 2]
    ours.clip_grads_with_norm_(given, 2.5, utils.get_total_norm([p.grad for p in given]))
    torch.testing.assert_close([p.grad.to_local().item() for p in given], [1.5, 2.0])
    ours.clip_grad_value_(given, 1.75)
    assert [p.grad.to_local().item() for p in given] == [1.5, 1.75]


def test_sums_of_dtensors(mesh):
    given = _sharded(mesh["shard"], torch.tensor([3.0, 0.0]), torch.tensor([4.0]))
    accumulator = ours.GradAccumulator(given)
    accumulator.add()
    for p in given:
        p.grad = copy.deepcopy(p).detach()
    assert accumulator.finish(1.0).item() == 5
    assert [p.grad.placements for p in given] == [p.placements for p in given]
    torch.testing.assert_close(given[0].grad.full_tensor(), torch.tensor([0.6, 0.0]))


def test_partial_sums_are_refused_by_name_with_the_line_that_adds_them_up(mesh):
    """By what does not add them up, and of maxima by all; what the line makes is taken."""
    from torch.distributed.tensor import DTensor, Partial, Shard

    frozen, given = _sharded(mesh, torch.ones(2), torch.ones(2))
    frozen.grad = None
    placements = Partial(), Shard(0)
    given.grad = grad = DTensor.from_local(torch.tensor([3.0, 4.0]), mesh, placements)
    accumulator = ours.GradAccumulator([frozen, given])
    line = r"grad\.redistribute\(placements=\[Replicate\(\), Shard\(dim=0\)\]\)"
    said = rf"is a DTensor of partial sums.*{line}"
    clips = partial(ours.clip_grad_value_, [frozen, given], 1.0)
    for call in (clips, accumulator.add):
        with pytest.raises(ValueError, match=rf"^the gradient of parameters\[1\] {said}"):
            call()
    given.grad = DTensor.from_local(torch.tensor([3.0, 4.0]), mesh, (Partial("max"), Shard(0)))
    for name, call in (
        (
            r"the gradient of parameters\[1\]",
            partial(ours.clip_grad_norm_, [frozen, given], 1.0),
        ),
        ("the gradient of 'w'", partial(ours.grad_stats, [("w", given)])),
        (r"tensors\[0\]", partial(ours.get_total_norm, [given.grad])),
    ):
        with pytest.raises(ValueError, match=f"^{name} {said}"):
            call()
    namespace = vars(framework("torch.distributed.tensor")) | {"grad": grad}
    given.grad = eval(line.replace("\\", ""), namespace)
    accumulator.add()
    assert accumulator.finish(1.0).item() == 5


def test_dtensors_that_no_one_group_spans(mesh):
    (on_two,) = _sharded(mesh, torch.ones(2))
    on_one, on_other = (_sharded(mesh[name], torch.ones(2))[0] for name in mesh.mesh_dim_names)
    (plain,) = parameters(torch.float32)[:1]
    for several in ([on_two, on_one], [on_one, on_other]):
        with pytest.raises(ValueError, match=r"several device meshes.*the group"):
            ours.clip_grad_norm_(several, 1.0)
    with pytest.raises(ValueError, match=r"some tensors are DTensors.*group"):
        ours.clip_grad_norm_([on_two, plain], 1.0)
    assert on_two.grad.to_local().eq(1).all()


def test_a_mesh_that_is_not_all_processes(monkeypatch, mesh):
    (given,) = _sharded(mesh, torch.ones(2))
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 4)
    with pytest.raises(ValueError, match=r"mesh of 2 dimensions.*the group"):
        ours.clip_grad_norm_([given], 1.0)


def test_names_are_torchs():
    """Arguments have PyTorch's names, order and defaults."""
    import inspect

    functions = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "get_total_norm")
    pairs = [(getattr(ours, name), getattr(utils, name)) for name in functions]
    functional = torch.nn.functional
    norms = [f"{kind}_norm" for kind in ("layer", "rms", "batch", "group", "instance")]
    pairs += [(getattr(ours, name), getattr(functional, name)) for name in norms]
    for mine, theirs in pairs:
        described = [
            [
                (p.name, p.default, p.kind)
                for p in inspect.signature(f).parameters.values()
                if p.kind is not p.KEYWORD_ONLY  # ours
            ]
            for f in (mine, theirs)
        ]
        assert described[0] == described[1], mine.__name__
    assert gradkit.torch is ours


def parameter(grad):
    """A parameter with this gradient."""
    made = torch.nn.Parameter(torch.zeros(len(grad)))
    made.grad = torch.tensor(grad)
    return made


def test_a_norm_and_a_limit_cannot_be_swapped():
    """Gradkit's order, and any of two numbers, is an error; a guard's limit is none."""
    given = [parameter([3.0, 4.0])]
    norm, limit = ours.get_total_norm([p.grad for p in given]), torch.tensor(2.5)
    refused = (norm, 2.5), (5.0, 2.5)
    graph = torch.compile(ours.clip_grads_with_norm_, backend="eager")
    for call, numbers in itertools.product((ours.clip_grads_with_norm_, graph), refused):
        with pytest.raises(TypeError, match=r"by keyword.* pass max_norm=.*, total_norm=2\.5"):
            call(given, *numbers)
    assert given[0].grad.tolist() == [3, 4]
    ours.clip_grads_with_norm_(given, limit, norm)
    assert given[0].grad.tolist() == [1.5, 2]
    ours.clip_grads_with_norm_(given, torch.tensor(1.25), total_norm=2.5)
    assert given[0].grad.tolist() == [0.75, 1]


def test_a_guards_limit():
    """A tensor in the place of a number, in every function that clips by a norm."""
    guard = gradkit.SpikeGuard(warmup=3)
    for norm in (1.0, 1.5, 2.0, 1.0, 9.0):
        limit = guard.update(torch.tensor(norm, dtype=torch.float64))
    ways = (
        lambda given, limit: ours.clip_grad_norm_(given, limit),
        lambda given, limit: ours.clip_grads_with_norm_(given, limit, torch.tensor(5.0)),
        lambda given, limit: ours.GradAccumulator(given).finish(limit),
    )
    for clip in ways:
        given = [parameter([3.0, 4.0])]
        clip(given, limit)
        expected = torch.tensor([3.0, 4.0]) * (limit / 5).float()
        torch.testing.assert_close(given[0].grad, expected)


MODEL = torch.nn.Sequential(torch.nn.Linear(2, 1))
TAKE_PARAMETERS = TAKERS.keys() - {"accumulate_grads"}


@pytest.mark.parametrize("name", sorted(TAKE_PARAMETERS))
def test_models_are_no_parameters(name):
    """Each is named, with what to pass; so are pairs where names say nothing."""
    wanted = r"; pass model\.parameters\(\)$"
    for model in (MODEL, MODEL[0]):
        with pytest.raises(TypeError, match="^parameters holds a Linear" + wanted):
            TAKERS[name](model)
    pairs = list(MODEL.named_parameters())
    for take, given in ((TAKERS[name], [*pairs, MODEL[0].bias]),
                        (ours.GradAccumulator, pairs)):  # fmt: skip
        with pytest.raises(TypeError, match=r"holds \(name, parameter\) pairs" + wanted):
            take(given)
    with pytest.raises(TypeError, match="^parameters holds a int" + wanted):
        TAKERS[name](5)


@pytest.mark.parametrize("name", sorted(TAKE_PARAMETERS))
def test_pairs_are_clipped_as_their_parameters(name):
    given, expected = parameters(*MIXED), parameters(*MIXED)
    pairs = {f"layer.{k}": p for k, p in enumerate(given)}
    assert TAKERS[name](iter(pairs.items())) == TAKERS[name](expected)
    assert_same(given, expected, rtol=0, atol=0)
    pairs["layer.1"] = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    pairs["layer.1"].grad = torch.zeros(2, dtype=torch.complex64)
    with pytest.raises(TypeError, match=r"grads\['layer\.1'\] has dtype torch.complex64"):
        TAKERS[name](pairs.items())
    with pytest.raises(ValueError, match=r"^parameters has two parameters named 'layer'"):
        TAKERS[name]([("layer", p) for p in given])
    with pytest.raises(ValueError, match=r"^parameters\['a'\] and parameters\['b'\] are one"):
        TAKERS[name]([("a", given[0]), ("b", given[0])])


def test_clip_grad_norm_takes_what_gradkits_takes():
    """Each option on parameters, beside gradkit's own call on their gradients."""
    options = {
        "scale": [0.25, torch.tensor(0.25)],
        "nonfinite": ["propagate", "zero"],
        "clip": [lambda name, _: name.endswith("1"), {"layer.0": False, "layer.1": True}],
        "count": [lambda name, grad: name == "layer.0" and grad.numel() == 15],
        "eps_mode": ["add"],
        "exact": [True],
    }
    for name, values in options.items():
        for value in values:
            for number in (1.0, float("inf")) if name == "nonfinite" else (1.0,):
                given = parameters(torch.float32, torch.float16)[:2]
                given[0].grad[0, 0] = number
                grads = {f"layer.{k}": p.grad.clone() for k, p in enumerate(given)}
                pairs = [(f"layer.{k}", p) for k, p in enumerate(given)]
                norm = ours.clip_grad_norm_(pairs, 0.5, **{name: value})
                expected = gradkit.clip_grad_norm(grads, 0.5, **{name: value})
                torch.testing.assert_close(norm, expected, rtol=0, atol=0)
                for p, own in zip(given, grads.values(), strict=True):
                    torch.testing.assert_close(p.grad, own, rtol=0, atol=0, equal_nan=True)
                if name in ("scale", "exact", "nonfinite"):
                    total = ours.get_total_norm([p.grad for p in given], **{name: value})
                    assert total == gradkit.grad_norm(grads, **{name: value}) or total.isnan()


def test_a_norm_that_is_not_finite():
    """PyTorch's error where its argument asks for one, gradkit's where gradkit's does."""
    given = parameters(torch.float32)
    given[0].grad[1, 2] = float("nan")
    pairs, before = [("w", given[0])], given[0].grad.clone()
    ways = {RuntimeError: {"error_if_nonfinite": True},
            gradkit.NonFiniteNormError: {"nonfinite": "raise"}}  # fmt: skip
    for error, option in ways.items():
        with pytest.raises(error, match=r"grads\['w'\]") as found:
            ours.clip_grad_norm_(pairs, 1.0, **option)
        assert found.type is error
        with pytest.raises(error) as found:
            ours.get_total_norm([given[0].grad], **option)
        assert found.type is error
    for policy in ("raise", "zero", "propagate"):
        with pytest.raises(ValueError, match=f"error_if_nonfinite or nonfinite='{policy}', not b"):
            ours.clip_grad_norm_(pairs, 1.0, error_if_nonfinite=True, nonfinite=policy)
    with pytest.raises(ValueError, match="nonfinite must be"):
        ours.clip_grad_norm_(pairs, 1.0, nonfinite="skip")
    torch.testing.assert_close(given[0].grad, before, equal_nan=True)
    found_inf = torch.zeros(())
    ours.clip_grad_norm_(pairs, 1.0, nonfinite="zero", found_inf=found_inf)
    assert found_inf == 1
    assert not given[0].grad.any()


def test_models_and_pairs_are_no_gradients():
    grads = r"grads_of\(model\.parameters\(\)\)$"
    pairs = r"named_grads_of\(pairs\) if these are \(name, parameter\) pairs$"
    for call, given, words in (
        (ours.get_total_norm, MODEL, "^tensors holds a Linear; pass gradkit." + grads),
        (ours.get_total_norm, MODEL.named_parameters(), r"^tensors holds \(name, p.*" + grads),
        (gradkit.grad_norm, MODEL, r"^grads\[0\] is a Linear; expected an array; pass " + grads),
        (gradkit.grad_norm, MODEL[0], "^grads is a Linear; expected an array; pass " + grads),
        (gradkit.grad_norm, MODEL.named_parameters(), r"^grads\[0\]\[0\] is a str; .*" + pairs),
        (gradkit.grads_of, MODEL, r"holds a Linear, .*; pass model\.parameters\(\)$"),
        (
            gradkit.grads_of,
            MODEL.named_parameters(),
            "pass .name, parameter. pairs to named_grads_",
        ),
        (gradkit.named_grads_of, MODEL[0], r"holds a Linear .* pass model\.named_parameters\(\)"),
    ):
        with pytest.raises(TypeError, match=words):
            call(given)


@pytest.mark.filterwarnings("ignore")  # PyTorch's own
@pytest.mark.parametrize(
    ("compiler", "named"), [("aot_eager", False), ("aot_eager", True), ("inductor", True)]
)
def test_a_whole_graph_clips_as_calls_do(compiler, named):
    """Every function, between operations of the graph: the same bits, written in place."""

    def step(given, found_inf, limit):
        grads = [p.grad for p in given if p.grad is not None]
        own = [(f"p{k}", p) for k, p in enumerate(given)] if named else given
        options = {"nonfinite": "zero", "found_inf": found_inf, "eps_mode": "add", "exact": True}
        norm = ours.clip_grad_norm_(own, limit, 1, scale=0.5, **options)
        largest = ours.get_total_norm(grads, INF), ours.get_total_norm(grads, found_inf=found_inf)
        ours.clip_grads_with_norm_(own, limit / 2, total_norm=norm)
        ours.clip_grad_value_(own, 0.125)
        return 2 * norm, *largest, *(g + 1 for g in grads)

    expected, compiled = parameters(torch.float32, torch.bfloat16), None
    wanted = step(expected, torch.ones(()), 2.0)
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend=compiler)
    for limit in (2.0, torch.tensor(2.0)):
        given, found_inf = parameters(torch.float32, torch.bfloat16), torch.ones(())
        assert all(map(torch.equal, compiled(given, found_inf, limit), wanted))
        assert_same(given, expected, rtol=0, atol=0)
        assert found_inf == 0


@pytest.mark.filterwarnings("ignore")  # PyTorch's own, of breaks in graphs
def test_what_an_operator_does_not_take_leaves_the_graph():
    """Errors of one that it does take say names."""
    given = parameters(torch.float32)
    named = [("w", given[0])]

    def step(parameters, **options):
        return ours.clip_grad_norm_(parameters, 1.0, **options)

    torch._dynamo.reset()
    before = given[0].grad.clone()
    for option, norm in (("clip", ours.get_total_norm(before)), ("count", 0)):
        assert torch.compile(step, backend="eager")(given, **{option: {0: False}}) == norm
        assert given[0].grad.equal(before)
    assert torch.compile(step, backend="eager")([given[-1]]) == 0
    given[0].grad[0, 0] = NAN
    whole = torch.compile(step, backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError, match=r"grads\['w'\]"):
        whole(named, error_if_nonfinite=True)


@pytest.mark.filterwarnings("ignore")  # PyTorch's own, of errors in graphs
@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_norm": -1.0}, "max_norm must be at least 0, not -1.0"),
        ({"max_norm": NAN}, "max_norm must be at least 0, not nan"),
        ({"scale": INF}, "scale must be finite, not inf"),
        ({"parameters": "twice"}, "two parameters named 'w'"),
    ],
)
def test_a_graph_refuses_what_calls_refuse(options, error):
    """To an operator a number is a tensor, whose value nothing checks."""
    given, expected = parameters(torch.float32), parameters(torch.float32)
    twice = [("w", parameter) for parameter in given]

    def step():
        named = twice if "parameters" in options else given
        ours.clip_grad_norm_(**({"max_norm": 1.0} | options | {"parameters": named}))

    torch._dynamo.reset()
    with pytest.raises(ValueError, match=error):
        torch.compile(step, backend="eager")()
    assert_same(given, expected, rtol=0, atol=0)


def test_a_graph_takes_any_limit():
    """The first one is a constant, and so is the order of the norm."""
    counter = compiling.CompileCounterWithBackend("aot_eager")
    (weight,) = parameters(torch.float64)[:1]

    def step(limit):
        return ours.clip_grad_norm_([weight], limit, "inf", scale=0.5)

    torch._dynamo.reset()
    compiled = torch.compile(step, backend=counter, fullgraph=True)
    for limit in (8.0, 4.0, 2.5, 1.5):
        weight.grad = torch.full_like(weight, -16.0)
        assert compiled(limit) == 8
        assert (weight.grad == -limit).all()
    assert counter.frame_count == 2


def test_a_model_may_change_between_steps():
    """Its sums are of its new dtype and shapes."""
    (weight,) = parameters(torch.float32)[:1]
    accumulator = ours.GradAccumulator([weight])
    assert accumulator.finish() == ours.get_total_norm(weight.grad)
    weight.grad, weight.data = None, torch.zeros(2, dtype=torch.float64)
    for _ in range(2):
        weight.grad = torch.tensor([3.0, 4.0], dtype=torch.float64)
        accumulator.add()
    assert accumulator.finish(max_norm=1.0) == 10
    torch.testing.assert_close(weight.grad, torch.tensor([0.6, 0.8], dtype=torch.float64))


def test_gradients_without_elements_share_nothing():
    """Their memory is at one address, or at none."""
    parameters = [torch.nn.Parameter(torch.ones(n)) for n in (0, 2, 0)]
    accumulator = ours.GradAccumulator(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    accumulator.add()
    assert accumulator.finish() == math.sqrt(2)


@pytest.mark.filterwarnings("ignore")  # PyTorch's own, of gradients that are no leaves
def test_the_norm_of_differentiable_gradients_is_a_number_in_graphs_too():
    """Autograd knows nothing of the operator's derivative."""
    weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    (weight.grad,) = torch.autograd.grad((weight**2).sum(), weight, create_graph=True)
    total, clip = (
        lambda: ours.get_total_norm([weight.grad]),
        lambda: ours.clip_grad_norm_(weight, 1),
    )
    for call in (total, *(torch.compile(f, backend="aot_eager") for f in (total, clip))):
        norm = call()
        assert norm == 10
        assert not norm.requires_grad
