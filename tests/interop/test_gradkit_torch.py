"""``gradkit.torch``'s norms: their gradients, and what PyTorch does with operators."""

import copy
import io
import itertools

import pytest

from gradkit._open import dispatch

from .libraries import framework
from .torch_norms import (
    CASES,
    CB,
    IMAGES,
    MEAN,
    ONE_OF_EACH,
    OPERATORS,
    VAR,
    B,
    R,
    W,
    X,
    instance_norm,
    of_tensors,
    operator_calls,
    random,
)

torch = framework("torch")
functional = framework("torch.nn.functional")
ours = framework("gradkit.torch")
_records = framework("gradkit.torch._records")
CachedCalls = framework("gradkit.torch._cached_calls").CachedCalls
forward_ad = framework("torch.autograd.forward_ad")

ARGUMENTS = list(operator_calls())


# Derivatives


@pytest.mark.parametrize("name", CASES)
def test_gradcheck(name):
    assert torch.autograd.gradcheck(*CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_what_needs_no_gradient_is_not_computed(name, monkeypatch):
    """Whichever inputs are frozen, the others' gradients have the same bits."""
    function, given = CASES[name]
    tensors = [k for k, each in enumerate(given) if isinstance(each, torch.Tensor)]
    every = _gradients_by(function, given, tensors)
    asked = []
    monkeypatch.setattr(_records, "run", lambda call: asked.append(call) or dispatch.run(call))
    monkeypatch.setattr(CachedCalls, "find", lambda *_: None)
    for needed in itertools.chain(*(itertools.combinations(tensors, k + 1) for k in range(2))):
        found = _gradients_by(function, given, needed)
        for k, one in zip(needed, found, strict=True):
            torch.testing.assert_close(one, every[tensors.index(k)], rtol=0, atol=0)
        wanted = asked.pop().wanted
        assert ("dx" in wanted) == (tensors[0] in needed or ("add" in name and 1 in needed))
        has_bias = given[-1] is B or given[-1] is CB
        assert ("dbias" in wanted) == (has_bias and tensors[-1] in needed)
        asked.clear()


def _gradients_by(function, given, needed):
    """Those of the sum of a function's results with respect to the arguments at these places."""
    own = [
        each.detach().requires_grad_(k in needed) if isinstance(each, torch.Tensor) else each
        for k, each in enumerate(given)
    ]
    results = function(*own)
    total = sum((y**3).sum() for y in ([results] if torch.is_tensor(results) else results))
    return torch.autograd.grad(total, [own[k] for k in needed])


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_second_derivatives_are_refused(name):
    with pytest.raises(NotImplementedError, match=r"no second derivatives.*torch\.nn\.functional"):
        torch.autograd.gradgradcheck(*CASES[name])


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_forward_mode_is_refused(name):
    function, (x, *rest) = CASES[name]
    x = x.detach()
    refused = pytest.raises(NotImplementedError, match=r"forward-mode.*torch\.nn\.functional")
    with refused, forward_ad.dual_level():
        function(forward_ad.make_dual(x, x), *rest)
    plain = [t.detach() if isinstance(t, torch.Tensor) else t for t in rest]
    with refused, forward_ad.dual_level():
        function(forward_ad.make_dual(x, x), *plain)
    with refused:
        torch.func.jvp(lambda x: function(x, *rest), (x,), (x,))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_default_eps_is_that_of_the_dtype_of_sums(dtype):
    x = torch.tensor([[1.0, -3.0]], dtype=dtype) / 256
    eps = 2.0**-52 if dtype == torch.float64 else 2.0**-23
    assert torch.equal(ours.rms_norm(x, (2,)), ours.rms_norm(x, (2,), eps=eps))
    assert not torch.equal(ours.rms_norm(x, (2,)), ours.rms_norm(x, (2,), eps=2.0**-10))


def test_statistics_are_not_differentiable():
    y, mean, inv_std = OPERATORS.layer_norm(X, W, B, -1, 1e-5, 0.0)
    assert (y.requires_grad, mean.requires_grad, inv_std.requires_grad) == (True, False, False)


INVERTIBLE = pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])


