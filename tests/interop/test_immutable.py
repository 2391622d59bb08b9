"""JAX and TensorFlow: read in place, never written, and what holds no values is refused."""

import importlib
import re

import numpy as np
import pytest

import gradkit

TWINS = {
    "clip_grad_norm": (lambda g: gradkit.clip_grad_norm(g, 1.0), "use clip_by_global_norm"),
    "clip_grad_block_norm": (
        lambda g: gradkit.clip_grad_block_norm(g, 1.0),
        "use clip_by_block_norm",
    ),
    "clip_grad_adaptive": (lambda g: gradkit.clip_grad_adaptive(g, g), "use clip_by_adaptive_norm"),
    "clip_grad_value": (lambda g: gradkit.clip_grad_value(g, 1.0), "use its own clip"),
    "scale_grads": (lambda g: gradkit.scale_grads(g, 0.5), r"compute coefficient \* g"),
    "zero_grad": (gradkit.zero_grad, "zeros_like"),
    "keep_if": (lambda g: gradkit.keep_if(True, [g * 2], [g]), r"where\(verdict"),
    "accumulate_grad": (lambda g: gradkit.accumulate_grad(g, g), r"compute buffer \+ grad"),
    "accumulate_grad_v2": (lambda g: gradkit.accumulate_grad_v2(g, g), r"or compute buffer \+ g"),
    "accumulate_grads": (lambda g: gradkit.accumulate_grads([g], [g]), r"compute buffer \+ scale"),
    "out": (lambda g: gradkit.grad_norm([g], out=g), "leave out=None"),
    "norm out": (lambda g: gradkit.rms_norm(g, out=(g, None)), "leave out=None"),
    "tree out": (lambda g: gradkit.clip_by_global_norm([g], 1.0, out=([g], None)), "out=None"),
}


@pytest.mark.parametrize("function", list(TWINS))
def test_memory_is_never_written(immutable, function):
    call, instead = TWINS[function]
    grad = immutable.make(np.array([3.0, 4.0], np.float32))
    with pytest.raises(TypeError, match=f"memory is never written; .*{instead}"):
        call(grad)
    np.testing.assert_array_equal(immutable.read(grad), [3, 4])


def test_results_do_not_change_afterwards(immutable):
    """New results share no memory with anything that a later call writes."""
    grad = immutable.make(np.array([3.0, 4.0], np.float32))
    clipped, norm = gradkit.clip_by_global_norm(grad, 1.0)
    for scale in range(1, 20):
        gradkit.clip_by_global_norm(immutable.make(np.full(2, scale, np.float32)), 0.5)
    np.testing.assert_allclose(immutable.read(clipped), [0.6, 0.8], rtol=1e-6)
    assert immutable.read(norm) == 5


def test_big_results_are_taken_over_without_a_copy(immutable, monkeypatch):
    """Each library copies, or aborts, where memory does not start at a multiple of 64."""
    from gradkit._arrays import dlpack

    made = []

    def noting(shape, dtype, aligned=dlpack.aligned):
        made.append(aligned(shape, dtype))
        return made[-1]

    monkeypatch.setattr(dlpack, "aligned", noting)
    clipped, _ = gradkit.clip_by_global_norm(immutable.make(np.ones(1001, np.float32)), 1.0)
    assert immutable.address(clipped) in [n.__array_interface__["data"][0] for n in made]
    assert immutable.address(clipped) % 64 == 0


# JAX


def test_tracers_are_refused(jax):
    for transform in (jax.jit, jax.vmap):
        with pytest.raises(TypeError, match=r"traced by jax.jit.*pure_callback") as caught:
            transform(lambda g: gradkit.clip_by_global_norm(g, 1.0)[0])(np.ones((2, 3), np.float32))
    advised = set(re.findall(r"\w+_\w+", str(caught.value))) - {"pure_callback"}
    assert advised == {"grad_norm", "clip_by_global_norm", "accumulate_grads"}
    assert advised <= {*importlib.import_module("gradkit.jax").__all__}
    with pytest.raises(TypeError, match="norm is being traced"):
        jax.jit(gradkit.SpikeGuard().update)(1.0)
    with pytest.raises(TypeError, match="traced"):
        jax.grad(lambda x: gradkit.rms_norm(x)[0].sum())(jax.numpy.ones(3))


def test_pure_callback_reaches_gradkit(jax):
    @jax.jit
    def clipped(g):
        shape = jax.ShapeDtypeStruct(g.shape, g.dtype)
        return jax.pure_callback(lambda a: gradkit.clip_by_global_norm(a, 1.0)[0], shape, g)

    np.testing.assert_allclose(clipped(jax.numpy.array([3.0, 4.0])), [0.6, 0.8], rtol=1e-6)


def test_deleted_arrays_are_refused(jax):
    grad = jax.numpy.ones(3)
    grad.delete()
    with pytest.raises(ValueError, match=r"grads\[0\] has been deleted"):
        gradkit.grad_norm([grad])


def test_random_keys_are_refused(jax):
    with pytest.raises(TypeError, match=r"grads\[0\] .*PRNGKey"):
        gradkit.grad_norm([jax.random.key(0)])


