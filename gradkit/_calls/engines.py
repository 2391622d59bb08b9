"""The engines of batch norm: those that callers may ask for, and the one that ran last."""

import threading

import numpy as np

from gradkit._backend import Array
from gradkit._calls import checks

_ENGINES = ("cudnn", "cudnn-persistent", "native")
_latest = threading.local()


def check(x: Array, engine: str | None) -> None:
    """Raise if the engine is unknown, or is cuDNN's and does not support such arrays."""
    if _is_cudnns(engine) and isinstance(x, np.ndarray):
        raise ValueError(f"engine={engine!r} needs CuPy arrays; for NumPy pass None or 'native'")


def check_over_ranks(engine: str | None) -> None:
    """Raise if the engine is unknown, or is cuDNN's, which cannot compute over ranks."""
    if _is_cudnns(engine):
        raise ValueError(f"engine={engine!r} does not support group; pass None or 'native'")


def _is_cudnns(engine: str | None) -> bool:
    return engine is not None and checks.choice(engine, "engine", _ENGINES) != "native"


def ran(engine: str | None) -> None:
    """Note what ran a batch norm of this thread; ``None``: nothing yet."""
    _latest.engine = engine


def latest() -> str | None:
    """Name of what ran the last batch norm of this thread, or None."""
    return getattr(_latest, "engine", None)
