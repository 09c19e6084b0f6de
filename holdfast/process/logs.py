"""Write logs: one JSON object per line on stderr for Holdfast's parts, and plain files for other processes.

A JSON line has a constant event name, and its data in fields. The stderr of a part is a file in the run
directory. A separate thread writes to it, so if storage hangs, log lines are lost but the process keeps
running.

The files that other processes print to are readable only by their owner. If storage is unavailable or hangs,
output is lost, but no process blocks.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from contextlib import suppress
from contextvars import ContextVar
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from holdfast.fileio.storage_thread import StorageThread

# The maximum number of queued lines. A full queue means that storage hangs; new lines are then dropped.
MAX_WAITING = 10_000
FLUSH_S = 1.0  # the time limit for the flush at the end of a process
OPEN_S = 1.0  # storage that takes longer is treated as hung, because a part or a rank waits for it to start
SMALL_S = 0.2  # the limit for work that can be skipped, such as moving a log or reading its end as evidence

# Fields, such as the job, that are added to every line logged by this task or by a task that it starts.
CONTEXT: ContextVar[dict[str, str] | None] = ContextVar("log context", default=None)

_files = StorageThread("logs")
_STANDARD = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """Formats a record as one JSON object with time, level, logger, event, and the fields of `extra=`."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, timezone.utc)
        line: dict[str, Any] = {
            "time": when.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **(CONTEXT.get() or {}),
            **{key: value for key, value in vars(record).items() if key not in _STANDARD},
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=repr)


class BackgroundHandler(logging.Handler):
    """Writes to `stream` in a separate thread, so callers never wait for storage."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._files = StorageThread("log")

    def emit(self, record: logging.LogRecord) -> None:
        if self._files.backlog < MAX_WAITING:
            line = f"{self.format(record)}\n"
            self._files.submit(lambda: self._write(line))

    def flush(self) -> None:
        """Wait until everything has been written, for at most `FLUSH_S`."""
        with suppress(OSError):
            self._files.do(lambda: None, FLUSH_S)

    def _write(self, line: str) -> None:
        # If the disk is full or the file is closed, there is no other place to report this.
        with suppress(OSError, ValueError):
            self._stream.write(line)
            self._stream.flush()


def setup(level: str = "INFO") -> None:
    handler = BackgroundHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=level, handlers=[handler], force=True)


def opened(path: Path) -> BinaryIO:
    """Open `path` for appending, and create it and its folder if they are missing.

    If storage is full, unavailable, read-only or unresponsive, open /dev/null instead.
    """
    try:
        return _files.do(lambda: _made(path), OPEN_S)
    except OSError:
        return Path(os.devnull).open("ab")


def moved(path: Path, target: Path) -> bool:
    """Move a log. Returns False if storage does not allow it.

    Open descriptors of the log remain valid.
    """

    def move() -> None:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.replace(target)

    try:
        _files.do(move, SMALL_S)
    except OSError:
        return False
    return True


def tail(path: Path, limit_bytes: int) -> str:
    """Return the end of a log; "" if there is no log or it cannot be read in time."""
    try:
        return _files.do(lambda: _end(path, limit_bytes), SMALL_S)
    except OSError:
        return ""


def _end(path: Path, limit_bytes: int) -> str:
    with path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - limit_bytes))
        return file.read().decode(errors="replace")


def _made(path: Path) -> BinaryIO:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "ab")
