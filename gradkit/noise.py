"""The gradient noise scale: how large a batch pays, from norms that a step computes anyway."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from gradkit._calls import checks
from gradkit._calls.lists import NoiseScale
from gradkit._open.clipping import known_norm
from gradkit._open.dispatch import run
from gradkit._overloads import pair_of_norms
from gradkit._typing import AnyArray, Host, Outs, Real, Scalar

__all__ = ["noise_scale"]


@pair_of_norms
def noise_scale(
    small_norms: Any,
    small_sizes: Real | Sequence[float],
    big_norm: Scalar,
    big_size: Real,
    *,
    state: AnyArray | None = None,
    decay: Real = 0.99,
    out: Outs = None,
) -> tuple[Any, Any]:
    """The simple noise scale of gradients: about the batch size beyond which more data pays less.

    ``tr(cov) / |G|^2`` of one sample's gradient, from the norms of gradients of small batches and
    of a big one, such as micro-batches and their mean. With ``b`` the mean of ``small_sizes`` and
    ``m`` the mean of ``small_norms**2``, weighted by size, unbiased estimates are::

        signal = (big_size * big_norm**2 - b * m) / (big_size - b)       of |G|^2
        noise  = (m - big_norm**2) / (1 / b - 1 / big_size)              of tr(cov)

    Both are averaged over steps before they are divided: at first with equal weights, and with
    ``1 - decay`` for the last step once that is more. A step with a norm that is not finite leaves
    the state as it is, bit for bit.

    Parameters
    ----------
    small_norms : floating-point array of shape (k,)
        2-norms of mean gradients of small batches; ``accumulate_grads(grad_norm_out=)`` gives
        those of micro-batches.
    small_sizes : float, or sequence of k floats
        How many samples each has, or all; or tokens. Above 0.
    big_norm : float, or 0-d floating-point array
        The 2-norm of the mean gradient of a big batch, which may be that of all small ones.
    big_size : float
        How many samples that has; more than the mean of ``small_sizes``.
    state : float64 array of shape (3,), optional
        What the last call returned: how many steps it has seen, and the means of noise and signal.
        Never written, unless it is ``out[1]``. Default: this is the first.
    decay : float
        Above 0 and below 1.
    out : tuple (noise_scale, state), optional
        Where the results are written: float64 arrays of shapes () and (3,). Either may be ``None``;
        the second may be ``state`` itself.

    Returns
    -------
    noise_scale : 0-d float64 array
        The ratio of the means, on the norms' device; the call does not wait for it. Of few steps
        it may be negative, infinite or NaN, as estimates scatter.
    state : float64 array of shape (3,)

    Raises
    ------
    TypeError
        An array is not of a dtype that is accepted; arrays are of two frameworks.
    ValueError
        An array has another shape; a size is not above 0; ``big_size`` is not above the mean of
        sizes that the host knows, as with one micro-batch; ``decay`` is out of range.

    References
    ----------
    McCandlish, Kaplan, Amodei, OpenAI Dota Team: "An Empirical Model of Large-Batch Training",
    2018, appendix A.1, whose formulas are these for small batches of one size.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> scale, state = gradkit.noise_scale(np.array([3.0, 5.0]), 4, 3.5, 8)
    >>> scale, state  # noise 38, signal 7.5
    (array(5.06666667), array([ 1. , 38. ,  7.5]))
    """
    kept = checks.real(decay, "decay")
    if not 0 < kept < 1:
        raise ValueError(f"decay must be greater than 0 and less than 1, not {kept}")
    total = checks.finite(checks.real(big_size, "big_size"), "big_size")
    call = NoiseScale(
        small_norms=small_norms,
        small_sizes=_sizes(small_sizes, np.shape(small_norms), total),
        big_norm=known_norm(big_norm),
        big_size=total,
        state=state,
        decay=kept,
    )
    scale, following = run(call, out)
    return scale, following


def _sizes(given: Any, shape: tuple[int, ...], total: float) -> Host:
    """The sizes of small batches, one for each."""
    listed = given if isinstance(given, (list, tuple)) else [given] * math.prod(shape)
    sizes = [checks.real(one, "small_sizes") for one in listed]
    if len(sizes) != math.prod(shape):
        raise ValueError(f"small_sizes has {len(sizes)} numbers; expected {math.prod(shape)}")
    for size in sizes:
        if not 0 < size < math.inf:
            raise ValueError(f"small_sizes must be above 0 and finite, not {size}")
    if sizes and not total > (mean := sum(sizes) / len(sizes)):
        raise ValueError(
            f"big_size is {total:g}, and small batches have {mean:g} on average; it must be larger"
        )
    return np.array(sizes)
