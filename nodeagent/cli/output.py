"""Writes the commands' output to stdout, and removes escape sequences from text that others have chosen."""

from __future__ import annotations

import os
import sys

from holdfast.protocol import foreign_text


class Unwritten(OSError):
    """Raised if the output cannot be written, for example on a full disk; the message has one line."""


def show(*lines: str) -> None:
    """Print lines. Raises Unwritten, or BrokenPipeError if the reader has closed the pipe."""
    harmless = (line for text in lines for line in foreign_text.lines(text, colour=True))
    write("".join(f"{line}\n" for line in harmless))


def write(text: str) -> None:
    """Write `text` at once. Raises the same exceptions as `show`."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise Unwritten(f"the output cannot be written: {error.strerror or error}") from None


def has_colour() -> bool:
    """Return True if stdout is a terminal that shows colours."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def discard() -> None:
    """Redirect stdout to /dev/null, because the interpreter would fail to flush it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
