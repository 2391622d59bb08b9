"""Bad input that is refused: an error of one type that names the argument, and no byte changed."""

import math
from functools import partial

import numpy as np
import pytest

import gradkit
from tests import tolerances
from tests.bad_input.arguments import (
    ACCUMULATORS,
    LISTS,
    NORMS,
    WRITERS,
    Cell,
    Factory,
    Parameter,
    Sparse,
    f32,
    f64,
    good,
    named,
    values,
)
from tests.operations import FLOAT32, OPERATIONS, C, R, records
from tests.tolerances import DTYPES

NAN, INF = math.nan, math.inf
RUNNING = "update_running_statistics"
OLD = ">f4"  # a dtype that is not in native byte order


def refused(function, what, error, message, changes, types=FLOAT32):
    """Good arguments with some replaced: an error of one type that names the argument.

    A callable stands for what it makes of the array factory and the good arguments.
    """

    def check(backend):
        a = Factory(backend)
        arguments = good(function, a, types)
        arguments |= {
            label: value(a, arguments) if callable(value) else value
            for label, value in changes.items()
        }
        before = a.memory()
        with pytest.raises(error, match=message) as caught:
            getattr(gradkit, function)(**arguments)
        assert type(caught.value) is error
        assert a.memory() == before

    return Cell(f"{function} of {'-'.join(types)}, {what}", check)


def not_gradients():
    """Among gradients, what is none."""
    bad = {
        "int": (r"grads\[1\] has dtype .*int64.*accepted", lambda a, _: a(np.arange(3))),
        "bool": (r"grads\[1\] has dtype .*bool", lambda a, _: a(np.ones(3, bool))),
        "complex": (r"grads\[1\] has dtype .*complex128", lambda a, _: a(np.ones(3, complex))),
        "big-endian": (r"grads\[1\] has dtype '>f4'", lambda a, _: a(np.ones(3, OLD))),
        "a float": (r"grads\[1\] is a float; expected an array", 1.0),
        "a string": (r"grads\[1\] is a str; expected an array", "gradient"),
        "masked": (r"grads\[1\] (is )?a (masked|numpy) array", np.ma.ones(3)),
        "nested": (r"grads\[1\]\['w'\]\[0\] is a int", {"w": [3]}),
        "sparse": (r"grads\[1\] is a Sparse; expected an array; pass its \.data,", Sparse()),
    }
    for function in LISTS:
        for what, (message, wrong) in bad.items():
            yield from _among(function, what, TypeError, message, wrong)


def parameters():
    for function in LISTS:
        message = r"grads\[1\] is a Parameter; expected an array"
        yield from _among(function, "a parameter", TypeError, message, Parameter())
    message = "parameters holds a int, which has no .grad"
    changes = {"parameters": [Parameter(), [3]]}
    yield refused("grads_of", "a number", TypeError, message, changes)


def read_only_gradients():
    for function in WRITERS:
        message = r"grads\[1\] is read-only"
        yield from _among(function, "read-only", ValueError, message, _read_only)
        changes = {"grads": np.float64(2)}
        yield refused(function, "a scalar", TypeError, "is a NumPy scalar", changes)


def gradients_over_themselves():
    ways = {
        "stride 0": lambda a, dtype: a.stretched(DTYPES[dtype], (3,)),
        "windows": lambda a, dtype: a.windows(DTYPES[dtype]),
    }
    for function in WRITERS:
        for what, wrong in ways.items():
            message = r"grads\[1\] overlaps itself"
            yield from _among(function, what, ValueError, message, wrong)


def _among(function, what, error, message, wrong):
    """Lists of each dtype with something wrong at the second place.

    A callable stands for what it makes of the array factory and the dtype.
    """
    for types in OPERATIONS[function].types:
        changes = {"grads": partial(_between, wrong, types[0])}
        yield refused(function, what, error, message, changes, types)


def _between(wrong, dtype, a, _):
    middle = wrong(a, dtype) if callable(wrong) else wrong
    return [a(values(dtype, 2)), middle, a(values(dtype, 2))]


def _read_only(a, dtype):
    return a.read_only(values(dtype, 3))


def shared_memory():
    """The same bytes by two names, which would be written twice."""
    views = {
        "the same twice": lambda g: g,
        "the same by another view": lambda g: g[...],
        "an overlapping slice": lambda g: g[3:5],
        "an overlapping stride": lambda g: g[::3],
        "reversed": lambda g: g[::-1],
        "another dtype": lambda g: g.view(np.int8).view(np.float16),
    }

    def twice(view, dtype, a, _):
        first = a(values(dtype, 8))
        return [first, None, a(values(dtype, 2)), {"again": view(first)}]

    def among_others(dtype, a, _):
        room = a(values(dtype, 20))
        return [room[::2], room[1:2], room[8:9]]

    for function in WRITERS:
        for types in OPERATIONS[function].types:
            for what, view in views.items():
                message = r"grads\[0\] and grads\[3\]\['again'\] share memory"
                changes = {"grads": partial(twice, view, types[0])}
                yield refused(function, what, ValueError, message, changes, types)
            message = r"grads\[0\] and grads\[2\] share memory"
            changes = {"grads": partial(among_others, types[0])}
            yield refused(function, "an element of a slice", ValueError, message, changes, types)


