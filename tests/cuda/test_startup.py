"""``warmup``: after it no call compiles, and nothing is compiled that no call asks for."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradkit
from gradkit._calls.backend import OPERATIONS
from gradkit._calls.lists import goes_with_param
from gradkit._cuda import CudaBackend
from gradkit._cuda.launch.kernels import kernel, kernels_in, options_of, source_of
from gradkit._cuda.list_tables import CAPACITY
from gradkit._dtypes import FLOATS, accumulation_name
from testbed.emulator import IdleDevice
from tests.combinations import ON_GPUS, combinations, needed
from tests.devices.emulated import emulated_backend, on_device
from tests.operations import OPERATIONS as ROWS
from tests.operations import POWER, of
from tests.ranks import Pair
from tests.tolerances import DTYPES

HALVES = ("float16", "bfloat16")

# Odd to vectors or not; short, long, longer, too long, for a block and for a cluster.
WIDTHS = (5, 64, 65, 127, 512, 4095, 4099, 5120, 7001, 8192, 8193, 12288, 14337, 16392)
WIDTHS += 40_960, 40_961, 65_600, 131_200
PACKS = 2, 256, 512, 760, 1025, 2560, 4100
WIDTHS += tuple(16 * packs + rest for packs in PACKS for rest in (2, 4))
WIDTHS += (161, 322, 644, 1288, 2047, 4608, 5376, 6136, 8960, 10240, 14336, 16384)
ORDERS = (1, 2, POWER, np.inf)


class Maker:
    """Arrays on a device that does nothing."""

    def __init__(self, **options):
        self.device = IdleDevice(multiprocessors=1, **options)
        self.backend = CudaBackend(self.device)
        self.device.xp.asnumpy = np.zeros_like  # of sums that no kernel has written
        self.apart = [partial(self.strided, gap) for gap in (1, 4, 8)]
        self.widths = WIDTHS

    def __call__(self, shape, dtype):
        return on_device(self.device.xp.asarray(np.ones(shape, DTYPES[dtype])), self.backend)

    def one(self, _, shape, dtype):
        """An argument of an operation."""
        return self(shape, dtype)

    def strided(self, gap, label, shape, dtype):
        """The same; data are rows of longer ones, or have their channels last."""
        if label not in ("dy", "x", "y", "ds", "residual"):
            return self(shape, dtype)
        if len(shape) == 2:
            return self((shape[0], shape[1] + gap), dtype)[:, : shape[1]]
        return self((shape[0], *shape[:0:-1]), dtype).transpose(0, 2, 1)


@pytest.fixture
def make():
    return Maker()


class TwoDevices:
    """A group whose ranks hear nothing of each other."""

    rank, size, on_device = 0, 2, True

    def __init__(self, make):
        self.faults, self.rows = make(2, "float64"), make((2, 6), "float64")

    def allgather(self, _):
        return self.rows

    def check(self):
        """Find nothing."""


def of_norms(make, operation, dtypes):
    """Arguments of a norm, with a scale and without."""
    shapes = [(2, 3, 5), (2, 24, 64), (2, 12, 60), (2, 6, 34), (2, 24, 9)]
    if operation.family == "rows":
        shapes = [(2, width) for width in make.widths]
    if operation.family == "groups":  # of few elements, and such as a block holds
        shapes += [(2, 3, 8), *((2, 24, 128 + run) for run in (0, 4, 2, 1))]
    kinds = [own for own in operation.types if own[0] in dtypes and own[2] in {*dtypes, own[1]}]
    for types, shape, one in product(kinds, shapes, (make.one, *make.apart)):
        kept = cache(one)  # what no call changes goes into each of them
        for variant in ("", *operation.variants):
            given = operation.arguments(kept, types, shape, variant=variant)
            if types[2] in dtypes:
                yield given
                if "scale_offset" in operation.parameters and not variant:
                    yield given | {"scale_offset": 1.0}
                if "group" in operation.parameters:
                    yield given | {"group": Pair()}
            if types[2] == types[1]:
                given = {k: v for k, v in given.items() if k not in ("scale_offset", "wanted")}
                given |= dict.fromkeys(operation.optional)
                yield from moving(make, operation, given, dtypes, shape[1])
                if types[1] not in (accumulation_name(types[0]), "float64"):
                    given |= {"out": statistics(make, operation, types[1], shape[1])}
                    yield from moving(make, operation, given, dtypes, shape[1])


def moving(make, operation, given, dtypes, channels):
    """The same call, and with running statistics of each dtype."""
    yield given
    if "running_mean" in operation.parameters:
        for dtype in {*dtypes, *map(accumulation_name, dtypes)}:
            yield given | {name: make(channels, dtype) for name in ("running_mean", "running_var")}


def statistics(make, operation, dtype, channels):
    """An ``out`` that says what dtype a forward pass gives statistics."""
    named = operation.record.result_names
    wanted = {"mean", "inv_std"} if "y" in named else ()
    return tuple(make(channels, dtype) if name in wanted else None for name in named)


def of_lists(make, operation, dtypes):
    """Arguments of an operation on lists of one dtype or all: of few arrays, and of many."""
    names = sorted(dtypes)
    for count, own in product((1, 2, CAPACITY + 1), (names, *([name] for name in names))):
        lists = [((6,), own[k % len(own)]) for k in range(count)]
        given = operation.arguments(make.one, lists=lists)
        yield given
        for p in ORDERS if "norm_type" in operation.parameters else ():
            yield given | {"norm_type": p}
            if operation.name == "grad_norm":
                yield given | {"norm_type": p, "group": TwoDevices(make)}
        if "exact" in operation.parameters and "float64" not in own:
            yield given | {"exact": True}


def of_buffers(make, operation, dtypes):
    """Arguments of an accumulation, of lists with the norm of what it gives and without."""
    for into, addend in product(dtypes, dtypes):
        narrowing = {} if addend in FLOATS[into].addends else {"casting": "same_kind"}
        pair = dict(zip(operation.arrays, (make(9, into), make(9, addend)), strict=True))
        if operation.family == "buffers":
            yield pair | narrowing
            if "compensation" in operation.parameters:
                yield pair | narrowing | {"compensation": make(9, into)}
            continue
        for count in (1, CAPACITY + 1):
            given = {
                label: [make(9, array.dtype.name) for _ in range(count)]
                for label, array in pair.items()
            } | narrowing
            yield given
            yield given | {"norm_out": make((), "float64")}
            yield given | {"compensation": [make(9, into) for _ in range(count)]}
            if into in HALVES:
                yield given | {"rounding": "stochastic"}


def of_averages(make, operation, dtypes):
    """Averages of each dtype, and parameters of each that it holds."""
    for average in dtypes:
        for param in dtypes & {*FLOATS[average].addends}:
            for count in (1, CAPACITY + 1):
                lists = ([make(9, name) for _ in range(count)] for name in (average, param))
                yield dict(zip(operation.arrays, lists, strict=True)) | operation.numbers


def of_updates(make, operation, dtypes):
    """Parameters of each dtype, with gradients and states of each that goes with it."""
    for kinds in product(dtypes, repeat=3):
        if not all(map(goes_with_param, ("grads", "states"), kinds[:1] * 2, kinds[1:])):
            continue
        own = [kinds[0], kinds[1], *[kinds[2]] * (len(operation.arrays) - 2)]
        roundings = ({}, {"rounding": "stochastic", "seed": 1})
        for count, more in product((1, CAPACITY + 1), roundings[: 1 + (kinds[0] in HALVES)]):
            lists = ([make(9, name) for _ in range(count)] for name in own)
            given = dict(zip(operation.arrays, lists, strict=True)) | operation.numbers | more
            yield given
            yield given | {"scale": make((), "float64")}
            if "momenta" in given and kinds[2] == kinds[0]:
                yield given | {"momenta": None}


def of_numbers(make, operation, _):
    """Arguments whatever dtypes gradients have."""
    yield operation.arguments(make.one)


ARGUMENTS = {
    **dict.fromkeys(("rows", "channels", "groups"), of_norms),
    **dict.fromkeys(("lists", "copies"), of_lists),
    "buffers": of_buffers,
    "buffer lists": of_buffers,
    "averages": of_averages,
    "updates": of_updates,
    "numbers": of_numbers,
}


def every_call(make, dtypes, names=tuple(ROWS)):
    for operation in (ROWS[name] for name in names):
        for arguments in ARGUMENTS[operation.family](make, operation, dtypes):
            yield operation, arguments


def run(operation, arguments):
    with np.errstate(all="ignore"):
        operation(**arguments)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtypes", [{"float32"}, {"bfloat16", "float32"}])
@pytest.mark.parametrize("name", ROWS)
def test_an_operation_by_itself(make, name, dtypes):
    ready = gradkit.warmup([make(1, dtype) for dtype in dtypes], ROWS[name].function)
    warmed, make.widths = [*make.device.compiled], WIDTHS[::3]
    assert 0 < ready <= len(warmed)
    for call in every_call(make, dtypes, [name]):
        run(*call)
    assert make.device.compiled == warmed


@pytest.mark.slow
@pytest.mark.cuda
@pytest.mark.parametrize(
    ("gpu", "dtypes"),
    [
        *zip(
            ON_GPUS,
            [
                {"float32"},
                {"float64"},
                {"float64"},
                {"float16", "float32"},
                {"float64"},
                {"float32"},
                {"bfloat16", "float32"},
                {"float32"},
            ],
            strict=True,
        )
    ],
)
def test_nothing_is_compiled_in_vain(gpu, dtypes):
    """Whatever GPU it is, nor is anything left out."""
    make, other = (Maker(**gpu._asdict()) for _ in range(2))
    gradkit.warmup([make(1, dtype) for dtype in dtypes])
    for call in every_call(other, dtypes):
        run(*call)
    warm, asked = (set(maker.device.compiled) for maker in (make, other))
    assert not asked - warm
    # Asked for by an addend of more dimensions than a launch's parameters hold, and by XLA's
    # callbacks, which combine the statistics of all devices.
    uncommon = {
        options_of({"CAPACITY": 0, "GRAD": grad, "BUFFER": buffer})
        for grad, buffer in product(dtypes, dtypes)
    } | {options_of({})}
    assert {options for _, options in warm - asked} == uncommon


@pytest.mark.cuda
@pytest.mark.parametrize("gpu", ON_GPUS, ids=str)
@given(data=st.data())
def test_rows_of_any_width_need_no_more(gpu, data):
    name = data.draw(st.sampled_from([each.name for each in of("rows")]), "name")
    types = data.draw(st.sampled_from(ROWS[name].types), "types")
    width = data.draw(
        st.integers(1, 1 << 19) | st.integers(1, 1 << 14).map(lambda k: 16 * k), "width"
    )
    make = Maker(**gpu._asdict())
    one = data.draw(st.sampled_from((make.one, *make.apart)), "one")
    variant = data.draw(st.sampled_from(("", *ROWS[name].variants)), "variant")
    run(ROWS[name], ROWS[name].arguments(one, types, (2, width), variant=variant))
    known = {(source_of(file), options_of(macros)) for file, macros in needed(gpu, name)}
    assert set(make.device.compiled) <= known


@pytest.mark.parametrize("name", OPERATIONS)
def test_no_operation_is_left_out(name):
    assert combinations(name)


def test_every_file_of_kernels_is_known():
    kernels = Path(__file__).parents[2] / "kernels"
    files = {file for file, _ in combinations()}
    assert files == {path.stem for path in kernels.glob("*.cu")}


def test_names_of_kernels_are_read_from_their_source():
    assert kernels_in("norm") == ("norm_partials", "norm_finish")
    assert kernels_in("norms") == ("norms_finish", "norm_parts")
    assert kernels_in("norm_of_ranks") == ("rank_state", "join_ranks")
    assert kernels_in("column_sums") == ("column_sums",)
    assert kernels_in("clip_coefficient") == ("clip_coefficient",)


@pytest.mark.emulated
def test_the_kernels_that_it_compiles_run():
    backend = emulated_backend(multiprocessors=1)
    grads = [on_device(backend.device.xp.asarray(np.full(3, 2.0, np.float32)), backend)]
    assert gradkit.warmup(grads, gradkit.zero_grad, gradkit.clip_grad_value) == 5
    gradkit.clip_grad_value(grads, 1.5)
    np.testing.assert_array_equal(grads[0], np.full(3, 1.5))


def test_threads_that_ask_at_once_compile_once(make):
    started = threading.Barrier(4)

    def ask(_):
        started.wait()
        kernel(make.device, "zero", "zero_grad", CAPACITY=0)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(ask, range(4)))
    assert len(make.device.compiled) == 1


def test_host_arrays_need_nothing():
    assert gradkit.warmup({"w": np.ones(3), "b": [np.ones(2, np.float16), None]}) == 0
    assert gradkit.warmup([]) == 0


def test_what_it_refuses():
    with pytest.raises(TypeError, match=r"arrays\['w'\]\[1\] is a str; expected an array"):
        gradkit.warmup({"w": [np.ones(2), "x"]})
    with pytest.raises(TypeError, match=r"arrays\[0\] has dtype int64"):
        gradkit.warmup([np.ones(2, np.int64)])
    with pytest.raises(TypeError, match=r"sum.* is not an operation .* such as gradkit.layer_norm"):
        gradkit.warmup([np.ones(2)], sum)
