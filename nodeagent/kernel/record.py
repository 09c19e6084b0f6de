"""One record of /dev/kmsg, taken apart: Documentation/ABI/testing/dev-kmsg of the Linux source. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_FIELDS = 16  # the kernel itself writes two: SUBSYSTEM and DEVICE
KERNEL = 0  # the facility of what the kernel wrote; what is written to /dev/kmsg gets another, always

# "priority,sequence,microseconds,flags[,more];text", then lines " KEY=value"; more may come before the ";".
_HEAD = rb"(\d{1,9}),(\d{1,20}),(\d{1,20}),[^;\n]*;"
_NUMBERED = re.compile(_HEAD)
_RECORD = re.compile(_HEAD + rb"([^\n]*)(.*)", re.DOTALL)
_ESCAPED = re.compile(rb"\\x([0-9a-fA-F]{2})")


@dataclass(frozen=True, slots=True)
class Record:
    """One message of the log."""

    facility: int
    priority: int  # 0 emergency to 7 debug
    seq: int  # one more than that of the record before, if none was lost
    monotonic_s: float  # since boot, by the clock of the log: see `stamps`
    text: str  # unescaped: may hold line ends
    fields: tuple[tuple[str, str], ...] = ()


def parse(raw: bytes) -> Record | None:
    """Return what a record says; None if it is none. Never raises, in time linear in its length."""
    match = _RECORD.match(raw)
    if match is None:
        return None
    level, seq, stamp_us, text, rest = match.groups()
    number = int(level)
    fields = _fields(rest) if rest not in (b"", b"\n") else ()
    return Record(number >> 3, number & 7, int(seq), int(stamp_us) / 1e6, _unescaped(text), fields)


def sequence(raw: bytes) -> int | None:
    """Return the `seq` of a record whose text does not matter; None if it is none."""
    match = _NUMBERED.match(raw)
    return None if match is None else int(match[2])


def _unescaped(text: bytes) -> str:
    if b"\\" in text:
        text = _ESCAPED.sub(lambda found: bytes([int(found[1], 16)]), text)
    return text.decode("utf-8", "replace")


def _fields(rest: bytes) -> tuple[tuple[str, str], ...]:
    found = []
    for line in rest.split(b"\n", MAX_FIELDS + 1)[1 : MAX_FIELDS + 1]:
        key, equals, value = line.partition(b"=")
        if equals and key.startswith(b" "):
            found.append((_unescaped(key[1:]), _unescaped(value)))
    return tuple(found)
