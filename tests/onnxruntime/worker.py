"""Runs one-node ONNX models under an interpreter that has ONNX Runtime Training.

``python worker.py job.npz results.npz``. The job holds ``nodes``, JSON of a list of nodes, and
their inputs as ``<node>.<name>``, or ``<node>.<name>.<k>`` for the members of a sequence. The
results hold the outputs under the same kind of names.
"""

import json
import sys
from typing import Any

import numpy as np


def main(job: str, results: str) -> None:
    """Run every node of a job."""
    with np.load(job) as arrays:
        nodes = json.loads(str(arrays["nodes"]))
        outputs: dict[str, Any] = {}
        for number, node in enumerate(nodes):
            inputs = {name: _gather(arrays, f"{number}.{name}") for name in node["inputs"]}
            for name, value in zip(node["outputs"], run(node, inputs), strict=True):
                members = {f".{k}": member for k, member in enumerate(value)}
                for key, array in (members if isinstance(value, list) else {"": value}).items():
                    outputs[f"{number}.{name}{key}"] = array
    np.savez(results, **outputs)


def run(node: dict[str, Any], inputs: dict[str, Any]) -> list[Any]:
    """The outputs of one node."""
    found: list[Any] = session(node, inputs).run(list(node["outputs"]), inputs)
    return found


def session(node: dict[str, Any], inputs: dict[str, Any], **options: Any) -> Any:
    """A session on the CPU with a model of one node; ``options`` of the session."""
    import onnxruntime
    from onnx import helper

    graph = helper.make_graph(
        [
            helper.make_node(
                node["op"],
                node["inputs"],
                list(node["outputs"]),
                domain="com.microsoft",
                **node.get("attributes", {}),
            )
        ],
        "one_node",
        [_describe(name, value) for name, value in inputs.items()],
        [_declare(name, kind) for name, kind in node["outputs"].items()],
    )
    domains = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=domains, ir_version=8)
    chosen = onnxruntime.SessionOptions()
    for option, value in options.items():
        setattr(chosen, option, value)
    return onnxruntime.InferenceSession(
        model.SerializeToString(), chosen, providers=["CPUExecutionProvider"]
    )


def _gather(arrays: Any, name: str) -> Any:
    if name in arrays:
        return arrays[name]
    count = sum(key.startswith(f"{name}.") for key in arrays)
    return [arrays[f"{name}.{k}"] for k in range(count)]


def _describe(name: str, value: Any) -> Any:
    from onnx import helper

    if isinstance(value, list):
        return helper.make_tensor_sequence_value_info(name, _element(value[0].dtype), None)
    return helper.make_tensor_value_info(name, _element(value.dtype), value.shape)


def _declare(name: str, kind: str) -> Any:
    """An output: a dtype's name, or ``sequence of`` one."""
    from onnx import helper

    dtype = np.dtype(kind.removeprefix("sequence of "))
    make = helper.make_tensor_value_info
    if kind.startswith("sequence"):
        make = helper.make_tensor_sequence_value_info
    return make(name, _element(dtype), None)


def _element(dtype: Any) -> int:
    from onnx import TensorProto

    names = {"float32": "FLOAT", "float64": "DOUBLE", "float16": "FLOAT16", "bool": "BOOL"}
    return int(TensorProto.DataType.Value(names[dtype.name]))


if __name__ == "__main__":
    main(*sys.argv[1:])
