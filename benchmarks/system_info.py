"""The machine that a result was measured on."""

import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

import gradkit

PACKAGES = ("numpy", "ml_dtypes", "torch", "jax", "jaxlib", "matplotlib")
GPU_PACKAGES = (
    *("cupy-cuda12x", "cupy-cuda13x", "triton", "liger-kernel", "quack-kernels"),
    *("nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-cuda-nvrtc"),
)


def describe() -> dict[str, Any]:
    """Processor, system and versions."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "caches": _caches(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "blas": np.show_config(mode="dicts")["Build Dependencies"]["blas"]["name"],
        "versions": {"gradkit": _gradkit()}
        | {name: version for name in PACKAGES if (version := _version(name))},
    }


def slug(machine: dict[str, Any]) -> str:
    """A name for a machine that can be part of a file name."""
    gpu = machine.get("gpu")
    name = re.sub(r"[^a-z0-9]+", "-", (gpu["name"] if gpu else machine["cpu"]).lower()).strip("-")
    return name if gpu else f"{name}-{machine['cores']}-cores"


def describe_gpu() -> dict[str, Any]:
    """The current CUDA device, its driver and the libraries that use it."""
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    versions = {name: version for name in GPU_PACKAGES if (version := _version(name))}
    return {
        "name": properties["name"].decode(),
        "compute_capability": cupy.cuda.Device().compute_capability,
        "multiprocessors": properties["multiProcessorCount"],
        "l2_mib": properties["l2CacheSize"] >> 20,
        "memory_gib": properties["totalGlobalMem"] >> 30,
        "driver": _nvidia_smi("driver_version"),
        "clocks": _nvidia_smi("clocks.sm,clocks.mem,clocks.max.sm"),
        "cuda": {
            "driver": cupy.cuda.runtime.driverGetVersion(),
            "runtime": cupy.cuda.runtime.runtimeGetVersion(),
            "nvrtc": cupy.cuda.nvrtc.getVersion(),
        },
        "versions": {"cupy": cupy.__version__} | versions,
    }


def taken_by_others(before: tuple[float, float]) -> float:
    """Return the seconds of processor time that other programs took since ``before``."""
    own, used = (now - then for now, then in zip(busy(), before, strict=True))
    return max(0.0, used - own)


def busy() -> tuple[float, float]:
    """Return seconds of processor time: of this process and its children, and of all processes."""
    own = sum(os.times()[:4])
    fields = _read("/proc/stat").partition("\n")[0].split()[1:]
    used = sum(int(fields[k]) for k in (0, 1, 2, 5, 6)) if fields else 0  # neither idle nor stolen
    return own, used / os.sysconf("SC_CLK_TCK")


def _nvidia_smi(fields: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip().partition("\n")[0]


def _cpu() -> str:
    found = re.search(r"model name\s*:\s*(.*)", _read("/proc/cpuinfo"))
    return found.group(1) if found else platform.processor() or platform.machine()


def _caches() -> dict[str, str]:
    found = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        kind = _read(index / "type").strip()
        if kind != "Instruction":
            found[f"L{_read(index / 'level').strip()}"] = _read(index / "size").strip()
    return found


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _gradkit() -> str:
    """The version, also of a checkout that is not installed, which may have no compiled code."""
    compiled = gradkit.show_config("dicts")["backends"]["compiled"]["available"]
    return gradkit.__version__ + ("" if compiled else " without compiled code")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
