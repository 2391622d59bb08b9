"""The model of cards that nobody has: what it says of simple ones."""

import re

import numpy as np
import pytest

from benchmarks import gpu_model as model
from benchmarks import host, record, report
from benchmarks.shapes import GPU_LISTS, GPU_NORMS

CARD = model.CARDS[0]
TABLES = model.Tables()


def work(operation, shape, dtype="float32"):
    (found,) = [
        w for w in model.works() if (w.operation, w.shape, w.dtype) == (operation, shape, dtype)
    ]
    return found


@pytest.fixture
def quick_host(monkeypatch):
    """A host that takes no time, so that the device is seen."""
    monkeypatch.setattr(TABLES, "_host", dict.fromkeys(host.RECORDED, 0.0))


def predicted(made, **changed):
    return model.predicted(made, CARD._replace(**changed), TABLES)


def test_bandwidth_limits_a_card_with_little_of_it():
    """Then the time is that of dy, x, dx and what goes with them, and of the kernels' starts."""
    found = predicted(work("layer_norm_grad", "16384x4096"), bandwidth=1e9)
    assert found.limiter == "memory"
    least = 3 * 16384 * 4096 * 4 / 1e9 / model.COPY
    assert least < found.seconds < 1.1 * least


@pytest.mark.parametrize(
    ("changed", "limiter"),
    [({"double": 1e-6}, "double"), ({"clock": 1e3}, "issue"), ({"threads": 32}, "latency")],
)
def test_what_a_card_lacks_limits_it(changed, limiter):
    assert predicted(work("grad_norm", "GPT-2 124M"), **changed).limiter == limiter


@pytest.mark.usefixtures("quick_host")
def test_little_work_is_limited_by_the_start_of_its_kernels():
    found = predicted(work("grad_norm", "MLP"))
    assert found.limiter == "start"
    assert found.seconds > 2 * model.START  # two kernels


def test_a_host_that_takes_longer_than_the_device_limits_a_call(monkeypatch):
    made, times = work("rms_norm_grad", "8192x768"), dict(host.recorded())
    monkeypatch.setattr(TABLES, "_host", times)
    times["rms_norm_grad"] = 1e-3
    device = predicted(made)
    assert device.limiter != "host"
    for beside, limiter in ((0.99, device.limiter), (1.01, "host")):
        times["rms_norm_grad"] = beside * device.seconds * 1e6
        found = predicted(made)
        assert found.limiter == limiter
        assert found.device == (device if limiter == "host" else None)
        assert found.seconds == pytest.approx(max(beside, 1) * device.seconds)


def test_a_cell_has_the_devices_time_too():
    device = model.Prediction(5.94e-6, "start")
    assert str(device) == "5.9 start"
    assert str(model.Prediction(30e-6, "host", device)) == "30 host (5.9 start)"


def test_the_hosts_time_of_a_list_grows_with_its_arrays(monkeypatch):
    times = {"grad_norm": 50.0, "grad_norm, 1000": 1049.0, "batch_norm": 7.0}
    monkeypatch.setattr(TABLES, "_host", times)
    for shape, microseconds in (("MLP", 55), ("1000 x 256", 1049), ("10000 x 4096", 10_049)):
        assert TABLES.host(work("grad_norm", shape)) == pytest.approx(microseconds * 1e-6)
    assert TABLES.host(work("batch_norm", "32x64x56x56", "bfloat16")) == pytest.approx(7e-6)


def test_the_hosts_times_are_of_every_operation():
    for version in host.VERSIONS:
        times = host.recorded(version)
        assert list(times) == list(host.RECORDED)
        assert {made.operation for made in model.works()} <= times.keys()
        assert all(0 < time < 10_000 for time in times.values())


def test_recording_writes_what_is_read(monkeypatch, tmp_path):
    before = host.recorded("13.6")
    copy = tmp_path / host.TIMES.name
    copy.write_bytes(host.TIMES.read_bytes())
    monkeypatch.setattr(host, "TIMES", copy)
    times = {name: k + 0.25 for k, name in enumerate(host.RECORDED)}
    monkeypatch.setattr(host, "microseconds", lambda calls, _: {k: times[k] for k in calls})
    host._record(dict.fromkeys([*host.RECORDED, "another"]), "14.2")
    assert host.recorded("14.2") == {name: round(time, 1) for name, time in times.items()}
    assert host.recorded("13.6") == before


def test_clipping_moves_three_times_the_bytes_of_a_norm():
    norm = predicted(work("grad_norm", "GPT-2 124M"), bandwidth=1e9)
    clip = predicted(work("clip_grad_norm", "GPT-2 124M"), bandwidth=1e9)
    assert clip.seconds == pytest.approx(3 * norm.seconds, rel=0.01)


def test_every_launch_finds_a_row():
    """Also those whose combination of macros has none of its own."""
    launch = model.Launch("layer_norm_grad", "", (1,), (1,), 1)
    macros = "CENTRED=0 CHUNKS=10 DATA_T=f16 FROM_OUTPUT=0 LONG=0 PARAM_T=f16 STAT_T=f32 VEC=1"
    assert TABLES.code(launch._replace(macros=macros), 80)["kernel"] == "layer_norm_grad"
    with pytest.raises(LookupError, match="no row of layer_norm_grad for VEC=3"):
        TABLES.code(launch._replace(macros="VEC=3"), 80)


