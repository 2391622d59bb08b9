"""The PTX machine on the driver's memory, which the driver asks for modules and launches."""

from __future__ import annotations

import re
from typing import Any

from testbed.emulator.memory import Extent
from testbed.ptx import Module, PtxDevice
from testbed.ptx.module import PtxModule

from .library import Driver


class _Memory:
    """Names the driver's allocations in messages."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def registered_extent(self, serial: int) -> Extent | None:
        """Return the allocation of that number."""
        found = self._driver.extent(serial)
        if found is None:
            return None
        start, end = found
        return Extent(start, end, start, 1, f"of {end - start} bytes, which the index counts")


class Machine:
    """Loads PTX, and runs its kernels; the driver calls it from its own launches."""

    def __init__(self, driver: Driver, **options: Any) -> None:
        self.device = PtxDevice(**options)
        self.device.memory = _Memory(driver)  # type: ignore[assignment]
        self.faults: list[Exception] = []
        driver.use(self.device.runtime, self)

    def load(self, image: bytes) -> tuple[Module, PtxModule]:
        """Return a module of PTX."""
        if image[:4] == b"\x7fELF":
            raise ValueError("a cubin, which only a GPU runs: set CUPY_COMPILE_WITH_PTX=1")
        module = Module.of(image.decode())
        return module, PtxModule(self.device, module)

    def function(
        self, loaded: tuple[Module, PtxModule], name: str
    ) -> tuple[int, int, tuple[int, int, int], bool, list[tuple[int, int]]]:
        """Return a kernel's bounds, static shared memory, cluster, `waits`, parameters' sizes.

        ``waits``: it may be launched so that it starts before the kernel in front of it has ended.
        """
        module, _ = loaded
        text = module.functions[name]
        kernel = text.parse()
        used = set(re.findall(r"[\w$]+", text.content))
        shared = [v for v in module.variables.values() if v.space == "shared" and v.name in used]
        shared += [v for v in kernel.variables if v.space == "shared"]
        rows = [(p.size, p.alignment) for p in kernel.parameters]
        waits = "griddepcontrol.wait" in text.content
        return kernel.max_threads, sum(v.size for v in shared), kernel.cluster, waits, rows

    def launch(
        self,
        loaded: tuple[Module, PtxModule],
        name: str,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared: int,
        parameters: bytes,
    ) -> None:
        """Run a kernel to its end."""
        try:
            loaded[1].get_function(name).run(grid, block, parameters, shared)
        except Exception as fault:
            self.faults.append(fault)
            raise
