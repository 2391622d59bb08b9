"""Calls in a row, each of which differs in one thing from the one before.

What a call leaves behind, such as a plan, an address or an error, must say nothing of the next
one, which gives the bits, or the error, of the same call where nothing came before.
"""

import math
from collections import Counter
from contextlib import contextmanager
from itertools import combinations, pairwise
from typing import NamedTuple

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

import gradkit
from gradkit._open import dispatch
from tests.backends import Backend
from tests.layouts import LAYOUTS
from tests.operations import DATA, LISTS, OPERATIONS, drawn, leaves, leaving_nothing, of
from tests.tolerances import DTYPES

ERRORS = (TypeError, ValueError, gradkit.GradkitError)
SQUARE = (6, 6)  # in which an axis or a transposed argument is mistaken for another
SHAPES = {
    "rows": ((4, 6), SQUARE, (6, 4), (1, 6), (4, 1), (0, 6), (6,), (2, 6, 6), (33, 129)),
    "channels": ((4, 6), SQUARE, (6, 4), (2, 6, 6), (3, 6, 1, 6), (9, 33, 17)),
    "groups": ((4, 6), SQUARE, (2, 6, 6), (3, 12, 1, 6), (9, 24, 17)),
    "buffers": ((4, 6), SQUARE, (6, 4), (), (6,), (0, 6), (33, 129)),
}
NORMS = ("rows", "channels", "groups")
HOSTS = ("compiled", "numpy")
OWN = "data"
GRADS = (
    None,  # what the operation's own row says
    (((3,), OWN),),
    (((3,), OWN), ((2,), OWN)),
    (((2,), OWN), ((3,), OWN)),
    (((3,), "float32"), ((2,), "float16")),
    ((SQUARE, OWN), ((0, 2), OWN), ((), OWN)),
    (((33, 129), OWN), *(((5,), OWN),) * 40),
)
CONTAINERS = {
    "list": list,
    "tuple": tuple,
    "dict": lambda arrays: dict(enumerate(arrays)),
    "nested": lambda arrays: {"a": arrays[:1], "b": (None, arrays[1:])},
    "generator": iter,
    "with None": lambda arrays: [None, *arrays],
}
_NONE_OF_THEM = ("no such word", True, math.nan)
# Of arguments that are numbers, words or flags; the last are wrong. Arrays are put on the backend.
NUMBERS = {
    "eps": (1e-5, 0.25, 1, -1.0, *_NONE_OF_THEM),
    "eps_mode": ("max", "add", *_NONE_OF_THEM),
    "scale_offset": (0.0, 0, 0.5, 1, *_NONE_OF_THEM),
    "axis": (-1, 1, 0, 5, True, 1.0),
    "channel_axis": (1, -1, 0, 5, True, 1.0),
    "norm_type": (2.0, 1, 1.0, 2, 3.5, math.inf, 0, *_NONE_OF_THEM),
    "nonfinite": ("propagate", "raise", "zero", *_NONE_OF_THEM),
    "max_norm": (0.7, 1, 1e6, np.array(0.7), np.float32(0.7), -1.0, *_NONE_OF_THEM),
    "clipping": (0.5, 1, np.array(0.7), -1.0, *_NONE_OF_THEM),
    "clip_value": (0.3, 1, 0.0, -1.0, *_NONE_OF_THEM),
    "coefficient": (0.3, 1, np.array(0.7), *_NONE_OF_THEM),
    "decay": (0.25, 1, 0.5, -1.0, *_NONE_OF_THEM),
    "threshold": (2.5, 1, -1.0, *_NONE_OF_THEM),
    "warmup": (25, 1, 0, 1.0, *_NONE_OF_THEM),
    "on_spike": ("clip", "skip", *_NONE_OF_THEM),
    "activation": ("silu", "sigmoid", *_NONE_OF_THEM),
    "norm_before_gate": (True, False, 1, None),
    "rms": (False, True, 1, None),
    "exact": (False, True, 1, None),
    "do_update": (True, False, 1, np.array(False), np.array(True)),
    "overwrite": (False, True, 1, np.array(False), np.array(True)),
    "casting": ("safe", "same_kind", *_NONE_OF_THEM),
    "lr": (0.1, 0, np.array(0.7), -1.0, *_NONE_OF_THEM),
    "step": (3, 1, 0, np.array(2), np.array(-1), 1.0),
    "betas": ((0.9, 0.999), (0, 0.5), (0.9, 1.0), 0.9, [0.9, 0.999]),
    "weight_decay": (0.01, 0, 1, -1.0, *_NONE_OF_THEM),
    "nesterov": (False, True, 1, None),
    "momentum": (0.1, 0, 1, 1.0, 2.0, *_NONE_OF_THEM),
    "num_groups": (3, 1, 2, 6, 4, 3.0, True),
    "rounding": ("nearest", "stochastic", *_NONE_OF_THEM),
    "seed": (0, 1, -1, 1.0),
    "replicas": (1, 0, 1.0),
    "norm_out": (None, np.array(7.0), np.array(7.0, np.float32), 7.0),
    "grad_norm_out": (None, np.array(7.0), np.array([7.0]), 7.0),
    "found_inf": (None, np.array(0.0, np.float32), np.array([0.0, 0.0], np.float32), 0.0),
    "limit": (None, 0.5, 10.0, np.array(0.5), -1.0),
    "verdict": (True, False, np.array(True), np.array(False), 1.0),
    "out": (None, np.array(7.0), np.array(7.0, np.float32), np.array([7.0]), 7.0),
    "norm": (0.5, 3, np.array(2.0), np.array(2.0, np.float32), -1.0, math.nan, "no such word"),
}
# Factors of a list's gradients, or of one gradient; of a norm it is an array.
FACTORS = (1.0, 2, 0.5, np.array(0.5), None, *_NONE_OF_THEM)


