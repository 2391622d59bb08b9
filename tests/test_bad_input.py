"""Bad input, one row each: the error's type, the argument it names, and no byte changed.

A row is (function, what is wrong, error, message, changes): good arguments with some replaced.
A callable stands for what it makes of the array factory and the good arguments.
"""

import numpy as np
import pytest

import gradkit
from tests import strategies as draw_
from tests.tolerances import DTYPES

NAN, INF = np.nan, np.inf
R, C = 4, 6  # rows and columns of every norm's arguments
OLD = ">f4"  # a dtype that is not in native byte order


def f64(*shape):
    return draw_.values(shape, "float64")


def f32(*shape):
    return draw_.values(shape, "float32")


class Factory:
    """Makes arrays on a backend and remembers their bytes."""

    def __init__(self, backend):
        self.backend = backend
        self.arrays = []

    def __call__(self, host):
        array = self.backend.asarray(np.asarray(host))
        self.arrays.append(array)
        return array

    def read_only(self, host):
        return self.backend.read_only(self(host))

    def stretched(self, dtype, shape):
        return self.backend.stretched(self(np.ones((), dtype)), shape, (0,) * len(shape))

    def windows(self):
        return self.backend.stretched(self(np.ones(9)), (3, 4), (16, 8))

    def memory(self):
        return [self.backend.memory(array) for array in self.arrays]


class Parameter:
    """What holds a gradient but is none."""

    grad = np.ones(3)


# Good arguments of every function; those of norms as (label, shape).
ROW_NORMS = {
    "layer_norm": {"x": (R, C), "scale": (C,), "bias": (C,)},
    "layer_norm_grad": {"dy": (R, C), "x": (R, C), "scale": (C,), "mean": (R,), "inv_std": (R,)},
    "layer_norm_inverse": {
        "y": (R, C), "scale": (C,), "bias": (C,), "mean": (R,), "inv_std": (R,)
    },
    "invertible_layer_norm_grad": {
        "dy": (R, C), "y": (R, C), "scale": (C,), "bias": (C,), "inv_std": (R,)
    },
    "rms_norm": {"x": (R, C), "scale": (C,)},
    "rms_norm_grad": {"dy": (R, C), "x": (R, C), "scale": (C,), "inv_std": (R,)},
    "batch_norm": {"x": (R, C), "scale": (C,), "bias": (C,)},
    "batch_norm_grad": {"dy": (R, C), "x": (R, C), "scale": (C,), "mean": (C,), "inv_std": (C,)},
}  # fmt: skip
RESULTS = {
    "layer_norm": {"y": (R, C), "mean": (R,), "inv_std": (R,)},
    "layer_norm_grad": {"dx": (R, C), "dscale": (C,), "dbias": (C,)},
    "layer_norm_inverse": {"x": (R, C)},
    "invertible_layer_norm_grad": {"dx": (R, C), "dscale": (C,), "dbias": (C,)},
    "rms_norm": {"y": (R, C), "inv_std": (R,)},
    "rms_norm_grad": {"dx": (R, C), "dscale": (C,)},
    "batch_norm": {"y": (R, C), "mean": (C,), "inv_std": (C,)},
    "batch_norm_grad": {"dx": (R, C), "dscale": (C,), "dbias": (C,)},
}
LISTS = {
    "grad_norm": {},
    "clip_grad_norm": {"max_norm": 0.1},
    "clip_by_global_norm": {"max_norm": 0.1},
    "scale_grads": {"coefficient": 0.5},
    "clip_grad_value": {"clip_value": 0.1},
    "zero_grad": {},
}
CLIPPERS = ("clip_grad_norm", "clip_by_global_norm")
WRITERS = ("clip_grad_norm", "scale_grads", "clip_grad_value", "zero_grad")
ACCUMULATORS = ("accumulate_grad", "accumulate_grad_v2")


