"""Writes the agent's events to stdout as JSON lines, in a separate thread.

A stalled log collector fills the pipe, and a dead one breaks it. Neither may delay the agent, whose events
are also in its saved state and available from `/v1/events`.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

MAX_WAITING = 1000  # lines; about 1 MB


class EventLog:
    """Writes records as JSON lines, in order; drops the oldest waiting lines if the reader stalls."""

    def __init__(self, write: Callable[[str], None]) -> None:
        """Start the thread.

        `write` writes one line and may block. It raises BrokenPipeError or ValueError if the reader is gone,
        and another OSError if the line cannot be written now.
        """
        self._write = write
        self._waiting: deque[str] = deque()
        self._left_out = 0
        self._changed = threading.Condition()
        self._writing = False
        self._ended = False
        threading.Thread(target=self._run, name="event-log", daemon=True).start()

    def write(self, record: Mapping[str, Any]) -> None:
        """Queue `record` to be written; never blocks."""
        with self._changed:
            if self._ended:
                return
            self._waiting.append(json.dumps(record))
            if len(self._waiting) > MAX_WAITING:
                self._waiting.popleft()
                self._left_out += 1
            self._changed.notify_all()

    def drain(self, within_s: float) -> bool:
        """Wait until all lines are written or the reader is gone; return False on timeout."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._ended or not (self._waiting or self._writing), within_s
            )

    def _run(self) -> None:
        while True:
            with self._changed:
                self._writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting)
                self._writing = True
                line, left_out = self._waiting.popleft(), self._left_out
            try:
                if left_out:
                    self._write(f"{json.dumps({'event': 'lines_left_out', 'count': left_out})}\n")
                    with self._changed:
                        self._left_out -= left_out
                self._write(f"{line}\n")
            except (BrokenPipeError, ValueError):
                break
            except OSError:  # a full disk may have room again later
                with self._changed:
                    self._left_out += 1
        with self._changed:
            self._ended = True
            self._waiting.clear()
            self._changed.notify_all()
