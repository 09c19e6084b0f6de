"""Limit the size of text from the user's processes, and make it safe to print to a terminal. Pure.

The limits apply to the encoded size of a text, because in JSON a character outside ASCII takes 6 or 12 bytes.
They apply to the texts of all ranks together, to keep a message within the size that a peer accepts even with
many ranks. Each rank has an equal share, no matter what others print, so a text does not change when another
rank ends. A launcher's whole state is at most about 3.5 MiB, half of it numbers and names.

Ranks' output, exception messages and kernel log lines are made harmless by removing everything that would
move the cursor.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields, replace
from json.encoder import encode_basestring_ascii
from typing import TypeVar

WHOLE_BYTES = 32_000  # the limit on a traceback that has no other limit
# The limit on the final texts of all ranks together, without the text of the first rank that ended.
ENDINGS_BYTES = 512 << 10
INSPECTIONS_BYTES = 384 << 10  # the limit on the stacks of all ranks of a member together
# For each kind of short text (notes, bad numbers): the limit on the texts of all ranks of a member together.
WORDS_BYTES = 64 << 10
# The minimum share of `ENDINGS_BYTES` for a rank of a large group, if its member has room. It is enough for
# the end of a log.
LEAST_BYTES = 6 << 10
# The share of the kept text that comes from the beginning. In a long message, frames are at the beginning and
# the reason is at the end.
_HEAD = 1 / 3
_CUT = " [...] "

SGR = re.compile(r"\x1b\[[0-9;]*m")  # colours
# In this order: control sequences, strings for the terminal (such as a title), other escape sequences,
# control characters.
_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[ -/]*[0-~]?"
    r"|[\x00-\x08\x0a-\x1f\x7f-\x9f]"
)
_LINE_ENDS = re.compile(r"[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]+")

T = TypeVar("T")


def sent_bytes(text: str) -> int:
    """Return the size of `text` within a message."""
    return len(encode_basestring_ascii(text)) - 2  # the size in `json.dumps`, in a fifth of the time


def share(total_bytes: int, ranks: int, least_bytes: int = 0) -> int:
    """Return the share of `total_bytes` that each of `ranks` may use."""
    return max(least_bytes, total_bytes // max(1, ranks))


def shortened(text: str, most_bytes: int, head: float = _HEAD) -> str:
    """Return `text`, shortened to at most `most_bytes`. A mark replaces what is omitted from the middle.

    A text that fits is returned unchanged. `head` is the share of the kept text that comes from the
    beginning.
    """
    if len(text) <= most_bytes and sent_bytes(text) <= most_bytes:
        return text
    line = f"\n[... the middle of {len(text):,} characters is omitted ...]\n"
    cut = line if "\n" in text and 4 * len(line) <= most_bytes else _CUT
    room = most_bytes - sent_bytes(cut)
    if room <= 0:
        return ""
    first = text[: _most(lambda n: text[:n], int(room * head))]
    left = room - sent_bytes(first)
    last = _most(lambda n: text[len(text) - n :], left)
    return first + cut + text[len(text) - last :]


def _most(part: Callable[[int], str], most_bytes: int) -> int:
    """Return how many characters of `part` fit into `most_bytes`."""
    low, high = 0, most_bytes
    while low < high:
        middle = (low + high + 1) // 2
        if sent_bytes(part(middle)) <= most_bytes:
            low = middle
        else:
            high = middle - 1
    return low


def each(message: T, most_bytes: int, head: float = _HEAD) -> T:
    """Return the dataclass `message` with each text among its fields shortened to `most_bytes`."""
    texts = {f.name: getattr(message, f.name) for f in fields(message)}  # type: ignore[arg-type]
    cut = {
        name: shortened(text, most_bytes, head)
        for name, text in texts.items()
        if isinstance(text, str) and len(text) * 12 > most_bytes
    }
    return replace(message, **cut) if cut else message  # type: ignore[type-var]


def harmless(text: str, *, colour: bool) -> str:
    """Return one line of a user process's output without the sequences that would move the cursor.

    With `colour`, colours are kept, and reset at the end of the line.
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


def one_line(text: str) -> str:
    """Return `text` as one line without escape sequences, so no part of it looks like one of our lines."""
    if text.isprintable():
        return text
    return harmless(_LINE_ENDS.sub(" ", text.expandtabs(1)), colour=False)


def lines(text: str, *, colour: bool) -> list[str]:
    """Return the lines of `text`, each without the sequences that would move the cursor."""
    return [harmless(line, colour=colour) for line in text.split("\n")]
