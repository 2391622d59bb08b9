"""Amount of code, and what stands in it twice: ``python -m tests.sizes``.

Counts lines that hold code: no blank ones, comments or docstrings. A signature is a function's
lines from ``def`` to its body, or to the dots in the place of one. Logic is what is in bodies,
but for arguments that are handed on by their own names; in C++, what is no comment or directive.
"""

import ast
import io
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
FOLDERS = ("gradkit", "tests", "benchmarks", "testbed")
_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENCODING, tokenize.ENDMARKER),
    *(tokenize.INDENT, tokenize.DEDENT),
}
_WITH_BODIES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Size(NamedTuple):
    """The size of some Python code."""

    code: set[int]  # the numbers of the lines
    signatures: set[int]
    functions: list[int]  # the lines of each one's code


def size_of(source: str) -> Size:
    """The size of a file."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    tree = ast.parse(source)
    lines -= set(_docstrings(tree))
    signatures: set[int] = set()
    functions = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            whole = set(range(node.lineno, (node.end_lineno or 0) + 1))
            first = node.body[0]
            dots = isinstance(first, ast.Expr) and ast.unparse(first) == "..."
            end = max(first.lineno + dots, node.lineno + 1)
            signatures |= set(range(node.lineno, end)) & lines
            functions.append(len(whole & lines))
    return Size(lines, signatures, functions)


def _docstrings(tree: ast.AST) -> Iterator[int]:
    """The numbers of the lines that docstrings have."""
    for node in ast.walk(tree):
        if isinstance(node, _WITH_BODIES) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            yield from range(first.lineno, (first.end_lineno or 0) + 1)


def logic_of(path: Path) -> list[tuple[int, str]]:
    """The lines of logic in a file of Python or C++: the number and the text of each."""
    source = path.read_text()
    if path.suffix == ".py":
        size, bodies = size_of(source), set[int]()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                bodies |= set(range(node.body[0].lineno, (node.end_lineno or 0) + 1))
        kept, left_out = (bodies & size.code) - size.signatures, r"(\w+)=\1,|\W*"
    else:
        kept, left_out = set(range(1, source.count("\n") + 2)), r"#.*|//.*|\W*"
    lines = ((number, line.strip()) for number, line in enumerate(source.splitlines(), 1))
    return [(n, line) for n, line in lines if n in kept and not re.fullmatch(left_out, line)]


def repeated(paths: Iterable[Path], length: int) -> list[list[str]]:
    """The places, ``file:line``, of each run of so many lines of logic that stands twice."""
    places = defaultdict(list)
    for path in paths:
        logic = logic_of(path)
        for start in range(len(logic) - length + 1):
            run = tuple(line for _, line in logic[start : start + length])
            places[run].append(f"{path}:{logic[start][0]}")
    return [found for found in places.values() if len(found) > 1]


def class_names() -> Counter[str]:
    """Number of classes of each name in gradkit."""
    files = sorted((ROOT / "gradkit").rglob("*.py"))
    nodes = (node for path in files for node in ast.walk(ast.parse(path.read_text())))
    return Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))


def main() -> None:
    """Print a line for each folder."""
    for folder in FOLDERS:
        sizes = [size_of(path.read_text()) for path in sorted((ROOT / folder).rglob("*.py"))]
        code = sum(len(size.code) for size in sizes)
        share = sum(len(size.signatures) for size in sizes) / code
        functions = [length for size in sizes for length in size.functions]
        print(
            f"{folder:10} {code:6} lines of code, {share:5.1%} of them signatures; "
            f"{len(functions)} functions, median {median(functions):.0f}, longest {max(functions)}"
        )
    sources = [path for path in (ROOT / "kernels").rglob("*") if re.match(r"\.(c|h)", path.suffix)]
    lines = "\n".join(path.read_text() for path in sources).splitlines()
    code = sum(not re.match(r"\s*(//|$)", line) for line in lines)
    print(f"kernels    {code:6} lines of code")


if __name__ == "__main__":
    main()
