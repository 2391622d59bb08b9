"""The machinery of ``make mutants``: rules, samples, the choice of tests, and what counts."""

import json

import pytest

from tests.mutants import __main__ as runner
from tests.mutants import kernel_rules, python_rules
from tests.mutants.covered import Covered, Timed
from tests.mutants.mutant import ROOT, Place, equivalent, in_order, table

PYTHON = '''\
"""A module."""
LIMIT = 2


def f(a, b, *, axis=0):
    """A docstring."""
    if not a < b and b != 0.5:
        raise ValueError(f"{a + 1}")
    with lock():
        a.x = g(a, b, axis=axis).copy()
    for k in any(a):
        a += -k * np.float64
    return a if b else True
'''
KERNEL = """\
// __syncthreads();
    for (i64 k = t; k < count; k += blockDim.x) sum += x[k] / count;
    if (m < x || x != x) m = x;
    __syncthreads();
    out[k] = fused(a, b, out[k]);
"""


PYTHON_LINES = """
a boundary off by one | if not (a <= b) and b != 0.5:
a condition turned round | if (a < b) and b != 0.5:
and for or | if (not a < b or b != 0.5):
a condition dropped | if (b != 0.5):
a guard dropped | pass
a statement dropped | pass
another result | return None
one branch for both | return a
a context dropped | with __import__('contextlib').nullcontext():
the first item lost | for k in list(any(a))[1:]:
neighbours swapped | a.x = g(b, a, axis=axis).copy()
a keyword dropped | a.x = g(a, b).copy()
a wrapper dropped | a.x = g(a, b, axis=axis)
another function | for k in all(a):
another constant | LIMIT = 3
another constant | def f(a, b, *, axis=1):
True for False | return a if b else False
another operator | a += (-k / np.float64)
a term dropped | a += (-k)
a sign dropped | a += k * np.float64
a narrower dtype | a += -k * np.float32
"""
KERNEL_LINES = """
a boundary off by one | for (i64 k = t; k <= count; k += blockDim.x) sum += x[k] / count;
an index of 32 bits | for (int k = t; k < count; k += blockDim.x) sum += x[k] / count;
a wrong stride | for (i64 k = t; k < count; k +=  2 * (blockDim.x)) sum += x[k] / count;
1/N missing | for (i64 k = t; k < count; k += blockDim.x) sum += x[k];
= for += | for (i64 k = t; k < count; k += blockDim.x) sum = x[k] / count;
= for += | out[k] = fused(a, b, 0 * out[k]);
a maximum that drops NaN | if (m < x) m = x;
no barrier | ;
"""


@pytest.mark.parametrize(
    ("rules", "text", "expected"),
    [(python_rules, PYTHON, PYTHON_LINES), (kernel_rules, KERNEL, KERNEL_LINES)],
)
def test_rules(rules, text, expected):
    made = set()
    for mutant in in_order("f", text, rules.places(text)):
        changed = set(mutant.mutated.splitlines()) - set(text.splitlines())
        made |= {f"{mutant.rule} | {line.strip()}" for line in changed}
    assert set(expected.split("\n")) - made <= {""}
    assert not [line for line in made if "ValueError" in line or '"""' in line or "//" in line]


@pytest.fixture(scope="module")
def every():
    return [*runner.every_mutant(), *runner.every_mutant(interop=True)]


def test_a_sample_has_some_of_each_rule_and_kind_and_is_always_the_same(every):
    chosen = runner.sample(every, 2)
    assert [m.shown for m in chosen] == [m.shown for m in runner.sample(reversed(every), 2)]
    rules = {m.rule for m in every}
    assert {m.rule for m in chosen} == rules >= {rule for rule, *_ in kernel_rules.rules()}
    made = {(m.rule, m.place.new) for m in every}
    for kind, rows in table("by_hand.toml").items():
        assert len(rows) > 1
        assert not [old for old, new in rows if (kind, new) not in made]
    for mutant in chosen:
        assert mutant.mutated != mutant.text
        if mutant.file.endswith(".py"):
            compile(mutant.mutated, mutant.file, "exec")


def test_what_is_said_to_be_no_fault_is_there(every):
    for row in equivalent():
        assert any(row.covers(mutant) for mutant in every), row


