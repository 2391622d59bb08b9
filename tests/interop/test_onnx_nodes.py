"""The ONNX standard's own node tests for group norm and instance norm."""

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


def case_named(module, name):
    """A node's attributes, its inputs and its outputs."""
    onnx = framework("onnx")
    from onnx.backend.test.case import node as made

    import_module(f"{made.__name__}.{module}")
    case = next(case for case in made._NodeTestCases if case.name == f"test_{name}")
    (node,) = case.model.graph.node
    options = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    return options, *case.data_sets[0]


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
