"""Every public function that computes: the one table over which tests of all of them iterate.

A row begins with the signature that every release keeps. What arguments and results are follows
from their names: their roles are the same in all functions. ``Operation.arguments`` makes small
arguments that are right; tests say which arrays, dtypes and shapes.
"""

import gc
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

import gradkit
from gradkit._calls.record import Call
from gradkit._open.arguments import Arguments
from gradkit._open.results import Results
from tests import strategies as draw_
from tests.problems import BATCH_TYPES, LAYER_TYPES, Problem, make
from tests.tolerances import DTYPES

Shape = tuple[int, ...]
Types = tuple[str, str, str]  # of data, statistics and parameters
Make = Callable[[str, Shape, str], Any]  # an array by its name, shape and dtype

R, C = 4, 6  # rows and columns of every norm's data
GROUPS = 3
FLOAT32, FLOAT64 = LAYER_TYPES[:2]
POWER = 3.5  # NVIDIA's pow is not the C library's


class Kind(NamedTuple):
    """A dtype and a shape, or whose they are."""

    dtype: str
    shape: str | Shape


DATA, STATISTIC, PARAMETER = (Kind(of, of) for of in ("data", "statistic", "parameter"))
NUMBER = Kind("float64", ())
LIST = Kind("data", "lists")  # of arrays like those of the operation's other lists
KINDS = {
    **dict.fromkeys(("dy", "x", "y", "s", "residual", "ds", "dx"), DATA),
    **dict.fromkeys(("buffer", "grad", "compensation"), DATA),
    **dict.fromkeys(("gate", "dgate"), DATA),
    **dict.fromkeys(("mean", "var", "inv_std"), STATISTIC),
    **dict.fromkeys(("running_mean", "running_var"), STATISTIC),
    **dict.fromkeys(("scale", "bias", "dscale", "dbias"), PARAMETER),
    "state": Kind("float64", (3,)),
    "norm": NUMBER,
}
LISTS = ("grads", "params", "buffers", "averages", "new", "old", "moments", "variances", "momenta")
POSITIVE = (
    "scale",
    "var",
    "inv_std",
    "running_var",
    "state",
    "norm",
    "variances",
)
_RECORDS = {record.__name__: record for record in Call.__subclasses__()}


