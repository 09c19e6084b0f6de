"""JSON files that are replaced whole, and read while somebody may be doing that.

They hold command lines and tracebacks, in which there may be secrets: nobody but their owner can read them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.fileio import durable

PRIVATE = 0o600
MAX_BYTES = 16 << 20  # more is not ours


def replace(path: Path, content: Mapping[str, Any], *, sync: bool) -> None:
    """Replace a file, all or nothing; with `sync` it survives a power loss.

    Raises:
        OSError: The old one is as it was.
    """
    raw = json.dumps(content, indent=1).encode() + b"\n"
    if sync:
        durable.replace_file(path, raw, PRIVATE)
        return
    temporary = durable.temporary_path(path.parent, path.name)
    try:
        with open(_created(temporary), "wb") as file:
            file.write(raw)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def replace_secret(path: Path, text: str) -> None:
    """Replace a file by one that nobody but its owner could ever read. Raises `OSError`."""
    temporary = durable.temporary_path(path.parent, path.name)
    try:
        with open(_created(temporary), "wb") as file:
            file.write(f"{text}\n".encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _created(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE)


class JsonFileReader:
    """Reads a file that is replaced now and then, again only when it has been."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None
        self._found: dict[str, Any] | None = None

    def read(self) -> dict[str, Any] | None:
        """Return what `read` gives now, without reading it a second time. The caller does not change it."""
        try:
            status = self._path.stat()
        except OSError:
            seen = None
        else:
            seen = status.st_ino, status.st_mtime_ns
        if seen is None or seen != self._seen:
            self._seen, self._found = seen, read(self._path)
        return self._found


def read(path: Path, *, unreadable_is_none: bool = True) -> dict[str, Any] | None:
    """Return the object in a file; None when it is missing, torn, huge, or something else.

    Raises:
        OSError: It cannot be read, and `unreadable_is_none` is false.
    """
    try:
        if not path.is_file() or path.stat().st_size > MAX_BYTES:
            return None
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return None
    except OSError:
        if unreadable_is_none:
            return None
        raise
    return found if isinstance(found, dict) else None
