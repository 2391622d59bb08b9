"""Operations on lists by compiled code: NumPy's bits, on any threads and instruction set."""

import itertools
import math
import sys
import threading
import time
from functools import partial

import mpmath
import numpy as np
import pytest

import gradkit
from tests import oracles, tolerances
from tests import strategies as draw_
from tests.cpu.test_compiled import (
    _restored,  # noqa: F401
    check_everywhere,
    compiled,
    in_a_process,
)
from tests.layouts import LAYOUTS
from tests.tolerances import DTYPES, assert_all_same_bits, assert_same_bits, assert_same_numbers

INF = float("inf")
ORDERS = (0.5, 1.0, 2.0, 3.5, INF)
# Lists that are cut in every way: long arrays, many small ones, and less than a vector.
SIZES = {"long": (300_000, 70_001), "many": (257,) * 40, "small": (1, 3, 31, 0, 33, 1025)}


def make_list(name, sizes, lay=LAYOUTS["C"], seed=0):
    return [lay(draw_.values(size, name, seed + k)) for k, size in enumerate(sizes)]


def results(name, sizes, lay=LAYOUTS["C"]):
    """Results of all operations on a list."""
    grads, others = make_list(name, sizes, lay), make_list(name, sizes, lay, 99)
    found = [gradkit.grad_norm(grads, order) for order in ORDERS]
    found += [gradkit.per_tensor_norms(grads, order, flat=True) for order in ORDERS]
    found += gradkit.clip_by_global_norm(grads, 0.5)[0]
    for change in (
        lambda own: gradkit.clip_grad_norm(own, 0.5, scale=1.3),
        lambda own: gradkit.clip_grad_block_norm(own, 0.5),
        lambda own: gradkit.clip_grad_value(own, 0.3),
        lambda own: gradkit.accumulate_grads(own, others),
        lambda own: gradkit.accumulate_grads(own, others, scale=0.37),
        lambda own: gradkit.accumulate_grads(own, others, scale=0.37, overwrite=True),
    ):
        own = make_list(name, sizes, lay)
        change(own)
        found += own
    return found


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("name", sorted(DTYPES))
def test_neither_threads_nor_the_instruction_set_change_a_bit(name, sizes):
    check_everywhere(partial(results, name, sizes))


@pytest.mark.parametrize("layout", ["every third", "misaligned", "reversed"])
@pytest.mark.parametrize("name", sorted(DTYPES))
def test_gaps_change_no_bit(name, layout):
    sizes = (40_000, 3, 1025)
    assert_all_same_bits(results(name, sizes, LAYOUTS[layout]), results(name, sizes))


@pytest.mark.parametrize(
    "pair", [("C", "Fortran"), ("Fortran", "C"), ("padded", "C"), ("C", "stepped")]
)
@pytest.mark.parametrize("name", sorted(DTYPES))
def test_pairs_that_lie_otherwise_change_no_bit(name, pair):
    """Pieces begin and end within rows; tiles are cut off at the ends of both axes."""

    def updated(own, other):
        found = []
        for change in (
            gradkit.accumulate_grads,
            partial(gradkit.accumulate_grads, overwrite=True),
            partial(gradkit.accumulate_grads, scale=0.37, overwrite=True),
            partial(gradkit.ema_update, decay=0.9),
            partial(gradkit.sgd_update, lr=0.1),
        ):
            found += (buffers := [own(draw_.values(shape, name, 1)) for shape in shapes])
            change(buffers, [other(draw_.values(shape, name, 2)) for shape in shapes])
        for grads in (found[: len(shapes)], [other(each) for each in found[: len(shapes)]]):
            found += gradkit.clip_by_global_norm(grads, 0.5)[0]
        return found

    shapes = [(300, 129), (17, 1000), (40, 33), (3, 20, 18), (16, 16)]
    lay, c = [LAYOUTS[layout] for layout in pair], LAYOUTS["C"]
    assert_all_same_bits(updated(*lay), updated(c, c))


