"""Write to a terminal or a pipe without ever waiting for it.

Whoever reads our output may stop: Ctrl-S, a pager, a log collector that hangs. The process that
writes it also restarts what dies, so a thread writes, and what cannot be written is dropped.
"""

from __future__ import annotations

import os
import select
import shutil
import threading
from collections.abc import Mapping
from typing import TextIO

from supervisor.style import Style, style_for

BUSY_BYTES = 256 << 10  # from here on nothing new should be written
FULL_BYTES = 8 << 20  # from here on it is dropped
CLOSE_S = 2.0  # for a reader that is only slow
FLUSH_S = 0.5


class Screen:
    """One output. Its reader may be gone; that is no error."""

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
        self._thread = threading.Thread(target=self._work, name="screen", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """True while the reader is behind."""
        return self._waiting_bytes > BUSY_BYTES

    def size(self) -> tuple[int, int]:
        """Return columns and lines."""
        try:
            found = os.get_terminal_size(self._descriptor)
        except OSError:
            found = shutil.get_terminal_size()
        return (found.columns or 80, found.lines or 24)

    def write(self, text: str) -> None:
        """Have `text` written soon, whole or not at all. Never waits, never raises."""
        raw = text.encode(self._encoding, errors="replace")
        with self._changed:
            if self._ending or self._waiting_bytes + len(raw) > FULL_BYTES:
                return
            self._waiting.append(raw)
            self._waiting_bytes += len(raw)
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait, for a moment at most, until all is written. Never raises."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting_bytes, FLUSH_S)

    def close(self) -> None:
        """Wait, for a bounded time, until all is written."""
        with self._changed:
            self._ending = True
            self._changed.notify()
        self._thread.join(CLOSE_S)

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
            except OSError:  # nobody reads any more
                with self._changed:
                    self._ending = True
                    self._waiting.clear()
                    self._waiting_bytes = 0
                    self._changed.notify_all()
                return
            with self._changed:
                self._waiting_bytes -= len(raw)
                self._changed.notify_all()

    def _write_all(self, raw: bytes) -> None:
        view = memoryview(raw)
        while view:
            view = view[self._write_some(view) :]

    def _write_some(self, view: memoryview) -> int:
        try:
            return os.write(self._descriptor, view)
        except BlockingIOError:  # somebody made our terminal non-blocking
            select.select([], [self._descriptor], [], 1.0)
            return 0
