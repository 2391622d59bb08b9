"""The watchdog: a rank that hangs, dies or disagrees is named."""

import time
from pathlib import Path

import pytest

from tests.processes import launch as launching
from tests.processes.launch import Log, StuckError, launch
from tests.processes.suites import SUITES


@pytest.mark.parametrize(
    ("library", "suite"), [("mpi", "stays away"), ("mpi", "dies"), ("torch", "dies")]
)
def test_a_rank_that_does_not_come_is_named(there, library, suite, tmp_path, monkeypatch):
    there(library)
    progress = Log.progress

    def watched(log):
        if min(found := progress(log)) == 2:  # all ranks are in the check that one stays away from
            monkeypatch.setattr(launching, "STALL_S", 4)
        return found

    monkeypatch.setattr(Log, "progress", watched)
    with pytest.raises(StuckError) as caught:
        launch(library, 2, suite, tmp_path)
    said = str(caught.value)
    if suite == "dies":
        assert "a process ended with status" in said
    else:
        assert "no rank finished anything for 4 s" in said
        zero, one = said.split("rank 0 ")[1].split("rank 1 ")
        assert f"_ranks/{library}.py" in zero
        assert "in allgather" in zero
        assert "in _stays_away" in one
        assert "the last of them 'an adapter moves bits'" in one
    pids = [int(path.read_text()) for path in tmp_path.glob("*.pid")]
    assert len(pids) == 2
    end = time.monotonic() + 60
    while any(map(alive, pids)):  # killed, and gone as soon as the system has time
        assert time.monotonic() < end


def alive(pid):
    """Return whether a process runs; one that is dead and not yet collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_check_that_fails_on_one_rank_is_recorded(there, tmp_path):
    there("mpi")
    found = launch("mpi", 2, "fails", tmp_path)
    assert [*found] == ["start", *SUITES["fails"]("mpi", 2)]
    assert found["fails"][0]["error"] == ""
    assert "AssertionError: not here" in found["fails"][1]["error"]
    assert [record["same"] for record in found["differs"]] == ["0", "1"]
    assert [record["error"] for record in found["an adapter moves bits"]] == ["", ""]
