"""Starts the processes of one library, and ends all of them as soon as one is stuck.

Each rank runs the same checks (``worker.py``) and writes a line of JSON for each. If no rank
finishes anything for a while, every rank writes its stack, all are ended, and the error says which
rank waited for which. The processes meet through files, so that a library that is broken cannot
hide what the others did.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STALL_S = 60  # that no rank finishes anything; with much other load a check took 7 s
START_S = 300  # until all have imported their libraries
LAST_S = 3  # to say where a rank stands
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "JAX_PLATFORMS": "cpu",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


class StuckError(Exception):
    """Not every rank came to the end."""


class Log:
    """Records that the ranks of one launch have written so far."""

    def __init__(self, directory, size):
        self.directory, self.size = directory, size

    def of(self, rank):
        """A rank's records, one for each check that it finished."""
        path = self.directory / f"{rank}.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def progress(self):
        """Number of checks that each rank finished."""
        return [len(self.of(rank)) for rank in range(self.size)]

    def all(self):
        """For each check, the records of all ranks in their order."""
        every = [self.of(rank) for rank in range(self.size)]
        return {row[0]["check"]: list(row) for row in zip(*every, strict=True)}


def launch(library, size, suite, directory):
    """Run a suite on all ranks: for each check every rank's record, or ``StuckError``."""
    log = Log(directory, size)
    commands = _commands(library, size, suite, directory)
    processes = [_start(*each, directory / f"{k}.out") for k, each in enumerate(commands)]
    try:
        trouble = _watch(processes, log)
        if trouble:
            raise StuckError(_report(library, trouble, log))
    finally:
        _end(processes, log)
    return log.all()


def _start(command, own, output):
    with output.open("w") as written:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | _ENVIRONMENT | {"PYTHONPATH": str(ROOT)} | own,
            stdout=written,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _commands(library, size, suite, directory):
    """Each command to start, with its environment."""
    worker = [sys.executable, "-m", "tests.processes.worker", library, str(size), suite]
    worker.append(str(directory))
    if library == "mpi":
        mpiexec = Path(sys.executable).parent / "mpiexec"
        return [([str(mpiexec), "-launcher", "fork", "-n", str(size), *worker], {})]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    return [(worker, {"GRADKIT_RANK": str(k), "GRADKIT_PORT": port}) for k in range(size)]


def _watch(processes, log):
    """Wait for all ranks; what is wrong if they do not come to the end."""
    before, since = None, time.monotonic()
    while True:
        states = [process.poll() for process in processes]
        if all(state == 0 for state in states):
            return None
        if any(states):
            return f"a process ended with status {next(filter(None, states))}"
        progress = log.progress()
        if progress != before:
            before, since = progress, time.monotonic()
        limit = STALL_S if min(progress) else START_S
        if time.monotonic() - since > limit:
            return f"no rank finished anything for {limit} s"
        time.sleep(0.05)


def _report(library, trouble, log):
    """Describe each rank: what it waits for, its last words and where it stands."""
    _ask_for_stacks(log)
    progress = log.progress()
    behind = [rank for rank, count in enumerate(progress) if count == min(progress)]
    lines = [f"{library}, {log.size} ranks: {trouble}"]
    for rank, count in enumerate(progress):
        last = log.of(rank)[-1]["check"] if count else "nothing"
        waits = "" if rank in behind else f", and waits for ranks {behind}"
        failed = [(r["check"], r["error"].splitlines()[-1]) for r in log.of(rank) if r["error"]]
        lines.append(f"rank {rank} finished {count} checks, the last of them {last!r}{waits}")
        lines += [f"  failed: {name!r}: {error}" for name, error in failed]
        lines += [f"    {line}" for line in _stack(log, rank)]
    for path in sorted(log.directory.glob("*.out")):
        lines += [f"{path.name}: {line}" for line in path.read_text().splitlines()[-12:]]
    return "\n".join(lines)


def _ask_for_stacks(log):
    for pid in _pids(log):
        _send(pid, signal.SIGUSR1)
    end = time.monotonic() + LAST_S
    while time.monotonic() < end and not all(_stack(log, rank) for rank in range(log.size)):
        time.sleep(0.05)


def _stack(log, rank):
    """The innermost calls of a rank's main thread."""
    path = log.directory / f"{rank}.stack"
    text = path.read_text() if path.exists() else ""
    return text.rpartition("Current thread")[2].splitlines()[1:9]


def _pids(log):
    return [int(path.read_text() or 0) for path in log.directory.glob("*.pid")]


def _send(pid, number):
    try:
        if pid:
            os.kill(pid, number)
    except ProcessLookupError:
        pass


def _end(processes, log):
    """Leave no process behind."""
    if all(process.poll() == 0 for process in processes):
        return
    for pid in _pids(log):
        _send(pid, signal.SIGKILL)
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
