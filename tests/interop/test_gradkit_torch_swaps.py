"""Swapping a model's norms and swapping them back, for tracers and exporters too."""

import copy
import io
import pickle
import warnings

import pytest

import gradkit

from .libraries import framework
from .torch_norms import plain as random

torch = framework("torch")
ours = framework("gradkit.torch")
export = framework("gradkit.torch.export")
norms = framework("gradkit.torch.norms")
nn = torch.nn


def test_restored_modules_are_what_they_were():
    """The same objects with the same state, and the same attributes as if never swapped."""
    kinds = nn.LayerNorm, nn.RMSNorm, nn.BatchNorm1d, nn.InstanceNorm2d
    theirs = nn.ModuleList(
        [
            *(kind(4, eps=1e-3) for kind in kinds),
            nn.LayerNorm(4, elementwise_affine=False),
            nn.BatchNorm2d(4, momentum=None, affine=False),
            nn.GroupNorm(2, 4).eval(),
        ]
    )
    theirs[2](random(5, 4))  # moves its statistics
    before = [(type(m), m, dict(vars(m))) for m in theirs]
    parts = [*theirs.parameters(), *theirs.buffers()]
    keys = list(theirs.state_dict())
    ours.replace_norms(theirs)
    assert all(type(m) is not before[k][0] for k, m in enumerate(theirs))
    assert ours.restore_norms(theirs) is theirs
    for module, (kind, same, attributes) in zip(theirs, before, strict=True):
        assert module is same
        assert type(module) is kind
        assert vars(module) == attributes
    assert list(theirs.state_dict()) == keys
    now = [*theirs.parameters(), *theirs.buffers()]
    assert all(a is b for a, b in zip(now, parts, strict=True))


def test_modules_made_here_are_restored_too():
    """Those that PyTorch has none of stay; one with an offset is named, and nothing is written."""
    model = nn.Sequential(
        *(ours.LayerNorm(4), ours.InvertibleLayerNorm(4), ours.AddRMSNorm(4)),
        *(ours.RMSNorm(4), ours.InvertibleRMSNorm(4)),
    )
    model[3].scale_offset = 1.0
    before = list(map(type, model))
    with pytest.raises(ValueError, match=r"model\.3 has scale_offset 1\.0.*weight"):
        ours.restore_norms(model)
    assert list(map(type, model)) == before
    with pytest.raises(ValueError, match=r"^model has scale_offset"):
        ours.restore_norms(model[3])
    model[3].scale_offset = 0.0
    assert list(map(type, ours.restore_norms(model))) == [
        *(nn.LayerNorm, nn.LayerNorm, ours.AddRMSNorm, nn.RMSNorm, nn.RMSNorm),
    ]
    assert vars(model[0]).keys() == vars(nn.LayerNorm(4)).keys()


def test_symbolic_traces_have_the_norms_of_pytorchs_as_leaves():
    """``torch.fx`` records swapped modules as it does PyTorch's; hooks are left to the run."""
    theirs = nn.Sequential(
        *(nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4), nn.InstanceNorm2d(4)),
        *(nn.GroupNorm(2, 4), nn.Flatten(2), nn.LayerNorm(9)),
        nn.RMSNorm(9),
    )
    swapped = ours.replace_norms(copy.deepcopy(theirs))
    graphs = [torch.fx.symbolic_trace(model).graph for model in (theirs, swapped)]
    nodes = [[(n.op, n.target, n.name) for n in graph.nodes] for graph in graphs]
    assert nodes[0] == nodes[1]
    x = random(3, 2, 3, 3)
    traced = torch.fx.symbolic_trace(copy.deepcopy(swapped))
    assert torch.equal(traced(x), swapped(x))


def test_symbolic_traces_of_sums():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.last = ours.AddRMSNorm(4), ours.InvertibleLayerNorm(4)

        def forward(self, x, residual):
            y, s = self.norm(x, residual=residual)
            return self.last(y) + s

    block = Block()
    x, residual = (random(3, 4, seed=k) for k in range(2))
    assert torch.equal(torch.fx.symbolic_trace(block)(x, residual), block(x, residual))


def test_symbolic_traces_of_functions_have_calls_of_them():
    """As of PyTorch's own, with arguments of all kinds; nothing else of gradkit is recorded."""

    def program(x, weight, mean):
        y, s = ours.add_rms_norm(x, x, (4,), weight, scale_offset=1.0)
        y = ours.layer_norm(y, (4,), weight=weight, bias=weight) + ours.rms_norm(s, (4,))
        y = ours.group_norm(ours.gated_rms_norm(y, s, (4,)), 2)
        y = ours.instance_norm(ours.batch_norm(y, mean, mean + 1, training=False).mT)
        return ours.invertible_rms_norm(ours.invertible_layer_norm(y, (4,)), (4,)) + y

    traced = torch.fx.symbolic_trace(program)
    called = {node.target for node in traced.graph.nodes}
    assert called >= {getattr(ours, name) for name in norms.__all__ if name != "add_layer_norm"}
    again = pickle.loads(pickle.dumps(traced))
    x, weight, mean = random(3, 4, 4), random(4), random(4, seed=1).abs()
    assert torch.equal(again(x, weight, mean), program(x, weight, mean))