@INVERTIBLE
def test_an_invertible_norm_keeps_its_output_instead_of_its_input(name):
    parameters = (W, B) if name == "layer_norm" else (W,)
    inverted = getattr(ours, f"invertible_{name}")

    def kept(function):
        x = X.detach().requires_grad_()
        found = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t):
            y = function(x, (6,), *parameters)
        kept = {t.data_ptr() for t in found}
        return x.data_ptr() in kept, y.data_ptr() in kept

    assert kept(getattr(ours, name)) == (True, False)
    assert kept(inverted) == (False, True)
    y = inverted(X, (6,), *parameters)
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    y = inverted(X, (6,), torch.zeros(6, dtype=torch.float64))
    with pytest.raises(ValueError, match="scale"):
        y.sum().backward()


# torch.func


def test_operators_in_transforms_are_refused():
    with pytest.raises(NotImplementedError, match=r"torch\.func.*gradkit\.torch"):
        torch.func.grad(lambda x: OPERATORS.layer_norm(x, None, None, -1, 1e-5, 0.0)[0].sum())(X)
    loss = lambda x: ours.rms_norm(x, (6,), W).square().sum()  # noqa: E731
    with pytest.raises(NotImplementedError, match=r"second derivatives"):
        torch.func.grad(lambda x: torch.func.grad(loss)(x).sum())(X.detach())


@pytest.mark.parametrize(
    "special",
    [
        torch._neg_view,
        lambda x: x.to("meta"),
        lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
        lambda x: x[:0],
        lambda x: x.requires_grad_(),
    ],
    ids=["negative bit", "meta", "zeros without memory", "empty", "leaf"],
)
def test_special_tensors(special):
    x = special(X.detach().clone())
    y, expected = ours.layer_norm(x, (6,)), functional.layer_norm(x, (6,))
    torch.testing.assert_close(y, expected)
    assert y.stride() == expected.stride()


def test_tensors_that_left_a_transform():
    left = []
    torch.func.grad(lambda x: left.append(x * 2) or x.sum())(X.detach())
    y = ours.rms_norm(left[0], (6,), eps=0.0)
    torch.testing.assert_close(y, functional.rms_norm(X.detach(), (6,), eps=0.0))


