"""The sensor of the kernel's ring buffer: instant, complete, and needs a privileged container."""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from holdfast.beat import left_s
from nodeagent.clock import Clock
from nodeagent.kernel import record, stamps
from nodeagent.kernel.lines import Lines
from nodeagent.kernel.losses import Losses
from nodeagent.kernel.sightings import Sightings
from nodeagent.observation import Observation
from nodeagent.sensor import WAIT_S, Unavailable

PATH = Path("/dev/kmsg")
BUFFER_BYTES = 16384  # the kernel's longest record is CONSOLE_EXT_LOG_MAX, 8192 until now
MAX_RECORDS = 4096  # of one `read`, some 30 ms: a flood must not keep the thread from stopping
MAX_FAILURES = 64  # of one `read`, of records that are longer than the buffer

_NOT_ALLOWED = (
    "a container must be privileged to read it: CAP_SYSLOG and a hostPath mount are not enough, because the "
    "device cgroup refuses the open. The journal has the same lines and needs no privilege: mount /var/log"
)


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far the log has been read."""

    boot_id: str
    seq: int  # of the last record read


class Kmsg:
    """Reads records; one `read` of the descriptor gives one. See `Sensor`.

    Args:
        clock: Gives agent time; its anchor names the boot.
        lines: What lines mean something.
        cursor: How far the log was read before; of another boot it does not count.
        trust_user_lines: Also believe what was written to /dev/kmsg from user space. For tests only: whoever
            may write there could have any node taken out of service.
        opener: Opens the log for reading, without blocking. Raises OSError.
        reader: Reads a descriptor as `os.read` does.
    """

    name = "kmsg"
    period_s = 0.0

    def __init__(
        self,
        clock: Clock,
        lines: Lines,
        cursor: Cursor | None = None,
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
        self._sightings = Sightings(lines, self.name)
        here = cursor is not None and cursor.boot_id == clock.anchor.boot_id
        self._seq = cursor.seq if cursor is not None and here else None
        self._fd: int | None = None
        self._losses = Losses(clock, self.name, "the kernel overwrote records before they were read")

    @property
    def cursor(self) -> Cursor | None:
        """How far has been read; what `read` has returned is of records up to there. None: nothing yet."""
        return None if self._seq is None else Cursor(self._clock.anchor.boot_id, self._seq)

    @property
    def lost(self) -> int:
        """How many records were lost since the sensor was made."""
        return self._losses.count

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
        return [*found, *self._losses.told()]

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            try:
                os.close(fd)
            except OSError:
                pass  # it is let go of all the same

    def _open(self) -> int:
        return os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    def _drain(self, fd: int, found: list[Observation]) -> bool:
        """Read what is there, up to a bound; False if nothing was."""
        slew, failures = stamps.slew(), 0
        for count in range(MAX_RECORDS):
            try:
                raw = self._reader(fd, BUFFER_BYTES)
            except BlockingIOError:
                return count > 0
            except BrokenPipeError:
                continue  # records were overwritten, in a flood again and again; the gap tells how many
            except OSError as error:
                failures += 1
                if error.errno == errno.EINVAL and failures <= MAX_FAILURES:
                    continue  # a record longer than the buffer; the kernel has moved on
                if found:
                    return True  # first what was seen: if the error stays, the next call meets it
                raise Unavailable(f"{self._path}: {error.strerror}") from error
            if not raw:
                if found:
                    return True
                raise Unavailable(f"{self._path} has ended")
            self._take(raw, slew, found)
        return True

    def _take(self, raw: bytes, slew: tuple[float, float], found: list[Observation]) -> None:
        if not self._sightings.worth(raw):  # nearly all
            seq = record.sequence(raw)
            if seq is not None:
                self._is_new(seq)
            return
        one = record.parse(raw)
        if one is None or not self._is_new(one.seq):
            return
        if one.facility == record.KERNEL or self._trusted:
            at_s = self._clock.from_monotonic(stamps.monotonic_s(one.monotonic_s, *slew))
            found += self._sightings.take(one.text, at_s)

    def _is_new(self, seq: int) -> bool:
        """Say whether a record is none that was read before, and count those missing between."""
        before = self._seq
        if before is None:
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
    return bool(poller.poll(left_s(WAIT_S) * 1000))
