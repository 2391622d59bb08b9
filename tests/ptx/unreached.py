"""Which lines of the kernels no test reaches in compiled code, and why.

``python -m tests.ptx.unreached REPORT.json ...`` reads what ``GRADKIT_PTX_REPORT`` made the suite
write. A line stands for the basic blocks that begin with it, under all macros and architectures
together. The exit status is 1 where a line has no reason below.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from testbed.ptx import Coverage, merge, summary, unreached

# A part of the line, and why no block that begins there runs.
REASONS: tuple[tuple[str, str], ...] = ()


def main(paths: list[str]) -> int:
    """Print how much ran and what did not; the exit status."""
    total: Coverage = {}
    for path in paths:
        merge(total, json.loads(Path(path).read_text()))
    print(summary(total))
    status = 0
    for kernel, line, reason in explained(total):
        print(f"  {kernel}: {line}\n    {reason or 'NO REASON'}")
        status = status or int(not reason)
    return status


def explained(coverage: Coverage) -> Iterator[tuple[str, str, str]]:
    """Each line that no test reached, with its kernel and the reason, which may be empty."""
    for kernel, lines in unreached(coverage).items():
        for line in lines:
            yield kernel, line, next((why for part, why in REASONS if part in line), "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
