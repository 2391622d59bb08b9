"""Running statistics and batch norm by them, beside PyTorch and ONNX."""

import warnings

import numpy as np
import pytest

import gradkit


def test_pytorch_notices_that_they_moved(torch):
    running = torch.zeros(5), torch.ones(5)
    gradkit.batch_norm(torch.ones(4, 5), running_mean=running[0], running_var=running[1])
    assert [array._version for array in running] == [1, 1]


def test_pytorch_too_refuses_one_element_per_channel(torch):
    x, running = torch.ones(1, 3), (torch.zeros(3), torch.ones(3))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        torch.nn.functional.batch_norm(x, *running, training=True)
    with pytest.raises(ValueError, match="one element per channel"):
        gradkit.batch_norm(x, running_mean=running[0], running_var=running[1])
    with pytest.raises(ValueError, match="one element per channel"):
        gradkit.batch_norm(x)


def test_a_momentum_is_for_running_statistics(torch):
    """Modules have one without them, as PyTorch's do."""
    import gradkit.torch as ours

    x = torch.arange(24.0).reshape(2, 3, 4)
    for momentum in (0.9, 0.0, torch.tensor(0.1)):
        for call in (
            lambda momentum: ours.batch_norm(x, None, None, training=True, momentum=momentum),
            lambda momentum: ours.instance_norm(x, momentum=momentum),
        ):
            with pytest.raises(ValueError, match="there are no running statistics"):
                call(momentum)
    for name in ("BatchNorm1d", "InstanceNorm1d"):
        for momentum in (0.9, None):
            options = {"momentum": momentum, "track_running_stats": False}
            module, theirs = (getattr(n, name)(3, **options) for n in (ours, torch.nn))
            torch.testing.assert_close(module(x), theirs(x))
    mean = torch.zeros(3)
    ours.batch_norm(x, mean, torch.ones(3), momentum=0.9)  # which does not move in evaluation
    assert mean.tolist() == [0, 0, 0]


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
            weight, count = 1 - attributes.get("momentum", 0.9), x.size // x.shape[1]
            running = {"running_mean": mean.copy(), "running_var": var.copy(), "momentum": weight}
            found = [gradkit.batch_norm(x, scale, bias, eps=eps, **running)[0]]
            own = (running["running_var"] - (1 - weight) * var) * (count - 1) / count
            found += [running["running_mean"], (1 - weight) * var + own]
        for got, ref in zip(found, (y, *moved), strict=True):
            np.testing.assert_allclose(got, ref, rtol=1e-5, atol=1e-6)
    assert sorted(modes) == [0, 0, 1, 1]
