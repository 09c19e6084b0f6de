"""Show a run in progress: redrawn in place on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TextIO, cast

from holdfast.protocol.foreign_text import harmless
from supervisor.display import frame as rendering
from supervisor.display.ansi import DIM, RANKS, Style, width_of
from supervisor.display.screen import BUSY_BYTES, FULL_BYTES, Screen
from supervisor.view.model import PHASES
from supervisor.wording import count, sentence, slowness, what

FRAME_S = 0.2  # faster than this nobody reads
PROGRESS_S = 10.0
LIVE_BYTES = 512 << 10  # of lines kept for a terminal that is behind: more nobody reads there
PLAIN_BYTES = (
    FULL_BYTES - 4 * BUSY_BYTES
)  # for a file or a pipe: with what is being written, the output takes it
PIECE_BYTES = BUSY_BYTES // 4  # at a time: a burst goes out while it comes in
_TRACEBACK_LINES = 40
_MAX_MISSED = 20  # incidents that came between two looks
_BEGIN, _END = "\x1b[?2026h", "\x1b[?2026l"  # shown all at once, where the terminal knows that


class TextOutput(Protocol):
    """What a display writes to. `Screen` is one."""

    style: Style

    @property
    def busy(self) -> bool: ...
    def size(self) -> tuple[int, int]: ...
    def write(self, text: str) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...
    @property
    def lost(self) -> str: ...


class Display(Protocol):
    """What `run` tells. None of these waits or raises."""

    def update(self, status: Mapping[str, Any], now_s: float) -> None:
        """Show a new status; call it several times a second. `now_s` is of a monotonic clock."""

    def line(self, rank: int, text: str) -> None:
        """Show a line that a rank has printed; at the next update at the latest."""

    def say(self, text: str) -> None:
        """Show a line of our own at once."""

    def flush(self) -> None:
        """Wait for a moment until all that was said is written."""

    def close(self) -> str:
        """Leave the last state on the screen and end; return why that could not be written, or ""."""


@dataclass(frozen=True, slots=True)
class IncidentRecords:
    """The run's records: a status has only the newest incident, and there may have been more since the last.

    `recall` gives the record of an incident's number, None when there is none that can be read; those up to
    `before` are of an earlier run.
    """

    recall: Callable[[int], Mapping[str, Any] | None] = lambda _: None
    before: int = 0


NO_RECORDS = IncidentRecords()


def display(
    stream: TextIO, incidents: IncidentRecords = NO_RECORDS, *, plain: bool = False, quiet: bool = False
) -> Display:
    """Return the display that suits `stream`."""
    screen = Screen(stream)
    if screen.is_terminal and not plain and not quiet:
        return LiveDisplay(screen, incidents)
    return PlainDisplay(screen, incidents, quiet=quiet)


def _output(out: TextIO | TextOutput) -> TextOutput:
    return Screen(out) if isinstance(out, io.TextIOBase) else cast("TextOutput", out)


class _Lines:
    """Lines on their way to the output, the oldest dropped when they become more than `most_bytes`.

    `size` is how many bytes they have.
    """

    def __init__(self, style: Style, most_bytes: int) -> None:
        self._style = style
        self._most = most_bytes
        self._held: deque[str] = deque()
        self._dropped = 0
        self.size = 0

    def add_rank(self, rank: int, text: str) -> None:
        prefix = self._style.paint(f"[rank {rank}]", RANKS[rank % len(RANKS)])
        self.add(f"{prefix} {harmless(text, colour=self._style.colour)}")

    def add_ours(self, text: str) -> None:
        self.add(f"{self._style.paint('holdfast:', DIM)} {harmless(text, colour=False)}")

    def add_text(self, text: str) -> None:
        for each in text.splitlines() or [""]:
            self.add(harmless(each, colour=self._style.colour))

    def add(self, line: str) -> None:
        self._held.append(line)
        self.size += _size(line)
        while self.size > self._most and len(self._held) > 1:
            self._pop()
            self._dropped += 1

    def take(self, most_bytes: int | None = None) -> list[str]:
        """Return the oldest lines, all of them or about `most_bytes`, and a note if some were dropped."""
        lines = []
        if self._dropped:
            note = f"[{count(self._dropped, 'line')} not shown: the run's logs have them]"
            lines.append(self._style.paint(note, DIM))
            self._dropped = 0
        rest = 0 if most_bytes is None else max(0, self.size - most_bytes)
        while self._held and self.size > rest:
            lines.append(self._pop())
        return lines

    def _pop(self) -> str:
        line = self._held.popleft()
        self.size -= _size(line)
        return line

    def __len__(self) -> int:
        return len(self._held)


def _size(line: str) -> int:
    return len(line.encode(errors="replace")) + 1


class _SlowNews:
    """Which ranks have become slow, and which no longer are."""

    def __init__(self) -> None:
        self._told: set[object] = set()
        self._judge: tuple[object, object] = (None, None)

    def of(self, status: Mapping[str, Any]) -> list[str]:
        """Return a line for each change; another supervisor, or generation, begins with knowing of none."""
        judge = (status.get("supervisor_pid"), status.get("generation"))
        if judge != self._judge:
            self._judge, self._told = judge, set()
        news = []
        for each in status.get("ranks") or ():
            rank, is_slow = each.get("rank"), bool(each.get("slow"))
            if is_slow != (rank in self._told):
                self._told ^= {rank}
                news.append(
                    f"rank {rank} is slow: {slowness(each)}" if is_slow else f"rank {rank} is no longer slow"
                )
        return news


class _WarmNews:
    """For which members no warm process can be made, and for which that works again."""

    def __init__(self) -> None:
        self._failing: dict[object, str] = {}  # what that means: the error may differ each time

    def of(self, status: Mapping[str, Any]) -> list[str]:
        """Return a line for each change."""
        news = []
        for each in status.get("members") or ():
            name, error = each.get("name"), each.get("warm_error")
            meaning = str(error or "").rpartition("; ")[2]
            if error and self._failing.get(name) != meaning:
                self._failing[name] = meaning
                news.append(str(error))
            elif not error and name in self._failing and each.get("parked"):
                del self._failing[name]
                news.append(f"warm processes for member {name} are available again")
        return news


class _News:
    """What was not shown yet: incidents when they begin and when they are over, checkpoints not used or not
    written, slow ranks."""

    def __init__(self, incidents: IncidentRecords) -> None:
        self._incidents = incidents
        self._over = incidents.before  # the newest incident that was shown as over
        self._told: set[tuple[object, object]] = set()
        self._slow = _SlowNews()
        self._warm = _WarmNews()
        self._storage_fails = False

    def of(self, status: Mapping[str, Any]) -> list[str]:
        """Return a line for each; for one that was over at once, a single line."""
        news = [*self._slow.of(status), *self._warm.of(status), *self._storage(status)]
        warm = {each.get("warm_error") for each in status.get("members") or ()}
        for name in ("passed_over", "warnings"):
            for note in status.get(name) or ():
                if (name, note) not in self._told and note not in warm:
                    self._told.add((name, note))
                    news.append(note)
        last, opened = status.get("last_incident"), status.get("open_incident")
        if last and not last.get("open"):
            news += [line for found in (*self._missed(last), last) for line in self._ended(found)]
        number = _number(opened)
        if opened:
            news += self._before(number)
        if opened and number > self._over and ("open", number) not in self._told:
            self._told.add(("open", number))
            news += _line(opened, what(opened))
        return news

    def _before(self, number: int) -> list[str]:
        """Return the lines of those that were over when incident `number` began, and were not shown."""
        lines: list[str] = []
        for each in range(max(self._over + 1, number - _MAX_MISSED), number):
            found = self._incidents.recall(each)
            if found is None or found.get("open"):
                break  # told when that is over
            lines += self._ended(found)
        return lines

    def _missed(self, last: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Return the incidents that came and went between two looks, before `last`."""
        numbers = range(max(self._over + 1, _number(last) - _MAX_MISSED), _number(last))
        return [found for number in numbers if (found := self._incidents.recall(number)) is not None]

    def _ended(self, found: Mapping[str, Any]) -> list[str]:
        """Return the line of an incident that is over, once."""
        if _number(found) <= self._over:
            return []
        self._over = _number(found)
        return [*_line(found, sentence(found)), *_traceback(found)]

    def _storage(self, status: Mapping[str, Any]) -> list[str]:
        """Return a line when checkpoints begin to fail, and one when one is written again."""
        error = str((status.get("checkpoint") or {}).get("error") or "")
        if bool(error) == self._storage_fails:
            return []
        self._storage_fails = bool(error)
        fails = f"no checkpoint can be written: {error}; training continues, and saving is retried"
        return [fails if error else "checkpoints can be written again"]


