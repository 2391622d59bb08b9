"""Faults in Python by rule: each is a small change of the syntax tree, made in the text."""

import ast
import copy
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from tests.mutants.mutant import Place

_BOUNDARY = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
_OPPOSITE = {ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is}
_OPPOSITE |= {ast.In: ast.NotIn, ast.NotIn: ast.In}
_OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}
_OPERATORS |= {ast.FloorDiv: ast.Mod, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult}
_OPERATORS |= {ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd}
_CALLED = {"any": "all", "all": "any", "min": "max", "max": "min"}
_CALLED |= {"maximum": "fmax", "minimum": "fmin", "isfinite": "isnan"}  # of NumPy and math
_DTYPES = {"float64": "float32", "int64": "int32", "uint64": "uint32"}
_WRAPPERS = {"abs", "sorted", "reversed", "set", "ascontiguousarray", "contiguous"}
_LEAVES = ast.Raise | ast.Return | ast.Continue | ast.Break
_NAMED = ast.Name | ast.Attribute | ast.Subscript
_PLAIN = _NAMED | ast.Call | ast.Constant | ast.stmt | ast.Tuple | ast.List

_Change = tuple[str, ast.AST, ast.AST | str]  # the rule, a node, and what takes its place


def places(text: str) -> Iterator[Place]:
    """Every place of a module where a rule applies."""
    lines = text.split("\n")
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line) + 1)

    def offset(number: int, column: int) -> int:  # columns are counted in bytes
        return starts[number - 1] + len(lines[number - 1].encode()[:column].decode())

    for node, statement, names in _walk(ast.parse(text), 0, ()):
        for make in (_conditions, _statements, _calls, _numbers):
            for rule, old, new in make(node):
                start = offset(old.lineno, old.col_offset)
                end = offset(old.end_lineno, old.end_col_offset)
                yield Place(rule, start, end, _text(new), statement, names)


def _text(new: ast.AST | str) -> str:
    if isinstance(new, str):
        return new
    return ast.unparse(new) if isinstance(new, _PLAIN) else f"({ast.unparse(new)})"


def _walk(node: ast.AST, statement: int, names: tuple[str, ...]) -> Iterator[tuple]:
    """Nodes of what runs, with the line of their statement.

    Or outside of functions with the names that the statement defines.
    """
    if isinstance(node, ast.stmt):
        statement = statement and node.lineno
        names = () if statement else _defined(node) or names
    yield node, statement, names
    for name, value in ast.iter_fields(node):
        inside = isinstance(node, ast.FunctionDef) and name == "body"
        for child in value if isinstance(value, list) else [value]:
            types = name in ("annotation", "returns", "decorator_list", "bases")
            if isinstance(child, ast.AST) and not types and not _is_silent(child):
                yield from _walk(child, child.lineno if inside else statement, names)


def _is_silent(node: ast.AST) -> bool:
    """Types, docstrings, texts of errors, and what is checked twice."""
    match node:
        case ast.Call(func=func):
            return ast.unparse(func).endswith(("Error", "cast", "warn", "TypeVar"))
        case ast.ClassDef(bases=bases):
            return any("Protocol" in ast.unparse(base) for base in bases)
        case ast.Expr(value=ast.Constant()) | ast.JoinedStr() | ast.AnnAssign(value=None):
            return True
        case ast.If(test=ast.Name("TYPE_CHECKING")) | ast.Assign(targets=[ast.Name("__all__")]):
            return True
        case ast.keyword(arg="strict") | ast.Assert():
            return True
    return False


def _defined(node: ast.stmt) -> tuple[str, ...]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return (node.name,)
    names = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
    return tuple(name.id for name in names if isinstance(name.ctx, ast.Store))


