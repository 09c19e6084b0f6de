"""Format text with the colours, signs and width that the terminal supports. Pure."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate

from holdfast.protocol.foreign_text import SGR

BOLD, DIM, RED, GREEN, YELLOW, BLUE, MAGENTA, CYAN = "1", "2", "31", "32", "33", "34", "35", "36"
RANKS = (CYAN, MAGENTA, BLUE, GREEN, YELLOW, "96", "95", "94", "92", "93")  # no red, which marks errors
_SIGNS = "●○◐✕·─…█"


@dataclass(frozen=True, slots=True)
class Style:
    """What an output supports: colours through escape sequences, and the display's Unicode signs."""

    colour: bool = False
    unicode: bool = False

    def paint(self, text: str, *codes: str) -> str:
        if not self.colour or not codes or not text:
            return text
        return f"\x1b[{';'.join(codes)}m{text}\x1b[0m"

    def sign(self, name: str) -> str:
        """Return the sign of this name, or an ASCII substitute if the output does not support it."""
        return _NAMED[name][0 if self.unicode else 1]


_NAMED: Mapping[str, tuple[str, str]] = {
    "on": ("●", "*"),
    "off": ("○", "o"),
    "half": ("◐", "~"),
    "bad": ("✕", "x"),
    "dot": ("·", "-"),
    "rule": ("─", "-"),
    "more": ("…", "..."),
    "bar": ("█", "#"),
}


def style_for(*, terminal: bool, encoding: str | None, environment: Mapping[str, str]) -> Style:
    """Return the style that an output with these properties supports."""
    plain = environment.get("NO_COLOR", "") != "" or environment.get("TERM") == "dumb"
    try:
        _SIGNS.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return Style(terminal and not plain, False)
    return Style(terminal and not plain, True)


def width_of(text: str) -> int:
    """Return how many columns `text` occupies. Escape sequences do not count."""
    bare = SGR.sub("", text)
    if bare.isascii():
        return len(bare)
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in bare
    )


def clip(text: str, width: int, style: Style) -> str:
    """Shorten `text` to `width` columns. `text` must not contain escape sequences."""
    if width_of(text) <= width:
        return text
    more = style.sign("more")
    widths = accumulate(map(width_of, text))
    end = next((at for at, used in enumerate(widths) if used + len(more) > width), 0)
    return (text[:end] + more)[: max(width, 0)]


def join(cells: Iterable[tuple[str, tuple[str, ...]]], width: int, style: Style, gap: str) -> str:
    """Join cells of (text, codes) until `width` is reached. The first cell is clipped to fit."""
    line, used = "", 0
    for text, codes in cells:
        if not text:
            continue
        space = gap if used else ""
        if used and used + len(space) + width_of(text) > width:
            break
        shown = text if used else clip(text, width, style)
        line += space + style.paint(shown, *codes)
        used += len(space) + width_of(shown)
    return line