def good(function, a):
    """Arguments that the function takes."""
    if function in LISTS:
        return {"grads": [a(f64(3)), a(f32(2))], **LISTS[function]}
    if function in ROW_NORMS:
        return {label: a(f32(*shape)) for label, shape in ROW_NORMS[function].items()}
    if function in ACCUMULATORS:
        return {"buffer": a(f32(R, C)), "grad": a(f32(R, C))}
    return {
        "clip_coefficient": {"norm": 5.0, "max_norm": 1.0},
        "grads_of": {"parameters": [Parameter()]},
    }[function]


# What is not a gradient, in a list, and what cannot be written
def list_rows():
    bad = {
        "int": (r"grads\[1\] has dtype .*int64.*accepted", lambda a, _: a(np.arange(3))),
        "bool": (r"grads\[1\] has dtype .*bool", lambda a, _: a(np.ones(3, bool))),
        "complex": (r"grads\[1\] has dtype .*complex128", lambda a, _: a(np.ones(3, complex))),
        "big-endian": (r"grads\[1\] has dtype '>f4'", lambda a, _: a(np.ones(3, OLD))),
        "a float": (r"grads\[1\] is a float; accepted", 1.0),
        "a string": (r"grads\[1\] is a str; accepted", "gradient"),
        "a parameter": (r"grads\[1\] is a Parameter; accepted", Parameter()),
        "masked": (r"grads\[1\] (is a masked array|a numpy array; the arrays)", np.ma.ones(3)),
        "nested": (r"grads\[1\]\['w'\]\[0\] is a int", {"w": [3]}),
    }
    unwritable = {
        "read-only": (r"grads\[1\] is read-only", lambda a, _: a.read_only(f64(3))),
        "stride 0": (r"grads\[1\] overlaps itself", lambda a, _: a.stretched(float, (3,))),
        "windows": (r"grads\[1\] overlaps itself", lambda a, _: a.windows()),
    }
    shared = {
        "the same twice": lambda g: g,
        "the same by another view": lambda g: g[...],
        "an overlapping slice": lambda g: g[3:5],
        "an overlapping stride": lambda g: g[::3],
        "reversed": lambda g: g[::-1],
        "another dtype": lambda g: g.view(np.float32),
    }

    def among(wrong):
        return lambda a, g: [a(f64(2)), wrong(a, g) if callable(wrong) else wrong, a(f64(2))]

    def among_others(a, _):
        room = a(f64(20))
        return [room[::2], room[1:2], room[8:9]]

    def twice(view):
        return lambda a, _: [first := a(f64(8)), None, a(f64(2)), {"again": view(first)}]

    for function in LISTS:
        for what, (message, wrong) in bad.items():
            yield function, what, TypeError, message, {"grads": among(wrong)}
    for function in WRITERS:
        yield function, "a scalar", TypeError, "is a NumPy scalar", {"grads": np.float64(2)}
        for what, (message, wrong) in unwritable.items():
            yield function, what, ValueError, message, {"grads": among(wrong)}
        message = r"grads\[0\] and grads\[2\] share memory"
        yield function, "a slice of strides", ValueError, message, {"grads": among_others}
        for what, view in shared.items():
            message = r"grads\[0\] and grads\[3\]\['again'\] share memory"
            yield function, what, ValueError, message, {"grads": twice(view)}


