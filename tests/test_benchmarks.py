"""The benchmarks' own code: the run for GPUs, on the emulator; its timer; what pages say."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import gradkit
from benchmarks import __main__ as run
from benchmarks import (
    bench_batch_norm,
    harness,
    machine,
    norms,
    passes,
    places,
    record,
    report,
    shapes,
)

CASES = 50


def benchmark(monkeypatch, path, *options, status=0):
    """The results of ``python -m benchmarks`` on the emulator."""
    command = ["benchmarks", "--device", "emulated", "--seconds", "0.01", "--out", str(path)]
    monkeypatch.setattr(sys, "argv", [*command, "--peers", "cupy", *options])
    assert run.main() == status
    return json.loads(path.read_text())


@pytest.mark.slow
@pytest.mark.emulated
def test_the_run_for_gpus_runs_on_the_emulator(monkeypatch, tmp_path, capsys):
    found = benchmark(monkeypatch, tmp_path / "found.json")
    assert len(found["cases"]) == CASES
    for case in found["cases"]:
        assert case["failed"] == {}
        assert case["ms"]["gradkit"]["median"] > 0
        assert case["wall_ms"]["gradkit"]["median"] > 0
        assert case["ratios"]
        assert all(ratio["median"] > 0 for ratio in case["ratios"].values())
    assert found["dropped"] == found["errors"] == []
    assert found["startup"]["layer_norm_grad"]["cold"] > 0
    assert found["import"]["added"] < found["import"]["gradkit"]
    page = (tmp_path / "found.md").read_text()
    assert "the times mean nothing" in page
    rows = re.findall(r"\| clip_grad_norm, not scaling +\| 100 x 16", page)
    assert len(rows) == 2  # cases; where it is slower
    assert (tmp_path / "found-peers.png").stat().st_size > 1000
    assert "zero_grad 40x40 float32\n" in capsys.readouterr().out  # as it goes


@pytest.mark.emulated
def test_a_spent_budget_drops_cases_and_says_which(monkeypatch, tmp_path):
    found = benchmark(monkeypatch, tmp_path / "found.json", "--budget", "1e-9")
    assert found["cases"] == []
    assert len(found["dropped"]) == len(run.FILES)
    assert (
        found["dropped"][0] == "layer_norm: layer_norm_grad 24x64 bfloat16 and all cases after it"
    )
    assert (
        "for lack of time: clip: grad_norm 3 small float32" in (tmp_path / "found.md").read_text()
    )


@pytest.mark.emulated
def test_a_wrong_result_is_not_timed_and_fails_the_run(monkeypatch, tmp_path):
    right = gradkit.rms_norm_grad

    def wrong(*args, **kwargs):
        dx, dscale = right(*args, **kwargs)
        dscale[3] += 1
        return dx, dscale

    wrong.__name__ = "rms_norm_grad"
    monkeypatch.setattr(gradkit, "rms_norm_grad", wrong)
    options = ("--quick", "--only", "rms_norm,accumulate")
    found = benchmark(monkeypatch, tmp_path / "found.json", *options, status=1)
    assert [case["operation"] for case in found["cases"]] == ["accumulate_grad"] * 3 + ["zero_grad"]
    assert len(found["errors"]) == 4
    expected = "rms_norm_grad 24x64 bfloat16: AssertionError: rms_norm_grad (64,) bfloat16 is off"
    assert found["errors"][0].startswith(expected)
    assert f"**Failed: {expected}" in (tmp_path / "found.md").read_text()


# The timer, on a device that does nothing but remember


class Device:
    """As much of CuPy as ``places.Cuda`` asks for; ``did`` lists what was queued."""

    def __init__(self):
        self.did = []
        attributes = {"ClockRate": 1000, "MultiProcessorCount": 2, "L2CacheSize": 1 << 10}
        events = iter(("start", "stop"))
        self.cuda = SimpleNamespace(
            Device=lambda: SimpleNamespace(attributes=attributes),
            Event=lambda: Event(next(events), self.did),
            get_elapsed_time=lambda start, stop: {("start", "stop"): 2.5}[start.name, stop.name],
            get_current_stream=lambda: SimpleNamespace(
                synchronize=lambda: self.did.append("synchronize")
            ),
        )

    def __getattr__(self, name):
        return getattr(np, name)

    def RawModule(self, code):  # noqa: N802
        assert "__global__ void evict" in code
        return SimpleNamespace(get_function=self._function)

    def _function(self, name):
        def launch(grid, block, arguments):
            assert 1 <= math.prod(grid) <= 1 << 16
            assert math.prod(block) <= 1024
            assert all(isinstance(value, (np.ndarray, np.generic)) for value in arguments)
            self.did.append((name, int(arguments[0])) if name == "hold" else name)

        return launch


class Event:
    def __init__(self, name, did):
        self.name, self._did = name, did

    def record(self):
        self._did.append(self.name)

    def synchronize(self):
        self._did.append("wait")


class Clock:
    """The host's, which only calls move on."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def call(self, seconds):
        """A call that takes the host so long."""

        def call():
            self.now += seconds

        return call


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(places, "time", found)
    return found


