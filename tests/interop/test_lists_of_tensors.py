"""Lists of PyTorch's tensors in host memory, which compiled code takes without a view of each."""

import numpy as np
import pytest

import gradkit
from gradkit import _host as host
from gradkit._arrays.torch import Torch

from .libraries import framework

torch = framework("torch")

pytestmark = pytest.mark.skipif(
    host.code is None or not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"),
    reason="nothing is compiled, or PyTorch describes no tensors",
)
COUNT = 10
# At most so many are viewed, else two: of lists that are compared, one of each pair of dtypes.
VIEWED = dict.fromkeys(("sums", "averages", "a choice", "a choice against"), 6) | {
    "compensated sums": 12
}
SOME = [k % 2 == 0 for k in range(COUNT)]
# Each takes lists that it may write, and returns what it computes.
CALLS = {
    "a norm of a tuple": lambda grads, _: gradkit.grad_norm(tuple(grads)),
    "a norm of a dict": lambda grads, _: gradkit.grad_norm({"a": grads[:4], "b": grads[4:]}),
    "a scale that is an array": lambda grads, others: gradkit.grad_norm(
        grads, scale=gradkit.grad_norm(others)
    ),
    "a clip of a dict": lambda grads, _: (gradkit.clip_grad_norm({"a": grads}, 1.0), *grads),
    "a clip of some": lambda grads, _: (gradkit.clip_grad_norm(grads, 1.0, clip=SOME), *grads),
    "a clip by some": lambda grads, _: (gradkit.clip_grad_norm(grads, 1.0, count=SOME), *grads),
    "a clip by a known norm": lambda grads, others: gradkit.clip_grads_with_norm(
        grads, norm=gradkit.grad_norm(others), max_norm=1.0
    ),
    "new gradients": lambda grads, _: _flat(gradkit.clip_by_global_norm(grads, 1.0)),
    "new gradients, some clipped": lambda grads, _: _flat(
        gradkit.clip_by_global_norm(grads, 1.0, clip=SOME)
    ),
    "sums": lambda grads, others: gradkit.accumulate_grads(grads, others, scale=0.5),
    "compensated sums": lambda grads, others: gradkit.accumulate_grads(
        grads, others, compensation=[other * 0 for other in others]
    ),
    "averages": lambda grads, others: gradkit.ema_update(grads, others, 0.75),
    "a step": lambda grads, others: gradkit.adamw_update(
        grads, others, *([other * 0 for other in others] for _ in range(2)), 1, lr=0.1
    ),
    "a choice": lambda grads, others: gradkit.keep_if(True, others, grads),
    "a choice against": lambda grads, others: gradkit.keep_if(False, others, grads),
}


def _flat(clipped):
    grads, norm = clipped
    return *grads, norm


def lists():
    rng = np.random.default_rng(0)
    shapes = [(k % 3 + 1, 4) for k in range(COUNT)]
    dtypes = [np.float32, np.float64, np.float16]
    kinds = [dtypes[k // 4] for k in range(COUNT)]
    return [
        [rng.standard_normal(s).astype(d) for s, d in zip(shapes, kinds, strict=True)]
        for _ in range(2)
    ]


def as_list(found):
    return list(found) if isinstance(found, (list, tuple)) else [found]


@pytest.fixture
def viewed(monkeypatch):
    """The tensors that were viewed in lists, one by one."""
    seen, views = [], Torch.views

    def noting(self, arrays, *, write):
        seen.extend(arrays)
        return views(self, arrays, write=write)

    monkeypatch.setattr(Torch, "views", noting)
    return seen


@pytest.mark.parametrize("name", CALLS)
def test_compiled_code_takes_tensors_themselves(name, viewed):
    expected = as_list(CALLS[name](*lists()))
    found = as_list(CALLS[name](*([torch.from_numpy(a) for a in each] for each in lists())))
    assert len(found) == len(expected)
    for tensor, array in zip(found, expected, strict=True):
        assert type(tensor) is torch.Tensor
        assert tensor.numpy().tobytes() == array.tobytes()
    assert len(viewed) <= VIEWED.get(name, 2)


def test_new_gradients_are_contiguous_and_own_their_memory():
    grads = [torch.randn(4, 6).t(), torch.randn(3, 4)[:, ::2], torch.zeros(0)]
    clipped, norm = gradkit.clip_by_global_norm(grads[:2], 1.0)
    for new, old in zip(clipped, grads, strict=False):
        torch.testing.assert_close(new, (old / norm).to(old.dtype))
        assert new.is_contiguous()
        assert new.untyped_storage().resizable()
    (empty,), norm = gradkit.clip_by_global_norm(grads[2:], 1.0)
    assert (empty.shape, float(norm)) == ((0,), 0.0)


def test_each_may_be_its_own_partner():
    buffers = [torch.arange(4.0), torch.ones(4)]
    gradkit.accumulate_grads(buffers, buffers)
    assert torch.equal(buffers[0], 2 * torch.arange(4.0))