@dataclass(frozen=True)
class Operation:
    """A row: what is true of a public function beyond its record."""

    signature: str  # what every release keeps: further parameters are keyword-only
    family: str
    writes: str = ""  # the argument that is written in place
    # Arguments that are no arrays, and what differs from ``KINDS``.
    numbers: Mapping[str, Any] = field(default_factory=dict)
    kinds: Mapping[str, Kind] = field(default_factory=dict)
    # Further arguments, by title; ``...`` stands for an array.
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    lists: Sequence[tuple[Shape, str]] = (((3,), "data"), ((2,), "float64"))

    @property
    def name(self) -> str:
        """The function's name."""
        return self.signature.partition("(")[0]

    @property
    def function(self) -> Callable[..., Any]:
        """The public function."""
        found: Callable[..., Any] = getattr(gradkit, self.name)
        return found

    @property
    def record(self) -> type[Call] | None:
        """The record of its calls, if it has one."""
        return _RECORDS.get(self.name.title().replace("_", ""))

    @property
    def results(self) -> tuple[str, ...]:
        """Names of its results in its record."""
        return self.record.result_names if self.record else ()

    @cached_property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The function's parameters by name."""
        return inspect.signature(self.function).parameters

    @cached_property
    def arrays(self) -> tuple[str, ...]:
        """The arrays, and containers of arrays, that it takes by position."""
        known = {*KINDS, *self.kinds, *LISTS} - self.numbers.keys()
        return tuple(
            name for name, p in self.parameters.items() if name in known and p.kind < p.KEYWORD_ONLY
        )

    @property
    def optional(self) -> tuple[str, ...]:
        """Arrays that may be ``None``."""
        return tuple(name for name in self.arrays if name in ("scale", "bias"))

    @property
    def types(self) -> Sequence[Types]:
        """The combinations of dtypes that it takes."""
        if self.family in ("rows", "groups"):
            return LAYER_TYPES
        return BATCH_TYPES if self.family == "channels" else [(name,) * 3 for name in DTYPES]

    def kind(self, label: str) -> Kind:
        """Of an argument or a result."""
        return self.kinds.get(label) or KINDS[label]

    def dtype(self, label: str, types: Types) -> str:
        """The dtype that an argument or a result has in a combination."""
        known = dict(zip(("data", "statistic", "parameter"), types, strict=True))
        return known.get(self.kind(label).dtype, self.kind(label).dtype)

    def shape(
        self, label: str, data: Shape = (R, C), axis: int | None = None, groups: int = GROUPS
    ) -> Shape:
        """The shape that an argument or a result has beside data of a shape."""
        of = self.kind(label).shape
        if not isinstance(of, str):
            return of
        rows = self.family == "rows"
        if axis is None:
            axis = -1 if rows else 1
        columns = data[axis:] if rows else data[axis : axis + 1]
        samples = (*data[:1], groups) if self.family == "groups" else columns
        statistic = data[:axis] if rows else samples
        return {"data": data, "statistic": statistic, "parameter": columns}[of]

    def arguments(
        self,
        make: Make,
        types: Types = FLOAT32,
        shape: Shape = (R, C),
        *,
        axis: int | None = None,
        groups: int = GROUPS,
        lists: Sequence[tuple[Shape, str]] | None = None,
        variant: str = "",
    ) -> dict[str, Any]:
        """Arguments by name; ``lists`` are the shapes and dtypes of gradients."""

        def one(label: str) -> Any:
            if label not in LISTS and self.kind(label) is not LIST:
                own = self.shape(label, shape, axis, groups)
                return make(label, own, self.dtype(label, types))
            given = [(n, types[0] if of == "data" else of) for n, of in lists or self.lists]
            return [make(label, *each) for each in given]

        further = self.variants[variant] if variant else {}
        given = {label: one(label) for label in self.arrays} | self.numbers
        if axis is not None:
            given["axis" if self.family == "rows" else "channel_axis"] = axis
        if "num_groups" in given:
            given["num_groups"] = groups
        return given | {
            label: one(label) if value is ... else value for label, value in further.items()
        }

    def __call__(self, **arguments: Any) -> tuple[Any, ...]:
        """Call it; all that it gave and wrote."""
        written = [arguments[self.writes]] if self.writes else []
        return self.function(**arguments), *written


@contextmanager
def leaving_nothing() -> Iterator[None]:
    """Fail if what knows a call's arrays outlives it: in a circle, it waits for the collector."""
    gc.collect(0)
    gc.disable()
    try:
        yield
        kinds = (Call, Arguments, Results)
        assert not [each for each in gc.get_objects(0) if issubclass(type(each), kinds)]
    finally:
        gc.enable()


def drawn(label: str, shape: Shape, dtype: str) -> np.ndarray[Any, Any]:
    """Random values, other ones for each name, that are right for the argument."""
    return _drawn(label, shape, dtype).copy()


@lru_cache(256)
def _drawn(label: str, shape: Shape, dtype: str) -> np.ndarray[Any, Any]:
    host = draw_.values(shape, dtype, sum(map(ord, label)))
    return np.asarray(1 + np.abs(host)) if label in POSITIVE else host


def on(put: Callable[[Any], Any], values: Make = drawn) -> Make:
    """Return a maker of arrays of random values, of one's own library."""
    return lambda *spec: put(values(*spec))


def leaves(found: Any) -> Iterator[Any]:
    """Leaves of nested containers, in order."""
    if isinstance(found, Mapping):
        found = list(found.values())
    if isinstance(found, (list, tuple)):
        for branch in found:
            yield from leaves(branch)
    else:
        yield found