def test_what_knows_pytorchs_norms_alone_is_told_of_restore_norms():
    """The exporter in front of ``dynamo``; fusing of modules, which PyTorch refuses by itself."""
    model, x = nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4)).eval(), random(3, 4, 5)
    expected = model(x)
    ours.replace_norms(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(NotImplementedError, match=r"restore_norms.*decompositions\(\)"):
            torch.onnx.export(model, (x,), io.BytesIO(), dynamo=False)
        with pytest.raises(AssertionError, match=r"gradkit\.torch\.modules\.BatchNorm1d"):
            torch.ao.quantization.fuse_modules(model, [["0", "1"]])
        torch.testing.assert_close(model(x), expected)
        ours.restore_norms(model)
        torch.onnx.export(model, (x,), io.BytesIO(), dynamo=False)
        fused = torch.ao.quantization.fuse_modules(model, [["0", "1"]])
    torch.testing.assert_close(fused(x), expected)


def test_restored_models_are_exported():
    """``torch.jit.script`` and ``torch.onnx.export`` refuse ours and take PyTorch's."""
    theirs = nn.Sequential(nn.BatchNorm1d(4), nn.LayerNorm(4), nn.RMSNorm(4)).eval()
    model, x = ours.replace_norms(theirs), random(3, 4)
    with pytest.raises(RuntimeError):
        torch.jit.script(model)
    with pytest.raises(RuntimeError):
        _to_onnx(model, x)
    copied = ours.restore_norms(copy.deepcopy(model))
    torch.testing.assert_close(torch.jit.script(copied)(x), model(x))
    operators = [node.op_type for node in _to_onnx(copied, x).graph.node]
    assert "LayerNormalization" in operators
    assert type(model[1]) is ours.LayerNorm


def _to_onnx(model, x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter's own
        return torch.onnx.export(model, (x,), dynamo=True, verbose=False).model_proto


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused(layout):
    """By the name of the argument, and with what to pass."""
    parts = [torch.ones(2, 4), torch.ones(3, 4)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch: a prototype
        nested = torch.nested.nested_tensor(parts, layout=layout)
    calls = {
        "x": lambda: gradkit.layer_norm(nested),
        "grads": lambda: gradkit.grad_norm(nested),
        "residual": lambda: ours.add_rms_norm(torch.ones(2, 4), nested, (4,)),
    }
    functions = (
        *(lambda: ours.layer_norm(nested, (4,)), lambda: ours.rms_norm(nested, (4,))),
        *(lambda: ours.group_norm(nested, 2), lambda: ours.instance_norm(nested)),
        lambda: ours.batch_norm(nested, None, None, training=True),
    )
    for name, call in [*calls.items(), *(("input", call) for call in functions)]:
        with pytest.raises(TypeError, match=rf"^{name} is a nested tensor; pass its \.values\(\)"):
            call()
    if layout is torch.jagged:
        assert ours.layer_norm(nested.values(), (4,)).shape == (5, 4)


class Blocks(nn.Module):
    """Every norm that a swap makes and those that only gradkit has, with options."""

    def __init__(self):
        super().__init__()
        self.channels = nn.ModuleList(
            [
                *(ours.BatchNorm2d(4), ours.GroupNorm(2, 4), ours.InstanceNorm2d(4, affine=True)),
                *(ours.InstanceNorm2d(4, track_running_stats=True), ours.GroupNorm(1, 4)),
            ]
        )
        self.rows = nn.ModuleList(
            [
                *(ours.LayerNorm(6, scale_offset=1.0), ours.RMSNorm(6, eps=1e-6)),
                *(ours.InvertibleLayerNorm(6), ours.LayerNorm((3, 6), bias=False)),
                ours.InvertibleRMSNorm(6, eps=1e-6),
                *(ours.LayerNorm(6, elementwise_affine=False), ours.RMSNorm(6, scale_offset=0.5)),
            ]
        )
        self.sums = nn.ModuleList([ours.AddRMSNorm(6, scale_offset=1.0), ours.AddLayerNorm(6)])
        self.gated = nn.ModuleList(
            [
                ours.GatedRMSNorm(6, eps=1e-6),
                ours.GatedRMSNorm(6, activation="sigmoid", norm_before_gate=False),
            ]
        )
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for part in [*self.parameters(), *self.buffers()]:
                if part.is_floating_point():
                    part.uniform_(0.5, 1.5, generator=generator)

    def forward(self, x):
        for norm in self.channels:
            x = norm(x)
        for norm in self.rows:
            x = norm(x) + x
        residual = x.flip(0)
        for norm in self.sums:
            x, residual = norm(x, residual)
        for norm in self.gated:
            x = norm(x, residual)
        return x + residual


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # PyTorch's exporter
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_exported_programs_run_with_pytorchs_operators(dtype, near):
    """All ten norms, with the results of ours."""
    model, x = Blocks().eval().to(dtype), random(2, 4, 3, 6).to(dtype)
    program = torch.export.export(model, (x,))
    assert {node.target for node in program.graph.nodes} >= ours.decompositions().keys()
    program = program.run_decompositions(ours.decompositions())
    assert "gradkit" not in str(program.graph)
    torch.testing.assert_close(program.module()(x), model(x), rtol=near, atol=near)


def test_every_operator_of_a_forward_pass_but_batch_norm_in_training_has_a_decomposition():
    names = {str(name) for name in torch._C._dispatch_get_all_op_names() if "gradkit::" in name}
    left = {n for n in names if not n.endswith("_grad")} - {"gradkit::batch_norm"}
    left -= {n for n in names if "clip" in n or "total_norm" in n}
    assert {overload._schema.name for overload in ours.decompositions()} == left


def test_models_with_norms_of_gradkit_alone_become_onnx():
    """And a runtime of ONNX, the package's reference, has gradkit's results."""
    from onnx.reference import ReferenceEvaluator

    model, x = Blocks().eval(), random(2, 4, 3, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter's own
        program = torch.export.export(model, (x,)).run_decompositions(ours.decompositions())
        proto = torch.onnx.export(program, verbose=False).model_proto
    assert {node.domain for node in proto.graph.node} <= {"", "pkg.onnxscript.torch_lib.common"}
    (found,) = ReferenceEvaluator(proto).run(None, {proto.graph.input[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore")  # the compiler's own, of what is new in it
def test_inductor_fuses_the_norms_if_it_is_asked_to():
    """No operator is left, under a checkpoint either; results are those of the eager model.

    Of a norm of each kind: ``test_gradkit_torch_ways.py`` has all decompositions.
    """
    from torch._inductor.utils import run_and_get_code
    from torch.utils.checkpoint import checkpoint

    torch._dynamo.reset()
    model, x = Blocks(), random(2, 4, 3, 6).requires_grad_()
    for several, most in ((model.channels, 2), (model.rows, 3), (model.sums, 1), (model.gated, 1)):
        del several[most:]
    leaves = [x, *model.parameters()]

    def passes(function):
        y = function(x)
        return [y, *torch.autograd.grad(y.square().mean(), leaves)]

    again = copy.deepcopy(model)
    expected = passes(model)
    state = {key: t.clone() for key, t in model.state_dict().items()}
    model.load_state_dict(again.state_dict())
    backend = ours.decomposed_inductor
    compiled = torch.compile(
        lambda x: checkpoint(model, x, use_reentrant=False), backend=backend, fullgraph=True
    )
    found, code = run_and_get_code(lambda: passes(compiled))
    assert len(code) == 2
    assert "gradkit" not in "".join(code)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(dict(model.state_dict()), state)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_inductor_gets_the_options_of_a_compilation():
    """The operators stay without a request, and a mode that there is not is refused."""
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    x = random(3, 4)
    _, code = run_and_get_code(torch.compile(ours.LayerNorm(4)), x)
    assert "gradkit.layer_norm" in "".join(code)
    backend = ours.decomposed_inductor
    for wrong in ({"mode": "fast"}, {"options": {"no such option": 1}}):
        torch._dynamo.reset()
        with pytest.raises(Exception, match=r"fast|no such option"):
            torch.compile(ours.LayerNorm(4), backend=backend, **wrong)(x)


CHANNELS = {  # each norm's vectors and numbers
    "group_norm": (2, (2, 1e-5)),
    "batch_norm": (4, (0.25, 1e-5)),
    "batch_norm_inference": (4, (1e-5,)),
}


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 0, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CHANNELS)
def test_decompositions_with_channels_last(name, dtype, order):
    """With the values, dtypes and strides of the operator, whose arguments are not written."""
    count, numbers = CHANNELS[name]
    x = random(2, 6, 4).to(dtype).permute(order)
    vectors = [random(x.shape[-1], seed=k).abs() + 0.5 for k in range(count)]
    before = [vector.clone() for vector in vectors]
    operator = getattr(torch.ops.gradkit, name).default
    args = x, *vectors, *numbers, -1
    found, expected = export.replacements()[operator](*args), operator(*args)
    torch.testing.assert_close(vectors, before, rtol=0, atol=0)
    if name != "batch_norm_inference":  # the two statistics after y are of no use
        found, expected = ((result[0], *result[3:]) for result in (found, expected))
    torch.testing.assert_close(found, expected, check_stride=True)


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"])
def test_decompositions_of_transposed_rows(name):
    operator = getattr(torch.ops.gradkit, name).default
    rows = [random(4, 3, seed=k).T for k in range(2)][: 1 + name.startswith("add")]
    vectors = [random(4, seed=k) for k in range(1 + name.endswith("layer_norm"))]
    args = *rows, *vectors, -1, 1e-5, 0.5
    found, expected = (f(*args)[: len(rows)] for f in (export.replacements()[operator], operator))
    torch.testing.assert_close(found, expected, check_stride=True)
