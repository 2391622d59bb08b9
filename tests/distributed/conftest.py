"""Devices of one process, and where gradients lie among them and the host."""

import pytest

from tests.several_devices import HOST, Devices

WHERE = {  # each of six gradients lies
    "on devices alone": [1, 0, 2, 2, 1, 0],
    "on one device or the host": [HOST, 0, HOST, 0, 0, HOST],
    "on several or the host": [1, HOST, 0, 2, HOST, 0],
    "on the host at last": [0, 0, 0, 0, 0, HOST],
}


@pytest.fixture(params=WHERE.values(), ids=WHERE)
def where(request):
    """Devices that the gradients lie on."""
    return request.param


@pytest.fixture
def devices(request):
    """Three of them for gradients of all places, else two."""
    made = Devices(3 if "where" in request.fixturenames else 2)
    yield made
    assert made.settled()
