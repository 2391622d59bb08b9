"""Bad input that is refused: an error of one type that names the argument, and no byte changed."""

import math
import re
from collections import deque

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
    Refused,
    Sparse,
    f32,
    f64,
    good,
    named,
    own_frames,
    values,
)
from tests.operations import FLOAT32, OPERATIONS, C, R, records
from tests.operations import LISTS as ARRAYS
from tests.ranks import Pair
from tests.tolerances import DTYPES

NAN, INF = math.nan, math.inf
OLD = ">f4"  # a dtype that is not in native byte order
# What messages of a TypeError say; all others are those of a ValueError.
OF_TYPES = re.compile(
    r"has dtype|(is|holds) (a |an int|float64)|is None; pass|be \.\*"
    r"|must be an? (bool|float32|integer|tuple|real number, )"
)


def refused(function, message, types=FLOAT32, /, **changes):
    """Good arguments with some replaced: an error of one type that names the argument.

    A callable stands for what it makes of the array factory and the good arguments.
    """
    error = TypeError if OF_TYPES.search(message) else ValueError

    def arguments(a):
        given = good(function, a, types)
        return given | {
            label: value(a, given) if callable(value) else value for label, value in changes.items()
        }

    def check(backend):
        # Of the second no plan knows; a check does not hang on the dtypes too.
        for kind in (list, deque) if types == FLOAT32 else (list,):
            a = Factory(backend)
            given = arguments(a)
            lists = {k for k in given if k in ARRAYS and type(given[k]) is list}
            if kind is deque and not lists:
                break
            before = a.memory()
            with pytest.raises(error, match=message) as caught:
                getattr(gradkit, function)(**given | {k: kind(given[k]) for k in lists})
            assert type(caught.value) is error
            assert len(own_frames(caught.value)) <= 3
            assert a.memory() == before

    shown = {label: value for label, value in changes.items() if not callable(value)}
    call = Refused(function, arguments, error, message)
    return Cell(f"{function} of {'-'.join(types)}, {shown}: {message}", check, call)


# What makes an argument, of the array factory and of the good arguments


def array(host):
    return lambda a, _: a(host)


def read_only(host):
    return lambda a, _: a.read_only(host)


def stretched(dtype, *shape):
    """Of strides 0."""
    return lambda a, _: a.stretched(DTYPES[dtype], shape)


def retyped(label, dtype):
    return lambda a, given: a(np.ones(given[label].shape, dtype))


# Lists


def not_gradients():
    """Among gradients, what is none."""
    bad = {
        r"grads\[1\] has dtype .*int64.*accepted": array(np.arange(3)),
        r"grads\[1\] has dtype .*bool": array(np.ones(3, bool)),
        r"grads\[1\] has dtype .*complex128": array(np.ones(3, complex)),
        r"grads\[1\] has dtype '>f4'": array(np.ones(3, OLD)),
        r"grads\[1\] is a float; expected an array": 1.0,
        r"grads\[1\] is a str; expected an array": "gradient",
        r"grads\[1\] (is a |a )(masked|numpy) array": np.ma.ones(3),
        r"grads\[1\]\['w'\]\[0\] is an int": {"w": [3]},
        r"grads\[1\] is a Sparse; expected an array; pass its \.data,": Sparse(),
    }
    for function in LISTS:
        for message, wrong in bad.items():
            yield from _among(function, message, lambda _, wrong=wrong: wrong)


def parameters():
    for function in LISTS:
        message = r"grads\[1\] is a Parameter; expected an array"
        yield from _among(function, message, lambda _: Parameter())
    message = "parameters holds a int, which has no .grad"
    yield refused("grads_of", message, parameters=[Parameter(), [3]])


def read_only_gradients():
    for function in WRITERS:
        message = r"grads\[1\] is read-only"
        yield from _among(function, message, lambda dtype: read_only(values(dtype, 3)))
        yield refused(function, "is a NumPy scalar", grads=np.float64(2))


def gradients_over_themselves():
    def windows(dtype):
        return lambda a, _: a.windows(DTYPES[dtype])

    for function in WRITERS:
        for wrong in (lambda dtype: stretched(dtype, 3), windows):
            yield from _among(function, r"grads\[1\] overlaps itself", wrong)


def _among(function, message, wrong):
    """Lists of each dtype with something wrong, which is made of the dtype, at the second place."""
    for types in OPERATIONS[function].types:
        middle, around = wrong(types[0]), values(types[0], 2)

        def grads(a, given, middle=middle, around=around):
            found = middle(a, given) if callable(middle) else middle
            return [a(around), found, a(around)]

        yield refused(function, message, types, grads=grads)


def shared_memory():
    """The same bytes by two names, which would be written twice."""
    views = (
        lambda g: g,
        lambda g: g[...],
        lambda g: g[3:5],
        lambda g: g[::3],
        lambda g: g[::-1],
        lambda g: g.view(np.int8).view(np.float16),
    )

    def twice(view, dtype):
        def make(a, _):
            first = a(values(dtype, 8))
            return [first, None, a(values(dtype, 2)), {"again": view(first)}]

        return make

    def among_others(dtype):
        def make(a, _):
            room = a(values(dtype, 20))
            return [room[::2], room[1:2], room[8:9]]

        return make

    for function in WRITERS:
        for types in OPERATIONS[function].types:
            for view in views:
                message = r"grads\[0\] and grads\[3\]\['again'\] share memory"
                yield refused(function, message, types, grads=twice(view, types[0]))
            message = r"grads\[0\] and grads\[2\] share memory"
            yield refused(function, message, types, grads=among_others(types[0]))


def limits(*labels):
    """Numbers that are negative or NaN (0 too, where that is no bound)."""
    for function, label in _numbers(labels):
        bound = "a real number above 0" if label == "norm_type" else "at least 0"
        for value in (-1.0, -INF, NAN, *([0.0] if label == "norm_type" else [])):
            message = f"{label} must be {bound}.*, not {value}"
            yield refused(function, message, **{label: value})
        if label == "eps":
            yield refused(function, "eps must be finite", eps=INF)


