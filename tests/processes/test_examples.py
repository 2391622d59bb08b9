"""The examples and the benchmark over processes run, and say what is right."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
MPIEXEC = Path(sys.executable).parent / "mpiexec"
LIMIT_S = 240  # a machine with other load is slow; none of these takes a minute by itself
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES)}
ENVIRONMENT |= {"GLOO_SOCKET_IFNAME": "lo"}
# gloo's threads now and then abort a process whose Python takes itself down (pytorch#190489).
LEAVING = """
import os, runpy, sys
del sys.argv[0]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
    status = 0
except SystemExit as ended:
    status = int(ended.code or 0)
sys.stdout.flush()
os._exit(status)
"""


def run(program, size, *options):
    """A program's end over MPI."""
    command = [MPIEXEC, "-launcher", "fork", "-n", str(size), sys.executable, program, *options]
    return ended(command)


def ended(command, **options):
    given = {"env": ENVIRONMENT, "capture_output": True, "text": True, "timeout": LIMIT_S}
    return subprocess.run(command, **given | options, check=False)


def printed(program, *options, size=2):
    """Text that a program prints, on ranks of PyTorch if there are several."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(size), "--no-python"]
    ranks = [*torchrun, sys.executable, "-c", LEAVING] if size > 1 else []
    done = ended([sys.executable, *ranks, program, *options])
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_training_over_mpi_equals_one_process(there):
    there("mpi")
    done = run(EXAMPLES / "mpi_training.py", 4, "--epochs", "2", "--min-accuracy", "0.5")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 ranks: 22 steps, clipped in 22" in done.stdout
    assert float(re.search(r"differ from one process' by (\S+)", done.stdout)[1]) <= 1e-12


def test_the_example_notices_norms_of_single_ranks(there, tmp_path):
    there("mpi")
    text = (EXAMPLES / "mpi_training.py").read_text()
    program = tmp_path / "mpi_training.py"
    program.write_text(text.replace(", group=self.group)", ")"))
    assert program.read_text() != text
    done = run(program, 2, "--epochs", "1", "--min-accuracy", "0")
    assert done.returncode == 1
    assert "parameters differ" in done.stdout


def test_the_benchmark_of_ranks_runs(there):
    """And counts: one exchange of 48 bytes in each call."""
    there("torch")
    command = [sys.executable, "-m", "benchmarks.ranks", "--quick"]
    done = ended(command, cwd=EXAMPLES.parent, env=None)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = done.stdout.splitlines()[2:]
    assert [row.split(" | ")[1] for row in rows] == ["norm", "clip, scaling", "clip, not scaling"]
    assert all("| 1: 48 bytes | 2: " in row for row in rows)


def test_fsdp_clips_as_one_process(there):
    there("torch")
    said = printed(EXAMPLES / "torch_fsdp.py")
    assert "2 ranks: 60 steps, clipped in 60; norms 3.872 -> " in said
    assert float(re.search(r"one process' by (\S+)", said)[1]) <= 1e-9


PAGE = (EXAMPLES.parent / "docs" / "distributed.md").read_text()
BLOCKS = re.findall(r"(?sm)^```py\n((?:from mpi4py|grads = |if ).*?)^```", PAGE)


def test_the_code_of_the_page_runs_over_mpi(there, tmp_path):
    there("mpi")
    program = tmp_path / "page.py"
    before = """import gradkit
import numpy as np
from mpi4py import MPI
own_grads = [np.array([[3.0], [4.0]][MPI.COMM_WORLD.rank])]
"""
    after = "np.testing.assert_allclose(own_grads[0], [[0.6], [0.8]][MPI.COMM_WORLD.rank])\n"
    program.write_text(before + BLOCKS[0] + after)
    done = run(program, 2)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_code_of_the_page_runs_on_dtensors(there, tmp_path):
    """The norm is clipped over both ranks; ranks find out the same as placements say."""
    there("torch")
    program = tmp_path / "page.py"
    before = """import gradkit, os, torch
from torch.distributed import barrier, init_process_group
from torch.distributed.fsdp import fully_shard
init_process_group("gloo")
model = torch.nn.ModuleDict({"embedding": torch.nn.Linear(4, 2, bias=False)})
torch.nn.init.ones_(model["embedding"].weight)
fully_shard(model["embedding"])
group = gradkit.distributed.from_torch()
model["embedding"](torch.full((1, 4), 3.0)).sum().backward()
"""
    after = """assert grads.replicas == {"embedding.weight": 1}
(grad,) = grads.values()
torch.testing.assert_close(grad, torch.full_like(grad, 8**-0.5))
barrier()
"""
    program.write_text(before + BLOCKS[1] + BLOCKS[2] + after)
    printed(program)


def gpt(*options, size=1):
    """Train the PyTorch example for 8 steps; what it prints."""
    return printed(EXAMPLES / "train_gpt.py", "--steps", "8", *options, size=size)


def test_the_gpt_in_pytorch_learns_as_with_pytorchs_norms(there):
    """In mixed precision; the losses agree to the digits that are printed but the last."""
    there("torch")
    said = gpt("--compare")
    found = re.findall(r"(\w+): 8 steps, loss (\S+) -> (\S+), (\S+)% of held-out", said)
    assert [name for name, *_ in found] == ["gradkit", "PyTorch"]
    (first, last, right), theirs = (list(map(float, numbers)) for _, *numbers in found)
    assert theirs == pytest.approx([first, last, right], rel=0.01)
    assert last < 0.9 * first
    assert right > 15


def test_the_gpt_in_pytorch_goes_on_from_a_checkpoint_and_over_ranks(there, tmp_path):
    there("torch")
    import torch

    whole, parts, ranks = (tmp_path / f"{name}.pt" for name in ("whole", "parts", "ranks"))
    gpt("--dtype", "float32", "--checkpoint", whole)
    gpt("--dtype", "float32", "--checkpoint", ranks, size=2)
    gpt("--dtype", "float32", "--checkpoint", parts, "--steps", "3")
    gpt("--dtype", "float32", "--checkpoint", parts)
    saved = torch.load(whole)
    resumed, spread = torch.load(parts), torch.load(ranks)
    assert resumed["losses"] == saved["losses"]
    for name, parameter in saved["model"].items():
        assert torch.equal(resumed["model"][name], parameter)
    assert len(saved["losses"]) == 8
    assert spread["losses"] == pytest.approx(saved["losses"], rel=1e-4)
