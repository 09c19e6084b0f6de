"""The string literals in the sources of this repository."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Literal(NamedTuple):
    """A string literal. `joined` is True if it is an operand of `/`, which joins paths."""

    place: str  # file:line
    text: str
    joined: bool


def string_literals(*packages: str, but: str) -> Iterator[Literal]:
    """Yield the strings in the sources of `packages`, without docstrings and without the file `but`."""
    for path in sorted(each for package in packages for each in (ROOT / package).rglob("*.py")):
        name = str(path.relative_to(ROOT))
        if name == but:
            continue
        tree = ast.parse(path.read_bytes(), name)
        nodes = list(ast.walk(tree))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        joined = {
            id(side)
            for node in nodes
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)
            for side in (node.left, node.right)
        }
        for node in nodes:
            if isinstance(node, ast.Constant) and id(node) not in docstrings:
                value = node.value
                if isinstance(value, bytes):
                    value = value.decode("latin-1")
                if isinstance(value, str):
                    yield Literal(f"{name}:{node.lineno}", value, id(node) in joined)
