"""What gradkit found on this machine."""

import platform
from typing import Any, Literal, overload

import numpy as np

from gradkit._numpy.blocks import WORKERS

__all__ = ["show_config"]


@overload
def show_config(mode: Literal["stdout"] = "stdout") -> None: ...
@overload
def show_config(mode: Literal["dicts"]) -> dict[str, Any]: ...
def show_config(mode: str = "stdout") -> dict[str, Any] | None:
    """Print versions and backends, for a bug report.

    Parameters
    ----------
    mode : {"stdout", "dicts"}
        Print, or return the same as nested dicts.

    Returns
    -------
    None or dict

    Raises
    ------
    ValueError
        Another mode.

    References
    ----------
    ``numpy.show_config``.

    Examples
    --------
    >>> import gradkit
    >>> config = gradkit.show_config(mode="dicts")
    >>> sorted(config)
    ['backends', 'versions']
    >>> config["backends"]["numpy"]["available"]
    True
    """
    if mode not in ("stdout", "dicts"):
        raise ValueError(f"mode must be 'stdout' or 'dicts', not {mode!r}")
    found: dict[str, dict[str, Any]] = {
        "versions": _versions(),
        "backends": {"numpy": _numpy(), "cuda": _cuda(), "cudnn": _cudnn()},
    }
    if mode == "dicts":
        return found
    for section, entries in found.items():
        print(f"{section}:")
        for name, value in entries.items():
            print(f"  {name}: {value}")
    return None


def _versions() -> dict[str, str]:
    names = ("gradkit", "numpy", "ml_dtypes")
    return {"python": platform.python_version()} | {name: _version(name) for name in names}


def _version(name: str) -> str:
    import importlib.metadata  # slower to import than all of gradkit

    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _numpy() -> dict[str, Any]:
    blas = np.show_config(mode="dicts").get("Build Dependencies", {}).get("blas", {})
    return {"available": True, "threads": WORKERS, "blas": blas.get("name", "unknown")}


def _cuda() -> dict[str, Any]:
    """CuPy's version and the GPUs that it finds, or why there are none."""
    try:
        import cupy
    except Exception as error:  # whatever a broken installation raises
        return {"available": False, "reason": str(error) or type(error).__name__}
    try:
        runtime = cupy.cuda.runtime
        devices = [
            runtime.getDeviceProperties(k)["name"].decode() for k in range(runtime.getDeviceCount())
        ]
    except Exception as error:  # CUDA's own, for want of a driver say
        return {"available": False, "cupy": cupy.__version__, "reason": str(error)}
    return {"available": bool(devices), "cupy": cupy.__version__, "devices": devices}


def _cudnn() -> dict[str, Any]:
    """Version, binding and path of the library, or why there is none."""
    from gradkit._cuda.cudnn import describe

    return describe()