_SHIFT = "axis=-1, eps={}, scale_offset=0.0, out=None"
_LAYER, _RMS = _SHIFT.format("1e-5"), _SHIFT.format("1e-6")
_WEIGHTS = {"weights alone": {"wanted": ("dscale",)}}
_PART = {"dx alone": {"wanted": ("dx",)}, **_WEIGHTS}
_BIAS = {"bias alone": {"scale": None, "wanted": ("dbias", "dx")}}
_PAST = {"with ds": {"ds": ..., "scale_offset": 0.5}}
_RESIDUAL = {"with residual": {"scale_offset": 0.5}}
_GATING = 'activation="silu", norm_before_gate=True'
_GATED = {
    "sigmoid": {"activation": "sigmoid", "scale_offset": 0.5},
    "gate first": {"norm_before_gate": False},
}
_GATE_ALONE = {"dgate alone, gate first": {"norm_before_gate": False, "wanted": ("dgate",)}}
_RUNNING = {"running_mean": ..., "running_var": ..., "scale": None, "bias": None}
_EPS = "*, channel_axis=1, eps=1e-5, out=None"
_ORDERS = (1, 2, POWER, math.inf)
_NORMED = {f"p={p}": {"norm_type": p} for p in _ORDERS}
_BLOCKS = {f"p={p}": {"norm_type": p, "axis": 0 if p == 1 else -1, "rms": p != 2} for p in _ORDERS}
_BLOCKS[f"by key, p={POWER}"] = {"norm_type": POWER, "blocks": lambda name, grad: grad.ndim}  # noqa: ARG005
_CLIP = 'norm_type=2.0, *, eps=1e-6, nonfinite="propagate", out=None'
_BLOCK = 'norm_type=2.0, *, axis=None, rms=False, eps=1e-6, nonfinite="propagate", out=None'
_ADAPT = 'clipping=0.01, *, eps=1e-3, axis=None, nonfinite="propagate", out=None'
_UPDATE = 'scale=1.0, verdict=None, rounding="nearest", seed=None'
_KEPT = {"with compensation": {"compensation": ...}}

