"""Opening a call: checks its arguments, views arrays for a backend, and wraps its results.

``call`` opens named arrays and ``gradients`` containers of them; ``outputs`` makes results or
takes the caller's. ``dispatch`` runs records of calls; what shapes, dtypes and strides alone decide
of one is decided once for each combination of them.
"""
