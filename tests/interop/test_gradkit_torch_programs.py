"""Programs of PyTorch's transformations, drawn at random, around norms and PyTorch's own.

A program is a list of transformations, the innermost first. Each takes a function of tensors that
returns a tuple of tensors, and makes another one, whose arguments may have further axes.
"""

import re
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, note, reject, settings
from hypothesis import strategies as st
from torch.func import functional_call
from torch.nn import functional
from torch.utils.checkpoint import checkpoint as checkpointed

import gradkit.torch as ours

pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler's own
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 0.2}


class Base(NamedTuple):
    """The function that a program transforms. ``free``: the arguments that may require grad."""

    name: str
    given: list[torch.Tensor]
    ours: Any
    formula: Any
    free: tuple[int, ...]


def as_tuple(made):
    return made if isinstance(made, tuple) else (made,)


def values(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# What programs begin with


def rows(name, offset, eps):
    """A norm over rows, and PyTorch's. Its parameters, by name, follow the data."""

    def own(*data, **parameters):
        how = {"scale_offset": offset} if "layer" not in name or "invertible" not in name else {}
        return getattr(ours, name)(*data, (6,), **parameters, eps=eps, **how)

    def formula(x, other=None, *, weight, bias=None):
        s = x + other if "add" in name else x
        weight = None if weight is None else weight + offset
        y = functional.rms_norm(s, (6,), weight, eps)
        if "layer" in name:
            y = functional.layer_norm(s, (6,), weight, bias, eps)
        y = y * functional.silu(other) if "gated" in name else y
        return (y, s) if "add" in name else y

    return own, formula


def by_channels(name):
    def own_or_theirs(f, x, mean=None, var=None, *, weight, bias):
        if name == "group_norm":
            return f.group_norm(x, 2, weight, bias)
        if name == "instance_norm":
            return f.instance_norm(x, weight=weight, bias=bias)
        if name == "inference":
            return f.batch_norm(x, mean, var, weight, bias)
        if mean is None:
            return f.batch_norm(x, None, None, weight, bias, True)
        mean, var = mean.clone(), var.clone()
        return f.batch_norm(x, mean, var, weight, bias, True, 0.25), mean, var

    return partial(own_or_theirs, ours), partial(own_or_theirs, functional)


ROWS = "layer_norm", "invertible_layer_norm", "rms_norm", "invertible_rms_norm"
ROWS += "add_layer_norm", "add_rms_norm", "gated_rms_norm"
CHANNELS = "group_norm", "instance_norm", "batch_norm", "inference", "running"


@st.composite
def norms(draw):
    """A norm with or without weight and bias, of data and parameters of some dtypes."""
    name = draw(st.sampled_from(ROWS + CHANNELS))
    data, parameter = draw(
        st.sampled_from(
            [(torch.float64,) * 2, (torch.float32,) * 2, (torch.bfloat16, torch.float32)]
        )
    )
    if name in ROWS:
        twice = 2 if "add" in name or "gated" in name else 1
        shapes = [(4, 3, 6)] * twice, (6,)
        labels = ["weight", "bias"] if "layer" in name else ["weight"]
        fixed = name == "invertible_layer_norm"
        offset = 0.0 if fixed else draw(st.sampled_from([0.0, 1.0]))
        own, formula = rows(name, offset, draw(st.sampled_from([1e-5, 0.5])))
    else:
        known = [(4,)] * 2 if name in ("inference", "running") else []
        shapes, labels, offset = ([(3, 4, 5), *known], (4,)), ["weight", "bias"], 0.0
        own, formula = by_channels(name)
    labels = [own for own in labels if draw(st.integers(0, 3)) or (offset and own == "weight")]
    tensors = [values(shape, k).to(data) for k, shape in enumerate(shapes[0])]
    if "add" in name:  # a residual of float32 beside narrower data
        tensors[1] = tensors[1].to(draw(st.sampled_from([data, parameter])))
    if name in CHANNELS:
        tensors[1:] = [t.abs().to(parameter) + 0.5 for t in tensors[1:]]
    tensors += [values(shapes[1], 7 + k).abs().add(0.5).to(parameter) for k in range(len(labels))]
    count = len(shapes[0])

    def filled(norm, *given):
        absent = dict.fromkeys(("weight", "bias")[: 2 if "rms" not in name else 1])
        return as_tuple(
            norm(*given[:count], **absent | dict(zip(labels, given[count:], strict=True)))
        )

    def rounded(*given):
        kinds = data, *(t.dtype for t in given[1:count])
        made = filled(formula, *(t.double() for t in given))
        return tuple(y.to(kinds[k]) for k, y in enumerate(made))

    constant = range(1, 3) if name in ("inference", "running") else ()
    free = tuple(k for k in range(len(tensors)) if k not in constant)
    return Base(name, tensors, partial(filled, own), rounded, free)


# Transformations: of some arguments, a function of functions and the arguments of what it makes


def some(draw, items):
    """Not none of them."""
    return sorted(draw(st.sets(st.sampled_from(sorted(items)), min_size=1)))


def vmap(draw, base):
    size, out = draw(st.integers(1, 3)), draw(st.sampled_from([0, -1]))
    places = range(len(base.given))
    chosen = some(draw, places)
    if base.name == "running":
        # What is written in place must have the axis too, and PyTorch's own forgets to write it
        # if weights have it and the input does not.
        chosen = sorted({*chosen, 0, 1, 2})
    axes = [draw(st.integers(0, t.ndim)) for t in base.given]
    axes = tuple(axes[k] if k in chosen else None for k in places)
    tensors = [
        t if axis is None else torch.stack([t * (1 + k / 2) for k in range(size)], axis)
        for t, axis in zip(base.given, axes, strict=True)
    ]
    how = {"in_dims": axes, "out_dims": out, "chunk_size": draw(st.sampled_from([None, 2]))}
    return lambda f: torch.vmap(f, **how), tensors


def loss_of(f, used):
    def loss(*tensors):
        made = [y for y in f(*tensors) if y.is_floating_point()]
        own = [made[k % len(made)].double() for k in used]
        return sum((y**2 * torch.linspace(-1, 2, y.numel()).view(y.shape)).sum() for y in own)

    return loss


def grad(draw, base):
    which, used = tuple(some(draw, base.free)), draw(st.sampled_from([(0,), (0, 1), (-1,)]))
    kind = draw(st.sampled_from(["grad", "grad_and_value", "jacrev"]))

    def wrap(f):
        if kind == "grad_and_value":
            both = torch.func.grad_and_value(loss_of(f, used), which)
            return lambda *tensors: (*both(*tensors)[0], both(*tensors)[1])
        loss = loss_of(f, used)
        if kind == "jacrev":
            return torch.func.jacrev(lambda *a: torch.stack([loss(*a), f(*a)[0].sum()]), which)
        return torch.func.grad(loss, which)

    return wrap, base.given


def jvp(draw, base):  # noqa: ARG001
    def wrap(f):
        return lambda x, *rest: torch.func.jvp(lambda x: loss_of(f, (0,))(x, *rest), (x,), (x,))

    return wrap, base.given


def checkpoint(draw, base):
    again = draw(st.booleans())
    return lambda f: lambda *given: checkpointed(f, *given, use_reentrant=again), base.given


def compiled(draw, base):
    how = {"backend": draw(st.sampled_from(["eager", "aot_eager"])), "fullgraph": True}
    how["dynamic"] = draw(st.sampled_from([None, True]))
    return lambda f: torch.compile(f, **how), base.given


class Module(torch.nn.Module):
    """A function, some of whose arguments are parameters."""

    def __init__(self, function, parameters=()):
        super().__init__()
        self.function = function
        self.own = torch.nn.ParameterList(parameters)

    def forward(self, *tensors):
        return self.function(*tensors, *self.own)


def exported(draw, base):
    decomposed = draw(st.booleans())

    def wrap(f):
        def run(*tensors):
            program = torch.export.export(Module(f), tensors)
            if decomposed:
                program = program.run_decompositions(ours.decompositions())
            return program.module()(*tensors)

        return run

    return wrap, base.given


def functional_called(draw, base):
    own = draw(st.integers(0, len(base.given) - 1))

    def wrap(f):
        def run(*tensors):
            first, last = tensors[:own], tensors[own:]
            module = Module(f, [torch.nn.Parameter(torch.zeros_like(t)) for t in last])
            return functional_call(module, {f"own.{k}": t for k, t in enumerate(last)}, first)

        return run

    return wrap, base.given


def within(draw, base):
    """Contexts that change no numbers."""
    context = draw(
        st.sampled_from(
            [
                partial(torch.autocast, "cpu", torch.bfloat16),
                torch.no_grad,
                torch.autograd.graph.save_on_cpu,
                torch.enable_grad,
            ]
        )
    )

    def wrap(f):
        def run(*tensors):
            with context():
                return f(*tensors)

        return run

    return wrap, base.given


def twice(draw, base):  # noqa: ARG001
    """Two calls, the second of which is on other numbers, before either's backward pass."""

    def wrap(f):
        def run(*tensors):
            return *f(*tensors), *f(*(t * 1.5 for t in tensors))

        return run

    return wrap, base.given


def tied(draw, base):
    """One tensor in the place of another one."""
    pairs = [
        (j, k) for j, a in enumerate(base.given) for k, b in enumerate(base.given)
        if j < k and a.shape == b.shape and a.dtype == b.dtype
    ]  # fmt: skip
    if not pairs:
        return lambda f: f, base.given
    j, k = draw(st.sampled_from(pairs))
    return lambda f: lambda *given: f(*given[:k], given[j], *given[k + 1 :]), base.given


LAYOUTS = {
    "as it is": (lambda t: t.clone(), lambda t: t),
    "strided": (lambda t: torch.stack([t, t], -1), lambda t: t[..., 0]),
    "transposed": (lambda t: t.movedim(0, -1).contiguous(), lambda t: t.movedim(-1, 0)),
    "expanded": (lambda t: t[:1].clone(), None),
    "offset": (lambda t: torch.cat([t[:1], t]), lambda t: t[1:]),
}


def laid_out(draw, tensor):
    """A leaf, and what makes a view of it with the tensor's shape."""
    name = draw(st.sampled_from(sorted(LAYOUTS))) if tensor.ndim else "as it is"
    make, view = LAYOUTS[name]
    return make(tensor), view or (lambda t: t.expand(tensor.shape))


INSIDE = [vmap, grad, functional_called, within, twice, tied]
# PyTorch has none of these inside of a transform of torch.func.
OUTSIDE = [checkpoint, compiled, exported, within, twice, jvp]


def arriving(y, kind):
    """A loss whose gradient is expanded, dense or transposed."""
    if kind == "sum":
        return y.double().sum()
    weights = torch.linspace(-1, 2, y.numel(), dtype=torch.float64).view(
        y.T.shape if kind == "T" else y.shape
    )
    return ((y.T if kind == "T" else y).double() * weights).sum()


@given(data=st.data())
@settings(max_examples=3 * settings().max_examples)
def test_programs(data):
    """Of what PyTorch itself refuses, nothing is said; ours refuse what is no first derivative."""
    base = data.draw(norms())
    program = data.draw(st.lists(st.sampled_from(INSIDE), max_size=3, unique=True))
    outside = [jvp] if grad in program else OUTSIDE
    program += data.draw(st.lists(st.sampled_from(outside), max_size=1))
    note(f"{base.name}: {[transform.__name__ for transform in program]}")
    own, formula = base.ours, base.formula
    for transform in program:
        wrap, tensors = transform(data.draw, base)
        own, formula = wrap(own), wrap(formula)
        base = base._replace(given=tensors)
    leaves, views = zip(*(laid_out(data.draw, t) for t in base.given), strict=True)
    needed = [k in base.free and data.draw(st.booleans()) for k in range(len(leaves))]
    kind, unused = data.draw(st.sampled_from(["sum", "dense", "T"])), data.draw(st.booleans())

    @torch.enable_grad()  # a failed export leaves it off
    def passes(f):
        torch._dynamo.reset()
        own = [t.clone().requires_grad_(n) for t, n in zip(leaves, needed, strict=True)]
        made = f(*(view(t) for view, t in zip(views, own, strict=True)))
        total = [y for y in made if y.requires_grad][: 1 if unused else None]
        if total:
            sum(arriving(y, kind) for y in total).backward()
        return [*made, *(t.grad for t in own)]

    try:
        expected = passes(formula)
    except (RuntimeError, ValueError, NotImplementedError, torch._dynamo.exc.TorchDynamoException):
        reject()
    derivatives = program.count(grad) + any(needed)
    may_refuse = derivatives > 1 or jvp in program
    try:
        found = passes(own)
    except (NotImplementedError, AssertionError) as error:
        # The latter is PyTorch's own, from its rule for a vmap of functions, in forward mode.
        if may_refuse and re.search("gradkit|flat_bdims", str(error)):
            return
        raise
    near = TOLERANCE[base.given[0].dtype]
    for got, ref in zip(found, expected, strict=True):
        assert (got is None) == (ref is None)
        if got is not None:
            assert got.requires_grad >= ref.requires_grad  # results of one call have one answer
            atol = near * max(1, ref.detach().abs().amax().item())
            torch.testing.assert_close(got, ref, rtol=0, atol=atol)
