"""The reasons why compiled code does not run, and what happens where there is none."""

import json

import pytest

from gradkit._cuda.launch.kernels import source_of
from tests.combinations import combinations
from tests.ptx.unreached import REASONS, main

pytestmark = pytest.mark.ptx


@pytest.mark.parametrize(("kernel", "part"), [reason[:2] for reason in REASONS])
def test_a_reason_is_of_a_line_that_there_is(kernel, part):
    sources = [source_of(file) for file in sorted({file for file, _ in combinations()})]
    assert any(f"{kernel}(" in text and part in text for text in sources)


@pytest.mark.parametrize(("line", "status"), [("1: run = first / packs;", 0), ("2: other;", 1)])
def test_a_line_without_a_reason_fails(tmp_path, capsys, line, status):
    report = tmp_path / "80"
    ran = {"sm_80": [["0: {", 1], [line, 0]], "of a test": [["3: no kernel of ours", 0]]}
    report.write_text(json.dumps({"normalize": ran}))
    assert main([str(report)]) == status
    shown = capsys.readouterr().out
    assert line in shown
    assert ("NO REASON" in shown) == bool(status)
    assert "no kernel of ours" not in shown
