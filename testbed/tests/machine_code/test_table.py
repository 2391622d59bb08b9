"""Changes that a table counts as worse: each planted one fails, with its row and column."""

import functools
from pathlib import Path

import pytest

from testbed.machine_code import Source, code_row, code_table, compile_kernels, differences, measure
from testbed.machine_code.table import Difference

CODE = code_table(Path("code.csv"))
NVRTC = "12.9"


ROWS = """
struct alignas(16) Pack { float at[4]; };
extern "C" __global__ void __launch_bounds__(256)
rows(const float* x, const float* y, float* out, int n) {
    for (int row = blockIdx.x; row < n; row += gridDim.x) {
        const Pack a = ((const Pack*)x)[row * 256 + threadIdx.x];
        const Pack b = ((const Pack*)y)[row * 256 + threadIdx.x];
        Pack sum;
        for (int k = 0; k < 4; ++k) sum.at[k] = a.at[k] * b.at[k];
        ((Pack*)out)[row * 256 + threadIdx.x] = sum;
        __syncthreads();
    }
}
"""
A_PACK = "const Pack a = ((const Pack*)x)[row * 256 + threadIdx.x];"
SPILLING = """
    float kept[200];
    #pragma unroll
    for (int i = 0; i < 200; ++i) kept[i] = x[threadIdx.x + i * 1024];
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < 200; ++i) out[threadIdx.x + i * 1024] = kept[i] * kept[199 - i];
    __syncthreads();
    for (int row"""
# A column, and an edit of the kernel above that makes it worse.
WORSE = {
    "trips": (A_PACK, f"{A_PACK} if (a.at[0] == 7) continue;"),  # y's address waits for x
    "inner_loads": (A_PACK, f"{A_PACK} if (a.at[0] == 7) continue;"),
    "double": ("a.at[k] * b.at[k]", "(double)a.at[k] * b.at[k] + 1.0"),
    "wide": (A_PACK, "Pack a; for (int k = 0; k < 4; ++k) a.at[k] = x[(row * 256 + k) * 7];"),
    "threads": ("__launch_bounds__(256)", "__launch_bounds__(768)"),  # two blocks of 768: 1536
    "spilled": ("for (int row", SPILLING),
    "stack": ("for (int row", SPILLING),
}


@functools.cache
def rows_of(source, arch=90):
    return [
        code_row(each, NVRTC)
        for each in measure(compile_kernels(Source("rows", "f32", source), arch))
    ]


def test_a_turn_has_the_instructions_of_the_innermost_loop():
    (row,), (more,) = rows_of(ROWS), rows_of(ROWS.replace(*WORSE["double"]))
    assert 0 < int(row["turn"]) < int(more["turn"])


@pytest.mark.parametrize("column", WORSE)
def test_a_planted_worsening_fails_with_its_row_and_column(column):
    old, new = WORSE[column]
    assert ROWS.count(old) == 1
    worse = ROWS.replace(old, new)
    if column in ("spilled", "stack"):  # 1024 threads leave 64 registers to each
        worse = worse.replace("(256)", "(1024)")
    found = differences(CODE, rows_of(ROWS), rows_of(worse))
    failed = [each.text for each in found if each.fails and f"worse: {column} " in each.text]
    assert failed, found
    assert failed[0].startswith("rows | f32 | rows | 90 | 12.9: ")


def test_the_same_code_passes_and_better_code_does_too():
    old, new = WORSE["trips"]
    good, bad = rows_of(ROWS), rows_of(ROWS.replace(old, new))
    assert good[0]["trips"] == "1"
    assert good[0]["in_flight"] == "2"
    assert good[0]["wide"] == "1.00"
    assert differences(CODE, good, good) == []
    found = differences(CODE, bad, good)
    assert any("better: trips 2 -> 1" in each.text for each in found)
    assert not any(each.fails for each in found)


def code(**changed):
    row = dict.fromkeys(CODE.columns, "0") | {"file": "a", "kernel": "k", "threads": "1024"}
    return row | {"wide": "0.90", "inner_loads": "4.00", "trips": "2"} | changed


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        ({}, {"spilled": "4"}, "worse"),
        ({}, {"stack": "8"}, "worse"),
        ({}, {"threads": "512"}, "worse"),
        ({}, {"threads": "2048"}, "better"),
        ({}, {"trips": "3"}, "worse"),
        ({}, {"trips": ""}, "worse"),  # the loop is no longer found
        ({"trips": ""}, {}, "changed"),
        ({}, {"inner_loads": "2.00"}, "worse"),
        ({}, {"double": "5.00"}, "worse"),
        ({}, {"wide": "0.80"}, "worse"),
        ({}, {"wide": "0.88"}, "changed"),  # a loop more or less unrolled
        ({}, {"wide": "0.90"}, None),
        ({}, {"registers": "72"}, "changed"),  # as many threads fit
        ({}, {"in_flight": "2 2"}, "changed"),
    ],
)
def test_what_counts_as_worse_in_code(old, new, verdict):
    found = differences(CODE, [code(**old)], [code(**new)])
    assert [each.text.split(": ")[1] for each in found] == ([verdict] if verdict else [])
    assert [each.fails for each in found] == ([verdict == "worse"] if verdict else [])


def test_missing_and_new_rows_fail():
    found = differences(CODE, [code(kernel="old")], [code(kernel="new")])
    assert found == [
        Difference(True, "a | 0 | new | 0 | 0: measured, and not recorded"),
        Difference(True, "a | 0 | old | 0 | 0: recorded, and no longer measured"),
    ]
