"""A package lists at most twelve modules, so that its listing shows where things are.

A public class or type alias has a unique name across all packages, so that the name identifies it.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.unit.literals import ROOT
from tests.unit.test_docstrings import trees

MOST = 12
PARTS = ("holdfast", "supervisor", "sidecar", "nodeagent", "trainer", "bench", "tests")
SCRIPTS = ROOT / "tests/local/scripts"  # programs that tests run: a list of cases, not of modules


def modules(package: Path) -> list[str]:
    return [
        path.stem for path in package.glob("*.py") if path.stem not in ("__init__", "__main__", "conftest")
    ]


def test_no_package_lists_more_than_twelve_modules() -> None:
    packages = {path.parent for part in PARTS for path in (ROOT / part).rglob("*.py")} - {SCRIPTS}
    assert len(packages) > 50
    too_long = {str(package.relative_to(ROOT)): len(modules(package)) for package in packages}
    assert {name: count for name, count in too_long.items() if count > MOST} == {}


_ALIAS = re.compile(r"[A-Z]\w*[a-z]\w*")  # a module-level name spelled like a class, not like a constant


def types_of(module: ast.Module) -> Iterator[str]:
    """Yield the names of the public classes and type aliases that `module` defines."""
    for node in module.body:
        targets: list[ast.expr] = []
        if isinstance(node, ast.ClassDef):
            targets = [ast.Name(node.name)]
        elif isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        yield from (each.id for each in targets if isinstance(each, ast.Name) and _ALIAS.fullmatch(each.id))


def test_public_classes_and_type_aliases_have_unique_names() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path, tree in trees():
        for name in types_of(tree):
            places[name].append(path)
    assert len(places) > 500
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_classes_and_both_kinds_of_aliases_are_detected() -> None:
    text = (
        "class A1b: ...\nBb = tuple[int]\nCc: TypeAlias = int\nLIMIT = 1\n_Dd = int\ndef f():\n class E: ..."
    )
    assert list(types_of(ast.parse(text))) == ["A1b", "Bb", "Cc"]
