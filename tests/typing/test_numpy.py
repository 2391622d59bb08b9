"""A NumPy program: what is an array at run time is one for type checkers.

Norms and statistics have the types of the gradients and the data, whatever their dtypes at run
time: norms are float64. Gradients keep their dtypes.
"""

from collections.abc import Iterator
from typing import Any, TypedDict, assert_type

import numpy as np
from numpy.typing import NDArray

import gradkit
from gradkit import distributed

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]


class Running(TypedDict):
    """Statistics that ``batch_norm`` updates, to pass by ``**``."""

    running_mean: Float32
    running_var: Float32


def _ones(*shape: int) -> Float32:
    return np.ones(shape, np.float32)


def _each(grads: dict[str, Float32]) -> Iterator[Float32]:
    yield from grads.values()


def test_norms_and_clipping() -> None:
    grads = {"w": _ones(2, 3), "b": _ones(3)}
    nested = {"layers": [grads, grads], "head": [{"w": _ones(2)}]}
    norm = assert_type(gradkit.grad_norm(grads), Float32)
    assert_type(gradkit.grad_norm([*grads.values(), None]), Float32)
    assert_type(gradkit.grad_norm(_each(grads)), Float32)
    assert_type(gradkit.grad_norm(grads.values()), Float32)
    assert_type(gradkit.grad_norm(nested, "inf"), Float32)
    assert_type(gradkit.grad_norm({"layers": [{"w": _ones(2), "b": None}]}), Float32)
    assert_type(gradkit.clip_grad_norm(grads, 1.0, nonfinite="zero"), Float32)
    assert_type(gradkit.clip_by_global_norm(grads, 1), tuple[dict[str, Float32], Any])
    assert_type(gradkit.clip_by_global_norm(_ones(3), 1), tuple[Float32, Any])
    gradkit.clip_by_global_norm(_each(grads), 1)
    clipped, _ = gradkit.clip_by_global_norm({"layers": [_ones(2)]}, 1)
    assert_type(clipped, dict[str, list[Float32]])
    assert_type(gradkit.clip_grads_with_norm(grads, norm, 1.0), dict[str, Float32])
    assert_type(gradkit.clip_coefficient(norm, 1.0), Float32)
    assert_type(gradkit.clip_coefficient(2.0, 1.0), Float64)
    gradkit.scale_grads(_each(grads), 0.5)
    assert_type(gradkit.clip_grad_value(grads["w"], 0.5), Float32)
    assert_type(gradkit.names_of(nested), list[str])


def test_numbers() -> None:
    """Whatever holds a number at run time may be one."""
    grads, found = [_ones(3)], np.zeros((), np.bool_)
    for limit in (1, 1.0, np.float16(1), np.float32(1), np.float64(1), np.int64(1)):
        gradkit.clip_grad_norm(grads, limit, scale=np.float32(1), eps=np.float32(1e-6))
    gradkit.clip_grad_norm(grads, np.array(1.0), np.float32(2), scale=np.array(1.0, np.float32))
    gradkit.clip_grad_norm(grads, gradkit.grad_norm(grads), found_inf=found)
    gradkit.accumulate_grad(grads[0], _ones(3), do_update=np.array(True), scale=np.float32(1))
    gradkit.layer_norm(_ones(2, 3), axis=np.int64(1), eps=np.float32(1e-5))
    assert not found


def test_each_by_a_norm_of_its_own() -> None:
    grads = {"w": _ones(2, 3), "b": _ones(3)}
    norms = gradkit.clip_grad_block_norm(grads, 1.0, axis={"w": 1, "b": None}, rms=True)
    assert {name: float(norm.max()) for name, norm in norms.items()}
    gradkit.clip_grad_block_norm(_ones(2, 3), np.float32(1), axis=(1,))
    both = gradkit.clip_by_block_norm(list(grads.values()), 1.0, axis=lambda _name, _grad: None)
    assert_type(both[0], list[Float32])
    assert {name: float(norm) for name, norm in gradkit.clip_grad_adaptive(grads, grads).items()}
    copies = gradkit.clip_by_adaptive_norm(grads, grads, np.float32(0.01))
    assert_type(copies[0], dict[str, Float32])
    assert {name: float(norm) for name, norm in gradkit.per_tensor_norms(grads).items()}
    assert float(gradkit.per_tensor_norms(grads, np.inf, flat=True).max())
    stats = assert_type(gradkit.grad_stats(grads), gradkit.GradStats[Float32])
    assert_type(stats["w"], gradkit.GradStat[Float32])
    assert_type(stats["w"].norm, Float32)
    assert_type(stats.nonfinite, Float32)
    assert_type(stats.as_dict(), dict[str, dict[str, float]])


def test_accumulation() -> None:
    grads = {"w": _ones(2, 3)}
    buffer: Float64 = np.zeros((2, 3))
    buffers = {"w": buffer}
    assert_type(gradkit.accumulate_grad(buffer, grads["w"]), Float64)
    assert_type(gradkit.accumulate_grad_v2(buffer, _ones(3), overwrite=True), tuple[bool, Float64])
    assert gradkit.accumulate_grads(buffers, grads, norm_out=np.zeros(())) is buffers
    half = [np.zeros(3, np.float16)]
    gradkit.accumulate_grads(half, half, rounding="stochastic", seed=np.int64(1), offsets=[7])
    kept = {"w": np.zeros_like(buffer)}
    assert gradkit.accumulate_grads({"w": buffer}, grads, compensation=kept)["w"] is buffer
    assert_type(gradkit.zero_grad(grads), dict[str, Float32])
    gradkit.zero_grad(_each(grads))


