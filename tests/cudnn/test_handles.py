"""One handle a thread and device, on the stream of the moment; none survives a fork."""

import gc
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from gradkit._cuda.cudnn.handles import Handles
from gradkit.errors import CudnnError
from tests.cudnn.cases import error_in_child
from tests.cudnn.fake import FakeCudnn


@pytest.mark.guarantee("eight threads on two streams")
def test_eight_threads_have_eight_handles_on_two_streams():
    bindings = FakeCudnn()
    handles = Handles(bindings)
    together = threading.Barrier(8)
    got = {}

    def work(number):
        for step in range(200):
            stream = 100 + (number + step) % 2
            handle = handles.get(0, stream)
            assert bindings.handles[handle] == stream
            got.setdefault(number, set()).add(handle)
        together.wait()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    assert all(len(mine) == 1 for mine in got.values())
    assert len(set.union(*got.values())) == 8


def test_a_handle_a_device():
    handles = Handles(FakeCudnn())
    assert handles.get(0, 1) == handles.get(0, 2)
    assert handles.get(0, 1) != handles.get(1, 1)


def test_the_handle_of_an_ended_thread_is_used_again():
    bindings = FakeCudnn()
    handles = Handles(bindings)
    for _ in range(20):
        thread = threading.Thread(target=handles.get, args=(0, 1))
        thread.start()
        thread.join()
        gc.collect(0)
    assert len(bindings.handles) == 1


def test_all_are_freed_at_exit():
    bindings = FakeCudnn()
    handles = Handles(bindings)
    handles.get(0, 1), handles.get(1, 1)
    assert len(bindings.handles) == 2
    handles.close()
    assert not bindings.handles
    with pytest.raises(CudnnError, match="shut down"):
        handles.get(0, 1)
    handles.close()


def test_a_lost_device_does_not_disturb_the_exit():
    class Lost(FakeCudnn):
        def destroy(self, handle):
            raise CudnnError("cudnnDestroy", 4000, "CUDNN_STATUS_INTERNAL_ERROR")

    handles = Handles(Lost())
    handles.get(0, 1)
    handles.close()


@pytest.mark.guarantee("a forked child")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_gets_an_error_and_frees_nothing():
    bindings = FakeCudnn()
    handles = Handles(bindings)
    handles.get(0, 1)

    def use_again():
        handles.close()
        assert len(bindings.handles) == 1
        handles.get(0, 1)

    answer = error_in_child(use_again)
    assert "does not survive the fork" in answer
    assert "spawn" in answer
    assert bindings.handles
