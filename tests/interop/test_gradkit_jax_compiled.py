"""Compiled code that XLA calls by itself: the calls that do, and their results."""

import re
import subprocess
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

import gradkit
import gradkit.jax
from gradkit.jax import _compiled
from tests.tolerances import assert_same_bits

X = np.random.default_rng(0).normal(size=(6, 4, 5)).astype(np.float32)
ROW, CHANNELS = np.linspace(1, 2, 5, dtype=np.float32), np.linspace(1, 2, 4, dtype=np.float32)
EACH, HALF = np.ones((6, 1, 5), np.float32), X.astype(np.float16)
GRADS, SOME = {"w": X, "b": ROW}, {"w": True, "b": False}


def targets(function, *given):
    """Names of the targets that a jitted function calls."""
    program = jax.jit(function).lower(*given).compile().as_text()
    return re.findall('custom_call_target="([^"]*)"', program)


def both(norm):
    """Both passes of a norm."""

    def passes(*given):
        y, backward = jax.vjp(norm, *given)
        return y, backward(y)

    return passes


def batch_norm_with_running(x, mean, var):
    return gradkit.jax.batch_norm(x, running_mean=mean, running_var=var)


def passes(name):
    return [name, f"{name}_grad"]


WITHOUT_PYTHON = {
    "layer_norm": (both(gradkit.jax.layer_norm), (X, ROW, ROW), passes("layer_norm")),
    "layer_norm, one scale per sample": (
        both(gradkit.jax.layer_norm),
        (X, EACH, EACH),
        passes("layer_norm"),
    ),
    "rms_norm": (both(gradkit.jax.rms_norm), (X, ROW), passes("rms_norm")),
    "add_rms_norm": (lambda *a: gradkit.jax.add_rms_norm(*a), (X, X, ROW), ["add_rms_norm"]),
    "gated_rms_norm": (both(gradkit.jax.gated_rms_norm), (X, X, ROW), passes("gated_rms_norm")),
    "group_norm": (
        both(lambda x, s: gradkit.jax.group_norm(x, 2, s)),
        (X, CHANNELS),
        passes("group_norm"),
    ),
    "batch_norm": (
        both(lambda *a: gradkit.jax.batch_norm(*a)[0]),
        (X, CHANNELS, CHANNELS),
        passes("batch_norm"),
    ),
    "batch_norm, running": (batch_norm_with_running, (X, CHANNELS, CHANNELS), ["batch_norm"]),
    "batch_norm_inference": (
        both(lambda x, mean, var: gradkit.jax.batch_norm_inference(x, None, None, mean, var)),
        (X, CHANNELS, CHANNELS),
        passes("batch_norm_inference"),
    ),
    "grad_norm": (gradkit.jax.grad_norm, (GRADS,), ["clip"]),
    "clip_by_global_norm": (
        lambda grads, limit: gradkit.jax.clip_by_global_norm(grads, limit, nonfinite="zero"),
        (GRADS, np.float32(1)),
        ["clip"],
    ),
    "clip_by_global_norm of some": (
        lambda grads: gradkit.jax.clip_by_global_norm(grads, 1.0, clip=SOME, count=SOME),
        (GRADS,),
        ["clip"],
    ),
    "accumulate_grads": (gradkit.jax.accumulate_grads, (GRADS, GRADS), ["accumulate"]),
    "accumulate_grads, compensated": (
        lambda buffers, kept, grads: gradkit.jax.accumulate_grads(
            buffers, grads, compensation=kept
        ),
        (GRADS, GRADS, GRADS),
        ["accumulate"],
    ),
}


@pytest.mark.parametrize("name", WITHOUT_PYTHON)
def test_no_python_runs(name):
    function, given, wanted = WITHOUT_PYTHON[name]
    assert targets(function, *given) == [f"gradkit.{operation}" for operation in wanted]


@pytest.mark.parametrize(
    "call",
    [
        lambda: both(gradkit.jax.invertible_rms_norm)(X, ROW),  # whose scale is checked
        lambda: gradkit.jax.accumulate_grads(HALF, HALF, rounding="stochastic"),
    ],
)
def test_the_rest_is_pythons(call):
    found = targets(call)
    assert any("callback" in target for target in found)
    assert jax.tree.all(jax.tree.map(np.all, jax.tree.map(np.isfinite, call())))


