"""The number of threads of a call on host arrays; the threads are compiled code's own."""

import os

MOST = 4096  # that a call may use
MOST_BY_DEFAULT = 4  # beyond them memory is the limit


def workers() -> int:
    """Return the number of threads that one call may use."""
    return _workers


def use_workers(count: int) -> None:
    """Choose it, for the calls that begin after this one."""
    global _workers
    _workers = count


def default() -> int:
    """Number of threads from the environment, or else of cores."""
    setting = os.environ.get("GRADKIT_NUM_THREADS", "").strip()
    count = _number(setting)
    if setting and not 0 <= count <= MOST:
        raise ValueError(
            f"GRADKIT_NUM_THREADS must be a number from 1 to {MOST}, or 0 for the default, "
            f"not {setting!r}"
        )
    if count > 0:
        return count
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    others = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    limits = (MOST_BY_DEFAULT, cores or 1, _number(others))
    return min(limit for limit in limits if limit > 0)


def _number(text: str) -> int:
    """Parse a number, of very large ones only the first digits; -1 if it is none."""
    return int("0" + text.lstrip("0")[:9]) if text.isdecimal() else -1


_workers = default()