@pytest.fixture
def cuda(monkeypatch, clock):  # noqa: ARG001
    """The place, by a clock that a busy machine does not move."""
    monkeypatch.setitem(sys.modules, "cupy", Device())
    monkeypatch.setattr(places.Cuda, "copied", 64)
    return places.Cuda()


def holds(place):
    """Microseconds for which the device was kept busy; its clock has 1 MHz."""
    return [did[1] for did in place.xp.did if did[0] == "hold"]


def test_a_call_is_timed_cold_and_behind_a_busy_device(cuda):
    call = lambda: cuda.xp.did.append("call")  # noqa: E731
    assert cuda.timer(call) == 2.5e-3
    assert cuda.xp.did == ["evict", ("hold", 100), "start", "call", "stop", "wait"]


def test_a_slow_host_is_waited_for(cuda, clock):
    call = clock.call(0.002)
    assert cuda.timer(call) == 2.5e-3
    assert holds(cuda) == [100, 4000]
    assert cuda.timer(call) == 2.5e-3
    assert holds(cuda) == [100, 4000, 4000]  # it is known by now
    cuda.timer(clock.call(0.00005))
    assert holds(cuda)[3:] == [100]


def test_a_call_that_always_waits_is_timed_all_the_same(cuda, clock):
    assert cuda.timer(clock.call(0.2)) == 2.5e-3
    assert holds(cuda) == [100, 50_000]


def test_wall_time_is_of_many_calls_and_waits_at_the_end(cuda, clock):
    done = []
    slow = clock.call(0.002)
    assert cuda.wall(lambda: done.append(slow())) == pytest.approx(0.002)
    assert len(done) in (11, 12)  # one to warm up, one to see how many 20 ms take, those
    assert cuda.xp.did[-1] == "synchronize"


def test_the_gpu_is_described(monkeypatch):
    properties = {"name": b"NVIDIA H200", "multiProcessorCount": 132}
    properties |= {"l2CacheSize": 60 << 20, "totalGlobalMem": 139 << 30}
    cuda = SimpleNamespace(
        Device=lambda: SimpleNamespace(id=0, compute_capability="90"),
        nvrtc=SimpleNamespace(getVersion=lambda: (13, 0)),
        runtime=SimpleNamespace(
            driverGetVersion=lambda: 13000,
            runtimeGetVersion=lambda: 13000,
            getDeviceProperties=lambda number: {0: properties}[number],
        ),
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda, __version__="14.0.0"))
    monkeypatch.setenv("PATH", "")  # no nvidia-smi
    found = machine.describe_gpu()
    described = machine.describe() | {"gpu": found}
    assert machine.slug(described) == "nvidia-h200"
    page = report.page(results(machine=described), [])
    assert page.startswith("# NVIDIA H200, 2026-01-01\n\n132 multiprocessors, L2 60 MiB, driver ")
    assert "driver unknown, CUDA 13000, NVRTC (13, 0)" in page
    assert "cupy 14.0.0" in page


