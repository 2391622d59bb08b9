"""Every argument of every norm through every way in: eager, compiled, decomposed, exported."""

import pytest

from .libraries import framework

torch = framework("torch")
ours = framework("gradkit.torch")
export = framework("gradkit.torch.export")
norms = framework("gradkit.torch._operators")

NORMS = {overload._schema.name.partition("::")[2]: overload for overload in export.replacements()}
PER_SAMPLE = ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm")


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def vector(seed, *shape):
    return random(*(shape or (6,)), seed=seed).abs() + 0.5


# The first call of each norm, by the names of arguments. Of channels there are as many as columns.
FIRST = {
    "x": random(2, 6, 3, 6),
    "residual": random(2, 6, 3, 6, seed=1),
    "gate": random(2, 6, 3, 6, seed=2),
    "scale": vector(3),
    "bias": vector(4),
    "running_mean": vector(5),
    "running_var": vector(6),
    "mean": vector(7),
    "var": vector(8),
    "axis": -1,
    "eps": 1e-5,
    "scale_offset": 0.0,
    "activation": "silu",
    "norm_before_gate": True,
    "num_groups": 2,
    "momentum": 0.25,
    "channel_axis": 1,
}
# What the others have in its place.
OTHERS = [
    {"x": random(6, 3, 6, 2).permute(3, 2, 1, 0)},  # channels last
    {"x": random(6, 3, 6, 2).bfloat16().permute(3, 0, 1, 2)},
    {"residual": random(2, 6, 6, 3, seed=1).mT},
    {"gate": random(2, 6, 3, 12, seed=2)[..., ::2]},
    {"bias": None},
    {"scale": None, "bias": None},
    {"scale": vector(3, 2, 1, 1, 6), "bias": vector(4, 2, 1, 1, 6), "scale_offset": 1.0},
    {"scale": vector(3, 2, 6, 1, 6), "bias": None},
    {"axis": 2, "scale": vector(3, 3, 6), "bias": vector(4, 3, 6)},
    {"eps": 0.5},
    {"eps": 1},
    {"scale_offset": 1.0},
    {"activation": "swish"},
    {"activation": "swish", "norm_before_gate": False},
    {"activation": "sigmoid"},
    {"norm_before_gate": False, "scale_offset": 1.0},
    {"num_groups": 6},
    {"momentum": 0.0},
    {"momentum": 1},
    {"running_mean": None, "running_var": None, "momentum": 0.1},
    {"running_mean": vector(5).double(), "running_var": vector(6).double()},
    {"mean": vector(7) * 3},
    {"var": vector(8) * 3},
    {"channel_axis": -1},
    {"channel_axis": 3, "x": random(6, 3, 6, 2).permute(3, 2, 1, 0)},
]


FIXED = ("invertible_layer_norm", "scale_offset")  # which has no gradient
DIFFERENTIABLE = {"x", "residual", "gate", "scale", "bias"}


def names_of(name):
    return [argument.name for argument in NORMS[name]._schema.arguments]


def calls_of(name):
    """The arguments of each call of a norm, by name; all data have the dtype of x."""
    names = {*names_of(name)}
    for other in ({}, *OTHERS):
        sampled = other.get("scale") is not None and other["scale"].ndim == 4
        if (sampled and name not in PER_SAMPLE) or (other and not other.keys() & names):
            continue
        if not other.keys() <= names | {"scale", "bias", "scale_offset"}:
            continue
        if any((name, key) == FIXED for key in other):
            continue
        given = FIRST | other
        given |= {data: given[data].to(given["x"].dtype) for data in ("residual", "gate")}
        yield {key: given[key] for key in names_of(name)}


@pytest.mark.parametrize("name", NORMS)
def test_every_argument_has_more_than_one_value_here(name):
    for key in names_of(name):
        values = [given[key] for given in calls_of(name)]
        assert (len({*map(id, values)}) > 1) != ((name, key) == FIXED), key


def test_an_offset_without_a_gradient_is_refused():
    given = FIRST | {"scale_offset": 1.0, "x": FIRST["x"].clone().requires_grad_()}
    with pytest.raises(NotImplementedError, match=r"pass scale \+ scale_offset as scale"):
        NORMS[FIXED[0]](*(given[name] for name in names_of(FIXED[0])))


class Calls(torch.nn.Module):
    """All calls of one norm, whose tensors are the inputs."""

    def __init__(self, name):
        super().__init__()
        self.operator, self.calls = NORMS[name], list(calls_of(name))
        found = len(NORMS[name]._schema.returns)
        used = {"batch_norm": (0, found - 2, found - 1), "add_": (0, 1)}
        self.used = next((places for key, places in used.items() if name.startswith(key)), (0,))
        self.used = (0,) if name == "batch_norm_inference" else self.used

    def tensors(self):
        """New ones, with their strides."""
        for given in self.calls:
            for key, value in given.items():
                if isinstance(value, torch.Tensor):
                    yield value.clone().requires_grad_(key in DIFFERENTIABLE)

    def forward(self, *tensors):
        given, found = iter(tensors), []
        for call in self.calls:
            made = self.operator(
                *(next(given) if isinstance(a, torch.Tensor) else a for a in call.values())
            )
            made = (made,) if isinstance(made, torch.Tensor) else made
            found += [made[k] for k in self.used]
        return found


def passes(run, calls):
    """All results, and gradients."""
    tensors = [*calls.tensors()]
    found = run(*tensors)
    loss = sum((y.float() + 1).cos().sum() for y in found if y.requires_grad)
    return found, torch.autograd.grad(loss, [t for t in tensors if t.requires_grad])


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("way", ["aot_eager", "decomposed_inductor"])
@pytest.mark.parametrize("name", NORMS)
def test_compiled_norms_are_those_of_a_call(monkeypatch, name, way):
    """Inductor itself would take minutes; ``test_gradkit_torch_swaps.py`` has it."""
    from torch import _inductor

    torch._dynamo.reset()
    aot_eager = torch._dynamo.lookup_backend("aot_eager")
    monkeypatch.setattr(_inductor, "compile", lambda graph, given, **_: aot_eager(graph, given))
    calls = Calls(name)
    backend = ours.decomposed_inductor if way == "decomposed_inductor" else way
    compiled = torch.compile(calls, backend=backend, fullgraph=True)
    for found, expected in zip(passes(compiled, calls), passes(calls, calls), strict=True):
        same(found, expected)


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # PyTorch's exporter
@pytest.mark.parametrize("name", [name for name in NORMS if name != "batch_norm"])
def test_exported_norms_are_those_of_a_call(name):
    calls = Calls(name)
    tensors = [*calls.tensors()]
    program = torch.export.export(calls, (*tensors,))
    expected = calls(*tensors)
    same(program.module()(*tensors), expected)
    program = program.run_decompositions(ours.decompositions())
    assert "gradkit" not in str(program.graph)
    same(program.module()(*tensors), expected)


def same(found, expected):
    """But for roundings: an invertible norm's gradient has those of its output, here of 16 bits."""
    assert len(found) == len(expected)
    for got, wanted in zip(found, expected, strict=True):
        near = 0.05 if wanted.dtype == torch.bfloat16 else 0.01
        atol = near * wanted.detach().abs().amax().item() if wanted.numel() else 0.0
        torch.testing.assert_close(got, wanted, rtol=0, atol=atol)