def limits(*labels):
    """Numbers that are negative or NaN (0 too, where that is no bound)."""
    for function, label in _numbers(labels):
        bound = "a real number above 0" if label == "norm_type" else "at least 0"
        wrong = (-1.0, -INF, NAN, *([0.0] if label == "norm_type" else []))
        for value in wrong:
            message = f"{label} must be {bound}.*, not {value}"
            yield refused(function, f"{label} is {value}", ValueError, message, {label: value})
        if label == "eps":
            yield refused(function, "eps is inf", ValueError, "eps must be finite", {label: INF})


def groups():
    """What is no group of ranks, and copies of gradients that cannot be."""
    wrong = {
        "no group": (TypeError, "group is a int without rank; pass what", {"group": 3}),
        "two ways": (ValueError, "pass group or reduce",
                     {"group": Pair(), "reduce": lambda *_: max}),
        "none to hold a copy": (ValueError, "is 2, but there is no group", {"replicas": 2}),
        "too few": (ValueError, r"replicas of grads\[1\] is 3, but the group's size is 2",
                    {"group": Pair(), "replicas": [2, 3]}),
        "no rank": (ValueError, r"replicas of grads\[0\] is 0", {"replicas": [0, 1]}),
        "one for two": (ValueError, "replicas has 1 items", {"replicas": [1]}),
        "by name": (ValueError, "replicas has the keys 'w'", {"replicas": {"w": 1}}),
        "half a copy": (TypeError, "replicas must be an integer", {"replicas": 0.5}),
    }  # fmt: skip
    for function in named("lists", takes="group"):
        for what, (error, message, changes) in wrong.items():
            if "reduce" in changes and function not in named("lists", takes="reduce"):
                continue
            yield refused(function, what, error, message, changes)


class Pair:
    """Two ranks of which the other says what this one says."""

    rank, size = 0, 2

    def allgather(self, state):
        return np.stack([state, state])


def scales():
    """Numbers that no gradient can be multiplied by."""
    for function, label in _numbers(("scale",)):
        for value in (INF, -INF, NAN):
            message = f"scale must be finite, not {value}"
            yield refused(function, f"scale is {value}", ValueError, message, {label: value})


def flags():
    """What is no place for found_inf."""
    for function in named("lists", takes="found_inf"):
        count = 2 if function == "per_tensor_norms" else 1
        for what, (message, error, make) in {
            "integers": ("found_inf has dtype", TypeError, lambda a, _: a(np.array(0))),
            "three": (r"found_inf has shape \(3,\)", ValueError, lambda a, _: a(np.zeros(3, bool))),
            "a number": ("found_inf is a float; expected an array", TypeError, lambda _, __: 0.0),
            "read-only": (
                "found_inf is read-only",
                ValueError,
                lambda a, _, n=count: a.read_only(np.zeros(n)),
            ),
            "a gradient": (
                r"found_inf shares memory with grads\[1\]",
                ValueError,
                lambda _, given, n=count: given["grads"][1][:n],
            ),
        }.items():  # fmt: skip
            yield refused(function, f"found_inf is {what}", error, message, {"found_inf": make})


def not_numbers():
    """What is no real number in the place of one."""
    wrong = {"None": None, "a string": "1", "a bool": True, "complex": 1j, "two": np.ones(2)}
    arrays = ("max_norm", "clipping", "scale", "coefficient")  # which may be arrays
    for function, label in _numbers(("norm_type", "eps", "clip_value", "scale_offset", *arrays)):
        for what, value in wrong.items():
            message = f"{label} must be a real number, not {type(value).__name__}"
            if label in arrays and what == "two":
                continue
            yield refused(function, f"{label} is {what}", TypeError, message, {label: value})
        if label in arrays:
            count, expected = 2, r"\(\), one number"
            if label == "max_norm" and "block" in function:  # which take one for each unit
                count, expected = 97, r"\(\d+,\), one limit per unit"
            message = rf"{label} has shape \({count},\); expected {expected}"
            several = {label: partial(_array_of, f64(count))}
            yield refused(function, f"{label} is {count}", ValueError, message, several)
    message = "norm must be a real number, not str"
    yield refused("clip_coefficient", "a string", TypeError, message, {"norm": "5"})
    message = "norm has dtype int64; accepted: float16, bfloat16, float32, float64"
    whole = {"norm": lambda a, _: a(np.arange(3))}
    yield refused("clip_coefficient", "whole norms", TypeError, message, whole)
    message = "scale must be a real number, not str"
    yield refused("accumulate_grad", "scale is a string", TypeError, message, {"scale": "1"})


