"""The sensor for the kernel's ring buffer, /dev/kmsg.

In a container, it works only if the container is privileged. The record format is described in
Documentation/ABI/testing/dev-kmsg of the Linux source.

The kernel stamps records with the processor's counter. CLOCK_MONOTONIC is the same counter slewed by NTP, and
the two drift apart by seconds per day. Without a correction, an event that another sensor saw at the same
moment would seem to precede or follow the record. CLOCK_MONOTONIC_RAW is not slewed, so its difference from
CLOCK_MONOTONIC yields the correction.
"""

from __future__ import annotations

import errno
import os
import re
import select
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from holdfast.process.clock import seconds_to_next_tick
from nodeagent.kernel.line_reader import LinePatterns, LineReader, LostRecords
from nodeagent.model import Observation
from nodeagent.sensing.clock import Clock
from nodeagent.sensing.sensor import WAIT_S, Omission, Unavailable

MAX_FIELDS = 16  # the kernel itself writes two: SUBSYSTEM and DEVICE
# The facility of the kernel's own records. Records that programs write to /dev/kmsg always get another one.
KERNEL_FACILITY = 0

# "priority,sequence,microseconds,flags[,more];text", then lines " KEY=value"; more may come before the ";".
_HEAD = rb"(\d{1,9}),(\d{1,20}),(\d{1,20}),[^;\n]*;"
_NUMBERED = re.compile(_HEAD)
_RECORD = re.compile(_HEAD + rb"([^\n]*)(.*)", re.DOTALL)
_ESCAPED = re.compile(rb"\\x([0-9a-fA-F]{2})")
PATH = Path("/dev/kmsg")
BUFFER_BYTES = 16384  # the kernel's longest record is CONSOLE_EXT_LOG_MAX, at present 8192
MAX_RECORDS = 4096  # per `read`, about 30 ms: a flood must not prevent the thread from stopping
MAX_FAILURES = 64  # per `read`, for records that are longer than the buffer
_NOT_ALLOWED = (
    "a container must be privileged to read it: CAP_SYSLOG and a hostPath mount are not enough, because the "
    "device cgroup refuses the open. The journal has the same lines and needs no privilege: mount /var/log"
)


@dataclass(frozen=True, slots=True)
class KmsgRecord:
    """One message of the log."""

    facility: int
    priority: int  # 0 emergency to 7 debug
    seq: int  # the previous record's number plus one, if none was lost
    monotonic_s: float  # since boot, by the log's clock: see `stamp_to_monotonic`
    text: str  # unescaped: may contain line breaks
    fields: tuple[tuple[str, str], ...] = ()


def parse_record(raw: bytes) -> KmsgRecord | None:
    """Parse a record; None if it is malformed. Never raises; takes time linear in its length."""
    match = _RECORD.match(raw)
    if match is None:
        return None
    level, seq, stamp_us, text, rest = match.groups()
    number = int(level)
    fields = _fields(rest) if rest not in (b"", b"\n") else ()
    return KmsgRecord(number >> 3, number & 7, int(seq), int(stamp_us) / 1e6, _unescaped(text), fields)


def record_sequence(raw: bytes) -> int | None:
    """Return the `seq` of a record without parsing its text; None if it is malformed."""
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


def stamp_to_monotonic(stamp_s: float, monotonic_now_s: float, raw_now_s: float) -> float:
    """Return the CLOCK_MONOTONIC reading for a record's stamp, using the average slew since boot."""
    if raw_now_s <= 0:
        return stamp_s
    return min(stamp_s * (monotonic_now_s / raw_now_s), monotonic_now_s)


def read_clocks() -> tuple[float, float]:
    """Return CLOCK_MONOTONIC and CLOCK_MONOTONIC_RAW, for `stamp_to_monotonic`."""
    return time.clock_gettime(time.CLOCK_MONOTONIC), time.clock_gettime(time.CLOCK_MONOTONIC_RAW)


@dataclass(frozen=True, slots=True)
class KmsgCursor:
    """How far the log has been read."""

    boot_id: str
    seq: int  # the `seq` of the last record read


