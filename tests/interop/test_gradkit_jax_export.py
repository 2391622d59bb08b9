"""``gradkit.jax``'s functions in ``jax.export``, with sizes that have names; traced numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import gradkit.jax
from gradkit import _host
from tests.interop.test_gradkit_jax_norms import ALONE, CASES, outputs, passes
from tests.tolerances import assert_all_same_bits

(BATCH,) = export.symbolic_shape("batch")


def checks():
    """Calls of gradkit's compiled code, of which JAX does not know that they stay as they are."""
    return [
        export.DisabledSafetyCheck.custom_call(f"gradkit.{name}")
        for name in _host.compiled().xla_handlers
    ]


def exported(function, *shapes):
    """The function out of the bytes that are kept of it."""
    made = export.export(jax.jit(function), disabled_checks=checks())(*shapes)
    return export.deserialize(made.serialize()).call


def arguments(case, count=None):
    """Arrays of a case with so many examples along the first axis of data, or their shapes."""
    given = case.arguments("float32", "float32")
    if count is not None:
        data = [np.resize(a, (count, *a.shape[1:])) for a in given[: case.data]]
        return data + given[case.data :]
    shapes = [(BATCH, *a.shape[1:]) if k < case.data else a.shape for k, a in enumerate(given)]
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


@pytest.mark.parametrize("name", ALONE)
def test_a_norm_for_a_batch_of_any_size(name):
    case = CASES[name]
    found = exported(lambda *given: outputs(case.ours(*given)), *arguments(case))
    for count in (1, 4, 7):
        given = arguments(case, count)
        assert_all_same_bits(found(*given), outputs(case.ours(*given)))


@pytest.mark.parametrize("name", [name for name in ALONE if "invertible" not in name])
def test_its_gradients(name):
    """Those of parameters are sums over examples in another order."""
    case = CASES[name]
    found = exported(passes(case.ours), *arguments(case))
    for count in (1, 5):
        given = arguments(case, count)
        for got, ref in zip(found(*given), passes(case.ours)(*given), strict=True):
            np.testing.assert_allclose(got, ref, rtol=1e-5, atol=1e-5)


def test_several_sizes_in_front_of_the_axis():
    b, t = export.symbolic_shape("b, t")
    scale = np.arange(1.0, 7, dtype="f4")
    norm = lambda x, s: gradkit.jax.rms_norm(x, s, axis=2)  # noqa: E731
    shapes = [(b, t, 6), (b, 4, 6), (4, t, 6), (2 * b, t, 6)]
    x = np.random.default_rng(0).normal(size=(4, 4, 6)).astype("f4")
    for shape in shapes:
        found = exported(norm, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in (shape, (6,))))
        assert_all_same_bits([found(x, scale)], [norm(x, scale)])


def test_lists_of_fixed_and_of_other_sizes():
    grads = {"w": np.ones((4, 3), "f4"), "b": np.full(3, 2, "f4")}
    fixed = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), grads)
    symbolic = fixed | {"w": jax.ShapeDtypeStruct((BATCH, 3), jnp.float32)}
    clip = lambda g: gradkit.jax.clip_by_global_norm(g, 1.0)  # noqa: E731
    add = lambda g: gradkit.jax.accumulate_grads(g, g, scale=0.5)  # noqa: E731
    for function, shapes in ((clip, fixed), (clip, symbolic), (add, fixed)):
        found = exported(function, shapes)(grads)
        assert_all_same_bits(*map(jax.tree.leaves, (found, function(grads))))
    by_unit = lambda g: gradkit.jax.clip_by_block_norm(g, 1.0, axis=0)  # noqa: E731
    for function in (add, by_unit):
        said = r"'w' has shape \(batch, 3\): gradkit.*no symbolic sizes"
        with pytest.raises(TypeError, match=said):
            exported(function, symbolic)


@pytest.mark.parametrize(
    ("norm", "shape", "said"),
    [
        (gradkit.jax.rms_norm, (4, "n"), r"x has shape \(4, n\).*rms_norm, those in front of axis"),
        (lambda x: gradkit.jax.group_norm(x, 2), (4, 6, "n"), "group_norm, the first may be"),
        (gradkit.jax.batch_norm, ("n", 6), "gradkit.jax.batch_norm, none of which may be"),
        (lambda x: gradkit.jax.layer_norm(x, x), ("n", 6), r"scale has shape \(n, 6\) and x"),
    ],
)
def test_sizes_that_have_no_names(norm, shape, said):
    shape = export.symbolic_shape(", ".join(map(str, shape)))
    with pytest.raises(TypeError, match=said):
        jax.eval_shape(norm, jax.ShapeDtypeStruct(shape, jnp.float32))


def test_jax_says_which_calls_it_does_not_know():
    with pytest.raises(ValueError, match=r"gradkit\.rms_norm"):
        export.export(jax.jit(gradkit.jax.rms_norm))(jax.ShapeDtypeStruct((2, 3), jnp.float32))


X = np.ones((4, 6), "f4")
NUMBERS = {
    "eps": lambda n: gradkit.jax.layer_norm(X, eps=n),
    "scale_offset": lambda n: gradkit.jax.rms_norm(X, X[0], scale_offset=n),
    "axis": lambda n: gradkit.jax.rms_norm(X, axis=n),
    "num_groups": lambda n: gradkit.jax.group_norm(X, n),
    "channel_axis": lambda n: gradkit.jax.group_norm(X, 2, channel_axis=n),
    "momentum": lambda n: gradkit.jax.batch_norm(
        X, running_mean=X[0], running_var=X[0], momentum=n
    ),
    "norm_before_gate": lambda n: gradkit.jax.gated_rms_norm(X, X, norm_before_gate=n),
    "norm_type": lambda n: gradkit.jax.grad_norm(X, n),
    "replicas": lambda n: gradkit.jax.clip_by_global_norm(X, 1.0, replicas=n, axis_name="i"),
    "clip": lambda n: gradkit.jax.clip_by_global_norm(X, 1.0, clip=n),
    "rms": lambda n: gradkit.jax.clip_by_block_norm(X, 1.0, rms=n),
}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [1.0, 1, True])
def test_a_traced_number_is_named(name, value):
    said = f"{name} must be an? .*, which is being traced and has no value yet; pass a Python value"
    with pytest.raises(TypeError, match=said):
        jax.jit(NUMBERS[name])(value)
    with pytest.raises(TypeError, match=said):
        jax.vmap(NUMBERS[name])(np.array([value]))


def test_a_traced_flag_of_another_dtype_is_named():
    add = lambda n: gradkit.jax.accumulate_grads(X, X, overwrite=n)  # noqa: E731
    with pytest.raises(TypeError, match="overwrite must be a bool, or a 0-d bool array, not int32"):
        jax.jit(add)(1)
