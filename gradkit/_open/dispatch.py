"""Run an operation: open its arrays, find its plan, make its results, compute, hand back."""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, TypeAlias

import numpy as np

from gradkit import _host
from gradkit._arrays import HOST, NOTHING, Framework, framework_for
from gradkit._backend import Array, Spec
from gradkit._calls.backend import Backend
from gradkit._calls.record import Call, Described, Plan
from gradkit._host import chosen
from gradkit._open import memory
from gradkit._open.arguments import Arguments, known_framework, refuse_write, view_of
from gradkit._open.foreign import tell
from gradkit._open.gradients import backend_of_table
from gradkit._open.memory import Named
from gradkit._open.results import Results, labels_of, refuse

# Writes the results of a call on a backend.
Compute: TypeAlias = Callable[[Any, Backend], None]
# Opens a call argument by argument, and gives its results; of its ``out``.
ByName: TypeAlias = Callable[[Any, Any], Any]

_ABSENT = {type(None)}
_NUMPY = {np.ndarray, *_ABSENT}
_CONSTANT = (type(None), bool, int, float, str, tuple, type, np.generic)
_MOST = 4096  # plans that are remembered before all are forgotten
_plans: dict[Any, Plan] = {}
_ON_HOST = Arguments()  # of a call whose numbers are plain
_ON_HOST.framework, _ON_HOST.like = HOST, None


def run(
    call: Call, out: Any = None, compute: Compute | None = None, by_name: ByName | None = None
) -> Any:
    """The results of a call as arrays of the caller's type, written to ``out`` if it has them.

    ``compute``: what computes them, if that is not the call by itself. ``by_name``: what opens a
    call of lists argument by argument, if something is unusual.
    """
    like = getattr(call, call.lists[0].name if call.lists else call.array_names[0])
    try:
        outs = () if out is None else out if type(out) is tuple else (out,)
        if compute is not None or not (out is None or len(outs) == len(call.results)):
            return _run_by_name(call, out, compute, by_name)
        if _host.code is not None:
            lookup = _host.code.known(_plans, chosen.get(), call, call.key_names, outs)
            if type(lookup) is Plan and not lookup.by_name:
                return _run_plain(call, lookup, (), outs)
            if type(lookup) is tuple and lookup[:2] != (None, None):
                return _run_anew(call, lookup, out, outs, by_name)
        return _run_by_name(call, out, None, by_name)
    except (TypeError, ValueError) as error:
        tell(error, framework_for(type(like)))
        raise


def _run_anew(
    call: Call, lookup: tuple[Any, ...], out: Any, outs: tuple[Any, ...], by_name: ByName | None
) -> Any:
    """A call without a plan, or with other numbers than the last one of its plan."""
    plan, key, passed, are_plain = lookup
    if plan is None and call.lists:
        plan = _plan_of_lists(call, outs)
        _remember(key, plan)
    if plan is None:
        like = getattr(call, call.array_names[0])
        results = _run_opened(call, out)
        plan = _plan_beside(call, framework_for(type(like)))
        if plan is not None:
            _remember(key, plan)  # arrays that are one may be
        return results
    if plan.by_name:
        return _run_by_name(call, out, None, by_name)
    if are_plain:
        return _run_plain(call, plan, passed, outs)
    planned = Planned(call, plan)
    with planned.on_stream():
        for name, check in call.passing.items():
            setattr(call, name, check(getattr(call, name), planned))
        results = _run_plain(call, plan, (), outs)
    if planned.counted:
        planned.framework.wrote(planned.counted)
    return results


def _plan_beside(call: Call, library: Framework | None) -> Plan | None:
    """The plan for calls like one that was opened, on a library's arrays as they are, if any."""
    if library is HOST or library is None:
        return call.plan
    if not (library.returns_views or call.plan.backend.takes_memory(call)):
        return None
    plan = copy(call.plan)
    plan.library, plan.on_host = library, plan.backend is chosen.get()
    if not plan.on_host:
        plan.compute = plan.backend.again(plan.compute)
    return plan


def _run_by_name(call: Call, out: Any, compute: Compute | None, by_name: ByName | None) -> Any:
    """A call that is opened argument by argument."""
    if by_name is None:
        return _run_opened(call, out, compute)
    for each in call.lists:
        table = getattr(call, each.name)
        if isinstance(table, _host.Table):
            setattr(call, each.name, table.tree)
    return by_name(call, out)