# What is not the number, word or flag that it should be
def number_rows():
    numbers = {"None": None, "a string": "1", "a bool": True, "complex": 1j, "two": np.ones(2)}
    for function, label in (
        *((function, "max_norm") for function in (*CLIPPERS, "clip_coefficient")),
        *((function, "norm_type") for function in ("grad_norm", *CLIPPERS)),
        *((function, "eps") for function in (*CLIPPERS, "clip_coefficient")),
        *((function, "eps") for function in ("layer_norm", "rms_norm", "batch_norm")),
        ("clip_grad_value", "clip_value"),
    ):
        for what, value in numbers.items():
            message = f"{label} must be a real number, not {type(value).__name__}"
            yield function, f"{label} is {what}", TypeError, message, {label: value}
        bound = "a real number above 0" if label == "norm_type" else "at least 0"
        for value in (-1.0, -INF, NAN):
            message = f"{label} must be {bound}.*, not {value}"
            yield function, f"{label} is {value}", ValueError, message, {label: value}
    for function in ("grad_norm", *CLIPPERS):
        message = "norm_type must be a real number above 0 or infinity, not 0.0"
        yield function, "norm_type is 0", ValueError, message, {"norm_type": 0}
        for value in ("error", None, True):
            message = "nonfinite must be one of 'propagate', 'raise', 'zero', not"
            yield function, f"nonfinite={value}", ValueError, message, {"nonfinite": value}
    for function in (*CLIPPERS, "layer_norm", "rms_norm", "batch_norm"):
        yield function, "eps is inf", ValueError, "eps must be finite", {"eps": INF}
    for value in (None, "1", 1j):
        message = "coefficient must be a real number"
        yield "scale_grads", f"by {value}", TypeError, message, {"coefficient": value}
    message = r"coefficient has shape \(2,\)"
    two = {"coefficient": lambda a, _: a(f64(2))}
    yield "scale_grads", "by two", ValueError, message, two
    message = "norm has dtype float32; accepted: float64"
    narrow = {"norm": lambda a, _: a(f32(3))}
    yield "clip_coefficient", "a float32 norm", TypeError, message, narrow
    message = "norm must be a real number, not str"
    yield "clip_coefficient", "a string", TypeError, message, {"norm": "5"}
    message = "parameters holds a int, which has no .grad"
    yield "grads_of", "a number", TypeError, message, {"parameters": [Parameter(), [3]]}


# Arguments of norms and accumulation that are no arrays, of a wrong dtype or of a wrong shape
def array_rows():
    for function in (*ROW_NORMS, *ACCUMULATORS):
        for label in ROW_NORMS.get(function, ("buffer", "grad")):
            for value in ([1.0], 1.0, "x", *([None] if label not in ("scale", "bias") else [])):
                message = f"{label} must be an array, not {type(value).__name__}"
                yield function, f"{label}={value!r}", TypeError, message, {label: value}
            for dtype in (np.int64, np.complex64, np.bool_, OLD):
                message = f"{label} has dtype"
                wrong = lambda a, g, k=label, d=dtype: a(np.ones(g[k].shape, d))  # noqa: E731
                yield function, f"{label} of {np.dtype(dtype)}", TypeError, message, {label: wrong}
    changes = {
        "longer": lambda shape: (*shape[:-1], shape[-1] + 1),
        "empty": lambda shape: (*shape[:-1], 0),
        "of a higher rank": lambda shape: (1, *shape),
        "0-d": lambda _: (),
    }
    for function, shapes in ROW_NORMS.items():
        for label, shape in shapes.items():
            if label == ("x" if "x" in shapes else "y"):
                continue  # what the others are compared with
            for what, change in changes.items():
                wrong = lambda a, _, s=shape, change=change: a(f32(*change(s)))  # noqa: E731
                message = rf"{label} has shape .*; expected \({shape[0]}"
                yield function, f"{label} is {what}", ValueError, message, {label: wrong}
        axis = "channel_axis" if "batch" in function else "axis"
        for value in (2, -3):
            message = f"{axis} is {value}, but the array has 2 dimensions"
            yield function, f"{axis}={value}", ValueError, message, {axis: value}
        for value in (1.0, None, "1"):
            message = f"{axis} must be an integer, not {type(value).__name__}"
            yield function, f"{axis}={value!r}", TypeError, message, {axis: value}
        for types in (
            ("float64", "float64", "float32"),
            ("float16", "float32", "bfloat16"),
            ("bfloat16", "float32", "float16"),
            ("float32", "float32", "float64"),
            *([("float32", "float64", "float32")] if "inv_std" in shapes else []),
            *([("float64", "float32", "float64")] if "inv_std" in shapes else []),
        ):
            wrong = {
                label: lambda a, _, s=shape, k=label, types=types: a(np.ones(s, _role(types, k)))
                for label, shape in shapes.items()
            }
            message = "no kernel for .* = .*; accepted: float32, float32, float32; float64"
            yield function, "-".join(types), TypeError, message, wrong
        if {"dy", "x"} <= shapes.keys():
            message = "x has dtype float32 and dy has dtype float16; they must agree"
            wrong = {"dy": lambda a, _: a(np.ones((R, C), np.float16))}
            yield function, "dy of another dtype", TypeError, message, wrong
        if "batch" in function:
            wrong = {label: lambda a, _: a(f32(C)) for label in ("x", "dy") if label in shapes}
            yield function, "1-d", ValueError, "x has shape .*; batch norm needs", wrong
    message = "axis is -1, but the array has 0 dimensions"
    yield "layer_norm", "0-d", ValueError, message, {"x": lambda a, _: a(f32())}
    for function in ("layer_norm_inverse", "invertible_layer_norm_grad"):
        for value in (0.0, -0.0, 1e-45, -1e-39):
            message = r"scale is zero or subnormal at flat index 2 \(2 in all\)"
            scale = np.array([1, 1, value, 1, value, 1], np.float32)
            wrong = {"scale": lambda a, _, scale=scale: a(scale)}
            yield function, f"scale holds {value}", ValueError, message, wrong


