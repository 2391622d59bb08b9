"""Machinery of launches: devices, compiled kernels, grids, buffers, lists of tensors.

The operations themselves are in ``gradkit._cuda``. Kernels that several operations use are launched
here: by ``row_launches`` for norms over rows, by ``channel_launches`` for norms over channels.
"""
