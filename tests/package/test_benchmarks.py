"""The benchmarks' own code: the run for GPUs, on the emulator; its timer; records and pages."""

import math
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import gradkit
from benchmarks import __main__ as run
from benchmarks import (
    calls,
    channels,
    devices,
    overhead,
    peers,
    record,
    report,
    rows,
    shapes,
    system_info,
    timing,
    variants,
)
from benchmarks.host import MAKERS
from gradkit import _host

CASES = 98


def test_a_record_says_how_it_was_asked_for_and_not_where_it_was_written():
    asked = ["--device", "cuda", "--out", "/somewhere/x.jsonl", "--peers", "torch,torch cuDNN"]
    said = "python -m benchmarks --device cuda --peers 'torch,torch cuDNN'"
    assert run._command(asked) == said


def benchmark(monkeypatch, path, *options, status=0):
    """The record of ``python -m benchmarks`` on the emulator."""
    command = ["benchmarks", "--device", "emulated", "--seconds", "0.01", "--out", str(path)]
    monkeypatch.setattr(sys, "argv", [*command, "--peers", "naive", *options])
    assert run.main() == status
    return report.read(path)


@pytest.mark.slow
@pytest.mark.emulated
def test_the_run_for_gpus_runs_on_the_emulator(monkeypatch, tmp_path, capsys):
    found = benchmark(monkeypatch, tmp_path / "found.jsonl")
    assert len(found["cases"]) == CASES
    for case in found["cases"]:
        assert "failed" not in case
        assert case["ms"]["gradkit"][1] > 0
        assert case["wall_ms"]["gradkit"] > 0
        assert not case["bytes"] or case["own copy"][1] > 0
        assert all(ratio[1] > 0 for ratio in case["ratio"].values())
        assert case["ratio"]
    assert found["dropped"] == found["errors"] == []
    assert found["startup"]["layer_norm_grad"]["cold"] > 0
    assert f"The host takes {found['formula_us']:.1f} us" in report.page(found, [], "cases.md")
    assert "zero_grad 40x40 float32\n" in capsys.readouterr().out  # as it goes


@pytest.mark.emulated
def test_a_spent_budget_drops_cases_and_says_which(monkeypatch, tmp_path):
    found = benchmark(monkeypatch, tmp_path / "found.jsonl", "--budget", "1e-9")
    assert found["cases"] == []
    assert len(found["dropped"]) == len(run.FAMILIES)
    dropped = "rows: layer_norm_grad 24x64 bfloat16 and all cases after it"
    assert found["dropped"][0] == dropped
    assert f"for lack of time: {dropped}" in report.page(found, [], "cases.md")


@pytest.mark.parametrize(
    ("budget", "of_rows", "dropped"),
    [
        (46, 1, []),
        (34, 0, []),
        (23, 1, ["rows: rows 7", "lists: lists 1", "step: step 5", "overhead: overhead 1"]),
    ],
)
def test_families_share_the_budget_by_their_cases_and_leave_the_next_the_rest(
    monkeypatch, budget, of_rows, dropped
):
    """By a clock that only cases move: those of rows by ``of_rows`` seconds, others by one."""
    counts, now = {"rows": 12, "channels": 0, "lists": 2, "step": 10, "overhead": 2}, [0.0]

    def add(_, case, *__):
        now[0] += of_rows if case.startswith("rows") else 1

    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(
        run, "_cases", lambda name, *_, **__: [f"{name} {k}" for k in range(counts[name])]
    )
    monkeypatch.setattr(run, "_add", add)
    options = SimpleNamespace(only=",".join(run.FAMILIES), quick=False, seconds=1)
    found = {"cases": [], "dropped": [], "errors": []}
    list(run._measured(found, SimpleNamespace(name="cuda"), [], options, budget))
    assert [each.partition(" and")[0] for each in found["dropped"]] == dropped