def guards():
    """A spike guard's numbers, states and norms."""
    numbers = {
        "decay": {
            "decay must be greater than 0 and less than 1, not": (0.0, 1.0, -0.5, NAN, INF),
        },
        "threshold": {
            "threshold must be at least 0, not": (-1.0, NAN),
            "threshold must be finite, not inf": (INF,),
        },
        "warmup": {"warmup must be from 1 to 16777216, not": (0, -1, 1 << 25)},
        "norm": {"norm must be at least 0, not": (-1.0, -INF, np.float64(-2))},
    }
    for label, messages in numbers.items():
        for message, wrong in messages.items():
            for value in wrong:
                yield _guard(f"{label} is {value}", ValueError, message, {label: value})
    for label in ("decay", "threshold", "norm"):
        for value in ("1", 1j, True, None):
            message = f"{label} must be a real number, not {type(value).__name__}"
            yield _guard(f"{label} is {value!r}", TypeError, message, {label: value})
    for value in (True, 2.0, "25", None):
        message = f"warmup must be an integer, not {type(value).__name__}"
        yield _guard(f"warmup is {value!r}", TypeError, message, {"warmup": value})
    for value in (None, [0.0, 0.0, 0.0], 1.0):
        message = f"state is a {type(value).__name__}; expected an array"
        yield _guard(f"state is {value!r}", TypeError, message, {"state": value})
    yield refused("spike_guard_init", "1", TypeError, "like is a int; expected", {"like": 1})
    arrays = {
        "state": {
            r"state has shape \(2,\); expected \(3,\)": np.ones(2),
            r"state has shape \(\); expected \(3,\)": np.ones(()),
            "state has dtype float32; accepted: float64": np.ones(3, np.float32),
            "state has dtype int64; accepted: float64": np.ones(3, int),
            "state has dtype >f8; accepted: float64": np.ones(3, ">f8"),
        },
        "norm": {
            r"norm has shape \(1,\); expected \(\)": np.ones(1),
            r"norm has shape \(0,\); expected \(\)": np.ones(0),
        },
        "out": {
            r"out\[0\] has shape \(2,\); expected \(3,\)": (np.ones(2), None),
            r"out\[1\] has shape \(1,\); expected \(\)": (None, np.ones(1)),
            r"out\[0\] has dtype float32; next_state has dtype float64": (
                np.ones(3, np.float32),
                None,
            ),
        },
    }
    for label, messages in arrays.items():
        for message, hosts in messages.items():
            error = ValueError if "shape" in message else TypeError
            yield _guard(f"{label}: {message}", error, message, {label: partial(_made, hosts)})
    yield _guard("out of one", TypeError, "out must be a tuple of 2", {"out": (None,)})
    read_only = {"out": lambda a, _: (a.read_only(np.ones(3)), None)}
    yield _guard("a read-only state", ValueError, r"out\[0\] is read-only", read_only)


def _guard(what, error, message, changes):
    return refused("spike_guard_update", what, error, message, changes)


def running_statistics():
    """What cannot be moved, by a forward pass or by itself."""
    both, kept = ("running_mean", "running_var"), []

    def keep(a, _):
        kept.append(a(f32(C)))
        return kept[-1]

    for function in ("batch_norm", RUNNING):
        for value in (-0.1, 1.5, NAN, INF):
            message = f"momentum must be from 0 to 1, not {value}"
            yield _moved(function, f"momentum={value}", ValueError, message, {"momentum": value})
        for value in (None, "0.1", True):
            message = f"momentum must be a real number, not {type(value).__name__}"
            yield _moved(function, f"momentum={value!r}", TypeError, message, {"momentum": value})
        for label in both:
            for message, error, host in (
                (r"running_(mean|var) has shape .*; expected \([67],\)", ValueError, f32(C + 1)),
                ("running_(mean|var) has dtype", TypeError, np.ones(C, int)),
                (r"running_var has dtype float\d\d; .*dtype float\d\d", TypeError, f64(C)),
            ):
                wrong = {label: partial(_array_of, host)}
                yield _moved(function, f"{label}: {message}", error, message, wrong)
            message = f"{label} is a list; expected an array"
            yield _moved(function, f"{label} is a list", TypeError, message, {label: [1.0]})
    for label in both:
        message = f"{label} is None; pass running_mean and running_var, or neither"
        yield _moved("batch_norm", f"no {label}", TypeError, message, {label: None})
        for what, message, error, wrong in (
            ("read-only", "is read-only", ValueError, lambda a, _: a.read_only(f32(C))),
            (
                "of stride 0",
                "overlaps itself",
                ValueError,
                lambda a, _: a.stretched(np.dtype("f4"), (C,)),
            ),
            ("scale", "shares memory with scale", ValueError, lambda _, g: g["scale"]),
            ("a row of x", "shares memory with x", ValueError, lambda _, g: g["x"][1]),
        ):
            changes = {label: wrong}
            yield _moved("batch_norm", f"{label} is {what}", error, f"{label} {message}", changes)
    for what, message, changes in (
        (
            "one array",
            "running_mean and running_var share memory",
            {"running_mean": keep, "running_var": lambda *_: kept[-1]},
        ),
        (
            "an output",
            r"out\[2\] and running_var share memory",
            {"running_var": keep, "out": lambda *_: (None, None, kept[-1])},
        ),
        (
            "one element per channel",
            "x has one element per channel; the unbiased variance needs two or more",
            {"x": lambda a, _: a(f32(1, C))},
        ),
    ):
        yield _moved("batch_norm", what, ValueError, message, changes)
    for value, message in (
        (-1.0, "count must be at least 0, not -1.0"),
        (NAN, "count must be at least 0, not nan"),
        (INF, "count must be finite"),
        (1, "count is 1; the unbiased variance needs two or more"),
        (0.5, "count is 0.5; the unbiased variance needs two or more"),
    ):
        yield _moved(RUNNING, f"count={value}", ValueError, message, {"count": value})
    yield _moved(RUNNING, "a word", TypeError, "count must be a real number", {"count": "2"})
    changes = {label: partial(_array_of, f64(C + 1)) for label in ("mean", "var")}
    for label, wrong in changes.items():
        message = rf"{label} has shape \(7,\); expected \(6,\)"
        yield _moved(RUNNING, f"a longer {label}", ValueError, message, {label: wrong})
    changes = {label: partial(_array_of, f32(2, C)) for label in both}
    message = r"running_mean has shape \(2, 6\); expected one number per channel"
    yield _moved(RUNNING, "two rows", ValueError, message, changes)
    for what, message, out in (
        (
            "swapped",
            r"out\[0\] shares memory with running_var without being running_mean itself",
            lambda _, g: (g["running_var"], g["running_mean"]),
        ),
        ("the batch's", r"out\[1\] has dtype float64", lambda _, g: (None, g["var"])),
    ):
        error = TypeError if "dtype" in message else ValueError
        yield _moved(RUNNING, what, error, message, {"out": out})