class Outcome(NamedTuple):
    """State after a call, in a form that can be compared."""

    results: object  # each by its dtype, shape, strides and bytes; or the error
    memory: tuple[bytes, ...]  # of all arrays that it was given
    own: tuple[bool, ...]  # whether each result is an array of the caller's


class Call:
    """One call: what it is of, by property."""

    def __init__(self, operation, properties):
        self.operation, self.properties = operation, properties

    def __repr__(self):
        return f"{self.operation.name}: {self.properties}"

    def __getitem__(self, key):
        return self.properties.get(key)

    def but(self, key, value):
        """The call that differs in one property."""
        return Call(self.operation, self.properties | {key: value})

    def on(self, backend, arrays):
        """Its outcome on a backend; ``arrays``: those of earlier calls, which come again."""
        used = {}

        def put(key, host):
            if not host.flags.writeable and backend.has_read_only:
                return backend.read_only(backend.asarray(host))
            kind = (*key, host.shape, host.dtype.str, host.strides)
            array = arrays.get(kind)
            if array is None:
                array = arrays[kind] = backend.asarray(host)
            elif array is not used.get(kind):
                backend.assign(array, host)
            used[kind] = array
            return array

        host = "numpy" if backend.name == "numpy" else "compiled"
        given = self._arguments(put)
        threads = gradkit.get_num_threads()
        gradkit.set_num_threads(self["threads"] or threads)
        with leaving_nothing():
            try:
                with gradkit.use_cpu_backend(self["computing"] or host):
                    found = [*leaves(self.operation.function(**given))]
            except ERRORS as error:
                shown, own = f"{type(error)}: {error}", []
            else:
                found = [getattr(each, "table", each) for each in found]
                shown, own = [_shown(backend, each) for each in found], {*map(id, used.values())}
            finally:
                gradkit.set_num_threads(threads)
        memory = tuple(map(backend.memory, used.values()))
        return Outcome(shown, memory, tuple(id(each) in own for each in found) if own else ())

    def may_be(self, backend):
        """Kinds of properties that its operation has, each with the values of the properties."""
        operation, names = self.operation, self.operation.arrays
        norm, lists = operation.family in NORMS, [name for name in names if name in LISTS]
        data = [name for name in names if name not in lists and operation.kind(name) == DATA]
        named = NUMBERS.keys() - ({"out"} if norm else ())
        numbers = {name: NUMBERS[name] for name in operation.parameters if name in named}
        if "scale" in operation.parameters and "scale" not in names:
            numbers["scale"] = FACTORS
        types = len(operation.types) if backend.on_host else min(2, len(operation.types))
        yield {("layout", name): [*LAYOUTS] for name in names}
        yield {("wrong", name): (None, "shape", "dtype", "read-only", 1.0) for name in names}
        yield {("first", name): (None, 0.0, -1.0, math.nan) for name in names}
        yield {("absent", name): (False, True) for name in operation.optional}
        yield {("same", name): (None, *data) for name in data}
        yield {("number", name): (None, *values) for name, values in numbers.items()}
        yield {
            ("out", name): (None, *LAYOUTS, "read-only", *data)
            for name in operation.results
            if norm
        }
        yield {"types": range(types)}
        yield {"variant": ("", *operation.variants)} if operation.variants else {}
        yield {"shape": SHAPES[operation.family]} if operation.family in SHAPES else {}
        yield {"place": (None, 0, 1, -1, -2)} if norm else {}
        yield {"lists": GRADS, "container": [*CONTAINERS]} if lists else {}
        yield {"threads": (1, 3), "computing": HOSTS} if backend.on_host else {}

    @property
    def _axis(self):
        """The axis of a norm, if it is one of the data's."""
        own, rank = self["place"], len(self._shape)
        return own if own is None or -rank <= own < rank else None

    @property
    def _shape(self):
        return self["shape"] or (4, 6)

    @property
    def _types(self):
        return self.operation.types[self["types"] or 0]

    def _arguments(self, put):
        operation, counts = self.operation, Counter()

        def make(label, shape, dtype):
            counts[label] += 1
            wrong = self["wrong", label]
            if wrong == 1.0:
                return wrong
            if wrong == "shape":
                shape = (*shape, 2)
            elif wrong == "dtype":
                dtype = "float64" if dtype == "float32" else "float32"
            host = np.asarray(drawn(label, shape, dtype))
            if host.size and self["first", label] is not None:
                host.flat[0] = self["first", label]
            host = LAYOUTS[self["layout", label] or "C"](host)
            host.flags.writeable = wrong != "read-only"
            return put((label, counts[label]), host)

        lists, variant = self["lists"] or operation.lists, self["variant"] or ""
        more = {"axis": self._axis, "lists": lists, "variant": variant}
        given = operation.arguments(make, self._types, self._shape, **more)
        contain = CONTAINERS[self["container"] or "list"]
        given = {n: contain(each) if type(each) is list else each for n, each in given.items()}
        for label in operation.parameters:
            same, value = self["same", label], self["number", label]
            if self["absent", label]:
                given[label] = None
            if same in given and label in given:
                given[label] = given[same]
            if value is not None:
                given[label] = put((label,), value) if isinstance(value, np.ndarray) else value
        outs = [self._out(put, given, name) for name in operation.results]
        if any(self["out", name] for name in operation.results):
            given["out"] = tuple(outs)
        return given

    def _out(self, put, given, name):
        """Make the array that a result is written to, which may be an argument."""
        kind = self["out", name]
        if kind is None or kind in given:
            return given.get(kind)
        shape = self.operation.shape(name, self._shape, self._axis)
        host = np.full(shape, 7, DTYPES[self.operation.dtype(name, self._types)])
        host = LAYOUTS["C" if kind == "read-only" else kind](host)
        host.flags.writeable = kind != "read-only"
        return put(("out", name), host)