@pytest.mark.emulated
@pytest.mark.slow
def test_a_wrong_result_is_not_timed_and_fails_the_run(monkeypatch, tmp_path):
    right = rows.TABLES["rms_norm_grad"]["gradkit"]

    def wrong(**arguments):
        dx, dscale = right(**arguments)
        dscale[3] += 1
        return dx, dscale

    monkeypatch.setitem(rows.TABLES["rms_norm_grad"], "gradkit", wrong)
    options = ("--quick", "--only", "rms_norm_grad,accumulate")
    found = benchmark(monkeypatch, tmp_path / "found.jsonl", *options, status=1)
    assert {case["operation"] for case in found["cases"]} == {
        "accumulate_grad",
        "accumulate_grad, compensated",
        "accumulate_grads, stochastic",
        "accumulate_grads with their norm",
        "accumulate_grads, norm of what arrives",
        "rms_norm_grad, offset",
        "rms_norm_grad, with ds",
    }
    assert len(found["errors"]) == 4
    expected = "rms_norm_grad 24x64 bfloat16: AssertionError: rms_norm_grad 24x64 bfloat16 is off"
    assert found["errors"][0].startswith(expected)
    assert f"**Failed: {expected}" in report.page(found, [], "cases.md")


def test_cases_of_a_cpu_differ_and_have_calls_of_peers():
    """Without arrays: they are made when a case is measured."""
    device = devices.Cpu()
    found = [c for name in run.FAMILIES for c in run._cases(name, [name], device, quick=False)]
    assert len(set(map(str, found))) == len(found) > 100
    known = {*peers._PEERS}
    assert all(known >= case.table.keys() >= {"gradkit"} for case in found)


def test_cudnn_by_pytorch_is_a_peer_of_the_dtypes_that_pytorch_gives_to_it():
    device = SimpleNamespace(name="cuda")
    found = [c for c in channels.cases(device) if c.operation == "batch_norm_grad"]
    assert {case.dtype for case in found} == {"bfloat16", "float32"}
    for case in found:
        assert ("torch cuDNN" in case.table) == (case.dtype == "float32")
        first = "channels last" not in case.shape
        assert ("torch cuDNN" in case.targets) == (case.dtype == "float32" and first)


@pytest.mark.parametrize("operation", ["grad_norm", "clip_grad_norm, scaling"])
def test_only_some_of_many_gradients_are_compared_in_float64(operation):
    """All of an 8-billion-parameter model's would not fit into a GPU's memory."""
    many = list(run._cases("lists", [operation], devices.Cpu(), quick=True))[-1]
    assert many.shape == "1000 x 256"
    assert len(many.checked(many.arguments())["grads"]) == 16


def test_short_calls_take_turns_and_are_printed_with_differences():
    calls = {"short": lambda: None, "long": lambda: sum(range(2000))}
    found = timing.microseconds(calls, rounds=3)
    assert 0 < found["short"] < found["long"]
    text = overhead.table("tensors", {"grad_norm": {"memory": 4.0, "torch": 15.0}})
    assert " ".join(text.splitlines()[-1].split()) == "| grad_norm | 4.0 | 15.0 | 11.0 |"


@pytest.mark.parametrize("worker", [False, True])
def test_calls_by_pyperf_are_made_where_they_are_timed(worker):
    made = []

    def make():
        made.append("made")
        return lambda: None

    class Runner:
        args = SimpleNamespace(worker=worker)

        def bench_time_func(self, name, seconds):
            assert name == "row: way"
            assert seconds(10) > 0
            assert seconds(10) > 0
            return SimpleNamespace(get_values=lambda: [1e-6, 3e-6, 2e-6])

    found = overhead.by_pyperf(Runner(), {"row": {"way": make}})
    assert found == (None if worker else {"row": {"way": 2.0}})
    assert made == ["made"]


# The timer, on a device that does nothing but remember