def _moved(function, what, error, message, changes):
    labels = () if function == RUNNING else ("running_mean", "running_var")
    running = {label: partial(_array_of, f32(C)) for label in labels}
    return refused(function, what, error, message, running | changes)


def _made(hosts, a, _):
    if isinstance(hosts, tuple):
        return tuple(None if host is None else a(host) for host in hosts)
    return a(hosts)


def _numbers(labels):
    """Every function that takes a number of one of these names; the scale of a norm is none."""
    for label in labels:
        families = ("lists", "buffer lists") if label == "scale" else ()
        yield from ((function, label) for function in named(*families, takes=label))


def wrong_words():
    """What is none of the words or flags that are accepted."""
    for function in named(takes="nonfinite"):
        for value in ("error", None, True):
            message = "nonfinite must be one of 'propagate', 'raise', 'zero', not"
            changes = {"nonfinite": value}
            yield refused(function, f"nonfinite={value}", ValueError, message, changes)
    for function in named(takes="activation"):
        for value in ("relu", None, 1):
            message = "activation must be one of 'silu', 'swish', 'sigmoid', not"
            changes = {"activation": value}
            yield refused(function, f"activation={value!r}", ValueError, message, changes)
        for value in (1, "yes", None):
            message = f"norm_before_gate must be a bool, not {type(value).__name__}"
            changes = {"norm_before_gate": value}
            yield refused(function, f"norm_before_gate={value!r}", TypeError, message, changes)
    for function in ACCUMULATORS:
        for value in ("unsafe", None):
            message = "casting must be one of 'safe', 'same_kind', not"
            yield refused(function, f"casting={value}", ValueError, message, {"casting": value})
        flag = "do_update" if function == "accumulate_grad" else "overwrite"
        for value in (1, None, "no"):
            message = f"{flag} must be a bool or a bool array, not {type(value).__name__}"
            yield refused(function, f"{flag}={value!r}", TypeError, message, {flag: value})
        for host in (np.ones(2, bool), np.ones(0, bool), np.ones(1)):
            message = f"{flag} has dtype .* and shape .*; expected one bool"
            changes = {flag: partial(_array_of, host)}
            yield refused(function, f"{flag}={host!r}", TypeError, message, changes)


def _array_of(host, a, _):
    return a(host)


def at_random(**given):
    """Arguments of a sum that is rounded at random, into 16 bits."""
    halves = {"buffers": lambda a, _: [a(f32(R, C).astype("f2")), a(f32(3).astype("f2"))]}
    halves["grads"] = lambda a, g: halves["buffers"](a, g)
    return halves | {"rounding": "stochastic"} | given


_WRONG_ROUNDING = (
    ({"rounding": "up"}, ValueError, "rounding must be one of 'nearest', 'stochastic', not 'up'"),
    ({"rounding": "stochastic"}, TypeError, r"buffers\[0\] has dtype float32; .* float16 and bf"),
    (at_random(seed=-1), ValueError, r"seed must be at least 0 and below 2\*\*64, not -1"),
    (at_random(seed=1 << 64), ValueError, "seed must be at least 0 and below"),
    (at_random(seed=1.0), TypeError, "seed must be an integer, not float"),
    (at_random(seed=True), TypeError, "seed must be an integer, not bool"),
    (at_random(seed=lambda a, _: a(f64())), TypeError, "seed (has dtype|must be an integer)"),
    (at_random(seed=lambda a, _: a(np.ones(2, int))), ValueError, r"seed has shape \(2,\)"),
    (at_random(offsets=-1), ValueError, r"offsets must be at least 0 and below 2\*\*63, not -1"),
    (at_random(offsets=[0]), ValueError, "offsets has 1 .*, but buffers has 2"),
    (at_random(offsets=[0, 1.5]), TypeError, "offsets must be an integer, not float"),
    (at_random(offsets=(1 << 63) - 2), ValueError, "offsets must be at least 0 and below"),
    (
        at_random(compensation=lambda a, g: at_random()["buffers"](a, g)),
        ValueError,
        'rounding is "stochastic", but compensation keeps what rounding to nearest drops',
    ),
)


