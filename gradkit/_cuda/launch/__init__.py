"""What all launches share: devices, compiled kernels, grids, buffers, lists of tensors.

The operations themselves are in ``gradkit._cuda``. Kernels that several operations use are launched
here: by ``row_gradient`` and ``row_forward`` for norms over rows, by ``channels`` for batch norm.
"""