def _number(incident: Mapping[str, Any] | None) -> int:
    digits = str((incident or {}).get("id") or "").removeprefix("i-")
    return int(digits) if digits.isdecimal() else 0


def _line(incident: Mapping[str, Any], words: str) -> list[str]:
    # What the script refuses is said once, at the end.
    return [] if incident.get("kind") == "bad_input" else [f"incident {incident.get('id')}: {words}"]


def _traceback(incident: Mapping[str, Any]) -> list[str]:
    """Return what the first of the ranks said that lost their peers though none had failed: no log has it."""
    if incident.get("kind") != "victim" or incident.get("remedy") == "stop":  # the end of a run has it, too
        return []
    return str(incident.get("message") or "").strip("\n").splitlines()[-_TRACEBACK_LINES:]


class LiveDisplay:
    """A few lines at the bottom of a terminal; what ranks print scrolls by above them."""

    def __init__(self, out: TextIO | TextOutput, incidents: IncidentRecords = NO_RECORDS) -> None:
        self._out = _output(out)
        self._lines = _Lines(self._out.style, LIVE_BYTES)
        self._news = _News(incidents)
        self._drawn: list[str] = []
        self._size = (0, 0)
        self._drawn_s = float("-inf")
        self._status: Mapping[str, Any] | None = None
        self._updated: object = None
        self._fresh_s = 0.0

    def update(self, status: Mapping[str, Any], now_s: float) -> None:
        if status.get("updated") != self._updated:
            self._updated, self._fresh_s = status.get("updated"), now_s
        self._status = status
        for news in self._news.of(status):
            self._lines.add_ours(news)
        if len(self._lines) or now_s - self._drawn_s >= FRAME_S or now_s < self._drawn_s:
            self._draw(now_s)

    def line(self, rank: int, text: str) -> None:
        self._lines.add_rank(rank, text)
        if self._status is None:
            self._draw(self._drawn_s)

    def say(self, text: str) -> None:
        self._lines.add_text(text)
        self._draw(self._drawn_s)

    def flush(self) -> None:
        self._out.flush()

    def close(self) -> str:
        self._draw(self._drawn_s)
        self._out.close()
        return self._out.lost

    def _draw(self, now_s: float) -> None:
        """Write the lines that wait, and the frame below them, in one piece."""
        if self._out.busy:
            return  # what was drawn is not shown yet: the next frame will be newer
        size = self._out.size()
        silent_s = max(0.0, now_s - self._fresh_s)
        frame = []
        if self._status is not None:
            frame = rendering.frame(self._status, size[0] - 1, self._out.style, silent_s)
            frame = [harmless(line, colour=True) for line in frame[: max(1, size[1] - 2)]]
        lines = self._lines.take()
        self._drawn_s = now_s
        if frame == self._drawn and not lines and size == self._size:
            return
        up = _rows(self._drawn, size[0])
        start = "\r" + (f"\x1b[{up}A" if up else "")
        body = "".join(f"{line}\x1b[K\n" for line in (*lines, *frame))
        self._out.write(f"{_BEGIN}{start}{body}\x1b[J{_END}")
        self._drawn, self._size = frame, size


