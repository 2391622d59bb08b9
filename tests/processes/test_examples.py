"""The examples and the benchmark over processes run, and say what is right."""

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
MPIEXEC = Path(sys.executable).parent / "mpiexec"
LIMIT_S = 240  # a machine with other load is slow; none of these takes a minute by itself
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES)}


def run(program, size, *options):
    command = [MPIEXEC, "-launcher", "fork", "-n", str(size), sys.executable, program, *options]
    return subprocess.run(
        command, env=ENVIRONMENT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


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
    command = [sys.executable, "-m", "benchmarks.bench_ranks", "--quick"]
    done = subprocess.run(
        command, cwd=EXAMPLES.parent, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = done.stdout.splitlines()[2:]
    assert [row.split(" | ")[1] for row in rows] == ["norm", "clip, scaling", "clip, not scaling"]
    assert all("| 1: 48 bytes | 2: " in row for row in rows)


def test_fsdp_clips_as_one_process(there):
    there("torch")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, EXAMPLES / "torch_fsdp.py"],
        env=ENVIRONMENT | {"GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks: 60 steps, clipped in 60; norms 3.872 -> " in done.stdout
    assert float(re.search(r"one process' by (\S+)", done.stdout)[1]) <= 1e-9
