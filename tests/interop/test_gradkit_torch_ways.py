"""Every argument of every norm through every way in: eager, compiled, decomposed, exported."""

import pytest

from .libraries import framework
from .torch_norms import FIRST, FIXED, NORMS, calls_of, leaf, names_of

torch = framework("torch")
ours = framework("gradkit.torch")


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
            yield from filter(torch.is_tensor, map(leaf, given.keys(), given.values()))

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