def groups():
    """Objects that are no group of ranks, and copies of gradients that cannot be."""
    for function in named("lists", takes="group"):
        cut = {"blocks": [0, 1]} if "blocks" in OPERATIONS[function].parameters else {}
        yield refused(function, "group is a int without rank; pass what", group=3)
        message = r"replicas of grads\[1\] is 3, but the group's size is 2"
        yield refused(function, message, group=Pair(), replicas=[2, 3], **cut)
        for message, replicas in {
            "is 2, but there is no group": 2,
            r"replicas of grads\[0\] is 0": [0, 1],
            "replicas has 1 items": [1],
            "replicas has the keys 'w'": {"w": 1},
            "replicas must be an integer": 0.5,
        }.items():
            yield refused(function, message, replicas=replicas, **cut)


def scales():
    """Numbers that no gradient can be multiplied by."""
    for function, label in [*_numbers(("scale",)), ("accumulate_grad", "scale")]:
        for value in (INF, -INF, NAN):
            yield refused(function, f"scale must be finite, not {value}", **{label: value})


def flags():
    """Arrays that found_inf cannot be written to."""
    for function in named("lists", takes="found_inf"):
        count = 2 if function == "per_tensor_norms" else 1
        for message, found_inf in {
            "found_inf has dtype": array(np.array(0)),
            r"found_inf has shape \(3,\)": array(np.zeros(3, bool)),
            "found_inf must be a float32 array that is written to, not float": 0.0,
            "found_inf is read-only.*; pass a new one": read_only(np.zeros(count)),
            r"found_inf shares memory with grads\[1\]": lambda _, g, n=count: g["grads"][1][:n],
        }.items():
            yield refused(function, message, found_inf=found_inf)


def not_numbers():
    """Values that are no real number, in the place of one."""
    arrays = ("max_norm", "clipping", "scale", "coefficient")  # which may be arrays
    for function, label in _numbers(("norm_type", "eps", "clip_value", "scale_offset", *arrays)):
        for value in (None, "1", True, 1j, np.ones(2)):
            message = f"{label} must be a real number, not {type(value).__name__}"
            if label not in arrays or not isinstance(value, np.ndarray):
                yield refused(function, message, **{label: value})
        if label in arrays:
            count, expected = 2, r"\(\), one number"
            if label == "max_norm" and "block" in function:  # which take one for each unit
                count, expected = 97, r"\(\d+,\), one limit per unit"
            message = rf"{label} has shape \({count},\); expected {expected}"
            yield refused(function, message, **{label: array(f64(count))})
    yield refused("clip_coefficient", "norm must be a real number, not str", norm="5")
    message = "norm has dtype int64; accepted: float16, bfloat16, float32, float64"
    yield refused("clip_coefficient", message, norm=array(np.arange(3)))
    yield refused("accumulate_grad", "scale must be a real number, not str", scale="1")


def guards():
    """A spike guard's numbers, states and norms."""
    update = "spike_guard_update"
    for message, wrong in {
        "decay must be greater than 0 and less than 1, not": (0.0, 1.0, -0.5, NAN, INF),
        "threshold must be at least 0, not": (-1.0, NAN),
        "threshold must be finite, not inf": (INF,),
        "warmup must be from 1 to 16777216, not": (0, -1, 1 << 25),
        "norm must be at least 0, not": (-1.0, -INF, np.float64(-2)),
        "on_spike must be one of 'clip', 'skip', not 'drop'": ("drop",),
    }.items():
        for value in wrong:
            yield refused(update, message, **{message.partition(" ")[0]: value})
    for label in ("decay", "threshold", "norm"):
        for value in ("1", 1j, True, None):
            message = f"{label} must be a real number, not {type(value).__name__}"
            yield refused(update, message, **{label: value})
    for value in (True, 2.0, "25", None):
        yield refused(
            update, f"warmup must be an integer, not {type(value).__name__}", warmup=value
        )
    for value in (None, [0.0, 0.0, 0.0], 1.0):
        yield refused(update, f"state is a {type(value).__name__}; expected an array", state=value)
    yield refused("spike_guard_init", "like is an int; expected", like=1)
    yield refused("spike_guard_init", "count must be at least 0, not -1", count=-1)
    yield refused("spike_guard_init", "count must be an integer, not float", count=1.0)
    for norm in (np.ones(3), np.ones(())):
        message = r"norm has shape \((3,)?\); expected \(2,\), one norm per state"
        yield refused(update, message, state=array(np.zeros((2, 3))), norm=array(norm))
    for message, host in {
        r"state has shape \(2,\); expected \(3,\)": np.ones(2),
        r"state has shape \(\); expected \(3,\)": np.ones(()),
        r"state has shape \(3, 2\); expected \(3, 3\)": np.ones((3, 2)),
        "state has dtype float32; accepted: float64": np.ones(3, np.float32),
        "state has dtype int64; accepted: float64": np.ones(3, int),
        "state has dtype >f8; accepted: float64": np.ones(3, ">f8"),
        r"norm has shape \(1,\); expected \(\)": np.ones(1),
        r"norm has shape \(0,\); expected \(\)": np.ones(0),
    }.items():
        yield refused(update, message, **{message.partition(" ")[0]: array(host)})
    for message, out in {
        r"out\[0\] has shape \(2,\); expected \(3,\)": lambda a, _: (a(np.ones(2)), None),
        r"out\[1\] has shape \(1,\); expected \(\)": lambda a, _: (None, a(np.ones(1))),
        r"out\[0\] has dtype float32; next_state has dtype float64": lambda a, _: (a(f32(3)), None),
        "out must be a tuple of 2": (None,),
        r"out\[0\] is read-only": lambda a, _: (a.read_only(np.ones(3)), None),
    }.items():
        yield refused(update, message, out=out)


