"""The norms over rows: layer norm and RMS norm, from their input or their output.

With ``xhat = (x - mean) * inv_std`` (RMS norm: ``x * inv_std``; from the output: ``(y - bias) /
scale``) and ``w = dy * (scale + scale_offset)``, means over a row, sums over all rows.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol

from gradkit._backend import Address
from gradkit._calls import checks, roles
from gradkit._calls.layouts import RowLayout, SampleLayout
from gradkit._calls.record import Call, result
from gradkit._calls.roles import In, Out
from gradkit._calls.samples import lead_of, sample_count, samples_of
from gradkit._dtypes import LAYER_NORM_TYPES


class RowOperations(Protocol):
    """Norms over rows of a backend: each function writes the results of its call."""

    def layer_norm(self, call: "LayerNorm") -> None:
        """``y = xhat * (scale + scale_offset) + bias``, and each row's statistics."""

    def add_layer_norm(self, call: "AddLayerNorm") -> None:
        """``s = x + residual``, rounded, and the layer norm of ``s``."""

    def layer_norm_grad(self, call: "LayerNormGrad") -> None:
        """``dx = inv_std * (w - mean(w) - xhat * mean(w * xhat)) + ds``, ``dscale``, ``dbias``."""

    def layer_norm_inverse(self, call: "LayerNormInverse") -> None:
        """``x = (y - bias) / scale / inv_std + mean``."""

    def invertible_layer_norm_grad(self, call: "InvertibleLayerNormGrad") -> None:
        """As ``layer_norm_grad``, with xhat computed from the output."""

    def rms_norm(self, call: "RmsNorm") -> None:
        """``y = xhat * (scale + scale_offset)``, and ``inv_std`` of each row."""

    def add_rms_norm(self, call: "AddRmsNorm") -> None:
        """``s = x + residual``, rounded, and the RMS norm of ``s``."""

    def rms_norm_grad(self, call: "RmsNormGrad") -> None:
        """``dx = inv_std * (w - xhat * mean(w * xhat)) + ds``, and ``dscale``."""

    def invertible_rms_norm_grad(self, call: "InvertibleRmsNormGrad") -> None:
        """As ``rms_norm_grad``, with xhat computed from the output."""

    def gated_rms_norm(self, call: "GatedRmsNorm") -> None:
        """``y = rms_norm(x) * act(gate)`` or ``rms_norm(x * act(gate))``, and ``inv_std``."""

    def gated_rms_norm_grad(self, call: "GatedRmsNormGrad") -> None:
        """``dx``, ``dgate`` and ``dscale`` of either."""


class LayerNorm(Call):
    """A layer norm."""

    x: In[roles.Data]
    scale: In[roles.Scale | None]
    bias: In[roles.Bias | None]
    axis: roles.Axis
    eps: roles.Eps
    scale_offset: roles.ScaleOffset

    y: Out[roles.Data] = result(may_be=("x",))
    mean: Out[roles.Mean] = result()
    inv_std: Out[roles.InvStd] = result()

    types, layout = LAYER_NORM_TYPES, SampleLayout("x")


class AddLayerNorm(Call):
    """A layer norm of a residual sum."""

    x: In[roles.Data]
    residual: In[roles.Data]
    scale: In[roles.Scale | None]
    bias: In[roles.Bias | None]
    axis: roles.Axis
    eps: roles.Eps
    scale_offset: roles.ScaleOffset

    y: Out[roles.Data] = result(may_be=("x",))
    s: Out[roles.Data] = result(may_be=("x", "residual"))
    mean: Out[roles.Mean] = result()
    inv_std: Out[roles.InvStd] = result()

    types, layout = LAYER_NORM_TYPES, SampleLayout("x")


class LayerNormGrad(Call):
    """The gradient of a layer norm; ``ds`` is added to ``dx`` before that is rounded."""

    dy: In[roles.Data]
    x: In[roles.Data]
    scale: In[roles.Scale | None]
    mean: In[roles.Mean]
    inv_std: In[roles.InvStd]
    ds: In[roles.Data | None]
    axis: roles.Axis
    scale_offset: roles.ScaleOffset
    wanted: roles.Wanted = None  # type: ignore[assignment]

    dx: Out[roles.Data | None] = result(may_be=("dy", "ds"))
    dscale: Out[roles.Scale | None] = result(if_="scale")
    dbias: Out[roles.Bias | None] = result(if_="scale")

    types, layout = LAYER_NORM_TYPES, SampleLayout("x")


class LayerNormInverse(Call):
    """The input of a layer norm, from its output."""

    y: In[roles.Data]
    scale: In[roles.Scale | None]
    bias: In[roles.Bias | None]
    mean: In[roles.Mean]
    inv_std: In[roles.InvStd]
    axis: roles.Axis

    x: Out[roles.Data] = result(may_be=("y",))

    types, layout = LAYER_NORM_TYPES, RowLayout("y")

    reads_values = True

    def check_values(self, opened: Any) -> None:  # noqa: ARG002
        checks.invertible(self.scale, "layer_norm_grad")


