"""Arrays that share memory, by addresses, shapes and strides alone."""

import itertools
from functools import partial
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gradkit
from gradkit import _host
from gradkit._calls.lists import AccumulateGradV2
from gradkit._open import memory
from tests.tolerances import assert_all_same_bits

HOST = SimpleNamespace(address=lambda array: array.ctypes.data)
DEVICE = SimpleNamespace(address=lambda array: array.data.ptr)

COMPILED = _host.code
ROOM = np.zeros(240, np.uint8)


def fits(written, others, *, may_be):
    """Ask compiled code if two lists fit."""
    return COMPILED.fitting(*(COMPILED.table(each, False) for each in (written, others)), may_be)


class OnDevice:
    """An array whose memory the host cannot read, as gradkit sees it."""

    def __init__(self, array):
        self.shape, self.strides, self.flags = array.shape, array.strides, array.flags
        self.size, self.itemsize = array.size, array.itemsize
        self.nbytes = array.nbytes
        self.data = SimpleNamespace(ptr=array.ctypes.data)


@st.composite
def views(draw):
    """A part of the room, with gaps, reversed or empty."""
    dtype = draw(st.sampled_from((np.uint8, np.float16, np.float32, np.float64)))
    start = draw(st.integers(0, 29)) * 8
    flat = ROOM[start:].view(dtype)
    steps = [draw(st.sampled_from((1, 2, 3, -1, -2))) for _ in range(2)]
    rows = flat[: len(flat) // 4 * 4].reshape(-1, 4)[: draw(st.integers(0, 5))]
    return rows[:: steps[0], :: steps[1]]


@given(array=views())
def test_a_range_ends_with_the_last_element(array):
    low, high = memory.byte_range(HOST, array)
    assert (low, high) == np.lib.array_utils.byte_bounds(array) if array.size else low == high
    assert memory.byte_range(DEVICE, OnDevice(array)) == (low, high)


@st.composite
def lattices(draw):
    """Windows by any lengths and strides, in bytes, that need not be multiples of an element's."""
    dtype = np.dtype(draw(st.sampled_from((np.uint8, np.float16, np.float32))))
    ndim = draw(st.integers(1, 4))
    shape = draw(st.lists(st.integers(0, 5), min_size=ndim, max_size=ndim))
    unit = draw(st.sampled_from((1, dtype.itemsize)))
    steps = st.integers(-12, 12).map(lambda step: unit * step)
    strides = draw(st.lists(steps, min_size=ndim, max_size=ndim))
    return np.lib.stride_tricks.as_strided(np.zeros(1000, dtype)[500:], shape, strides)


@settings(max_examples=500)
@given(array=lattices())
def test_an_array_overlaps_itself_if_an_element_shares_a_byte_with_another(array):
    size = array.itemsize
    axes = zip(array.strides, array.shape, strict=True)
    steps = [[stride * index for index in range(length)] for stride, length in axes]
    offsets = list(map(sum, itertools.product(*steps)))
    taken = {offset + byte for offset in offsets for byte in range(size)}
    overlaps = len(taken) < size * len(offsets)
    assert memory.overlaps_itself(array) == overlaps
    assert memory.overlaps_itself(OnDevice(array)) == overlaps
    if COMPILED is not None and COMPILED.apart([array], []):  # a quick look
        assert not overlaps


def test_interleaved_windows_are_written_element_by_element():
    """As slicing cannot make them: the elements of each axis lie between those of the other."""
    room = np.zeros(40)
    window = np.lib.stride_tricks.as_strided(room, (3, 4), (8 * 4, 8 * 3))
    values = np.arange(1.0, 13).reshape(3, 4)
    assert gradkit.accumulate_grad(window, values) is window
    np.testing.assert_array_equal(window, values)
    assert np.count_nonzero(room) == 12
    too_hard = np.lib.stride_tricks.as_strided(
        np.zeros(1), (50,) * 8, [8 * k for k in (9973, 9967, 9949, 9941, 9931, 9929, 9923, 9907)]
    )
    with pytest.raises(ValueError, match="overlaps itself"):
        memory.writable(too_hard, "buffer", "pass a copy")


@given(a=views(), b=views())
def test_overlap_is_numpys(a, b):
    shared = np.shares_memory(a, b)
    assert memory.overlap(HOST, a, b) == shared
    assert memory.overlap(DEVICE, OnDevice(a), OnDevice(b)) == shared


@given(arrays=st.lists(views(), max_size=6))
def test_the_first_overlap_is_one(arrays):
    pairs = {
        (i, j)
        for j, b in enumerate(arrays)
        for i, a in enumerate(arrays[:j])
        if np.shares_memory(a, b)
    }
    for backend, seen in ((HOST, arrays), (DEVICE, list(map(OnDevice, arrays)))):
        found = memory.first_overlap(backend, seen)
        assert found in pairs if pairs else found is None


@pytest.fixture(params=["compiled", "not compiled"], scope="class")
def code(request):
    """The search among NumPy's arrays as it is, and as it is where nothing was compiled."""
    with pytest.MonkeyPatch.context() as patched:
        if request.param == "not compiled":
            patched.setattr(_host, "code", None)
        elif _host.code is None:
            pytest.skip(_host.WHY_NOT_COMPILED)
        yield request.param


@pytest.mark.usefixtures("code")
@given(written=st.lists(views(), max_size=4), read=st.lists(views(), max_size=4))
def test_meetings_are_those_of_ranges(written, read):
    pairs = {
        (i, j)
        for i, a in enumerate(written)
        for j, b in enumerate(read)
        if np.may_share_memory(a, b)
    }
    seen = [list(map(OnDevice, arrays)) for arrays in (written, read)]
    for found in (memory.meetings(HOST, written, read), memory.meetings(DEVICE, *seen)):
        met = [(i, j) for i, j in found if written[i].size and read[j].size]
        assert len(met) == len(set(met))
        assert [i for i, _ in met] == sorted(i for i, _ in met)
        assert set(met) == pairs


@given(written=st.lists(views(), max_size=4), read=st.lists(views(), max_size=4))
def test_what_is_plainly_apart_can_be_written_and_shares_no_memory(written, read):
    ranges = [(array, memory.byte_range(HOST, array)) for array in (*written, *read)]
    apart = not any(
        array.size and other.size and low < end and begin < high
        for k, (array, (low, high)) in enumerate(ranges[: len(written)])
        for other, (begin, end) in ranges[k + 1 :]
    )
    plain = memory.plainly_apart(written, read)
    assert plain == apart if _host.code is not None else not plain


def test_nothing_but_numpys_own_writable_arrays_is_plainly_apart():
    array, other = np.zeros((3, 4)), np.ones(3)
    subclass = np.zeros(3).view(type("Own", (np.ndarray,), {}))
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    itself = np.lib.stride_tricks.as_strided(np.zeros(12), (3, 3), (16, 8))
    broadcast = np.lib.stride_tricks.as_strided(np.zeros(12), (3, 3), (8, 8))
    for written in (subclass, frozen, itself, broadcast, np.broadcast_to(other, (2, 3)), 1.0):
        assert not memory.plainly_apart([array, written], [])
    assert not memory.plainly_apart([array], [subclass])
    if _host.code is not None:
        assert memory.plainly_apart([array.T, None, array[:0]], [frozen, None, itself, array[1:1]])


@pytest.mark.skipif(COMPILED is None, reason="nothing is compiled")
def test_what_a_plan_knows_of_arrays():
    signature = partial(COMPILED.signature, memory, (1.0,))
    a, b, frozen = np.zeros(3), np.zeros((2, 3)), np.ones(2)
    frozen.flags.writeable = False
    seen = signature((a, b, None), 2)
    assert seen == signature((np.ones(3), b + 1, None), 0)
    for other in (a.view("i8"), a[:2], np.zeros(6)[::2], a.reshape(1, 3), None):
        assert signature((other, b, None), 0) != seen
    assert signature((None, b, a), 0) != signature((a, b, None), 0)
    assert signature((b, None, b), 0) != signature((None, b, b), 0)
    same = signature((a, b, None, a), 2)
    assert same is not None
    for other in ((a, b, None, b), (a, b, None, a + 1), (a, b, None, None), (a, b, a, None)):
        assert signature(other, 2) not in (same, None)
    assert signature((a, b, a[1:]), 2) is None
    for written in ((frozen, a), (a, a), (a, b[0], a[1:])):
        assert signature(written, len(written)) is None
        assert signature(written, 0) is not None


@pytest.mark.skipif(COMPILED is None, reason="nothing is compiled")
def test_a_signature_has_all_that_a_plan_depends_on():
    array = np.zeros((3, 4), ml_dtypes.bfloat16)[::-1, ::2]

    def signature(backend=memory, options=(1, None)):
        return COMPILED.signature(backend, options, (array,), 1)

    seen = np.array([array.ndim, *array.shape, *array.strides, id(int), id(type(None))])
    assert signature() == (memory, 1, None, array.dtype, seen.tobytes())
    for other in (signature(HOST), signature(options=(1.0, None)), signature(options=(1, 0))):
        assert other not in (signature(), None)


@pytest.mark.usefixtures("code")
def test_an_array_meets_itself_and_what_lies_in_its_memory():
    """Many arrays, and one that lies in another's memory and owns none."""
    written = [np.ones(3) for _ in range(20)]
    read = [np.ones(3) for _ in range(20)]
    read[3] = read[5] = written[8]
    assert sorted(memory.meetings(HOST, written, read)) == [(8, 3), (8, 5)]
    read[11] = written[2][1:]
    assert sorted(memory.meetings(HOST, written, read)) == [(2, 11), (8, 3), (8, 5)]


def test_the_same_memory_in_another_dtype_is_another_array():
    half = np.ones(3, np.float16)
    other = half.view(ml_dtypes.bfloat16)
    with pytest.raises(ValueError, match="buffer shares memory with grad"):
        gradkit.accumulate_grad(half, other, casting="same_kind")
    with pytest.raises(ValueError, match=r"grads\[0\] overlaps buffers\[0\]"):
        gradkit.accumulate_grads([half], [other], casting="same_kind")


def test_the_search_is_as_it_was():
    """Functions that the fixture has patched are whole again for the tests behind it."""
    assert _host.code is COMPILED


def test_outputs_beside_many_inputs_are_not_compared_with_each(monkeypatch):
    """A model's preallocated results: 4,000 beside 4,000 once took 16 s."""
    monkeypatch.setattr(memory, "overlap", None)
    monkeypatch.setattr(np, "may_share_memory", None)
    grads = list(np.ones((10_000, 3), np.float32))
    out = [np.empty(3, np.float32) for _ in grads]
    clipped, _ = gradkit.clip_by_global_norm(grads, 1.0, out=(out, None))
    assert clipped[-1] is out[-1]


def test_no_arrays_lie_apart():
    """As where a container has no gradients, and None in place of results."""
    assert memory.lie_apart(HOST, [])
    assert gradkit.per_tensor_norms(None, out=(None,)) is None


# Where `dy` and `dx` lie in one memory.
SHARED = {
    "equal addresses, other strides": (np.s_[:16], np.s_[:16], "T"),
    "equal addresses, other order": (np.s_[:16], np.s_[15::-1], "C"),
    "the last element alone": (np.s_[:16], np.s_[15:31], "C"),
    "the first of reversed ones": (np.s_[16:32], np.s_[16:0:-1], "C"),
    "the last of strided ones": (np.s_[:48:3], np.s_[45:61], "C"),
    "one of two that interleave": (np.s_[:32:2], np.s_[30:78:3], "C"),
}
APART = {
    "after the last element": (np.s_[:16], np.s_[16:32], "T"),
    "before the first": (np.s_[16:32], np.s_[15::-1], "C"),
    "after the last of strided ones": (np.s_[:48:3], np.s_[46:62], "C"),
    "between strided ones": (np.s_[:32:2], np.s_[1:33:2], "T"),
}


def in_one_memory(places):
    """The memory, ``dy`` and ``dx`` in it, and the other arguments of a gradient."""
    memory = np.arange(100.0)
    dy, dx, order = places
    views = memory[dy].reshape(4, 4), memory[dx].reshape(4, 4)
    x = np.random.default_rng(0).normal(size=(4, 4))
    _, mean, inv_std = gradkit.layer_norm(x)
    return memory, views[0], views[1].T if order == "T" else views[1], (x, None, mean, inv_std)


@pytest.mark.parametrize("places", SHARED.values(), ids=SHARED)
def test_edges_of_overlap_are_refused_and_nothing_is_written(places):
    memory, dy, dx, saved = in_one_memory(places)
    before = memory.copy()
    with pytest.raises(ValueError, match="memory"):
        gradkit.layer_norm_grad(dy, *saved, out=(dx, None, None))
    np.testing.assert_array_equal(memory, before)


@pytest.mark.parametrize("places", APART.values(), ids=APART)
def test_what_lies_just_beside_an_argument_is_written(places):
    _, dy, dx, saved = in_one_memory(places)
    kept = dy.copy()
    gradkit.layer_norm_grad(dy, *saved, out=(dx, None, None))
    np.testing.assert_array_equal(dy, kept)
    np.testing.assert_array_equal(dx, gradkit.layer_norm_grad(kept, *saved)[0])


@pytest.mark.usefixtures("code")
@pytest.mark.parametrize("turn", range(2))  # of which the second finds a plan
def test_results_that_share_memory_with_each_other_or_with_what_is_moved(turn):  # noqa: ARG001
    x, memory, ones = np.random.default_rng(0).normal(size=(6, 4)), np.arange(80.0), np.ones(4)
    running = {"running_mean": memory[:4], "running_var": memory[4:8]}
    y, before = memory[8:32].reshape(6, 4), memory.copy()
    for out in (
        (y, memory[31:35], None),
        (y, memory[40:44], memory[43:47]),
        (y, memory[40:44], memory[43:39:-1]),
        (y, memory[:4], None),
        (y, None, memory[7:11]),
        (memory[7:31].reshape(6, 4), None, None),
    ):
        with pytest.raises(ValueError, match="memory"):
            gradkit.batch_norm(x, ones, ones, **running, out=out)
        np.testing.assert_array_equal(memory, before)
    own = {name: array.copy() for name, array in running.items()}
    expected = gradkit.batch_norm(x, ones, ones, **own)
    found = gradkit.batch_norm(x, ones, ones, **running, out=(y, memory[32:36], memory[36:40]))
    assert_all_same_bits((*found, *running.values()), (*expected, *own.values()))


@given(views())
def test_elements_without_gaps_fill_their_memory(view):
    low, high = np.lib.array_utils.byte_bounds(view)
    filled = high - low == view.nbytes and view.__array_interface__["data"][0] == low
    reversed_ = any(n > 1 and step < 0 for n, step in zip(view.shape, view.strides, strict=True))
    if view.size:
        assert memory.has_no_gaps(view) == (filled and not reversed_)
        assert memory.has_no_gaps(view.T) == memory.has_no_gaps(view)


def test_of_arrays_that_begin_together_the_longest_counts():
    room = np.zeros(8)
    for read in itertools.permutations((room[:2], room[:6], room[:1])):
        assert not memory.whole_and_apart(HOST, [room[4:]], read)
        assert memory.whole_and_apart(HOST, [room[6:]], read)


@pytest.mark.skipif(COMPILED is None, reason="nothing is compiled")
def test_a_known_call_is_one_of_its_class():
    """By the same key as a call that is opened, of which no other class has one."""
    call = AccumulateGradV2(buffer=np.ones(3), grad=np.zeros(3), casting="safe", overwrite=True)
    backend = _host.backend()
    _, key, passed, plain = COMPILED.known({}, backend, call, call.key_names, ())
    assert passed == (True,)
    assert plain
    assert key == COMPILED.signature(backend, call.options(call), call.ordered(call), 0)
    assert AccumulateGradV2 in key


@pytest.mark.skipif(COMPILED is None, reason="nothing is compiled")
def test_windows_that_share_a_part_of_an_element_overlap():
    shifted = np.lib.stride_tricks.as_strided(np.zeros(12), (3,), (4,))
    assert not COMPILED.apart([shifted], [])
    with pytest.raises(ValueError, match="overlaps itself"):
        gradkit.scale_grads([shifted], 2.0)


@pytest.mark.usefixtures("code")
def test_ranges_that_are_nested_touch_are_equal_or_interleave():
    """All there are of three in seven places, of which each is written, and the others are read."""
    places = [ROOM.view(np.float64)[low:high] for low, high in itertools.combinations(range(7), 2)]
    pairs = itertools.product(places, repeat=2)
    met = {(id(a), id(b)): np.may_share_memory(a, b) for a, b in pairs}
    on_device = {id(a): OnDevice(a) for a in places}
    for own, *others in itertools.product(places, repeat=3):
        expected = [(0, k) for k, other in enumerate(others) if met[id(own), id(other)]]
        assert sorted(memory.meetings(HOST, [own], others)) == expected
        seen, *more = (on_device[id(array)] for array in (own, *others))
        assert sorted(memory.meetings(DEVICE, [seen], more)) == expected
        assert not (expected and memory.whole_and_apart(DEVICE, [seen], more))
        if _host.code is None:
            continue
        assert memory.plainly_apart([own], others) == (not expected)
        partners = [np.empty_like(own), *map(np.empty_like, others)]
        found = fits([own, *partners[1:]], [partners[0], *others], may_be=False)
        assert (found == -1) == bool(expected)


def test_what_lies_apart_on_a_device_is_found_to():
    """But for what is read twice, or begins where another does, on which a no may be wrong."""
    cut = [OnDevice(ROOM[low : low + 3]) for low in range(0, 15, 3)]
    for written in itertools.permutations(cut, 2):
        read = [each for each in cut if each not in written]
        assert memory.whole_and_apart(DEVICE, written, read)
        assert memory.lie_apart(DEVICE, [*written, *read])
        for wide in (ROOM[1:5], ROOM[:15], ROOM[2:4], ROOM[14:20]):
            assert not memory.whole_and_apart(DEVICE, [OnDevice(wide)], cut)
            assert not memory.lie_apart(DEVICE, [OnDevice(wide), *cut])


@pytest.mark.skipif(COMPILED is None, reason="nothing is compiled")
def test_arrays_of_another_number_of_axes_do_not_fit():
    for a, b in (((3,), (3, 4)), ((3, 4), (3,)), ((), (3,)), ((3,), ())):
        assert fits([np.zeros(a)], [np.ones(b)], may_be=True) == -1