def _shown(backend, found):
    if not hasattr(found, "shape"):
        return repr(found)
    host = backend.asnumpy(found)
    return host.dtype.str, host.shape, getattr(found, "strides", None), host.tobytes()


def _bits(shown):
    """Drop strides from what was shown; of an error keep its type and the argument it names."""
    if isinstance(shown, str):
        return shown.split(maxsplit=3)[:3]
    return [(*each[:2], each[3]) if isinstance(each, tuple) else each for each in shown]


def _is_numpys(call, key):
    """True if NumPy's arrays alone are refused: which cannot be written, or are looked into."""
    return call[key] == "read-only" or key in (("first", "norm"), ("number", "scale"))


@contextmanager
def nothing_before(backend):
    """The backend, or another device like it, that knows of no earlier call."""
    other = backend if backend.on_host else type(backend)()
    dispatch._plans.clear()
    with other.active():
        yield other


class Sequences(RuleBasedStateMachine):
    """Calls of one operation on a backend; all are looked at once the last has run."""

    backend = None  # of a subclass
    operations = tuple(OPERATIONS)

    def __init__(self):
        super().__init__()
        self.call, self.arrays, self.made = None, {}, []
        dispatch._plans.clear()

    @initialize(data=st.data())
    def begin(self, data):
        """The plain call."""
        name = data.draw(st.sampled_from(self.operations))
        self.call = Call(OPERATIONS[name], {})
        self.run(self.call)

    def run(self, call):
        """Make a call; what came of it is kept."""
        self.made.append((call, call.on(self.backend, self.arrays)))

    @rule(data=st.data())
    def another(self, data):
        """A call that differs in one property, from which the next ones differ."""
        self.call = self.call.but(*data.draw(self.changes(), "but"))
        self.run(self.call)

    @rule(data=st.data())
    def aside(self, data):
        """One that differs, after which there is the same call again."""
        self.run(self.call.but(*data.draw(self.changes(), "aside")))
        self.run(self.call)

    @rule()
    def again(self):
        """The same call on the same arrays."""
        self.run(self.call)

    @rule()
    def elsewhere(self):
        """The same call on arrays in other memory."""
        self.arrays = {}
        self.run(self.call)

    def changes(self):
        """A property of one of the kinds that the operation has, and what it may be."""
        kinds = st.sampled_from([kind for kind in self.call.may_be(self.backend) if kind])
        properties = kinds.flatmap(lambda kind: st.sampled_from([*kind.items()]))
        return properties.flatmap(
            lambda own: st.tuples(st.just(own[0]), st.sampled_from([*own[1]]))
        )

    def teardown(self):
        """Compare each call with the same one where nothing came before."""
        for call, found in self.made:
            with nothing_before(self.backend) as other:
                assert found == call.but("threads", None).on(other, {}), call


