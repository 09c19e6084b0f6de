"""Files that processes print into, for their owner alone.

Storage that is away or hangs costs what they print, never the process.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from holdfast.filework import FileWork

OPEN_S = 1.0  # storage that is slower is taken for one that hangs: a part or a rank waits to be started
SMALL_S = 0.2  # for what can be done without: a log's place, its end as evidence
_files = FileWork("logs")


def opened(path: Path) -> BinaryIO:
    """Return `path`, made with its folder where they are missing, open for writing at its end.

    Where that is not possible (storage that is full, away, read-only, or does not answer), what nobody reads
    instead.
    """
    try:
        return _files.do(lambda: _made(path), OPEN_S)
    except OSError:
        return Path(os.devnull).open("ab")


def moved(path: Path, target: Path) -> bool:
    """Give a log another place and return True; False where storage does not let us.

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
