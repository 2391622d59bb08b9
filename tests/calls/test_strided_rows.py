"""Rows at strides: read and written where they lie, with the bits of a contiguous copy."""

import tracemalloc
from itertools import cycle

import numpy as np
import pytest

import gradkit
from gradkit._cuda import row_starts
from tests.operations import OPERATIONS, of
from tests.problems import LAYER_TYPES, make
from tests.tolerances import assert_all_same_bits, assert_same_bits

SOME_TYPES = [LAYER_TYPES[k] for k in (0, 1, 2, 6)]
# The inverse alone copies.
NAMES = [each.name for each in of("rows") if each.name != "layer_norm_inverse"]
GRADIENTS = [name for name in NAMES if name.endswith("grad")]


# Heads of width D inside rows of a projection, of which there are B x S. Each takes the room
# between two views of it, and gives a view of shape (B, S, H, D) or with other leading axes.


def _projection(room, b, s, h, d):
    return room.reshape(b, s, -1)[..., 3 : 3 + h * d]


def _heads(room, b, s, h, d):
    return room.reshape(b, s, -1)[..., h * d : 2 * h * d].reshape(b, s, h, d)


def _heads_first(room, b, s, h, d):
    return _heads(room, b, s, h, d).transpose(0, 2, 1, 3)


def _unaligned(room, b, s, h, d):
    """Rows that begin at every multiple of an element."""
    return room.reshape(b, s, -1)[..., 1 : 1 + 3 * h * d].reshape(b, s, h, -1)[..., :d]


def _backwards(room, b, s, h, d):
    return _heads(room, b, s, h, d)[::-1, :, ::-1]


def _apart(room, b, s, h, d):
    """More dimensions than a kernel counts rows by."""
    return _heads(room, b, s, h, d).reshape(b, s // 2, 2, h, d)[:, ::-1, :, ::2]


VIEWS = [_projection, _heads, _heads_first, _unaligned, _backwards, _apart]
WAYS = pytest.mark.parametrize("view", VIEWS, ids=lambda f: f.__name__.strip("_"))


def laid(view, values_of, dtype, sizes):
    """A view of room that is NaN elsewhere; ``values_of`` a shape gives its numbers."""
    b, s, h, d = sizes
    room = np.full(b * s * (3 * h * d + 5), np.nan, dtype)
    found = view(room, *sizes)
    found[...] = values_of(found.shape)
    return found


def arguments(name, view, types, sizes):
    """Arguments of a norm on strided views, by name."""
    shape = laid(view, lambda _: 0, types[0], sizes).shape
    p = make(shape, types, seed=3, centred="rms" not in name)

    def like(values):
        return laid(view, lambda _: values, values.dtype, sizes)

    other = make(shape, types, seed=11)
    further = {"y": like(p.x), "residual": like(other.x), "ds": like(other.dy)}
    further["gate"] = further["residual"]

    def one(label, *_):
        host = further[label] if label in further else getattr(p, label)
        return like(host) if label in ("dy", "x") else host

    operation = OPERATIONS[name]
    given = operation.arguments(one) | (
        {"ds": further["ds"]} if "ds" in operation.parameters else {}
    )
    return {label: value for label, value in given.items() if value is not None}


def results_like(results, view, sizes):
    """Room for results: strided views for those of the data's shape."""
    for result in results:
        if result.shape == results[0].shape:
            yield laid(view, lambda _: np.nan, result.dtype, sizes)
        else:
            yield np.full_like(result, np.nan)


@pytest.mark.guarantee("Strided rows")
@pytest.mark.sampled(13)
@WAYS
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("types", "sizes"), [*zip(SOME_TYPES, cycle([(3, 4, 4, 16), (2, 2, 2, 1029)]))], ids=str
)
def test_strided_rows_have_the_bits_of_a_copy(backend, name, view, types, sizes):
    check_bits_of_a_copy(backend, name, view, types, sizes)