@pytest.mark.parametrize("limit", [0.0, -0.0, 1e-7, 0.3, 65519.0, INF])
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_every_16_bit_number_is_clipped_as_numpy_does(name, limit):
    found = []
    for backend in ("numpy", "compiled"):
        found.append(np.arange(1 << 16, dtype=np.uint16).view(DTYPES[name]))
        with gradkit.use_cpu_backend(backend):
            gradkit.clip_grad_value(found[-1:], limit)
    are_nan = np.isnan(found[0].astype("f4"))  # whose payload is nobody's business
    np.testing.assert_array_equal(np.isnan(found[1].astype("f4")), are_nan)
    assert_same_bits(*(each[~are_nan] for each in found))


def results_of_units(name, lay=LAYOUTS["C"]):
    """Units without gaps and with, more and fewer than are read side by side, short and long."""
    found = []
    for shape, axes in (
        ((40, 70, 33), [(0,), (2,), (1, 2), (0, 2)]),
        ((3, 5000, 2), [(1,), (0, 2)]),
        ((1100, 40), [(0,), (1,)]),
        ((2, 1, 3), [(1,)]),
    ):
        grad = lay(draw_.values(shape, name, 7))
        for axis, order in itertools.product(axes, (2.0, 3.0, INF)):
            clipped, norms = gradkit.clip_by_block_norm([grad], 0.5, order, axis=axis)
            found += [*clipped, *norms]
    return found


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_units_have_the_same_bits_everywhere(name):
    expected = results_of_units(name)
    check_everywhere(partial(results_of_units, name))
    for layout in ("Fortran", "every third", "misaligned", "reversed"):
        assert_all_same_bits(results_of_units(name, LAYOUTS[layout]), expected)