def test_spike_guard() -> None:
    guard = gradkit.SpikeGuard(threshold=np.float32(3), warmup=2)
    assert_type(guard.update(gradkit.grad_norm(_ones(3))), Float32)
    assert_type(guard.update(1.5), Float64)
    assert_type(gradkit.spike_guard_init(), Float64)
    state, limit = gradkit.spike_guard_update(gradkit.spike_guard_init(), np.float32(1), decay=0.9)
    assert_type(state, Float64)
    assert_type(limit, Float64)


def test_steps() -> None:
    grads = {"w": _ones(3)}
    gradkit.clip_grad_norm(grads, 1.0, clip=lambda _, grad: grad.ndim > 1, count={"w": True})
    gradkit.clip_by_global_norm(grads, 1.0, clip={"w": False}, eps_mode="add")
    verdict = gradkit.step_verdict(2.0, limit=gradkit.SpikeGuard(on_spike="skip").update(2.0))
    assert_type(verdict, NDArray[np.bool_])
    limits = gradkit.SpikeGuard().update(gradkit.per_tensor_norms([_ones(3)], flat=True))
    gradkit.clip_grad_block_norm([_ones(3)], limits)
    gradkit.clip_grad_block_norm({"w": _ones(3)}, {"w": 1.0})
    assert_type(gradkit.keep_if(verdict, [_ones(3)], [_ones(3)]), list[Float32])
    assert_type(gradkit.ema_update({"w": _ones(3)}, grads, 0.999), dict[str, Float32])
    state = {"w": _ones(3)}, {"w": _ones(3)}
    moved = gradkit.adamw_update({"w": _ones(3)}, grads, *state, 1, lr=0.1, verdict=verdict)
    assert_type(moved, dict[str, Float32])
    assert_type(gradkit.sgd_update([_ones(3)], [_ones(3)], lr=np.array(0.1)), list[Float32])


def test_row_norms() -> None:
    x, scale = _ones(4, 3), np.ones(3, np.float32)
    wide: Float32 = scale
    y, mean, inv_std = gradkit.layer_norm(x, wide, wide)
    assert_type(y, Float32)
    assert isinstance(mean, np.ndarray)
    assert_type(
        gradkit.layer_norm_grad(y, x, wide, mean, inv_std), tuple[Float32, Float32, Float32]
    )
    assert_type(gradkit.layer_norm_grad(y, x, None, mean, inv_std), tuple[Float32, None, None])
    assert_type(gradkit.layer_norm_inverse(y, wide, wide, mean, inv_std), Float32)
    found = gradkit.invertible_layer_norm_grad(y, y, wide, None, inv_std, axis=-1)
    assert_type(found, tuple[Float32, Float32, None])
    y, inv_std = gradkit.rms_norm(x, wide, eps=1e-6, out=(None, None))
    assert_type(gradkit.rms_norm_grad(y, x, wide, inv_std), tuple[Float32, Float32])
    found_from_y = gradkit.invertible_rms_norm_grad(y, y, None, inv_std, ds=y)
    assert_type(found_from_y, tuple[Float32, None])
    y, inv_std = gradkit.gated_rms_norm(x, x, wide, activation="sigmoid", norm_before_gate=False)
    found_gated = gradkit.gated_rms_norm_grad(y, x, x, wide, inv_std)
    assert_type(found_gated, tuple[Float32, Float32, Float32])
    y, s, inv_std = gradkit.add_rms_norm(x, x, wide, scale_offset=1)
    assert_type(s, Float32)
    found_too = gradkit.rms_norm_grad(y, s, None, inv_std, ds=y)
    assert_type(found_too, tuple[Float32, None])
    y, s, mean, inv_std = gradkit.add_layer_norm(x, x)
    assert_type(gradkit.layer_norm_grad(y, s, None, mean, inv_std, ds=y)[0], Float32)


def test_group_norm() -> None:
    x, scale = _ones(4, 6), _ones(6)
    y, mean, inv_std = gradkit.group_norm(x, 2, scale, channel_axis=-1)
    assert_type(y, Float32)
    found = gradkit.group_norm_grad(y, x, None, mean, inv_std, channel_axis=-1)
    assert_type(found, tuple[Float32, None, None])


def test_batch_norm() -> None:
    x, scale = _ones(4, 3), _ones(3)
    (group,) = distributed.threads(1)
    y, mean, inv_std = gradkit.batch_norm(x, scale, scale, engine="native", group=group)
    assert_type(y, Float32)
    assert_type(
        gradkit.batch_norm_grad(y, x, scale, mean, inv_std), tuple[Float32, Float32, Float32]
    )
    running: Running = {"running_mean": _ones(3), "running_var": _ones(3)}
    assert_type(gradkit.batch_norm(x, **running, momentum=0.1)[0], Float32)
    known = _ones(3), _ones(3)
    assert_type(gradkit.batch_norm_inference(x, scale, None, *known), Float32)
    assert_type(
        gradkit.batch_norm_inference_grad(y, x, None, *known, eps=1e-5),
        tuple[Float32, None, None],
    )


def test_running() -> None:
    threads = assert_type(gradkit.get_num_threads(), int)
    assert_type(gradkit.set_num_threads(threads), None)
    with gradkit.use_cpu_backend("numpy") as nothing:
        assert_type(nothing, None)
    assert_type(gradkit.warmup({"w": _ones(3)}, gradkit.clip_grad_norm), int)
    assert_type(gradkit.last_engine(), str | None)


def test_errors() -> None:
    error = gradkit.NonFiniteNormError(float("nan"), ("w",))
    assert_type(error.names, tuple[str, ...])
    assert isinstance(error, gradkit.GradkitError)
    assert issubclass(gradkit.RankError, gradkit.GradkitError)
