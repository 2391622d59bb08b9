"""The norm over ranks whose numbers stay in device memory: the host waits for no device."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from gradkit._backend import FLOAT64
from gradkit._calls import checks
from gradkit._calls.lists import JoinRanks, RankState
from gradkit._calls.roles import Flags, Norm, Number, Numbers, Scalar
from gradkit._open.arguments import check_device, known_framework, same_device, view_of
from gradkit._open.gradients import Gradients
from gradkit._ranks.collective import MORE, STATE, Collective, digest_of

_FACTORS = 3  # norm, scale and limit
_ROWS = "what group.allgather returned"
_FAULTS = "group.faults"


class Factors(NamedTuple):
    """Numbers that a clip's coefficient depends on; over ranks only the device knows them."""

    norm: Norm
    limit: Number = math.inf
    scale: Number = 1.0


class RankSums(NamedTuple):
    """A rank's sums, as its call defines them, and where all ranks' flags are written."""

    call: str
    order: float
    copies: Sequence[int] | None
    found_inf: Flags | None


def queue_norm(
    gradients: Gradients,
    collective: Collective,
    sums: RankSums,
    factors_here: Factors,
    *,
    fresh: bool,
) -> Factors:
    """Write the norm unless a rank is at fault; then the factors returned clip nothing.

    ``fresh``: the norm's memory is new, and becomes NaN instead of staying as it is.
    """
    backend, order = gradients.backend, sums.order
    faults = _faults(gradients, collective)
    state = backend.empty((STATE,), FLOAT64)
    factors = backend.empty((_FACTORS,), FLOAT64)
    digest = digest_of(sums.call, MORE)
    backend.rank_state(
        RankState(
            grads=gradients.views,
            norm_type=order,
            digest=digest,
            state=state,
            scale=factors_here.scale,
            max_norm=factors_here.limit,
            copies=sums.copies,
        )
    )
    states = _states(collective.queue(state), collective, faults)
    backend.join_ranks(
        JoinRanks(
            states=states,
            digest=digest,
            norm_type=order,
            scale=factors_here.scale,
            max_norm=factors_here.limit,
            fresh=fresh,
            norm=factors_here.norm,
            found_inf=sums.found_inf,
            faults=faults,
            factors=factors,
        )
    )
    norm, scale, limit = (factors[k : k + 1].reshape(()) for k in range(_FACTORS))
    return Factors(Norm(norm), Scalar(limit), Scalar(scale))


def _states(rows: Any, collective: Collective, faults: Numbers) -> Numbers:
    """Check what the group has gathered, and view it as an array of the backend."""
    states = view_of(known_framework(rows, _ROWS), rows, _ROWS)
    check_device(states, _ROWS, faults, _FAULTS)
    checks.shape(states, (collective.size, STATE), _ROWS, "a row for each rank")
    if states.dtype != FLOAT64:
        raise TypeError(f"{_ROWS} has dtype {states.dtype}; ranks send float64")
    return Numbers(states)


def _faults(gradients: Gradients, collective: Collective) -> Numbers:
    """The array on the device that says which rank is at fault."""
    array = collective.beside
    faults = view_of(known_framework(array, _FAULTS), array, _FAULTS, write=True)
    checks.shape(faults, (collective.size,), _FAULTS, "a number for each rank")
    name, first = gradients.first()
    if first is not None and not same_device(first, faults):
        raise ValueError(f"{name} is not on the device of group, whose numbers travel there")
    return Numbers(faults)