def _with(node: ast.AST, **fields: Any) -> ast.AST:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _conditions(node: ast.AST) -> Iterator[_Change]:
    match node:
        case ast.Compare(ops=ops):
            for k, op in enumerate(map(type, ops)):
                rule = "a boundary off by one" if op in _BOUNDARY else "a condition turned round"
                other = {**_BOUNDARY, **_OPPOSITE}[op]()
                yield rule, node, _with(node, ops=[*ops[:k], other, *ops[k + 1 :]])
        case ast.BoolOp(op=op, values=values):
            yield "and for or", node, _with(node, op=ast.Or() if type(op) is ast.And else ast.And())
            for k in range(len(values)):
                left = values[:k] + values[k + 1 :]
                yield "a condition dropped", node, _with(node, values=left) if left[1:] else left[0]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "a condition turned round", node, operand
        case ast.If(test=test) | ast.IfExp(test=test):
            if not isinstance(test, ast.Compare | ast.UnaryOp):
                yield "a condition turned round", test, ast.UnaryOp(ast.Not(), test)
            if isinstance(node, ast.IfExp):
                yield "one branch for both", node, node.body
                yield "one branch for both", node, node.orelse


def _statements(node: ast.AST) -> Iterator[_Change]:
    match node:
        case ast.If(orelse=[], body=[*_, last]) if isinstance(last, _LEAVES):
            yield "a guard dropped", node, "pass"
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Delete():
            yield "a statement dropped", node, "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "a statement dropped", node, "pass"
        case ast.Return(value=ast.Compare() | ast.BoolOp()):
            yield "another result", node.value, ast.UnaryOp(ast.Not(), node.value)
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield "another result", value, "None"
        case ast.With(items=[ast.withitem(context_expr=context, optional_vars=None), *_]):
            yield "a context dropped", context, "__import__('contextlib').nullcontext()"
        case ast.For(iter=items) | ast.comprehension(iter=items):
            yield "the first item lost", items, f"list({ast.unparse(items)})[1:]"


def _calls(node: ast.AST) -> Iterator[_Change]:
    if isinstance(node, ast.Call | ast.Tuple | ast.List):
        field = "args" if isinstance(node, ast.Call) else "elts"
        items = getattr(node, field)
        if isinstance(getattr(node, "ctx", None), ast.Store):
            items = []
        for k, (one, two) in enumerate(pairwise(items)):
            if isinstance(one, _NAMED) and isinstance(two, _NAMED):
                swapped = {field: [*items[:k], two, one, *items[k + 2 :]]}
                yield "neighbours swapped", node, _with(node, **swapped)
    if isinstance(node, ast.Call):
        keywords, name = node.keywords, ast.unparse(node.func).rpartition(".")[2]
        for k, keyword in enumerate(keywords):
            if keyword.arg and keyword.arg != "strict":
                fewer = _with(node, keywords=keywords[:k] + keywords[k + 1 :])
                yield "a keyword dropped", node, fewer
        if name in _CALLED and isinstance(node.func, ast.Name):
            yield "another function", node.func, _CALLED[name]
        elif name in _CALLED and len(_CALLED[name]) > 3:
            yield "another function", node.func, _with(node.func, attr=_CALLED[name])
        if name in _WRAPPERS and node.args:
            yield "a wrapper dropped", node, node.args[-1]
        elif name == "copy" and isinstance(node.func, ast.Attribute) and not node.args:
            yield "a wrapper dropped", node, node.func.value


def _numbers(node: ast.AST) -> Iterator[_Change]:
    match node:
        case ast.Constant(value=bool() as value):
            yield "True for False", node, str(not value)
        case ast.Constant(value=int() as value):
            yield "another constant", node, str(value + 1)
        case ast.Constant(value=float() as value):
            yield "another constant", node, str(2 * value or 1.0)
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in _OPERATORS:
            yield "another operator", node, _with(node, op=_OPERATORS[type(op)]())
            if isinstance(node, ast.BinOp):
                yield "a term dropped", node, node.left
        case ast.UnaryOp(op=ast.USub()):
            yield "a sign dropped", node, node.operand
        case ast.Attribute(attr=name) if name in _DTYPES:
            yield "a narrower dtype", node, _with(node, attr=_DTYPES[name])