class FakeCupy:
    """As much of CuPy as is asked for; ``did`` is what was queued, ``now`` the host's clock."""

    __version__ = "14.0.0"

    def __init__(self):
        self.did, self.now, events = [], 0.0, iter(("start", "stop"))
        attributes = {"ClockRate": 1000, "MultiProcessorCount": 2, "L2CacheSize": 1 << 10}
        properties = {"name": b"NVIDIA H200", "multiProcessorCount": 132}
        properties |= {"l2CacheSize": 60 << 20, "totalGlobalMem": 139 << 30}
        device = SimpleNamespace(id=0, compute_capability="90", attributes=attributes)
        stream = SimpleNamespace(synchronize=lambda: self.did.append("synchronize"))
        runtime = SimpleNamespace(
            driverGetVersion=lambda: 13000,
            runtimeGetVersion=lambda: 13000,
            getDeviceProperties=lambda number: {0: properties}[number],
        )
        self.cuda = SimpleNamespace(
            Device=lambda: device,
            Event=lambda: self._event(next(events)),
            get_elapsed_time=lambda *_: 2.5,
            get_current_stream=lambda: stream,
            nvrtc=SimpleNamespace(getVersion=lambda: (13, 0)),
            runtime=runtime,
        )

    def __getattr__(self, name):
        return getattr(np, name)

    def RawModule(self, code):  # noqa: N802
        assert "__global__ void evict" in code
        return SimpleNamespace(get_function=self._function)

    def _event(self, name):
        record = partial(self.did.append, name)
        return SimpleNamespace(record=record, synchronize=partial(self.did.append, "wait"))

    def _function(self, name):
        def launch(grid, block, arguments):
            assert 1 <= math.prod(grid) <= 1 << 16
            assert math.prod(block) <= 1024
            assert all(isinstance(value, (np.ndarray, np.generic)) for value in arguments)
            self.did.append((name, int(arguments[0])) if name == "hold" else name)

        return launch

    def call(self, seconds):
        """A call that takes the host so long."""

        def call():
            self.now += seconds

        return call

    def holds(self):
        """Microseconds for which the device was kept busy; its clock has 1 MHz."""
        return [did[1] for did in self.did if did[0] == "hold"]


@pytest.fixture
def cupy(monkeypatch):
    """By whose clock the host runs, which a busy machine does not move."""
    found = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", found)
    monkeypatch.setattr(devices, "time", SimpleNamespace(perf_counter=lambda: found.now))
    monkeypatch.setattr(devices.Cuda, "copied", 64)
    return found


def test_a_call_is_timed_cold_and_behind_a_busy_device(cupy):
    assert devices.Cuda().timer(partial(cupy.did.append, "call")) == 2.5e-3
    assert cupy.did == ["evict", ("hold", 100), "start", "call", "stop", "wait"]


def test_a_slow_host_is_waited_for(cupy):
    cuda, slow = devices.Cuda(), cupy.call(0.002)
    for held in ([100, 4000], [100, 4000, 4000]):  # the second time it is known
        assert cuda.timer(slow) == 2.5e-3
        assert cupy.holds() == held
    cuda.timer(cupy.call(0.00005))
    cuda.timer(cupy.call(0.2))  # longer than any wait
    assert cupy.holds()[3:] == [100, 100, 50_000]


def test_wall_time_is_of_many_calls_and_waits_at_the_end(cupy):
    done, slow = [], cupy.call(0.002)
    assert devices.Cuda().wall(lambda: done.append(slow())) == pytest.approx(0.002)
    assert len(done) in (5, 6)  # one to see how many 10 ms take, those
    assert cupy.did[-1] == "synchronize"


@pytest.mark.usefixtures("cupy")
def test_the_gpu_is_described(monkeypatch):
    monkeypatch.setenv("PATH", "")  # no nvidia-smi
    described = system_info.describe() | {"gpu": system_info.describe_gpu()}
    assert system_info.slug(described) == "nvidia-h200"
    page = report.page(results(machine=described), [], "cases.md")
    assert page.startswith("# NVIDIA H200, 2026-01-01\n\n132 multiprocessors, L2 60 MiB, driver ")
    assert "driver unknown, CUDA 13000, NVRTC (13, 0)" in page
    assert "cupy 14.0.0" in page


def test_without_a_gpu_the_run_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--device", "cuda"])
    with pytest.raises(SystemExit, match="--device cuda is not available: ModuleNotFoundError"):
        run.main()


