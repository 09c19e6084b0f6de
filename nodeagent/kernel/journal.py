"""The sensor for kernel lines in systemd's journal; needs only read access to the journal's files.

journalctl runs as a child process and writes one JSON object per entry: systemd.journal-fields(7).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.process.clock import seconds_to_next_tick
from nodeagent.kernel import kmsg
from nodeagent.kernel.kmsg import KERNEL_FACILITY
from nodeagent.kernel.line_reader import LinePatterns, LineReader, LostRecords
from nodeagent.kernel.subprocess_lines import LineProcess
from nodeagent.model import Observation
from nodeagent.sensing.clock import Clock
from nodeagent.sensing.progress import CallProgress
from nodeagent.sensing.sensor import WAIT_S, Unavailable

# The fields requested from journald; cursor and time stamps come with every entry.
FIELDS = ("_TRANSPORT", "SYSLOG_FACILITY", "PRIORITY", "MESSAGE", "_BOOT_ID")
MAX_CURSOR = 512
JOURNALCTL = "journalctl"
MAX_ENTRIES = 2048  # per `read`: a flood must not prevent the thread from stopping
# A journalctl that hangs is as silent as a healthy kernel. At the first silence, and again after this time
# without a line, the sensor asks a second journalctl for the kernel's newest entry, which the first one must
# have written.
PROVE_S = 300.0
ANSWER_S = 30.0  # how long to wait for each of the two


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One message of the kernel."""

    cursor: str
    boot_id: str  # 32 hexadecimal digits
    facility: int
    priority: int  # 0 emergency to 7 debug
    monotonic_s: float  # CLOCK_MONOTONIC when journald received it
    text: str


def parse_entry(line: bytes) -> JournalEntry | None:
    """Parse a line; return None if it is not an entry of the kernel log. Never raises."""
    try:
        fields = json.loads(line)
        if not isinstance(fields, dict) or fields.get("_TRANSPORT") != "kernel":
            return None
        return JournalEntry(
            cursor=str(fields.get("__CURSOR", ""))[:MAX_CURSOR],
            boot_id=str(fields.get("_BOOT_ID", "")),
            # journald writes this field with every kernel line; without it, the line cannot be trusted.
            facility=int(fields.get("SYSLOG_FACILITY", KERNEL_FACILITY + 1)),
            priority=int(fields.get("PRIORITY", 6)),
            monotonic_s=int(fields["__MONOTONIC_TIMESTAMP"]) / 1e6,
            text=_text(fields["MESSAGE"]),
        )
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def _text(message: Any) -> str:
    """Return a message as text. journald writes a message that is not plain text as a list of bytes.

    Raises:
        ValueError, TypeError: it is neither text nor a list of bytes.
    """
    if isinstance(message, str):
        return message
    if isinstance(message, list):
        return bytes(message).decode("utf-8", "replace")
    raise TypeError(type(message))


