"""The ONNX standard's own node tests for batch, group and instance norm."""

from importlib import import_module

import numpy as np
import pytest

import gradkit

from .libraries import framework

EPS = 1e-5  # what the operators have where a node names none
# The modules that make the cases when they are imported, and the cases' names.
CASES = {
    "groupnormalization": ["group_normalization_example", "group_normalization_epsilon"],
    "instance_normalization": ["instancenorm_example", "instancenorm_epsilon"],
}
BATCH_NORMS = ["example", "epsilon", "example_training_mode", "epsilon_training_mode"]


def case_named(module, name):
    """A node's attributes, its inputs and its outputs."""
    onnx = framework("onnx")
    from onnx.backend.test.case import node as made

    import_module(f"{made.__name__}.{module}")
    case = next(case for case in made._NodeTestCases if case.name == f"test_{name}")
    (node,) = case.model.graph.node
    options = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    return options, *case.data_sets[0]


@pytest.mark.parametrize("name", BATCH_NORMS)
def test_batch_norms(name):
    """Opset 15. Its momentum is the weight of what was, and its output_var takes the biased one."""
    case = case_named("batch_normalization", f"batchnorm_{name}")
    attributes, (x, scale, bias, mean, var), (y, *moved) = case
    eps, training = attributes.get("epsilon", EPS), attributes.get("training_mode", 0)
    assert training == ("training" in name)
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


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module, names in CASES.items() for name in names]
)
def test_nodes(module, name, last):
    options, (x, scale, bias), (expected,) = case_named(module, name)
    groups = options.get("num_groups", x.shape[1])
    if last:
        x = np.ascontiguousarray(np.moveaxis(x, 1, -1))
    axis = -1 if last else 1
    eps = options.get("epsilon", EPS)
    y, mean, inv_std = gradkit.group_norm(x, groups, scale, bias, channel_axis=axis, eps=eps)
    y = np.moveaxis(y, -1, 1) if last else y
    np.testing.assert_allclose(y, expected, rtol=1e-3, atol=1e-7)  # the standard's own bounds
    assert mean.shape == inv_std.shape == (len(x), groups)