OPERATIONS = {
    each.name: each
    for each in (
        Operation(f"layer_norm(x, scale=None, bias=None, *, {_LAYER})", "rows"),
        Operation(
            f"add_layer_norm(x, residual, scale=None, bias=None, *, {_LAYER})",
            "rows",
            variants=_RESIDUAL,
        ),
        Operation(
            "layer_norm_grad(dy, x, scale, mean, inv_std, *, axis=-1, ds=None, scale_offset=0.0, "
            "out=None)",
            "rows",
            variants=_PAST | _PART | _BIAS,
        ),
        Operation(
            "layer_norm_inverse(y, scale, bias, mean, inv_std, *, axis=-1, out=None)", "rows"
        ),
        Operation(
            "invertible_layer_norm_grad(dy, y, scale, bias, inv_std, *, axis=-1, out=None)",
            "rows",
            variants=_PART,
        ),
        Operation(f"rms_norm(x, scale=None, *, {_RMS})", "rows"),
        Operation(f"add_rms_norm(x, residual, scale=None, *, {_RMS})", "rows", variants=_RESIDUAL),
        Operation(
            "rms_norm_grad(dy, x, scale, inv_std, *, axis=-1, ds=None, scale_offset=0.0, out=None)",
            "rows",
            variants=_PAST | _PART,
        ),
        Operation(
            "invertible_rms_norm_grad(dy, y, scale, inv_std, *, axis=-1, ds=None, "
            "scale_offset=0.0, out=None)",
            "rows",
            variants=_PAST,
        ),
        Operation(
            f"gated_rms_norm(x, gate, scale=None, *, {_GATING}, {_RMS})", "rows", variants=_GATED
        ),
        Operation(
            f"gated_rms_norm_grad(dy, x, gate, scale, inv_std, *, {_GATING}, axis=-1, "
            "scale_offset=0.0, out=None)",
            "rows",
            variants=_GATED | _WEIGHTS | _GATE_ALONE,
        ),
        Operation(
            f"batch_norm(x, scale=None, bias=None, {_EPS})",
            "channels",
            variants={"with running statistics": _RUNNING},
        ),
        Operation(
            "batch_norm_grad(dy, x, scale, mean, inv_std, *, channel_axis=1, out=None)",
            "channels",
            variants=_PART | _BIAS,
        ),
        Operation(f"batch_norm_inference(x, scale, bias, mean, var, {_EPS})", "channels"),
        Operation(
            f"batch_norm_inference_grad(dy, x, scale, mean, var, {_EPS})",
            "channels",
            variants=_PART | _BIAS,
        ),
        Operation(
            f"group_norm(x, num_groups, scale=None, bias=None, {_EPS})",
            "groups",
            numbers={"num_groups": GROUPS},
        ),
        Operation(
            "group_norm_grad(dy, x, scale, mean, inv_std, *, channel_axis=1, out=None)",
            "groups",
            variants=_PART | _BIAS,
        ),
        Operation(
            'grad_norm(grads, norm_type=2.0, *, nonfinite="propagate", out=None)',
            "lists",
            variants=_NORMED,
        ),
        Operation("per_tensor_norms(grads, norm_type=2.0, *, out=None)", "lists"),
        Operation("grad_stats(grads, *, out=None)", "lists"),
        Operation(
            f"clip_grad_norm(grads, max_norm, {_CLIP})",
            "lists",
            writes="grads",
            numbers={"max_norm": 0.7},
        ),
        Operation(
            f"clip_by_global_norm(grads, max_norm, {_CLIP})", "lists", numbers={"max_norm": 0.7}
        ),
        Operation(
            'clip_grads_with_norm(grads, norm, max_norm, *, eps=1e-6, nonfinite="propagate")',
            "lists",
            writes="grads",
            numbers={"max_norm": 0.7},
        ),
        Operation(
            f"clip_grad_block_norm(grads, max_norm, {_BLOCK})",
            "lists",
            writes="grads",
            numbers={"max_norm": 0.7},
        ),
        Operation(
            f"clip_by_block_norm(grads, max_norm, {_BLOCK})",
            "lists",
            numbers={"max_norm": 0.7},
            variants=_BLOCKS,
        ),
        Operation(
            f"clip_grad_adaptive(grads, params, {_ADAPT})",
            "lists",
            writes="grads",
            numbers={"clipping": 0.5, "axis": 0},
        ),
        Operation(
            f"clip_by_adaptive_norm(grads, params, {_ADAPT})",
            "lists",
            numbers={"clipping": 0.5, "axis": -1},
        ),
        Operation(
            "clip_grad_value(grads, clip_value)",
            "lists",
            writes="grads",
            numbers={"clip_value": 0.3},
        ),
        Operation(
            "scale_grads(grads, coefficient)",
            "lists",
            writes="grads",
            numbers={"coefficient": 0.3},
        ),
        Operation("zero_grad(grads)", "lists", writes="grads"),
        Operation(
            "accumulate_grad(buffer, grad, *, do_update=True, scale=None)",
            "buffers",
            writes="buffer",
            variants=_KEPT,
        ),
        Operation(
            "accumulate_grad_v2(buffer, grad, *, overwrite=False)", "buffers", writes="buffer"
        ),
        Operation(
            "accumulate_grads(buffers, grads, *, scale=1.0, overwrite=False, do_update=True, "
            "norm_out=None)",
            "buffer lists",
            writes="buffers",
            kinds={"compensation": LIST},
            lists=(((R, C), "data"), ((3,), "data")),
            variants=_KEPT,
        ),
        Operation(
            "ema_update(averages, params, decay)",
            "averages",
            writes="averages",
            numbers={"decay": 0.25},
            lists=(((R, C), "data"), ((3,), "data")),
        ),
        Operation(
            "adamw_update(params, grads, moments, variances, step, *, lr, betas=(0.9, 0.999), "
            f"eps=1e-8, weight_decay=0.01, {_UPDATE})",
            "updates",
            writes="params",
            numbers={"step": 3, "lr": 0.1},
            lists=(((R, C), "data"), ((3,), "data")),
        ),
        Operation(
            "sgd_update(params, grads, momenta=None, *, lr, momentum=0.0, nesterov=False, "
            f"weight_decay=0.0, {_UPDATE})",
            "updates",
            writes="params",
            numbers={"lr": 0.1},
            lists=(((R, C), "data"), ((3,), "data")),
            variants={"without momenta": {"momenta": None}},
        ),
        Operation(
            "clip_coefficient(norm, max_norm, *, eps=1e-6, out=None)",
            "numbers",
            numbers={"max_norm": 0.7},
        ),
        Operation(
            "spike_guard_update(state, norm, *, decay=0.97, threshold=2.5, warmup=25, "
            'on_spike="clip", out=None)',
            "numbers",
        ),
        Operation("step_verdict(norm, *, limit=None, found_inf=None, out=None)", "numbers"),
        Operation(
            "keep_if(verdict, new, old)",
            "copies",
            writes="old",
            numbers={"verdict": True},
            lists=(((R, C), "data"), ((3,), "data")),
        ),
    )
}


