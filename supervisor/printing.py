"""Print for people and for programs; what a locale cannot show does not stop us."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable

from holdfast import printable


class Unwritable(Exception):
    """What is to be read cannot be written (a full disk)."""


def say(*texts: str) -> None:
    """Print each, with what others have written in it made harmless: colours alone stay.

    Raises `Unwritable`, and `BrokenPipeError` when the reader has left.
    """
    encoding = sys.stdout.encoding or "utf-8"
    for text in texts:
        for line in printable.lines(text, colour=True):
            _write(line.encode(encoding, errors="replace").decode(encoding) + "\n")
    _write("", flush=True)


def _write(text: str, *, flush: bool = False) -> None:
    try:
        sys.stdout.write(text)
        if flush:
            sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise Unwritable(f"the output cannot be written: {error.strerror or error}") from None


def say_all(lines: Iterable[str]) -> None:
    say(*lines)


def say_json(value: object) -> None:
    """Raises as `say`."""
    _write(json.dumps(finite(value), indent=2, allow_nan=False) + "\n", flush=True)


def finite(value: object) -> object:
    """Replace the numbers that JSON has no word for by null."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
