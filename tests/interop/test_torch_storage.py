"""Tensors stay as they were: gradkit reads memory by address, so that storages can be resized.

``Tensor.numpy`` and ``torch.from_numpy`` leave storages of a fixed size, and ``fully_shard``
resizes those of parameters, others those of activations.
"""

import gc
import warnings
import weakref

import numpy as np
import pytest

import gradkit
from gradkit._arrays.torch import Torch

ours = pytest.importorskip("gradkit.torch")

DTYPES = ["float16", "bfloat16", "float32", "float64"]


@pytest.fixture(params=DTYPES)
def dtype(request, torch):
    return getattr(torch, request.param)


def resize(torch, *roots):
    """Make every storage longer, and count them."""
    tensors = [t for t in _tensors(torch, roots) if t.numel()]
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storage.resize_(storage.nbytes() + 64)
    return len(tensors)


def _tensors(torch, tree):
    if isinstance(tree, torch.Tensor):
        yield tree
        if tree.is_leaf and tree.grad is not None:
            yield tree.grad
    elif isinstance(tree, torch.nn.Module):
        yield from _tensors(torch, [*tree.parameters(), *tree.buffers()])
    elif isinstance(tree, dict):
        yield from _tensors(torch, list(tree.values()))
    elif isinstance(tree, (list, tuple)):
        for branch in tree:
            yield from _tensors(torch, branch)


# Functions of plain tensors: what they are given, and what they return, is a list


def _norm(torch, dtype):
    x, scale = torch.randn(3, 4, dtype=dtype), torch.nn.Parameter(torch.ones(4, dtype=dtype))
    y, mean, inv_std = gradkit.layer_norm(x, scale, torch.zeros_like(scale))
    return [x, scale, y, mean, inv_std, gradkit.layer_norm_grad(y, x, scale, mean, inv_std)]


def _norm_into(torch, dtype):
    x, out = torch.randn(4, 3, dtype=dtype).t(), torch.empty(3, 4, dtype=dtype)
    return [x, out, gradkit.rms_norm(x, out=(out, None))]


def _channels(torch, dtype):
    x = torch.randn(2, 3, 4, 5).to(dtype, memory_format=torch.channels_last)
    scale, bias, y = torch.ones(3), torch.zeros(3), torch.empty_like(x)
    if dtype == torch.float64:
        scale, bias = scale.double(), bias.double()
    return [x, scale, bias, gradkit.batch_norm(x, scale, bias), gradkit.group_norm(x, 3), y]


def _lists(torch, dtype):
    grads = {"a": torch.randn(3, dtype=dtype), "b": [torch.randn(5, 2, dtype=dtype).t()]}
    limit = torch.tensor(0.5, dtype=torch.float64)
    clipped, norm = gradkit.clip_by_global_norm(grads, limit)
    each = gradkit.per_tensor_norms(grads, flat=True)
    inside = gradkit.per_tensor_norms(grads)
    gradkit.clip_grad_norm(grads, limit, scale=torch.tensor(0.5, dtype=torch.float64))
    gradkit.clip_grads_with_norm(grads, norm, limit)
    return [grads, limit, clipped, norm, each, inside]


def _accumulation(torch, dtype):
    buffers, grads = [torch.zeros(3, dtype=dtype)], [torch.randn(3, dtype=dtype)]
    update = torch.tensor(True)
    gradkit.accumulate_grads(buffers, grads)
    gradkit.accumulate_grad(buffers[0], grads[0], do_update=update)
    return [buffers, grads, update, gradkit.zero_grad([torch.ones(2, dtype=dtype)])]


def _guard(torch, _):
    guard, norm = gradkit.SpikeGuard(), torch.tensor(3.0, dtype=torch.float64)
    return [norm, guard.update(norm), gradkit.spike_guard_init(norm)]


@pytest.mark.parametrize("road", [_norm, _norm_into, _channels, _lists, _accumulation, _guard])
def test_functions(torch, dtype, road):
    assert resize(torch, road(torch, dtype)) >= 3


# gradkit.torch


MODULES = {
    "LayerNorm": lambda nn: (nn.LayerNorm(6), (4, 6)),
    "RMSNorm": lambda nn: (nn.RMSNorm(6), (4, 6)),
    "GroupNorm": lambda nn: (nn.GroupNorm(3, 6), (4, 6)),
    "InstanceNorm1d": lambda nn: (nn.InstanceNorm1d(6, track_running_stats=True), (4, 6, 5)),
    "BatchNorm1d": lambda nn: (nn.BatchNorm1d(6), (4, 6)),
    "BatchNorm2d, averaged": lambda nn: (nn.BatchNorm2d(6, momentum=None), (4, 6, 2, 2)),
    "BatchNorm3d": lambda nn: (nn.BatchNorm3d(6), (4, 6, 2, 2, 2)),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MODULES)
