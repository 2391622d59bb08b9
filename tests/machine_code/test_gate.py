"""The gate on the machine code of gradkit's kernels: what is measured, compared and recorded."""

import csv

import numpy as np
import pytest

from testbed.machine_code import compile_kernels, differences, measure
from testbed.machine_code.table import Difference
from testbed.ptx import PtxDevice
from tests.machine_code import __main__ as command
from tests.machine_code import gate, reach
from tests.machine_code.cases import Case, cases, dtype_called, dynamic_shared, is_common
from tests.machine_code.executed import Executed, Operation, operations
from tests.machine_code.tables import CODE, EXECUTED, executed_row


def code(**changed):
    return dict.fromkeys(CODE.columns, "0") | changed


def executed(instructions, double):
    return executed_row(Executed("norm", "float32", "k", instructions, double))


@pytest.mark.parametrize(
    ("instructions", "double", "fails"),
    [(10, 2, []), (10.2, 2, []), (10.5, 2, ["instructions"]), (9, 2.1, ["double"]), (8, 1, [])],
)
def test_what_counts_as_worse_in_what_is_executed(instructions, double, fails):
    found = differences(EXECUTED, [executed(10, 2)], [executed(instructions, double)])
    assert [each.text.split()[-4] for each in found if each.fails] == fails


@pytest.mark.ptx
@pytest.mark.usefixtures("needs_tools")
def test_sums_in_double_precision_are_seen_where_they_run():
    source = """
    extern "C" __global__ void sums(const float* x, float* out) {
        SUM total = 0;
        for (int i = 0; i < 64; ++i) total += x[i];
        *out = total;
    }
    """

    def row(kind):
        device = PtxDevice(counted=True)
        sums = device.compile(source, (f"-DSUM={kind}",)).get_function("sums")
        sums((1,), (1,), (np.ones(64, np.float32), np.zeros(1, np.float32)))
        ran = device.executed()["sums"]
        return executed_row(Executed("sum", "float32", "sums", ran.instructions / 64, ran.double))

    found = differences(EXECUTED, [row("float")], [row("double")])
    failed = [each.text for each in found if each.fails]
    assert "sum | float32 | sums: worse: double 0.00 -> 129.00" in failed  # 64 of each, and one


def test_rows_of_a_compiler_that_is_not_here_are_let_be(monkeypatch):
    """But only outside CI, which measures all of them."""
    monkeypatch.setattr(CODE.__class__, "read", lambda table: recorded[table])
    here, elsewhere = code(nvrtc="12.9"), code(nvrtc="13.5")
    recorded = {CODE: [here, elsewhere], EXECUTED: []}
    found = {"code": [here], "executed": []}
    assert gate.compared(found, partly=True) == []
    (missing,) = gate.compared(found, partly=False)
    assert "13.5: recorded, and no longer measured" in missing.text


def test_the_exit_status_and_what_to_do(capsys):
    assert command.reported([]) == 0
    assert command.reported([Difference(False, "row: better")]) == 0
    assert command.reported([Difference(True, "row: worse"), Difference(False, "other")]) == 1
    printed = capsys.readouterr().out
    assert "FAILED row: worse" in printed
    assert "make machine-code RECORD=1" in printed


@pytest.mark.parametrize("record", [True, False])
def test_ci_and_records_take_both_compilers(record, monkeypatch, capsys):
    monkeypatch.setenv("CI", "" if record else "true")
    monkeypatch.setattr(gate, "measured", None)
    assert command.check(None, record=record) == 1
    assert "make machine-code" in capsys.readouterr().err


@pytest.mark.parametrize("record", [True, False])
def test_the_command_compares_or_records(record, monkeypatch, tmp_path):
    monkeypatch.setenv("CI", "")
    made = {"code": [code()], "executed": [executed(10, 2)]}
    monkeypatch.setattr(gate, "measured", lambda libraries: made if libraries else None)
    for table in (CODE, EXECUTED):
        monkeypatch.setitem(vars(table), "path", tmp_path / table.path.name)
        table.write([])
    page = tmp_path / "page.md"
    page.write_text(f"{reach.BEGIN}{reach.END}")
    monkeypatch.setattr(reach, "PAGE", page)
    arguments = ["--nvrtc", "library", *(["--record"] if record else [])]
    assert command.main(arguments) == (0 if record else 1)
    assert [len(table.read()) for table in (CODE, EXECUTED)] == ([1, 1] if record else [0, 0])
    assert not record or command.main(arguments[:2]) == 0
    assert (reach.table(CODE.read()) in page.read_text()) is record