def test_modes_see_operators():
    """If a mode may act, calls go through the dispatcher, forward and backward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Mode():
        y = ours.layer_norm(X, (6,), W, B)
    outside = ours.layer_norm(X, (6,), W, B)
    with Mode():
        torch.autograd.grad(outside.sum(), X)
        running = torch.zeros(4), torch.ones(4)
        ours.batch_norm(IMAGES.float(), *running, training=True)
    assert "gradkit.batch_norm.default" in seen
    expected = torch.zeros(4), torch.ones(4)
    ours.batch_norm(IMAGES.float(), *expected, training=True)
    torch.testing.assert_close(running, expected)
    assert torch.equal(y, outside)
    assert {"gradkit.layer_norm.default", "gradkit.layer_norm_grad.default"} <= {*seen}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", CASES)
def test_traced_programs_are_saved_and_loaded(name):
    """They have an operator, and its gradient, for other values than those of the trace."""
    program, tensors = of_tensors(name)
    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(program, [t.detach() for t in tensors]), file)
    file.seek(0)
    loaded = torch.jit.load(file)
    others = [(t.detach() * 1.5).requires_grad_() for t in tensors]
    found, expected = loaded(*others), program(*others)
    torch.testing.assert_close(found, expected)
    found, expected = (y if isinstance(y, tuple) else (y,) for y in (found, expected))
    slopes = [
        torch.autograd.grad(sum(y.pow(3).sum() for y in r), others) for r in (found, expected)
    ]
    torch.testing.assert_close(*slopes)


# Operators


# By position, as compilers keep them.
POSITIONS = {
    "layer_norm": "x scale bias axis eps scale_offset",
    "layer_norm_grad": "dy x scale mean inv_std axis scale_offset ds wanted",
    "rms_norm": "x scale axis eps scale_offset",
    "rms_norm_grad": "dy x scale inv_std axis scale_offset ds wanted",
    "group_norm": "x scale bias num_groups eps channel_axis",
    "group_norm_grad": "dy x scale mean inv_std channel_axis wanted",
    "batch_norm": "x scale bias running_mean running_var momentum eps channel_axis",
    "batch_norm_grad": "dy x scale mean inv_std channel_axis wanted",
    "batch_norm_inference": "x scale bias mean var eps channel_axis",
    "batch_norm_inference_grad": "dy x scale mean var eps channel_axis wanted",
}


@pytest.mark.parametrize("name", POSITIONS)
def test_arguments_of_operators_keep_their_positions(name):
    arguments = getattr(OPERATORS, name).default._schema.arguments
    assert [argument.name for argument in arguments] == POSITIONS[name].split()
    for argument in arguments:  # those that have come later
        late = argument.name in ("channel_axis", "ds", "scale_offset", "wanted")
        assert argument.has_default_value() == late


@pytest.mark.parametrize(("name", "arguments"), ARGUMENTS)
def test_fake_kernels_state_what_comes(name, arguments):
    """Shapes, dtypes and strides; and all results are new memory, each by itself."""
    from torch._subclasses import FakeTensorMode

    arguments = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, arguments)
    results = getattr(OPERATORS, name)(*arguments)
    with FakeTensorMode() as mode:
        fake = torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, arguments)
        stated = getattr(OPERATORS, name)(*fake)
    if isinstance(results, torch.Tensor):
        results, stated = (results,), (stated,)
    for got, said in zip(results, stated, strict=True):
        assert got.shape == said.shape
        assert got.dtype == said.dtype
        assert got.stride() == said.stride()
        assert got.storage_offset() == 0
    given = [a for a in arguments if isinstance(a, torch.Tensor)]
    read, written = (
        [t.untyped_storage().data_ptr() for t in tensors if t.numel()]
        for tensors in (given, results)
    )
    assert len({*written} - {*read}) == len(written)


def test_compilers_keep_the_layouts_that_fake_kernels_saw():
    for name in dict(ARGUMENTS):
        assert torch.Tag.needs_exact_strides in getattr(OPERATORS, name).default.tags


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # opcheck's
@pytest.mark.parametrize(
    ("name", "arguments"),
    [next(row for row in ARGUMENTS if row[0] == name) for name in dict(ARGUMENTS)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_opcheck(name, arguments):
    operator = getattr(OPERATORS, name).default
    checked = torch.library.opcheck(operator, arguments)
    assert set(checked.values()) == {"SUCCESS"}


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    "norm",
    [
        ours.LayerNorm(3),
        ours.RMSNorm(3),
        ours.GroupNorm(2, 4),
        ours.InstanceNorm2d(4),
        ours.InstanceNorm2d(4, track_running_stats=True),
        ours.BatchNorm2d(4),
        ours.BatchNorm2d(4).eval(),
    ],
)
def test_results_may_be_changed_in_place(norm, order):
    """As `ReLU(inplace=True)` does, in the first call of its kind too, which makes a plan."""
    dispatch._plans.clear()
    values = torch.randn(2, 4, 5, 3).contiguous(memory_format=order)
    for _ in range(3):
        x = values.clone().requires_grad_()
        torch.nn.functional.relu(norm(x), inplace=True).sum().backward()
        expected = values.clone().requires_grad_()
        norm(expected).clamp(min=0).sum().backward()
        torch.testing.assert_close(x.grad, expected.grad)


class Every(torch.nn.Module):
    """A norm of each kind, in a network."""

    def __init__(self):
        super().__init__()
        self.images = torch.nn.Sequential(
            torch.nn.Conv2d(2, 4, 3, bias=False),
            torch.nn.BatchNorm2d(4),
            torch.nn.ReLU(),
            torch.nn.GroupNorm(2, 4),
            torch.nn.InstanceNorm2d(4, affine=True),
        )
        self.rows = torch.nn.Sequential(
            torch.nn.LayerNorm(16), torch.nn.Linear(16, 16, bias=False), torch.nn.RMSNorm(16)
        )
        self.sums = torch.nn.ModuleList((ours.AddLayerNorm(16), ours.AddRMSNorm(16)))
        self.gated = ours.GatedRMSNorm(16, activation="sigmoid")
        self.last = torch.nn.Sequential(
            ours.InvertibleLayerNorm(16), ours.InvertibleRMSNorm(16, scale_offset=1.0)
        )

    def forward(self, x):
        y = self.images(x).flatten(2)
        s = self.rows(y)
        for norm in self.sums:
            y, s = norm(y, s)
        return self.last(self.gated(y, s) + s)


def _network():
    torch.manual_seed(0)
    return Every()


def _step(model, x, run):
    x = x.clone().requires_grad_()
    run(x).pow(3).mean().backward()
    return [x.grad, *(p.grad for p in model.parameters()), *model.buffers()]


def test_networks_compiled_to_machine_code():
    """Between operations that inductor makes kernels of, in layouts that it chooses."""
    torch._dynamo.reset()

    def program(x, w, b):
        y = ours.batch_norm(x.transpose(0, 1), mean, var, training=True).transpose(0, 1)
        y = ours.batch_norm(ours.group_norm((y + x.cos()).mT, 3).mT, mean, var)
        y, s = ours.add_rms_norm(y, x, (6,), w, scale_offset=1.0)
        return ours.layer_norm(y + s, (6,), w, b).square().mean()

    x, w, b = (t.detach().float().requires_grad_() for t in (X[:, :4], W, B))
    mean, var = torch.zeros(4), torch.ones(4)
    expected = torch.autograd.grad(program(x, w, b), (x, w, b)), mean.clone(), var.clone()
    assert not mean.eq(0).any()
    mean.zero_(), var.fill_(1)
    compiled = torch.compile(program, fullgraph=True, backend="inductor")
    got = torch.autograd.grad(compiled(x, w, b), (x, w, b)), mean, var
    torch.testing.assert_close(got, expected)


@pytest.mark.filterwarnings("ignore")  # the compiler's own, of what is new in it
def test_backward_passes_that_are_compiled_alone():
    from torch._dynamo import compiled_autograd

    torch._dynamo.reset()
    expected = torch.autograd.grad(ours.add_rms_norm(X, R, (6,), W)[0].pow(3).sum(), (X, W))
    x, w = (t.detach().requires_grad_() for t in (X, W))
    y, _ = ours.add_rms_norm(x, R, (6,), w)
    with compiled_autograd._enable(
        lambda graph: torch.compile(graph, backend="aot_eager", fullgraph=True)
    ):
        y.pow(3).sum().backward()
    torch.testing.assert_close((x.grad, w.grad), expected)


def test_compiled_forward_mode_is_refused():
    torch._dynamo.reset()
    x = X.detach()

    def program(x):
        return torch.func.jvp(lambda x: ours.layer_norm(x, (6,)), (x,), (x,))

    with pytest.raises(Exception, match=r"gradkit's operators have no derivatives"):
        torch.compile(program, fullgraph=True, backend="eager")(x)


# Modes


def test_autocast():
    """Results have the input's dtype; the statistics of bfloat16 are float32."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), ours.LayerNorm(16), ours.RMSNorm(16))
    x = random(3, 8, dtype=torch.float32, grad=False)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
        plain = model[1](x.repeat(1, 2))
    assert (y.dtype, plain.dtype) == (torch.bfloat16, torch.float32)
    y.float().sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    assert OPERATORS.layer_norm(x.bfloat16(), None, None, -1, 1e-5, 0.0)[1].dtype == torch.float32