class JournalSensor:
    """Follows the journal with journalctl as a child process. See `Sensor`.

    Args:
        clock: Converts to agent time; its anchor names the boot.
        lines: The patterns of the lines to report.
        cursor: Journald's cursor of the last entry read before; "": read from the start of this boot.
        directory: The folder of the journal's files if it is not the default, such as a mounted folder of
            the host.
        trust_user_lines: Also accept entries written to /dev/kmsg from user space. For tests only.
        journalctl: The program to run.
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
        self.progress = CallProgress()
        self._child: LineProcess | None = None
        self._undead: list[LineProcess] = []  # killed, but not ended
        # when the child last wrote a line, or was last proven to have missed none; monotonic
        self._proven_s = float("-inf")
        self._heard = False  # whether an entry has arrived since the journal was opened
        self.cursor = cursor if cursor.isprintable() else ""

    def command(self) -> list[str]:
        """Return journalctl's command line: the kernel's lines of this boot, then new ones as they arrive."""
        # Without --no-tail, -f shows only the newest ten entries.
        called = [*self._called(), "-f", "--no-tail"]
        if self.cursor:
            called.append(f"--after-cursor={self.cursor}")
        return called

    def _called(self) -> list[str]:
        called = [
            # -k implies this boot.
            self._journalctl, "-k", "--boot", "-o", "json", "--no-pager", "--quiet",
            f"--output-fields={','.join(FIELDS)}",
        ]  # fmt: skip
        return called if self._directory is None else [*called, f"--directory={self._directory}"]

    def open(self) -> None:
        self.close()
        self._heard, self._proven_s = False, float("-inf")
        self._undead = [each for each in self._undead if each.is_alive()]
        if self._undead:  # its disk hangs; further processes would only wait for it, too
            raise Unavailable(
                f"{self._journalctl} (process {self._undead[0].pid}) was killed but has not exited"
            )
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
        self.progress.mark("journalctl -f")
        lines = child.lines(seconds_to_next_tick(WAIT_S), MAX_ENTRIES)
        if not lines and not child.ended and time.monotonic() - self._proven_s >= PROVE_S:
            lines = self._missed_lines(child)
        if lines:
            self._proven_s = time.monotonic()
        found: list[Observation] = []
        for line in lines:
            self._read_line(line, found)
        if not lines and child.ended:
            raise Unavailable(self._gone(child))
        self._losses.count += child.take_too_long()
        return [*found, *self._losses.due_readings()]

    def close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            self._end(child)

    def _end(self, child: LineProcess) -> None:
        child.end()
        if child.is_alive():
            self._undead.append(child)

    def _missed_lines(self, child: LineProcess) -> list[bytes]:
        """Wait until the child has written the kernel's newest line; return the lines that it has written.

        Raises Unavailable if either journalctl does not write.
        """
        question = LineProcess([*self._called(), "-n", "1"])
        try:
            answer = self._patiently(question, 1, "journalctl -n 1")
            if not answer and not question.ended:
                raise Unavailable(f"{self._journalctl} has not written the newest entry for {ANSWER_S:g} s")
            if not answer and question.code():
                raise Unavailable(self._gone(question))
            if not answer and not question.take_too_long():
                raise Unavailable(f"{self._journalctl} finds no line of the kernel from this boot")
        finally:
            self._end(question)
        newest = parse_entry(answer[0]) if answer else None
        lines: list[bytes] = []
        if newest is not None and newest.cursor != self.cursor:
            lines = self._patiently(child, MAX_ENTRIES, "journalctl -f")
            if not lines and not child.ended:
                self._doubt_cursor()
                raise Unavailable(f"{self._journalctl} -f does not write an entry that is in the journal")
        self._proven_s = time.monotonic()
        return lines

    def _patiently(self, child: LineProcess, limit: int, what: str) -> list[bytes]:
        """Return what the child writes within `ANSWER_S`. This wait is not reported as a stuck sensor."""
        lines: list[bytes] = []
        deadline_s = time.monotonic() + ANSWER_S
        while not lines and not child.ended and time.monotonic() < deadline_s:
            self.progress.mark(what)
            lines = child.lines(min(1.0, ANSWER_S), limit)
        return lines

    def _doubt_cursor(self) -> None:
        """Forget a saved cursor that did not work, because journalctl would reject or misread it again."""
        if not self._heard:
            self.cursor = ""

    def _gone(self, child: LineProcess) -> str:
        self._doubt_cursor()
        return f"{self._journalctl} has ended: {child.why()}; it requires a journal in readable files"

    def _read_line(self, line: bytes, found: list[Observation]) -> None:
        one = parse_entry(line)
        if one is None or one.boot_id != self._boot_id:
            return
        self._heard = True
        self.cursor = one.cursor or self.cursor
        if one.facility == kmsg.KERNEL_FACILITY or self._trusted:
            found += self._sightings.read(one.text, self._clock.from_monotonic(one.monotonic_s))
