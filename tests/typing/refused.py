"""Errors at run time that type checkers find too: each line here needs its comment."""

import numpy as np
from numpy.typing import NDArray

import gradkit


def refused(x: NDArray[np.float32]) -> None:
    gradkit.grad_norm(1.0)  # type: ignore[arg-type]
    gradkit.grad_norm(x, "two")  # type: ignore[arg-type]
    gradkit.clip_grad_norm([x])  # type: ignore[call-arg]
    gradkit.clip_grad_norm([x], "1")  # type: ignore[arg-type]
    gradkit.clip_grad_norm([x], 1.0, nonfinite="ignore")  # type: ignore[arg-type]
    gradkit.clip_grad_norm([x], 1.0, error_if_nonfinite=True)  # type: ignore[call-arg]
    gradkit.layer_norm([1.0, 2.0])  # type: ignore[type-var]
    gradkit.layer_norm(x, eps="small")  # type: ignore[arg-type]
    gradkit.rms_norm_grad(x, x, None)  # type: ignore[call-arg]
    gradkit.batch_norm(x, engine="fast")  # type: ignore[arg-type]
    gradkit.accumulate_grad(x, 1.0)  # type: ignore[arg-type]
