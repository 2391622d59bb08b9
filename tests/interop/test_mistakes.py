"""Typical mistakes, and what is said of them: the argument's name, and the way out.

A traceback has the caller's line and at most three of gradkit's.
"""

import array
import re
import traceback
from contextlib import suppress
from inspect import signature
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest

import gradkit
from tests import bad_input
from tests.bad_input.arguments import Factory, NoSuchArrayError, own_frames

from .libraries import framework

LIBRARIES = ("numpy", "torch", "jax")


class Parameter:
    """A parameter of some framework."""

    def __init__(self, values):
        self.data, self.grad = values, values


class Model:
    """A model of some framework."""

    def named_parameters(self):
        return []


def arrays(library):
    """Arrays of a library by short names, as the rows below use them."""
    module = np if library == "numpy" else framework(library)
    make = module.numpy.asarray if library == "jax" else module.asarray
    x, c = np.ones((4, 6), np.float32), np.ones(6, np.float32)
    hosts = {"x": x, "c": c, "m": np.zeros(4, np.float32), "d": c.astype(np.float16)}
    hosts |= {"image": np.ones((2, 3, 4, 4), np.float32), "ints": np.ones((4, 6), np.int32)}
    hosts |= {"flags": x > 0, "rolled": x.astype(np.complex64)}
    made = {name: make(host) for name, host in hosts.items()}
    return SimpleNamespace(**made, p=Parameter(made["c"]), other=np.ones((4, 6)))


def cast(label):
    return f"pass {label}.astype(np.float32)"