def test_numbers_repeat_but_never_fill_with_one_value():
    place = devices.Emulated()
    array = place.normal((1100, 1000), "float32", seed=3)
    assert array.shape == (1100, 1000)
    assert np.unique(array[:1000]).size > 900_000
    assert not np.array_equal(array[0], place.normal((1100, 1000), "float32", seed=4)[0])
    half = place.normal((4, 4), "bfloat16")
    np.testing.assert_array_equal(place.exact(half), half.astype(np.float64))


# Records


def test_a_run_writes_no_tracked_file(monkeypatch):
    monkeypatch.delenv("OUT", raising=False)
    root = Path(run.__file__).parents[1]
    folder = run.folder().relative_to(root)
    assert f"/{folder}/" in (root / ".gitignore").read_text().splitlines()
    if shutil.which("git") and (root / ".git").exists():
        ignored = ("git", "check-ignore", "--quiet", folder / "found.jsonl")
        assert subprocess.run(ignored, cwd=root).returncode == 0
    monkeypatch.setenv("OUT", "/elsewhere")
    assert run.folder() == Path("/elsewhere")


@pytest.fixture
def published(monkeypatch, tmp_path):
    """The folders that ``record`` writes, with records of this machine and of another one."""
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(record, "PAGE", tmp_path / "performance.md")
    monkeypatch.setattr(record, "PAGES", tmp_path / "records")
    monkeypatch.setattr(record, "README", tmp_path / "README.md")
    record.README.write_text("<!-- gpu -->\n| old |\n\nrest\n")
    for name, kind in (("plots", "peers"), ("glance", "glance")):
        plot = lambda run, stem, kind=kind: stem.with_name(f"{stem.name}-{kind}.png").touch()  # noqa: ARG005, E731
        monkeypatch.setattr(report, name, plot)
    for name in ("a-processor-2-cores-2025-12-31", "a-processor-24-cores-2025-12-31"):
        report.write(results(device="cpu"), record.RESULTS / f"{name}.jsonl")
        (record.RESULTS / f"{name}-peers.png").touch()
    return record.RESULTS


def recorded(monkeypatch, tmp_path, **changes):
    path = tmp_path / "run.jsonl"
    report.write(results(device="cpu") | changes, path)
    monkeypatch.setattr(sys, "argv", ["record", str(path)])
    record.main()
    return path.read_text()


def test_recording_a_run_replaces_the_same_machines(monkeypatch, tmp_path, published):
    text = recorded(monkeypatch, tmp_path, seconds=9)
    name = "a-processor-2-cores-2026-01-01"
    files = ".jsonl", "-peers.png", "-glance.png"
    names = (name, "a-processor-24-cores-2025-12-31")
    assert {path.name for path in published.iterdir()} == {n + f for n in names for f in files}
    assert (published / f"{name}.jsonl").read_text() == text
    assert record.PAGE.read_text().count("-glance.png)") == 2
    pages = {path.name: path.read_text() for path in record.PAGES.iterdir()}
    machines = "a-processor-2-cores", "a-processor-24-cores"
    assert {*pages} == {f"{m}{end}.md" for m in machines for end in ("", "-cases")}
    page = pages["a-processor-2-cores.md"]
    assert page.startswith("# a processor, 2 cores, 2026-01-01\n")
    assert f"](../results/{name}-peers.png)" in page
    assert "[All cases](a-processor-2-cores-cases.md)" in page


def on_an_h200(**changes):
    """A run of one case on a GPU."""
    cuda = {"runtime": 13000, "nvrtc": [13, 0]}
    gpu = {"name": "NVIDIA H200", "multiprocessors": 132, "l2_mib": 60, "driver": "1"}
    machine = results()["machine"] | {"gpu": gpu | {"cuda": cuda, "clocks": "", "versions": {}}}
    case = {"operation": "layer_norm_grad", "shape": "16384x4096", "dtype": "bfloat16"}
    case |= {"bytes": 4e8, "note": "", "copy": [0.9] * 3, "own copy": [0.95] * 3}
    case["targets"] = {"torch.compile": 1.5}
    case |= {"ms": {"gradkit": [0.1067] * 3, "torch": [0.2] * 3}, "ratio": {"torch": [1.9] * 3}}
    case["wall_ms"] = {"gradkit": 1.25, "torch": 1.2}
    return results(machine=machine, cases=[case]) | changes


