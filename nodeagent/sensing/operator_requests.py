"""Implements `holdfast node clear`, `forget` and `release`: they append to a file, which a sensor reads.

The file is beside the saved state. A request needs only write permission, works while the agent is down, and
stays on record.

Each line contains the boot and CLOCK_BOOTTIME of the request, so its place among the agent's observations
does not depend on the wall clock.

Only this sensor reads the file. It hands requests to forget a baseline to the sensors with baselines, in
memory (`baselines`).
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import floor, inf
from pathlib import Path
from typing import Any, BinaryIO

from holdfast.process.clock import boot_id
from nodeagent.model import Observation
from nodeagent.sensing import baselines
from nodeagent.sensing.baselines import MAX_ENTITY, ForgetRequests
from nodeagent.sensing.clock import Anchor, Clock
from nodeagent.sensing.releases import RELEASE, WITHDRAWS, GpuRelease, Releases, finite, requested
from nodeagent.sensing.sensor import WAIT_S, Omission, Unavailable

FILE = "cleared.jsonl"
CLOSED = "released"  # exists while NVML is closed for a release; contains the name of the release
MAX_BYTES = 64 << 10  # read at a time
END_BYTES = 256  # the end of what was read identifies the file, because each line has its time
MAX_LINE = 8192  # the reason may have 500 characters, each written as up to 12
# Ends a line that was cut off, as on a full disk, and makes it malformed; the command that wrote it has
# already reported an error.
_CUT_OFF = b"~\n"


@dataclass(frozen=True, slots=True)
class RequestTime:
    """When a request was made."""

    boot_id: str
    boottime_s: float
    wall_s: float

    def is_after(self, other: RequestTime, this_boot: str) -> bool:
        """Return True if this is later. The wall clock decides only between two boots that have ended."""
        if self.boot_id == other.boot_id:
            return self.boottime_s > other.boottime_s
        if this_boot in (self.boot_id, other.boot_id):
            return self.boot_id == this_boot
        return self.wall_s > other.wall_s


def record_clear(folder: Path, entity: str, why: str, anchor: Anchor | None) -> None:
    """Append a line that declares an entity healthy. Raises OSError.

    `anchor` is the anchor in the folder's saved state; None if there is none.
    """
    _append(folder, {"entity": entity[:MAX_ENTITY], "why": why[:500]}, anchor)


def record_forget(folder: Path, baseline: str, entity: str, why: str) -> None:
    """Append a request to forget a baseline, for one entity or, if `entity` is empty, for all.

    Raises OSError.
    """
    # The key is not `entity`: an earlier version would mistake the line for a request to clear.
    _append(folder, {"baseline": baseline, "of": entity[:MAX_ENTITY], "why": why[:500]}, None)


def record_release(folder: Path, duration_s: float, why: str) -> GpuRelease:
    """Append a request that the agent close NVML for a time; 0 ends a release. Raises OSError."""
    boottime_s = _append(folder, {RELEASE: duration_s, "why": why[:500]}, None)
    return GpuRelease(boot_id(), round(boottime_s + duration_s, 6), why[:500])


def record_withdrawal(folder: Path, release: GpuRelease) -> None:
    """Append a request to end only this release. Raises OSError.

    An agent of an earlier version ends whatever release is in force.
    """
    _append(folder, {RELEASE: 0.0, WITHDRAWS: release.name, "why": "withdrawn"}, None)


def _append(folder: Path, request: Mapping[str, Any], anchor: Anchor | None) -> float:
    """Append a line, with the time of the request, and return its CLOCK_BOOTTIME."""
    # Rounded down, because a request that is later than now would not take effect yet.
    boot, boottime_s = boot_id(), floor(time.clock_gettime(time.CLOCK_BOOTTIME) * 1e6) / 1e6
    at = {"wall_s": round(time.time(), 3), "boot_id": boot, "boottime_s": boottime_s}
    if anchor is not None and anchor.boot_id == boot:
        at["agent_s"] = anchor.offset_s + boottime_s
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path, line = folder / FILE, f"{json.dumps({**request, **at})}\n".encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        rest = line if _ends_with_a_line(path) else _CUT_OFF + line
        while rest:  # a nearly full disk takes only a part; the next write then fails with the reason
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return boottime_s


def _ends_with_a_line(path: Path) -> bool:
    """Return True if the file is empty or ends with a whole line; False if it cannot be read."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            return file.read(1) in (b"", b"\n")
    except OSError:
        return False


def closed_for(folder: Path, asked: GpuRelease) -> GpuRelease | None:
    """Return the release for which the agent has closed NVML; None unless it is `asked` or a later one."""
    try:
        name = (folder / CLOSED).read_text(errors="replace")
        return asked if name == asked.name else _later(folder, asked, name)
    except OSError:
        return None