def test_modules(torch, name, training):
    module, shape = MODULES[name](torch.nn)
    ours.replace_norms(module).train(training)
    x = torch.randn(shape, requires_grad=True)
    y = module(x)
    y.square().sum().backward()
    assert resize(torch, module, x, y) >= 4


@pytest.mark.parametrize("transformed", [False, True])
def test_autograd_functions(torch, transformed):
    x, residual = (torch.randn(4, 6, requires_grad=True) for _ in range(2))
    weight = torch.ones(6, requires_grad=True)

    def loss(x, residual, weight):
        y, s = ours.add_rms_norm(x, residual, (6,), weight)
        return (ours.invertible_layer_norm(y, (6,)) + s).sum()

    if transformed:
        gradients = torch.func.grad(loss, (0, 1, 2))(x, residual, weight)
    else:
        gradients = torch.autograd.grad(loss(x, residual, weight), (x, residual, weight))
    assert resize(torch, x, residual, weight, gradients) == 6


def test_clipping_of_parameters(torch):
    model = torch.nn.Linear(3, 2)
    model(torch.randn(4, 3)).sum().backward()
    accumulator, limit = ours.GradAccumulator(model), torch.tensor(0.1)
    accumulator.add()
    norms = [
        accumulator.finish(limit),
        ours.clip_grad_norm_(model.parameters(), limit),
        ours.get_total_norm([p.grad for p in model.parameters()]),
    ]
    ours.clip_grads_with_norm_(model.parameters(), limit, norms[2])
    ours.clip_grad_value_(model.parameters(), 0.01)
    assert resize(torch, model, norms, limit) == 8


# What a view is


@pytest.mark.parametrize(
    "shape",
    [
        *(lambda t: t, lambda t: t.t(), lambda t: t[1:, ::2], lambda t: t[1, 2], lambda t: t[:0]),
        *(lambda t: t[:1].expand(3, -1), lambda t: t.new_empty(0), lambda t: t[:, 1:2]),
    ],
)
def test_views_are_what_pytorch_would_make(torch, shape):
    adapter, tensor = Torch(), shape(torch.arange(20.0).view(4, 5))
    views = [adapter.view(tensor, write=True), *adapter.views([torch.ones(3), tensor], write=True)]
    expected = tensor.detach().numpy()
    for view in (views[0], views[2]):
        assert (view.shape, view.dtype) == (expected.shape, expected.dtype)
        np.testing.assert_array_equal(view, expected)
        assert view.flags.writeable
        if view.size:
            assert (view.ctypes.data, view.flags) == (expected.ctypes.data, expected.flags)
            used = [k for k, length in enumerate(view.shape) if length > 1]
            assert [view.strides[k] for k in used] == [expected.strides[k] for k in used]


@pytest.mark.parametrize("several", [False, True])
def test_a_view_keeps_its_tensor(torch, several):
    adapter, tensor = Torch(), torch.arange(1e5)
    alive = weakref.ref(tensor)
    view = adapter.views([tensor], write=True)[0] if several else adapter.view(tensor, write=True)
    part = view[5:7]
    del tensor, view
    gc.collect()
    assert alive() is not None
    assert part.tolist() == [5, 6]
    del part
    gc.collect()
    assert alive() is None


def test_results_are_where_the_inputs_are(torch):
    """Not on PyTorch's default device."""
    x = torch.tensor([[3.0, 4.0]])
    with torch.device("meta"):
        y, _ = gradkit.rms_norm(x, eps=0.0)
        norm = gradkit.grad_norm(x)
    np.testing.assert_allclose(y.tolist(), [[3 / 12.5**0.5, 4 / 12.5**0.5]], rtol=1e-6)
    assert norm.tolist() == 5


def test_modes_and_transforms_see_results_that_are_complete(torch):
    """None of them records, or holds back, what was new memory and is written since."""
    from torch.fx.experimental.proxy_tensor import make_fx

    x = torch.tensor([[3.0, 4.0]])

    def normalised(w):
        return w * gradkit.rms_norm(x, eps=0.0)[0]

    one = torch.ones(2)
    expected = normalised(one)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch: what is traced becomes a constant
        traced = torch.jit.trace(normalised, (one,))
    found = [traced(one), make_fx(normalised)(one)(one), torch.func.functionalize(normalised)(one)]
    found.append(torch.vmap(normalised)(torch.ones(1, 2))[0])
    assert all(torch.equal(each, expected) for each in found)