@pytest.mark.parametrize("compiler", [None, "aot_eager"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["AddRMSNorm", "AddLayerNorm"])
def test_float32_residuals_of_16_bit_blocks(kind, dtype, compiler):
    """Autocast's pair: the sum stays float32, forward and backward, and gives y of 16 bits."""
    torch._dynamo.reset()
    norm = getattr(ours, kind)(16, scale_offset=1.0, eps=1e-6)
    torch.nn.init.normal_(norm.weight)
    run = torch.compile(norm, backend=compiler, fullgraph=True) if compiler else norm
    x, r = random(4, 16, dtype=dtype), random(4, 16, dtype=torch.float32, seed=1)
    y, s = run(x, r)
    assert (y.dtype, s.dtype) == (dtype, torch.float32)
    assert torch.equal(s, x.float() + r)
    wide = copy.deepcopy(norm).double()
    xd, rd = (t.detach().double().requires_grad_() for t in (x, r))
    expected = wide(xd, rd)
    torch.testing.assert_close(y, expected[0].to(dtype))
    dy, ds = random(4, 16, dtype=dtype, grad=False, seed=3), random(4, 16, grad=False, seed=4)
    got = torch.autograd.grad((y, s), (x, r, *norm.parameters()), (dy, ds.float()))
    given = xd, rd, *wide.parameters()
    slopes = torch.autograd.grad(expected, given, (dy.double(), ds.float().double()))
    for found, wanted, like in zip(got, slopes, (x, r, *norm.parameters()), strict=True):
        assert found.dtype == like.dtype
        torch.testing.assert_close(
            found, wanted.to(like.dtype), rtol=2e-2 * (like is x) + 1e-5, atol=1e-5
        )
    with pytest.raises(TypeError, match="residual has dtype"):
        norm(x.float(), r.to(dtype))


@pytest.mark.parametrize("training", [False, True])
def test_autocast_of_images(training):
    """bfloat16 data between float32 parameters and running statistics."""
    model = ours.replace_norms(_network()).train(training)
    alone = copy.deepcopy(model).double()
    x = random(3, 2, 6, 6, dtype=torch.float32, grad=False)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    assert y.dtype == torch.bfloat16
    expected = alone(x.double())
    torch.testing.assert_close(y.double(), expected, rtol=0.1, atol=0.15)
    y.float().sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    torch.testing.assert_close(
        model.images[1].running_var.double(), alone.images[1].running_var, rtol=0.02, atol=1e-3
    )


def test_frozen_networks_are_fine_tuned():
    """In evaluation, gradients arrive by way of the running statistics; compiled too."""
    torch._dynamo.reset()
    theirs = _network().eval()
    torch.nn.init.uniform_(theirs.images[1].running_var, 0.5, 2.0)
    swapped = ours.replace_norms(copy.deepcopy(theirs))
    compiled = torch.compile(swapped, fullgraph=True, backend="aot_eager")
    x = random(3, 2, 6, 6, dtype=torch.float32, grad=False)
    expected = _step(theirs, x, theirs)
    for run in (swapped, compiled):
        swapped.zero_grad()
        torch.testing.assert_close(_step(swapped, x, run), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    model = ours.replace_norms(_network())
    x = random(3, 2, 6, 6, dtype=torch.float32, grad=False)
    expected = copy.deepcopy(model)(x)
    with mode():
        y = model(x)
    assert not y.requires_grad
    assert torch.equal(y, expected)


# Modules


def test_replaced_modules_stay_what_they_were():
    class Own(torch.nn.LayerNorm):
        pass

    model = torch.nn.ModuleDict({"network": _network(), "own": Own(4)})
    before = dict(model.named_modules())
    keys, parameters = list(model.state_dict()), list(model.parameters())
    seen = []
    model["network"].rows[0].register_forward_hook(lambda *_: seen.append(1))
    assert ours.replace_norms(model) is model
    assert {name: id(m) for name, m in model.named_modules()} == {
        name: id(m) for name, m in before.items()
    }
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    network = model["network"]
    assert [type(m) for m in (*network.images[1::2], network.rows[0], network.rows[2])] == [
        ours.BatchNorm2d,
        ours.GroupNorm,
        ours.LayerNorm,
        ours.RMSNorm,
    ]
    assert type(model["own"]) is Own
    assert ours.norms_left(model) == {
        "own": "Own is a subclass of torch.nn.LayerNorm, which may compute something else"
    }
    network(random(2, 2, 6, 6, dtype=torch.float32, grad=False))
    assert seen == [1]
    assert type(ours.replace_norms(torch.nn.LayerNorm(3))) is ours.LayerNorm


@pytest.mark.parametrize("compiler", [None, "aot_eager"])
def test_a_sum_of_constants_needs_no_gradient(compiler):
    """As in PyTorch, also if the weight does."""
    norm, (x, residual) = ours.AddRMSNorm(4), torch.ones(2, 3, 4)
    torch._dynamo.reset()
    call = torch.compile(norm, backend=compiler) if compiler else norm
    y, s = call(x, residual)
    assert (y.requires_grad, s.requires_grad) == (True, False)
    y, s = call(x, residual.requires_grad_())
    assert (y.requires_grad, s.requires_grad) == (True, True)


def test_modules_without_initial_values():
    """PyTorch looks for a device among their arguments."""
    made = torch.nn.utils.skip_init(ours.BatchNorm2d, 3, eps=0.5, group=None)
    assert (made.eps, made.weight.shape) == (0.5, (3,))


def test_norms_that_are_left_to_others():
    """Before the swap and after it; gradkit's own and their subclasses are not among them."""

    class LlamaRMSNorm(torch.nn.Module):
        pass

    class Ours(ours.RMSNorm):
        pass

    weighed = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2))
    added = ours.AddRMSNorm(2), ours.AddLayerNorm(2), ours.GatedRMSNorm(2)
    own = [torch.nn.LayerNorm(2), Ours(2), *added, ours.InvertibleLayerNorm(2)]
    parametrized = torch.nn.LayerNorm(2)
    torch.nn.utils.parametrize.register_parametrization(parametrized, "weight", torch.nn.ReLU())
    others = LlamaRMSNorm(), torch.nn.LazyBatchNorm1d(), parametrized
    model = torch.nn.Sequential(weighed, *own, *others)
    of_torch = "a subclass of torch.nn.LayerNorm"
    for _ in range(2):
        left = ours.norms_left(model)
        assert left == {
            "7": "LlamaRMSNorm is no norm of torch.nn that gradkit has",
            "8": "LazyBatchNorm1d gets its shape in its first call; call replace_norms after that",
            "9": f"ParametrizedLayerNorm is {of_torch}, which may compute something else",
        }
        ours.replace_norms(model)


