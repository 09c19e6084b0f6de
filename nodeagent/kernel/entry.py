"""One line that journalctl writes as JSON, taken apart: systemd.journal-fields(7). Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from nodeagent.kernel.record import KERNEL

# What journald is asked for; cursor and time stamps come with every entry.
FIELDS = ("_TRANSPORT", "SYSLOG_FACILITY", "PRIORITY", "MESSAGE", "_BOOT_ID")
MAX_CURSOR = 512


@dataclass(frozen=True, slots=True)
class Entry:
    """One message of the kernel's."""

    cursor: str
    boot_id: str  # 32 hexadecimal digits
    facility: int
    priority: int  # 0 emergency to 7 debug
    monotonic_s: float  # CLOCK_MONOTONIC when journald took it
    text: str


def parse(line: bytes) -> Entry | None:
    """Return what a line says; None if it is none of the kernel log's. Never raises."""
    try:
        fields = json.loads(line)
        if not isinstance(fields, dict) or fields.get("_TRANSPORT") != "kernel":
            return None
        return Entry(
            cursor=str(fields.get("__CURSOR", ""))[:MAX_CURSOR],
            boot_id=str(fields.get("_BOOT_ID", "")),
            # journald writes it with each of these; without it nobody vouches for the line.
            facility=int(fields.get("SYSLOG_FACILITY", KERNEL + 1)),
            priority=int(fields.get("PRIORITY", 6)),
            monotonic_s=int(fields["__MONOTONIC_TIMESTAMP"]) / 1e6,
            text=_text(fields["MESSAGE"]),
        )
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def _text(message: Any) -> str:
    """Return a message, which is a list of bytes if it is not plain text. Raises ValueError, TypeError."""
    if isinstance(message, str):
        return message
    if isinstance(message, list):
        return bytes(message).decode("utf-8", "replace")
    raise TypeError(type(message))