def running_statistics():
    """Running statistics that cannot be moved, by a forward pass or by themselves."""
    both, kept = ("running_mean", "running_var"), []

    def keep(a, _):
        kept.append(a(f32(C)))
        return kept[-1]

    for value in (-0.1, 1.5, NAN, INF):
        yield _moved(f"momentum must be from 0 to 1, not {value}", momentum=value)
    for value in (None, "0.1", True):
        message = f"momentum must be a real number, not {type(value).__name__}"
        yield _moved(message, momentum=value)
    for label in both:
        for message, host in {
            r"running_(mean|var) has shape .*; expected \(6,\)": f32(C + 1),
            "running_(mean|var) has dtype": np.ones(C, int),
            r"running_var has dtype float\d\d; .*dtype float\d\d": f64(C),
        }.items():
            yield _moved(message, **{label: array(host)})
        yield _moved(f"{label} is a list; expected an array", **{label: [1.0]})
    for label in both:
        for message, wrong in {
            "is None; pass running_mean and running_var, or neither": None,
            "is read-only": read_only(f32(C)),
            "overlaps itself": stretched("float32", C),
            "shares memory with scale": lambda _, g: g["scale"],
            "shares memory with x": lambda _, g: g["x"][1],
        }.items():
            yield _moved(f"{label} {message}", **{label: wrong})
    for message, changes in {
        "running_mean and running_var share memory": {
            "running_mean": keep,
            "running_var": lambda *_: kept[-1],
        },
        r"out\[2\] and running_var share memory": {
            "running_var": keep,
            "out": lambda *_: (None, None, kept[-1]),
        },
    }.items():
        yield _moved(message, **changes)


def batches_without_variance():
    """With running statistics or without; and a momentum that they alone need."""
    message = "x has one element per channel; a variance needs two or more"
    for shape in ((1, C), (1, C, 1, 1)):
        yield refused("batch_norm", message, x=array(f32(*shape)))
        yield _moved(message, x=array(f32(*shape)))
    for value in (0.9, 0, 1.0):
        message = f"momentum is {float(value)}, but there are no running statistics"
        yield refused("batch_norm", message, momentum=value)


def _moved(message, **changes):
    running = dict.fromkeys(("running_mean", "running_var"), array(f32(C)))
    return refused("batch_norm", message, **(running | changes))


def _numbers(labels):
    """Every function that takes a number of one of these names; the scale of a norm is none."""
    for label in labels:
        families = ("lists", "buffer lists") if label == "scale" else ()
        yield from ((function, label) for function in named(*families, takes=label))


def wrong_words():
    """Words and flags that are not accepted."""
    for function in named(takes="nonfinite"):
        for value in ("error", None, True):
            message = "nonfinite must be one of 'propagate', 'raise', 'zero', not"
            yield refused(function, message, nonfinite=value)
    for function in named(takes="activation"):
        for value in ("relu", None, 1):
            message = "activation must be one of 'silu', 'swish', 'sigmoid', not"
            yield refused(function, message, activation=value)
        for value in (1, "yes", None):
            message = f"norm_before_gate must be a bool, not {type(value).__name__}"
            yield refused(function, message, norm_before_gate=value)
    for function in ACCUMULATORS:
        for value in ("unsafe", None):
            message = "casting must be one of 'safe', 'same_kind', not"
            yield refused(function, message, casting=value)
        flag = "do_update" if function == "accumulate_grad" else "overwrite"
        for value in (1, None, "no"):
            message = f"{flag} must be a bool or a bool array, not {type(value).__name__}"
            yield refused(function, message, **{flag: value})
        for host in (np.ones(2, bool), np.ones(0, bool), np.ones(1)):
            message = f"{flag} has dtype .* and shape .*; expected one bool"
            yield refused(function, message, **{flag: array(host)})


def at_random(**given):
    """Arguments of a sum that is rounded at random, into 16 bits."""
    halves = {"buffers": lambda a, _: [a(f32(R, C).astype("f2")), a(f32(3).astype("f2"))]}
    halves["grads"] = lambda a, g: halves["buffers"](a, g)
    return halves | {"rounding": "stochastic"} | given


def compensating(second):
    """The first buffer's compensation is right, and then comes another."""
    return {"compensation": lambda a, g: [a(f32(R, C)), second(a, g)]}