@pytest.mark.usefixtures("published")
def test_a_gpus_run_has_a_table_in_the_readme_and_a_chart_on_the_page(monkeypatch, tmp_path):
    command = "python -m benchmarks --device cuda --peers torch"  # a choice of peers is no gap
    recorded(monkeypatch, tmp_path, **on_an_h200(seconds=9, command=command))
    row = "| layer norm's gradient, 16384 x 4096, bfloat16 | 1.25 ms | **1.2 ms** |\n"
    head = "| time of a call on one NVIDIA H200 | gradkit | PyTorch |\n|---|---|---|\n"
    assert record.README.read_text() == f"<!-- gpu -->\n{head}{row}\nrest\n"
    page = record.PAGE.read_text()
    assert "nvidia-h200-2026-01-01-glance.png)" in page
    assert "In 1 of 1 cases another library is faster:" in page
    assert "| layer_norm_grad 16384x4096 bfloat16 | PyTorch 0.96x |\n" in page
    about, every = ((record.PAGES / f"nvidia-h200{end}.md").read_text() for end in ("", "-cases"))
    assert f"Made by `{command}`" in about
    assert report.OWN_COPY in about
    assert "| 0.90 (0.95) |" in every


def test_a_part_of_a_run_adds_other_peers_to_the_same_cases(monkeypatch, tmp_path, published):
    run, part, other = (tmp_path / f"{name}.jsonl" for name in ("run", "part", "other"))
    report.write(on_an_h200(seconds=9), run)
    again = on_an_h200(seconds=9, command="python -m benchmarks --only layer_norm_grad")
    (case,) = again["cases"]
    case["ms"] = {"gradkit": [0.5] * 3, "torch.compile": [0.8] * 3}
    case["ratio"], case["wall_ms"] = {"torch.compile": [1.6] * 3}, {"torch.compile": 2.0}
    report.write(again, part)
    report.write(results(device="cpu", seconds=9), other)
    monkeypatch.setattr(sys, "argv", ["record", str(run), str(other)])
    with pytest.raises(SystemExit, match=r"other\.jsonl is not recorded: it is of another machine"):
        record.main()
    monkeypatch.setattr(sys, "argv", ["record", str(run), str(part)])
    record.main()
    (found,) = report.read(published / "nvidia-h200-2026-01-01.jsonl")["cases"]
    assert found["ms"]["gradkit"] == [0.1067] * 3
    assert found["ratio"] == {"torch": [1.9] * 3, "torch.compile": [1.6] * 3}
    page = (record.PAGES / "nvidia-h200.md").read_text()
    assert "are from `python -m benchmarks --only layer_norm_grad`." in page
    assert re.search(r"\| torch\.compile / +\| >= 1\.5 +\| 1\.6 ", page)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "did not finish"),
        ({"seconds": 9, "device": "emulated"}, "the emulator's times mean nothing"),
        ({"seconds": 9, "errors": ["clip: ValueError: no"]}, "errors: clip: ValueError: no"),
        ({"seconds": 9, "command": "python -m benchmarks --only clip"}, "partial one, with --only"),
    ],
)
def test_what_should_not_be_published_is_refused(monkeypatch, tmp_path, published, changes, reason):
    before = sorted(published.iterdir())
    with pytest.raises(SystemExit, match=reason):
        recorded(monkeypatch, tmp_path, **changes)
    assert sorted(published.iterdir()) == before
    assert not record.PAGE.exists()


def test_a_run_that_cannot_be_repeated_is_published_with_its_errors(
    monkeypatch, tmp_path, published
):
    with pytest.raises(SystemExit, match="errors"):
        recorded(monkeypatch, tmp_path, seconds=9, errors=["clip: ValueError: no"])
    monkeypatch.setattr(sys, "argv", [sys.argv[0], "--with-errors", *sys.argv[1:]])
    record.main()
    assert (published / "a-processor-2-cores-2026-01-01.jsonl").exists()
    page = (record.PAGES / "a-processor-2-cores.md").read_text()
    assert "**Failed: clip: ValueError: no.**" in page


