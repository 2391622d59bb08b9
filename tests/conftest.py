"""The ``backend`` fixture, how hard Hypothesis tries, and what several processes share."""

import gc
import importlib
import json
import os
import re
import sys
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, settings

from testbed import ptx
from tests import alone
from tests.backends import ARCHITECTURE, BACKENDS, COMPILED_FILES, has_gpu
from tests.pairs import rare

_COMMON = {"deadline": None, "database": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("quick", max_examples=10, derandomize=True, **_COMMON)
# Beside those, by another seed: quick's are the first of any that it draws by its own.
settings.register_profile("further", max_examples=14, **_COMMON)
settings.register_profile("ci", max_examples=24, derandomize=True, **_COMMON)
settings.register_profile("dev", max_examples=40, **_COMMON)
settings.register_profile("fuzz", max_examples=100, print_blob=True, **_COMMON)
if os.environ.get("GRADKIT_REQUIRE_GPU") == "1" and not has_gpu():
    raise pytest.UsageError("CuPy finds no GPU, and GRADKIT_REQUIRE_GPU asks for one")
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
# With this many sets of parameters of a test, a third of them is quick in the emulator.
MANY = 6


@pytest.fixture(
    scope="module", params=[pytest.param(b, id=b.name, marks=b.marks) for b in BACKENDS]
)
def backend(request):
    """Each backend in turn: where a test's arrays live and what computes on them."""
    with request.param.active():
        yield request.param


@pytest.fixture
def xp():
    """array-api-strict, which a machine with a GPU may lack."""
    if os.environ.get("CI") == "true":
        return importlib.import_module("array_api_strict")
    return pytest.importorskip("array_api_strict")


def pytest_addoption(parser):
    """``--shuffle 7``: no test may need what another one has left behind."""
    parser.addoption("--shuffle", metavar="SEED", help="run tests in a random order")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Of a test marked ``sampled(n)``, all but every n-th set of parameters is slow.

    Of what is still many in the emulator, for which kernels must be compiled, a third is quick.
    Tests of what the compiled backend leaves to NumPy are slow. Slow ones may be rare.
    """
    places = [(item.nodeid.partition("[")[0], _backend_of(item)) for item in items]
    sets, seen = Counter(places), Counter()
    for item, place in zip(items, places, strict=True):
        file = f"{item.path.parent.name}/{item.path.name}"
        if _backend_of(item) == "compiled" and file not in COMPILED_FILES:
            item.add_marker("slow")
        sampled = item.get_closest_marker("sampled")
        every, at = sampled.args[0] if sampled else 1, 0
        if item.get_closest_marker("emulated") and sets[place] >= MANY * every:
            every *= 3
            # Another one each time, or some value of the innermost parameter would have none.
            at = seen[place] // every % every
        if seen[place] % every != at:
            item.add_marker("slow")
        seen[place] += 1
    for item in rare(items):
        item.add_marker("rare")
    yield
    if (seed := config.getoption("--shuffle")) is not None:
        Random(seed).shuffle(items)


def pytest_collection_finish(session):
    """Freeze what there is by now: every search for garbage would go through it again."""
    gc.collect()
    gc.freeze()
    _tests["all"] = len(session.items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(ids):
    """Each worker of pytest-xdist collects all tests."""
    _tests["all"] = len(ids)


def pytest_report_teststatus(report):
    """Print one dot for a hundred or so of many tests that do not fail: two lines, not two hundred.

    What fails prints its letter, and its traceback at the end.
    """
    fails = report.failed or hasattr(report, "wasxfail")
    dots_for = _tests["all"] // 100
    if fails or dots_for < 2 or (report.when != "call" and not report.skipped):
        return None
    _tests["done"] += 1
    return report.outcome, "" if _tests["done"] % dots_for else ".", report.outcome.upper()


def pytest_configure(config):
    """A worker of pytest-xdist keeps to its turn."""
    if hasattr(config, "workerinput") and alone.fcntl:
        config.pluginmanager.register(alone.Turns(__file__, alone.__file__))


def pytest_sessionfinish(session):
    """A worker of pytest-xdist hands over how much bad input it tried, and which PTX it ran."""
    if ARCHITECTURE and hasattr(session.config, "workeroutput"):
        session.config.workeroutput["ptx"] = ptx.collect()
    table = sys.modules.get("tests.bad_input")
    if table and hasattr(session.config, "workeroutput"):
        session.config.workeroutput["bad input"] = dict(table.tested)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Add up what the workers tried and ran."""
    ptx.merge(_ran, getattr(node, "workeroutput", {}).get("ptx", {}))
    if tried := getattr(node, "workeroutput", {}).get("bad input"):
        from tests.bad_input import tested

        tested.update(tried)


def pytest_terminal_summary(terminalreporter):
    """Say why tests were skipped, and how much bad input was tried and PTX ran, if any did."""
    _report_skips(terminalreporter)
    if ARCHITECTURE:
        _report_ptx(terminalreporter)
    table = sys.modules.get("tests.bad_input")
    if table is None or not table.tested:
        return
    cells, backends = sum(table.tested.values()), ", ".join(sorted(table.tested))
    terminalreporter.write_line(f"bad input: {len(table.ROWS)} rows, {cells} cells on {backends}")


def _report_skips(terminalreporter):
    """A line for each reason; pytest's own are one for each place in each file.

    All that needs a package which is not installed is skipped for one reason.
    """
    reasons = [report.longrepr[2] for report in terminalreporter.getreports("skipped")]
    package = re.compile(r".*No module named '(\w+).*", re.DOTALL)
    reasons = [package.sub(r"\1 is not installed", each) for each in reasons]
    for reason, count in Counter(reasons).most_common():
        terminalreporter.write_line(f"skipped, {count}: {reason.removeprefix('Skipped: ')}")


_tests = Counter()  # all of a run, and those done
_ran: ptx.Coverage = {}  # by workers of pytest-xdist


def _report_ptx(terminalreporter):
    """Say how much of the compiled code ran; GRADKIT_PTX_REPORT names a file for all of it."""
    ptx.merge(_ran, ptx.collect())
    terminalreporter.write_line(f"ptx: {ptx.summary(_ran)}")
    if report := os.environ.get("GRADKIT_PTX_REPORT"):
        Path(report).write_text(json.dumps(_ran))


def _backend_of(item):
    """The name of the backend that a test runs on, if it runs on one."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return getattr(parameters.get("backend"), "name", None)