# What is wrong with containers of buffers and gradients.
_WRONG_LISTS = (
    (r"buffers\[1\] has no counterpart", {"grads": lambda _, g: g["grads"][:1]}),
    (r"grads\[2\] has no counterpart", {"grads": lambda _, g: g["grads"] * 2}),
    (r"buffers\[0\] has no counterpart", {"grads": lambda _, g: [None, *g["grads"]]}),
    (r"buffers\[0\] has no counterpart", {"grads": None}),
    ("buffers has no counterpart", {"grads": None, "buffers": lambda _, g: g["buffers"][0]}),
    (
        r"grads\[0\] has shape \(6,\); expected \(4, 6\), the shape of buffers\[0\]",
        {"grads": lambda a, g: [a(f32(6)), g["grads"][1]]},
    ),
    (
        r"grads\[1\] has shape \(3, 2\); expected \(3,\), the shape of buffers\[1\]",
        {"grads": lambda a, g: [g["grads"][0], a(f32(3, 2))]},
    ),
    (
        r"grads\[1\] has dtype float64 and buffers\[1\] float32, which would lose precision",
        {"grads": lambda a, g: [g["grads"][0], a(f64(3))]},
    ),
    (r"grads\[1\] has dtype", {"grads": lambda a, g: [g["grads"][0], a(np.arange(3))]}),
    (
        r"grads\[1\] overlaps buffers\[0\]",
        {"grads": lambda _, g: [g["grads"][0], g["buffers"][0].reshape(-1)[1:4]]},
    ),
    (
        r"grads\[1\] overlaps buffers\[0\]",  # each of two arrays, at the place of the other
        {
            "grads": lambda _, g: [g["grads"][0], g["buffers"][0]],
            "buffers": lambda _, g: [g["buffers"][0], g["grads"][0]],
        },
    ),
    (r"buffers\[0\] and buffers\[1\] share memory", {"buffers": lambda _, g: g["buffers"][:1] * 2}),
    (
        r"buffers\[1\] overlaps itself",
        {"buffers": lambda a, g: [g["buffers"][0], a.stretched(np.float32, (3,))]},
    ),
    (
        r"buffers\[1\] is read-only",
        {"buffers": lambda a, g: [g["buffers"][0], a.read_only(f32(3))]},
    ),
    ("norm_out has dtype float32", {"norm_out": array(np.float32(0))}),
    (r"norm_out has shape \(1,\); expected \(\)", {"norm_out": array(np.zeros(1))}),
    (r"buffers\[1\] has no counterpart", {"compensation": lambda a, _: [a(f32(R, C))]}),
    (
        r"compensation\[1\] has shape \(4,\); expected \(3,\), the shape of buffers\[1\]",
        compensating(array(f32(4))),
    ),
    (
        r"compensation\[1\] has dtype float64 and buffers\[1\] float32; they must agree",
        compensating(array(f64(3))),
    ),
    (
        r"compensation\[0\] overlaps buffers\[0\]; pass a copy",
        {"compensation": lambda _, g: g["buffers"]},
    ),
    (
        r"grads\[1\] overlaps compensation\[1\]; pass a copy",
        compensating(lambda _, g: g["grads"][1]),
    ),
    (r"compensation\[1\] is read-only", compensating(read_only(f32(3)))),
    ("rounding must be one of 'nearest', 'stochastic', not 'up'", {"rounding": "up"}),
    (r"buffers\[0\] has dtype float32; .* float16 and bf", {"rounding": "stochastic"}),
    (r"seed must be at least 0 and below 2\*\*64, not -1", at_random(seed=-1)),
    ("seed must be at least 0 and below", at_random(seed=1 << 64)),
    ("seed must be an integer, not float", at_random(seed=1.0)),
    ("seed must be an integer, not bool", at_random(seed=True)),
    ("seed (has dtype|must be an integer)", at_random(seed=array(f64()))),
    (r"seed has shape \(2,\)", at_random(seed=array(np.ones(2, int)))),
    (r"offsets must be at least 0 and below 2\*\*63, not -1", at_random(offsets=-1)),
    ("offsets has 1 .*, but buffers has 2", at_random(offsets=[0])),
    ("offsets must be an integer, not float", at_random(offsets=[0, 1.5])),
    ("offsets must be at least 0 and below", at_random(offsets=(1 << 63) - 2)),
    (
        'rounding is "stochastic", but compensation keeps what rounding to nearest drops',
        at_random(compensation=at_random()["buffers"]),
    ),
    ("casting must be one of 'safe', 'same_kind', not 'no'", {"casting": "no"}),
    ("overwrite must be a bool", {"overwrite": 1}),
    ("do_update must be a bool", {"do_update": None}),
)


def lists_that_do_not_match():
    """Containers of buffers and gradients."""
    for message, changes in _WRONG_LISTS:
        yield refused("accumulate_grads", message, **changes)
    message, doubles = r"norm_out shares memory with grads\[1\]", ("float64",) * 3
    first = {"norm_out": lambda _, g: g["grads"][1][:1].reshape(())}
    yield refused("accumulate_grads", message, doubles, **first)


def averages():
    """Decays and arrays that a running average cannot have."""
    for decay in (-0.1, 1.1, NAN, INF):
        yield refused("ema_update", f"decay must be from 0 to 1, not {decay}", decay=decay)
    wide = {"params": lambda a, g: [a(f64(R, C)), g["params"][1]]}
    message = r"params\[0\] has dtype float64 and averages\[0\] float32, .*: float16, .*, float32$"
    yield refused("ema_update", message, **wide)
    part = {"params": lambda _, g: [g["averages"][0][::-1], g["params"][1]]}
    yield refused("ema_update", r"params\[0\] overlaps averages\[0\]; pass a copy", **part)


