"""Running statistics and batch norm by them, beside PyTorch and ONNX."""

import warnings

import numpy as np
import pytest

import gradkit
from tests.interop.conftest import framework

SHAPES = [(10, 7), (10, 5, 4), (6, 3, 4, 2), (3, 2, 3, 2, 4)]
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def hosts(shape=(10, 5, 4)):
    """Data and a gradient; scale, bias, and statistics to move from."""
    rng = np.random.default_rng(7)
    x, dy = rng.standard_normal((2, *shape)).astype(np.float32)
    scale, bias, mean = rng.standard_normal((3, shape[1])).astype(np.float32)
    return 3 * x + 1, dy, scale, bias, mean, rng.uniform(1, 2, shape[1]).astype(np.float32)


def test_pytorch_notices_that_they_moved(torch):
    running = torch.zeros(5), torch.ones(5)
    gradkit.batch_norm(torch.ones(4, 5), running_mean=running[0], running_var=running[1])
    assert [array._version for array in running] == [1, 1]


def tensors(torch, shape, channels_last):
    x, dy, scale, bias, mean, var = map(torch.from_numpy, hosts(shape))
    if channels_last:
        x, dy = (a.movedim(1, -1).contiguous().movedim(-1, 1) for a in (x, dy))
    return x, dy, scale, bias, mean, var


def wanted(torch, given, **options):
    """PyTorch's output and gradients; running statistics among ``options`` move."""
    x, dy, scale, bias = given
    leaves = [a.clone().requires_grad_() for a in (x, scale, bias)]
    y = torch.nn.functional.batch_norm(leaves[0], weight=leaves[1], bias=leaves[2], **options)
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pytorch_agrees_in_both_modes(shape, channels_last):
    torch = framework("torch")
    *given, mean, var = tensors(torch, shape, channels_last)
    x, dy, scale, bias = given
    for momentum in (0.1, 0.5, 1.0, 0.0):
        theirs, ours = ((mean.clone(), var.clone()) for _ in range(2))
        options = {"training": True, "momentum": momentum, "eps": 1e-3}
        ref = wanted(torch, given, running_mean=theirs[0], running_var=theirs[1], **options)
        running = {"running_mean": ours[0], "running_var": ours[1], "momentum": momentum}
        y, *statistics = gradkit.batch_norm(x, scale, bias, eps=1e-3, **running)
        found = y, *gradkit.batch_norm_grad(dy, x, scale, *statistics)
        for got, expected in zip((*found, *ours), (*ref, *theirs), strict=True):
            torch.testing.assert_close(got, expected, **CLOSE)
    options = {"training": False, "eps": 1e-3, "running_mean": mean, "running_var": var}
    y = gradkit.batch_norm_inference(x, scale, bias, mean, var, eps=1e-3)
    found = y, *gradkit.batch_norm_inference_grad(dy, x, scale, mean, var, eps=1e-3)
    for got, expected in zip(found, wanted(torch, given, **options), strict=True):
        torch.testing.assert_close(got, expected, **CLOSE)


def test_pytorch_too_refuses_one_element_per_channel(torch):
    x, running = torch.ones(1, 3), (torch.zeros(3), torch.ones(3))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        torch.nn.functional.batch_norm(x, *running, training=True)
    with pytest.raises(ValueError, match="one element per channel"):
        gradkit.batch_norm(x, running_mean=running[0], running_var=running[1])


# ONNX


def nodes():
    """The cases of the operator's own tests: attributes, inputs, outputs."""
    pytest.importorskip("onnx")
    from onnx import helper
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it makes the cases of all operators
        cases = collect_testcases("BatchNormalization")
    for case in cases:  # of all operators that were asked for before, too
        node, *others = case.model.graph.node
        if others or node.op_type != "BatchNormalization":
            continue
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        for inputs, outputs in case.data_sets:
            yield attributes, inputs, outputs


def test_onnx_batch_normalization():
    """Opset 15. Its momentum is the weight of what was, and its output_var takes the biased one."""
    modes = []
    for attributes, (x, scale, bias, mean, var), (y, *moved) in nodes():
        eps, training = attributes.get("epsilon", 1e-5), attributes.get("training_mode", 0)
        modes.append(training)
        if not training:
            found = [gradkit.batch_norm_inference(x, scale, bias, mean, var, eps=eps)]
        else:
            found = [gradkit.batch_norm(x, scale, bias, eps=eps)[0]]
            own_mean, own_var, count = gradkit.batch_norm_stats(x)
            biased, weight = own_var * (count - 1) / count, 1 - attributes.get("momentum", 0.9)
            found += gradkit.update_running_statistics(
                mean, var, own_mean, biased, count, momentum=weight
            )
        for got, ref in zip(found, (y, *moved), strict=True):
            np.testing.assert_allclose(got, ref, rtol=1e-5, atol=1e-6)
    assert sorted(modes) == [0, 0, 1, 1]
