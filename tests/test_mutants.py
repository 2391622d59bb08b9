"""The table of planted faults is about the code that is there; ``make mutants`` plants them."""

import re
from collections import Counter

import pytest

from tests.mutants import generated, results
from tests.mutants.equivalent import EQUIVALENT
from tests.mutants.faults import KINDS
from tests.mutants.plugin import ROOT, mutated
from tests.mutants.results import Result
from tests.mutants.table import MUTANTS


@pytest.mark.parametrize("file", sorted({mutant.file for mutant in MUTANTS}))
def test_every_text_stands_once_in_its_file(file):
    for mutant in MUTANTS:
        if mutant.file == file:
            text = mutated(ROOT / file, mutant.old, mutant.new)
            assert text != (ROOT / file).read_text(), mutant.what
            if file.endswith(".py"):
                compile(text, file, "exec")


def test_no_two_mutants_have_one_name():
    assert [n for n, count in Counter(m.name for m in MUTANTS).items() if count > 1] == []


def test_every_kind_of_fault_is_planted():
    planted = [Result(mutant.name, "", 0) for mutant in MUTANTS]
    assert len(KINDS) == 36
    assert [kind for kind in KINDS if not results.of_kind(kind, planted)] == []


def test_every_barrier_is_dropped_by_some_mutant():
    """The rules find each place, whatever stands around it."""
    text = "".join(re.sub(r"//.*", "", p.read_text()) for p in generated.KERNELS.glob("*.cu*"))
    dropped = [mutant for mutant in MUTANTS if mutant.what.startswith("no barrier: ")]
    assert len(dropped) == text.count("__syncthreads();") > 0


def test_what_is_said_to_be_no_fault_is_there():
    places = {
        (path.name, what)
        for path in generated.KERNELS.glob("*.cu*")
        for what, _, _ in generated.places(path.read_text())
    }
    for _, file, what in EQUIVALENT:
        assert any(re.fullmatch(file, f) and re.fullmatch(what, w) for f, w in places), what


def test_results_are_read_as_they_were_written(monkeypatch, tmp_path):
    monkeypatch.setattr(results, "PATH", tmp_path / "RESULTS.md")
    assert results.read() == {}
    written = [Result("kernels/a.cu: <= for <: `a || b | c`", "tests/t.py::t[a|b]", 1.5)]
    written += [Result("gradkit/b.py: eps ignored", "", 2.0)]
    results.write(written)
    assert list(results.read().values()) == written
    assert "1 of 2 killed" in results.PATH.read_text()
