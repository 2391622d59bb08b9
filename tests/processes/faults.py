"""Faults in the adapters: on the ranks that show it, `contract` must notice each.

No fault may leave a rank waiting, so that one launch plants them all, one after another.
"""

import types
from functools import partial
from pathlib import Path

from tests.processes.groups import contract

ROOT = Path(__file__).parents[2]
_MPI = "self._comm.Allgather(state, rows)\n        return rows"
_TORCH = "torch.distributed.all_gather(targets, torch.from_numpy(state), group=self._group)"
_TORCH_ROWS = f"{_TORCH}\n        return rows"
_JAX_BITS = "bits = utils.process_allgather(state.view(np.uint32))"
_JAX_ROWS = "return np.ascontiguousarray(bits).reshape(self.size, -1).view(np.float64)"

# For each library (old text, new text, what).
ROWS = {
    "mpi": (
        (_MPI, f"{_MPI}[::-1]", "rows in another order"),
        (_MPI, f"{_MPI}.astype(np.float32).astype(np.float64)", "numbers made narrow"),
        (_MPI, _MPI.replace("return rows", "return np.nan_to_num(rows)"), "NaN lost"),
        (_MPI, f"state[...] = abs(state)\n        {_MPI}", "the caller's numbers written"),
        (_MPI, f"state = state + 0.0\n        {_MPI}", "the sign of zero lost"),
        (
            "comm.Get_rank(), comm.Get_size()",
            "comm.Get_size() - 1 - comm.Get_rank(), comm.Get_size()",
            "ranks counted backwards",
        ),
    ),
    "torch": (
        (_TORCH_ROWS, f"{_TORCH_ROWS}[::-1]", "rows in another order"),
        (_TORCH, _TORCH.replace("(state)", "(state).float().double()"), "numbers made narrow"),
        (_TORCH_ROWS, _TORCH_ROWS.replace("rows", "np.fmax(rows, -np.inf)"), "NaN lost"),
        (_TORCH, _TORCH.replace("self._group", "None"), "another group's ranks asked"),
        (
            ".distributed.get_rank(process_group)",
            ".distributed.get_rank()",
            "the rank of another group",
        ),
        ("get_world_size(process_group)", "get_world_size()", "the size of another group"),
    ),
    "jax": (
        (_JAX_ROWS, f"{_JAX_ROWS}[::-1]", "rows in another order"),
        (_JAX_BITS, _JAX_BITS.replace(".view(np.uint32)", ""), "float64 handed to JAX"),
        (
            _JAX_BITS,
            _JAX_BITS.replace("state.view(np.uint32)", "np.nan_to_num(state).view(np.uint32)"),
            "NaN lost",
        ),
        (
            "jax.process_index(), jax.process_count()",
            "jax.process_count() - 1 - jax.process_index(), jax.process_count()",
            "ranks counted backwards",
        ),
    ),
}


def noticed(place, fault):
    """Return whether this rank sees that something is wrong."""
    old, new, _ = fault
    module = types.ModuleType("mutant")
    text = (ROOT / place.adapter).read_text()
    assert text.count(old) == 1, old
    exec(text.replace(old, new), module.__dict__)
    members = [list(range(place.size)), place.half_members]
    seen = False
    for of, ranks in zip(place.communicators(), members, strict=False):
        try:
            contract(getattr(module, place.kind)(*of), ranks, place.rank)
        except (AssertionError, RuntimeError, TypeError, ValueError):
            seen = True
    return "noticed" if seen else ""


def checks(library):
    """One for each fault; ``noticed`` on one rank is enough."""
    return {f"fault: {row[2]}": partial(noticed, fault=row) for row in ROWS[library]}