@pytest.mark.parametrize("table", [CODE, EXECUTED], ids=["code", "executed"])
def test_tables_are_sorted_and_whole(table):
    rows = table.read()
    assert len({table.name_of(row) for row in rows}) == len(rows) > 40
    assert table.text(reversed(rows)) == table.path.read_text()
    assert tuple(next(csv.reader(table.path.read_text().splitlines()))) == table.columns


def test_every_kernel_has_rows():
    assert {case.file for case in cases()} == {row["file"] for row in CODE.read()}
    assert len({row["sm"] for row in CODE.read()}) == len(gate.ARCHITECTURES)
    assert len({row["nvrtc"] for row in CODE.read()}) == 2


def test_cases_for_every_gpu():
    of = {(case.file, case.title): is_common(case) for case in cases()}
    assert of["norm", "CAPACITY=90 LIST_T=bf16 ORDER=SumOfSquares"]
    assert not of["norm", "CAPACITY=90 LIST_T=f16 ORDER=SumOfSquares"]
    assert not of["scale", "CAPACITY=0 LIST_T=bf16"]
    whole, before, other = (
        {case for batch in batches for case in batch}
        for batches in (gate.batches(90), gate.batches(80), gate.batches(90, other=True))
    )
    assert whole | before == {*cases()}
    assert all("LONG=1" in case.macros or "LONG=2" in case.macros for case in before - whole)
    assert len(whole) > len(before) > len(other)
    assert all(batch for batch in gate.batches(90, other=True))


@pytest.mark.usefixtures("needs_tools")
def test_a_list_kernel_with_one_dtype():
    case = Case("zero", ("CAPACITY=90", "LIST_T=bf16"))
    (measured,) = measure(compile_kernels(case.source, 90))
    assert measured.compiled.name == "zero_grad"
    assert measured.data == []
    assert measured.wide > 0.5


def test_names_of_dtypes():
    assert dtype_called("bf16") == dtype_called("bfloat16") == "bfloat16"
    with pytest.raises(ValueError, match="no dtype 'int8'"):
        dtype_called("int8")


def test_shared_memory_of_long_rows():
    macros = ("CENTRED=1", "CHUNKS=4", "DATA_T=bf16", "VEC=8")
    assert dynamic_shared((*macros, "LONG=1", "THREADS=384")) == 2 * 4 * 8 * 384 * 4
    assert dynamic_shared((*macros, "LONG=0")) == 0


@pytest.mark.ptx
@pytest.mark.usefixtures("needs_tools")
def test_an_operation_is_counted():
    (zero,) = [operation for operation in operations() if operation.name == "zero_grad"]
    (row,) = Operation(zero.name, (4096,), zero.call).executed("bfloat16")
    assert row.kernel == "zero_grad"
    assert row.double == 0
    assert row.instructions > 1 / 8  # a store of 16 bytes


def test_each_operation_has_a_name_of_its_own():
    names = [(operation.name, dtype) for operation in operations() for dtype in operation.dtypes]
    assert len(set(names)) == len(names)
    assert set(names) == {(row["operation"], row["dtype"]) for row in EXECUTED.read()}


def test_the_page_says_how_far_one_round_trip_goes():
    rows = CODE.read()
    assert reach.table(rows) in reach.PAGE.read_text()
    long = "layer norm | bf16 | 12,288 | shared memory | 1 |  |  | "
    assert f"| {long} |\n" in reach.table(rows)


def test_the_page_is_written_between_its_marks(monkeypatch, tmp_path):
    monkeypatch.setattr(reach, "PAGE", tmp_path / "page.md")
    reach.PAGE.write_text(f"before\n{reach.BEGIN}stale\n{reach.END}\nbehind\n")
    rows = CODE.read()
    reach.write(rows)
    written = reach.PAGE.read_text()
    assert written == f"before\n{reach.BEGIN}\n{reach.table(rows)}\n{reach.END}\nbehind\n"
    reach.write(rows)
    assert reach.PAGE.read_text() == written