def lists_that_do_not_match():
    """Containers of buffers and gradients."""
    f = "accumulate_grads"

    def half(_, given):
        return [given["grads"][0], given["buffers"][0].reshape(-1)[1:4]]

    for what, error, message, changes in (
        (
            "one less",
            ValueError,
            r"buffers\[1\] has no counterpart",
            {"grads": lambda _, g: g["grads"][:1]},
        ),
        (
            "one more",
            ValueError,
            r"grads\[2\] has no counterpart",
            {"grads": lambda _, g: g["grads"] * 2},
        ),
        (
            "None for one",
            ValueError,
            r"buffers\[0\] has no counterpart",
            {"grads": lambda _, g: [None, *g["grads"]]},
        ),
        (
            "None for all",
            ValueError,
            r"buffers\[0\] has no counterpart",
            {"grads": lambda *_: None},
        ),
        (
            "nothing for one array",
            ValueError,
            r"buffers has no counterpart",
            {"grads": lambda *_: None, "buffers": lambda _, g: g["buffers"][0]},
        ),
        (
            "another shape",
            ValueError,
            r"grads\[0\] has shape \(6,\); expected \(4, 6\), the shape of buffers\[0\]",
            {"grads": lambda a, g: [a(f32(6)), g["grads"][1]]},
        ),
        (
            "another dtype",
            TypeError,
            r"grads\[1\] has dtype float64 and buffers\[1\] float32, which would lose precision",
            {"grads": lambda a, g: [g["grads"][0], a(f64(3))]},
        ),
        (
            "whole numbers",
            TypeError,
            r"grads\[1\] has dtype",
            {"grads": lambda a, g: [g["grads"][0], a(np.arange(3))]},
        ),
        ("a part of a buffer", ValueError, r"grads\[1\] overlaps buffers\[0\]", {"grads": half}),
        (
            "the same buffer twice",
            ValueError,
            r"buffers\[0\] and buffers\[1\] share memory",
            {"buffers": lambda _, given: given["buffers"][:1] * 2},
        ),
        (
            "a read-only buffer",
            ValueError,
            r"buffers\[1\] is read-only",
            {"buffers": lambda a, given: [given["buffers"][0], a.read_only(f32(3))]},
        ),
        (
            "norm_out of float32",
            TypeError,
            "norm_out has dtype float32",
            {"norm_out": lambda a, _: a(np.float32(0))},
        ),
        (
            "compensation of one less",
            ValueError,
            r"buffers\[1\] has no counterpart",
            {"compensation": lambda a, _: [a(f32(R, C))]},
        ),
        (
            "compensation of another shape",
            ValueError,
            r"compensation\[1\] has shape \(4,\); expected \(3,\), the shape of buffers\[1\]",
            {"compensation": lambda a, _: [a(f32(R, C)), a(f32(4))]},
        ),
        (
            "compensation of another dtype",
            TypeError,
            r"compensation\[1\] has dtype float64 and buffers\[1\] float32; they must agree",
            {"compensation": lambda a, _: [a(f32(R, C)), a(f64(3))]},
        ),
        (
            "compensation in a buffer",
            ValueError,
            r"compensation\[0\] overlaps buffers\[0\]; pass a copy",
            {"compensation": lambda _, g: g["buffers"]},
        ),
        (
            "compensation in a gradient",
            ValueError,
            r"grads\[1\] overlaps compensation\[1\]; pass a copy",
            {"compensation": lambda a, g: [a(f32(R, C)), g["grads"][1]]},
        ),
        (
            "compensation that is read-only",
            ValueError,
            r"compensation\[1\] is read-only",
            {"compensation": lambda a, _: [a(f32(R, C)), a.read_only(f32(3))]},
        ),
        *((f"{given}", *said, given) for given, *said in _WRONG_ROUNDING),
        ("overwrite=1", TypeError, "overwrite must be a bool", {"overwrite": 1}),
        ("do_update=None", TypeError, "do_update must be a bool", {"do_update": None}),
    ):
        yield refused(f, what, error, message, changes)
    message = r"norm_out shares memory with grads\[1\]"
    changes = {"norm_out": lambda _, given: given["grads"][1][:1].reshape(())}
    yield refused(f, "norm_out in a gradient", ValueError, message, changes, ("float64",) * 3)


def not_arrays():
    for function in (*NORMS, *ACCUMULATORS):
        operation = OPERATIONS[function]
        for label in operation.arrays:
            for value in ([1.0], 1.0, "x", *([] if label in operation.optional else [None])):
                message = f"{label} is a {type(value).__name__}; expected an array"
                what = f"{label}={value!r}"
                yield refused(function, what, TypeError, message, {label: value})


def other_dtypes():
    """No floats, or not in native byte order."""
    for function in (*NORMS, *ACCUMULATORS):
        for label in OPERATIONS[function].arrays:
            for dtype in (np.int64, np.complex64, np.bool_, OLD):
                message = f"{label} has dtype {np.dtype(dtype)}; accepted: float16"
                if dtype == OLD:
                    message = f"{label} has dtype '>f4', which is not in native byte order; pass"
                changes = {label: partial(_retyped, label, dtype)}
                what = f"{label} of {np.dtype(dtype)}"
                yield refused(function, what, TypeError, message, changes)


def _retyped(label, dtype, a, given):
    return a(np.ones(given[label].shape, dtype))


# Dtypes of data, statistics and parameters, and those of the parameters that would be taken.
OTHER_PARAMETERS = {
    ("float64", "float64", "float32"): "float64",
    ("float16", "float32", "bfloat16"): "float16, float32",
    ("bfloat16", "float32", "float16"): "bfloat16, float32",
    ("float32", "float32", "float64"): "float32",
}
OTHER_STATISTICS = {
    ("float32", "float64", "float32"): "float32",
    ("float64", "float32", "float64"): "float64",
}


def other_combinations():
    """Dtypes that are taken one by one but not together."""
    for function in NORMS:
        arrays = OPERATIONS[function].arrays
        statistics = "inv_std" in arrays or "inference" in function
        main = "x" if "x" in arrays else "y"
        for wrong, of, table in (
            *([("scale", 2, OTHER_PARAMETERS)] if "scale" in arrays else []),
            *([("(mean|inv_std)", 1, OTHER_STATISTICS)] if statistics else []),
        ):
            for types, accepted in table.items():
                message = (
                    rf"{wrong} has dtype {types[of]} and {main} {types[0]}; pass "
                    rf"{wrong}\.astype\({main}\.dtype\) \(accepted: {accepted}"
                )
                yield refused(function, "as they are", TypeError, message, {}, types)
        if "residual" in arrays:
            message = "residual has dtype float16 and x has dtype float32; they must agree"
            changes = {"residual": partial(_retyped, "residual", np.float16)}
            yield refused(function, "residual of another dtype", TypeError, message, changes)
        if {"dy", "x"} <= {*arrays}:
            message = "x has dtype float32 and dy has dtype float16; they must agree"
            changes = {"dy": partial(_retyped, "dy", np.float16)}
            yield refused(function, "dy of another dtype", TypeError, message, changes)


