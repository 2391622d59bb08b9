"""A clipping limit that follows the gradients' norms: rare spikes are clipped, all else is left.

The limit comes from running statistics of the norm, which stay on the norm's device. Nothing
waits for it.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, SupportsIndex, TypeAlias, overload

import numpy as np

from gradkit._arrays import HOST, framework_of
from gradkit._calls import checks
from gradkit._calls.layouts import GUARD_STATE
from gradkit._calls.lists import SpikeGuardInit, SpikeGuardUpdate
from gradkit._open.clipping import known_norm
from gradkit._open.dispatch import run
from gradkit._open.given import known_framework, values_of, view_of
from gradkit._typing import Float64, Host, Outs, Real, Scalar, X

__all__ = ["SpikeGuard", "spike_guard_init", "spike_guard_update"]

_STATISTICS = ("count", "mean", "std")
OnSpike: TypeAlias = Literal["clip", "skip"]
_MOST_WARMUP = 1 << 24  # norms that a float32 state, which JAX may have, can count


class _GuardRule(NamedTuple):
    decay: float
    threshold: float
    warmup: int
    on_spike: OnSpike


@overload
def spike_guard_init(like: Host | None = None) -> Float64: ...
@overload
def spike_guard_init(like: X) -> X: ...
def spike_guard_init(like: Any = None) -> Any:
    """The state of a spike guard that has seen no norm.

    Parameters
    ----------
    like : array, optional
        The state is of its type and on its device. A gradient or a norm, for example; its
        shape and values do not matter. Default: NumPy.

    Returns
    -------
    float64 array of shape (3,)
        How many norms the guard has seen, their mean and their standard deviation: zeros.
        float32 for JAX without ``jax_enable_x64`` and for libraries that have no float64, as MLX.

    Raises
    ------
    TypeError
        ``like`` is not an array.

    Examples
    --------
    >>> import gradkit
    >>> gradkit.spike_guard_init()
    array([0., 0., 0.])
    """
    values = np.zeros(GUARD_STATE)
    return run(SpikeGuardInit(like=values if like is None else like, values=values))


def spike_guard_update(
    state: X,
    norm: Scalar,
    *,
    decay: Real = 0.97,
    threshold: Real = 2.5,
    warmup: SupportsIndex = 25,
    on_spike: OnSpike = "clip",
    out: Outs = None,
) -> tuple[X, X]:
    """Judge a gradient norm by those before it: the next state, and the limit to clip to.

    With the statistics of earlier norms, a norm above ``mean + threshold * std`` is a spike::

        max_norm = mean + threshold * std                              if norm is no spike
        max_norm = mean + (threshold * std)**2 / (norm - mean)         if it is

    So the larger the spike, the closer to the mean it is clipped. The statistics then take in
    the norm after clipping::

        d    = min(norm, max_norm) - mean
        mean = mean + (1 - decay) * d
        std  = sqrt(decay * std**2 + (1 - decay) * (decay * d)**2)

    With ``on_spike="skip"``, ``max_norm = mean + threshold * std`` for a spike too: it is the limit
    of a step that is taken, for :func:`step_verdict`. A skipped norm enters the statistics as
    ``max_norm``, so that a rise that lasts is accepted in the end.

    - The first ``warmup`` norms are only collected: ``max_norm`` is infinite, and mean and
      standard deviation are those of all norms so far, with equal weights.
    - While ``std`` is 0, as after norms that were all equal, ``max_norm`` is infinite too.
    - A norm that is NaN, infinite or negative leaves the state as it is, bit for bit, and
      ``max_norm`` is that of a norm that is no spike.

    Parameters
    ----------
    state : float64 array of shape (3,)
        From :func:`spike_guard_init` or the last call. Never written, unless it is ``out[0]``.
    norm : float, or 0-d floating-point array
        As :func:`grad_norm` returns it; not yet clipped. An array is read on its device.
    decay : float
        Between 0 and 1: the weight that the statistics keep in each step.
    threshold : float
        How many standard deviations above the mean a spike begins; finite, at least 0.
    warmup : int
        From 1 to 2**24.
    on_spike : {"clip", "skip"}
        Whether ``max_norm`` is what to clip a spike to, or above what to skip.
    out : tuple (state, max_norm), optional
        Where the results are written: float64 arrays of shape (3,) and (). Either may be
        ``None``; the first may be ``state`` itself.

    Returns
    -------
    state : float64 array of shape (3,)
        How many norms the guard has seen, their mean and their standard deviation.
    max_norm : 0-d float64 array
        What to clip these gradients to, or above what to skip them, on the norm's device. The
        call does not wait for it.

    Raises
    ------
    TypeError
        ``state`` or ``norm`` is not an array of a dtype that is accepted, or they are of two
        frameworks; a number is not real; ``warmup`` is not an integer.
    ValueError
        ``state`` or ``norm`` has another shape; a number is out of range; ``norm`` is a
        negative number on the host. Nothing is written.

    Notes
    -----
    No intermediate overflows or underflows if ``decay`` is at least 1e-100: the state holds the
    standard deviation, whose square is never formed. If ``mean + threshold * std`` itself
    exceeds float64, ``max_norm`` is infinite. The functions that clip take a norm below their
    ``eps`` for ``eps``: if spikes may be below 1e-6, pass them ``eps=0``.

    References
    ----------
    Kumar, Owen, Chowdhury, Güra: "ZClip: Adaptive Spike Mitigation for LLM Pre-Training",
    2025, and its defaults. Unlike the authors' code, no constant is added to ``std``, and a
    ``std`` of 0 clips nothing.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> state = gradkit.spike_guard_init()
    >>> for norm in (1.0, 3.0, 10.0):
    ...     state, max_norm = gradkit.spike_guard_update(state, norm, warmup=2)
    >>> max_norm  # mean 2 and standard deviation 1: 2 + 2.5**2 / (10 - 2)
    array(2.78125)
    >>> gradkit.clip_grads_with_norm(np.array([6.0, 8.0]), 10.0, max_norm=max_norm)
    array([1.66875, 2.225  ])
    """
    rule = _rule(decay, threshold, warmup, on_spike)
    call = SpikeGuardUpdate(
        state=state,
        norm=known_norm(norm),
        decay=rule.decay,
        threshold=rule.threshold,
        warmup=rule.warmup,
        clips=rule.on_spike == "clip",
    )
    return run(call, out)


class SpikeGuard:
    """:func:`spike_guard_update` with its state: call :meth:`update` with each step's norm.

    The state is an array on the norms' device. It is written in place, so that a step captured
    into a CUDA graph may be replayed: call ``update`` once before capturing it, and load no
    statistics afterwards. Arrays of JAX and TensorFlow are replaced instead.

    Parameters
    ----------
    decay, threshold, warmup, on_spike
        As in :func:`spike_guard_update`.

    Raises
    ------
    TypeError, ValueError
        As :func:`spike_guard_update`.

    References
    ----------
    As in :func:`spike_guard_update`.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> guard = gradkit.SpikeGuard(warmup=3)
    >>> for scale in (1.0, 2.0, 3.0, 100.0):
    ...     grads = {"weights": np.full(4, scale / 2)}
    ...     norm = gradkit.grad_norm(grads)
    ...     grads = gradkit.clip_grads_with_norm(grads, norm, guard.update(norm))
    >>> bool(gradkit.grad_norm(grads) < 3)
    True
    >>> guard.state_dict()["count"]
    4
    """

    def __init__(
        self,
        *,
        decay: Real = 0.97,
        threshold: Real = 2.5,
        warmup: SupportsIndex = 25,
        on_spike: OnSpike = "clip",
    ) -> None:
        self._rule = _rule(decay, threshold, warmup, on_spike)
        self._state: Any = np.zeros(GUARD_STATE)

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        return f"SpikeGuard({settings})"

    @property
    def settings(self) -> dict[str, Any]:
        """``decay``, ``threshold``, ``warmup`` and ``on_spike``, by name."""
        return self._rule._asdict()

    @overload
    def update(self, norm: Real) -> Float64: ...
    @overload
    def update(self, norm: X) -> X: ...
    def update(self, norm: Any) -> Any:
        """Take in a norm, and return what to clip its gradients to, or above what to skip.

        Parameters
        ----------
        norm : float, or 0-d floating-point array
            As :func:`grad_norm` returns it; not yet clipped.

        Returns
        -------
        0-d float64 array
            On the norm's device. The call does not wait for it.

        Raises
        ------
        TypeError, ValueError
            As :func:`spike_guard_update`; the guard is as it was.
        """
        state = self._state
        if framework_of(state) is HOST and framework_of(norm) not in (HOST, None):
            view_of(known_framework(norm, "norm"), norm, "norm", detach=True)  # or an error
            state = run(SpikeGuardInit(like=norm, values=state))
        out = (state, None) if _may_be_written(state) else None
        self._state, max_norm = spike_guard_update(state, norm, **self.settings, out=out)
        return max_norm

    def state_dict(self) -> dict[str, Any]:
        """Statistics and settings, for a checkpoint; this waits for the device.

        Returns
        -------
        dict
            ``count``, ``mean`` and ``std``, then ``decay``, ``threshold``, ``warmup`` and
            ``on_spike``, as Python numbers and a string. JSON keeps them bit for bit.
        """
        count, mean, std = map(float, values_of(self._state, "state"))
        return {"count": int(count), "mean": mean, "std": std, **self.settings}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a checkpoint, on the device of the next norm.

        Parameters
        ----------
        state_dict : mapping
            From :meth:`state_dict`. Settings may be left out: to change them, pass the
            statistics alone.

        Raises
        ------
        TypeError, ValueError
            It is not a mapping of these names to finite numbers of at least 0, its ``count`` is
            not whole, or a setting differs from the guard's own; the guard is as it was.
        """
        names = (*_STATISTICS, *_GuardRule._fields)
        if not isinstance(state_dict, Mapping) or not ({*_STATISTICS} <= {*state_dict} <= {*names}):
            raise ValueError(
                f"state_dict must be a mapping of {', '.join(names)}, not {state_dict!r}"
            )
        for name, own in self.settings.items():
            found = said = state_dict.get(name, own)
            if not isinstance(own, str):
                found = _statistic(found, f"{name} in state_dict")
                said = f"{found:g}"
            if found != own:
                raise ValueError(
                    f"{name} in state_dict is {said}, and the guard's is {own}; make a "
                    f"SpikeGuard with the same {name}, or load {', '.join(_STATISTICS)} alone"
                )
        state = [_statistic(state_dict[name], f"{name} in state_dict") for name in _STATISTICS]
        if not state[0].is_integer():
            raise ValueError(f"count in state_dict must be a whole number, not {state[0]}")
        self._state = np.array(state)


def _rule(decay: Any, threshold: Any, warmup: Any, on_spike: Any) -> _GuardRule:
    kept = checks.real(decay, "decay")
    if not 0 < kept < 1:
        raise ValueError(f"decay must be greater than 0 and less than 1, not {kept}")
    word: Any = checks.choice(on_spike, "on_spike", ("clip", "skip"))
    return _GuardRule(kept, _statistic(threshold, "threshold"), _count(warmup), word)


def _statistic(value: Any, label: str) -> float:
    return checks.finite(checks.nonnegative(value, label), label)


def _count(warmup: Any) -> int:
    count = checks.integer(warmup, "warmup")
    if not 1 <= count <= _MOST_WARMUP:
        raise ValueError(f"warmup must be from 1 to {_MOST_WARMUP}, not {count}")
    return count


def _may_be_written(state: Any) -> bool:
    framework = known_framework(state, "state")
    if framework.immutable:
        return False
    return getattr(view_of(framework, state, "state", write=True).flags, "writeable", True)
