"""The errors that gradkit raises besides the built-in ``TypeError`` and ``ValueError``."""

__all__ = [
    "BackendUnavailableError",
    "CudnnError",
    "GradkitError",
    "KernelError",
    "NonFiniteNormError",
    "RankError",
]


class GradkitError(Exception):
    """The base class of all gradkit errors."""


class BackendUnavailableError(GradkitError, ImportError):
    """An array needs a backend that cannot run here; the message says what to install."""


class CudnnError(GradkitError, RuntimeError):
    """A call into cuDNN failed.

    Attributes
    ----------
    function : str
        The function's name in cuDNN.
    status : int or None
        The ``cudnnStatus_t`` that it returned; the numbers differ between cuDNN 8 and 9.
        ``None``: gradkit did not make the call, because it would have failed.
    text : str
        cuDNN's text for the status, such as ``"CUDNN_STATUS_NOT_SUPPORTED"``.
    """

    def __init__(self, function: str, status: int | None, text: str):
        self.function = function
        self.status = status
        self.text = text
        super().__init__(f"{function}: {text}" + ("" if status is None else f" ({status})"))

    @property
    def unsupported(self) -> bool:
        """True if cuDNN does not support the case, and nothing else is wrong."""
        return self.text.startswith(("CUDNN_STATUS_NOT_SUPPORTED", "CUDNN_STATUS_ARCH_MISMATCH"))

    def __reduce__(self) -> tuple[type, tuple[str, int | None, str]]:
        return type(self), (self.function, self.status, self.text)


class KernelError(GradkitError, RuntimeError):
    """A CUDA kernel did not compile, or the device refused its launch.

    The message holds the compiler's log, or names the kernel and its grid.
    """


class NonFiniteNormError(GradkitError, ArithmeticError):
    """A gradient norm is NaN or infinite and ``nonfinite="raise"`` was passed.

    Attributes
    ----------
    norm : float
        The norm.
    names : tuple of str
        The gradients that hold a NaN or an infinity, as ``"grads[3]"`` or
        ``"grads['layer1']['scale']"``. Empty if every element is finite and only
        the norm is too large for float64.
    """

    def __init__(self, norm: float, names: tuple[str, ...]):
        self.norm = norm
        self.names = names
        listed = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        where = f"; non-finite gradients: {listed}" if names else "; every gradient here is finite"
        super().__init__(f"the gradient norm is {norm}{where}. Nothing was written.")

    def __reduce__(self) -> tuple[type, tuple[float, tuple[str, ...]]]:
        return type(self), (self.norm, self.names)


class RankError(GradkitError, RuntimeError):
    """A call that all ranks of a group make together failed because of another rank.

    Attributes
    ----------
    ranks : dict of int to str
        What each rank at fault said: its error, or the call that it made where another made
        a different one.
    """

    def __init__(self, message: str, ranks: dict[int, str]):
        self.ranks = ranks
        texts = [f"rank {rank}: {text}" for rank, text in sorted(ranks.items())]
        more = [f"and {len(texts) - 4} more ranks"] if len(texts) > 5 else []
        self._message = message
        super().__init__("; ".join([message, *(texts[:4] + more if more else texts)]))

    def __reduce__(self) -> tuple[type, tuple[str, dict[int, str]]]:
        return type(self), (self._message, self.ranks)
