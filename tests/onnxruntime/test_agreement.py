"""gradkit and ONNX Runtime's operators on the same inputs, both held to the same bounds."""

import json
import os
import subprocess
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

import gradkit
from tests import oracles, problems, tolerances
from tests.backends import Backend
from tests.strategies import values

PYTHON = os.environ.get("GRADKIT_ORT_PYTHON")
pytestmark = pytest.mark.interop
if not PYTHON:
    pytest.skip("GRADKIT_ORT_PYTHON names no interpreter", allow_module_level=True)

WORKER = Path(__file__).with_name("worker.py")
# A normalised dimension of 1 is an error in its kernels ("N != 1").
SHAPES = [(1, 2), (3, 5), (33, 1025), (257, 768), (5, 7, 96), (2, 12289)]
IMAGES = [(2, 3, 1, 1), (4, 5, 7, 9), (16, 32, 14, 14), (3, 64, 33, 31)]

Node = namedtuple("Node", "op inputs outputs attributes")


class OnnxRuntime(Backend):
    """Results of ONNX Runtime, for the checks that gradkit's results go through."""

    name = "onnxruntime"
    depth = 1 << 62  # sums are held in the accumulation dtype from the first term to the last


@pytest.fixture
def ask(tmp_path):
    """Outputs of nodes, as lists in the nodes' order."""

    def ask(*nodes):
        arrays, described = {}, []
        for number, node in enumerate(nodes):
            for name, value in node.inputs.items():
                members = enumerate(value) if isinstance(value, list) else [("", value)]
                for k, array in members:
                    arrays[f"{number}.{name}.{k}".rstrip(".")] = array
            described.append(node._asdict() | {"inputs": list(node.inputs)})
        job, results = tmp_path / "job.npz", tmp_path / "results.npz"
        np.savez(job, nodes=json.dumps(described), **arrays)
        done = subprocess.run([PYTHON, WORKER, job, results], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        with np.load(results) as found:
            return [
                [
                    found[f"{number}.{name}"]
                    if not kind.startswith("sequence")
                    else [found[f"{number}.{name}.{k}"] for k in range(len(node.inputs["grads"]))]
                    for name, kind in node.outputs.items()
                ]
                for number, node in enumerate(nodes)
            ]

    return ask


def gradients(*names):
    return dict.fromkeys(names, "float32")


def with_ones(problem):
    """Statistics as the operators want them: a one for every normalised dimension."""
    shape = problem.lead + (1,) * len(problem.tail)
    return problem.mean.reshape(shape), problem.inv_std.reshape(shape)


def check_both(made, ours, theirs, xhats=None):
    """Two implementations' gradients, each within the bounds of the formulas in long double."""
    for k, (p, mine, (dx, *sums)) in enumerate(zip(made, ours, theirs, strict=True)):
        xhat = None if xhats is None else xhats[k]
        p.check_gradients(Backend(), *mine, xhat=xhat)
        p.check_gradients(OnnxRuntime(), dx, *(a.reshape(p.tail) for a in sums), xhat=xhat)


def test_layer_norm_grad(ask):
    made = [problems.make(s, axis=1, seed=k) for k, s in enumerate(SHAPES)]
    nodes = []
    for p in made:
        mean, inv_std = with_ones(p)
        inputs = {"dy": p.dy, "x": p.x, "scale": p.scale, "mean": mean, "inv_std": inv_std}
        outputs = gradients("dx", "dscale", "dbias")
        nodes.append(Node("LayerNormalizationGrad", inputs, outputs, {"axis": 1}))
    ours = [gradkit.layer_norm_grad(p.dy, p.x, p.scale, p.mean, p.inv_std, axis=1) for p in made]
    check_both(made, ours, ask(*nodes))


def test_invertible_layer_norm_grad(ask):
    made = [problems.make(s, axis=1, seed=k) for k, s in enumerate(SHAPES)]
    nodes, ours, xhats = [], [], []
    for p in made:
        y, *_ = gradkit.layer_norm(p.x, p.scale, p.bias, axis=1)
        inputs = {"dy": p.dy, "y": y, "scale": p.scale, "bias": p.bias, "inv_std": with_ones(p)[1]}
        outputs = gradients("dx", "dscale", "dbias")
        nodes.append(Node("InvertibleLayerNormalizationGrad", inputs, outputs, {"axis": 1}))
        ours.append(gradkit.invertible_layer_norm_grad(p.dy, y, p.scale, p.bias, p.inv_std, axis=1))
        columns = map(p.per_column, (p.scale, p.bias))
        xhats.append(oracles.unscaled(p.rows(y), *columns))
    check_both(made, ours, ask(*nodes), xhats)


def test_rms_norm_grad(ask):
    made = [problems.make(s, axis=1, seed=k, centred=False) for k, s in enumerate(SHAPES)]
    nodes = []
    for p in made:
        inputs = {"dy": p.dy, "x": p.x, "scale": p.scale, "inv_std": with_ones(p)[1]}
        outputs = gradients("dx", "dscale")
        nodes.append(Node("SimplifiedLayerNormalizationGrad", inputs, outputs, {"axis": 1}))
    ours = [gradkit.rms_norm_grad(p.dy, p.x, p.scale, p.inv_std, axis=1) for p in made]
    check_both(made, ours, ask(*nodes))


def test_batch_norm_grad(ask):
    made = [problems.make(s, axis=1, seed=k, batch=True) for k, s in enumerate(IMAGES)]
    nodes = []
    for p in made:
        inputs = {"dy": p.dy, "x": p.x, "scale": p.scale, "mean": p.mean, "inv_std": p.inv_std}
        outputs = gradients("dx", "dscale", "dbias")
        nodes.append(Node("BatchNormalizationGrad", inputs, outputs, {"epsilon": 1e-5}))
    ours = [gradkit.batch_norm_grad(p.dy, p.x, p.scale, p.mean, p.inv_std) for p in made]
    check_both(made, ours, ask(*nodes))


def test_accumulate(ask):
    buffer, grad = (values((33, 65), "float32", seed) for seed in (0, 1))
    out, updated = {"out": "float32"}, {"updated": "bool", "out": "float32"}
    base = {"buffer": buffer, "grad": grad}
    yes, no = np.array([True]), np.array([False])
    first = [
        Node("InPlaceAccumulator", base, out, {}),
        Node("InPlaceAccumulator", base | {"do_update": yes}, out, {}),
        Node("InPlaceAccumulator", base | {"do_update": no}, out, {}),
    ]
    second = [
        Node("InPlaceAccumulatorV2", base, updated, {}),
        Node("InPlaceAccumulatorV2", base | {"overwrite": yes}, updated, {}),
        Node("InPlaceAccumulatorV2", base | {"overwrite": no}, updated, {}),
    ]
    theirs = ask(*first, *second)
    for do_update, (expected,) in zip((True, True, False), theirs[:3], strict=True):
        ours = gradkit.accumulate_grad(buffer.copy(), grad, do_update=do_update)
        tolerances.assert_ulps(ours, expected, tolerances.ACCUMULATED_ULPS)
    for overwrite, (flag, expected) in zip((False, True, False), theirs[3:], strict=True):
        ours = gradkit.accumulate_grad_v2(buffer.copy(), grad, overwrite=overwrite)
        assert ours[0] == bool(flag[0])
        tolerances.assert_ulps(ours[1], expected, tolerances.ACCUMULATED_ULPS)


def test_zero(ask):
    grad = values((33, 65), "float32", 0)
    grad[0, :3] = np.nan, np.inf, -0.0
    reset = np.ones(1, np.float32)
    ((expected,),) = ask(
        Node("ZeroGradient", {"grad": grad, "reset": reset}, {"out": "float32"}, {})
    )
    tolerances.assert_same_bits(gradkit.zero_grad(grad.copy()), expected)


@pytest.mark.parametrize("part", [0.25, 2.0])
def test_clip(ask, part):
    """The operator adds its epsilon to the norm, which is too large here to notice."""
    shapes = [(64, 64), (1,), (5, 7, 9), (1000,), (256, 300)]
    grads = [values(shape, "float32", k) for k, shape in enumerate(shapes)]
    limit = part * float(gradkit.grad_norm(grads))
    attributes = {"max_norm": limit, "norm_type": "fro"}
    outputs = {"clipped": "sequence of float32"}
    (([*theirs],),) = ask(Node("InplaceClipGradNorm", {"grads": grads}, outputs, attributes))
    ours, _ = gradkit.clip_by_global_norm(grads, limit)
    size = sum(grad.size for grad in grads)
    for mine, expected in zip(ours, theirs, strict=True):
        # Its norm is a float32 sum of squares from the first term to the last.
        bound = tolerances.averaged("norm", np.abs(mine), mine, size, expected.dtype)
        tolerances.assert_within(expected, mine, bound, "clipped")
