"""What a call was given: checked, seen as arrays that a backend computes on, with the way back.

``call`` opens named arrays and ``gradients`` containers of them; ``outputs`` makes results or
takes the caller's. ``dispatch`` runs records of calls; what shapes, dtypes and strides alone decide
of one is decided once for each combination of them.
"""