def other_shapes():
    changes = {
        "longer": lambda shape: (*shape[:-1], shape[-1] + 1),
        "empty": lambda shape: (*shape[:-1], 0),
        "of a higher rank": lambda shape: (1, 1, *shape),  # with one 1, a scale per sample
        "0-d": lambda _: (),
    }
    for function in NORMS:
        operation = OPERATIONS[function]
        main = next(main for main in ("x", "y", "means") if main in operation.arrays)
        for label in operation.arrays:
            if label == main:
                continue  # what the others are compared with
            shape = operation.shape(label)
            for types in operation.types:
                for what, change in changes.items():
                    host = values(operation.dtype(label, types), *change(shape))
                    message = rf"{label} has shape .*; expected \({shape[0]}"
                    wrong = {label: partial(_array_of, host)}
                    yield refused(function, f"{label} is {what}", ValueError, message, wrong, types)
        if "batch" in function or "group" in function:
            wrong = {k: partial(_array_of, f32(C)) for k in ("x", "dy") if k in operation.arrays}
            message = "x has shape .*; (batch|group) norm needs"
            yield refused(function, "1-d", ValueError, message, wrong)
    message = "axis is -1, but the array has 0 dimensions"
    changes = {"x": partial(_array_of, f32())}
    yield refused("layer_norm", "0-d", ValueError, message, changes)


def other_axes():
    axes = ("axis", "channel_axis")
    takers = {axis: named("rows", "channels", "groups", takes=axis) for axis in axes}
    for axis, function in ((axis, each) for axis, found in takers.items() for each in found):
        for value in (2, -3):
            message = f"{axis} is {value}, but the array has 2 dimensions"
            yield refused(function, f"{axis}={value}", ValueError, message, {axis: value})
        for value in (1.0, None, "1"):
            message = f"{axis} must be an integer, not {type(value).__name__}"
            yield refused(function, f"{axis}={value!r}", TypeError, message, {axis: value})


def group_counts():
    """Groups that do not divide the channels, and samples in the place of channels."""
    for groups in (0, -1, 4, 7, 12):
        message = f"num_groups is {groups}; it must divide the 6 channels of x"
        changes = {"num_groups": groups}
        yield refused("group_norm", f"{groups} groups", ValueError, message, changes)
    for groups in (2.0, None, "2", True):
        message = f"num_groups must be an integer, not {type(groups).__name__}"
        changes = {"num_groups": groups}
        yield refused("group_norm", f"num_groups={groups!r}", TypeError, message, changes)
    for groups in (0, 4, 12):
        message = rf"mean has shape \(4, {groups}\); expected \(4, groups\), where groups divides"
        changes = {k: partial(_array_of, f32(R, groups)) for k in ("mean", "inv_std")}
        yield refused("group_norm_grad", f"{groups} groups", ValueError, message, changes)
    for function in ("group_norm", "group_norm_grad"):
        for axis in (0, -2):
            message = f"channel_axis is {axis}, the axis of the samples"
            yield refused(function, f"axis {axis}", ValueError, message, {"channel_axis": axis})


def gradients_past_a_norm():
    """What cannot be added to dx."""
    for function in named(takes="ds"):
        main = "x" if "x" in OPERATIONS[function].arrays else "y"
        for value in ([1.0], 1.0, "x"):
            message = f"ds is a {type(value).__name__}; expected an array"
            yield refused(function, f"ds={value!r}", TypeError, message, {"ds": value})
        for shape in ((R, C + 1), (R, 0), (1, R, C), (C,), ()):
            message = rf"ds has shape .*; expected \({R}, {C}\), the shape of {main}"
            wrong = {"ds": partial(_array_of, f32(*shape))}
            yield refused(function, f"ds of shape {shape}", ValueError, message, wrong)
        message = "ds has dtype float16 and dy has dtype float32; they must agree"
        wrong = {"ds": partial(_array_of, values("float16", R, C))}
        yield refused(function, "ds of another dtype", TypeError, message, wrong)
        changes = {"ds": lambda _, given: given["dy"][::-1], "out": _over_dy}
        message = r"out\[0\] shares memory with ds without being dy or ds itself"
        yield refused(function, "dx over dy, which is ds reversed", ValueError, message, changes)


def _over_dy(_, given):
    return (given["dy"], *((None,) * (2 if "mean" in given else 1)))


def scale_offsets():
    for function in named(takes="scale_offset"):
        for value in (NAN, INF, -INF):
            message = f"scale_offset must be finite, not {value}"
            changes = {"scale_offset": value}
            yield refused(function, f"scale_offset={value}", ValueError, message, changes)
        message = "scale_offset is 1.0, but scale is None"
        changes = {"scale_offset": 1.0, "scale": None}
        yield refused(function, "an offset without a scale", ValueError, message, changes)


def biases_alone():
    for function in named(takes="bias"):
        message = r"scale is None, but bias is not: .*; pass ones too"
        yield refused(function, "a bias without a scale", ValueError, message, {"scale": None})


