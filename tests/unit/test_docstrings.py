"""Every exception that a docstring names exists."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator

from tests.unit.literals import ROOT

PARTS = ("holdfast", "supervisor", "sidecar", "nodeagent", "trainer", "bench")
_SECTION = re.compile(r"^Raises:\n((?: .*\n?|\n)*)", re.MULTILINE)
_ENTRY = re.compile(r"^    ([A-Z]\w+):", re.MULTILINE)
_SENTENCE = re.compile(r"Raises ((?:`?[A-Z][\w.]*`?(?:, | and | or )?)+)")


def trees() -> Iterator[tuple[str, ast.Module]]:
    for part in PARTS:
        for path in sorted((ROOT / part).rglob("*.py")):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def raised(docstring: str) -> list[str]:
    section = _SECTION.search(docstring)
    listed = _ENTRY.findall(section[1]) if section else []
    return listed + [name for each in _SENTENCE.findall(docstring) for name in re.findall(r"[A-Z]\w+", each)]


def known(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (each.asname or each.name for each in node.names)
        elif isinstance(node, ast.Assign):
            yield from (each.id for each in node.targets if isinstance(each, ast.Name))
        elif (
            isinstance(node, ast.Raise)
            and isinstance(node.exc, ast.Call)
            and isinstance(node.exc.func, ast.Attribute)
        ):
            yield node.exc.func.attr  # a library's, by its module: `raise web.HTTPBadRequest(...)`


def test_every_exception_that_a_docstring_names_is_a_class() -> None:
    found = list(trees())
    names = {*dir(builtins), *(name for _, tree in found for name in known(tree))}
    wrong = [
        f"{path}:{node.lineno} {name}"
        for path, tree in found
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        for name in raised(ast.get_docstring(node) or "")
        if name not in names
    ]
    assert wrong == []


def test_a_missing_name_is_detected() -> None:
    assert raised("Do it.\n\nRaises:\n    Gone: It is not there.\n") == ["Gone"]
    assert raised("Do it. Raises `Gone`, OSError and nothing else.") == ["Gone", "OSError"]
