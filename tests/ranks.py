"""Ranks for tests: threads of this process that make one call together."""

from concurrent.futures import ThreadPoolExecutor

from gradkit import distributed


def together(work, size, *, groups=None, timeout=20):
    """``work(group)`` on every rank at once: what each returned, or the error that it raised."""

    def attempt(group):
        try:
            return work(group)
        except BaseException as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(attempt, groups or distributed.threads(size, timeout=timeout)))


def results(work, size, **options):
    """As ``together``, where no rank may raise."""
    found = together(work, size, **options)
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return found
