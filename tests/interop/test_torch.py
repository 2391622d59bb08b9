"""Mistakes with PyTorch's tensors that nobody sees: each call is right, or refused in words."""

import gc

import numpy as np
import pytest

import gradkit
from gradkit import _host
from gradkit._arrays import torch as adapter

from .libraries import on_a_device

IN_PLACE = {
    "clip_grad_norm": lambda g: gradkit.clip_grad_norm(g, 1.0),
    "clip_grad_value": lambda g: gradkit.clip_grad_value(g, 1.0),
    "scale_grads": lambda g: gradkit.scale_grads(g, 0.5),
    "zero_grad": gradkit.zero_grad,
    "accumulate_grad": lambda g: gradkit.accumulate_grad(g, g.detach().clone()),
    "accumulate_grad_v2": lambda g: gradkit.accumulate_grad_v2(
        g, g.detach().clone(), overwrite=True
    ),
    "accumulate_grads": lambda g: gradkit.accumulate_grads([g], [g.detach().clone()]),
}
READING = {
    "grad_norm": gradkit.grad_norm,
    "clip_by_global_norm": lambda g: gradkit.clip_by_global_norm(g, 1.0),
    "accumulate_grad": lambda g: gradkit.accumulate_grad(g.detach().clone(), g),
    "accumulate_grads": lambda g: gradkit.accumulate_grads([g.detach().clone()], [g]),
}


@pytest.fixture(params=list(IN_PLACE))
def write(request):
    return IN_PLACE[request.param]


@pytest.fixture(params=list(READING))
def read(request):
    return READING[request.param]


@pytest.fixture(params=[False, True], ids=["tensor", "parameter"])
def parameter(request, torch):
    values = torch.tensor([3.0, 4.0])
    return torch.nn.Parameter(values) if request.param else values.requires_grad_()


# Tensors that require grad


def test_a_parameter_is_no_gradient_to_write(parameter, write):
    with pytest.raises(TypeError, match=r"requires grad.*grads_of"):
        write(parameter)
    assert parameter.tolist() == [3, 4]
    assert parameter._version == 0


def test_a_parameter_is_no_gradient_to_read(parameter, read):
    with pytest.raises(TypeError, match=r"requires grad.*\.detach\(\).*grads_of"):
        read(parameter)


def test_a_parameter_is_refused_under_no_grad_too(torch, parameter):
    with torch.no_grad(), pytest.raises(TypeError, match="grads_of"):
        gradkit.clip_grad_norm([parameter], 1.0)


