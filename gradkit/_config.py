"""Configuration: what is installed, the CPU backend, and its number of threads."""

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, overload

from gradkit import _host as host
from gradkit import _threads as threads
from gradkit._arrays.cuda import without_cache

_PACKAGES = ("gradkit", "numpy", "ml_dtypes")

__all__ = ["get_num_threads", "set_num_threads", "show_config", "use_cpu_backend"]


@overload
def show_config(mode: Literal["stdout"] = "stdout") -> None: ...
@overload
def show_config(mode: Literal["dicts"]) -> dict[str, Any]: ...
def show_config(mode: str = "stdout") -> dict[str, Any] | None:
    """Print versions and backends, for a bug report.

    Parameters
    ----------
    mode : {"stdout", "dicts"}
        Print, or return the same information as nested dicts.

    Returns
    -------
    None or dict

    Raises
    ------
    ValueError
        ``mode`` is neither.

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
    config: dict[str, dict[str, Any]] = {
        "versions": {"python": platform.python_version()} | {n: _version(n) for n in _PACKAGES},
        "backends": {**host.describe(), "cuda": _cuda(), "cudnn": _cudnn()},
    }
    if mode == "dicts":
        return config
    for section, entries in config.items():
        print(f"{section}:")
        for name, value in entries.items():
            print(f"  {name}: {value}")
    return None


def get_num_threads() -> int:
    """Return the number of threads that one call of compiled code on host arrays may use.

    Returns
    -------
    int
        What :func:`set_num_threads` set last. Before any call of it: the environment variable
        ``GRADKIT_NUM_THREADS``, read when gradkit is imported. Without that variable: the
        smallest of 4, ``OMP_NUM_THREADS`` and the number of cores that this process may use.

    References
    ----------
    ``torch.get_num_threads``.

    Examples
    --------
    >>> import gradkit
    >>> gradkit.get_num_threads() >= 1
    True
    """
    return threads.workers()


def set_num_threads(count: int) -> None:
    """Choose how many threads one call of compiled code on host arrays may use.

    Results have the same bits for any number of threads. For small arrays, and without compiled
    code, the calling thread does all the work.

    Parameters
    ----------
    count : int
        From 1 to 4096; the calling thread counts, and no call uses more threads than it has
        parts for. Applies to all later calls, in every thread of the process. On Linux, once a
        tensor of PyTorch was passed, calls work on PyTorch's threads: at most
        ``torch.get_num_threads()``.

    Raises
    ------
    TypeError, ValueError
        ``count`` is not an integer, or is not in that range.

    References
    ----------
    ``torch.set_num_threads``.

    Examples
    --------
    >>> import gradkit
    >>> before = gradkit.get_num_threads()
    >>> gradkit.set_num_threads(1)
    >>> gradkit.get_num_threads()
    1
    >>> gradkit.set_num_threads(before)
    """
    if isinstance(count, bool) or not hasattr(count, "__index__"):
        raise TypeError(f"count must be an integer, not {type(count).__name__}")
    wanted = count.__index__()
    if not 1 <= wanted <= threads.MOST:
        raise ValueError(f"count must be from 1 to {threads.MOST}, not {wanted}")
    host.use_threads(wanted)


@contextmanager
def use_cpu_backend(name: str) -> Iterator[None]:
    """Within the context, choose what computes on host arrays.

    The choice holds for this thread, and for the asyncio tasks that it starts. The environment
    variable ``GRADKIT_CPU``, read when gradkit is imported, chooses for the whole process.

    Parameters
    ----------
    name : {"compiled", "numpy"}
        The compiled code, which is the default if it is there; or NumPy's calls alone, which are
        slower and the tests' reference. Both keep the same guarantees. Their bits differ.

    Returns
    -------
    context manager

    Raises
    ------
    ValueError
        ``name`` is neither, or gradkit was installed without compiled code.

    References
    ----------
    ``torch.nn.attention.sdpa_kernel``.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> with gradkit.use_cpu_backend("numpy"):
    ...     y, inv_std = gradkit.rms_norm(np.array([[3.0, 4.0]]), eps=0.0)
    >>> (y**2).mean().round(12)
    np.float64(1.0)
    """
    token = host.chosen.set(host.named(name, "name"))
    try:
        yield
    finally:
        host.chosen.reset(token)


def _version(name: str) -> str:
    import importlib.metadata  # slower to import than all of gradkit

    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cuda() -> dict[str, Any]:
    """CuPy's version and GPUs, or why there are none."""
    try:
        import cupy
    except OSError as error:
        return {"available": False, "reason": without_cache(error)}
    except Exception as error:  # a broken installation may raise anything
        return {"available": False, "reason": str(error) or type(error).__name__}
    try:
        runtime = cupy.cuda.runtime
        devices = [
            runtime.getDeviceProperties(k)["name"].decode() for k in range(runtime.getDeviceCount())
        ]
    except Exception as error:  # CUDA's, for example if there is no driver
        return {"available": False, "cupy": cupy.__version__, "reason": str(error)}
    return {"available": bool(devices), "cupy": cupy.__version__, "devices": devices}


def _cudnn() -> dict[str, Any]:
    """The library's version, binding and path, or why there is none."""
    from gradkit._cuda.cudnn import describe

    return describe()