def scales_without_inverse():
    """Known without waiting on the CPU and in the emulator; on a GPU the output is not finite."""
    for function in (n for n, r in records("rows").items() if "y" in r.array_names):
        for types in OPERATIONS[function].types:
            parameters = DTYPES[types[2]]
            tiny = tolerances.smallest(parameters)
            # In float32, in which 16 bits are computed, all of float16 is normal.
            subnormal = () if types[2] == "float16" else (tiny, -3 * tiny)
            for value in (0.0, -0.0, *subnormal):
                changes = {"scale": np.array([1, 1, value, 1, value, 1], parameters)}
                said = r"scale is zero or subnormal at flat index 2 \(2 in all\)"
                check = partial(_check_inverse, function, types, said, changes)
                yield Cell(f"{function} of {'-'.join(types)}, scale holds {value}", check)

    for function in named("rows", takes="scale_offset"):
        if "y" in OPERATIONS[function].arrays:
            changes = {"scale": np.array([1, 1, -1, 1, 0, 1], np.float32), "scale_offset": 1.0}
            said = r"scale \+ scale_offset is zero or subnormal at flat index 2 \(1 in all\)"
            check = partial(_check_inverse, function, FLOAT32, said, changes)
            yield Cell(f"{function}, a scale that an offset undoes", check)


def _check_inverse(function, types, message, changes, backend):
    """``changes`` are arguments, with a scale on the host."""
    if backend.name != "cupy":
        wrong = changes | {"scale": partial(_array_of, changes["scale"])}
        refused(function, "", ValueError, message, wrong, types).check(backend)
        return
    a = Factory(backend)
    wrong = changes | {"scale": a(changes["scale"])}
    result = getattr(gradkit, function)(**good(function, a, types) | wrong)
    first = result[0] if isinstance(result, tuple) else result
    assert not np.isfinite(backend.asnumpy(first)).all()


def compensation_that_does_not_fit():
    for error, message, wrong in (
        (TypeError, "compensation has dtype float64; expected the buffer's float32", f64(R, C)),
        (TypeError, "compensation has dtype int64; expected the buffer's", np.ones((R, C), int)),
        (ValueError, r"compensation has shape \(6,\); expected \(4, 6\)", f32(C)),
    ):
        changes = {"compensation": partial(_array_of, wrong)}
        yield refused("accumulate_grad", "compensation", error, message, changes)
    for message, wrong in (
        ("buffer and compensation share memory", lambda _, given: given["buffer"]),
        ("compensation shares memory with grad", lambda _, given: given["grad"]),
        ("compensation is read-only", lambda a, _: a.read_only(f32(R, C))),
        ("compensation overlaps itself", lambda a, _: a.stretched(np.float32, (R, C))),
    ):
        changes = {"compensation": wrong}
        yield refused("accumulate_grad", "compensation", ValueError, message, changes)


def gradients_that_grow_the_buffer():
    for function in ACCUMULATORS:
        for types in OPERATIONS[function].types:
            for shape in ((C + 1,), (R, C, 1), (1, R, C), (2, R, C), (R, 2), (C, R), (0,)):
                message = r"grad has shape .* does not broadcast to the buffer's \(4, 6\)"
                changes = {"grad": partial(_array_of, values(types[0], *shape))}
                yield refused(function, f"of shape {shape}", ValueError, message, changes, types)


def unwritable_buffers():
    def read_only(dtype, a, _):
        return a.read_only(values(dtype, R, C))

    def stretched(dtype, a, _):
        return a.stretched(DTYPES[dtype], (R, C))

    for function in ACCUMULATORS:
        for types in OPERATIONS[function].types:
            for message, wrong in (
                ("buffer is read-only", read_only),
                ("buffer overlaps itself", stretched),
            ):
                changes = {"buffer": partial(wrong, types[0])}
                yield refused(function, "unwritable", ValueError, message, changes, types)
        changes = {"buffer": np.float32(1), "grad": partial(_array_of, f32())}
        yield refused(function, "a scalar", TypeError, "buffer is a NumPy scalar", changes)


def gradients_within_the_buffer():
    views = {
        "reversed": lambda b: b[::-1],
        "a row": lambda b: b[1],
        "an element": lambda b: b[1:2, 2:3],
        "transposed": lambda b: b[:, :R].T[:, :1],
    }
    for function in ACCUMULATORS:
        for types in OPERATIONS[function].types:
            for what, view in views.items():
                message = "buffer shares memory with grad without being grad itself"
                changes = {"grad": partial(_part_of_buffer, view)}
                yield refused(function, what, ValueError, message, changes, types)


def _part_of_buffer(view, _, given):
    return view(given["buffer"])


def wider_gradients():
    for function in ACCUMULATORS:
        for into, addend in (
            ("float16", "float32"),
            ("float16", "bfloat16"),
            ("float16", "float64"),
            ("bfloat16", "float16"),
            ("bfloat16", "float32"),
            ("bfloat16", "float64"),
            ("float32", "float64"),
        ):
            message = f'grad has dtype {addend} and the buffer {into}.*casting="same_kind"'
            changes = {"grad": partial(_array_of, values(addend, R, C))}
            types = (into,) * 3
            yield refused(function, f"+= {addend}", TypeError, message, changes, types)


# Outputs that are refused


