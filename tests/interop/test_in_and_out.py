"""Tensors of every framework in and out: no copy in, the caller's own type out."""

import ml_dtypes
import numpy as np
import pytest

import gradkit
from gradkit._arrays import framework_of


def draw(shape, dtype, seed=0):
    """Values that every dtype here holds exactly."""
    values = np.random.default_rng(seed).integers(-16, 17, shape) / 4
    return np.asarray(values).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def wide(array):
    return np.asarray(array, np.float64)


@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4)])
def test_memory_is_read_where_it_lies(typed, shape):
    lib, dtype = typed
    values = draw(shape, dtype)
    array = lib.make(values)
    native = framework_of(array).view(array, write=False)
    assert native.__array_interface__["data"][0] == lib.address(array)
    assert str(native.dtype) == dtype
    np.testing.assert_array_equal(wide(native), wide(values))


def test_numpy_scalars_may_stand_beside_any_framework(mutable):
    grad = mutable.make(np.array([2.0, -4.0], np.float32))
    gradkit.scale_grads(grad, np.array(0.5))
    np.testing.assert_array_equal(mutable.read(grad), [1, -2])
    gradkit.accumulate_grad(grad, np.float32(1.0))
    np.testing.assert_array_equal(mutable.read(grad), [2, -1])
    gradkit.accumulate_grad(grad, np.array(1.0, np.float32), do_update=np.array(False))
    np.testing.assert_array_equal(mutable.read(grad), [2, -1])
    gradkit.accumulate_grad_v2(grad, np.float32(5.0), overwrite=np.array(True))
    np.testing.assert_array_equal(mutable.read(grad), [5, 5])


def test_arrays_of_the_framework_may_be_coefficient_and_flag(mutable):
    grad = mutable.make(np.array([2.0, -4.0], np.float32))
    gradkit.scale_grads(grad, mutable.make(np.array(0.5)))
    np.testing.assert_array_equal(mutable.read(grad), [1, -2])


def test_lists_of_buffers(mutable):
    """With numbers, flags and the norm as the library's own arrays, or NumPy's scalars."""
    number = np.float32(0.5)
    for put in (float, np.array, mutable.make):
        buffers = [mutable.make(np.full(n, 2.0, np.float32)) for n in (3, 500)]
        grads = [mutable.make(np.full(n, 4.0, np.float32)) for n in (3, 500)]
        norm = mutable.make(np.zeros(()))
        gradkit.accumulate_grads(buffers, grads, scale=put(number), norm_out=norm)
        for buffer in buffers:
            np.testing.assert_array_equal(mutable.read(buffer), 4)
        assert float(mutable.read(norm)) == float(mutable.read(gradkit.grad_norm(buffers)))


def test_an_empty_list_is_of_the_library_of_what_is_beside_it(mutable):
    """As a rank has it that owns no parameter: its numbers are the library's own arrays."""
    number = lambda value: mutable.make(np.array(value))  # noqa: E731
    yes, norm, step = map(number, (True, 1.0, np.int64(3)))
    none = mutable.make(np.empty(0))
    for empty in ([], [None], {}):
        given = (empty, empty)
        gradkit.accumulate_grads(*given, overwrite=yes, norm_out=norm)
        gradkit.accumulate_grads(*given, do_update=yes)
        gradkit.accumulate_grads(*given, grad_norm_out=norm)
        gradkit.adamw_update(*given, *given, step, lr=number(0.5), verdict=yes)
        gradkit.sgd_update(*given, lr=0.5, verdict=yes)
        gradkit.keep_if(yes, *given)
        gradkit.clip_grad_block_norm(empty, none, out=none)
        gradkit.clip_by_block_norm(empty, none)
        gradkit.clip_grad_adaptive(*given, out=none)
        gradkit.clip_by_adaptive_norm(*given, out=(None, none))
    assert mutable.read(norm) == 0
    assert mutable.read(step) == 6


def test_a_torch_flag_is_read(torch):
    grad = torch.ones(2)
    gradkit.accumulate_grad(grad, torch.ones(2), do_update=torch.tensor(False))
    assert grad.tolist() == [1, 1]
    gradkit.accumulate_grad(grad, torch.ones(2), do_update=torch.tensor([True]))
    assert grad.tolist() == [2, 2]


def test_frameworks_may_not_be_mixed(lib):
    ours, numpys = lib.make(np.ones(3, np.float32)), np.ones(3, np.float32)
    with pytest.raises(TypeError, match=r"numpy array.*must be of one framework"):
        gradkit.grad_norm([ours, numpys])
    with pytest.raises(TypeError, match="scale is a numpy array and x a"):
        gradkit.layer_norm(ours, numpys)
    with pytest.raises(TypeError, match="x is a numpy array and dy a"):
        gradkit.rms_norm_grad(ours, numpys, None, numpys)
    norms = (lib.make(np.zeros(())), [numpys]), (np.zeros(()), [ours])
    for norm, grads in norms:  # a list's plan knows nothing of arrays of another framework
        with pytest.raises(TypeError, match=r"^out is a .*must be of one framework"):
            gradkit.grad_norm(grads, out=norm)
        with pytest.raises(TypeError, match=r"^(norm_out|out|buffers\[0\]) is "):
            gradkit.accumulate_grads(grads, grads, norm_out=norm)


@pytest.mark.parametrize("ours", [False, True])
def test_a_number_may_be_of_another_framework(lib, ours):
    """On the host; NumPy's gradients too."""
    number = lib.make(np.array(2.5, np.float32))
    grads = lib.make(np.array([3.0, 4.0], np.float32)) if ours else np.array([3.0, 4.0])
    clipped, norm = gradkit.clip_by_global_norm([grads], number, scale=np.float32(1))
    assert float(norm) == 5
    read = lib.read(clipped[0]) if ours else clipped[0]
    np.testing.assert_allclose(read, [1.5, 2.0], rtol=1e-7)
    assert float(gradkit.grad_norm([grads], scale=number)) == 12.5


def test_the_same_memory_twice_is_refused(mutable):
    grad = mutable.make(np.arange(6, dtype=np.float32))
    # Of the last the second begins behind as many bytes as the first has elements for.
    for pair in ([grad, grad], [grad[:4], grad[2:]], [grad, grad[::2]], [grad[::2], grad[3:]]):
        with pytest.raises(ValueError, match="share memory"):
            gradkit.scale_grads(pair, 2.0)
    np.testing.assert_array_equal(mutable.read(grad), np.arange(6))
    gradkit.scale_grads([grad[:3], grad[3:]], 2.0)
    gradkit.scale_grads([grad[::2], grad[1::2]], 2.0)
    np.testing.assert_array_equal(mutable.read(grad), 4 * np.arange(6))


@pytest.mark.guarantee("Light")
def test_importing_gradkit_imports_no_framework(run_alone):
    run_alone(
        """
        import sys, gradkit
        import numpy as np
        gradkit.clip_grad_norm([np.ones(3)], 1.0)
        found = {"torch", "jax", "tensorflow", "cupy", "array_api_strict"} & set(sys.modules)
        assert not found, found
        """
    )
