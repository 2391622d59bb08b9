"""Norms of PyTorch's tensors: calls of ``gradkit.torch``'s functions, and of its operators."""

from functools import partial

from tests.operations import OPERATIONS

from .libraries import framework

torch = framework("torch")
ours = framework("gradkit.torch")
export = framework("gradkit.torch.export")

OPERATORS = torch.ops.gradkit


def random(*shape, dtype=torch.float64, grad=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return values.requires_grad_(grad)


def batch_norm(x, weight=None, bias=None):
    return ours.batch_norm(x, None, None, weight, bias, True)


def frozen_batch_norm(x, weight=None, bias=None):
    return ours.batch_norm(x, MEAN.to(x), VAR.to(x), weight, bias)


def instance_norm(x, weight=None, bias=None):
    return ours.instance_norm(x, None, None, weight, bias)


def tracking_instance_norm(x, weight=None, bias=None):
    return ours.instance_norm(x, MEAN.to(x).clone(), VAR.to(x).clone(), weight, bias)


def gemma(function):
    return lambda *args: function(*args, scale_offset=1.0)


def gate_first(*args):
    how = {"activation": "sigmoid", "norm_before_gate": False, "scale_offset": 1.0}
    return ours.gated_rms_norm(*args, **how)


X, W, B = random(4, 5, 6), random(6, seed=1), random(6, seed=2)
IMAGES, CW, CB = random(3, 4, 2, 3), random(4, seed=1), random(4, seed=2)
MEAN, VAR = random(4, grad=False, seed=3), random(4, grad=False, seed=4).square() + 0.1
R = random(4, 5, 6, seed=5)
CASES = {
    "layer_norm": (ours.layer_norm, (X, (6,), W, B)),
    "layer_norm, weight": (ours.layer_norm, (X, (6,), W)),
    "layer_norm, bias": (ours.layer_norm, (X, (6,), None, B)),
    "layer_norm, neither": (ours.layer_norm, (X, (5, 6))),
    "invertible_layer_norm": (ours.invertible_layer_norm, (X, (6,), W, B)),
    "invertible_layer_norm, weight": (ours.invertible_layer_norm, (X, (6,), W)),
    "invertible_layer_norm, bias": (ours.invertible_layer_norm, (X, (6,), None, B)),
    "rms_norm": (ours.rms_norm, (X, (6,), W)),
    "invertible_rms_norm": (ours.invertible_rms_norm, (X, (6,), W)),
    "invertible_rms_norm, no weight": (ours.invertible_rms_norm, (X, (5, 6))),
    "invertible_rms_norm, scale_offset": (gemma(ours.invertible_rms_norm), (X, (6,), W)),
    "rms_norm, no weight": (ours.rms_norm, (X, (5, 6))),
    "layer_norm, scale_offset": (gemma(ours.layer_norm), (X, (6,), W, B)),
    "rms_norm, scale_offset": (gemma(ours.rms_norm), (X, (6,), W)),
    "gated_rms_norm": (ours.gated_rms_norm, (X, R, (6,), W)),
    "gated_rms_norm, no weight": (ours.gated_rms_norm, (X, R, (5, 6))),
    "gated_rms_norm, gate first": (gate_first, (X, R, (6,), W)),
    "add_layer_norm": (ours.add_layer_norm, (X, R, (6,), W, B)),
    "add_layer_norm, bias": (ours.add_layer_norm, (X, R, (6,), None, B)),
    "add_layer_norm, scale_offset": (gemma(ours.add_layer_norm), (X, R, (6,), W, B)),
    "add_layer_norm, neither": (ours.add_layer_norm, (X, R, (5, 6))),
    "add_rms_norm": (ours.add_rms_norm, (X, R, (6,), W)),
    "add_rms_norm, scale_offset": (gemma(ours.add_rms_norm), (X, R, (6,), W)),
    "add_rms_norm, no weight": (ours.add_rms_norm, (X, R, (5, 6))),
    "group_norm": (ours.group_norm, (IMAGES, 2, CW, CB)),
    "group_norm, weight": (ours.group_norm, (IMAGES, 2, CW)),
    "group_norm, bias": (ours.group_norm, (IMAGES, 1, None, CB)),
    "group_norm, neither": (ours.group_norm, (IMAGES, 4)),
    "instance_norm": (instance_norm, (IMAGES, CW, CB)),
    "instance_norm, tracking": (tracking_instance_norm, (IMAGES, CW, CB)),
    "frozen_batch_norm": (frozen_batch_norm, (IMAGES, CW, CB)),
    "frozen_batch_norm, weight": (frozen_batch_norm, (IMAGES, CW)),
    "frozen_batch_norm, bias": (frozen_batch_norm, (IMAGES, None, CB)),
    "frozen_batch_norm, neither": (frozen_batch_norm, (IMAGES,)),
    "batch_norm": (batch_norm, (IMAGES, CW, CB)),
    "batch_norm, weight": (batch_norm, (IMAGES, CW)),
    "batch_norm, bias": (batch_norm, (IMAGES, None, CB)),
    "batch_norm, neither": (batch_norm, (IMAGES,)),
}
ONE_OF_EACH = [name for name in CASES if "," not in name]


def of_tensors(name, dtype=torch.float64):
    """A case as a function of tensors, and those."""
    function, given = CASES[name]
    places = [k for k, each in enumerate(given) if torch.is_tensor(each)]

    def program(*tensors):
        filled = dict(zip(places, tensors, strict=True))
        return function(*(filled.get(k, each) for k, each in enumerate(given)))

    return program, [given[k].detach().to(dtype).requires_grad_() for k in places]


# Operators, with more than one value of each argument


plain = partial(random, dtype=torch.float32, grad=False)


def vector(seed, *shape):
    return plain(*(shape or (6,)), seed=seed).abs() + 0.5


NORMS = {overload._schema.name.partition("::")[2]: overload for overload in export.replacements()}
PER_SAMPLE = ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm")

# The first call of each norm, by the names of arguments. Of channels there are as many as columns.
FIRST = {
    "x": plain(2, 6, 3, 6),
    "residual": plain(2, 6, 3, 6, seed=1),
    "gate": plain(2, 6, 3, 6, seed=2),
    "scale": vector(3),
    "bias": vector(4),
    "running_mean": vector(5),
    "running_var": vector(6),
    "mean": vector(7),
    "var": vector(8),
    "axis": -1,
    "eps": 1e-5,
    "scale_offset": 0.0,
    "activation": "silu",
    "norm_before_gate": True,
    "num_groups": 2,
    "momentum": 0.25,
    "channel_axis": 1,
}
# What the others have in its place.
OTHERS = [
    {"x": plain(6, 3, 6, 2).permute(3, 2, 1, 0)},  # channels last
    {"x": plain(6, 3, 6, 2).bfloat16().permute(3, 0, 1, 2)},
    {"residual": plain(2, 6, 6, 3, seed=1).mT},
    {"gate": plain(2, 6, 3, 12, seed=2)[..., ::2]},
    {"x": plain(0, 6, 3, 6)},
    {"bias": None},
    {"scale": None, "bias": None},
    {"scale": vector(3, 2, 1, 1, 6), "bias": vector(4, 2, 1, 1, 6), "scale_offset": 1.0},
    {"scale": vector(3, 2, 6, 1, 6), "bias": None},
    {"axis": 2, "scale": vector(3, 3, 6), "bias": vector(4, 3, 6)},
    {"eps": 0.5},
    {"eps": 1},
    {"scale_offset": 1.0},
    {"activation": "swish"},
    {"activation": "swish", "norm_before_gate": False},
    {"activation": "sigmoid"},
    {"norm_before_gate": False, "scale_offset": 1.0},
    {"num_groups": 6},
    {"momentum": 0.0},
    {"momentum": 1},
    {"running_mean": None, "running_var": None, "momentum": 0.1},
    {"running_mean": vector(5).double(), "running_var": vector(6).double()},
    {"mean": vector(7) * 3},
    {"var": vector(8) * 3},
    {"channel_axis": -1},
    {"channel_axis": 3, "x": plain(6, 3, 6, 2).permute(3, 2, 1, 0)},
]


FIXED = ("invertible_layer_norm", "scale_offset")  # which has no gradient
DIFFERENTIABLE = {"x", "residual", "gate", "scale", "bias"}


def names_of(name):
    return [argument.name for argument in NORMS[name]._schema.arguments]


def calls_of(name):
    """The arguments of each call of a norm, by name; all data have the dtype of x."""
    names = {*names_of(name)}
    for other in ({}, *OTHERS):
        sampled = other.get("scale") is not None and other["scale"].ndim == 4
        if (sampled and name not in PER_SAMPLE) or (other and not other.keys() & names):
            continue
        if not other.keys() <= names | {"scale", "bias", "scale_offset"}:
            continue
        if any((name, key) == FIXED for key in other):
            continue
        given = FIRST | other
        given |= {
            data: given[data][: len(given["x"])].to(given["x"].dtype)
            for data in ("residual", "gate")
        }
        yield {key: given[key] for key in names_of(name)}


def leaf(key, value):
    """A new tensor with an argument's strides, or what else it is."""
    if not torch.is_tensor(value):
        return value
    return value.clone().requires_grad_(key in DIFFERENTIABLE)


def operator_calls():
    """Names and arguments of forward passes, and of the gradient of each.

    What arrives is dense, expanded, or as x lies.
    """
    calls = [(name, given) for name in NORMS for given in calls_of(name)]
    for k, (name, given) in enumerate(calls):
        yield name, tuple(map(leaf, given.keys(), given.values()))
        made, x = NORMS[name](*given.values()), given["x"]
        results = OPERATIONS[name.removeprefix("invertible_")].results
        made = dict(zip(results, (made,) if torch.is_tensor(made) else made, strict=False))
        dense = random(*x.shape, dtype=x.dtype, grad=False, seed=9)
        arriving = dense, dense[..., :1].expand(x.shape), torch.empty_like(x).copy_(dense)
        known = given | made | {"x": made.get("s", x), "dy": arriving[k % 3]}
        known["ds"] = arriving[(k + 1) % 3] if k % 2 or "s" in made else None
        gradient = f"{name.removeprefix('add_')}_grad"
        labels = [each.name for each in getattr(OPERATORS, gradient).default._schema.arguments]
        yield gradient, tuple(known[label] for label in labels if label in known)
