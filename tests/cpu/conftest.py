"""The fixture of threads: gradkit's own or OpenMP's."""

from collections.abc import Callable, Iterator

import pytest

import gradkit
from gradkit import _host
from tests.cpu import openmp


@pytest.fixture
def threads_of(request: pytest.FixtureRequest) -> Iterator[Callable[[int], None]]:
    """Return a setter of the number of threads that calls have, of gradkit's or of OpenMP's."""
    count = gradkit.get_num_threads()

    def choose(threads: int) -> None:
        gradkit.set_num_threads(threads)
        if request.param == "openmp":
            openmp.use(threads)

    yield choose
    gradkit.set_num_threads(count)
    if request.param == "openmp":
        _host.code.use_openmp(0, 0, 0)