def _role(types, label):
    """The dtype that an argument has in a combination (T, U, V)."""
    data, statistics, parameters = map(DTYPES.get, types)
    if label in ("mean", "inv_std"):
        return statistics
    return parameters if label in ("scale", "bias") else data


def accumulation_rows():
    for function in ACCUMULATORS:
        for shape in ((C + 1,), (R, C, 1), (1, R, C), (2, R, C), (R, 2), (C, R), (0,)):
            message = r"grad has shape .* does not broadcast to the buffer's \(4, 6\)"
            wrong = {"grad": lambda a, _, s=shape: a(f32(*s))}
            yield function, f"grad of shape {shape}", ValueError, message, wrong
        buffers = {
            "buffer is read-only": lambda a, _: a.read_only(f32(R, C)),
            "buffer overlaps itself": lambda a, _: a.stretched(np.float32, (R, C)),
        }
        for message, buffer in buffers.items():
            yield function, message, ValueError, message, {"buffer": buffer}
        scalar = {"buffer": np.float32(1), "grad": lambda a, _: a(f32())}
        yield function, "a scalar", TypeError, "buffer is a NumPy scalar", scalar
        views = {
            "reversed": lambda b: b[::-1],
            "a row": lambda b: b[1],
            "an element": lambda b: b[1:2, 2:3],
            "transposed": lambda b: b[:, :R].T[:, :1],
        }
        for what, view in views.items():
            message = "grad partly overlaps the buffer"
            wrong = {"grad": lambda _, g, view=view: view(g["buffer"])}
            yield function, f"grad is {what}", ValueError, message, wrong
        for into, addend in (
            ("float16", "float32"),
            ("float16", "bfloat16"),
            ("bfloat16", "float32"),
            ("float32", "float64"),
        ):
            message = f'grad has dtype {addend} and the buffer {into}.*casting="same_kind"'
            wrong = {
                "buffer": lambda a, _, d=into: a(draw_.values((R, C), d)),
                "grad": lambda a, _, d=addend: a(draw_.values((R, C), d)),
            }
            yield function, f"{into} += {addend}", TypeError, message, wrong
        for value in ("unsafe", None):
            message = "casting must be one of 'safe', 'same_kind', not"
            yield function, f"casting={value}", ValueError, message, {"casting": value}
        flag = "do_update" if function == "accumulate_grad" else "overwrite"
        for value in (1, None, "no"):
            message = f"{flag} must be a bool or a bool array, not {type(value).__name__}"
            yield function, f"{flag}={value!r}", TypeError, message, {flag: value}
        for host in (np.ones(2, bool), np.ones(0, bool), np.ones(1)):
            message = f"{flag} has dtype .* and shape .*; expected one bool"
            wrong = {flag: lambda a, _, host=host: a(host)}
            yield function, f"{flag}={host!r}", TypeError, message, wrong
    message = "scale must be a real number, not str"
    yield "accumulate_grad", "scale is a string", TypeError, message, {"scale": "1"}


