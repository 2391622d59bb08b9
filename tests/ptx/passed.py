"""``PASSED.md``: which parts of `make test-ptx` have passed, and on which kernels.

``python -m tests.ptx.passed PART REPORT.xml`` reads what ``pytest --junitxml`` wrote, and replaces
that part's row. The parts take hours together, and each says by a digest which kernels it saw.
"""

import ast
import hashlib
import re
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
PATH = Path(__file__).with_name("PASSED.md")
_COMMENT = re.compile(r"//[^\n]*")
_HEAD = """\
# What has passed of `make test-ptx`

Written by `make test-ptx`, a row for each of its parts. The last column is a digest of the
kernels and of what launches them (`kernels/`, `gradkit/_cuda/`), without comments;
`python -m tests.ptx.passed` prints today's.

| part | tests | on | kernels |
|---|---|---|---|
"""


class Row(NamedTuple):
    """One part that has passed."""

    part: str
    tests: str
    on: str
    kernels: str


def digest(root: Path = ROOT) -> str:
    """Of the kernels and what launches them, without comments."""
    found = hashlib.sha256()
    for path in sorted((*root.glob("kernels/*.cu*"), *root.glob("gradkit/_cuda/**/*.py"))):
        text = path.read_text()
        if path.suffix == ".py":
            code = ast.unparse(ast.parse(text))
        else:
            code = " ".join(_COMMENT.sub("", text).split())
        found.update(f"{path.relative_to(root)}\0{code}".encode())
    return found.hexdigest()[:12]


def passed(report: Path) -> int:
    """Count the tests of a report; a `ValueError` if one did not pass, or none did."""
    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in ElementTree.parse(report).iter("testsuite"):
        for name in counts:
            counts[name] += int(suite.get(name, 0))
    count = counts["tests"] - counts["skipped"]
    if counts["failures"] or counts["errors"] or not count:
        raise ValueError(f"{report} is not of a run that passed: {counts}")
    return count


def read(path: Path = PATH) -> Iterator[Row]:
    """The rows of the table."""
    text = path.read_text() if path.exists() else ""
    for line in text.partition("|---|---|---|---|\n")[2].splitlines():
        yield Row(*line[2:-2].split(" | "))


def record(part: str, report: Path, path: Path = PATH, root: Path = ROOT) -> Row:
    """Write the row of a part that has passed."""
    today = datetime.now(UTC).date().isoformat()
    row = Row(part, f"{passed(report):,}", today, digest(root))
    rows = {known.part: known for known in read(path)} | {part: row}
    path.write_text(_HEAD + "".join(f"| {' | '.join(rows[name])} |\n" for name in sorted(rows)))
    return row


if __name__ == "__main__":
    if len(sys.argv) == 1:
        print(digest())
    else:
        print(*record(sys.argv[1], Path(sys.argv[2])), sep=", ")