class KmsgSensor:
    """Reads /dev/kmsg: one `read` of the descriptor returns one record. See `Sensor`.

    Args:
        clock: Converts to agent time; its anchor names the boot.
        lines: The patterns of the lines to report.
        cursor: The position reached before a restart; ignored if it belongs to another boot.
        trust_user_lines: Also accept records written to /dev/kmsg from user space. For tests only, because
            every process that may write there could then take the node out of service.
        opener: Opens the log for non-blocking reading. Raises OSError.
        reader: Reads from a descriptor, like `os.read`.
    """

    name = "kmsg"
    period_s = 0.0

    def __init__(
        self,
        clock: Clock,
        lines: LinePatterns,
        cursor: KmsgCursor | None = None,
        *,
        path: Path = PATH,
        trust_user_lines: bool = False,
        opener: Callable[[], int] | None = None,
        reader: Callable[[int, int], bytes] = os.read,
    ) -> None:
        self._clock = clock
        self._path = path
        self._trusted = trust_user_lines
        self._opener = opener or self._open
        self._reader = reader
        self._sightings = LineReader(lines, self.name)
        here = cursor is not None and cursor.boot_id == clock.anchor.boot_id
        self._seq = cursor.seq if cursor is not None and here else None
        self._was_watched = cursor is not None  # an agent has read the log before, perhaps in another boot
        self._overwritten = 0  # records of this boot from before the first agent
        self._fd: int | None = None
        self._losses = LostRecords(clock, self.name, "the kernel overwrote records before they were read")

    @property
    def cursor(self) -> KmsgCursor | None:
        """The last record read; `read` has returned everything up to it. None before the first record."""
        return None if self._seq is None else KmsgCursor(self._clock.anchor.boot_id, self._seq)

    @property
    def lost(self) -> int:
        """The number of records lost since the sensor was created."""
        return self._losses.count

    def left_out(self) -> tuple[Omission, ...]:
        """Return what the kernel had overwritten before an agent first read the log of this node."""
        count = self._overwritten
        if not count:
            return ()
        why = f"the kernel had overwritten the first {count} records of this boot before they were first read"
        return (Omission(f"sensor/{self.name}", why),)

    def open(self) -> None:
        self.close()
        try:
            self._fd = self._opener()
        except PermissionError as error:
            raise Unavailable(f"{self._path}: {error.strerror}: {_NOT_ALLOWED}") from error
        except OSError as error:
            raise Unavailable(f"{self._path}: {error.strerror}") from error

    def read(self) -> Iterable[Observation]:
        if self._fd is None:
            raise Unavailable(f"{self._path} is not open")
        found: list[Observation] = []
        if not self._drain(self._fd, found) and _readable(self._fd):
            self._drain(self._fd, found)
        return [*found, *self._losses.due_readings()]

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            try:
                os.close(fd)
            except OSError:
                pass  # the descriptor is released anyway

    def _open(self) -> int:
        return os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    def _drain(self, fd: int, found: list[Observation]) -> bool:
        """Read the available records, up to a bound; return False if there were none."""
        slew, failures = read_clocks(), 0
        for count in range(MAX_RECORDS):
            try:
                raw = self._reader(fd, BUFFER_BYTES)
            except BlockingIOError:
                return count > 0
            except BrokenPipeError:
                continue  # records were overwritten, as happens in a flood; the gap in `seq` shows how many
            except OSError as error:
                failures += 1
                if error.errno == errno.EINVAL and failures <= MAX_FAILURES:
                    continue  # the record is longer than the buffer, and the kernel has skipped it
                if found:
                    return True  # return the records read so far; if the error lasts, the next call raises it
                raise Unavailable(f"{self._path}: {error.strerror}") from error
            if not raw:
                if found:
                    return True
                raise Unavailable(f"{self._path} has ended")
            self._read_raw(raw, slew, found)
        return True

    def _read_raw(self, raw: bytes, slew: tuple[float, float], found: list[Observation]) -> None:
        if not self._sightings.may_match(raw):  # nearly all
            seq = record_sequence(raw)
            if seq is not None:
                self._advance_to(seq)
            return
        one = parse_record(raw)
        if one is None or not self._advance_to(one.seq):
            return
        if one.facility == KERNEL_FACILITY or self._trusted:
            at_s = self._clock.from_monotonic(stamp_to_monotonic(one.monotonic_s, *slew))
            found += self._sightings.read(one.text, at_s)

    def _advance_to(self, seq: int) -> bool:
        """Count the records missing before a record. Return False if it has been read before.

        The first record of a boot has the number 0. What was overwritten before the first start of an agent
        is no loss, because nobody has vouched for that time.
        """
        before = self._seq
        if before is None:
            if self._was_watched:
                self._losses.count += seq
            else:
                self._overwritten = seq
            self._seq = seq
            return True
        if seq <= before:
            return False
        self._losses.count += seq - before - 1
        self._seq = seq
        return True


def _readable(fd: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(seconds_to_next_tick(WAIT_S) * 1000))
