"""The tests of each guarantee, in docs/guarantees.md: ``python -m tests.guarantees`` writes them.

A guarantee's name is what stands in bold, or in the first cell of a table's row. Tests are marked
with it: ``@pytest.mark.guarantee("Light")``.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "guarantees.md"
ITEM = re.compile(r"^- \*\*(.+?)\.?\*\*(?:.*\n)(?:  (?!<details>).*\n)*", re.MULTILINE)
ROW = re.compile(r"^(\| (.+?) \| .+? \| ).*", re.MULTILINE)
_FOLDED = "<details><summary>Tests</summary>"
_TESTS = re.compile(rf"  {_FOLDED}\n(?:.*\n)*?  </details>\n")


def marked():
    """The tests of each guarantee, ``tests/test_x.py::test_y``, by its name."""
    found = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            for mark in getattr(function, "decorator_list", ()):
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.guarantee":
                    for name in map(ast.literal_eval, mark.args):
                        test = f"`{path.relative_to(ROOT)}::{function.name}`"
                        found.setdefault(name, []).append(test)
    return found


def names(page):
    """The guarantees of a page: those in bold, and those in the table."""
    text, _, table = page.partition("\n|---")
    return [match[1] for match in ITEM.finditer(text)], [match[2] for match in ROW.finditer(table)]


def written(page, tests):
    """The page with the tests of each guarantee; a KeyError names one that has none."""
    text, rule, table = _TESTS.sub("", page).partition("\n|---")

    def item(match):
        listed = ",\n  ".join(tests[match[1]])
        return f"{match[0]}  {_FOLDED}\n\n  {listed}\n\n  </details>\n"

    def row(match):
        return f"{match[1]}{_FOLDED}{', '.join(tests[match[2]])}</details> |"

    return ITEM.sub(item, text) + rule + ROW.sub(row, table)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(), marked()))