@pytest.mark.skipif(not record.RESULTS.is_dir(), reason="a source distribution has no results")
def test_the_page_is_the_one_that_the_records_make(tmp_path):
    """And a record that is read and written stays what it is."""
    pages = record.pages()
    assert {*record.PAGES.iterdir()} < {*pages}
    for path, text in pages.items():
        assert path.read_text() == text
    assert record.SPEED.search(pages[record.README])
    for path in record.RESULTS.glob("*.jsonl"):
        report.write(report.read(path), tmp_path / path.name)
        assert (tmp_path / path.name).read_text() == path.read_text()


# Targets, shapes, pages


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        ((8192, 5120), {"copy": 0.85, "torch": 2.0, "torch.compile": 1.8, "liger": 1.0}),
        ((4096, 16384), {"copy": 0.72, "torch.compile": 1.5}),
        ((65536, 1024), {"copy": 0.75, "torch": 2.0}),
        ((131072, 128), {"copy": 0.65, "torch.compile": 1.5}),
        ((8192, 768), {"copy": 0.55, "torch": 1.5}),
        ((1, 4096), {"ms": 0.008, "wall ms": 0.02, "torch": 1, "torch.compile": 1, "liger": 1}),
    ],
)
def test_targets_go_by_class(shape, wanted):
    assert rows.gpu_targets(0.85, shape, 3 * 2 * math.prod(shape)) == wanted


@pytest.mark.parametrize(
    ("name", "tensors", "elements"),
    [
        ("GPT-2 124M", 148, 124_439_808),
        ("ResNet-50", 161, 25_557_032),
        (shapes.LLAMA, 291, 8_030_261_248),
    ],
)
def test_lists_are_the_models_that_they_name(name, tensors, elements):
    assert len(shapes.LISTS[name]) == tensors
    assert shapes.list_bytes(shapes.LISTS[name], "float32") == 4 * elements


def results(**changes):
    """A run of one case."""
    case = {
        "operation": "zero_grad",
        "shape": "64",
        "dtype": "float32",
        "bytes": 0,
        "note": timing.OVERHEAD,
        "failed": {"liger": "ImportError: no"},
        "others": 0.0,
        "ms": {"gradkit": [2.0] * 3, "torch": [1.0] * 3, timing.LAUNCH: [0.1] * 3},
        "wall_ms": {"gradkit": 8.0, "torch": 1.0, timing.LAUNCH: 2.0},
        "ratio": {"torch": [0.5] * 3, timing.LAUNCH: [0.05] * 3},
        "targets": {"torch": 1.0, "ms": 3.0, "wall ms": 7.0, timing.LAUNCH: 3.0},
    }
    machine = {
        "cpu": "a processor",
        "cores": 2,
        "caches": {},
        "system": "Linux",
        "python": "3.12",
        "blas": "openblas",
        "versions": {"gradkit": "0.1.0"},
    }
    found = {"date": "2026-01-01", "command": "c", "device": "cuda", "machine": machine}
    rest = {"missing": {"liger": "no"}, "dropped": ["clip"], "errors": [], "load": [0.0, 0.0]}
    return found | rest | {"cases": [case]} | changes


def test_pages_say_what_is_slower_what_was_missed_and_what_was_not_measured():
    assert list(timing.verdicts(results()["cases"][0])) == [
        ("torch /", 1.0, 0.5, False),
        ("ms", 3.0, 2.0, True),
        ("wall ms", 7.0, 8.0, False),
        ("wall in launches", 3.0, 4.0, False),
    ]
    assert "| 1 (**0.50x**)    | 0.1 (0.05x)" in report.cases_page(results(), "run.md")
    page = report.page(results(), ["../results/h200-peers.png"], "cases.md")
    assert "Not measured: liger (no)." in page
    assert "Not measured, for lack of time: clip." in page
    assert "Not measured: liger on zero_grad 64 float32 (ImportError: no)." in page
    assert "| wall in launches | <= 3" in page
    assert "](../results/h200-peers.png)" in page


