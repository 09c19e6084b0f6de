"""`holdfast/` runs in the user's image, which has the standard library and perhaps torch."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import holdfast

MODULES = sorted(Path(holdfast.__file__).parent.rglob("*.py"))


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield the top-level name of each absolute import under `tree`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def at_import(tree: ast.Module) -> Iterator[str]:
    """Yield the imports that run when a module is imported: none in functions or under TYPE_CHECKING."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        yield from imported(node)


def test_holdfast_imports_only_the_standard_library_and_torch_only_late() -> None:
    allowed = {*sys.stdlib_module_names, "holdfast"}
    for module in MODULES:
        tree = ast.parse(module.read_text())
        assert set(imported(tree)) - allowed <= {"torch"}, module
        assert set(at_import(tree)) <= allowed, module
