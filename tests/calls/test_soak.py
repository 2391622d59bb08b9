"""The few seconds of ``tests/soak.py`` that every run of the suite can spare."""

from functools import partial

import pytest

from gradkit._cuda import list_tables
from tests.backends import BACKENDS
from tests.soak import every_operation, growth, soak


@pytest.mark.slow
@pytest.mark.parametrize("largest", [1024, None])
def test_nothing_grows(backend, monkeypatch, largest):
    for cache in ("_plans", "_cuts"):  # that are full soon
        monkeypatch.setattr(list_tables, cache, list_tables._LastUsed(8, 1 << 20))
    work = partial(every_operation, largest=largest)
    grows = lambda: growth(backend, soak(backend, 3, variety=3, work=work))  # noqa: E731
    # A leak grows each time; caches that other tests of this process have left half full, once.
    assert grows() == {} or grows() == {}


def test_a_leak_is_seen():
    kept = []
    host = BACKENDS[0]
    samples = soak(host, 0, work=lambda *_: kept.append(bytearray(8192)))
    assert growth(host, samples).keys() == {"traced"}
