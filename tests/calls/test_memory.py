"""At most 16 MiB of working memory beyond the outputs, whatever the size of the input.

Here of the NumPy backend. What compiled code allocates only the system sees: test_compiled.py.
"""

import tracemalloc

import numpy as np
import pytest

import gradkit
from tests import steps
from tests.operations import DATA, KINDS, of
from tests.tolerances import DTYPES, WORKING_MEMORY

SIZE = 3 << 21  # elements: a copy in float32 is 24 MiB, in float16 it is 12
SHAPES = {
    "one long row": (1, SIZE),
    "long rows": (8, SIZE // 8),
    "widest tiles": (SIZE >> 14, 1 << 14),
    "many rows": (SIZE // 4, 4),
    "rows of one": (SIZE, 1),
    "neither": (2048, 4096),
    "many channels": (2, SIZE // 2, 1),
    "images": (8, 64, 128, 128),
    "small images": (60, 896, 16, 8),  # as many channels as are spread
}
LAYOUTS = {
    "C": lambda shape, dtype: np.ones(shape, dtype),
    "Fortran": lambda shape, dtype: np.ones(shape[::-1], dtype).T,
    "stepped": lambda shape, dtype: np.ones((*shape[:-1], 2 * shape[-1]), dtype)[..., ::2],
}


@pytest.fixture(autouse=True)
def _four_threads():
    """Each has scratch of its own, whatever this machine has."""
    before = gradkit.get_num_threads()
    gradkit.set_num_threads(4)
    with gradkit.use_cpu_backend("numpy"):
        yield
    gradkit.set_num_threads(before)


def working_memory(call, **arguments):
    """The most memory that a call allocates beyond what it returns."""
    tracemalloc.start()
    try:
        results = call(**arguments)
        kept, peak = tracemalloc.get_traced_memory()
        del results
        return peak - (kept - tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()


def test_the_measure_itself():
    """A copy is seen; what is returned is not."""
    assert working_memory(lambda: np.ones(SIZE)[:1].copy()) >= 8 * SIZE
    assert working_memory(lambda: np.ones(SIZE)) < 1 << 16


@pytest.mark.guarantee("Bounded")
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("float16", "stepped"),
        pytest.param("float32", "C", marks=pytest.mark.slow),
        pytest.param("float64", "Fortran", marks=pytest.mark.slow),
    ],
)
def test_lists(name, layout):
    def make(_, shape, dtype):
        return LAYOUTS[layout if shape else "C"](shape, DTYPES[dtype])

    big = (64, 1 << 16)
    for operation in of("lists", "buffers", "buffer lists"):
        for variant in ("", *operation.variants):
            given = operation.arguments(
                make, (name,) * 3, big, lists=[(big, name)] * 2, variant=variant
            )
            assert working_memory(operation, **given) <= WORKING_MEMORY, operation.name


ARRAYS = [("float32", "C"), ("float16", "stepped"), ("float64", "Fortran")]


@pytest.mark.guarantee("Bounded")
@pytest.mark.sampled(31)
@pytest.mark.parametrize(
    ("kind", "name", "layout"),
    [(kind, *ARRAYS[k % len(ARRAYS)]) for k, kind in enumerate(SHAPES)],
)
def test_norms(kind, name, layout):
    shape = SHAPES[kind]
    x = LAYOUTS[layout](shape, DTYPES[name])
    wide = "float64" if name == "float64" else "float32"
    groups = shape[1] // min(shape[1], 4)

    def make(label, own, dtype):
        if KINDS[label] == DATA:
            return x
        return np.zeros(own, dtype) if label == "mean" else np.ones(own, dtype)

    for operation in of("rows", "channels", "groups"):
        if operation.name == "batch_norm" and np.prod(shape) == shape[1]:
            continue  # a channel has one element, which is refused
        variants = operation.variants if operation.family == "rows" else ()
        for variant in ("", *variants):
            types = name, wide, name
            given = operation.arguments(make, types, shape, axis=1, groups=groups, variant=variant)
            assert working_memory(operation, **given) <= WORKING_MEMORY, operation.name


@pytest.mark.parametrize("operation", of("channels"), ids=lambda each: each.name)
def test_batch_norm_with_channels_first(operation):
    make = lambda _, shape, dtype: np.ones(shape, dtype)  # noqa: E731
    given = operation.arguments(make, shape=(SIZE // 4, 2, 2), axis=0)
    for arguments in (given, given | dict.fromkeys(operation.optional)):
        assert working_memory(operation, **arguments) <= WORKING_MEMORY


def test_statistics_of_many_ranks():
    rows = np.ones((64, SIZE // 64))
    assert working_memory(lambda: steps.combine_stats(rows, rows, rows[:, 0])) <= WORKING_MEMORY