def updates():
    """Arguments that an optimiser's step cannot have."""
    for label, function in (("moments", "adamw_update"), ("momenta", "sgd_update")):
        for message, wrong in {
            r"params\[1\] has no counterpart": {"grads": lambda _, g: g["grads"][:1]},
            r"grads\[0\] has dtype float64 and params\[0\] float32; accepted: float16, .*2$": {
                "grads": lambda a, g: [a(f64(R, C)), g["grads"][1]]
            },
            rf"{label}\[0\] has dtype float64 and params\[0\] float32; accepted: float32$": {
                label: lambda a, _: [a(f64(R, C)), a(f32(3))]
            },
            r"grads\[0\] overlaps params\[0\]; pass a copy": {"grads": lambda _, g: g["params"]},
            rf"grads\[0\] overlaps {label}\[0\]; pass a copy": {
                label: lambda a, g: [g["grads"][0], a(f32(3))]
            },
            rf"{label}\[1\] is read-only": {
                label: lambda a, _: [a(f32(R, C)), a.read_only(f32(3))]
            },
            "lr must be at least 0, not -1": {"lr": -1.0},
            "lr must be finite, not inf": {"lr": INF},
            "weight_decay must be at least 0, not nan": {"weight_decay": NAN},
            "scale must be a real number, not str": {"scale": "half"},
            "verdict must be a bool or a bool array, not int": {"verdict": 1},
            "rounding must be one of 'nearest', 'stochastic', not 'up'": {"rounding": "up"},
            r"params\[0\] has dtype float32; rounding=": {"rounding": "stochastic", "seed": 1},
        }.items():
            yield refused(function, message, **wrong)
    halves = {"params": lambda a, _: [a(f32(R, C).astype("f2")), a(f32(3).astype("f2"))]}
    for message, wrong in {
        "step must be at least 1, the first step's number, not 0": {"step": 0},
        "step must be an integer, not float": {"step": 1.5},
        "step has dtype float64; accepted: int64, or an int": {"step": array(f64())},
        r"step has shape \(2,\); expected": {"step": array(np.ones(2, int))},
        "step is read-only": {"step": read_only(np.array(1))},
        r"step .* and below 2\*\*63 - 1, not .*9223372036854775807": {
            "step": array(np.array(2**63 - 1))
        },
        r"betas must be at least 0 and below 1, not \(0.9, 1.0\)": {"betas": (0.9, 1.0)},
        "betas must be a tuple|betas .*has dtype": {"betas": 0.9},
        "eps must be at least 0, not -1.0": {"eps": -1.0},
        r"moments\[1\] overlaps variances\[1\]; pass a copy": {
            "variances": lambda a, g: [a(f32(R, C)), g["moments"][1]]
        },
        r"variances\[0\] has dtype float32 and moments\[0\] float16; they must agree": halves
        | {"moments": halves["params"]},
        "rounding is 'stochastic', which needs a seed; pass the": halves
        | {"grads": halves["params"], "rounding": "stochastic"},
    }.items():
        yield refused("adamw_update", message, **wrong)
    for label, value in (("momentum", 0.9), ("nesterov", True)):
        wrong = {"momenta": None, label: value}
        yield refused("sgd_update", f"{label} is {value}, which needs momenta; pass zeros", **wrong)
    for momenta in ({}, {"momenta": None}):
        yield refused("sgd_update", "nesterov must be a bool, not int", nesterov=1, **momenta)
        for message, value in {"a real number, not str": "0.9", "at least 0, not nan": NAN}.items():
            yield refused("sgd_update", f"momentum must be {message}", momentum=value, **momenta)


def verdicts():
    """Arguments that give no verdict, and copies that none can keep."""
    for message, wrong in {
        "norm must be at least 0, not -1.0": -1.0,
        r"norm has shape \(2,\); expected \(\), the norm": array(np.ones(2)),
        "limit must be at least 0, not -1.0": -1.0,
        "limit must be at least 0, not nan": NAN,
        r"found_inf has shape \(2,\); expected one": array(np.zeros(2)),
        "found_inf has dtype int64; accepted: float": array(np.zeros((), int)),
        r"found_inf must be a bool or .*, not float; pass bool\(found_inf\)": 0.0,
        "found_inf must be a bool or an array of one number, not str": "no",
        "out has dtype float64; verdict has dtype bool": array(np.zeros(())),
    }.items():
        yield refused("step_verdict", message, **{message.partition(" ")[0]: wrong})
    for message, wrong in {
        "norm must be at least 0, not -1.0": -1.0,
        "norm must be a real number, not str": "4",
        r"norm has shape \(2,\); expected \(\)": array(np.ones(2)),
    }.items():
        yield refused("clip_grads_with_norm", message, norm=wrong)
    kept = []
    shared = {
        "found_inf": lambda a, _: kept.append(a(np.zeros((), bool))) or kept[-1],
        "out": lambda *_: kept[-1],
    }
    yield refused("step_verdict", "out shares memory with found_inf; pass another array", **shared)
    for message, wrong in {
        "verdict must be a bool or a bool array, not int": 1,
        r"verdict has dtype bool and shape \(2,\); exp": array(np.ones(2, bool)),
        r"verdict has dtype float64 and shape \(1,\); exp": array(np.ones(1)),
    }.items():
        yield refused("keep_if", message, verdict=wrong)
    yield refused("keep_if", r"new must have the same structure as old; old\[0\] has no", new=[])
    for message, wrong in {
        r"new\[0\] is a float; expected an array": lambda *_: 1.0,
        r"new\[0\] has shape \(3,\); expected \(4, 6\), the shape of": array(f32(3)),
        r"new\[0\] has dtype float64 and old\[0\] float32; they must agree": array(f64(R, C)),
        r"new\[0\] overlaps old\[0\]; pass a copy": lambda _, g: g["old"][0][::-1],
        r"old\[0\] has dtype (torch\.)?complex128; accepted: (nu|fl)": array(
            np.ones((R, C), complex)
        ),
    }.items():
        label = message[:3]
        first = {label: lambda a, g, k=label, wrong=wrong: [wrong(a, g), *g[k][1:]]}
        yield refused("keep_if", message, **first)


def named_gradients(a, _):
    return {"w": a(f32(3, 4)), "b": a(f32(3))}


def choices():
    """Values of clip and count that do not say which gradients."""
    for label in ("clip", "count"):
        for message, said in {
            "for grads.'w'. must be a bool, not int": {"w": 1, "b": True},
            "has the keys 'w', but grads has the keys 'w', 'b'": {"w": True},
            "for grads.'w'. must be a bool, not NoneType": lambda *_: lambda *_: None,
        }.items():
            given = {"grads": named_gradients, label: said}
            yield refused("clip_grad_norm", f"{label} {message}", **given)


def inexact():
    """Norms that cannot be rounded once."""
    for message, changes in {
        "exact must be a bool": {"exact": 1},
        "norm_type 1, 2 and infinity": {"exact": True, "norm_type": 3},
        r"grads\[1\] is float64": {"exact": True},
    }.items():
        yield refused("clip_grad_norm", message, **changes)


