"""Print for people and for programs; what a locale cannot show does not stop us."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable

from holdfast import printable


def say(*texts: str) -> None:
    """Print each, with what others have written in it made harmless: colours alone stay."""
    encoding = sys.stdout.encoding or "utf-8"
    for text in texts:
        for line in printable.lines(text, colour=True):
            sys.stdout.write(line.encode(encoding, errors="replace").decode(encoding) + "\n")
    sys.stdout.flush()


def say_all(lines: Iterable[str]) -> None:
    say(*lines)


def say_json(value: object) -> None:
    sys.stdout.write(json.dumps(finite(value), indent=2, allow_nan=False) + "\n")
    sys.stdout.flush()


def finite(value: object) -> object:
    """Replace the numbers that JSON has no word for by null."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