# Calls of arrays of any library, and what is said. Where casts stand, as NumPy writes them.
COMMON = {
    "integers as gradients": (lambda g, a: g.grad_norm([a.ints]), cast("grads[0]")),
    "bools as gradients": (lambda g, a: g.per_tensor_norms({"w": a.flags}), cast("grads['w']")),
    "integers that are clipped": (
        lambda g, a: g.clip_by_global_norm({"w": [a.ints]}, 1.0),
        cast("grads['w'][0]"),
    ),
    "integers as data": (lambda g, a: g.layer_norm(a.ints), cast("x")),
    "integers as an image": (lambda g, a: g.batch_norm(a.ints), cast("x")),
    "integers as a scale": (lambda g, a: g.rms_norm(a.x, a.ints[0]), cast("scale")),
    "integers as a mean": (
        lambda g, a: g.layer_norm_grad(a.x, a.x, a.c, a.ints[:, 0], a.m),
        cast("mean"),
    ),
    "integers as dy": (lambda g, a: g.rms_norm_grad(a.ints, a.x, a.c, a.m), cast("dy")),
    "a 16-bit dy": (
        lambda g, a: g.rms_norm_grad(a.d, a.c, None, a.m[0]),
        "agree: pass dy.astype(x.dtype)",
    ),
    "a 16-bit ds": (
        lambda g, a: g.rms_norm_grad(a.c, a.c, None, a.m[0], ds=a.d),
        "agree: pass ds.astype(dy.dtype)",
    ),
    "a 16-bit bias": (lambda g, a: g.layer_norm(a.x, a.c, a.d), "pass bias.astype(scale.dtype)"),
    "a bias per sample alone": (
        lambda g, a: g.layer_norm(a.x, None, a.x),
        "a bias per sample needs a scale per sample, of (4, 6)",
    ),
    "a bias per sample beside a scale of all": (
        lambda g, a: g.layer_norm(a.x, a.c, a.x),
        "a bias per sample needs a scale per sample, of (4, 6)",
    ),
    "a scale of other columns": (
        lambda g, a: g.layer_norm(a.x, a.m, a.m),
        "scale has shape (4,); expected (6,), the normalised dimensions of x, or one per sample",
    ),
    "a list as data": (lambda g, _: g.layer_norm([[1.0, 2.0]]), "pass np.asarray(x, np.float32)"),
    "a list as a scale": (
        lambda g, a: g.layer_norm(a.x, [1.0] * 6),
        "scale is a list; expected an array; pass np.asarray(scale, np.float32)",
    ),
    "a list as a gradient": (
        lambda g, _: g.grad_norm([1.0, 2.0]),
        "grads[0] is a float; expected an array; pass np.asarray(grads, np.float32)",
    ),
    "lists in a dict": (
        lambda g, _: g.clip_by_global_norm({"w": [[1, 2]]}, 1.0),
        "grads['w'][0][0] is an int; expected an array; pass np.asarray(grads['w'][0], np.float32)",
    ),
    "a number as a gradient": (lambda g, _: g.grad_norm(3.0), "grads is a float; expected"),
    "an array.array": (
        lambda g, _: g.grad_norm(array.array("f", [1, 2])),
        "grads is an array.array; expected an array; pass np.asarray(grads, np.float32)",
    ),
    "an array.array in a list": (
        lambda g, _: g.clip_by_global_norm([array.array("f", [1, 2])], 1.0),
        "grads[0] is an array.array; expected an array; pass np.asarray(grads[0], np.float32)",
    ),
    "an array.array as data": (
        lambda g, _: g.layer_norm(array.array("f", [1, 2])),
        "x is an array.array; expected an array; pass np.asarray(x, np.float32)",
    ),
    "a memoryview": (
        lambda g, _: g.grad_norm(memoryview(b"1234")),
        "grads is a memoryview; expected an array; pass np.asarray(grads, np.float32)",
    ),
    "a word": (lambda g, _: g.grad_norm("gradients"), "grads is a str; expected an array"),
    "a parameter": (lambda g, a: g.grad_norm([a.p]), "pass grads[0].grad, or grads_of(parameters)"),
    "parameters in a dict": (
        lambda g, a: g.clip_grad_norm({"w": a.p}, 1.0),
        "pass grads['w'].grad, or grads_of(parameters)",
    ),
    "a parameter that is zeroed": (lambda g, a: g.zero_grad(a.p), "pass grads.grad, or grads_of"),
    "a model": (lambda g, _: g.grad_norm(Model()), "pass grads_of(model.parameters())"),
    "a model's parameters": (lambda g, _: g.grads_of(Model()), "pass model.parameters()"),
    "names with parameters": (
        lambda g, a: g.grad_norm([("w", a.p)]),
        "pass named_grads_of(pairs) if these are (name, parameter) pairs",
    ),
    "a generator that was read": (
        lambda g, a: (lambda again: (list(again), g.grad_norm(again)))(x for x in [a.x]),
        "has been read before, and gives nothing more; pass a list",
    ),
    "accumulate_grad of dicts": (
        lambda g, a: g.accumulate_grad({"w": a.c}, {"w": a.c}),
        "buffer is a dict; expected an array; pass containers to accumulate_grads",
    ),
    "accumulate_grad_v2 of lists": (
        lambda g, a: g.accumulate_grad_v2([a.c], [a.c]),
        "buffer is a list; expected an array; pass containers to accumulate_grads",
    ),
    "a shape by position": (
        lambda g, a: g.layer_norm(a.x, (6,), a.c, a.c),
        "layer_norm() takes no shape by position, and got (6,); leave it out and pass axis=-1",
    ),
    "a shape alone": (
        lambda g, a: g.rms_norm(a.x, (4, 6)),
        "got (4, 6); leave it out and pass axis=-2",
    ),
    "a list as a shape": (lambda g, a: g.layer_norm(a.x, [6]), "got [6]; leave it out and pass"),
    "a width by position": (
        lambda g, a: g.layer_norm(a.x, 6),
        "got 6; leave it out and pass axis=-1,",
    ),
    "an axis by position": (
        lambda g, a: g.rms_norm(a.x, -2),
        "got -2; leave it out and pass axis=-2",
    ),
    "a shape behind the residual": (
        lambda g, a: g.add_layer_norm(a.x, a.x, (6,), a.c),
        "add_layer_norm() takes no shape by position",
    ),
    "eps by position": (
        lambda g, a: g.layer_norm(a.x, a.c, a.c, 1e-5),
        "takes 3 arguments by position, x, scale, bias, and by name axis, eps",
    ),
    "running statistics by position": (
        lambda g, a: g.batch_norm(a.image, a.m[:3], a.m[:3], a.m[:3], a.m[:3]),
        "by name channel_axis, eps, running_mean, running_var",
    ),
    "two limits": (
        lambda g, a: g.clip_grad_value([a.x], -1, 1),
        "takes 2 arguments by position, grads, clip_value",
    ),
    "the first axis": (
        lambda g, a: g.layer_norm(a.x, a.c, axis=0),
        "expected (4, 6), the normalised dimensions of x, from axis=0 on (axis=-1: the last alone)",
    ),
    "the second axis of three": (
        lambda g, a: g.rms_norm(a.image[0], a.m, axis=1),
        "scale has shape (4,); expected (4, 4), the normalised dimensions of x, from axis=1 on",
    ),
    "a scale of the batch's length": (
        lambda g, a: g.layer_norm(a.x, a.m),
        "scale has shape (4,); expected (6,), the normalised dimensions of x",
    ),
    "statistics of columns": (
        lambda g, a: g.layer_norm_grad(a.x, a.x, a.c, a.m, a.c),
        "inv_std has shape (6,); expected (4,), one number per row of x",
    ),
    "a part of dy": (
        lambda g, a: g.rms_norm_grad(a.x[:2], a.x, a.c, a.m),
        "dy has shape (2, 6); expected (4, 6), the shape of x",
    ),
    "a name alone": (
        lambda g, a: g.layer_norm_grad(a.x, a.x, None, a.m, a.m, wanted="dx"),
        "wanted must be a tuple of names, such as ('dx',), not 'dx'",
    ),
    "no limit": (
        lambda g, a: g.clip_by_global_norm([a.x]),
        "missing 1 required positional argument: 'max_norm'",
    ),
    "a matrix norm": (lambda g, a: g.grad_norm([a.x], "fro"), "norm_type must be a real number"),
    "PyTorch's order of numbers": (
        lambda g, a: g.clip_grads_with_norm([a.x], 1.0, 2.0),
        "takes numbers by keyword, because other libraries have them in another order: pass norm=",
    ),
    "another container of parameters": (
        lambda g, a: g.clip_by_adaptive_norm({"w": a.x}, {"v": a.x}, axis=1),
        "params has the keys 'v', but grads has the keys 'w'",
    ),
    "a number to write a norm into": (
        lambda g, a: g.grad_norm([a.x], out=0.0),
        "out must be an array or a tuple of 1 (None for what may be allocated), not float",
    ),
    "a list as a norm": (
        lambda g, _: g.step_verdict([1.0]),
        "norm must be a real number, not list",
    ),
    "ord": (lambda g, a: g.grad_norm([a.x], ord=2), "has no argument 'ord'; pass norm_type"),
    "axis of a norm": (lambda g, a: g.grad_norm([a.x], axis=0), "'axis'; leave it out: a norm is"),
    "keepdims": (lambda g, a: g.grad_norm([a.x], keepdims=True), "'keepdims'; leave it out"),
    "axis of channels": (lambda g, a: g.batch_norm(a.image, axis=-1), "'axis'; pass channel_axis"),
    "data_format": (
        lambda g, a: g.batch_norm(a.image, data_format="channels_last"),
        "'data_format'; pass channel_axis: 1 for channels first, -1 for channels last",
    ),
    "epsilon": (lambda g, a: g.layer_norm(a.x, epsilon=1e-3), "'epsilon'; pass eps"),
    "gamma": (lambda g, a: g.layer_norm(a.x, gamma=a.c), "'gamma'; pass scale"),
    "beta": (lambda g, a: g.layer_norm(a.x, a.c, beta=a.c), "'beta'; pass bias"),
    "weight": (lambda g, a: g.layer_norm(a.x, weight=a.c), "'weight'; pass scale"),
    "training": (lambda g, a: g.batch_norm(a.x, training=False), "batch_norm_inference the other"),
    "normalized_shape": (lambda g, a: g.rms_norm(a.x, normalized_shape=6), "pass axis, the first"),
    "clipnorm": (lambda g, a: g.clip_by_global_norm([a.x], clipnorm=1.0), "'clipnorm'; pass max_n"),
    "error_if_nonfinite": (
        lambda g, a: g.clip_by_global_norm([a.x], 1.0, error_if_nonfinite=True),
        "'error_if_nonfinite'; pass nonfinite=\"raise\"",
    ),
    "foreach": (lambda g, a: g.grad_norm([a.x], foreach=True), "'foreach'; leave it out"),
    "the variance": (
        lambda g, a: g.layer_norm_grad(a.x, a.x, a.c, a.m, var=a.m),
        "'var'; pass inv_std, 1 / sqrt(var + eps)",
    ),
}
# Where gradients are written in place, which JAX's cannot be.
WRITTEN = {
    "a parameter that is added": (
        lambda g, a: g.accumulate_grads([a.c], [a.p]),
        "pass grads[0].grad, or grads_of(parameters)",
    ),
    "other lengths": (
        lambda g, a: g.keep_if(True, [a.x, a.x], [a.x]),
        "must have the same structure as",
    ),
    "integers as a buffer": (lambda g, a: g.accumulate_grad(a.ints, a.x), cast("buffer")),
    "a wide addend": (
        lambda g, a: g.accumulate_grad(a.d, a.c),
        'which would lose precision; accepted: float16, or any with casting="same_kind"',
    ),
    "integers that are zeroed": (lambda g, a: g.zero_grad([a.ints]), cast("grads[0]")),
    "integers as found_inf": (
        lambda g, a: g.grad_norm([a.c], found_inf=a.ints[0, 0]),
        "found_inf has dtype int32, and is written to; pass zeros of float32",
    ),
    "a dict of averages, a list of parameters": (
        lambda g, a: g.ema_update({"w": a.c}, [a.c], 0.9),
        "params must have the same structure as averages",
    ),
    "numbers as parameters": (
        lambda g, a: g.ema_update([a.c], [1.0], 0.9),
        "params[0] is a float; expected an array; pass np.asarray(params, np.float32)",
    ),
    "min and max": (lambda g, a: g.clip_grad_value([a.x], min=-1, max=1), "'min'; pass clip_value"),
}
COMPLEX = {
    "numpy": "pass grads[0].view(np.float32), its real and imaginary parts as elements",
    "torch": "grads[0] has dtype torch.complex64; accepted: float16, bfloat16, float32, float64; "
    "pass torch.view_as_real of it",
    "jax": "pass grads[0].view(np.float32), its real and imaginary parts as elements",
}
# Of gradkit.torch, where arguments have PyTorch's names.
TORCH = {
    "integers": (lambda t, a: t.layer_norm(a.ints, (6,)), "pass input.to(torch.float32)"),
    "integers as a weight": (
        lambda t, a: t.rms_norm(a.x, (6,), a.ints[0]),
        "weight has dtype int32; accepted: float16, bfloat16, float32, float64; pass weight.to(to",
    ),
    "a wide weight": (
        lambda t, a: t.layer_norm(a.x, (6,), a.c.double()),
        "weight has dtype float64 and input float32; pass weight.to(input.dtype)",
    ),
    "a 16-bit bias": (
        lambda t, a: t.layer_norm(a.x, (6,), a.c, a.d),
        "bias has dtype float16 and weight has dtype float32; they must agree: pass "
        "bias.to(weight.dtype)",
    ),
    "a width": (
        lambda t, a: t.layer_norm(a.x, 6),
        "normalized_shape must be a tuple of the last dimensions of input, such as (6,), not int",
    ),
    "weight in the place of a shape": (
        lambda t, a: t.rms_norm(a.x, a.c),
        "must be a tuple of the last dimensions of input, such as (6,), not Tensor",
    ),
    "another shape": (
        lambda t, a: t.layer_norm(a.x, (4,)),
        "input has shape (4, 6); its last dimensions must be normalized_shape, (4,)",
    ),
    "a weight of another shape": (
        lambda t, a: t.layer_norm(a.x, (6,), a.m),
        "weight has shape (4,); expected (6,), the normalised dimensions of input",
    ),
    "a list": (
        lambda t, _: t.layer_norm([[1.0, 2.0]], (2,)),
        "input is of type list; expected a tensor; pass torch.as_tensor of it",
    ),
    "a NumPy array": (
        lambda t, a: t.group_norm(a.other, 1),
        "input is of type ndarray; expected a tensor; pass torch.as_tensor of it",
    ),
    "the groups first": (
        lambda t, a: t.group_norm(3, a.image),
        "input is of type int; expected a tensor",
    ),
    "groups that do not divide": (
        lambda t, a: t.group_norm(a.image, 2),
        "num_groups is 2; it must divide the 3 channels of input",
    ),
    "a weight of the width": (
        lambda t, a: t.batch_norm(a.image, None, None, a.c, training=True),
        "weight has shape (6,); expected (3,), one number per channel of input",
    ),
    "no statistics": (
        lambda t, a: t.batch_norm(a.image, None, None),
        "running_mean and running_var are needed if training is false",
    ),
    "another activation": (
        lambda t, a: t.gated_rms_norm(a.x, a.x, (6,), activation="relu"),
        "activation must be one of 'silu', 'swish', 'sigmoid', not 'relu'",
    ),
    "complex numbers": (lambda t, a: t.layer_norm(a.rolled, (6,)), "pass torch.view_as_real of it"),
    "a dict of parameters": (
        lambda t, a: t.clip_grad_norm_({"w": a.c}, 1.0),
        "parameters holds a str; pass model.parameters()",
    ),
    "a limit below 0": (
        lambda t, a: t.clip_grad_value_([parameter(a)], -1.0),
        "clip_value must be at least 0, not -1.0",
    ),
    "a matrix norm": (lambda t, a: t.get_total_norm([a.x], "fro"), "norm_type must be a real"),
}
# Of gradkit.jax, on JAX's arrays.
JAX = {
    "integers": (lambda j, a: j.layer_norm(a.ints), cast("x")),
    "integers as a scale": (lambda j, a: j.rms_norm(a.x, a.ints[0]), cast("scale")),
    "integers as gradients": (lambda j, a: j.grad_norm([a.ints]), cast("grads[0]")),
    "a list": (lambda j, _: j.layer_norm([[1.0, 2.0]]), "x is a list; expected an array; pass jnp"),
    "a number": (lambda j, a: j.batch_norm(a.image, 1.0), "scale is a float; expected an array"),
    "a number's statistics": (lambda j, _: j.grad_stats({"w": 1.0}), "grads['w'] is a float; exp"),
    "another shape": (
        lambda j, a: j.accumulate_grads({"w": a.x}, {"w": a.c}),
        "grads['w'] has shape (6,); expected (4, 6), the shape of buffers['w']",
    ),
    "another state": (
        lambda j, a: j.sgd_update(a.x, a.x, a.c, lr=0.1, momentum=0.9),
        "momenta has shape (6,); expected (4, 6), the shape of params",
    ),
    "no seed": (
        lambda j, a: j.sgd_update([a.x], [a.x], lr=0.1, rounding="stochastic"),
        "rounding is 'stochastic', which needs a seed; pass the step's number",
    ),
    "a shape by position": (
        lambda j, a: j.layer_norm(a.x, (6,), a.c),
        "takes no shape by position",
    ),
    "the first axis": (lambda j, a: j.layer_norm(a.x, a.c, axis=0), "from axis=0 on (axis=-1: the"),
    "weight": (lambda j, a: j.layer_norm(a.x, weight=a.c), "'weight'; pass scale"),
    "epsilon": (lambda j, a: j.rms_norm(a.x, epsilon=1e-5), "'epsilon'; pass eps"),
    "ord": (lambda j, a: j.grad_norm([a.x], ord=2), "'ord'; pass norm_type"),
    "groups": (lambda j, a: j.group_norm(a.image, groups=3), "'groups'; pass num_groups"),
    "no copy": (
        lambda j, a: j.grad_norm([a.x], axis_name="d", replicas=0),
        "replicas must be at least 1, not 0",
    ),
    "a limit below 0": (
        lambda j, a: j.clip_by_global_norm([a.x], -1.0),
        "max_norm must be at least",
    ),
}


