"""A program with another library's arrays, whose types have no dtypes: theirs come out.

``Tensor`` stands for any library that supports DLPack. `frameworks.py` has PyTorch's and JAX's own
types. CuPy's arrays have none: to a type checker they are ``Any``.
"""

from collections.abc import Iterator
from typing import Any, assert_type

import gradkit
from gradkit.clipping import clip_grad_norm


class Tensor:
    """An array, as far as types go."""

    def __dlpack__(self, *, stream: int | None = None) -> Any:
        raise NotImplementedError

    def __dlpack_device__(self) -> tuple[int, int]:
        raise NotImplementedError


class Parameter:
    """A parameter that has a gradient."""

    grad: Tensor | None = None


def each(grads: list[Tensor]) -> Iterator[Tensor]:
    yield from grads


def containers(tensor: Tensor, limit: Tensor, parameters: list[Parameter]) -> None:
    grads = {"w": tensor, "b": tensor}
    nested: dict[str, list[dict[str, Tensor]]] = {"layers": [grads], "head": []}
    assert_type(gradkit.grad_norm(tensor), Tensor)
    assert_type(gradkit.grad_norm(grads), Tensor)
    assert_type(gradkit.grad_norm(nested), Tensor)
    assert_type(gradkit.grad_norm(each([tensor])), Tensor)
    assert_type(gradkit.grads_of(parameters), list[Tensor])
    assert_type(gradkit.clip_grad_norm(gradkit.grads_of(parameters), 1.0), Tensor)
    assert_type(gradkit.named_grads_of({"w": parameters[0]}), dict[str, Tensor])
    assert_type(gradkit.clip_grad_norm([tensor, None], limit, scale=limit), Tensor)
    assert_type(gradkit.grad_norm({"layers": [{"w": tensor, "b": None}]}), Tensor)
    assert_type(gradkit.clip_by_global_norm(tensor, limit)[0], Tensor)
    assert_type(gradkit.clip_by_global_norm(grads, 1.0), tuple[dict[str, Tensor], Any])
    assert_type(gradkit.clip_by_global_norm([tensor], 1.0), tuple[list[Tensor], Any])
    assert_type(gradkit.clip_grads_with_norm(grads, limit, 1.0), dict[str, Tensor])
    assert_type(gradkit.clip_coefficient(tensor, 1.0), Tensor)
    assert_type(gradkit.clip_grad_block_norm(grads, 1.0), dict[str, Tensor])
    assert_type(gradkit.clip_by_block_norm([tensor], 1.0), tuple[list[Tensor], list[Tensor]])
    assert_type(gradkit.clip_grad_adaptive(tensor, tensor), Tensor)
    assert_type(gradkit.per_tensor_norms(grads), dict[str, Tensor])
    assert_type(gradkit.per_tensor_norms(grads, flat=True), Tensor)
    assert_type(gradkit.grad_stats(nested).zeros, Tensor)
    assert_type(clip_grad_norm(grads, 1.0), Tensor)
    assert_type(gradkit.accumulate_grads(grads, grads, scale=limit), dict[str, Tensor])
    assert_type(gradkit.accumulate_grads(grads, grads, compensation=grads), dict[str, Tensor])
    gradkit.accumulate_grads(grads, grads, rounding="stochastic", seed=limit, offsets={"w": 0})
    gradkit.zero_grad(each([tensor]))


def norms(x: Tensor, scale: Tensor, limit: Tensor) -> None:
    y, mean, inv_std = gradkit.layer_norm(x, scale)
    assert_type(mean, Tensor)
    assert_type(gradkit.layer_norm_grad(y, x, scale, mean, inv_std), tuple[Tensor, Tensor, Tensor])
    assert_type(gradkit.layer_norm_grad(y, x, None, mean, inv_std), tuple[Tensor, None, None])
    assert_type(gradkit.rms_norm(x), tuple[Tensor, Tensor])
    assert_type(gradkit.batch_norm(x, scale, scale), tuple[Tensor, Tensor, Tensor])
    assert_type(gradkit.spike_guard_update(x, limit), tuple[Tensor, Tensor])
    assert_type(gradkit.SpikeGuard().update(limit), Tensor)
    assert_type(gradkit.step_verdict(limit, limit=limit, found_inf=limit), Tensor)
    assert_type(gradkit.keep_if(limit, [x], [x]), list[Tensor])
    assert_type(gradkit.ema_update([x], [x], limit), list[Tensor])
    assert_type(gradkit.adamw_update([x], [x], [x], [x], limit, lr=limit), list[Tensor])