def _plan_of_lists(call: Call, outs: tuple[Array | None, ...]) -> Plan:
    """The plan of a call that has tables in the place of its lists."""
    plan, table = _decide(call, outs), getattr(call, call.lists[0].name)
    library = framework_for(type(table.arrays[0]))
    assert library is not None  # that of a table's arrays
    plan.missing = _missing(plan, outs)
    plan.computed_by(backend_of_table(table, library), type(call))
    if library is not HOST:
        plan.library, plan.on_host = library, table.device < 0
        plan.by_name |= plan.on_host and not _host.is_compiled()  # NumPy writes no tensor
        if not (plan.on_host or plan.by_name):
            plan.compute = plan.backend.again(plan.compute)
    return plan


def _run_opened(call: Call, out: Any, compute: Compute | None = None) -> Any:
    opened = Opened(call, out)
    stream = opened.on_stream()
    if stream is NOTHING:
        return opened.results(compute)
    with stream:
        return opened.results(compute)


class Planned(Arguments):
    """A call whose plan is known and some of whose numbers are in arrays."""

    __slots__ = ("_first",)

    def __init__(self, call: Call, plan: Plan):
        super().__init__()
        self.framework, self.backend = plan.library or HOST, plan.backend
        self.like = _first_of(call)
        name = call.lists[0].name if call.lists else call.array_names[0]
        self._first = name, view_of(self.framework, self.like, name, detach=call.detaches)

    def first(self) -> tuple[str, Array | None]:
        return self._first


def _run_plain(
    call: Call, plan: Plan, passed: tuple[Any, ...], outs: tuple[Array | None, ...]
) -> Any:
    """Fast path of `Opened`, in half the time: the plan is known and there is nothing to open."""
    backend = plan.backend
    for name, value in plan.changed:
        setattr(call, name, value)
    call.plan = plan
    if passed:
        _check_passing(call, passed)
    if call.checks_values:
        call.check_values(_ON_HOST)
    library: Framework | None = plan.library
    if library is not None:
        if not library.returns_views:
            compute = _compute_lists if call.lists else _compute_arrays
            if plan.on_host:
                return compute(call, library, outs)
            with library.on_stream(_first_of(call)):
                return compute(call, library, outs)
        stream = library.on_stream(_first_of(call))
        if stream is not NOTHING:
            with stream:
                return _run_plain(call, plan, (), outs)
    results: Sequence[Array | None] = outs
    if plan.missing:
        results = backend.outputs(plan.missing)
        if outs:
            results = [new if out is None else out for out, new in zip(outs, results)]  # noqa: B905
    if results:
        for name, array in zip(call.result_names, results):  # noqa: B905
            setattr(call, name, array)
    for name in plan.widened:
        setattr(call, name, backend.as_float64(getattr(call, name)))
    plan.compute(call)
    if not results and call.lists:
        return getattr(call, call.lists[0].name).tree  # the caller's own object
    return results[0] if len(results) == 1 else tuple(results)


def _first_of(call: Call) -> Any:
    """The array that decides the library."""
    if call.lists:
        return getattr(call, call.lists[0].name).arrays[0]
    return getattr(call, call.array_names[0])


def _compute_lists(call: Call, library: Framework, _: Any) -> Any:
    """The rest of a call of lists of a library that makes results by itself, without ``out``."""
    plan, table = call.plan, getattr(call, call.lists[0].name)
    results: Sequence[Any] = ()
    if plan.missing:
        views, results = library.outputs(plan.missing, table)
        for name, view in zip(call.result_names, views):  # noqa: B905
            setattr(call, name, view)
    plan.compute(call)
    for each in call.lists:
        if each.written and (written := getattr(call, each.name)) is not None:
            library.wrote(written.arrays)
    if not results:
        return table.tree  # the caller's own object
    return results[0] if len(results) == 1 else tuple(results)


def _compute_arrays(call: Call, library: Framework, outs: tuple[Array | None, ...]) -> Any:
    """The rest of any other call."""
    arrays = (*outs, *call.ordered(call))
    results: Sequence[Any] = outs
    if call.plan.missing:
        results = library.results(call.plan, arrays)
        if outs:
            results = [new if out is None else out for out, new in zip(outs, results)]  # noqa: B905
    call.__dict__.update(zip(call.result_names, results))  # noqa: B905
    library.compute(call, arrays[len(outs) :], results)
    written = len(outs) + len(call.in_place)
    if written:
        library.wrote([each for each in arrays[:written] if each is not None])
    return results[0] if len(results) == 1 else tuple(results)


def _check_passing(call: Call, passed: tuple[Any, ...]) -> None:
    """Check plain numbers that no plan depends on."""
    changed = []
    for (name, check), value in zip(call.passing.items(), passed):  # noqa: B905 - strict takes longer
        checked = check(value, _ON_HOST)
        if checked is not value:
            setattr(call, name, checked)
            changed.append((name, checked))
    call.plan.passed = *passed, tuple(changed)


