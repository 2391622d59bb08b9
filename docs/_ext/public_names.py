"""The public names of gradkit, read from its files, since some cannot be imported everywhere."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "gradkit"


def public_names() -> list[str]:
    """Return the full names of everything that users may import.

    That is ``gradkit.__all__``, and the ``__all__`` of each public module, or package, whose names
    the package around it does not have too.
    """
    return _names_of("gradkit", PACKAGE / "__init__.py")


def _names_of(module: str, path: Path) -> list[str]:
    names = [f"{module}.{name}" for name in all_of(path)]
    if path.stem != "__init__":
        return names
    shown = {
        node.module
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*"
    }
    folder = path.parent
    for inner in sorted([*folder.glob("[!_]*.py"), *folder.glob("[!_]*/__init__.py")]):
        name = f"{module}." + (inner.parent.name if inner.stem == "__init__" else inner.stem)
        if name not in shown:
            names += _names_of(name, inner)
    return names


def all_of(path: Path) -> list[str]:
    """Return ``__all__``: the file's own list and those of the modules that it adds to it."""
    names: list[str] = []
    found = False
    for node in ast.parse(path.read_text()).body:
        match node:
            case ast.Assign(targets=[ast.Name("__all__")], value=value):
                names, found = ast.literal_eval(value), True
            case ast.AnnAssign(target=ast.Name("__all__"), value=ast.expr() as value):
                names, found = ast.literal_eval(value), True
            case ast.AugAssign(target=ast.Name("__all__"), value=ast.Attribute(ast.Name(module))):
                names += all_of(path.parent / f"{module}.py")
    if not found:
        raise ValueError(f"{path} has no list of its public names, __all__")
    return names
