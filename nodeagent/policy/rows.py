"""A CSV table of ours as rows of values. Pure."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from nodeagent.policy import meanings
from nodeagent.policy.mistakes import Mistakes
from nodeagent.policy.rules import Meaning

OTHERS = "*"  # in a row that stands for all that no other names

_NUMBERS = ("hold_s", "recurs_bursts", "recurs_within_s", "verdict_since")


def rows(text: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Give each row as a key for messages and its columns that are not empty."""
    for number, row in enumerate(csv.DictReader(text.splitlines()), 2):
        yield f"line-{number}", {name: value for name, value in row.items() if name and value}


def meant_by(mistakes: Mistakes, at: str, row: Mapping[str, str]) -> Meaning:
    """Return what the columns of a row mean; what is wrong with them is noted."""
    return meanings.read(mistakes, at, {name: _typed(name, value) for name, value in row.items()})


def _typed(name: str, value: str) -> Any:
    """Return a column's text as a TOML file would have it."""
    reader: Callable[[str], Any] = int if name in _NUMBERS else str
    if name == "recurs_same_variant":
        return {"true": True, "false": False}.get(value, value)
    try:
        return reader(value)
    except ValueError:
        return value