class InvertibleLayerNormGrad(Call):
    """The gradient of a layer norm, from its output."""

    dy: In[roles.Data]
    y: In[roles.Data]
    scale: In[roles.Scale | None]
    bias: In[roles.Bias | None]
    inv_std: In[roles.InvStd]
    axis: roles.Axis
    wanted: roles.Wanted = None  # type: ignore[assignment]

    dx: Out[roles.Data | None] = result(may_be=("dy",))
    dscale: Out[roles.Scale | None] = result(if_="scale")
    dbias: Out[roles.Bias | None] = result(if_="bias")

    types, layout = LAYER_NORM_TYPES, RowLayout("y")

    reads_values = True

    def check_values(self, opened: Any) -> None:  # noqa: ARG002
        checks.invertible(self.scale, "layer_norm_grad")


class RmsNorm(Call):
    """An RMS norm."""

    x: In[roles.Data]
    scale: In[roles.Scale | None]
    axis: roles.Axis
    eps: roles.Eps
    scale_offset: roles.ScaleOffset

    y: Out[roles.Data] = result(may_be=("x",))
    inv_std: Out[roles.InvStd] = result()

    types, layout = LAYER_NORM_TYPES, SampleLayout("x")


class AddRmsNorm(Call):
    """An RMS norm of a sum."""

    x: In[roles.Data]
    residual: In[roles.Data]
    scale: In[roles.Scale | None]
    axis: roles.Axis
    eps: roles.Eps
    scale_offset: roles.ScaleOffset

    y: Out[roles.Data] = result(may_be=("x",))
    s: Out[roles.Data] = result(may_be=("x", "residual"))
    inv_std: Out[roles.InvStd] = result()

    types, layout = LAYER_NORM_TYPES, SampleLayout("x")


class RmsNormGrad(Call):
    """The gradient of an RMS norm; ``ds`` is added to ``dx`` before that is rounded."""

    dy: In[roles.Data]
    x: In[roles.Data]
    scale: In[roles.Scale | None]
    inv_std: In[roles.InvStd]
    ds: In[roles.Data | None]
    axis: roles.Axis
    scale_offset: roles.ScaleOffset
    wanted: roles.Wanted = None  # type: ignore[assignment]

    dx: Out[roles.Data | None] = result(may_be=("dy", "ds"))
    dscale: Out[roles.Scale | None] = result(if_="scale")

    types, layout = LAYER_NORM_TYPES, SampleLayout("x")


class InvertibleRmsNormGrad(Call):
    """The gradient of an RMS norm, from its output; ``ds`` as in ``RmsNormGrad``."""

    dy: In[roles.Data]
    y: In[roles.Data]
    scale: In[roles.Scale | None]
    inv_std: In[roles.InvStd]
    ds: In[roles.Data | None]
    axis: roles.Axis
    scale_offset: roles.ScaleOffset
    wanted: roles.Wanted = None  # type: ignore[assignment]

    dx: Out[roles.Data | None] = result(may_be=("dy", "ds"))
    dscale: Out[roles.Scale | None] = result(if_="scale")

    types, layout = LAYER_NORM_TYPES, RowLayout("y")

    reads_values = True

    def check_values(self, opened: Any) -> None:  # noqa: ARG002
        checks.invertible(self.scale, "rms_norm_grad", self.scale_offset)


class GatedRmsNorm(Call):
    """An RMS norm that is multiplied by an activated gate, or whose input is."""

    x: In[roles.Data]
    gate: In[roles.Data]
    scale: In[roles.Scale | None]
    axis: roles.Axis
    eps: roles.Eps
    scale_offset: roles.ScaleOffset
    activation: roles.Activation
    norm_before_gate: roles.NormBeforeGate

    y: Out[roles.Data] = result(may_be=("x", "gate"))
    inv_std: Out[roles.InvStd] = result()

    silu = property(lambda self: self.activation == "silu")
    types, layout = LAYER_NORM_TYPES, RowLayout("x")


class GatedRmsNormGrad(Call):
    """The gradient of a gated RMS norm."""

    dy: In[roles.Data]
    x: In[roles.Data]
    gate: In[roles.Data]
    scale: In[roles.Scale | None]
    inv_std: In[roles.InvStd]
    axis: roles.Axis
    scale_offset: roles.ScaleOffset
    activation: roles.Activation
    norm_before_gate: roles.NormBeforeGate
    wanted: roles.Wanted = None  # type: ignore[assignment]

    dx: Out[roles.Data | None] = result(may_be=("dy", "x"))
    dgate: Out[roles.Data | None] = result(may_be=("dy", "gate"))
    dscale: Out[roles.Scale | None] = result(if_="scale")

    silu = property(lambda self: self.activation == "silu")
    types, layout = LAYER_NORM_TYPES, RowLayout("x")


def by_sample(most: int = 0) -> Callable[[Any], Any]:
    """A backend's function, called once a sample if there are more scales than ``most``.

    With 0, also if one scale has dimensions in front of the normalised ones.
    """

    def decorate(write: Callable[..., None]) -> Callable[..., None]:
        @wraps(write)
        def write_all(*args: Any) -> None:
            call = args[-1]
            scale = call.scale
            alike = scale is None or type(scale) is Address  # of which `takes_memory` knows it
            shared = alike or scale.ndim == getattr(call, call.layout.data).ndim - call.axis
            if shared or (most and sample_count(call) <= most):
                write(*args)
                return
            for each in samples_of(call, lead_of(call)):
                write(*args[:-1], each)

        return write_all

    return decorate