def wrong_blocks():
    """Keys that are none, limits that they lack, and what blocks do not go with."""
    clip, keys = "clip_grad_block_norm", ["a", "b"]
    for message, changes in {
        "max_norm has no limit for the block 'b'": {"max_norm": {"a": 1.0}, "blocks": keys},
        "max_norm must be a real number, or with blocks a dict .*, not list": {
            "max_norm": [1.0, 2.0],
            "blocks": keys,
        },
        "blocks has 1 items, but grads has 2 items": {"blocks": ["a"]},
        r"blocks for grads\[1\] must be .*, not None": {"blocks": ["a", None]},
        r"blocks for grads\[0\] must be .*, not \[\]": {"blocks": lambda *_: lambda *_: []},
        "blocks must be .*, not str": {"blocks": "a"},
        "axis and rms cut single gradients": {"blocks": keys, "rms": True},
        "group and replicas go with blocks, and replicas is 2": {"replicas": 2},
        "group and replicas go with blocks, and replicas is .*1": {"replicas": array(np.ones(2))},
        r"replicas of grads\[0\] is 2, but there is no group": {"replicas": 2, "blocks": keys},
    }.items():
        yield refused(clip, message, **changes)
    yield refused("clip_by_block_norm", "leave them out with blocks", blocks=keys, axis=0)


def units():
    """Axes, limits and parameters that are not those of the gradients."""
    clip, params = "clip_grad_block_norm", r"params\[1\] has "
    for message, axis in {
        r"axis for grads\['w'\] is 2, but the array has 2 dimensions": 2,
        r"axis for grads\['w'\] is \(0, -2\), which names an axis twice": (0, -2),
        "axis has the keys 'w', but grads has the keys 'w', 'b'": {"w": 0},
        "axis has the keys 'w', 'b', 'x', but grads has": {"w": 0, "b": 0, "x": 0},
        "axis has 2 items, but grads has the keys": [0, 1],
        r"axis\['w'\] is .* dict, but grads\['w'\] is an array": {"w": {"x": 0}, "b": 0},
    }.items():
        yield refused(clip, message, grads=named_gradients, axis=axis)
    wrong = {"w": "rows", "b": 0}, {"w": 0, "b": (0.5,)}
    for axis in ("rows", 1.0, True, np.array(0.0), iter([0]), *wrong):
        message = r"axis for grads\['[wb]'\] must be an integer"
        yield refused(clip, message, grads=named_gradients, axis=axis)
    for message, max_norm in {
        "max_norm has 1 items, but grads has 2 items": [1.0],
        "max_norm has the keys 0, 1, but grads has 2 items": {0: 1.0, 1: 1.0},
        r"max_norm for grads\[1\] must be at least 0, not -1.0": [1.0, -1.0],
        r"max_norm for grads\[1\] must be a real number, not str": [1.0, "2"],
        r"max_norm has shape \(3,\); expected \(2,\), one limit per unit": array(np.ones(3)),
        "max_norm has dtype int64; accepted: float16": array(np.ones(2, int)),
    }.items():
        yield refused(clip, message, max_norm=max_norm, axis=None)
    yield from wrong_blocks()
    for message, wrong in {
        "params has 1 items, but grads has 2 items": lambda a, _: [a(f32(3))],
        "params has 3 items, but grads has 2 items": lambda a, _: [a(f32(3))] * 3,
        f"{params}no array for grads": lambda a, _: [a(f32(3)), None],
        rf"{params}shape \(4,\); expected \(2,\)": lambda a, _: [a(f32(3)), a(f64(4))],
        rf"{params}dtype int32": lambda a, _: [a(f32(3)), a(np.ones(2, np.int32))],
        "params has an? .*, but grads has 2 items": array(f32(3)),
        "params has the keys 0, 1, but grads has 2": lambda a, _: {0: a(f32(3)), 1: a(f64(2))},
    }.items():
        yield refused("clip_grad_adaptive", message, params=wrong)


# Arrays


def not_arrays():
    for function in (*NORMS, *ACCUMULATORS):
        operation = OPERATIONS[function]
        for label in operation.arrays:
            for value in ([1.0], 1.0, "x", *([] if label in operation.optional else [None])):
                message = f"{label} is a {type(value).__name__}; expected an array"
                yield refused(function, message, **{label: value})


def other_dtypes():
    """No floats, or not in native byte order."""
    for function in (*NORMS, *ACCUMULATORS):
        for label in OPERATIONS[function].arrays:
            for dtype in (np.int64, np.complex64, np.bool_, OLD):
                message = rf"{label} has dtype (torch\.)?{np.dtype(dtype)}; accepted: float16"
                if dtype == OLD:
                    message = f"{label} has dtype '>f4', which is not in native byte order; pass"
                yield refused(function, message, **{label: retyped(label, dtype)})


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
                    rf"{wrong}\.(astype|to)\({main}\.dtype\) \(accepted: {accepted}"
                )
                yield refused(function, message, types)
        if "residual" in arrays:
            message = "residual has dtype float16 and x has dtype float32; they must agree"
            yield refused(function, message, residual=retyped("residual", np.float16))
        if {"dy", "x"} <= {*arrays}:
            message = "x has dtype float32 and dy has dtype float16; they must agree"
            yield refused(function, message, dy=retyped("dy", np.float16))


def other_shapes():
    for function in NORMS:
        operation = OPERATIONS[function]
        main = next(main for main in ("x", "y", "means") if main in operation.arrays)
        for label in operation.arrays:
            if label == main:
                continue  # what the others are compared with
            shape = operation.shape(label)
            # Longer, empty, of a higher rank (with one 1, a scale per sample), and 0-d.
            longer, empty = ((*shape[:-1], last) for last in (shape[-1] + 1, 0))
            for types in operation.types:
                for other in (longer, empty, (1, 1, *shape), ()):
                    host = values(operation.dtype(label, types), *other)
                    message = rf"{label} has shape .*; expected \({shape[0]}"
                    yield refused(function, message, types, **{label: array(host)})
        if "batch" in function or "group" in function:
            wrong = {k: array(f32(C)) for k in ("x", "dy") if k in operation.arrays}
            yield refused(function, "x has shape .*; (batch|group) norm needs", **wrong)
    yield refused("layer_norm", "axis is -1, but the array has 0 dimensions", x=array(f32()))