def output_rows():
    for function, results in RESULTS.items():
        main = next(iter(ROW_NORMS[function]))
        for position, (name, shape) in enumerate(results.items()):

            def out(make, results=results, position=position):
                """Good outputs but for the one at this position."""

                def arrays(a, g):
                    found = [a(f32(*s)) for s in results.values()]
                    found[position] = make(a, g, found)
                    return tuple(found)

                return {"out": arrays}

            label = rf"out\[{position}\]" if len(results) > 1 else "out"
            changes = {
                "longer": (*shape[:-1], shape[-1] + 1),
                "of a higher rank": (1, *shape),
                "0-d": (),
            }
            for what, wrong_shape in changes.items():
                wrong = out(lambda a, *_, s=wrong_shape: a(f32(*s)))
                message = rf"{label} has shape .*; expected \({shape[0]}"
                yield function, f"{name} is {what}", ValueError, message, wrong
            for dtype in (np.float64, np.int64):
                # A batch norm takes the dtype of its statistics from out.
                message = f"{label} has dtype|no kernel for .*float32, float64"
                wrong = out(lambda a, *_, s=shape, d=dtype: a(np.ones(s, d)))
                yield function, f"{name} of {np.dtype(dtype)}", TypeError, message, wrong
            message = f"{label} must be an array, not list"
            yield function, f"{name} is a list", TypeError, message, out(lambda *_: [1.0])
            wrong = out(lambda a, *_, s=shape: a.read_only(f32(*s)))
            yield function, f"{name} is read-only", ValueError, f"{label} is read-only", wrong
            wrong = out(lambda a, *_, s=shape: a.stretched(np.float32, s))
            yield function, f"{name} is stride 0", ValueError, f"{label} overlaps itself", wrong
            if position == 0:
                message = f"{label} shares memory with {main} without being {main} itself"
                for what, view in (
                    ("reversed", lambda g: g[::-1]),
                    ("sideways", lambda g: g[:, ::-1]),
                ):
                    wrong = out(lambda _, g, __, v=view, m=main: v(g[m]))
                    yield function, f"{name} is {main} {what}", ValueError, message, wrong
                for other in {"x", "y"} & ROW_NORMS[function].keys() - {main}:
                    message = f"{label} shares memory with {other} .*pass another array"
                    wrong = out(lambda _, g, __, o=other: g[o])
                    yield function, f"{name} is {other}", ValueError, message, wrong
            else:
                message = f"{label} shares memory with {main}; pass another array"
                wrong = out(lambda _, g, __, m=main, n=shape[0]: g[m].reshape(-1)[:n])
                yield function, f"{name} is part of {main}", ValueError, message, wrong
                message = "two arrays in out share memory"
                wrong = out(lambda _, __, found, n=shape[0]: found[0].reshape(-1)[:n])
                yield function, f"{name} is part of an output", ValueError, message, wrong
        count = len(results)
        for value in ((None,) * (count + 1), [None] * count, 3.0):
            yield function, f"out={value}", TypeError, "out must be .* not", {"out": value}
        if "dscale" in results:
            message = r"out\[1\] must be None: this call has no such result"
            wrong = {"scale": None, "out": lambda a, _, n=count: (None, a(f32(C)), None)[:n]}
            yield function, "dscale without scale", ValueError, message, wrong
    for function in ("grad_norm", "clip_grad_norm"):
        for what, error, message, out_ in (
            ("1-d", ValueError, r"out has shape \(1,\); expected \(\)", lambda a, _: a(f64(1))),
            ("float32", TypeError, "out has dtype float32", lambda a, _: a(f32())),
            ("read-only", ValueError, "out is read-only", lambda a, _: a.read_only(f64())),
            ("a scalar", TypeError, "out is a (NumPy scalar|numpy array; expected)", np.float64(1)),
            (
                "an element",
                ValueError,
                r"out shares memory with grads\[0\]",
                lambda _, g: g["grads"][0][:1].reshape(()),
            ),
        ):
            yield function, f"out is {what}", error, message, {"out": out_}
    wrong = {"per_tensor": True, "out": lambda a, _: a(f64())}
    yield "grad_norm", "0-d out", ValueError, r"out has shape \(\); expected \(2,\)", wrong
    for what, error, message, out_ in (
        ("an array", TypeError, r"out must be a tuple \(clipped", lambda a, _: a(f64())),
        ("short", TypeError, "out must be a tuple of 2", lambda a, _: ([a(f64(3))], None)),
        (
            "of another dtype",
            TypeError,
            r"out\[1\] has dtype float64; grads\[1\] has dtype float32",
            lambda a, _: ([a(f64(3)), a(f64(2))], None),
        ),
        (
            "of another shape",
            ValueError,
            r"out\[0\] has shape \(2,\); expected \(3,\)",
            lambda a, _: ([a(f64(2)), a(f32(2))], None),
        ),
        (
            "the gradients",
            ValueError,
            r"out\[0\] shares memory with grads\[0\]",
            lambda _, g: (g["grads"], None),
        ),
        (
            "one memory",
            ValueError,
            "two arrays in out share memory",
            lambda a, _: ([(first := a(f64(3))), first[:1].view(np.float32)], None),
        ),
        (
            "a norm in a clipped array",
            ValueError,
            r"out shares memory with out\[0\], gradient 0",
            lambda a, _: ([(first := a(f64(3))), a(f32(2))], first[:1].reshape(())),
        ),
    ):
        yield "clip_by_global_norm", f"out is {what}", error, message, {"out": out_}