def test_a_dtype_of_half_the_size_is_looked_up_with_as_many_bytes_at_once():
    found = [*model._nearest("CHUNKS=2 DATA_T=f32 PARAM_T=f32 STAT_T=f32 VEC=4")]
    row = "CHUNKS=2 DATA_T=bf16 PARAM_T=bf16 STAT_T=f32 VEC={}"
    assert found.index(row.format(8)) < found.index(row.format(4))  # if there is no other


def test_threads_without_columns_are_counted():
    made = work("rms_norm_grad", "8192x5120", "bfloat16")
    launch = model.Launch("layer_norm_grad", "CHUNKS=2 VEC=8", (264,), (512, 1), 1)
    assert model._issued(launch, made, {"turn": "400", "macros": "VEC=8"}) == 400 * 512 / 5120
    assert not model._is_counted(launch, made)
    assert model._is_counted(launch._replace(block=(320, 1)), made)
    assert not model._is_counted(launch._replace(macros="CHUNKS=4 VEC=4", block=(320, 1)), made)


def test_a_turn_of_other_loops_has_four_packs():
    made = work("grad_norm", "MLP")
    launch = model.Launch("norm_partials", "CAPACITY=90", (1,), (256,), 1)
    assert model._issued(launch, made, {"turn": "400", "macros": "CAPACITY=90"}) == 400 / (4 * 4)
    assert model._issued(launch, made, {"turn": "", "macros": ""}) == np.inf
    assert model._issued(launch._replace(kernel="k"), made, {"turn": "9", "macros": ""}) == np.inf
    assert model._tail(launch, made) == 1


def test_a_last_round_takes_as_long_as_any_other():
    made = work("rms_norm_grad", "8192x5120", "bfloat16")
    launch = model.Launch("layer_norm_grad", "", (132,), (128, 2), 1)
    assert model._tail(launch, made) == 32 * 264 / 8192


@pytest.mark.usefixtures("quick_host")
def test_others_figures_stand_beside_predictions_of_the_same_shape():
    for name, shape, ours, own, *theirs in model.beside_published(TABLES):
        assert not own or 10 < float(own) < 300
        assert 10 < float(ours.replace(",", "")) < 200
        assert any(theirs)
        assert f"| {name} | {shape} | {ours} | " in model.PAGE.read_text()


def test_measured_times_stand_beside_predictions_without_the_host(monkeypatch, tmp_path):
    """Of a record of that GPU, and of no other."""
    gpu = {"name": "NVIDIA H200"}
    times = {("clip_grad_norm, scaling", "Llama-3-8B"): 12.5, ("grad_norm", "no such"): 1.0}
    times["batch_norm_grad", "32x64x112x112 channels last"] = 0.0761
    times["rms_norm_grad", "2048x4096"] = 0.0246
    cases = [
        {"operation": name, "shape": shape, "dtype": "bfloat16", "ms": {"gradkit": [0, ms, 9]}}
        for (name, shape), ms in times.items()
    ]
    report.write({"machine": {"gpu": gpu}, "cases": cases}, tmp_path / "nvidia-h200.jsonl")
    report.write({"machine": {}, "cases": cases}, tmp_path / "a-cpu.jsonl")
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    model.measured.cache_clear()
    found = [*model.beside_measured(TABLES)]
    own = {(*row[:2],): row[3] for row in model.beside_published(TABLES)}
    model.measured.cache_clear()
    assert [seconds for *_, seconds in found] == pytest.approx([24.6e-6, 12.5e-3, 76.1e-6])
    ratios = sorted(seconds / prediction.seconds for _, prediction, seconds in found)
    assert all(0.8 < ratio < 3 for ratio in ratios)
    assert not any("host" in str(prediction) for _, prediction, _ in found)
    assert own["rms_norm_grad", "2048x4096"] == "24.6"
    assert own["rms_norm_grad", "8192x5120"] == ""
    *limiters, last = model.by_limiter(found)
    assert sum(int(row[1]) for row in limiters) == int(last[1]) == 3
    assert last[2].startswith(f"{ratios[1]:.2f} (")


def test_the_page_has_what_the_records_measured():
    assert "Predictions, not results" in model.PAGE.read_text()
    for name, table in model.page_tables(TABLES).items():
        assert report.in_page(model.PAGE, name) == table


def test_arrays_are_never_touched():
    device = model.Recorder(CARD)
    launch = device.compile("", ("-std=c++17", "-DA=1", "-DB=f32")).get_function("k")
    launch((2, 3), (32, 4), (np.empty((8, 8)), None, np.int64(3)))
    assert device.launches == [model.Launch("k", "A=1 B=f32", (2, 3), (32, 4), 8 * 8 * 8)]
    assert device.launches[0].threads == 2 * 3 * 32 * 4


@pytest.mark.slow
def test_every_card_is_predicted():
    text = model.every_prediction(TABLES)
    rows = re.findall(
        r"^\| (\w+) \| (.+?) \| (\w+) \|.*(?:memory|latency|issue|double|start)\)? \|$",
        text,
        re.M,
    )
    assert rows == [(w.operation, w.shape, w.dtype) for w in model.works()]
    assert {f"{m}x{d}" for m, d in GPU_NORMS} | GPU_LISTS.keys() <= {shape for _, shape, _ in rows}


@pytest.mark.parametrize(
    ("number", "text"), [(9.64, "9.6"), (139.2, "140"), (1279, "1,300"), (0.5, "0.50")]
)
def test_two_digits(number, text):
    assert model._figure(number) == text
