"""List operations on a GPU: graphs, streams, no waiting for the device."""

import numpy as np
import pytest

import gradkit
from gradkit import _host
from gradkit._open import dispatch
from tests.backends import ON_GPU
from tests.tolerances import assert_same_bits

pytestmark = ON_GPU


def gradients(count, seed):
    """A list longer than the parameter block, with a strided array among the others."""
    import cupy

    rng = np.random.default_rng(seed)
    hosts = [rng.standard_normal((7, 2 * k + 2)).astype(np.float32) for k in range(count)]
    return [cupy.asarray(h)[:, :: 1 + (k == 3)] for k, h in enumerate(hosts)]


def test_norms_of_each_gradient_are_views_of_where_they_were_written():
    import cupy

    grads = gradients(5, 0)
    expected = gradkit.per_tensor_norms(grads, flat=True).get()
    whole, gaps = cupy.zeros(5), cupy.zeros(10)[::2]
    for out in (None, whole, gaps):
        each = gradkit.per_tensor_norms(grads, out=out)
        assert [norm.shape for norm in each] == [()] * 5
        np.testing.assert_array_equal([norm.get() for norm in each], expected)
        if out is not None:
            each[3][...] = -1
            assert out.get().tolist() == [*expected[:3], -1, expected[4]]
    by_rows = gradkit.clip_grad_block_norm(grads, 1e9, axis=-1)
    for norms, grad in zip(by_rows, grads, strict=True):
        np.testing.assert_allclose(norms.get(), np.linalg.norm(grad.get(), axis=1), rtol=1e-6)


def test_a_long_list_on_two_streams():
    import cupy

    grads = gradients(200, 0)
    expected = gradkit.grad_norm(grads).get()
    cupy.cuda.Device().synchronize()
    for _ in range(3):
        for stream in (cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)):
            with stream:
                found = gradkit.grad_norm(grads)
            stream.synchronize()
            assert_same_bits(found.get(), expected)


@pytest.mark.parametrize("call", ["grad_norm", "accumulate_grads"])
def test_a_list_that_another_stream_is_still_to_upload(call):
    """Each stream has its own copy of a long list, or its kernels may come before the upload."""
    import cupy

    grads = gradients(200, 0)
    buffers = [cupy.zeros_like(grad) for grad in grads]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    cupy.cuda.Device().synchronize()
    found = []
    for stream in streams:
        with stream:
            if call == "grad_norm":
                found.append(gradkit.grad_norm(grads))
            else:
                gradkit.accumulate_grads(buffers, grads, overwrite=True)
    streams[1].synchronize()
    if call == "grad_norm":
        expected = gradkit.grad_norm([grad.get() for grad in grads])
        assert float(found[1].get()) == pytest.approx(float(expected))
    for buffer, grad in zip(buffers, grads, strict=True):
        assert_same_bits(buffer.get(), grad.get() if call != "grad_norm" else 0 * buffer.get())


def test_a_graph_outlives_what_is_remembered_of_its_list():
    import cupy

    grads, stream = gradients(200, 0), cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        expected = gradkit.grad_norm(grads).get()
        stream.begin_capture()
        norm = gradkit.grad_norm(grads)
        graph = stream.end_capture()
        for count in range(100, 170):  # more lists than are remembered
            gradkit.zero_grad([cupy.ones(1, np.float32) for _ in range(count)])
        beside = [cupy.full(4096, 255, np.uint8) for _ in range(40)]
        norm.fill(0)
        graph.launch(stream)
        stream.synchronize()
    assert_same_bits(norm.get(), expected)
    assert all((array.get() == 255).all() for array in beside)


def test_the_same_call_gives_the_same_bits():
    grads = gradients(300, 0)
    found = {gradkit.grad_norm(grads).get().tobytes() for _ in range(20)}
    assert len(found) == 1


def test_numbers_in_arrays_are_read_in_each_call(monkeypatch):
    """On the road of plain numbers, and before what they lie in is written."""
    cupy = pytest.importorskip("cupy")
    number, step, verdict = cupy.ones(()), cupy.zeros((), np.int64), cupy.array(True)

    def moved(by, count, taken):
        own = [[cupy.full(3, k, np.float32)] for k in (1.0, 2.0, 0.0, 0.0)]
        gradkit.adamw_update(*own, count, lr=by, scale=by, verdict=taken)
        gradkit.accumulate_grads(*own[:2], scale=by)
        return float(gradkit.clip_grad_norm(own[0], by)), own[0][0].tolist()

    moved(number, step, verdict)
    with monkeypatch.context() as patched:
        if _host.code is not None:
            patched.setattr(dispatch, "_run_by_name", None)
        for value, dtype in ((0.5, "float64"), (0.25, "float32")):
            count, own = int(step), cupy.asarray(value, dtype)
            assert moved(own, step, verdict) == moved(value, count + 1, True)
            own[...], verdict[...] = 0.75, False
            assert moved(own, step, verdict) == moved(0.75, 1, False)
            verdict[...] = True
    buffer = cupy.full(3, 2.0)
    gradkit.accumulate_grads([buffer], [cupy.ones(3)], scale=buffer[1])
    assert buffer.tolist() == [4, 4, 4]