def test_float32_norms_overflow_to_infinity_and_clip_all_the_same(jax):
    grad = jax.numpy.full(4, 3e38)
    clipped, norm = gradkit.clip_by_global_norm(grad, 1.0)
    assert np.isinf(norm)  # 6e38 is no float32, and JAX holds no float64 here
    np.testing.assert_allclose(clipped, 0.5, rtol=1e-6)  # decided in float64 all the same


@pytest.mark.usefixtures("x64")
def test_with_x64_norms_are_float64(jax):
    jnp = jax.numpy
    grad = jnp.full(4, 3e38, jnp.float32)
    norm = gradkit.grad_norm(grad)
    assert norm.dtype == jnp.float64
    assert abs(norm / 6e38 - 1) < 1e-6
    assert gradkit.clip_coefficient(norm, 1.0).dtype == jnp.float64
    clipped, _ = gradkit.clip_by_global_norm(jnp.array([3.0, 4.0]), 1.0)
    assert clipped.dtype == jnp.float64


def test_arrays_over_several_devices_are_refused_and_their_shards_taken(jax, mesh):
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    grad = jax.device_put(jax.numpy.arange(4.0), spread)
    with pytest.raises(TypeError, match=r"spread over 2 devices.*addressable_shards.*shards_of"):
        gradkit.grad_norm(grad)
    shards = [shard.data for shard in grad.addressable_shards]
    assert abs(gradkit.grad_norm(shards) - 14**0.5) < 1e-6
    second = jax.device_put(jax.numpy.ones(3), jax.devices()[1])
    clipped, norm = gradkit.clip_by_global_norm(second, 0.5)
    assert clipped.device == norm.device == jax.devices()[1]


# TensorFlow


def test_variables_are_no_gradients(tf):
    variable = tf.Variable([3.0, 4.0])
    with pytest.raises(TypeError, match=r"tf.Variable; pass the gradients.*\.value\(\)"):
        gradkit.clip_by_global_norm([variable], 1.0)
    assert float(gradkit.grad_norm([variable.value()])) == 5
    with pytest.raises(TypeError, match="memory is never written"):
        gradkit.zero_grad(variable)


def test_variables_are_read_by_the_norms(tf):
    x, scale = tf.Variable([[1.0, 2.0, 6.0]]), tf.Variable([1.0, 2.0, 1.0])
    results = gradkit.layer_norm(x, scale)
    expected = gradkit.layer_norm(x.numpy(), scale.numpy())
    for got, wanted in zip(results, expected, strict=True):
        assert isinstance(got, tf.Tensor)
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("max_norm", [0.01, 3.0, 100.0])
def test_clipping_by_the_global_norm_is_tensorflows(tf, max_norm):
    hosts = [np.random.default_rng(k).normal(size=shape) for k, shape in enumerate(((), (4, 3)))]
    grads = [tf.constant(host, tf.float32) for host in hosts]
    expected, expected_norm = tf.clip_by_global_norm(grads, max_norm)
    clipped, norm = gradkit.clip_by_global_norm(grads, max_norm)
    for got, want in zip((norm, *clipped), (expected_norm, *expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=3e-6)


def test_symbolic_tensors_are_refused(tf):
    with pytest.raises(TypeError, match=r"symbolic.*tf.numpy_function"):
        tf.function(lambda g: gradkit.clip_by_global_norm(g, 1.0)[0])(tf.ones(3))


def test_numpy_function_reaches_gradkit(tf):
    @tf.function
    def clipped(g):
        return tf.numpy_function(lambda a: gradkit.clip_by_global_norm(a, 1.0)[0], [g], tf.float32)

    np.testing.assert_allclose(clipped(tf.constant([3.0, 4.0])), [0.6, 0.8], rtol=1e-6)


def test_sparse_gradients_are_refused(tf):
    slices = tf.IndexedSlices(tf.ones((1, 2)), tf.constant([0]), tf.constant([3, 2]))
    with pytest.raises(TypeError, match=r"IndexedSlices; pass tf.convert_to_tensor"):
        gradkit.clip_by_global_norm([slices], 1.0)


def test_tensorflow_computes_on_results_without_aborting(run_alone, tf):
    """TensorFlow ends the process at a kernel on memory that is not aligned."""
    assert tf is not None
    run_alone(
        """
        import itertools, numpy as np, tensorflow as tf, gradkit
        dtypes = tf.float16, tf.bfloat16, tf.float32, tf.float64
        for dtype, size in itertools.product(dtypes, (0, 1, 3, 4, 1001)):
            grads = [tf.ones(size, dtype), tf.ones((3, size), dtype)[1:]]
            clipped, norm = gradkit.clip_by_global_norm(grads, 1.0)
            for c, g in zip(clipped, grads):
                assert tf.reduce_sum(tf.abs(c)) <= tf.reduce_sum(g)
            each = gradkit.per_tensor_norms(grads, flat=True)
            assert tf.reduce_sum(each) >= 0
            y, inv_std = gradkit.rms_norm(grads[1])
            tf.reduce_sum(y), tf.reduce_sum(inv_std)
        """
    )
