"""A clipping limit that follows the gradients' norms: rare spikes are clipped, all else is left.

The limit comes from running statistics of the norm, which stay on the norm's device. Nothing
waits for it.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from gradkit._arrays import HOST, framework_of, is_array
from gradkit._calls import checks
from gradkit._calls.list_layouts import GUARD_STATE
from gradkit._calls.lists import SpikeGuardInit, SpikeGuardUpdate
from gradkit._open.arguments import known_framework, values_of, view_of
from gradkit._open.clipping import norm_array
from gradkit._open.dispatch import run
from gradkit._open.foreign import answers
from gradkit._open.memory import is_writable
from gradkit._typing import Index, N, Number, OnSpike, Outs, Plain, Scalar, X

__all__ = ["SpikeGuard", "spike_guard_init", "spike_guard_update"]

_STATISTICS = ("count", "mean", "std")
_MOST_WARMUP = 1 << 24  # norms that a float32 state, which JAX may have, can count


class _GuardRule(NamedTuple):
    decay: float
    threshold: float
    warmup: int
    on_spike: OnSpike

    def judged(self, state: Any, norm: Any, out: Any) -> Any:
        """The next state and the limit."""
        call = SpikeGuardUpdate(
            state=state,
            norm=norm_array(norm),
            decay=self.decay,
            threshold=self.threshold,
            warmup=self.warmup,
            clips=self.on_spike == "clip",
        )
        return run(call, out)


@answers
def spike_guard_init(like: N | None = None, *, count: Index | None = None) -> N:
    """The state of a spike guard that has seen no norm.

    Parameters
    ----------
    like : array, optional
        The state is of its type and on its device. A gradient or a norm, for example; its
        shape and values do not matter. Default: NumPy.
    count : int, optional
        How many norms it is to guard, each by its own history. Default: one, in a state of shape
        (3,).

    Returns
    -------
    float64 array of shape (3,), or (count, 3)
        How many norms the guard has seen, their mean and their standard deviation: zeros.
        float32 for JAX without ``jax_enable_x64`` and for libraries that have no float64, as MLX.

    Raises
    ------
    TypeError
        ``like`` is not an array; ``count`` is not an integer.
    ValueError
        ``count`` is negative.

    Examples
    --------
    >>> import gradkit
    >>> gradkit.spike_guard_init()
    array([0., 0., 0.])
    """
    checked = None if count is None else checks.integer(count, "count")
    if checked is not None and checked < 0:
        raise ValueError(f"count must be at least 0, not {checked}")
    values = np.zeros(GUARD_STATE if checked is None else (checked, *GUARD_STATE))
    example: Any = values if like is None else like
    return run(SpikeGuardInit(like=example, values=values, count=checked))


@answers
def spike_guard_update(
    state: X,
    norm: Scalar,
    *,
    decay: Number = 0.97,
    threshold: Number = 2.5,
    warmup: Index = 25,
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
    state : float64 array of shape (3,), or (k, 3)
        From :func:`spike_guard_init` or the last call. Never written, unless it is ``out[0]``.
    norm : float, or 0-d floating-point array; or array of shape (k,)
        As :func:`grad_norm` returns it, or k of them as ``per_tensor_norms(grads, flat=True)``
        does, each of which is judged by its own history; not yet clipped. An array is read on its
        device.
    decay : float
        Between 0 and 1: the weight that the statistics keep in each step.
    threshold : float
        How many standard deviations above the mean a spike begins; finite, at least 0.
    warmup : int
        From 1 to 2**24.
    on_spike : {"clip", "skip"}
        Whether ``max_norm`` is what to clip a spike to, or above what to skip.
    out : tuple (state, max_norm), optional
        Where the results are written: float64 arrays of state's and norm's shapes. Either may be
        ``None``; the first may be ``state`` itself.

    Returns
    -------
    state : float64 array of state's shape
        How many norms the guard has seen, their mean and their standard deviation.
    max_norm : float64 array of norm's shape
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
    return _rule(decay, threshold, warmup, on_spike).judged(state, norm, out)


class SpikeGuard:
    """:func:`spike_guard_update` with its state: call :meth:`update` with each step's norm.

    Or with a vector of norms, such as one per gradient: then it keeps a history of each, and its
    limits go to :func:`clip_grad_block_norm`. The first call decides how many there are.

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
        decay: Number = 0.97,
        threshold: Number = 2.5,
        warmup: Index = 25,
        on_spike: OnSpike = "clip",
    ) -> None:
        self._rule = _rule(decay, threshold, warmup, on_spike)
        self._state: Any = None  # until the first norm says how many there are

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        return f"SpikeGuard({settings})"

    @property
    def settings(self) -> dict[str, Any]:
        """``decay``, ``threshold``, ``warmup`` and ``on_spike``, by name."""
        return self._rule._asdict()

    def update(self, norm: N | Plain) -> N:
        """Take in a norm, and return what to clip its gradients to, or above what to skip.

        Parameters
        ----------
        norm : float, 0-d floating-point array, or array of shape (k,)
            As :func:`grad_norm` returns it; not yet clipped. The same k in all calls.

        Returns
        -------
        float64 array of norm's shape
            On the norm's device. The call does not wait for it.

        Raises
        ------
        TypeError, ValueError
            As :func:`spike_guard_update`; the guard is as it was.
        """
        state = self._state
        if state is None:
            lead = getattr(norm, "shape", ()) if is_array(norm) else ()
            state = np.zeros((*lead, *GUARD_STATE))
        if framework_of(state) is HOST and framework_of(norm) not in (HOST, None):
            view_of(known_framework(norm, "norm"), norm, "norm", detach=True)  # or an error
            count = None if state.ndim == 1 else len(state)
            state = run(SpikeGuardInit(like=norm, values=state, count=count))
        out = (state, None) if _may_be_written(state) else None
        self._state, max_norm = self._rule.judged(state, norm, out)
        return max_norm

    def state_dict(self) -> dict[str, Any]:
        """Statistics and settings, for a checkpoint; this waits for the device.

        Returns
        -------
        dict
            ``count``, ``mean`` and ``std``, then ``decay``, ``threshold``, ``warmup`` and
            ``on_spike``, as Python numbers and a string; of k norms, the first three are lists.
            JSON keeps them bit for bit.
        """
        state = np.zeros(GUARD_STATE) if self._state is None else self._state
        columns = np.asarray(values_of(state, "state"), np.float64).T
        statistics = dict(zip(_STATISTICS, columns.tolist(), strict=True))
        return {**statistics, "count": columns[0].astype(int).tolist(), **self.settings}

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
        for name, setting in self.settings.items():
            value = text = state_dict.get(name, setting)
            if not isinstance(setting, str):
                value = checks.size(value, f"{name} in state_dict")
                text = f"{value:g}"
            if value != setting:
                raise ValueError(
                    f"{name} in state_dict is {text}, and the guard's is {setting}; make a "
                    f"SpikeGuard with the same {name}, or load {', '.join(_STATISTICS)} alone"
                )
        columns = [_statistics(state_dict[name], f"{name} in state_dict") for name in _STATISTICS]
        if len({len(column) for column in columns}) > 1:
            raise ValueError("count, mean and std in state_dict must be of as many norms")
        for count in columns[0]:
            if not count.is_integer():
                raise ValueError(f"count in state_dict must be a whole number, not {count}")
        state = np.array(columns).T
        self._state = np.array(state if isinstance(state_dict["count"], list) else state[0])


def _rule(decay: Any, threshold: Any, warmup: Any, on_spike: Any) -> _GuardRule:
    checked = checks.real(decay, "decay")
    if not 0 < checked < 1:
        raise ValueError(f"decay must be greater than 0 and less than 1, not {checked}")
    word: Any = checks.choice(on_spike, "on_spike", ("clip", "skip"))
    return _GuardRule(checked, checks.size(threshold, "threshold"), _count(warmup), word)


def _statistics(value: Any, label: str) -> list[float]:
    """One number, or a list of one for each norm."""
    return [checks.size(each, label) for each in (value if isinstance(value, list) else [value])]


def _count(warmup: Any) -> int:
    count = checks.integer(warmup, "warmup")
    if not 1 <= count <= _MOST_WARMUP:
        raise ValueError(f"warmup must be from 1 to {_MOST_WARMUP}, not {count}")
    return count


def _may_be_written(state: Any) -> bool:
    framework = known_framework(state, "state")
    if framework.immutable:
        return False
    return is_writable(view_of(framework, state, "state", write=True))