ROWS = [*list_rows(), *number_rows(), *array_rows(), *accumulation_rows(), *output_rows()]


@pytest.mark.parametrize(
    ("function", "what", "error", "message", "changes"),
    ROWS,
    ids=[f"{function}-{what}" for function, what, *_ in ROWS],
)
def test_bad_input(backend, function, what, error, message, changes):  # noqa: ARG001
    a = Factory(backend)
    arguments = good(function, a)
    arguments |= {
        label: value(a, arguments) if callable(value) else value for label, value in changes.items()
    }
    before = a.memory()
    with pytest.raises(error, match=message) as caught:
        getattr(gradkit, function)(**arguments)
    assert type(caught.value) is error
    assert a.memory() == before


@pytest.mark.parametrize("function", [*LISTS, *ROW_NORMS, *ACCUMULATORS, "clip_coefficient"])
def test_what_the_rows_change_is_good(backend, function):
    """Each row's error is the fault of what it changed: without it there is none."""
    a = Factory(backend)
    arguments = good(function, a)
    before = a.memory()
    getattr(gradkit, function)(**arguments)
    written = function in WRITERS or function in ACCUMULATORS
    assert (a.memory() != before) == written


def test_nothing_to_do_is_no_error(backend):
    empty = backend.asarray(np.zeros((0, 3), np.float32))
    for grads in ([], [None], [empty], {}, iter(()), (g for g in ())):
        for order in (1, 2, 3, INF):
            assert float(backend.asnumpy(gradkit.grad_norm(grads, order))) == 0.0
    for grads in ([], [None], [empty], {}):
        assert float(backend.asnumpy(gradkit.clip_grad_norm(grads, 1.0, nonfinite="raise"))) == 0.0
        for call in (gradkit.zero_grad, lambda g: gradkit.scale_grads(g, 0.5)):
            assert call(grads) is grads
    out = backend.asarray(np.array(7.0))
    if backend.on_host:  # without an array nothing says where another backend's result would be
        assert gradkit.grad_norm([], out=out) is out
        assert float(backend.asnumpy(out)) == 0.0