def test_without_a_gpu_the_run_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--device", "cuda"])
    with pytest.raises(SystemExit, match="--device cuda is not available: ModuleNotFoundError"):
        run.main()


def test_numbers_repeat_but_never_fill_with_one_value():
    place = places.Emulated()
    array = place.normal((1100, 1000), "float32", seed=3)
    assert array.shape == (1100, 1000)
    assert np.unique(array[:1000]).size > 900_000
    assert not np.array_equal(array[0], place.normal((1100, 1000), "float32", seed=4)[0])
    half = place.normal((4, 4), "bfloat16")
    np.testing.assert_array_equal(place.exact(half), half.astype(np.float64))


# Where results go


def test_a_run_writes_no_tracked_file(monkeypatch):
    monkeypatch.delenv("OUT", raising=False)
    root = Path(run.__file__).parents[1]
    folder = run.folder().relative_to(root)
    assert f"/{folder}/" in (root / ".gitignore").read_text().splitlines()
    if shutil.which("git") and (root / ".git").exists():
        ignored = ("git", "check-ignore", "--quiet", folder / "found.json")
        assert subprocess.run(ignored, cwd=root).returncode == 0
        tracked = subprocess.run(("git", "ls-files", folder), cwd=root, capture_output=True)
        assert tracked.stdout == b""
    monkeypatch.setenv("OUT", "/elsewhere")
    assert run.folder() == Path("/elsewhere")


@pytest.fixture
def published(monkeypatch, tmp_path):
    """The folders that ``record`` writes, with results of this machine and of another one."""
    if not os.environ.get("CI"):  # there, a missing package is a failure
        pytest.importorskip("matplotlib")
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(record, "PAGE", tmp_path / "docs" / "performance.md")
    record.PAGE.parent.mkdir()
    record.RESULTS.mkdir()
    for name in ("a-processor-2-cores-2025-12-31", "a-processor-24-cores-2025-12-31"):
        for rest in (".json", ".md", "-peers.png"):
            (record.RESULTS / f"{name}{rest}").write_text(json.dumps(results(device="cpu")))
    return record.RESULTS


def recorded(monkeypatch, tmp_path, **changes):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(results(device="cpu", errors=[]) | changes))
    monkeypatch.setattr(sys, "argv", ["record", str(path)])
    record.main()
    return path.read_text()


def test_recording_a_run_replaces_the_same_machines(monkeypatch, tmp_path, published):
    text = recorded(monkeypatch, tmp_path, seconds=9)
    name = "a-processor-2-cores-2026-01-01"
    found = {path.name for path in published.iterdir()}
    ours = {f"{name}.json", f"{name}.md", f"{name}-peers.png"}
    assert found == ours | {
        f"a-processor-24-cores-2025-12-31{rest}" for rest in (".json", ".md", "-peers.png")
    }
    assert (published / f"{name}.json").read_text() == text
    assert f"![{name}-peers.png]({name}-peers.png)" in (published / f"{name}.md").read_text()
    page = record.PAGE.read_text()
    assert page.count("## a processor, 2 cores, 2026-01-01") == 2  # the other file says the same
    assert f"![peers](../results/{name}-peers.png)" in page


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


@pytest.mark.skipif(not record.RESULTS.is_dir(), reason="a source distribution has no results")
def test_the_page_is_the_one_that_the_results_make():
    assert record.PAGE.read_text() == record.overview()


