"""The census of spills: it compiles what launchers ask for, and finds what lies in memory."""

import pytest

from tests.machine_code import __main__ as command
from tests.machine_code import census

# Sums that stay apart until the last: more than 32 registers.
CROWDED = """
extern "C" __global__ void __launch_bounds__(1024, 2) crowded(const float* x, float* out) {
  float sums[64];
  for (int k = 0; k < 64; ++k) sums[k] = x[k * 1024 + threadIdx.x];
  __syncthreads();
  for (int k = 63; k >= 0; --k) out[k * 1024 + threadIdx.x] = sums[k] * sums[(k + 7) % 64];
}
"""
OPTIONS = ("-std=c++17",)


def test_every_combination_of_a_file():
    titles = census.sources("zero")
    assert titles
    assert all(title.split()[0] == "zero" for title in titles)
    assert len(census.sources()) > len(titles)


@pytest.mark.usefixtures("needs_tools")
@pytest.mark.parametrize(("source", "status"), [(CROWDED, 1), ("", 0)], ids=["spills", "none"])
def test_what_spills_is_shown(monkeypatch, capsys, source, status):
    text = source or CROWDED.replace("1024, 2", "256")
    monkeypatch.setattr(census, "sources", lambda _: {"planted": (text, OPTIONS)})
    assert command.main(["--spills", "--sm", "90"]) == status
    shown = capsys.readouterr().out
    assert "1 of 1 combinations for 1 architectures, 1 kernels" in shown
    assert ("crowded" in shown) == bool(status)