def write(call: Call, *results: Array | None, backend: Backend | None = None) -> None:
    """Compute a call on a backend's own arrays, which are known to fit and to lie apart.

    This is the inner door, for those who bring memory for results and a current stream, such as a
    callback of XLA. ``backend``: what computes, if it is not the one that the arrays belong to.
    """
    opened = Opened(call, backend=backend, outs=results)
    call.__dict__.update(zip(call.result_names, results, strict=True))
    opened.check_values()
    opened.compute()


class Opened(Arguments):
    """A call whose arrays are a backend's, all of one library, and whose plan is known.

    The first argument decides the library, the backend and what new results look like.
    """

    __slots__ = ("_results", "_written", "call")

    def __init__(
        self,
        call: Call,
        out: Any = None,
        *,
        backend: Backend | None = None,
        outs: Sequence[Array | None] = (),
    ):
        self.call = call
        arguments = call.arrays(call)
        self.numbers, self.counted = [], []
        self.like = arguments[0]
        self._written: list[Any] | None = None  # the caller's arrays, if they are no views
        self._results: Results | None = None
        if backend is not None:  # the arrays are its own
            self.framework, self.backend = HOST, backend
        elif _NUMPY.issuperset(map(type, arguments)) and arguments[0] is not None:
            self.framework, self.backend = HOST, chosen.get()
        else:
            arguments = self._views(arguments)
        if out is not None:
            self._results = Results(self, out, len(call.results))
            outs = self._results.views
        # The plan of the call: one look-up, unless there was none like it.
        arrays = (*outs, *call.ordered(call))
        signature = None
        if _host.code is not None:
            signature = _host.code.signature(self.backend, call.options(call), arrays, 0)
        if signature is None:
            signature = _signature(call, self.backend, arrays)
        try:
            plan, is_key = _plans.get(signature), True
        except TypeError:  # an option that has no hash: nearly always one that is refused
            plan, is_key = None, False
        if plan is None:
            plan = _decide(call, outs)
            if is_key:
                plan.computed_by(self.backend, type(call))
                plan.gapless = _gapless((*arguments, *outs))
                plan.missing = _missing(plan, outs)
                _remember(signature, plan)
        call.plan = plan
        for name, value in plan.changed:
            setattr(call, name, value)

    def results(self, compute: Compute | None = None) -> Any:
        """Compute, and return the results as the caller's arrays."""
        call, results = self.call, self._results
        self.check_values()
        if results is not None or call.in_place:
            self._check_memory()
        if results is None and self.framework.returns_views:
            returned = self.backend.outputs(call.plan.results) if call.results else ()
            for name, array in zip(call.result_names, returned, strict=True):
                setattr(call, name, array)
        else:
            results = results or Results(self, None, len(call.results))
            results.make(call.plan.results)
            call.__dict__.update(zip(call.result_names, results.views, strict=True))
        self.compute(compute)
        if self._written is not None:
            self.framework.wrote(self._written)
        if results is not None:
            returned = results.results()
        return returned[0] if len(returned) == 1 else tuple(returned)

    def check_values(self) -> None:
        """Raise if a number is wrong that no plan depends on, or a value that the host can read."""
        call = self.call
        for name, check in call.passing.items():
            setattr(call, name, check(getattr(call, name), self))
        call.check_values(self)

    def compute(self, compute: Compute | None = None) -> None:
        """Have the results written."""
        call, backend = self.call, self.backend
        for name in call.plan.widened:
            setattr(call, name, backend.as_float64(getattr(call, name)))
        if compute is None:
            call.compute(backend)
        else:
            compute(call, backend)

    def first(self) -> tuple[str, Array | None]:
        name = self.call.array_names[0]
        return name, getattr(self.call, name)

    def _views(self, arguments: tuple[Any, ...]) -> tuple[Array | None, ...]:
        """The arguments as a backend's arrays; an error names the one that is refused."""
        call, kinds = self.call, set(map(type, arguments)) - _ABSENT
        if call.in_place:
            moved = [getattr(call, each.name) for each in call.in_place]
            self._written = [array for array in moved if array is not None]
        library = framework = framework_for(type(self.like))
        views: Sequence[Array | None] | None = None
        alike = len(kinds) == 1 or {framework}.issuperset(map(framework_for, kinds))
        if framework is not None and alike:
            self.framework = framework
            if len(kinds) == 1 and framework.computes_on(type(self.like)):
                views = arguments
            elif not call.in_place:
                views = self._views_at_once(arguments)
                library = None if views is None else framework_for(type(views[0]))
        if views is None or library is None or not _on_one_device(library, views):
            views = self._views_by_name(arguments)
            library = framework_for(type(views[0]))
            assert library is not None  # every view is a NumPy or CuPy array
        self.backend = library.backend_of(views[0])
        call.__dict__.update(zip(call.array_names, views, strict=True))
        return tuple(views)

    def _views_at_once(self, arguments: tuple[Any, ...]) -> Sequence[Array | None] | None:
        """Views of arrays of one library, unless one of them has none."""
        view, detach = self.framework.view, self.call.detaches
        try:
            return [None if a is None else view(a, write=False, detach=detach) for a in arguments]
        except (TypeError, ValueError):
            return None

    def _views_by_name(self, arguments: tuple[Any, ...]) -> tuple[Array | None, ...]:
        """Each argument as a backend's array, or the error of the first that is refused."""
        names, instead = self.call.array_names, self.call.instead
        self.framework = known_framework(arguments[0], names[0])
        views: list[Array | None] = []
        for name, array in zip(names, arguments, strict=True):
            write = name in instead
            if write and array is not None:
                refuse_write(self.framework, name, instead[name])
            if not views:
                detach = not write and self.call.detaches
                views.append(view_of(self.framework, array, name, write=write, detach=detach))
                self.call.__dict__[name] = views[0]
            elif array is None:
                views.append(None)
            elif write:
                views.append(self.view(array, name, write=True))
            else:
                views.append(self.argument(array, name, detach=self.call.detaches))
        return tuple(views)

    def _check_memory(self) -> None:
        """Raise unless results can be written where the caller wants them."""
        call, results, instead = self.call, self._results, self.call.instead
        written = [] if results is None else results.named()
        read = self.numbers.copy()
        for name, view in zip(call.array_names, call.arrays(call), strict=True):
            if view is not None:
                (written if name in instead else read).append((name, view))
        if self._are_whole_and_apart(written, read):
            return
        refuse(self.backend, written, read, self._may_be, instead)

    def _are_whole_and_apart(self, written: Named, read: Named) -> bool:
        """True if a quick look shows it of a device's arrays; a no may be wrong."""
        gapless = written and self.call.plan.gapless
        if self.numbers or not gapless or type(written[0][1]) is np.ndarray:
            return False
        if not all(memory.is_writable(view) for _, view in written):
            return False
        each = ([view for _, view in named] for named in (written, read))
        return memory.whole_and_apart(self.backend, *each)

    def _may_be(self) -> list[list[Array | None]]:
        """For each array that is written the arguments whose memory it may have."""
        call, results = self.call, self._results
        outs = zip(call.results, results.views if results else (), strict=False)
        allowed = [each.may_be for each, view in outs if view is not None]
        allowed += [e.may_be for e in call.in_place if getattr(call, e.name) is not None]
        return [[getattr(call, name) for name in names] for names in allowed]