def _later(folder: Path, asked: GpuRelease, name: str) -> GpuRelease | None:
    """Return the release of this name if it was requested after `asked`, as far as the newest lines show."""
    with (folder / FILE).open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_BYTES))
        lines = file.read(2 * MAX_BYTES).split(b"\n")
    found = [each for line in lines if (each := requested(_parse(line), asked.boot_id)) is not None]
    names = [each.name for each in found]
    later = found[names.index(asked.name) + 1 :] if asked.name in names else []
    return next((each for each in later if each.name == name), None)


def effective_s(request: Mapping[str, Any], anchor: Anchor, now_s: float) -> float | None:
    """Return the agent time when a request was made; None if the line is malformed. Pure.

    A request from another boot takes effect before the current boot. If the agent knew that boot, the line
    contains the agent time. If not, the request takes effect after everything that the agent saw before the
    current boot. Lines of an earlier version contain only the wall-clock time, which is used for them. No
    request takes effect later than now.
    """
    if "boot_id" not in request:
        wall_s = finite(request.get("wall_s"))
        return None if wall_s is None else min(wall_s, now_s)
    if request["boot_id"] == anchor.boot_id:
        boottime_s = finite(request.get("boottime_s"))
        return None if boottime_s is None else min(anchor.offset_s + boottime_s, now_s)
    agent_s = finite(request.get("agent_s"))
    return min(anchor.offset_s if agent_s is None else agent_s, anchor.offset_s, now_s)


class OperatorRequests:
    """Reads new lines of the file; each takes effect as of the time when it was written (`effective_s`).

    So a line that is read again, after the saved state was lost, does not clear a later finding. If the file
    was edited, rotated or restored (it is shorter than the part that was read, or that part now ends
    differently), its lines are read again, and no request that was made before the newest one read so far
    takes effect again.
    """

    name = "operator"
    period_s = WAIT_S

    def __init__(
        self, folder: Path, clock: Clock, position: Any = None, *, acknowledges: bool = False
    ) -> None:
        """Create the sensor; the releases and `forgets` are restored from `position`.

        Args:
            position: The result of `position` before a restart, or the number of bytes that an earlier
                version had read.
            acknowledges: True to create the file `CLOSED` while NVML is closed for a release.
        """
        self._path = folder / FILE
        self._closed_path = folder / CLOSED
        self._clock = clock
        self._offset, self._releases = _restored(position, clock.anchor.boot_id)
        self._newest, self._again_to = _restored_newest(position)
        if self._offset and not (isinstance(position, dict) and "newest" in position):
            # An earlier version did not save its newest request; every request that it read was made before
            # now.
            boottime_s = time.clock_gettime(time.CLOCK_BOOTTIME)
            self._newest = RequestTime(clock.anchor.boot_id, boottime_s, time.time())
        self.forgets = ForgetRequests(position.get("forgets") if isinstance(position, dict) else None)
        self._end = _restored_end(position)  # a checksum of the last bytes that were read; None: unknown
        self._is_again = False  # the lines of the last chunk may have been read before
        self._ahead: list[Observation] = []
        self._acknowledges = acknowledges
        self._acknowledged: str | None = None  # the content of the file; None if it is unknown
        self.is_closed: Callable[[], bool] = lambda: False  # whether NVML is closed, as a release requires

    def open(self) -> None: ...

    def close(self) -> None: ...

    def position(self) -> dict[str, Any]:
        """Return the number of bytes read so far, and the requests that remain in force, as JSON."""
        releases = [[each.boot_id, each.until_boottime_s, each.why] for each in self._releases.kept]
        return {
            "offset": self._offset,
            "release": releases[-1] if releases else None,  # an earlier version reads only this one
            "replaced": releases[:-1],
            "forgets": self.forgets.dump(),
            "newest": self._newest and [self._newest.boot_id, self._newest.boottime_s, self._newest.wall_s],
            "again_to": self._again_to,
            "end": self._end,
        }

    @property
    def release(self) -> GpuRelease | None:
        """This boot's newest release, which may have ended."""
        return self._releases.newest

    def released_until_s(self) -> float:
        """Return the agent time when this boot's newest release ends; -inf if there is none."""
        release = self.release
        return -inf if release is None else self._clock.anchor.offset_s + release.until_boottime_s

    def left_out(self) -> tuple[Omission, ...]:
        """Return how many requests to forget a baseline were dropped."""
        dropped = self.forgets.dropped
        return (Omission("forget", f"{dropped} requests were dropped; repeat them"),) if dropped else ()

    def read_ahead(self) -> None:
        """Read the new lines before the other sensors start; the next `read` returns the observations."""
        with suppress(Unavailable):
            before = -1
            while before != self._offset:
                before = self._offset
                self._take_lines()

    def read(self) -> Iterable[Observation]:
        self._take_lines()
        seen, self._ahead = self._ahead, []
        if self._acknowledges:
            self._acknowledge()
        return seen

    def _take_lines(self) -> None:
        self._ahead += [each for line in self._new_lines() for each in self._observed(line)]

    def _new_lines(self) -> list[bytes]:
        try:
            with self._path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if self._is_replaced(file, size) or (self._offset == 0 and self._newest is not None):
                    self._offset, self._again_to = 0, size
                file.seek(self._offset)
                raw = file.read(MAX_BYTES)
                whole, newline, _ = raw.rpartition(b"\n")
                if not newline and len(raw) == MAX_BYTES:
                    whole = raw  # the line is longer than any that the commands write
                offset = self._offset + len(whole) + len(newline)
                self._end = _end_of(file, offset)
        except FileNotFoundError:
            self._offset, self._end = 0, None
            return []
        except OSError as error:
            raise Unavailable(f"{self._path} cannot be read: {error.strerror}") from None
        self._is_again, self._offset = self._offset < self._again_to, offset
        return whole.split(b"\n")

    def _is_replaced(self, file: BinaryIO, size: int) -> bool:
        """Return True if the file does not begin with what was read of it."""
        return size < self._offset or self._end not in (None, _end_of(file, self._offset))

    def _note_request(self, request: Mapping[str, Any]) -> bool:
        """Note when a request was made; return False if its line is read again and has taken effect."""
        made, newest = _request_time(request), self._newest
        if newest is None or made is None:
            self._newest = newest or made
            return True
        later = made.is_after(newest, self._clock.anchor.boot_id)
        if later:
            self._newest = made
        return later or not self._is_again

    def _observed(self, line: bytes) -> Iterable[Observation]:
        request = _parse(line)
        is_new = self._note_request(request)
        at_s = effective_s(request, self._clock.anchor, self._clock.now_s())
        if at_s is None:
            return
        entity = request.get("entity")
        if isinstance(entity, str) and entity:
            if not is_new:  # without an agent's time, it would take effect again, at a later time
                return
            yield Observation(at_s, "cleared", entity, self.name, text=line.decode(errors="replace"))
        elif "baseline" in request:
            forget = baselines.parse_request(request["baseline"], request.get("of", "")) if is_new else None
            if forget is not None:
                self.forgets.add(forget)
        elif is_new:
            self._releases = self._releases.after(request)

    def _acknowledge(self) -> None:
        """Create or remove the file `CLOSED`; on a failing disk, try again at the next read."""
        release = self.release
        active = release is not None and self._clock.now_s() < self.released_until_s() and self.is_closed()
        wanted = release.name if release is not None and active else ""
        if wanted == self._acknowledged:
            return
        with suppress(OSError):
            if wanted:
                self._closed_path.write_text(wanted)
            else:
                self._closed_path.unlink(missing_ok=True)
            self._acknowledged = wanted


