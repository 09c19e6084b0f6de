"""The sensor of the kernel's lines in systemd's journal; needs no privilege but to read its files.

journalctl runs as a child process and writes one JSON object per entry: systemd.journal-fields(7).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.process.clock import left_s
from nodeagent.kernel import kmsg
from nodeagent.kernel.kmsg import KERNEL_FACILITY
from nodeagent.kernel.line_reader import LinePatterns, LineReader, LostRecords
from nodeagent.kernel.subprocess_lines import LineProcess
from nodeagent.model import Observation
from nodeagent.sensing.clock import Clock
from nodeagent.sensing.sensor import WAIT_S, Unavailable

# What journald is asked for; cursor and time stamps come with every entry.
FIELDS = ("_TRANSPORT", "SYSLOG_FACILITY", "PRIORITY", "MESSAGE", "_BOOT_ID")
MAX_CURSOR = 512
JOURNALCTL = "journalctl"
MAX_ENTRIES = 2048  # of one `read`: a flood must not keep the thread from stopping


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One message of the kernel's."""

    cursor: str
    boot_id: str  # 32 hexadecimal digits
    facility: int
    priority: int  # 0 emergency to 7 debug
    monotonic_s: float  # CLOCK_MONOTONIC when journald took it
    text: str


def parse_entry(line: bytes) -> JournalEntry | None:
    """Return what a line says; None if it is none of the kernel log's. Never raises."""
    try:
        fields = json.loads(line)
        if not isinstance(fields, dict) or fields.get("_TRANSPORT") != "kernel":
            return None
        return JournalEntry(
            cursor=str(fields.get("__CURSOR", ""))[:MAX_CURSOR],
            boot_id=str(fields.get("_BOOT_ID", "")),
            # journald writes it with each of these; without it nobody vouches for the line.
            facility=int(fields.get("SYSLOG_FACILITY", KERNEL_FACILITY + 1)),
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


class JournalSensor:
    """Follows the journal with journalctl as a child. See `Sensor`.

    Args:
        clock: Gives agent time; its anchor names the boot.
        lines: What lines mean something.
        cursor: How far the journal was read before, as journald says; "": from the start of this boot.
        directory: Of the journal's files, if it is not the usual one: the host's, mounted elsewhere.
        trust_user_lines: Also believe what was written to /dev/kmsg from user space. For tests only.
        journalctl: The program.
    """

    name = "journal"
    period_s = 0.0

    def __init__(
        self,
        clock: Clock,
        lines: LinePatterns,
        cursor: str = "",
        *,
        directory: Path | None = None,
        trust_user_lines: bool = False,
        journalctl: str = JOURNALCTL,
    ) -> None:
        self._clock = clock
        self._boot_id = clock.anchor.boot_id.replace("-", "")
        self._directory = directory
        self._trusted = trust_user_lines
        self._journalctl = journalctl
        self._sightings = LineReader(lines, self.name)
        self._losses = LostRecords(
            clock, self.name, "journalctl wrote lines that are too long to be the kernel's"
        )
        self._child: LineProcess | None = None
        self._heard = False  # anything since it was opened
        self.cursor = cursor if cursor.isprintable() else ""

    def command(self) -> list[str]:
        """Return how journalctl is called: for the kernel's lines of this boot, then those to come."""
        called = [
            # -k asks for this boot, too. --no-tail: without it -f shows the newest ten only.
            self._journalctl, "-k", "--boot", "-f", "--no-tail", "-o", "json", "--no-pager", "--quiet",
            f"--output-fields={','.join(FIELDS)}",
        ]  # fmt: skip
        if self._directory is not None:
            called.append(f"--directory={self._directory}")
        if self.cursor:
            called.append(f"--after-cursor={self.cursor}")
        return called

    def open(self) -> None:
        self.close()
        self._heard = False
        try:
            self._child = LineProcess(self.command())
        except FileNotFoundError as error:
            raise Unavailable(f"{self._journalctl} is not installed; /dev/kmsg has the same lines") from error
        except OSError as error:
            raise Unavailable(f"{self._journalctl}: {error.strerror}") from error

    def read(self) -> Iterable[Observation]:
        child = self._child
        if child is None:
            raise Unavailable(f"{self._journalctl} is not running")
        lines = child.lines(left_s(WAIT_S), MAX_ENTRIES)
        found: list[Observation] = []
        for line in lines:
            self._take(line, found)
        if not lines and child.ended:
            raise Unavailable(self._gone(child))
        self._losses.count += child.take_too_long()
        return [*found, *self._losses.told()]

    def close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.end()

    def _gone(self, child: LineProcess) -> str:
        # It may be the cursor that is refused, and would be each time.
        if not self._heard:
            self.cursor = ""
        return (
            f"{self._journalctl} has ended: {child.why()}; the journal must be kept in files that can be read"
        )

    def _take(self, line: bytes, found: list[Observation]) -> None:
        one = parse_entry(line)
        if one is None or one.boot_id != self._boot_id:
            return
        self._heard = True
        self.cursor = one.cursor or self.cursor
        if one.facility == kmsg.KERNEL_FACILITY or self._trusted:
            found += self._sightings.take(one.text, self._clock.from_monotonic(one.monotonic_s))
