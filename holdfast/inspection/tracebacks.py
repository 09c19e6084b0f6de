"""Recognise Python's tracebacks at the end of a log. Pure."""

from __future__ import annotations

import re

HEADER = "Traceback (most recent call last):"
FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+).*', re.MULTILINE)
_PREFIX = re.compile(r"^(?:\[rank\d+\]:\s?)?(?:[ |+-]*\| )?", re.MULTILINE)
_SEARCHED_CHARS = 20_000


def end_of_log(log: str) -> str:
    """Return the end of a log, without the line prefixes that torch and exception groups add."""
    return _PREFIX.sub("", log[-_SEARCHED_CHARS:])
