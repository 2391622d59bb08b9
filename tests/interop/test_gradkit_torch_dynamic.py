"""Programs for batches of any size: one export, and one graph, for each norm."""

import pytest

from .libraries import framework
from .torch_norms import CASES, B, R, W, of_tensors, random

torch = framework("torch")
ours = framework("gradkit.torch")
dynamo_utils = framework("torch._dynamo.utils")

WIDTH = 6
SIZES = (WIDTH, 5, 2, 1, 0)  # of batches, after one of 3
W, B, ROW = W.detach(), B.detach(), (WIDTH,)


def called(name):
    """A case of the table, of any batch."""
    program, (_, *rest) = of_tensors(name)
    residual = any(each is R for each in CASES[name][1])
    rest = [each.detach() for each in rest[residual:]]
    return lambda x: program(x, *([x.cos()] if residual else []), *rest)


def sampled(x):
    """A scale and a bias for each sample."""
    return x[:, :1].sin(), x[:, :1].cos()


USUAL = [n for n in CASES if n.startswith("layer") or n.endswith(("_norm", "neither", "tracking"))]
# Beside the table's, those whose parameters are made of the batch.
PROGRAMS = {
    "layer_norm, per sample": lambda x: ours.layer_norm(x, ROW, *sampled(x), scale_offset=1.0),
    "layer_norm, per row": lambda x: ours.layer_norm(x, ROW, x.sin(), x.cos()),
    "layer_norm, one sample": lambda x: ours.layer_norm(x, ROW, W[None, None]),
    "layer_norm, two dimensions": lambda x: ours.layer_norm(x, x.shape[1:], x[0] * 0 + 1),
    "add_layer_norm, per sample": lambda x: ours.add_layer_norm(x, x.cos(), ROW, *sampled(x)),
    "rms_norm, per sample": lambda x: ours.rms_norm(x, ROW, sampled(x)[0], scale_offset=1.0),
    **{name: called(name) for name in USUAL},
}
# Batch norm in training has no decomposition for what is exported.
DECOMPOSED = [n for n in PROGRAMS if not n.startswith("batch_norm") and "tracking" not in n]


class Model(torch.nn.Module):
    def __init__(self, name):
        super().__init__()
        self.norm, self.name = PROGRAMS[name], name

    def forward(self, x):
        return self.norm(x)

    def batch(self, size):
        given = CASES[self.name][1][0] if self.name in CASES else torch.empty(1, 4, WIDTH)
        return random(size, *given.shape[1:], grad=False, seed=size)


def sizes_of(name):
    """A program for any number of samples cannot take the first, if there is none."""
    return SIZES[:-1] if "two dimensions" in name else SIZES


def is_checked(program, name):
    model = Model(name)
    for x in map(model.batch, sizes_of(name)):
        torch.testing.assert_close(program.module()(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # PyTorch's exporter
@pytest.mark.parametrize("name", PROGRAMS)
def test_exports_for_batches_of_any_size(name):
    """Also for no sample, for one, and for as many as there are columns."""
    dim = torch.export.Dim
    named, automatic = (dim("batch", min=0),), (dim.AUTO, dim.AUTO)
    for sizes in (named, automatic) if "," not in name else (automatic,):
        model, given = Model(name), dict(enumerate(sizes))
        program = torch.export.export(model, (model.batch(3),), dynamic_shapes=(given,))
        is_checked(program, name)
        if name in DECOMPOSED:
            program = program.run_decompositions(ours.decompositions())
            assert "gradkit" not in str(program.graph)
            is_checked(program, name)


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_graph_for_batches_of_any_size(name):
    """Forward and backward; with ``dynamic=True``, and once a second size has been seen."""
    for dynamic, graphs in ((True, 1), (None, 2))[: 2 if "," not in name else 1]:
        torch._dynamo.reset()
        dynamo_utils.counters.clear()
        model = Model(name)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)
        for x in map(model.batch, (9, 7, WIDTH, 4, 2)):
            for found, expected in zip(passes(compiled, x), passes(model, x), strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert dynamo_utils.counters["stats"]["unique_graphs"] == graphs


def passes(norm, x):
    x = x.clone().requires_grad_()
    found = norm(x)
    found = found if isinstance(found, tuple) else (found,)
    return *found, *torch.autograd.grad(sum(y.pow(3).sum() for y in found), x)
