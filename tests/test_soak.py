"""The few seconds of ``tests/soak.py`` that every run of the suite can spare."""

from gradkit._cuda.launch import tensor_lists
from tests.backends import BACKENDS
from tests.soak import growth, soak


def test_nothing_grows(backend, monkeypatch):
    monkeypatch.setattr(tensor_lists, "_plans", tensor_lists._Plans(number=8, tensors=1 << 20))
    assert growth(backend, soak(backend, 3, variety=3)) == {}


def test_a_leak_is_seen():
    kept = []
    host = BACKENDS[0]
    samples = soak(host, 0, work=lambda *_: kept.append(bytearray(8192)))
    assert growth(host, samples).keys() == {"traced"}
