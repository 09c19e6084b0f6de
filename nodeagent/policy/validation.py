"""Collects all mistakes in a file, one line for each: the key, its value, and the accepted values. Pure.

TOML is parsed by the standard library, or on Python 3.10 by tomli, which has the same interface.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from reprlib import Repr
from typing import Any, TypeVar

MAX_MISTAKES = 100
MAX_KEY = 80  # characters
MAX_TEXT = 200
MAX_BITS = 1024  # the longest number that a message shows
_PLAIN = re.compile(r"[\w.+-]+", re.ASCII)


class _Brief(Repr):
    """Represents any TOML value as text of bounded length."""

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to print more than a few thousand decimal digits, and hexadecimal input may have
        # more.
        return (
            super().repr_int(x, level) if x.bit_length() <= MAX_BITS else f"a number of {x.bit_length()} bits"
        )


_BRIEF = _Brief()

_BRIEF.maxstring = _BRIEF.maxother = _BRIEF.maxlong = 60

_BRIEF.maxlevel = 2

T = TypeVar("T")


if sys.version_info >= (3, 11):
    import tomllib as _toml
else:
    import tomli as _toml

TomlError = _toml.TOMLDecodeError  # a ValueError


def load_toml(text: str) -> dict[str, Any]:
    """Parse a TOML document. Raises TomlError with the line and column in its message."""
    return _toml.loads(text)


class BadPolicy(ValueError):
    """Raised for a file with mistakes; `messages` lists all of them, one line each."""

    def __init__(self, messages: Iterable[str]) -> None:
        self.messages = tuple(messages)
        super().__init__("\n".join(self.messages))


class Mistakes:
    """Collects the mistakes of one file.

    Each reader returns the value, or records a mistake and returns None.
    """

    def __init__(self, file: str) -> None:
        self.file = file
        self.found: list[str] = []

    def note(self, key: str, message: str) -> None:
        self.found.append(f"{self.file}: {key}: {message}")

    def wrong(self, key: str, value: object, accepted: str) -> None:
        self.found.append(f"{self.file}: {key} = {_BRIEF.repr(value)}: expected {accepted}")

    def unknown(self, key: str, name: str, known: Iterable[str]) -> None:
        """Record that `name` is unknown, with the nearest known name."""
        names = sorted(known)
        self.note(key, f"not known{near_miss(name, names)}; expected {listed(names)}")

    def end(self) -> None:
        """Raise BadPolicy if any mistakes were recorded."""
        if len(self.found) > MAX_MISTAKES:
            more = len(self.found) - MAX_MISTAKES
            raise BadPolicy([*self.found[:MAX_MISTAKES], f"{self.file}: and {more} more"])
        if self.found:
            raise BadPolicy(self.found)

    def number(self, key: str, value: object, low: float, high: float) -> float | None:
        if isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high:
            return float(value)
        self.wrong(key, value, f"a number from {low:g} to {high:g}")
        return None

    def whole(self, key: str, value: object, low: int, high: int) -> int | None:
        if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
            return value
        self.wrong(key, value, f"a whole number from {low} to {high}")
        return None

    def flag(self, key: str, value: object) -> bool | None:
        if isinstance(value, bool):
            return value
        self.wrong(key, value, "true or false")
        return None

    def text(self, key: str, value: object) -> str | None:
        if isinstance(value, str) and 0 < len(value) <= MAX_TEXT and value.isprintable():
            return value
        self.wrong(key, value, f"one line of 1 to {MAX_TEXT} characters")
        return None

    def choice(self, key: str, value: object, choices: Mapping[str, T]) -> T | None:
        if isinstance(value, str) and value in choices:
            return choices[value]
        near = near_miss(value, choices) if isinstance(value, str) else ""
        self.wrong(key, value, ", ".join(choices) + near)
        return None

    def table(self, key: str, value: object) -> dict[str, Any] | None:
        if isinstance(value, dict):
            return value
        self.wrong(key, value, "a table")
        return None


def key_of(*parts: str) -> str:
    """Return a key for a message as a single line of bounded length."""
    shown = (part if _PLAIN.fullmatch(part) and len(part) <= MAX_KEY else _BRIEF.repr(part) for part in parts)
    return ".".join(shown)


def close_match(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known name that is most similar to `name`; None if none is similar enough."""
    import difflib  # here, because it is only needed for messages, and an agent that serves stays smaller

    return next(iter(difflib.get_close_matches(name, list(known), 1, cutoff)), None)


def near_miss(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    close = close_match(name[:MAX_KEY], names)
    near = [close] if close else [each for each in names if name and name in each]
    return f"; did you mean {near[0]}?" if near else ""


def listed(names: Iterable[str]) -> str:
    """Return names for a message, at most twelve."""
    all_names = list(names)
    more = f" and {len(all_names) - 12} more" if len(all_names) > 12 else ""
    return ", ".join(all_names[:12]) + more
