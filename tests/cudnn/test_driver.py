"""cuDNN on the testbed's driver: as far as the handle, which it does not get there."""

import sys

import numpy as np
import pytest

import gradkit
from gradkit._cuda.cudnn import library
from gradkit.errors import CudnnError

plugin = sys.modules.get("testbed.driver.plugin")
pytestmark = [
    pytest.mark.cudnn,
    pytest.mark.skipif(plugin is None, reason="not on the testbed's driver"),
]
RUNTIMES = "6bd5fb6c-5bf4-e74a-8987-d93912fd9df9"  # the table that CUDA's runtime asks for first


def test_batch_norm_up_to_the_handle():
    """The driver says what it lacks; gradkit warns once, and computes by its own kernels."""
    import cupy

    found = library.cudnn()
    descriptor = found.bindings.createTensorDescriptor()
    found.bindings.setTensor4dDescriptorEx(descriptor, 0, 4, 3, 5, 5, 75, 25, 5, 1)
    found.bindings.destroyTensorDescriptor(descriptor)
    with pytest.raises(CudnnError, match="cudnnCreate: CUDNN_STATUS_NOT_INITIALIZED"):
        found.handles.get(0, cupy.cuda.get_current_stream().ptr)
    assert plugin.driver.message() == f"testbed.driver has no export table {RUNTIMES}"

    host = np.random.default_rng(3).standard_normal((4, 3, 5, 5)).astype(np.float32)
    with pytest.warns(RuntimeWarning, match="cuDNN failed: cudnnCreate"):
        results = gradkit.batch_norm(cupy.asarray(host))
    assert gradkit.last_engine() == "native"
    for got, wanted in zip(results, gradkit.batch_norm(host), strict=True):
        np.testing.assert_allclose(cupy.asnumpy(got), wanted, rtol=1e-5, atol=1e-6)
    gradkit.batch_norm(cupy.asarray(host))  # no second warning, which would be an error
    with pytest.raises(CudnnError, match="cudnnCreate"):
        gradkit.batch_norm(cupy.asarray(host), engine="cudnn")