def of(*families: str) -> list[Operation]:
    """The rows of some families."""
    return [each for each in OPERATIONS.values() if each.family in families]


def records(*families: str) -> dict[str, type[Call]]:
    """The records of some families' functions, by the functions' names."""
    return {each.name: each.record for each in of(*families) if each.record}


# The norms over rows of one array, forward and backward, whose values ``check_norm`` knows.
ROW_NORMS = [
    name
    for name, record in records("rows").items()
    if record.result_names[0] in ("y", "dx")
    and {*record.array_names} <= {"dy", "x", "y", "scale", "bias", "mean", "inv_std", "ds"}
]
ROW_GRADIENTS = [name for name in ROW_NORMS if name.endswith("grad")]


def calls(make: Make, **options: Any) -> dict[str, Callable[[], tuple[Any, ...]]]:
    """By title, each function and each variant, on arguments that are made when it is called.

    ``options`` are those of ``Operation.arguments``.
    """

    def call(operation: Operation, variant: str) -> tuple[Any, ...]:
        return operation(**operation.arguments(make, variant=variant, **options))

    return {
        f"{each.name} {variant}".rstrip(): partial(call, each, variant)
        for each in OPERATIONS.values()
        for variant in ("", *each.variants)
    }


def problem(name: str, *args: Any, **options: Any) -> Problem:
    """A problem for a norm over rows, as ``make`` makes one."""
    return make(*args, centred="rms" not in name, **options)


def norm(backend: Any, p: Problem, name: str, **options: Any) -> tuple[Any, ...]:
    """Results of a norm for a problem, from its input or, if it is invertible, its output."""
    operation = OPERATIONS[name]

    def one(label: str, *_: Any) -> Any:
        host = p.output()[0] if label == "y" else getattr(p, label)
        return None if host is None else backend.asarray(host)

    eps = {"eps": p.eps} if "eps" in operation.parameters else {}
    found: tuple[Any, ...] = operation.function(
        **operation.arguments(one) | p.where | eps | options
    )
    return found


def check_norm(backend: Any, p: Problem, *names: str) -> None:
    """Check the results of norms, to the bounds of the suite."""
    for name in names:
        found = norm(backend, p, name)
        if not name.endswith("grad"):
            y, *statistics = found
            p.check_forward(backend, y, *([] if p.centred else [None]), *statistics)
            continue
        sources = [p.scale, p.bias if "bias" in OPERATIONS[name].arrays else p.scale]
        for result, source in zip(found[1:], sources, strict=False):
            assert (result is None) == (source is None)
        xhat = p.output()[1] if name.startswith("invertible") else None
        p.check_gradients(backend, *found, xhat=xhat)
