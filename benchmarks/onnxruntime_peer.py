"""ONNX Runtime Training's own operators, in a separate process.

``GRADKIT_ORT_PYTHON`` names an interpreter with onnxruntime-training, which needs NumPy 1
(``tests/onnxruntime/requirements.txt``). It runs a model once per round. The times are those of
the kernel alone, from ONNX Runtime's own profile, so neither the pipe nor copies into its
sequences count.

Run by that interpreter, this file is the worker.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np


def check_interpreter() -> str:
    """Return the version of ONNX Runtime; raise an ImportError if there is none."""
    python = os.environ.get("GRADKIT_ORT_PYTHON", "")
    if not python:
        raise ImportError("GRADKIT_ORT_PYTHON names no interpreter")
    command = [python, "-c", "import onnxruntime, onnx; print(onnxruntime.__version__)"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ImportError(f"{python} cannot import onnxruntime")
    return done.stdout.strip()


class Remote:
    """A model loaded in the worker; each call runs it once."""

    def __init__(self, node: dict[str, Any], inputs: dict[str, Any]):
        python = os.environ["GRADKIT_ORT_PYTHON"]
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
        """Run the model."""
        self._ask("run")

    def times(self) -> list[float]:
        """Seconds in the kernel, one number per call; ends the worker."""
        answer = self._ask("times")
        self.process.wait()
        self.folder.cleanup()
        return json.loads(answer)

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