def _remember(signature: tuple[Any, ...], plan: Plan) -> None:
    if len(_plans) >= _MOST:
        _plans.clear()
    _plans[signature] = plan


def _missing(plan: Plan, outs: Sequence[Array | None]) -> Sequence[Spec | None] | None:
    """The results that the caller has no array for; ``None`` if there is one for each."""
    if not outs:
        return plan.results
    missing = [spec if out is None else None for spec, out in zip(plan.results, outs, strict=True)]
    return missing if any(out is None for out in outs) else None


def _gapless(arrays: Sequence[Array | None]) -> bool:
    """True if all arrays have elements, without gaps in whatever order of axes."""
    return all(each is None or (each.size and memory.has_no_gaps(each)) for each in arrays)


def _on_one_device(library: Framework, views: Sequence[Array | None]) -> bool:
    """True if views, which may be absent, are all arrays of one library on one device."""
    present = []
    for view in views:
        if view is not None:
            present.append(view)
    return len(set(map(type, present))) == 1 and library.on_one_device(present)


def _signature(
    call: Call, backend: Backend | None, arrays: Sequence[Array | None], layouts: Any = None
) -> tuple[Any, ...]:
    """All that a plan depends on. ``layouts``: a library's own description of its arrays."""
    if layouts is None:
        layouts = tuple([None if a is None else (a.shape, a.dtype, a.strides) for a in arrays])
    # What can be changed, as a tensor that is an integer, gets no hash.
    options = [each if isinstance(each, _CONSTANT) else [each] for each in call.options(call)]
    return (backend, layouts, *options, *map(type, options))


def _decide(call: Call, outs: Sequence[Array | None]) -> Plan:
    """The plan of an opened call, which sees descriptions in the place of arrays."""
    described = call.described(Described.of)
    labels = labels_of(len(outs))
    for name, label, out in zip(call.result_names, labels, outs, strict=False):
        described.__dict__[name] = None if out is None else Described.of(label, out)
    plan = call.layout.plan(described)
    options = plan.options.items()
    plan.changed = tuple((n, value) for n, value in options if value is not getattr(call, n))
    return plan