def test_examples_are_one_call_unless_they_differ_in_the_scale():
    """Each is what the example gives by itself."""
    norm = gradkit.jax.layer_norm
    scales = np.linspace(1, 3, 30, dtype=np.float32).reshape(6, 5)
    for axes, scale in ((None, ROW), (0, scales)):
        each = jax.jit(jax.vmap(jax.vmap(norm, (0, None)), (0, axes)))
        made = each(X, scale)
        for k in range(6):
            own = scale if axes is None else scale[k]
            assert_same_bits(made[k], gradkit.layer_norm(X[k], own)[0])
    program = jax.jit(jax.vmap(norm, (0, None))).lower(X, ROW).compile().as_text()
    assert "together = dense<[1, 0, 1, 1, 1]>" in program
    # A gradient of the scale is a sum for each example.
    slopes = jax.jit(jax.vmap(jax.grad(lambda s, x: (norm(x, s) ** 2).sum()), (None, 0)))(ROW, X)
    for k in range(6):
        y, mean, inv_std = gradkit.layer_norm(X[k], ROW)
        _, ref, _ = gradkit.layer_norm_grad(2 * y, X[k], ROW, mean, inv_std)
        assert_same_bits(slopes[k], ref)


def test_operands_that_examples_share():
    """Of a gradient that needs x of all examples and dy of each."""
    pull = jax.jit(jax.vmap(jax.vjp(gradkit.jax.rms_norm, X[0])[1]))
    _, inv_std = gradkit.rms_norm(X[0])
    for k, (dx,) in enumerate(zip(*pull(X), strict=True)):
        assert_same_bits(dx, gradkit.rms_norm_grad(X[k], X[0], None, inv_std)[0])


@pytest.mark.parametrize("scale", [np.ones((0, 5), np.float32), ROW])
def test_no_examples(scale):
    norm = jax.jit(jax.vmap(gradkit.jax.layer_norm, (0, 0 if scale.ndim == 2 else None)))
    assert norm(np.ones((0, 3, 5), np.float32), scale).shape == (0, 3, 5)


def test_an_infinite_scale_makes_finite_gradients_zero():
    clip = jax.jit(lambda g, by: gradkit.jax.clip_by_global_norm(g, 1.0, scale=by))
    clipped, norm = clip(GRADS, np.float32(np.inf))
    assert norm == np.inf
    assert not any(np.any(array) for array in clipped.values())


@pytest.mark.parametrize("limit", [0.0, 1.0, 3.5, np.inf, -1.0, np.nan])
@pytest.mark.parametrize("eps", [0.0, 1e-6, 5.0])
@pytest.mark.parametrize("mode", ["max", "add"])
def test_the_coefficient_is_that_of_direct_calls(limit, eps, mode):
    """Limits on the device may be negative or NaN, which a number of the host's may not."""
    grads = np.array([1.5, -2, 2.5, 0], np.float32)  # whose norm is 3.535...
    options = {"eps": eps, "eps_mode": mode}
    clip = jax.jit(lambda g, m: gradkit.jax.clip_by_global_norm(g, m, **options)[0])
    ref = np.full(4, np.nan, np.float32)
    if limit >= 0:
        ref = gradkit.clip_by_global_norm(grads, limit, **options)[0]
    np.testing.assert_array_equal(clip(grads, np.float32(limit)), ref)


def test_the_number_of_threads_may_change_after_a_program_is_compiled(run_alone):
    said = run_alone(
        """
        import os
        import numpy as np, jax, gradkit.jax
        norm = jax.jit(gradkit.jax.layer_norm)
        x = np.random.default_rng(0).normal(size=(1024, 1024)).astype(np.float32)
        count = lambda: len(os.listdir("/proc/self/task"))
        once = np.asarray(norm(x))
        before = count()
        gradkit.set_num_threads(6)
        again = np.asarray(norm(x))
        print(count() - before, (once == again).all())
        """,
        GRADKIT_NUM_THREADS="1",
    )
    assert said.split() == ["5", "True"]


