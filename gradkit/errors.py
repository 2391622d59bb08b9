"""The errors that gradkit raises beyond the built-in ``TypeError`` and ``ValueError``."""

__all__ = [
    "BackendUnavailableError",
    "CudnnError",
    "GradkitError",
    "KernelCompileError",
    "KernelLaunchError",
    "NonFiniteNormError",
]


class GradkitError(Exception):
    """The base of every error that is gradkit's own."""


class BackendUnavailableError(GradkitError, ImportError):
    """An array arrived whose backend cannot run here; the message says what to install."""


class CudnnError(GradkitError, RuntimeError):
    """A call into cuDNN failed.

    Attributes
    ----------
    function : str
        cuDNN's name of it.
    status : int or None
        Its ``cudnnStatus_t``, whose numbers differ between cuDNN 8 and 9. ``None`` where
        gradkit did not make the call, because it knew that it would fail.
    text : str
        What cuDNN says of the status: ``"CUDNN_STATUS_NOT_SUPPORTED"``, say.
    """

    def __init__(self, function: str, status: int | None, text: str):
        self.function = function
        self.status = status
        self.text = text
        super().__init__(f"{function}: {text}" + ("" if status is None else f" ({status})"))

    @property
    def unsupported(self) -> bool:
        """Whether the case is not one of cuDNN's, and nothing else is wrong."""
        return self.text.startswith(("CUDNN_STATUS_NOT_SUPPORTED", "CUDNN_STATUS_ARCH_MISMATCH"))

    def __reduce__(self) -> tuple[type, tuple[str, int | None, str]]:
        return type(self), (self.function, self.status, self.text)


class KernelCompileError(GradkitError, RuntimeError):
    """A CUDA kernel did not compile; the message holds the compiler's own."""


class KernelLaunchError(GradkitError, RuntimeError):
    """The device refused a launch; the message names the kernel and its grid."""


class NonFiniteNormError(GradkitError, ArithmeticError):
    """A gradient norm is NaN or infinite and ``nonfinite="raise"`` was asked for.

    Attributes
    ----------
    norm : float
        The norm that was found.
    names : tuple of str
        The gradients that hold a NaN or an infinity, as ``"grads[3]"`` or
        ``"grads['layer1']['scale']"``. Empty when every element is finite and the norm
        alone is too large for float64.
    """

    def __init__(self, norm: float, names: tuple[str, ...]):
        self.norm = norm
        self.names = names
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        where = f"; non-finite gradients: {shown}" if names else "; every gradient here is finite"
        super().__init__(f"the gradient norm is {norm}{where}. Nothing was written.")

    def __reduce__(self) -> tuple[type, tuple[float, tuple[str, ...]]]:
        return type(self), (self.norm, self.names)