def test_statistics_may_stop_to_be_tracked():
    """The batch's own are used, and the running ones stay."""
    theirs = torch.nn.BatchNorm2d(4, dtype=torch.float64)
    swapped = ours.replace_norms(copy.deepcopy(theirs))
    for module in (theirs, swapped):
        module.track_running_stats = False
    torch.testing.assert_close(swapped(IMAGES), theirs(IMAGES))
    assert swapped.running_mean.eq(0).all()
    assert swapped.num_batches_tracked == 0


@pytest.mark.parametrize("shape", [(2, 0, 3), (2, 0, 3, 3), (0, 3, 4), (2, 3, 0)])
@pytest.mark.parametrize("compiled", [False, True])
def test_instance_norms_of_nothing(shape, compiled):
    """Also of no channels, as PyTorch's without a weight."""
    x, weight = torch.ones(shape, requires_grad=True), torch.ones(shape[1], requires_grad=True)
    norm = torch.compile(instance_norm, backend="aot_eager") if compiled else instance_norm
    y = norm(x, weight)
    assert y.shape == torch.nn.functional.instance_norm(x).shape == shape
    y.sum().backward()
    assert x.grad.shape == shape
    assert weight.grad.tolist() == [0.0] * shape[1]


def test_batch_norm_of_no_channels():
    assert ours.batch_norm(torch.ones(3, 0), None, None, training=True).shape == (3, 0)


