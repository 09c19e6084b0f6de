"""Show a run in progress: on a terminal as a frame redrawn in place, elsewhere as plain lines."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol, TextIO, cast

from holdfast.protocol.foreign_text import harmless
from supervisor.display import frame as rendering
from supervisor.display.ansi import DIM, RANKS, Style, width_of
from supervisor.display.news import NO_RECORDS, IncidentRecords, StatusNews
from supervisor.display.screen import BUSY_BYTES, FULL_BYTES, Screen
from supervisor.view.model import PHASES
from supervisor.wording import count

FRAME_S = 0.2  # the interval between frames; users cannot read faster changes
PROGRESS_S = 10.0
LIVE_BYTES = 512 << 10  # how much text to keep for a slow terminal: more than a user can read
# How much text to keep for a file or a pipe. `Screen` accepts this much in addition to the text that it is
# writing.
PLAIN_BYTES = FULL_BYTES - 4 * BUSY_BYTES
PIECE_BYTES = BUSY_BYTES // 4  # the size of one write; small, to write a burst while it arrives
# synchronized output, which the terminal draws in one step
_BEGIN, _END = "\x1b[?2026h", "\x1b[?2026l"


class TextOutput(Protocol):
    """The output of a display, such as `Screen`."""

    style: Style

    @property
    def busy(self) -> bool: ...
    def size(self) -> tuple[int, int]: ...
    def write(self, text: str) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...
    @property
    def write_error(self) -> str: ...


class Display(Protocol):
    """Shows a run to the user. Only `flush` and `close` wait, for a bounded time. No method raises."""

    def update(self, status: Mapping[str, Any], now_s: float) -> None:
        """Show a new status. Call this several times a second. `now_s` is on a monotonic clock."""

    def line(self, rank: int, text: str) -> None:
        """Show a line that a rank has printed, no later than the next update."""

    def say(self, text: str) -> None:
        """Show one of Holdfast's own lines immediately."""

    def flush(self) -> None:
        """Wait, for a bounded time, until everything is written."""

    def close(self) -> str:
        """Draw the last state and close the output. Return why it could not be written; "" if it was."""


def display(
    stream: TextIO, incidents: IncidentRecords = NO_RECORDS, *, plain: bool = False, quiet: bool = False
) -> Display:
    """Return the display for `stream`: a live one for a terminal, unless `plain` or `quiet` is true."""
    screen = Screen(stream)
    if screen.is_terminal and not plain and not quiet:
        return LiveDisplay(screen, incidents)
    return PlainDisplay(screen, incidents, quiet=quiet)


def _output(out: TextIO | TextOutput) -> TextOutput:
    return Screen(out) if isinstance(out, io.TextIOBase) else cast("TextOutput", out)


class _Lines:
    """The lines that wait to be written. If they exceed `most_bytes`, the oldest are dropped.

    `size` is their length in bytes.
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

    def add_own(self, text: str) -> None:
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

    def pop(self, most_bytes: int | None = None) -> list[str]:
        """Return all lines, or about `most_bytes` of the oldest, and a note if some were dropped."""
        lines = []
        if self._dropped:
            note = f"[{count(self._dropped, 'line')} not shown: the run's logs contain them]"
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


class LiveDisplay:
    """A frame of a few lines at the bottom of a terminal. The output of the ranks scrolls above it."""

    def __init__(self, out: TextIO | TextOutput, incidents: IncidentRecords = NO_RECORDS) -> None:
        self._out = _output(out)
        self._lines = _Lines(self._out.style, LIVE_BYTES)
        self._news = StatusNews(incidents)
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
        for news in self._news.observe(status):
            self._lines.add_own(news)
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
        return self._out.write_error

    def _draw(self, now_s: float) -> None:
        """Write the waiting lines and the frame below them in one call."""
        if self._out.busy:
            return  # the last frame has not been written yet, so a later call draws a newer one
        size = self._out.size()
        silent_s = max(0.0, now_s - self._fresh_s)
        frame = []
        if self._status is not None:
            frame = rendering.frame(self._status, size[0] - 1, self._out.style, silent_s)
            frame = [harmless(line, colour=True) for line in frame[: max(1, size[1] - 2)]]
        lines = self._lines.pop()
        self._drawn_s = now_s
        if frame == self._drawn and not lines and size == self._size:
            return
        up = _rows(self._drawn, size[0])
        start = "\r" + (f"\x1b[{up}A" if up else "")
        body = "".join(f"{line}\x1b[K\n" for line in (*lines, *frame))
        self._out.write(f"{_BEGIN}{start}{body}\x1b[J{_END}")
        self._drawn, self._size = frame, size


def _rows(lines: list[str], columns: int) -> int:
    """Return how many rows lines occupy. The terminal may have become narrower since they were drawn."""
    return sum(max(1, -(-width_of(line) // max(1, columns))) for line in lines)


class PlainDisplay:
    """Plain lines for a log: one for each change, and a progress line every `PROGRESS_S`.

    If `quiet` is true, it shows only the output of the ranks and the texts passed to `say`.
    """

    def __init__(
        self, out: TextIO | TextOutput, incidents: IncidentRecords = NO_RECORDS, quiet: bool = False
    ) -> None:
        self._out = _output(out)
        self._quiet = quiet
        self._lines = _Lines(self._out.style, PLAIN_BYTES)
        self._news = StatusNews(incidents)
        self._shown: tuple[object, ...] = ()
        self._ran: object = None  # the newest generation whose start has been shown
        self._due_s = float("-inf")
        self._recovers_since_s: float | None = None  # when the recovery in progress was first seen

    def update(self, status: Mapping[str, Any], now_s: float) -> None:
        if status and not self._quiet:  # empty until the run has written its first status
            self._add_changes(status, now_s)
        self._flush()

    def _add_changes(self, status: Mapping[str, Any], now_s: float) -> None:
        for news in self._news.observe(status):
            self._lines.add_own(news)
        phase = rendering.phase(status)
        number = status.get("generation")
        if rendering.has_run(status) and number != self._ran:
            self._ran = number
            self._lines.add_own(rendering.generation(status))
        shown = (phase, number if phase == "running" else None)
        if not (status.get("open_incident") and phase in rendering.RECOVERING):
            self._recovers_since_s = None
        elif self._recovers_since_s is None:  # the incident has a line at its beginning and at its end
            self._recovers_since_s, self._due_s = now_s, now_s + PROGRESS_S
        elif now_s >= self._due_s:
            self._due_s = now_s + PROGRESS_S
            self._lines.add_own(rendering.recovering(status, now_s - self._recovers_since_s))
        if self._recovers_since_s is not None:
            return
        if shown != self._shown:
            self._shown = shown
            if phase == "running":
                self._ran = number
            if phase != PHASES["ended"]:  # `cli.run` prints the end
                self._lines.add_own(rendering.phase_line(status))
            self._due_s = now_s + PROGRESS_S
        elif now_s >= self._due_s and status.get("step") is not None and phase == "running":
            self._due_s = now_s + PROGRESS_S
            self._lines.add_own(rendering.progress(status))

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
        while len(self._lines):  # even if the output is busy, because `Screen.close` waits for a bounded time
            self._write()
        self._out.close()
        return self._out.write_error

    def _flush(self) -> None:
        while len(self._lines) and not self._out.busy:
            self._write()

    def _write(self) -> None:
        self._out.write("".join(f"{line}\n" for line in self._lines.pop(PIECE_BYTES)))
