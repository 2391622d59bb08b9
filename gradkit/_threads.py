"""How many threads a call on host arrays may use; the threads are compiled code's own."""

import os

MOST_BY_DEFAULT = 4  # beyond them memory is the limit


def workers() -> int:
    """How many threads one call may use."""
    return _workers


def use_workers(count: int) -> None:
    """Choose it, for the calls that begin after this one."""
    global _workers
    _workers = count


def default() -> int:
    """What the environment says, or else what the machine offers."""
    own = os.environ.get("GRADKIT_NUM_THREADS", "")
    if own.isdecimal() and int(own):
        return int(own)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    others = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    limits = (MOST_BY_DEFAULT, cores or 1, int(others) if others.isdecimal() else 0)
    return min(limit for limit in limits if limit)


_workers = default()