def test_operators_refuse_what_no_function_passes():
    x, weight = torch.ones(2, 3, requires_grad=True), torch.ones(3)
    with pytest.raises(ValueError, match="scale is on another device, cpu, than meta"):
        OPERATORS.rms_norm(x.to("meta"), weight, -1, 1e-6, 0.0)
    with pytest.raises(NotImplementedError, match="invertible_layer_norm has no gradient by a sc"):
        OPERATORS.invertible_layer_norm(x, weight, None, -1, 1e-5, 1.0)


@pytest.mark.parametrize("momentum", [0.1, 0.3, 0.0, None])
def test_statistics_of_instance_norms_are_those_of_all_samples(momentum):
    theirs = torch.nn.InstanceNorm2d(
        4, momentum=momentum, track_running_stats=True, dtype=torch.float64
    )
    swapped = ours.replace_norms(copy.deepcopy(theirs))
    for seed in (1, 2):
        x = random(3, 4, 2, 3, grad=False, seed=seed) * torch.tensor([1.0, 2, 4]).view(3, 1, 1, 1)
        torch.testing.assert_close(swapped(x), theirs(x))
    torch.testing.assert_close(swapped.state_dict(), theirs.state_dict())
    torch.testing.assert_close(swapped.eval()(IMAGES), theirs.eval()(IMAGES))


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("momentum", [0.3, 0.0, None])
def test_statistics_that_move_are_torchs(momentum, affine):
    """In training and evaluation, and with no batch at all."""
    theirs = torch.nn.BatchNorm2d(4, momentum=momentum, affine=affine, dtype=torch.float64)
    swapped = ours.replace_norms(copy.deepcopy(theirs))
    for seed in range(3):
        x = random(3, 4, 2, 3, grad=False, seed=seed) * (seed + 1)
        torch.testing.assert_close(swapped(x), theirs(x))
    before = swapped.running_var.clone()
    swapped(IMAGES[:0])
    assert torch.equal(swapped.running_var, before)
    theirs(IMAGES[:0])
    torch.testing.assert_close(swapped.state_dict(), theirs.state_dict())
    torch.testing.assert_close(swapped.eval()(IMAGES), theirs.eval()(IMAGES))


