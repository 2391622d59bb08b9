"""The machinery behind every launch: devices, compiled kernels, grids, buffers, lists of tensors.

Nothing here knows an operation; ``gradkit._cuda`` has those beside this folder. Kernels that
several operations share have their launches here: ``row_gradient`` and ``row_forward`` for norms
over rows, ``channels`` for batch norm.
"""