def parameter(a):
    torch = framework("torch")
    made = torch.nn.Parameter(a.c.clone())
    made.grad = a.c.clone()
    return made


ROWS = [
    *((library, name, *row) for library in LIBRARIES for name, row in COMMON.items()),
    *((library, name, *row) for library in LIBRARIES[:2] for name, row in WRITTEN.items()),
    *(
        (library, "complex numbers", lambda g, a: g.grad_norm([a.rolled]), COMPLEX[library])
        for library in LIBRARIES
    ),
    *(
        (library, "two libraries", lambda g, a: g.grad_norm([a.x, a.other]), "grads[1] is a numpy")
        for library in LIBRARIES[1:]
    ),
    *(("gradkit.torch", name, *row) for name, row in TORCH.items()),
    *(("gradkit.jax", name, *row) for name, row in JAX.items()),
]


@pytest.mark.parametrize(
    ("library", "call", "said"),
    [pytest.param(a, *row, id=f"{a}: {name}") for a, name, *row in ROWS],
)
def test_a_mistake_is_answered(monkeypatch, library, call, said):
    monkeypatch.delenv("GRADKIT_TRACEBACKS", raising=False)
    module = gradkit
    if library.startswith("gradkit"):
        name = library.partition(".")[2]
        framework(name)
        module = pytest.importorskip(library)
        library = name
    if library == "torch":
        said = re.sub(r"\.astype\(np\.(\w+)\)", r".to(torch.\1)", said).replace("astype", "to")
    given = arrays(library)
    before = {name: np.array(value) for name, value in vars(given).items() if name != "p"}
    with pytest.raises((TypeError, ValueError)) as caught:
        call(module, given)
    assert said in str(caught.value)
    assert len(own_frames(caught.value)) <= 3
    for name, value in before.items():
        np.testing.assert_array_equal(np.array(getattr(given, name)), value)


