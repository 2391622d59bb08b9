"""Print a summary of a CUDA source's machine code: ``python -m testbed.machine_code FILE.cu``.

It prints, for each kernel, registers, spills, resident threads, loops, and the round trips to
memory that they make. ``-DNAME=VALUE`` defines a macro; ``--list`` adds the loads, stores, waits
and branches themselves.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .measure import Source
from .show import show


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status, after printing what a file's kernels need."""
    parser = argparse.ArgumentParser(
        prog="python -m testbed.machine_code",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("-D", dest="macros", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--sm", type=int, action="append", help="default: 90; may be repeated")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args(arguments)
    defined = tuple(f"-D{macro}" for macro in options.macros)
    source = Source(options.file.stem, " ".join(options.macros), options.file.read_text(), defined)
    show(source, options.sm or [90], options.list)
    return 0


if __name__ == "__main__":
    sys.exit(main())