def test_calls_on_two_threads_at_once():
    norm = jax.jit(gradkit.jax.layer_norm)
    x = np.random.default_rng(0).normal(size=(512, 1024)).astype(np.float32)
    ref, _, _ = gradkit.layer_norm(x)
    with ThreadPoolExecutor(2) as threads:
        assert all(threads.map(lambda _: np.array_equal(norm(x), ref), range(40)))


def test_another_interface_of_xlas_means_python(monkeypatch):
    def refused(*_, **__):
        raise RuntimeError("another version")

    monkeypatch.setattr(jax.ffi, "register_ffi_target", refused)
    assert not _compiled._registered()


def test_numpy_alone_has_nothing_compiled(run_alone):
    said = run_alone(
        """
        import numpy as np, jax, gradkit.jax
        program = jax.jit(gradkit.jax.layer_norm).lower(np.ones((2, 3), np.float32)).compile()
        print('custom_call_target="gradkit.layer_norm"' in program.as_text())
        """,
        GRADKIT_CPU="numpy",
    )
    assert said.split() == ["False"]


LAYOUTS = {
    "XLA_FFI_Extension_Base": ("XlaExtension", {"type": "type", "next": "next"}),
    "XLA_FFI_Buffer": (
        "XlaBuffer",
        {"dtype": "dtype", "data": "data", "rank": "ndim", "dims": "shape"},
    ),
    "XLA_FFI_Args": ("XlaBuffers", {"size": "count", "types": "kinds", "args": "at"}),
    "XLA_FFI_Rets": ("XlaBuffers", {"size": "count", "types": "kinds", "rets": "at"}),
    "XLA_FFI_ByteSpan": ("XlaName", {"ptr": "text", "len": "length"}),
    "XLA_FFI_Array": ("XlaNumbers", {"dtype": "dtype", "size": "count", "data": "data"}),
    "XLA_FFI_Attrs": (
        "XlaAttributes",
        {"size": "count", "types": "kinds", "names": "names", "attrs": "at"},
    ),
    "XLA_FFI_Api_Version": ("XlaVersion", {"major_version": "major", "minor_version": "minor"}),
    "XLA_FFI_Metadata": ("XlaMetadata", {"api_version": "version", "traits": "traits"}),
    "XLA_FFI_Metadata_Extension": (
        "XlaMetadataExtension",
        {"extension_base": "base", "metadata": "metadata"},
    ),
    "XLA_FFI_Error_Create_Args": ("XlaErrorCreation", {"message": "message", "errc": "code"}),
    "XLA_FFI_Api": ("XlaApi", {"api_version": "version", "XLA_FFI_Error_Create": "create_error"}),
    "XLA_FFI_CallFrame": (
        "XlaFrame",
        {"api": "api", "stage": "stage", "args": "operands", "rets": "results"}
        | {"attrs": "attributes"},
    ),
}
NUMBERS = {
    "XLA_FFI_Extension_Metadata": 1,
    "XLA_FFI_Error_Code_RESOURCE_EXHAUSTED": 8,
    "XLA_FFI_DataType_PRED": 1,
    "XLA_FFI_DataType_F16": 10,
    "XLA_FFI_DataType_F32": 11,
    "XLA_FFI_DataType_F64": 12,
    "XLA_FFI_DataType_BF16": 16,
}


def test_structures_lie_as_xlas_header_has_them(tmp_path):
    """The header of the installed jaxlib and ``kernels/cpu/xla.h``, to one compiler."""
    checks = [
        f"static_assert(offsetof({theirs}, {field}) == offsetof({ours}, {own}));"
        for theirs, (ours, fields) in LAYOUTS.items()
        for field, own in fields.items()
    ]
    checks += [f"static_assert({name} == {value});" for name, value in NUMBERS.items()]
    checks += ["static_assert(XLA_FFI_API_MAJOR == 0);"]
    source = tmp_path / "layouts.cpp"
    lines = ["#include <xla/ffi/api/c_api.h>", '#include "xla.h"', *checks]
    source.write_text("\n".join(lines) + "\n")
    flags = ["-std=c++17", "-fsyntax-only", "-Ikernels/cpu", f"-I{jax.ffi.include_dir()}"]
    done = subprocess.run(["g++", *flags, source], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