def test_a_gradient_under_differentiation_is_refused(torch, read):
    x = torch.tensor([3.0, 4.0], requires_grad=True)
    (gradient,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    with pytest.raises(TypeError, match=r"\.detach\(\)"):
        read(gradient)


def test_an_output_that_requires_grad_is_refused(torch, parameter):
    with pytest.raises(TypeError, match=r"out\[0\] is a tensor that requires grad"):
        gradkit.rms_norm(torch.ones(2), out=(parameter, None))
    assert parameter.tolist() == [3, 4]


def test_grads_of_gives_the_gradients_themselves(torch):
    model = torch.nn.Linear(3, 2)
    frozen = torch.nn.Linear(1, 1)
    model(torch.ones(1, 3)).sum().backward()
    found = gradkit.grads_of([*model.parameters(), *frozen.parameters()])
    assert len(found) == 2
    assert found[0] is model.weight.grad
    assert found[1] is model.bias.grad


# The version counter


def test_reading_does_not(torch, read):
    grad = torch.ones(3)
    read(grad)
    gradkit.layer_norm(grad)
    assert grad._version == 0


def test_autograd_notices_a_write_to_what_it_saved(torch, write):
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = x.exp()  # saves y
    write(y.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_tensors_of_inference_mode_have_no_counter(torch):
    with torch.inference_mode():
        grad = torch.tensor([3.0, 4.0])
        gradkit.clip_grad_norm([grad], 1.0)
    np.testing.assert_allclose(grad.tolist(), [0.6, 0.8], rtol=1e-6)


# Memory that does not hold the values


def test_the_negative_bit_is_refused(torch, write):
    base = torch.tensor([1 + 2j, 3 - 4j])
    flipped = base.conj().imag
    assert flipped.is_neg()
    assert not flipped.requires_grad
    with pytest.raises(TypeError, match=r"negative bit.*\.resolve_neg\(\)"):
        write(flipped)
    assert base.tolist() == [1 + 2j, 3 - 4j]


def test_inside_vmap_there_is_no_memory(torch):
    with pytest.raises(TypeError, match=r"holds no memory.*vmap"):
        torch.vmap(gradkit.zero_grad)(torch.ones(2, 3))


def test_inside_functionalize_there_is_no_memory(torch):
    with pytest.raises(TypeError, match=r"holds no memory.*functionalize"):
        torch.func.functionalize(gradkit.grad_norm)(torch.ones(3))


# Layouts


def test_a_tensor_that_overlaps_itself_is_read(torch):
    assert gradkit.grad_norm(torch.ones(1).expand(4)).item() == 2
    x = torch.arange(6.0).reshape(2, 3)
    _, mean, inv_std = gradkit.layer_norm(x)
    broadcast = torch.ones(3).expand(2, 3)
    got = gradkit.layer_norm_grad(broadcast, x, None, mean, inv_std)[0]
    assert torch.equal(got, gradkit.layer_norm_grad(torch.ones(2, 3), x, None, mean, inv_std)[0])


# Results


def test_results_are_ordinary_tensors(torch):
    clipped, norm = gradkit.clip_by_global_norm([torch.ones(3, requires_grad=False)], 1.0)
    assert type(clipped[0]) is torch.Tensor
    assert clipped[0].is_leaf
    clipped[0].add_(norm.float()).requires_grad_().sum().backward()
    assert norm.dtype is torch.float64
    assert norm.ndim == 0


def test_results_outlive_the_arguments(torch):
    results = [gradkit.clip_by_global_norm(torch.full((1000,), 2.0), 1e9)[0] for _ in range(50)]
    gc.collect()
    noise = [torch.rand(1000) for _ in range(50)]
    assert all(torch.equal(r, torch.full((1000,), 2.0)) for r in results)
    del noise


def test_plain_cuda_tensors_are_a_table(torch):
    """Host tensors that pass for ones on a CUDA device."""
    table = _host.code.table
    kinds = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    tensors = [torch.ones(3, dtype=dtype) for dtype in kinds]
    unusual = (
        torch.ones(3).requires_grad_(),
        torch._neg_view(torch.ones(3)),
        torch.ones(3, dtype=torch.int32),
        torch.ones(3).to_sparse(),
        torch.ones(0),
    )
    with on_a_device():
        known = table(tensors, True)
        assert (len(known), known.device) == (4, 0)
        assert known.addresses == tuple(tensor.data_ptr() for tensor in tensors)
        for tensor in (*unusual, torch.ones(3, device="meta"), np.ones(3)):
            assert table([*tensors, tensor], False) is None
    assert table(tensors, True).device == -1


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64", "int32", "bool"])
def test_numpy_dtypes(torch, name):
    assert adapter._numpy_dtype(getattr(torch, name)).name == name


def test_norms_of_micro_batches_go_into_elements_of_a_tensor(torch):
    small, buffer = torch.zeros(2, dtype=torch.float64), [torch.zeros(3)]
    for k, value in enumerate((1.0, 3.0)):
        micro = [torch.full((3,), value)]
        gradkit.accumulate_grads(buffer, micro, scale=0.5, grad_norm_out=small[k])
    np.testing.assert_allclose(small, np.sqrt([3.0, 27.0]))
    assert buffer[0].tolist() == [2, 2, 2]
