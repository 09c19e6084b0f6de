"""Read JSON files, and replace them atomically to let other processes read them at any time.

Only the owner of a file can read it, because command lines and tracebacks may include secrets.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.fileio import durable

PRIVATE = 0o600
MAX_BYTES = 16 << 20  # a larger file was not written by Holdfast


def replace(path: Path, content: Mapping[str, Any], *, sync: bool) -> None:
    """Replace a file atomically. If `sync` is true, the new file also survives a power loss.

    Raises:
        OSError: The file could not be written. The old one is unchanged.
    """
    raw = json.dumps(content, indent=1).encode() + b"\n"
    if sync:
        durable.replace_file(path, raw, PRIVATE)
        return
    temporary = durable.temporary_path(path.parent, path.name)
    try:
        with open(_create(temporary), "wb") as file:
            file.write(raw)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def replace_secret(path: Path, text: str) -> None:
    """Replace a file durably. Only its owner can ever read it. Raises `OSError`."""
    temporary = durable.temporary_path(path.parent, path.name)
    try:
        with open(_create(temporary), "wb") as file:
            file.write(f"{text}\n".encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _create(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE)


class JsonFileReader:
    """Caches the content of a file, and reads it again only after it has been replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._version: tuple[int, int] | None = None  # inode and time of the file that was read
        self._content: dict[str, Any] | None = None

    def read(self) -> dict[str, Any] | None:
        """Return the content as `read` does, from the cache if possible. The caller must not change it."""
        try:
            status = self._path.stat()
        except OSError:
            version = None
        else:
            version = status.st_ino, status.st_mtime_ns
        if version is None or version != self._version:
            self._version, self._content = version, read(self._path)
        return self._content


def read(path: Path, *, unreadable_is_none: bool = True) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if the file is missing, torn, too large or contains no object.

    Raises:
        OSError: The file cannot be read, and `unreadable_is_none` is false.
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