def other_axes():
    axes = ("axis", "channel_axis")
    takers = {axis: named("rows", "channels", "groups", takes=axis) for axis in axes}
    for axis, function in ((axis, each) for axis, found in takers.items() for each in found):
        for value in (2, -3):
            message = f"{axis} is {value}, but the array has 2 dimensions"
            yield refused(function, message, **{axis: value})
        for value in (1.0, None, "1", True):
            message = f"{axis} must be an integer, not {type(value).__name__}"
            yield refused(function, message, **{axis: value})


def group_counts():
    """Groups that do not divide the channels, and samples in the place of channels."""
    for groups in (0, -1, 4, 7, 12):
        message = f"num_groups is {groups}; it must divide the 6 channels of x"
        yield refused("group_norm", message, num_groups=groups)
    for groups in (2.0, None, "2", True):
        message = f"num_groups must be an integer, not {type(groups).__name__}"
        yield refused("group_norm", message, num_groups=groups)
    for groups in (0, 4, 12):
        message = rf"mean has shape \(4, {groups}\); expected \(4, groups\), where groups divides"
        wrong = dict.fromkeys(("mean", "inv_std"), array(f32(R, groups)))
        yield refused("group_norm_grad", message, **wrong)
    for function in ("group_norm", "group_norm_grad"):
        for axis in (0, -2):
            message = f"channel_axis is {axis}, the axis of the samples"
            yield refused(function, message, channel_axis=axis)


def gradients_past_a_norm():
    """Gradients that cannot be added to dx."""
    for function in named(takes="ds"):
        main = "x" if "x" in OPERATIONS[function].arrays else "y"
        for value in ([1.0], 1.0, "x"):
            message = f"ds is a {type(value).__name__}; expected an array"
            yield refused(function, message, ds=value)
        for shape in ((R, C + 1), (R, 0), (1, R, C), (C,), ()):
            message = rf"ds has shape .*; expected \({R}, {C}\), the shape of {main}"
            yield refused(function, message, ds=array(f32(*shape)))
        message = "ds has dtype float16 and dy has dtype float32; they must agree"
        yield refused(function, message, ds=array(values("float16", R, C)))
        message = r"out\[0\] shares memory with ds without being dy or ds itself"
        yield refused(function, message, ds=lambda _, g: g["dy"][::-1], out=_over_dy)


def _over_dy(_, given):
    return (given["dy"], *((None,) * (2 if "mean" in given else 1)))


def scale_offsets():
    for function in named(takes="scale_offset"):
        for value in (NAN, INF, -INF):
            yield refused(function, f"scale_offset must be finite, not {value}", scale_offset=value)
        message = "scale_offset is 1.0, but scale is None"
        yield refused(function, message, scale_offset=1.0, scale=None)


def scales_without_inverse():
    """Known without waiting on the CPU and in the emulator; on a GPU the output is not finite."""
    for function in (n for n, r in records("rows").items() if "y" in r.array_names):
        for types in OPERATIONS[function].types:
            parameters = DTYPES[types[2]]
            tiny = tolerances.smallest(parameters)
            # In float32, in which 16 bits are computed, all of float16 is normal.
            subnormal = () if types[2] == "float16" else (tiny, -3 * tiny)
            for value in (0.0, -0.0, *subnormal):
                scale = np.array([1, 1, value, 1, value, 1], parameters)
                said = r"scale is zero or subnormal at flat index 2 \(2 in all\)"
                yield _without_inverse(function, said, types, scale)

    for function in named("rows", takes="scale_offset"):
        if "y" in OPERATIONS[function].arrays:
            scale = np.array([1, 1, -1, 1, 0, 1], np.float32)
            said = r"scale \+ scale_offset is zero or subnormal at flat index 2 \(1 in all\)"
            yield _without_inverse(function, said, FLOAT32, scale, scale_offset=1.0)


def _without_inverse(function, message, types, scale, **offset):
    cell = refused(function, message, types, scale=array(scale), **offset)

    def check(backend):
        if backend.name != "cupy":
            cell.check(backend)
            return
        a = Factory(backend)
        given = good(function, a, types) | {"scale": a(scale)} | offset
        result = getattr(gradkit, function)(**given)
        first = result[0] if isinstance(result, tuple) else result
        assert not np.isfinite(backend.asnumpy(first)).all()

    return cell._replace(check=check)


# Accumulation


def compensation_that_does_not_fit():
    for message, wrong in {
        "compensation has dtype float64; expected the buffer's float32": array(f64(R, C)),
        "compensation has dtype int64; expected the buffer's": array(np.ones((R, C), int)),
        r"compensation has shape \(6,\); expected \(4, 6\)": array(f32(C)),
        "buffer and compensation share memory": lambda _, g: g["buffer"],
        "compensation shares memory with grad": lambda _, g: g["grad"],
        "compensation is read-only": read_only(f32(R, C)),
        "compensation overlaps itself": stretched("float32", R, C),
    }.items():
        yield refused("accumulate_grad", message, compensation=wrong)


def gradients_that_grow_the_buffer():
    for function in ACCUMULATORS:
        for types in OPERATIONS[function].types:
            for shape in ((C + 1,), (R, C, 1), (1, R, C), (2, R, C), (R, 2), (C, R), (0,)):
                message = r"grad has shape .* does not broadcast to the buffer's \(4, 6\)"
                yield refused(function, message, types, grad=array(values(types[0], *shape)))


def unwritable_buffers():
    for function in ACCUMULATORS:
        for types in OPERATIONS[function].types:
            wrong = read_only(values(types[0], R, C))
            yield refused(function, "buffer is read-only", types, buffer=wrong)
            wrong = stretched(types[0], R, C)
            yield refused(function, "buffer overlaps itself", types, buffer=wrong)
        scalar = {"buffer": np.float32(1), "grad": array(f32())}
        yield refused(function, "buffer is a NumPy scalar", **scalar)