def test_plots_are_drawn(tmp_path):
    if not os.environ.get("CI"):  # there, a missing package is a failure
        pytest.importorskip("matplotlib")
    curve = {"at": [1, 2], "ns an element": [2.0, 1.0]}
    scaling = {"by rows": curve, "by columns": curve}
    drawn = report.plots(results(scaling=scaling), tmp_path / "found")
    assert [path.name for path in drawn] == ["found-peers.png", "found-scaling.png"]
    assert all(path.stat().st_size > 1000 for path in drawn)
    assert report.glance(results(), tmp_path / "none") is None  # no case of the chart
    pairs = {"naive": [1, 2.5, 4], "torch": [0.1, 0.4, 1]}
    small = {"operation": "grad_norm", "shape": "1 x 64", "dtype": "float32", "ratio": pairs}
    chart = report.glance({"device": "cpu", "cases": [small]}, tmp_path / "found")
    assert chart == tmp_path / "found-glance.png"
    assert chart.stat().st_size > 1000


@pytest.mark.parametrize(
    ("place", "most"),
    [
        ("numpy", [(12, 7), (13, 8), (13, 8), (9, 7)]),
        ("idle", [(11, 7), (11, 7), (11, 7), (10, 5)]),
    ],
)
def test_a_warm_call_runs_few_functions_of_few_files(place, most):
    """About as many as `python -m benchmarks.calls` has found."""
    if not _host.describe()["compiled"]["available"]:
        pytest.skip("counted with compiled code")
    with MAKERS[place]() as make:
        rows = calls.counts(place, make)
    assert [label for label, *_ in rows] == [f"{place}: {name}" for name in calls.COUNTED]
    for (label, *found), bounds in zip(rows, most, strict=True):
        numbers = tuple(map(int, found))
        assert all(0 < n <= bound for n, bound in zip(numbers, bounds, strict=True)), (
            label,
            numbers,
        )


def test_only_calls_of_functions_in_files_of_gradkit_are_counted():
    """A comprehension is none, and a generator one each time that it goes on."""
    text = "def steps():\n    yield 1\ndef call():\n    return [len(str(n)) for n in steps()]\n"
    names = {}
    exec(compile(text, Path(gradkit.__file__).with_name("made_up.py"), "exec"), names)
    seen = calls.traced(lambda: (names["call"](), Path("elsewhere").is_absolute()))
    assert seen == [("made_up.py", "call"), ("made_up.py", "steps"), ("made_up.py", "steps")]


def test_times_of_calls_are_set_beside_others(monkeypatch):
    monkeypatch.setattr(
        calls, "microseconds", lambda every: {n: 2.0 + k for k, n in enumerate(every)}
    )
    rows = {label: row for label, *row in calls.times({"one": np.array, "two": np.array})}
    names = list(calls.calls(np.array))
    assert list(rows) == [f"{place}: {name}" for place in ("one", "two") for name in names]
    assert rows[f"one: {calls.LIST}"] == ["3.0", "", ""]
    assert rows[f"one: {calls.DICT}"] == ["5.0", "1.67", f"one: {calls.LIST}"]
    again = 2 + len(names)
    assert rows[f"two: {calls.NORM}"] == [f"{again:.1f}", f"{again / 2:.2f}", f"one: {calls.NORM}"]


def test_variants_change_what_there_is():
    """Modules have the attributes, and a kernel's text what is replaced in it."""
    kernels = Path(run.__file__).parents[1] / "kernels"
    texts = [path.read_text() for path in kernels.iterdir() if path.is_file()]
    for case in variants.CASES.values():
        assert len({variant.name for variant in case.variants}) == len(case.variants)
        for variant in case.variants:
            assert variant.attributes or variant.texts
            for module, name, value in variant.attributes:
                assert isinstance(value, int) == isinstance(getattr(module, name), int)
            for old, _ in variant.texts:
                assert sum(text.count(old) for text in texts) == 1