@pytest.mark.parametrize("name", sorted(DTYPES))
@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((40, 70, 33), (1, 2)),
        ((40, 70, 33), (0, 2)),
        ((3000, 31), (1,)),
        ((3000, 32), (1,)),
        ((3, 70_001), (1,)),
    ],
    ids=str,
)
def test_each_unit_has_its_own_factor(name, shape, axis):
    """Units that begin anywhere in what a thread takes at a time; a third are small enough."""
    grad = draw_.values(shape, name, 3)
    grad.flat[[1, grad.size // 2]] = INF, math.nan
    whole = gradkit.clip_by_block_norm([grad], INF, axis=axis)[1][0]
    limit = float(np.quantile(whole[np.isfinite(whole)], 1 / 3))
    for nonfinite in ("propagate", "zero"):
        clipped, (norms,) = gradkit.clip_by_block_norm(
            [grad], limit, axis=axis, nonfinite=nonfinite
        )
        factors = np.where(norms <= limit, 1, limit / norms)
        with np.errstate(all="ignore"):
            wanted = grad.astype(np.float64) * np.expand_dims(factors, axis)
        if nonfinite == "zero":
            wanted[np.broadcast_to(~np.isfinite(np.expand_dims(norms, axis)), shape)] = 0
        tolerances.assert_ulps(clipped[0], wanted.astype(grad.dtype), tolerances.CLIPPED_ULPS)
        own = grad.copy()
        gradkit.clip_grad_block_norm([own], limit, axis=axis, nonfinite=nonfinite)
        assert_same_bits(own, clipped[0])


@pytest.mark.parametrize("order", [1.0, 2.0, INF])
def test_the_norm_of_one_element_is_its_magnitude(order):
    """Also if there are more than a thread takes at a time, and if there is none."""
    one = np.array([-2.0, 1e-310, -5e-324, 1.7e308, 0.0, -INF, math.nan, 3.3] * 5000)
    for grad in (one, *(draw_.values(40_000, name, 5) for name in sorted(DTYPES))):
        norms = gradkit.clip_by_block_norm(grad[:, None], INF, order, axis=1)[1]
        assert_same_numbers(norms, np.abs(grad.astype(np.float64)))
    norms = gradkit.clip_by_block_norm([np.ones((3, 0)), np.ones((2, 1))], INF, order, axis=1)[1]
    assert [each.tolist() for each in norms] == [[0, 0, 0], [1, 1]]


@pytest.mark.parametrize("name", sorted(DTYPES))
@pytest.mark.parametrize("length", [4095, 4096, 4097, 8193])
def test_units_side_by_side_have_the_norms_of_units_without_gaps(name, length):
    """Of which as many elements are added up at a time."""
    grad = draw_.values((length, 19), name, 4)
    for order in (2.0, 3.0):
        together = gradkit.clip_by_block_norm(grad, INF, order, axis=0)[1]
        apart = gradkit.clip_by_block_norm(np.ascontiguousarray(grad.T), INF, order, axis=1)[1]
        assert_same_bits(together, apart)


def test_a_norm_does_not_depend_on_the_gradients_around():
    grads = make_list("float32", (70_001, 1, 300, 16384, 5))
    for order in ORDERS:
        together = gradkit.per_tensor_norms(grads, order, flat=True)
        alone = [gradkit.per_tensor_norms([g], order, flat=True) for g in grads]
        assert_same_bits(together, np.concatenate(alone))


@pytest.mark.guarantee("Products rounded once")
@pytest.mark.parametrize("pair", [*itertools.product(sorted(DTYPES), repeat=2)], ids="-".join)
@pytest.mark.parametrize("scale", [None, 0.37, -1.0])
def test_elements_have_the_bits_of_numpys(pair, scale):
    """Every pair of dtypes, magnitudes that the narrower one rounds, overflows and loses."""
    into, addend = pair
    with np.errstate(all="ignore"):
        powers = 2.0 ** np.random.default_rng(0).integers(-160, 140, 5000)
        host = (draw_.values(5000, "float64", 1) * powers).astype(DTYPES[into])
        other = (draw_.values(5000, "float64", 2) * powers).astype(DTYPES[addend])
    found = {}
    for backend in ("compiled", "numpy"):
        with gradkit.use_cpu_backend(backend):
            added, scaled, fresh, clamped = (host.copy() for _ in range(4))
            gradkit.accumulate_grad(added, other, scale=scale, casting="same_kind")
            gradkit.accumulate_grad_v2(fresh, other, overwrite=True, casting="same_kind")
            gradkit.scale_grads(scaled, scale or 1e-3)
            gradkit.clip_grad_value(clamped, 1 / 3)
            found[backend] = added, scaled, fresh, clamped
    for got, ref in zip(found["compiled"], found["numpy"], strict=True):
        assert_same_numbers(got, ref)


@pytest.mark.guarantee("Products rounded once")
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_products_are_rounded_to_16_bits_once(name):
    """Factors that put a product so near a tie that float32 could not tell it from one."""
    places = {"float16": 11, "bfloat16": 8}[name]
    one = np.ones(1000, DTYPES[name])
    for backend, sign, away in itertools.product(("compiled", "numpy"), (1, -1), (1, 0, -1)):
        with gradkit.use_cpu_backend(backend):
            grad = sign * one
            gradkit.scale_grads(grad, 1 + 2.0**-places + away * 2.0**-40)
        assert (grad == sign * (1 + (away > 0) * 2.0 ** (1 - places))).all()


def assert_as_numpys(function, numbers, *arguments, **options):
    """The results in place, and the signs of those that are numbers."""
    found = function(numbers.copy(), *arguments, **options).astype(np.float32)
    with gradkit.use_cpu_backend("numpy"):
        expected = function(numbers.copy(), *arguments, **options).astype(np.float32)
    np.testing.assert_array_equal(found, expected)
    is_number = ~np.isnan(found)
    np.testing.assert_array_equal(np.signbit(found[is_number]), np.signbit(expected[is_number]))


def near_ties(dtype, count=60):
    """Factors that put a number's product close to the middle of two others, and on either side."""
    random = np.random.default_rng(0)
    numbers, below = random.integers(1, 0x7B00, (2, count), dtype=np.uint16).view(dtype)
    numbers, below = numbers.astype(np.float64), np.minimum(below, dtype.type(1e4))
    middles = (below.astype(np.float64) + np.nextafter(below, dtype.type(np.inf))) / 2
    away = random.choice([-1, 1], count) * 2.0 ** random.integers(-52, -22, count)
    return middles / numbers * (1 + away)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_each_16_bit_number_is_converted_as_by_the_reference(name):
    for instructions in compiled.instruction_sets():
        compiled.use_instruction_set(instructions)
        assert_each_is_converted(name)


@np.errstate(invalid="ignore")  # NumPy says so of signalling NaN on ARM
def assert_each_is_converted(name):
    """All numbers but the first, so that none is aligned and a vector's rest is left at the end."""
    numbers = np.arange(1 << 16, dtype=np.uint16)[1:].view(DTYPES[name])
    least = {"float16": 2.0**-24, "bfloat16": 2.0**-133}[name]
    for factor in (1.0, 1 / 3, 1 + 2.0**-9, -(2.0**40), least, 1.5 * least, 0.0, INF, np.nan):
        assert_as_numpys(gradkit.scale_grads, numbers, factor)
    for factor in near_ties(numbers.dtype):
        assert_as_numpys(gradkit.scale_grads, numbers, factor)
    # By powers of two down to 2^-16 float32 is exact.
    others = np.random.default_rng(1).permutation(numbers)
    for scale in (1.0, 0.5, 2.0**-16, 2.0**-17, 0.75, 2.0, -0.5):
        assert_as_numpys(gradkit.accumulate_grad, numbers, others, scale=scale)
        assert_as_numpys(gradkit.accumulate_grad, numbers, np.roll(-numbers, 1), scale=scale)
    wide = gradkit.accumulate_grads(np.zeros(numbers.shape, np.float32), numbers)
    np.testing.assert_array_equal(wide, numbers.astype(np.float32))


@pytest.mark.guarantee("Accurate norms")
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("order", [1, 2])
def test_sums_keep_what_a_running_total_would_lose(name, order):
    """One large element, then so many small ones that a total in float64 would not feel."""
    host = np.full(1 << 20, {1: 2.0**-14, 2: 2.0**-10}[order], DTYPES[name])
    host[0] = 256
    exact = oracles.norm([host], order)
    bound = tolerances.norm(order, tolerances.RUNS, runs=True)
    assert oracles.off_by(gradkit.grad_norm(host, order), exact) <= bound


@pytest.mark.parametrize("order", [0.1, 0.5, 1.5, 3.0, 7.25, 40.0])
def test_powers_are_those_of_mpmath(order):
    rng = np.random.default_rng(3)
    for spread in (0.01, 3, 40, 600):
        host = 2.0 ** rng.uniform(-spread, spread, 300)
        with mpmath.workprec(200):
            total = mpmath.fsum(mpmath.mpf(x) ** order for x in host.tolist())
            exact = total ** (1 / mpmath.mpf(order))
        assert oracles.off_by(gradkit.grad_norm(host, order), exact) <= tolerances.POWER_NORM


@pytest.mark.parametrize("order", ORDERS)
def test_zeros_beside_the_smallest(order):
    """Zeros have no scale, whatever their dtype: they hide nothing."""
    tiny = 5e-324 if order >= 1 else 1e-300
    for first in sorted(DTYPES):
        grads = [np.zeros(3, DTYPES[first]), np.full(1, tiny), np.zeros(3, DTYPES[first])]
        assert float(gradkit.grad_norm(grads, order)) == pytest.approx(tiny, rel=1e-12, abs=0)


MEMORY = """
import resource, numpy as np, gradkit
gradkit.set_num_threads(4)
used = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
a, b = np.ones((2, 1 << 11, 1 << 12), np.float32)[:, :, ::2]
many = list(np.ones((1 << 13, 4), np.float32))
gradkit.grad_norm(np.ones((2, 3))), gradkit.scale_grads([np.ones(3)], 0.5)
before = used()
for order in (2, 3, np.inf):
    gradkit.grad_norm([a, b], order)
gradkit.clip_grad_norm([a, b], 1.0)
gradkit.accumulate_grad(a.T, b.T, scale=0.5)
gradkit.clip_grad_norm(many, 1.0)
print(used() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts in kilobytes")
def test_working_memory():
    assert int(in_a_process(MEMORY).stdout) << 10 <= tolerances.WORKING_MEMORY


UNBROKEN = """
import os, signal, threading, time, numpy as np
from gradkit._cpu import compiled
signal.signal(signal.SIGINT, signal.default_int_handler)
many = lambda own: np.lib.stride_tricks.as_strided(own, (1 << 8, 1 << 22), (0, 4))
source, target = np.ones(1 << 22, np.float32), np.zeros(1 << 22, np.float32)
last = np.zeros(3, np.float32)
def interrupt():
    while not target[:: 1 << 16].any():  # the call has begun
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt).start()
try:
    compiled.scale([source[:3], many(source)], [last, many(target)], 3.0)  # from the end
    while True:
        time.sleep(0.01)
except KeyboardInterrupt:
    print(last.tolist())
"""


@pytest.mark.guarantee("Ctrl-C")
def test_an_interrupt_waits_for_what_is_written():
    done = in_a_process(UNBROKEN)
    assert done.stdout == "[3.0, 3.0, 3.0]\n", done.stderr


@pytest.mark.parametrize("exact", [False, True])
def test_python_runs_in_other_threads_while_a_list_is_computed(exact):
    gradkit.set_num_threads(1)  # on many the call may be too short
    one = np.ones(1 << 22, np.float32)
    grads = [one] * (100 if exact else 30)
    turns, begun, ended = [], threading.Event(), threading.Event()

    def count():
        begun.set()
        while not ended.is_set():
            turns.append(time.perf_counter())
            time.sleep(0.001)

    other = threading.Thread(target=count)
    other.start()
    begun.wait()
    start = time.perf_counter()
    gradkit.grad_norm(grads, 2 if exact else 3, exact=exact)
    end = time.perf_counter()
    ended.set()
    other.join()
    assert sum(start < at < end for at in turns) > 3


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_threads_gather_gaps_and_units_into_memory_of_their_own(name):
    found = {}
    for threads in (1, 4):
        gradkit.set_num_threads(threads)
        for turn in range(5):
            own, other = (LAYOUTS["every third"](draw_.values(600_000, name, k)) for k in (1, 2))
            gradkit.accumulate_grads([own], [other], scale=0.37)
            norms = gradkit.clip_by_block_norm(draw_.values((17, 40_000), name, 3), 1.0, axis=0)[1]
            found[threads, turn] = own, np.asarray(norms)
    for each in found.values():
        assert_all_same_bits(each, found[1, 0])


def test_no_item_is_taken_by_two_threads_or_by_none():
    """One that is taken twice is added twice; threads whose share has ended take the others'."""
    gradkit.set_num_threads(64)
    one, buffers = np.ones(32, np.float32), np.zeros((8192, 32), np.float32)
    written, grads = list(buffers), [one] * len(buffers)
    for turn in range(1, 101):
        gradkit.accumulate_grads(written, grads)
        assert (buffers == turn).all()


@pytest.mark.parametrize("step", [1, 2], ids=["without gaps", "with gaps"])
def test_the_norm_of_gradients_that_are_the_buffers_is_of_what_they_were(step):
    own = np.full(2000, 3.0)[::step]
    before = float(gradkit.grad_norm([own]))
    norm, grad_norm = np.zeros(()), np.zeros(())
    gradkit.accumulate_grads([own], [own], scale=1.0, norm_out=norm, grad_norm_out=grad_norm)
    assert float(grad_norm) == before
    assert float(norm) == 2 * before


@pytest.mark.parametrize("into", sorted(DTYPES))
@pytest.mark.parametrize("other", sorted(DTYPES))
def test_gaps_as_wide_as_the_other_dtype_are_gaps(into, other):
    """A stride that leads from one element of the buffer to the next, of a narrower dtype."""
    size, addend = np.dtype(DTYPES[into]).itemsize, draw_.values(4000, other, 1)
    step = max(1, size // addend.itemsize)
    for buffer_step, grad_step in ((1, step), (2, 2 * step), (max(1, addend.itemsize // size), 1)):
        buffer = draw_.values(400 * buffer_step, into, 2)[::buffer_step]
        grad = addend[: 400 * grad_step : grad_step]
        expected = gradkit.accumulate_grads(buffer.copy(), grad.copy(), casting="same_kind")
        gradkit.accumulate_grads(buffer, grad, casting="same_kind")
        assert_same_bits(buffer, expected)


@pytest.mark.parametrize("pair", [*itertools.permutations(sorted(DTYPES), 2)], ids="-".join)
def test_long_arrays_of_two_dtypes_have_the_bits_of_short_ones(pair):
    """Elements go through float64 a few hundred at a time."""
    into, other = (draw_.values(1300, name, k) for k, name in enumerate(pair))

    def all_of(part):
        own = [into[part].copy() for _ in range(3)]
        rest = np.zeros_like(own[0])
        addend = [other[part].copy()]
        options = {"casting": "same_kind"}
        gradkit.accumulate_grads(own[:1], addend, scale=0.3, compensation=[rest], **options)
        if np.can_cast(other.dtype, into.dtype):
            gradkit.ema_update(own[1:2], addend, 0.9)
        if own[2].itemsize == 2:
            gradkit.accumulate_grads(
                own[2:], addend, rounding="stochastic", seed=3, offsets=part.start, **options
            )
        return [*own, rest]

    whole = all_of(slice(0, 1300))
    for start in range(0, 1300, 100):
        part = slice(start, start + 100)
        assert_all_same_bits(all_of(part), [each[part] for each in whole])


def test_pairs_begin_with_the_gradients_zeros_and_keep_nothing_of_infinity():
    buffer, rest = np.ones(3, np.float32), np.ones(3, np.float32)
    grad = np.float32([-0.0, np.inf, 1])
    gradkit.accumulate_grads([buffer], [grad], overwrite=True, compensation=[rest])
    assert_same_bits(buffer, grad)
    assert rest.tolist() == [0, 0, 0]


def test_a_scale_that_underflows_beside_the_smallest_takes_no_digits():
    """The product of both is a subnormal number, and the norm is none."""
    grad = np.full(4000, 1.5)
    plain = float(gradkit.grad_norm(grad, 0.5, scale=0.3))
    small = float(gradkit.grad_norm(grad * 2.0**-1015, 0.5, scale=0.3 * 2.0**-20))
    assert small == math.ldexp(plain, -1035)


def test_a_small_power_of_nothing_is_nothing():
    """And that of a ratio below float64's normal numbers is not."""
    assert float(gradkit.grad_norm([np.array([0.0, 0.0, 1.0])], 0.01)) == 1
    found = float(gradkit.grad_norm([np.array([2.0**-1060, 1.0])], 0.01))
    assert found == pytest.approx((1 + 2.0**-10.6) ** 100, rel=1e-12, abs=0)


def test_the_mean_of_no_elements_is_zero():
    for shape, axis in (((3, 0), (1,)), ((2, 0, 3), (1, 2)), ((0,), None), ((2, 0), None)):
        clipped, (norms,) = gradkit.clip_by_block_norm([np.ones(shape)], 1.0, rms=True, axis=axis)
        assert not np.any(norms)
        assert clipped[0].shape == shape
    strided = np.ones((3, 4, 5))[:, ::2, :0]  # of units that are gathered
    assert not np.any(gradkit.clip_by_block_norm([strided], 1.0, axis=(1, 2))[1])