def gradients_within_the_buffer():
    message = "buffer shares memory with grad without being grad itself"
    for function in ACCUMULATORS:
        for types in OPERATIONS[function].types:
            for part in (
                lambda _, g: g["buffer"][::-1],
                lambda _, g: g["buffer"][1],
                lambda _, g: g["buffer"][1:2, 2:3],
                lambda _, g: g["buffer"][:, :R].T[:, :1],
            ):
                yield refused(function, message, types, grad=part)


def wider_gradients():
    for function in ACCUMULATORS:
        for into, addends in {
            "float16": ("float32", "bfloat16", "float64"),
            "bfloat16": ("float16", "float32", "float64"),
            "float32": ("float64",),
        }.items():
            for addend in addends:
                message = f'grad has dtype {addend} and the buffer {into}.*casting="same_kind"'
                yield refused(function, message, (into,) * 3, grad=array(values(addend, R, C)))


# Outputs that are refused


def outputs():
    """Good arguments and outputs, but for one output."""
    for function in NORMS:
        operation = OPERATIONS[function]
        results = operation.results
        count = len(results)
        for kind, types in enumerate(operation.types):  # of all but the first, one result each
            for position in range(count) if not kind else (kind % count,):
                if operation.shape(results[position]):
                    yield from _output(operation, types, position)
        for value in ((None,) * (count + 1), [None] * count, 3.0):
            yield refused(function, "out must be .* not", out=value)
        if "dscale" in results:
            position = results.index("dscale")
            message = rf"out\[{position}\] must be None: this call has no such result"
            gone = dict.fromkeys({"scale", "bias"} & {*operation.arrays})
            yield refused(function, message, **gone, out=_only(position, count))


def _only(position, count):
    return lambda a, _: tuple(a(f32(C)) if k == position else None for k in range(count))


def _output(operation, types, position):
    results, main = operation.results, operation.arrays[0]
    name, shape = results[position], operation.shape(results[position])
    label = rf"out\[{position}\]" if len(results) > 1 else "out"
    dtype = operation.dtype(name, types)
    host = np.ones(shape, DTYPES[dtype])

    def cell(message, wrong):
        def out(a, given):
            found = [a(values(operation.dtype(k, types), *operation.shape(k))) for k in results]
            found[position] = wrong(a, given | {"first": found[0]})
            return tuple(found)

        return refused(operation.name, message, types, out=out)

    for other in ((*shape[:-1], shape[-1] + 1), (1, *shape), ()):
        message = rf"{label} has shape .*; expected \({shape[0]}"
        yield cell(message, array(np.ones(other, host.dtype)))
    for other in ("float64" if dtype != "float64" else "float32", "int64"):
        # A batch norm takes the dtype of its statistics from out.
        yield cell(f"{label} has dtype", array(np.ones(shape, other)))
    yield cell(f"{label} is a list; expected an array", lambda *_: [1.0])
    yield cell(f"{label} is read-only", read_only(host))
    yield cell(f"{label} overlaps itself", stretched(dtype, *shape))
    if shape == operation.shape(main):
        message = rf"{label} shares memory with {main} without being .*\b{main}\b.* itself"
        yield cell(message, lambda _, g: g[main][::-1])
        yield cell(message, lambda _, g: g[main][:, ::-1])
        allowed = operation.record.results[position].may_be
        for other in {"x", "y", "gate", "residual"} & {*operation.arrays} - {main, *allowed}:
            message = f"{label} shares memory with {other} .*pass another array"
            yield cell(message, lambda _, g, other=other: g[other])
    else:
        message = f"{label} shares memory with {main}; pass another array"
        yield cell(message, lambda _, g: _few(host, g[main]))
        if position:
            message = r"out\[\d\] and out\[\d\] share memory"
            yield cell(message, lambda _, g: _few(host, g["first"]))


def _few(host, other):
    """The first bytes of an array in the dtype and the shape of another."""
    return other.reshape(-1).view(np.int8)[: host.nbytes].view(host.dtype).reshape(host.shape)


def outputs_of_lists():
    for function in ("grad_norm", "clip_grad_norm"):
        for message, out in {
            r"out has shape \(1,\); expected \(\)": array(f64(1)),
            "out has dtype float32": array(f32()),
            "out is read-only": read_only(f64()),
            "out is a (NumPy scalar|numpy array and )": np.float64(1),
            r"out shares memory with grads\[1\]": lambda _, g: g["grads"][1][:1].reshape(()),
        }.items():
            yield refused(function, message, out=out)
    message = r"out has shape \(\); expected \(2,\)"
    yield refused("per_tensor_norms", message, flat=True, out=array(f64()))
    for message, out in {
        "out must be a tuple .clipped": array(f64()),
        r"out\[0\] must have .*; grads\[1\] has no counterpart": lambda a, _: ([a(f32(3))], None),
        r"out\[0\]\[1\] has dtype float32; grads\[1\] has dtype float64": (
            lambda a, _: ([a(f32(3)), a(f32(2))], None)
        ),
        r"out\[0\]\[0\] has shape \(2,\); expected \(3,\)": (
            lambda a, _: ([a(f32(2)), a(f64(2))], None)
        ),
        r"out\[0\]\[0\] shares memory with grads\[0\]": lambda _, g: (g["grads"], None),
        r"out\[1\] has dtype float32; the norm has dtype float64": lambda a, _: (None, a(f32())),
        r"out\[0\]\[0\] and out\[0\]\[1\] share memory": (
            lambda a, _: ([(first := a(f32(4)))[:3], first.view(np.float64)], None)
        ),
        r"out\[1\] shares memory with out\[0\]\[1\]": (
            lambda a, _: ([a(f32(3)), (second := a(f64(2)))], second[:1].reshape(()))
        ),
    }.items():
        yield refused("clip_by_global_norm", message, out=out)
