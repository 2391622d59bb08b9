"""The emulated device with NVRTC's code in the place of g++'s."""

from __future__ import annotations

from typing import Any

from testbed.emulator import EmulatedDevice

from .compiler import compile_module
from .executed import Executed
from .module import PtxModule
from .parse import Module

ARCHITECTURES = (80, 90, 100, 120)


class PtxDevice(EmulatedDevice):
    """Compiles CUDA sources with NVRTC, as CuPy does, and runs their PTX on the CPU, checked.

    ``architecture`` is the compute capability to compile for (90 for 9.0), which decides about
    ``clusters`` too. With ``contracted``
    every fused multiply-add is made that ptxas may still make of the PTX. With ``counted`` the
    kernels count what they execute. All else is as on an `EmulatedDevice`.
    """

    def __init__(
        self,
        *,
        architecture: int = 80,
        contracted: bool = False,
        counted: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**{"clusters": architecture >= 90} | options)
        self.architecture = architecture
        self.contracted = contracted
        self.counted = counted
        self._modules: list[PtxModule] = []

    def compile(self, source: str, options: tuple[str, ...] = ()) -> PtxModule:  # type: ignore[override]
        """Return a module of the PTX that NVRTC makes of ``source`` with the options of CuPy.

        PTX and libraries are cached on disk.
        """
        module, kernels = compile_module(source, options, self.architecture)
        macros = " ".join(option for option in options if option.startswith("-D"))
        title = f"sm_{self.architecture}{'+' if self.contracted else ''} {macros}"
        made = PtxModule(
            self,
            module,
            kernels,
            source=source,
            title=title,
            contracted=self.contracted,
            counted=self.counted,
        )
        if self.counted:
            self._modules.append(made)
        return made

    def executed(self) -> dict[str, Executed]:
        """Return what each kernel that was compiled here has executed, if they are counted."""
        return {name: ran for made in self._modules for name, ran in made.executed().items()}

    def load(self, ptx: str, title: str = "") -> PtxModule:
        """Return a module of PTX; what runs of it is recorded under ``title`` if there is one."""
        module = Module.of(ptx)
        return PtxModule(
            self, module, title=title, contracted=self.contracted, counted=self.counted
        )
