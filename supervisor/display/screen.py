"""Write to a terminal or a pipe without blocking the caller.

The reader may stop reading because of Ctrl-S, a pager or a hung log collector. The process must still keep
restarting dead parts, so a thread writes the text and drops what it cannot write. At the end, a pipe receives
the last lines and a note about how much was dropped, even if its reader is far behind. If the system allows
it, the pipe is enlarged to make room for them. `say` and `say_json` are for commands that print once. They
block, and they can raise exceptions.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import select
import shutil
import stat
import sys
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TextIO

from holdfast.protocol import foreign_text
from supervisor.display.ansi import Style, style_for
from supervisor.wording import count

BUSY_BYTES = 256 << 10  # if more text is waiting, `busy` is True and callers should not write more
FULL_BYTES = 8 << 20  # if more text is waiting, new text is dropped
CLOSE_S = 2.0  # the time limit for a slow reader at the end
FLUSH_S = 0.5
LAST_S = 0.5  # the time limit for the last lines, after there is room for them
LAST_BYTES = 16 << 10  # the size of the last lines, which say how the run ended and are never dropped
ROOM_BYTES = 64 << 10  # room for the last lines, a note, and the rest of a partly written line
_AT_ONCE_BYTES = 4096  # how much a pipe accepts without blocking when poll reports it as writable
_POLL_MS = 100  # the interval between polls while a pipe is full
_GONE = (errno.EPIPE, errno.EIO)  # the reader has exited, or the terminal is closed


def style_of(stream: TextIO) -> Style:
    """Return the style that `stream` supports."""
    return style_for(terminal=stream.isatty(), encoding=stream.encoding, environment=os.environ)


class Screen:
    """An output stream, written by a thread.

    `write_error` says why the last text could not be written, for example because the disk is full; "" if it
    was written. A reader that has exited is not an error.
    """

    write_error: str = ""

    def __init__(self, stream: TextIO, environment: Mapping[str, str] | None = None) -> None:
        environment = os.environ if environment is None else environment
        self._descriptor = stream.fileno()
        self._encoding = stream.encoding or "utf-8"
        self.is_terminal = stream.isatty() and environment.get("TERM") != "dumb"
        self.style: Style = style_for(
            terminal=stream.isatty(), encoding=stream.encoding, environment=environment
        )
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._changed = threading.Condition()
        self._ending = False
        self._is_pipe = stat.S_ISFIFO(os.fstat(self._descriptor).st_mode)
        self._behind = False  # the reader was too slow at the end, so only the last lines are still written
        self._thread = threading.Thread(target=self._work, name="screen", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """True while much text is waiting because the reader is slow."""
        return self._waiting_bytes > BUSY_BYTES

    def size(self) -> tuple[int, int]:
        """Return the number of columns and lines."""
        try:
            found = os.get_terminal_size(self._descriptor)
        except OSError:
            found = shutil.get_terminal_size()
        return (found.columns or 80, found.lines or 24)

    def write(self, text: str) -> None:
        """Queue `text`, to be written in full or not at all. Never blocks or raises."""
        raw = text.encode(self._encoding, errors="replace")
        with self._changed:
            if self._ending or self._waiting_bytes + len(raw) > FULL_BYTES:
                return
            self._waiting.append(raw)
            self._waiting_bytes += len(raw)
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait up to `FLUSH_S` until everything is written. Never raises."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting_bytes, FLUSH_S)

    def close(self) -> None:
        """Wait up to `CLOSE_S` until all is written. After that, a slow pipe gets only the last lines."""
        with self._changed:
            self._ending = True
            self._changed.notify()
        self._thread.join(CLOSE_S)
        if self._is_pipe and self._thread.is_alive():
            self._behind = True
            with suppress(OSError):  # the size of a user's pipes is limited
                has_bytes = fcntl.fcntl(self._descriptor, fcntl.F_GETPIPE_SZ)
                fcntl.fcntl(self._descriptor, fcntl.F_SETPIPE_SZ, has_bytes + ROOM_BYTES)
            self._thread.join(LAST_S)

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._ending:
                    self._changed.wait()
                if not self._waiting:
                    return
                raw = b"".join(self._waiting)
                self._waiting.clear()
            try:
                self._write_all(raw)
                self.write_error = ""
            except OSError as error:
                if error.errno not in _GONE:  # a full disk may have room again later
                    self.write_error = error.strerror or str(error)
                    self._done(len(raw))
                    continue
                with self._changed:
                    self._ending = True
                    self._waiting.clear()
                    self._waiting_bytes = 0
                    self._changed.notify_all()
                return
            self._done(len(raw))

    def _done(self, has_bytes: int) -> None:
        with self._changed:
            self._waiting_bytes -= has_bytes
            self._changed.notify_all()

    def _write_all(self, raw: bytes) -> None:
        if self._is_pipe:
            self._write_pipe(raw)
            return
        view = memoryview(raw)
        while view:
            view = view[self._write_some(view) :]

    def _write_pipe(self, raw: bytes) -> None:
        """Write in non-blocking pieces, so that the rest of `raw` can be dropped at the end."""
        view, whole = memoryview(raw), True
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        while view:
            ready = poll.poll(_POLL_MS)
            if self._behind and whole:
                at_start = len(view) == len(raw) or raw[-len(view) - 1 : -len(view)] == b"\n"
                view, whole = memoryview(_last_of(self._rest(view), at_start)), False
            if ready:
                view = view[self._write_some(view[:_AT_ONCE_BYTES]) :]

    def _rest(self, view: memoryview) -> bytes:
        """Remove all unwritten text from the queue, and return it."""
        with self._changed:
            waiting = b"".join(self._waiting)
            self._waiting.clear()
            self._waiting_bytes -= len(waiting)
        return bytes(view) + waiting

    def _write_some(self, view: memoryview) -> int:
        try:
            return os.write(self._descriptor, view)
        except BlockingIOError:  # another process has made the terminal non-blocking
            select.select([], [self._descriptor], [], 1.0)
            return 0


def _last_of(rest: bytes, at_start: bool) -> bytes:
    """Return the rest of a partly written line, a note about dropped lines, and the last lines."""
    begun, first = b"", 0
    if not at_start:
        first = rest.find(b"\n") + 1
        begun = rest[:first]
        if not 0 < first <= LAST_BYTES + ROOM_BYTES // 4:
            begun, first = b"\n", 0
    from_last = len(rest) - LAST_BYTES
    last = first if from_last <= first else rest.find(b"\n", from_last - 1) + 1
    dropped = rest.count(b"\n", first, last)
    if not dropped:
        return rest
    note = f"[{count(dropped, 'line')} not shown: the run's logs contain them]\n"
    return begun + note.encode() + rest[last:]


class Unwritable(Exception):
    """The output of a command cannot be written, for example to a full disk."""


def say(*texts: str) -> None:
    """Print texts, which may come from a script. Escape sequences are removed, except colours.

    Characters that the locale cannot represent are replaced.

    Raises `Unwritable`, or `BrokenPipeError` if the reader has exited.
    """
    encoding = sys.stdout.encoding or "utf-8"
    for text in texts:
        for line in foreign_text.lines(text, colour=True):
            _write(line.encode(encoding, errors="replace").decode(encoding) + "\n")
    _write("", flush=True)


def _write(text: str, *, flush: bool = False) -> None:
    try:
        sys.stdout.write(text)
        if flush:
            sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise Unwritable(f"the output cannot be written: {error.strerror or error}") from None


def say_all(lines: Iterable[str]) -> None:
    say(*lines)


def say_json(value: object) -> None:
    """Print `value` as JSON. Raises the same exceptions as `say`."""
    _write(json.dumps(finite(value), indent=2, allow_nan=False) + "\n", flush=True)


def finite(value: object) -> object:
    """Return `value` with None for each number that JSON cannot represent."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
