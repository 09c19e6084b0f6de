"""Logs: one JSON object per line on stderr for Holdfast's parts, and files that other processes print into.

A line has a constant event name, and data in fields. stderr is a file of the run directory. A thread writes
to it: storage that hangs costs lines, not the process.

Files that processes print into are for their owner alone. Storage that is away or hangs costs what they
print, never the process.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from holdfast.fileio.storage_thread import StorageThread

MAX_WAITING = 10_000  # lines; beyond them storage hangs, and the newest are dropped
FLUSH_S = 1.0  # at the end of a process
OPEN_S = 1.0  # storage that is slower is taken for one that hangs: a part or a rank waits to be started
SMALL_S = 0.2  # for what is not essential: a log's place, its end as evidence

_files = StorageThread("logs")
_STANDARD = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """Formats a record as one JSON object: the fields of `extra=` beside time, level, logger and event."""

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


class BackgroundHandler(logging.Handler):
    """Writes to `stream` in a thread, for which no caller waits."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._files = StorageThread("log")

    def emit(self, record: logging.LogRecord) -> None:
        if self._files.backlog < MAX_WAITING:
            line = f"{self.format(record)}\n"
            self._files.submit(lambda: self._write(line))

    def flush(self) -> None:
        """Wait until all is written, for `FLUSH_S` at most."""
        with suppress(OSError):
            self._files.do(lambda: None, FLUSH_S)

    def _write(self, line: str) -> None:
        with suppress(OSError, ValueError):  # a full disk, a closed file: there is no place to report it
            self._stream.write(line)
            self._stream.flush()


def setup(level: str = "INFO") -> None:
    handler = BackgroundHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=level, handlers=[handler], force=True)


def opened(path: Path) -> BinaryIO:
    """Return `path`, made with its folder where they are missing, open for writing at its end.

    Where that is not possible (storage that is full, away, read-only, or does not answer), /dev/null instead.
    """
    try:
        return _files.do(lambda: _made(path), OPEN_S)
    except OSError:
        return Path(os.devnull).open("ab")


def moved(path: Path, target: Path) -> bool:
    """Move a log and return True; False where storage does not allow it.

    Descriptors that are open on it stay valid.
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
    """Return the end of a log; "" where there is none, or it cannot be read in time."""
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