def outputs():
    """Good arguments and outputs, but for one output."""
    for function in NORMS:
        operation = OPERATIONS[function]
        results = operation.results
        for types in operation.types:
            for position, label in enumerate(results):
                if operation.shape(label):
                    yield from _output(operation, types, position)
        count = len(results)
        for value in ((None,) * (count + 1), [None] * count, 3.0):
            message = "out must be .* not"
            yield refused(function, f"out={value}", TypeError, message, {"out": value})
        if "dscale" in results:
            position = results.index("dscale")
            message = rf"out\[{position}\] must be None: this call has no such result"
            wrong = partial(_without_scale, position, count)
            gone = {"scale", "bias"} & {*operation.arrays}
            changes = {**dict.fromkeys(gone), "out": wrong}
            yield refused(function, "dscale without scale", ValueError, message, changes)


def _without_scale(position, count, a, _):
    return tuple(a(f32(C)) if k == position else None for k in range(count))


def _output(operation, types, position):
    function, results, main = operation.name, operation.results, operation.arrays[0]
    name, shape = results[position], operation.shape(results[position])
    label = rf"out\[{position}\]" if len(results) > 1 else "out"
    dtype = DTYPES[operation.dtype(name, types)]

    def cell(what, error, message, wrong):
        def out(a, given):
            found = [a(values(operation.dtype(k, types), *operation.shape(k))) for k in results]
            found[position] = wrong(a, given, found)
            return tuple(found)

        return refused(function, f"{name} is {what}", error, message, {"out": out}, types)

    for what, other in {
        "longer": (*shape[:-1], shape[-1] + 1),
        "of a higher rank": (1, *shape),
        "0-d": (),
    }.items():
        message = rf"{label} has shape .*; expected \({shape[0]}"
        host = np.ones(other, dtype)
        yield cell(what, ValueError, message, lambda a, *_, h=host: a(h))
    for other in ("float64" if dtype != np.float64 else "float32", "int64"):
        # A batch norm takes the dtype of its statistics from out.
        message = f"{label} has dtype"
        host = np.ones(shape, other)
        yield cell(f"of {other}", TypeError, message, lambda a, *_, h=host: a(h))
    message = f"{label} is a list; expected an array"
    yield cell("a list", TypeError, message, lambda *_: [1.0])
    message = f"{label} is read-only"
    host = np.ones(shape, dtype)
    yield cell("read-only", ValueError, message, lambda a, *_: a.read_only(host))
    message = f"{label} overlaps itself"
    yield cell("stride 0", ValueError, message, lambda a, *_: a.stretched(dtype, shape))
    if shape == operation.shape(main):
        message = rf"{label} shares memory with {main} without being .*\b{main}\b.* itself"
        yield cell("its own, reversed", ValueError, message, lambda _, g, __: g[main][::-1])
        yield cell("its own, sideways", ValueError, message, lambda _, g, __: g[main][:, ::-1])
        allowed = operation.record.results[position].may_be
        for other in {"x", "y"} & {*operation.arrays} - {main, *allowed}:
            message = f"{label} shares memory with {other} .*pass another array"
            yield cell(f"{other} itself", ValueError, message, lambda _, g, __, o=other: g[o])
    else:
        # A few elements of another array, in as many bytes as the output needs.
        few = partial(_few, host)
        message = f"{label} shares memory with {main}; pass another array"
        yield cell(f"part of {main}", ValueError, message, lambda _, g, __: few(g[main]))
        if position:
            message = r"out\[\d\] and out\[\d\] share memory"
            yield cell("part of an output", ValueError, message, lambda _, __, found: few(found[0]))


def _few(host, array):
    """The first bytes of an array in the dtype and the shape of another."""
    return array.reshape(-1).view(np.int8)[: host.nbytes].view(host.dtype).reshape(host.shape)


def outputs_of_lists():
    for function in ("grad_norm", "clip_grad_norm"):
        for what, error, message, out in (
            ("1-d", ValueError, r"out has shape \(1,\); expected \(\)", lambda a, _: a(f64(1))),
            ("float32", TypeError, "out has dtype float32", lambda a, _: a(f32())),
            ("read-only", ValueError, "out is read-only", lambda a, _: a.read_only(f64())),
            ("a scalar", TypeError, "out is a (NumPy scalar|numpy array and )", np.float64(1)),
            (
                "an element",
                ValueError,
                r"out shares memory with grads\[1\]",
                lambda _, g: g["grads"][1][:1].reshape(()),
            ),
        ):
            yield refused(function, f"out is {what}", error, message, {"out": out})
    changes = {"flat": True, "out": lambda a, _: a(f64())}
    message = r"out has shape \(\); expected \(2,\)"
    yield refused("per_tensor_norms", "0-d out", ValueError, message, changes)
    for what, error, message, out in (
        ("an array", TypeError, r"out must be a tuple \(clipped", lambda a, _: a(f64())),
        ("short", TypeError, "out must be a tuple of 2", lambda a, _: ([a(f32(3))], None)),
        (
            "of another dtype",
            TypeError,
            r"out\[1\] has dtype float32; grads\[1\] has dtype float64",
            lambda a, _: ([a(f32(3)), a(f32(2))], None),
        ),
        (
            "of another shape",
            ValueError,
            r"out\[0\] has shape \(2,\); expected \(3,\)",
            lambda a, _: ([a(f32(2)), a(f64(2))], None),
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
            r"out\[\d\] and out\[\d\] share memory",
            lambda a, _: ([(first := a(f32(4)))[:3], first.view(np.float64)], None),
        ),
        (
            "a norm in a clipped array",
            ValueError,
            r"out shares memory with out\[0\], gradient 1",
            lambda a, _: ([a(f32(3)), (second := a(f64(2)))], second[:1].reshape(())),
        ),
    ):
        yield refused("clip_by_global_norm", f"out is {what}", error, message, {"out": out})
