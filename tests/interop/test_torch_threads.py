"""Calls work on PyTorch's threads, which stay awake after its own operations."""

import subprocess
import sys

import pytest

from .libraries import framework

PROGRAM = """
import os, signal
import numpy as np, torch
import gradkit

def threads():
    return len(os.listdir("/proc/self/task"))

def norms():
    y, mean, inv_std = gradkit.layer_norm(x)
    dx = gradkit.layer_norm_grad(x, x, None, mean, inv_std)[0]
    return [each.numpy().tobytes() for each in (y, dx, gradkit.grad_norm([x, x]))]

gradkit.set_num_threads(3)
torch.set_num_threads(3)
x = torch.randn(700, 1000)
(x @ x.T).sum()
gradkit.grad_norm([x[:1]])  # PyTorch's tensors are known from here on
before, expected = threads(), norms()
assert threads() == before, (threads(), before)
own = gradkit.layer_norm(x.numpy())[0]
assert threads() == before
assert own.tobytes() == expected[0]

child = os.fork()
if child == 0:
    signal.alarm(60)
    os._exit(0 if norms() == expected else 1)  # PyTorch's own threads are not there
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
for count in (1, 2, 5):
    torch.set_num_threads(count)
    assert norms() == expected
gradkit.set_num_threads(1)
assert norms() == expected
print("done")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere calls have threads of their own")
def test_calls_start_no_further_threads_and_forked_children_compute():
    framework("torch")
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.stdout == "done\n", done.stderr