# Targets, shapes, pages


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        ((16384, 4096), {"copy": 0.85, "torch": 2.0, "torch.compile": 1.8, "liger": 1.0}),
        ((8192, 5120), {"copy": 0.85, "torch": 2.0, "torch.compile": 1.8, "liger": 1.0}),
        ((4096, 16384), {"copy": 0.72, "torch.compile": 1.5}),
        ((65536, 1024), {"copy": 0.75, "torch": 2.0}),
        ((131072, 128), {"copy": 0.65, "torch.compile": 1.5}),
        ((8192, 768), {"copy": 0.55, "torch": 1.5}),
        ((1, 4096), {"ms": 0.008, "wall ms": 0.02, "torch": 1, "torch.compile": 1, "liger": 1}),
    ],
)
def test_targets_go_by_class(shape, wanted):
    assert norms.row_targets(0.85, shape, 3 * 2 * math.prod(shape)) == wanted


def test_lists_are_the_models_that_they_name():
    counts = {
        name: (len(wanted), sum(map(math.prod, wanted)))
        for name, (_, wanted) in shapes.DEVICE_LISTS.items()
    }
    assert counts["GPT-2 124M"] == (148, 124_439_808)
    assert counts["ResNet-50"] == (161, 25_557_032)
    assert counts["Llama-3-8B"] == (291, 8_030_261_248)


def results(**changes):
    """A results file of one case."""
    spread = lambda ms: {"min": ms, "q1": ms, "median": ms, "q3": ms}  # noqa: E731
    case = {
        "operation": "zero_grad",
        "shape": "64",
        "dtype": "float32",
        "bytes": 0,
        "note": "overhead",
        "failed": {"liger": "ImportError: no"},
        "cores_taken_by_others": 0.0,
        "ms": {"gradkit": spread(2.0), "torch": spread(1.0), harness.LAUNCH: spread(0.1)},
        "wall_ms": {"gradkit": spread(8.0), "torch": spread(1.0), harness.LAUNCH: spread(2.0)},
        "ratios": {"torch": spread(0.5), harness.LAUNCH: spread(0.05)},
        "of_copy": spread(0.0),
        "targets": {"torch": 1.0, "ms": 3.0, "wall ms": 7.0, harness.LAUNCH: 3.0},
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
    rest = {"missing": {"liger": "no"}, "dropped": ["clip"], "load": [0.0, 0.0], "cases": [case]}
    return found | rest | changes


def test_verdicts():
    assert list(harness.verdicts(results()["cases"][0])) == [
        ("torch /", 1.0, 0.5, False),
        ("ms", 3.0, 2.0, True),
        ("wall ms", 7.0, 8.0, False),
        ("wall in launches", 3.0, 4.0, False),
    ]


def test_pages_say_what_is_slower_and_what_was_not_measured():
    page = report.page(results(), [])
    assert "| zero_grad | 64    | float32 | torch | 0.50x" in page
    assert "Not measured: liger (no)." in page
    assert "Not measured, for lack of time: clip." in page
    assert "Not measured: liger on zero_grad 64 float32 (ImportError: no)." in page
    assert "| wall in launches | <= 3" in page.replace("  ", " ").replace("  ", " ")
    seen = report.overview([results()], [["../results/h200-peers.png"]])
    assert "![peers](../results/h200-peers.png)" in seen
    assert "Not yet run on a GPU" not in seen
    assert "Not yet run on a GPU" in report.overview([results(device="cpu")], [[]])


def test_passes_of_small_rows():
    """Every pass is timed; without peers there are no ratios."""
    rows = [
        passes.Row(gradkit.layer_norm_grad, shape, dtype, norms.rows(shape, kind, centred=True), of)
        for shape, dtype, kind, of in (
            ((8, 64), "float32", np.float32, passes.of_layer_norm),
            ((8, 64), "float16", np.float16, passes.of_layer_norm),
        )
    ]
    images = bench_batch_norm.arguments((2, 8, 3, 3), np.float32)
    rows.append(
        passes.Row(gradkit.batch_norm_grad, (2, 8, 3, 3), "float32", images, passes.of_batch_norm)
    )
    page = passes.report({row.name: passes.measure(row, []) for row in rows})
    for text in ("layer_norm_grad 8x64 float16", "| narrow dx |", "| sums of dy xhat |"):
        assert text in page
