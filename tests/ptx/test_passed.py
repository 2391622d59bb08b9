"""A part of `make test-ptx` is recorded if it passed, beside the kernels that it saw."""

import pytest

from tests.ptx.passed import ROOT, digest, read, record

pytestmark = pytest.mark.ptx


def report(tmp_path, **counts):
    path = tmp_path / "report.xml"
    numbers = {"tests": 5, "failures": 0, "errors": 0, "skipped": 2} | counts
    text = " ".join(f'{name}="{number}"' for name, number in numbers.items())
    path.write_text(f"<testsuites><testsuite {text}></testsuite></testsuites>")
    return path


@pytest.fixture
def root(tmp_path):
    for name in ("kernels/a.cu", "kernels/a.cuh", "gradkit/_cuda/launch/a.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    return tmp_path


def test_a_part_takes_the_place_of_its_older_row(root):
    table = root / "PASSED.md"
    record("sm_90", report(root), table, root)
    record("sm_80", report(root), table, root)
    row = record("sm_90", report(root, tests=1205), table, root)
    assert row.tests == "1,203"
    assert [(known.part, known.tests) for known in read(table)] == [
        ("sm_80", "3"),
        ("sm_90", "1,203"),
    ]


@pytest.mark.parametrize("name", ["kernels/a.cu", "kernels/a.cuh", "gradkit/_cuda/launch/a.py"])
def test_the_digest_is_of_every_file(root, name):
    before = digest(root)
    (root / name).write_text("other")
    assert digest(root) != before


@pytest.mark.parametrize(
    ("name", "comment"), [("kernels/a.cuh", "// why\n"), ("gradkit/_cuda/launch/a.py", "# why\n")]
)
def test_the_digest_is_of_the_code(root, name, comment):
    before = digest(root)
    (root / name).write_text(comment)
    assert digest(root) == before


@pytest.mark.parametrize("counts", [{"failures": 1}, {"errors": 1}, {"skipped": 5}], ids=str)
def test_what_did_not_pass_is_not_recorded(root, counts):
    table = root / "PASSED.md"
    with pytest.raises(ValueError, match="not of a run that passed"):
        record("sm_90", report(root, **counts), table, root)
    assert not table.exists()


def test_every_part_has_passed():
    """On which state of the kernels, the last column says."""
    makefile = (ROOT / "Makefile").read_text()
    architectures = makefile.partition("PTX_ARCHITECTURES := ")[2].partition("\n")[0].split()
    kinds = ("", "-fused", "-nvrtc13", "-nvrtc13-fused")
    assert [row.part for row in read()] == sorted(a + kind for a in architectures for kind in kinds)