def test_tests_are_chosen_by_the_statement_that_they_run():
    rows = {
        "a[1]": (2.0, {"gradkit/x.py": "4"}, {"kernels/k.cu": ["A"]}),
        "a[2]": (1.0, {"gradkit/x.py": "4"}, {"kernels/k.cu": ["A", "B"]}),
        "b": (0.5, {"gradkit/x.py": "6"}, {"kernels/k.cu": ["B"]}),
        "c": (0.1, {"gradkit/x.py": "8"}, {}),
        "d": (0.1, {"gradkit/y.py": "4"}, {}),
        "e": (0.1, {"gradkit/_cpu/lists.py": "4"}, {}),
        "f": (0.1, {"gradkit/_cpu/norms.py": "4", "gradkit/_calls/rows.py": "4"}, {}),
        "g": (0.1, {"gradkit/_calls/rows.py": "4"}, {}),
    }
    [python] = in_order("gradkit/x.py", "", [Place("r", 0, 0, "", statement=2)])
    [kernel] = in_order("kernels/k.cu", "", [Place("r", 0, 0, "")])
    assert [t.name for t in Covered(rows).of(python)] == ["b", "a[2]", "a[1]", "c"]
    assert [t.name for t in Covered(rows).of(kernel)] == ["b", "a[1]", "a[2]"]
    for file, names in {"list_calls.cpp": ["e"], "rows.h": ["f"], "floats.h": ["e", "f"]}.items():
        [native] = in_order(f"kernels/cpu/{file}", "", [Place("r", 0, 0, "")])
        assert [t.name for t in Covered(rows).of(native)] == names


@pytest.mark.slow
@pytest.mark.parametrize(
    ("planted", "test", "status"),
    [
        ("planted = 1", "assert not hasattr(gradkit, 'planted')", "killed"),
        ("1 / 0", "pass", "killed"),
        ("planted = 1", "pass", "survived"),
        ("planted = 1", "time.sleep(60 * hasattr(gradkit, 'planted'))", "timed out"),
    ],
)
def test_what_counts_as_a_kill(monkeypatch, tmp_path, planted, test, status):
    case = tmp_path / "test_case.py"
    case.write_text(f"import time\nimport gradkit\ndef test_it(): {test}\n")
    text = (ROOT / "gradkit/__init__.py").read_text()
    place = Place("r", len(text), len(text), f"\n{planted}\n", 1)
    [mutant] = in_order("gradkit/__init__.py", text, [place])
    monkeypatch.setattr(runner, "OUT", tmp_path)
    monkeypatch.setattr(runner, "GRACE_S", 2 if status == "timed out" else 50)
    assert runner.run(mutant, [Timed(f"{case}::test_it", 0.0)], 10).status == status
    assert runner.run(mutant, [], 10).status == "run by no test"


@pytest.mark.slow
def test_compiled_code_is_built_with_its_fault(tmp_path, monkeypatch):
    case = tmp_path / "test_case.py"
    case.write_text(
        "import gradkit, numpy as np\n"
        "def test_it(): assert gradkit.scale_grads(np.ones(5), 0.5)[0] == 0.5\n"
    )
    file = "kernels/cpu/lists.cpp"
    text = (ROOT / file).read_text()
    start = text.index("return v * factor;")
    monkeypatch.setattr(runner, "OUT", tmp_path)
    for new, status in {"v + factor": "killed", "v *": "no mutant"}.items():
        [mutant] = in_order(file, text, [Place("r", start, start + 17, f"return {new}")])
        assert runner.run(mutant, [Timed(f"{case}::test_it", 0.0)], 10).status == status


@pytest.mark.slow
def test_a_killer_that_fails_by_itself_does_not_count(tmp_path):
    (tmp_path / "test_case.py").write_text("def test_bad(): assert False\ndef test_good(): pass\n")
    results = [
        runner.Result("", "", "", "", "killed", f"{tmp_path}/test_case.py::{name}")
        for name in ("test_bad", "test_good")
    ]
    assert {name.rpartition("::")[2] for name in runner.unfounded(results)} == {"test_bad"}


@pytest.mark.slow
def test_a_recording_has_the_statements_of_each_test(tmp_path):
    folder, test = tmp_path / "recorded", "tests/values/test_gradients.py"
    assert runner.pytest([test], ("--covered", str(folder)), {}, 300)[0] == 0
    recorded = json.loads((folder / "main.json").read_text())
    assert all(name.startswith(test) for name in recorded)
    assert any("gradkit/gradients.py" in lines for _, lines, _ in recorded.values())