def _end_of(file: BinaryIO, offset: int) -> int:
    """Return a checksum of the bytes before an offset. Raises OSError."""
    file.seek(max(0, offset - END_BYTES))
    return zlib.crc32(file.read(min(offset, END_BYTES)))


def _restored_end(position: Any) -> int | None:
    end = position.get("end") if isinstance(position, dict) else None
    return end if type(end) is int else None


def _restored_newest(position: Any) -> tuple[RequestTime | None, int]:
    found = position if isinstance(position, dict) else {}
    newest, again_to = found.get("newest"), found.get("again_to")
    to = again_to if type(again_to) is int and again_to >= 0 else 0
    if not isinstance(newest, list) or len(newest) != 3:
        return None, to
    fields = {"boot_id": newest[0], "boottime_s": newest[1], "wall_s": newest[2]}
    return _request_time(fields), to


def _request_time(request: Mapping[str, Any]) -> RequestTime | None:
    """Return the time of a request; None if the line is malformed, or of a version without boot ids."""
    boot, boottime_s, wall_s = (
        request.get("boot_id"),
        finite(request.get("boottime_s")),
        request.get("wall_s"),
    )
    wall = finite(wall_s)
    if not isinstance(boot, str) or boottime_s is None or wall is None:
        return None
    return RequestTime(boot, boottime_s, wall)


def _restored(position: Any, boot: str) -> tuple[int, Releases]:
    found = position if isinstance(position, dict) else {"offset": position}
    offset, replaced = found.get("offset"), found.get("replaced")
    raw = [*(replaced if isinstance(replaced, list) else []), found.get("release")]
    kept = tuple(each for one in raw if (each := _restored_release(one, boot)) is not None)
    return (offset if type(offset) is int and offset >= 0 else 0), Releases(boot, kept)


def _restored_release(raw: Any, boot: str) -> GpuRelease | None:
    if not isinstance(raw, list) or len(raw) != 3 or raw[0] != boot:
        return None
    until_s = finite(raw[1])
    return None if until_s is None else GpuRelease(boot, until_s, str(raw[2]))


def _parse(line: bytes) -> Mapping[str, Any]:
    """Return a line's fields; none if the line is malformed."""
    try:
        found = json.loads(line[:MAX_LINE])
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