def check_calls_in_a_row(backend, family):
    """Draw calls of all operations of a family."""
    names = tuple(each.name for each in of(family))
    kind = type("Calls", (Sequences,), {"backend": backend, "operations": names})
    most = max(settings().max_examples, 2 * len(names))
    run_state_machine_as_test(kind, settings=settings(max_examples=most, stateful_step_count=16))


def check_each_value_after_each_other(backend, name, reference=None, every=True):
    """Of each property of an operation's call, with all else as it is.

    Of its variants, and of long rows of values, each comes between two of the first and beside its
    neighbours; ``every``: all pairs. ``reference``: a backend whose results have the same bits.
    """
    arrays = {}
    for variant in ("", *OPERATIONS[name].variants):
        plain = Call(OPERATIONS[name], {"variant": variant})
        for key, values in (each for kind in plain.may_be(backend) for each in kind.items()):
            calls = [plain.but(key, value) for value in values]
            expected = []
            for call in calls:
                with nothing_before(backend) as other:
                    expected.append(call.on(other, {}))
                if reference:
                    with nothing_before(reference):
                        found = call.on(reference, {}).results, expected[-1].results
                    alike, theirs = map(_bits, found)
                    assert alike == theirs or _is_numpys(call, key), (call, *found)
            dispatch._plans.clear()
            pairs = [*combinations(range(len(calls)), 2)]
            if variant or (len(calls) > 5 and not every):
                pairs = [(0, k) for k in range(1, len(calls))] + [*pairwise(range(len(calls)))]
            for first, second in pairs:
                for k in (first, second):
                    assert calls[k].on(backend, arrays) == expected[k], (calls[k], calls[first])


def check_what_is_refused_is_named(name):
    """A number, a word or a flag: the error tells which, and the value or what it is."""
    plain = Call(OPERATIONS[name], {})
    properties = [each for kind in plain.may_be(Backend()) for each in kind.items()]
    for (_, label), values in (each for each in properties if each[0][0] == "number"):
        if label in ("axis", "channel_axis", "out"):  # of which shapes follow, or which is a tuple
            continue
        for value in values:
            said = plain.but(("number", label), value).on(Backend(), {}).results
            if isinstance(said, str):
                host = np.asarray(value)
                shown = {repr(value), type(value).__name__, str(host.dtype), str(host.shape)}
                shown |= {str(float(value))} if isinstance(value, (int, float)) else set()
                assert label in said
                assert any(word in said for word in shown), said
