"""One JSON object per line on stderr: a constant event name, and data in fields.

stderr is a file of the run directory. A thread writes to it: storage that hangs costs lines, not the process.
"""

from __future__ import annotations

import json
import logging
import sys
from contextlib import suppress
from datetime import datetime, timezone
from typing import Any, TextIO

from holdfast.filework import FileWork

MAX_WAITING = 10_000  # lines; beyond them storage hangs, and the newest are dropped
FLUSH_S = 1.0  # at the end of a process

_STANDARD = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """What `extra=` carries becomes fields beside time, level, logger and event."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, timezone.utc)
        line: dict[str, Any] = {
            "time": when.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **{key: value for key, value in vars(record).items() if key not in _STANDARD},
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=repr)


class Behind(logging.Handler):
    """Writes to `stream` in a thread; what cannot be written in time, nobody waits for."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._files = FileWork("log")

    def emit(self, record: logging.LogRecord) -> None:
        if self._files.backlog < MAX_WAITING:
            line = f"{self.format(record)}\n"
            self._files.submit(lambda: self._write(line))

    def flush(self) -> None:
        """Wait for a moment until all is written."""
        with suppress(OSError):
            self._files.do(lambda: None, FLUSH_S)

    def _write(self, line: str) -> None:
        with suppress(OSError, ValueError):  # a full disk, a closed file: there is nowhere to say so
            self._stream.write(line)
            self._stream.flush()


def setup(level: str = "INFO") -> None:
    handler = Behind(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=level, handlers=[handler], force=True)