WIDEST = zip(SOME_TYPES, (16384, 6144, 16384, 16384), strict=True)
LONG = [*WIDEST, (SOME_TYPES[0], 14336)]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize(("types", "width"), LONG, ids=str)
def test_long_rows_have_the_bits_of_a_copy(backend, name, types, width):
    """Several strides lead from row to row, and sums over rows take shared memory."""
    check_bits_of_a_copy(backend, name, _heads_first, types, (1, 2, 2, width))


def check_bits_of_a_copy(backend, name, view, types, sizes):
    given = arguments(name, view, types, sizes)

    def call(on, **options):
        return getattr(gradkit, name)(**{k: on(array) for k, array in given.items()}, **options)

    expected = [
        backend.asnumpy(a) for a in call(lambda host: backend.asarray(host.copy(order="C")))
    ]
    assert_all_same_bits(call(backend.asarray), expected, backend)
    hosts = list(results_like(expected, view, sizes))
    outs = tuple(map(backend.asarray, hosts))
    for out, host, value in zip(call(backend.asarray, out=outs), hosts, expected, strict=True):
        assert_same_bits(backend.asnumpy(out), value)
        untouched = backend.asarray(host)
        untouched[...] = out
        assert backend.memory(out) == backend.memory(untouched)  # and nothing between rows


@pytest.mark.parametrize("width", [3, 5, 7, 8])
def test_narrow_rows_have_the_bits_of_a_copy(backend, width):
    """Libraries have code of their own for small matrices without gaps."""
    for seed in range(9 if backend.on_host else 1):
        p = make((9, width), seed=seed)
        x = np.pad(p.x, ((0, 0), (0, 3)))[:, :width]
        found = gradkit.layer_norm(*map(backend.asarray, (x, p.scale, p.bias)))
        expected = gradkit.layer_norm(*map(backend.asarray, (p.x, p.scale, p.bias)))
        assert_all_same_bits(found, expected, backend)


@pytest.mark.parametrize("view", [_projection, _heads_first], ids=["projection", "heads first"])
@pytest.mark.parametrize("types", [LAYER_TYPES[0], LAYER_TYPES[2]], ids="-".join)
def test_many_strided_rows_have_the_bits_of_a_copy(view, types):
    """So many that the CPU backend cuts them into strips."""
    sizes = (4, 1001, 3, 64)
    given = arguments("rms_norm_grad", view, types, sizes)
    found = gradkit.rms_norm_grad(**given)
    copies = {label: array.copy(order="C") for label, array in given.items()}
    expected = gradkit.rms_norm_grad(**copies)
    assert_all_same_bits(found, expected)


@pytest.mark.guarantee("Strided rows")
@pytest.mark.parametrize("view", VIEWS[:5], ids=lambda f: f.__name__.strip("_"))
def test_kernels_copy_nothing(monkeypatch, backend, view):
    if backend.on_host:
        pytest.skip("the CPU backend copies into scratch")

    def refuse(*_):
        raise AssertionError("something was copied")

    sizes = (3, 4, 2, 16)
    monkeypatch.setattr(row_starts, "copied", refuse)
    monkeypatch.setattr(row_starts, "scratch", refuse)
    for name in NAMES:
        given = arguments(name, view, LAYER_TYPES[0], sizes)
        given = {label: backend.asarray(array) for label, array in given.items()}
        results = [backend.asnumpy(a) for a in getattr(gradkit, name)(**given)]
        hosts = results_like(results, view, sizes)
        getattr(gradkit, name)(**given, out=tuple(map(backend.asarray, hosts)))


@pytest.mark.guarantee("Strided rows")
@pytest.mark.parametrize("view", [_projection, _heads_first], ids=["projection", "heads first"])
def test_the_cpu_backend_copies_a_tile_at_a_time(view):
    sizes = (8, 256, 8, 128)
    given = arguments("layer_norm_grad", view, LAYER_TYPES[0], sizes)
    out = given["dy"], np.empty_like(given["scale"]), np.empty_like(given["scale"])
    gradkit.layer_norm_grad(**given, out=out)  # which allocates scratch
    tracemalloc.start()
    try:
        gradkit.layer_norm_grad(**given, out=out)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < given["dy"].nbytes / 8
