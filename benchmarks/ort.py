"""ONNX Runtime Training's own operators, in a separate process.

``GRADKIT_ORT_PYTHON`` names an interpreter with onnxruntime-training, which needs NumPy 1
(``tests/onnxruntime/requirements.txt``). It runs a model once per round. The times are those of
the kernel alone, from ONNX Runtime's own profile, so neither the pipe nor copies into its
sequences count.

Run by that interpreter, this file is the worker.
"""

# ruff: noqa: D102  (the methods are the operations)

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


class OnnxRuntime:
    """The peer: takes gradkit's arguments, returns a call that runs the operator once."""

    name = "onnxruntime"

    def __init__(self) -> None:
        self.python = os.environ.get("GRADKIT_ORT_PYTHON", "")
        if not self.python:
            raise ImportError("GRADKIT_ORT_PYTHON names no interpreter")
        found = [self.python, "-c", "import onnxruntime, onnx; print(onnxruntime.__version__)"]
        done = subprocess.run(found, capture_output=True, text=True)
        if done.returncode:
            raise ImportError(f"{self.python} cannot import onnxruntime")
        self.version = done.stdout.strip()

    def layer_norm_grad(
        self, dy: Array, x: Array, scale: Array, mean: Array, inv_std: Array
    ) -> "_Remote":
        mean, inv_std = mean[:, None], inv_std[:, None]
        inputs = {"dy": dy, "x": x, "scale": scale, "mean": mean, "inv_std": inv_std}
        return self._remote("LayerNormalizationGrad", inputs, 3, axis=1)

    def invertible_layer_norm_grad(
        self, dy: Array, y: Array, scale: Array, bias: Array, inv_std: Array
    ) -> "_Remote":
        inputs = {"dy": dy, "y": y, "scale": scale, "bias": bias, "inv_std": inv_std[:, None]}
        return self._remote("InvertibleLayerNormalizationGrad", inputs, 3, axis=1)

    def rms_norm_grad(self, dy: Array, x: Array, scale: Array, inv_std: Array) -> "_Remote":
        inputs = {"dy": dy, "x": x, "scale": scale, "inv_std": inv_std[:, None]}
        return self._remote("SimplifiedLayerNormalizationGrad", inputs, 2, axis=1)

    def batch_norm_grad(
        self, dy: Array, x: Array, scale: Array, mean: Array, inv_std: Array
    ) -> "_Remote":
        inputs = {"dy": dy, "x": x, "scale": scale, "mean": mean, "inv_std": inv_std}
        return self._remote("BatchNormalizationGrad", inputs, 3, epsilon=1e-5)

    def clip_grad_norm(self, grads: Sequence[Array], limit: Callable[[], float]) -> "_Remote":
        kinds = {"clipped": "sequence of float32"}
        attributes = {"max_norm": limit(), "norm_type": "fro"}
        node = {"op": "InplaceClipGradNorm", "outputs": kinds, "attributes": attributes}
        return _Remote(self.python, node, {"grads": list(grads)})

    def accumulate_grad(self, buffer: Array, grad: Array) -> "_Remote":
        return self._remote("InPlaceAccumulator", {"buffer": buffer, "grad": grad}, 1)

    def _remote(self, op: str, inputs: dict[str, Array], outputs: int, **attributes: Any) -> Any:
        kinds = {f"out{k}": "float32" for k in range(outputs)}
        node = {"op": op, "outputs": kinds, "attributes": attributes}
        return _Remote(self.python, node, inputs)


class _Remote:
    """A model loaded in the worker; each call runs it once."""

    def __init__(self, python: str, node: dict[str, Any], inputs: dict[str, Any]):
        self.folder = tempfile.TemporaryDirectory(prefix="gradkit-bench-")
        node = node | {"inputs": list(inputs)}
        arrays = {}
        for name, value in inputs.items():
            members = enumerate(value) if isinstance(value, list) else [("", value)]
            arrays |= {f"0.{name}.{k}".rstrip("."): array for k, array in members}
        np.savez(Path(self.folder.name, "job.npz"), node=json.dumps(node), **arrays)
        self.process = subprocess.Popen(
            [python, __file__, self.folder.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def __call__(self) -> None:
        self._ask("run")

    def times(self) -> list[float]:
        """Seconds in the kernel, one number per call; ends the worker."""
        answer = self._ask("times")
        self.process.wait()
        self.folder.cleanup()
        found: list[float] = json.loads(answer)
        return found

    def _ask(self, request: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{request}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError("the ONNX Runtime worker died")
        return answer


def work(folder: str) -> None:
    """Serve requests: ``run`` runs the model, ``times`` prints the times of all runs and ends."""
    sys.path.append(str(Path(__file__).parents[1] / "tests" / "onnxruntime"))
    import worker

    with np.load(Path(folder, "job.npz")) as arrays:
        node = json.loads(str(arrays["node"]))
        inputs = {name: worker.gather(arrays, f"0.{name}") for name in node["inputs"]}
    prefix = str(Path(folder, "profile"))
    session = worker.session(node, inputs, enable_profiling=True, profile_file_prefix=prefix)
    for request in map(str.strip, sys.stdin):
        if request == "times":
            break
        session.run(None, inputs)
        print("done", flush=True)
    profile = json.loads(Path(session.end_profiling()).read_text())
    kernels = [event for event in profile if event.get("args", {}).get("op_name") == node["op"]]
    print([event["dur"] / 1e6 for event in kernels if event["name"].endswith("kernel_time")])


if __name__ == "__main__":
    work(sys.argv[1])