def test_compiled_averages_over_batches():
    """Their momentum is a tensor, which no graph reads."""
    torch._dynamo.reset()
    model = ours.BatchNorm1d(4, momentum=None)
    alone = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for seed in range(3):
        x = random(5, 4, dtype=torch.float32, grad=False, seed=seed)
        torch.testing.assert_close(compiled(x), alone(x))
    torch.testing.assert_close(model.state_dict(), alone.state_dict())


def test_modules_of_sums():
    """As the addition and the module of one argument."""
    for whole, part in ((ours.AddLayerNorm, ours.LayerNorm), (ours.AddRMSNorm, ours.RMSNorm)):
        norm, alone = (kind(6, scale_offset=1.0).double() for kind in (whole, part))
        torch.nn.init.normal_(norm.weight)
        alone.load_state_dict(norm.state_dict())
        y, s = norm(X, R)
        expected = X + R
        torch.testing.assert_close((y, s), (alone(expected), expected))
        loss = y.square().sum() + (s**3).sum()
        wanted = alone(expected).square().sum() + (expected**3).sum()
        torch.testing.assert_close(
            torch.autograd.grad(loss, (X, R, norm.weight)),
            torch.autograd.grad(wanted, (X, R, alone.weight)),
        )
        y, s = norm(X, R)
        (only,) = torch.autograd.grad(s.sum(), R)
        assert only.eq(1).all()


