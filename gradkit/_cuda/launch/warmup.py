"""Compile kernels in advance."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from gradkit._cuda.launch.device import Device
from gradkit._cuda.launch.kernels import Combination, kernel, kernels_in


def compile_all(device: Device, combinations: Sequence[Combination]) -> None:
    """Compile all kernels of these files with these macros, on all cores."""

    def load(combination: Combination) -> None:
        file, macros = combination
        with device.active():
            for name in kernels_in(file):
                kernel(device, file, name, **macros)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(load, combinations))  # raises the first error
