"""Text of others, fit for a terminal: output of ranks, messages of exceptions, kernel lines. Pure."""

from __future__ import annotations

import re

SGR = re.compile(r"\x1b\[[0-9;]*m")  # colours
# In order: control sequence, string for the terminal (a title), other escape, control character.
_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[ -/]*[0-~]?"
    r"|[\x00-\x08\x0a-\x1f\x7f-\x9f]"
)


def harmless(text: str, *, colour: bool) -> str:
    """Return one line of somebody else's output without what would move a cursor.

    With `colour` its colours stay, and are switched off at its end.
    """
    if text.isprintable():
        return text
    pieces = SGR.split(text)
    kept = SGR.findall(text) if colour else []
    clean = [_CONTROL.sub("", piece) for piece in pieces]
    if not kept:
        return "".join(clean)
    woven = "".join(a + b for a, b in zip(clean, [*kept, ""], strict=True))
    return f"{woven}\x1b[0m"


def lines(text: str, *, colour: bool) -> list[str]:
    """Return the lines of `text`, each harmless."""
    return [harmless(line, colour=colour) for line in text.split("\n")]
