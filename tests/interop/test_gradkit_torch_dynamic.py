"""Programs for batches of any size: one export, and one graph, for each norm."""

import pytest

from .libraries import framework

torch = framework("torch")
ours = framework("gradkit.torch")
dynamo_utils = framework("torch._dynamo.utils")

WIDTH = 8
SIZES = (WIDTH, 5, 2, 1, 0)  # of batches, after one of 3


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


W, B = (random(WIDTH, seed=seed).abs() + 0.5 for seed in (1, 2))
MODULATED = {"scale_offset": 1.0}
ROW = (WIDTH,)
CASES = {
    "layer_norm": lambda x: ours.layer_norm(x, ROW, W, B),
    "layer_norm, weight": lambda x: ours.layer_norm(x, ROW, W),
    "layer_norm, bias": lambda x: ours.layer_norm(x, ROW, None, B),
    "layer_norm, neither": lambda x: ours.layer_norm(x, ROW),
    "layer_norm, per sample": lambda x: ours.layer_norm(x, ROW, *sampled(x), **MODULATED),
    "layer_norm, per row": lambda x: ours.layer_norm(x, ROW, x.sin(), x.cos()),
    "layer_norm, one sample": lambda x: ours.layer_norm(x, ROW, W[None, None]),
    "layer_norm, two dimensions": lambda x: ours.layer_norm(x, x.shape[1:], x[0] * 0 + 1),
    "invertible_layer_norm": lambda x: ours.invertible_layer_norm(x, ROW, W, B),
    "add_layer_norm": lambda x: ours.add_layer_norm(x, x.cos(), ROW, W, B),
    "add_layer_norm, per sample": lambda x: ours.add_layer_norm(x, x.cos(), ROW, *sampled(x)),
    "rms_norm": lambda x: ours.rms_norm(x, ROW, W),
    "rms_norm, neither": lambda x: ours.rms_norm(x, ROW),
    "rms_norm, per sample": lambda x: ours.rms_norm(x, ROW, sampled(x)[0], **MODULATED),
    "invertible_rms_norm": lambda x: ours.invertible_rms_norm(x, ROW, W),
    "add_rms_norm": lambda x: ours.add_rms_norm(x, x.cos(), ROW, W),
    "gated_rms_norm": lambda x: ours.gated_rms_norm(x, x.cos(), ROW, W, activation="swish"),
    "group_norm": lambda x: ours.group_norm(x.mT, 2, W, B),
    "group_norm, neither": lambda x: ours.group_norm(x, 1),
    "instance_norm": lambda x: ours.instance_norm(x.mT, None, None, W, B),
    "instance_norm, tracking": lambda x: ours.instance_norm(x.mT, W.clone(), W.clone(), W, B),
    "batch_norm": lambda x: ours.batch_norm(x.mT, W.clone(), W.clone(), W, B, True),
    "batch_norm, neither": lambda x: ours.batch_norm(x.mT, None, None, training=True),
    "batch_norm_inference": lambda x: ours.batch_norm(x.mT, W, W, W, B),
}
# Batch norm in training has no decomposition for what is exported.
DECOMPOSED = [
    name for name in CASES if name != "instance_norm, tracking" and "batch_norm" not in name
] + ["batch_norm_inference"]


def sampled(x):
    """A scale and a bias for each sample."""
    return x[:, :1].sin(), x[:, :1].cos()


class Model(torch.nn.Module):
    def __init__(self, name):
        super().__init__()
        self.norm = CASES[name]

    def forward(self, x):
        return self.norm(x)


def batch(size):
    return random(size, 4, WIDTH, seed=size)


def sizes_of(name):
    """A program for any number of samples cannot take the first, if there is none."""
    return SIZES[:-1] if "two dimensions" in name else SIZES


def is_checked(program, name):
    for size in sizes_of(name):
        x = batch(size)
        torch.testing.assert_close(program.module()(x), Model(name)(x), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # PyTorch's exporter
@pytest.mark.parametrize("name", CASES)
def test_exports_for_batches_of_any_size(name):
    """Also for no sample, for one, and for as many as there are columns."""
    dim = torch.export.Dim
    named, automatic = (dim("batch", min=0),), (dim.AUTO, dim.AUTO)
    for sizes in (named, automatic) if "," not in name else (automatic,):
        given = dict(enumerate(sizes))
        program = torch.export.export(Model(name), (batch(3),), dynamic_shapes=(given,))
        is_checked(program, name)
        if name in DECOMPOSED:
            program = program.run_decompositions(ours.decompositions())
            assert "gradkit" not in str(program.graph)
            is_checked(program, name)


@pytest.mark.parametrize("name", CASES)
def test_one_graph_for_batches_of_any_size(name):
    """Forward and backward; with ``dynamic=True``, and once a second size has been seen."""
    for dynamic, graphs in ((True, 1), (None, 2))[: 2 if "," not in name else 1]:
        torch._dynamo.reset()
        dynamo_utils.counters.clear()
        model = Model(name)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)
        for size in (3, 6, WIDTH, 4, 2):
            for found, expected in zip(passes(compiled, size), passes(model, size), strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert dynamo_utils.counters["stats"]["unique_graphs"] == graphs


def passes(norm, size):
    x = batch(size).requires_grad_()
    found = norm(x)
    found = found if isinstance(found, tuple) else (found,)
    return *found, *torch.autograd.grad(sum(y.pow(3).sum() for y in found), x)