def test_offset_weights_start_as_identity():
    torch.testing.assert_close(
        ours.RMSNorm(6, scale_offset=1.0, dtype=torch.float64)(X),
        torch.nn.RMSNorm(6, dtype=torch.float64)(X),
    )
    norm = ours.LayerNorm(6, scale_offset=1.0)
    assert norm.weight.eq(0).all()
    assert "scale_offset=1.0" in repr(norm)
    assert "scale_offset" not in repr(ours.LayerNorm(6))
    gated = ours.GatedRMSNorm(6, activation="sigmoid", norm_before_gate=False)
    assert repr(gated).endswith("affine=True, activation='sigmoid', norm_before_gate=False)")
    assert list(norm.state_dict()) == list(torch.nn.LayerNorm(6).state_dict())
    with pytest.raises(ValueError, match="scale_offset"):
        ours.RMSNorm(6, elementwise_affine=False, scale_offset=1.0)


def test_modules_are_saved_and_loaded():
    theirs, swapped = _network(), ours.replace_norms(_network())
    swapped.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(swapped.state_dict())
    file = io.BytesIO()
    torch.save(swapped, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert [type(m) for m in again.modules()] == [type(m) for m in swapped.modules()]


# Bad input


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ours.layer_norm(X, ()), "normalized_shape"),
        (lambda: ours.rms_norm(X, (7, 5, 6)), "normalized_shape"),
        (lambda: ours.layer_norm(X, (6,), eps=-1.0), "eps"),
        (lambda: ours.layer_norm(X, (6,), None, B, scale_offset=1.0), "scale_offset"),
        (lambda: ours.rms_norm(X, (6,), scale_offset=1.0), "scale_offset"),
        (lambda: ours.add_rms_norm(X, R[:2], (6,)), "residual has shape"),
        (lambda: ours.add_layer_norm(X, R.float(), (6,)), "float32"),
        (lambda: ours.group_norm(X[0, 0], 1), "input has shape"),
        (lambda: ours.group_norm(IMAGES, 2, W), "weight has shape"),
        (lambda: ours.instance_norm(IMAGES[:, :, :1, :1]), "more than one element"),
        (lambda: ours.batch_norm(IMAGES, MEAN, None, training=True), "running_var is None"),
        (lambda: ours.batch_norm(IMAGES, MEAN, VAR, training=True, momentum=2), "momentum"),
        (lambda: ours.batch_norm(X[0, 0], None, None, training=True), "input has shape"),
        (lambda: ours.batch_norm(X[:1, :, 0], None, None, training=True), "one element"),
        (lambda: ours.layer_norm(X.to("meta").to_sparse(), (6,)), "sparse|layout"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
        call()


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm", "BatchNorm1d", "GroupNorm"])
def test_parameters_without_memory_are_refused(kind):
    """Not taken for a tensor of a tracer, whose results nobody reads."""
    norm = getattr(ours, kind)(*((2, 4) if kind == "GroupNorm" else (4,)), device="meta")
    with pytest.raises(ValueError, match="device"):
        norm(torch.ones(3, 4))


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16], ids=str)
def test_an_average_over_batches_is_exact_but_for_roundings(default):
    own = ours.BatchNorm1d(3, momentum=None, dtype=torch.float64)
    batches = [random(8, 3, grad=False, seed=k) + 100 * (k + 1) for k in range(3)]
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        for x in batches:
            own(x)
    finally:
        torch.set_default_dtype(before)
    mean = torch.stack(batches).mean((0, 1))
    torch.testing.assert_close(own.running_mean, mean, rtol=1e-14, atol=0)


def test_a_momentum_on_the_device_of_0_or_1_leaves_the_rest_out():
    mean, var = torch.full((2,), torch.nan), torch.full((2,), torch.nan)
    x = torch.tensor([[1.0, 10.0], [3.0, 10.0]])
    ours.batch_norm(x, mean, var, training=True, momentum=torch.tensor(1.0))
    assert mean.tolist() == [2, 10]
    x[0] = torch.inf
    ours.batch_norm(x, mean, var, training=True, momentum=torch.tensor(0.0))
    assert mean.tolist() == [2, 10]


def test_vmap_over_nothing():
    x = torch.empty(0, 3, 4)
    assert torch.vmap(lambda row: ours.layer_norm(row, (4,)))(x).shape == x.shape
