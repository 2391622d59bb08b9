"""Which engine did the work, where there is a choice."""

import threading

__all__ = ["last_engine"]

_ran = threading.local()


def ran(engine: str) -> None:
    """Note what the calling thread's batch norm ran on."""
    _ran.engine = engine


def last_engine() -> str | None:
    """What ran the calling thread's latest batch norm, forward or backward.

    Returns
    -------
    "cudnn", "native" or None
        ``"native"`` is gradkit's own code, on NumPy arrays as on CuPy arrays. ``None``: this
        thread has called neither :func:`batch_norm` nor :func:`batch_norm_grad` yet.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> y, mean, inv_std = gradkit.batch_norm(np.ones((4, 2)))
    >>> gradkit.last_engine()
    'native'
    """
    engine: str | None = getattr(_ran, "engine", None)
    return engine
