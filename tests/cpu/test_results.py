"""Results of some size, whose memory is kept for the next ones when nothing holds it."""

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import gradkit
from tests.cpu.test_compiled import _restored, compiled, in_a_process  # noqa: F401

MIB = 1 << 20
SCALE = np.full(2048, 2, np.float32)
of_linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc says what is kept")


def normed(mib=33):
    """A new result of so many MiB."""
    return gradkit.rms_norm(np.ones((mib * MIB >> 13, 2048), np.float32), SCALE)[0]


def address(array):
    return array.ctypes.data


def test_they_have_huge_pages_to_themselves():
    """Those whose page holds something else fault in 4 KiB at a time."""
    x = np.ones((4099, 2048), np.float32)
    y, inv_std = gradkit.rms_norm(x, SCALE, eps=0.0)
    assert address(y) % (1 << 21) == 0
    assert (y.shape, y.dtype, y.flags.c_contiguous, y.flags.writeable) == (
        x.shape,
        x.dtype,
        True,
        True,
    )
    assert (y == 2).all()
    assert inv_std.base is None
    assert gradkit.rms_norm(x[:15], SCALE)[0].base is None
    assert gradkit.rms_norm(x[:16], SCALE)[0].base is not None
    kept = np.empty_like(x)
    again, inv_std = gradkit.rms_norm(x, SCALE, eps=0.0, out=(kept, None))
    assert again is kept
    assert (inv_std == 1).all()


def test_they_need_not_be_the_first_result():
    x = np.ones((2048, 2048), np.float32)
    for _ in range(2):  # the first call finds the plan
        _, s, inv_std = gradkit.add_rms_norm(x, x, SCALE, out=(np.empty_like(x), None, None))
        assert address(s) % (1 << 21) == 0
        assert inv_std.base is None
    (small, large), _ = gradkit.clip_by_global_norm([SCALE, x], 1.0)
    assert small.base is None
    assert address(large) % (1 << 21) == 0


def test_the_next_one_has_the_same_memory():
    first = normed()
    where = address(first)
    del first
    for _ in range(9):  # more than can be kept, one after the other
        assert address(normed()) == where


def test_small_ones_have_it_too():
    """From 128 KiB on, to the size: a larger block is for others."""
    for kib in (128, 700, 4095):
        x = np.ones((kib // 8, 2048), np.float32)
        first, second = (gradkit.rms_norm(x, SCALE)[0] for _ in range(2))
        places = {address(first), address(second)}
        assert len(places) == 2
        del first, second
        again = [gradkit.rms_norm(x, SCALE)[0] for _ in range(2)]
        assert set(map(address, again)) == places
        assert (np.array(again) == gradkit.rms_norm(x[:1], SCALE)[0]).all()
        del again
        other = gradkit.rms_norm(np.ones((5 * kib // 16, 2048), np.float32), SCALE)[0]
        assert address(other) not in places


@pytest.mark.guarantee("Bounded")
@pytest.mark.parametrize(
    "hold",
    [lambda y: y[5:6, ::3], lambda y: y.base, memoryview, lambda y: y.view(np.uint8).T],
    ids=["a part", "its base", "a memoryview", "other dtypes and axes"],
)
def test_what_holds_a_part_holds_it(hold):
    first = normed()
    where, holder = address(first), hold(first)
    del first
    assert address(normed()) != where
    del holder
    assert address(normed()) == where


def test_a_result_is_given_no_block_that_is_much_larger():
    large = normed(64)
    where = address(large)
    del large
    small = normed(48)
    assert not where <= address(small) < where + 64 * MIB
    assert address(normed(60)) == where


def test_of_two_the_one_that_fits_better_is_taken():
    wide, close = normed(70), normed(66)
    where = address(close)
    del close, wide
    assert address(normed(65)) == where


SYSTEM = """
import re
from gradkit._cpu import compiled
MIB = 1 << 20

def held(name):
    text = open("/proc/self/" + ("smaps" if name == "LazyFree" else "status")).read()
    return sum(int(found) for found in re.findall(name + r":\\s+(\\d+) kB", text)) // 1024

def block(mib):
    made = compiled.memory(mib * MIB)
    made[::4096] = 1
    return made

compiled.memory(1)
"""


@pytest.mark.guarantee("Bounded")
@of_linux
def test_the_system_may_have_it_meanwhile():
    code = "before = held('LazyFree'); block(64); print(held('LazyFree') - before)"
    assert int(in_a_process(SYSTEM + code).stdout) >= 62


@pytest.mark.guarantee("Bounded")
@of_linux
def test_no_more_is_kept_than_a_quarter_of_a_gibibyte():
    """Of many that are freed at once, the last; one that is larger is not kept at all."""
    code = """
before = held("VmSize")
blocks = [block(mib) for mib in (60, 61, 62, 63, 64, 65, 66, 67)]
where = [each.ctypes.data for each in blocks]
for _ in range(8):
    del blocks[0]
print(held("VmSize") - before)
block(257)
print(held("VmSize") - before)
print(compiled.memory(67 * MIB).ctypes.data == where[-1])
"""
    some, same, last = in_a_process(SYSTEM + code).stdout.split()
    assert 180 <= int(some) <= 256
    assert same == some
    assert last == "True"


@pytest.mark.guarantee("Bounded")
@of_linux
def test_of_small_ones_less_is_kept():
    """Those of 4 MiB are large: the system may take them."""
    code = """
before, lent = held("VmSize"), held("LazyFree")
blocks = [block(3) for _ in range(40)]
del blocks
print(held("VmSize") - before, held("LazyFree") - lent)
block(4)
print(held("LazyFree") - lent)
"""
    kept, lent, last = map(int, in_a_process(SYSTEM + code).stdout.split())
    assert 27 <= kept <= 33
    assert (lent, last) == (0, 4)


@of_linux
def test_it_is_given_back_where_the_system_has_no_more():
    code = """
import resource
block(200)
resource.setrlimit(resource.RLIMIT_AS, ((held("VmSize") + 150) * MIB,) * 2)
print(len(block(300)))
try:
    compiled.memory(600 * MIB)
except MemoryError:
    print("none")
print(len(block(300)))
"""
    assert in_a_process(SYSTEM + code).stdout.split() == [str(300 * MIB), "none", str(300 * MIB)]


def test_threads_never_share_a_block():
    gradkit.set_num_threads(1)
    start = threading.Barrier(4)

    def work(own):
        start.wait()
        for turn in range(6):
            y = compiled.memory(33 * MIB)
            y[:: 1 << 16] = own
            z = compiled.memory((33 + turn) * MIB)
            z[:: 1 << 16] = own + 10
            if not ((y[:: 1 << 16] == own).all() and (z[:: 1 << 16] == own + 10).all()):
                return False
        return True

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
def test_a_child_and_its_parent_have_their_own():
    code = """
import os
mine = block(40)
free = block(48)
where = free.ctypes.data
del free
child = os.fork()
if not child:
    theirs = block(48)
    theirs[:] = 2
    mine[:] = 3
    os._exit(theirs.ctypes.data != where)
print(os.waitpid(child, 0)[1])
ours = compiled.memory(48 * MIB)
print(ours.ctypes.data == where, 2 in ours[::4096], (mine[::4096] == 1).all())
"""
    assert in_a_process(SYSTEM + code).stdout.split() == ["0", "True", "False", "True"]