def test_jax_refuses_numbers_that_all_refuse():
    """But for the step, which is the number of those before."""
    jnp, ours = framework("jax").numpy, pytest.importorskip("gradkit.jax")
    factory = Factory(SimpleNamespace(asarray=jnp.asarray, has_read_only=False))
    tried = 0
    for cell in chain.from_iterable(bad_input.ROWS.values()):
        call = getattr(cell, "call", None)
        about = call and re.match(r"(\w+) (must|is|in)\b", call.message)
        if not about or call.function not in ours.__all__:
            continue
        function = getattr(ours, call.function)
        with suppress(NoSuchArrayError):
            given = call.arguments(factory)
            if about[1] in given and given.keys() <= signature(function).parameters.keys():
                given |= {"step": -1} if given.get("step") == 0 else {}
                with pytest.raises((TypeError, ValueError), match=about[1]):
                    function(**given)
                tried += 1
    assert tried > 200


def test_casts_of_tensorflows_tensors(tf):
    x, scale = tf.ones((2, 3)), tf.ones(3, tf.float64)
    with pytest.raises(TypeError, match=r"pass tf\.cast\(x, tf\.float32\)$"):
        gradkit.layer_norm(tf.ones(3, tf.int32))
    with pytest.raises(TypeError, match=r"pass tf\.cast\(grads\['w'\], tf\.float32\)$"):
        gradkit.grad_norm({"w": tf.ones(3, tf.int32)})
    with pytest.raises(TypeError, match=r"^grads\[0\] has dtype string; accepted: float16"):
        gradkit.grad_norm([tf.constant("no memory that others read")])
    with pytest.raises(TypeError, match=r"pass tf\.cast\(scale, x\.dtype\) \("):
        gradkit.layer_norm(x, scale)


def test_all_frames_are_there_if_they_are_asked_for(monkeypatch):
    monkeypatch.setenv("GRADKIT_TRACEBACKS", "full")
    with pytest.raises(TypeError, match="x has dtype int64") as caught:
        gradkit.layer_norm(np.ones(3, np.int64))
    assert len(own_frames(caught.value)) > 5


def test_frames_of_others_stay(monkeypatch):
    """An error of a caller's own function is theirs, with all frames that led there."""
    monkeypatch.delenv("GRADKIT_TRACEBACKS", raising=False)

    def gradients():
        yield np.ones(3)
        raise ValueError("no gradient")

    with pytest.raises(ValueError, match="no gradient") as caught:
        gradkit.grad_norm(gradients())
    assert [f.name for f in traceback.extract_tb(caught.value.__traceback__)][-1] == "gradients"
    assert len(own_frames(caught.value)) <= 3