def _rows(lines: list[str], columns: int) -> int:
    """Return the rows that lines take on a terminal that may have become narrower."""
    return sum(max(1, -(-width_of(line) // max(1, columns))) for line in lines)


class PlainDisplay:
    """Lines for a log: when something changes, and otherwise every ten seconds.

    With `quiet` only what ranks print and what is said.
    """

    def __init__(
        self, out: TextIO | TextOutput, incidents: IncidentRecords = NO_RECORDS, quiet: bool = False
    ) -> None:
        self._out = _output(out)
        self._quiet = quiet
        self._lines = _Lines(self._out.style, PLAIN_BYTES)
        self._news = _News(incidents)
        self._station: tuple[object, ...] = ()
        self._ran: object = None  # the newest generation that was said to run
        self._due_s = float("-inf")

    def update(self, status: Mapping[str, Any], now_s: float) -> None:
        if status and not self._quiet:  # there is none yet in the first moments
            self._tell(status, now_s)
        self._flush()

    def _tell(self, status: Mapping[str, Any], now_s: float) -> None:
        for news in self._news.of(status):
            self._lines.add_ours(news)
        phase = rendering.phase(status)
        number = status.get("generation")
        if rendering.has_run(status) and number != self._ran:
            self._ran = number
            self._lines.add_ours(rendering.generation(status))
        station = (phase, number if phase == "running" else None)
        if status.get("open_incident") and phase in rendering.RECOVERING:
            pass  # the incident itself was told, and will be when it is over
        elif station != self._station:
            self._station = station
            if phase == "running":
                self._ran = number
            if phase != PHASES["ended"]:  # that is for `run` to say
                self._lines.add_ours(rendering.station(status))
            self._due_s = now_s + PROGRESS_S
        elif now_s >= self._due_s and status.get("step") is not None and phase == "running":
            self._due_s = now_s + PROGRESS_S
            self._lines.add_ours(rendering.progress(status))

    def line(self, rank: int, text: str) -> None:
        self._lines.add_rank(rank, text)
        if self._lines.size > PIECE_BYTES:
            self._flush()

    def say(self, text: str) -> None:
        self._lines.add_text(text)
        self._flush()

    def flush(self) -> None:
        self._flush()
        self._out.flush()

    def close(self) -> str:
        while len(self._lines):  # busy or not: closing waits a moment for all that was written
            self._write()
        self._out.close()
        return self._out.lost

    def _flush(self) -> None:
        while len(self._lines) and not self._out.busy:
            self._write()

    def _write(self) -> None:
        self._out.write("".join(f"{line}\n" for line in self._lines.take(PIECE_BYTES)))
