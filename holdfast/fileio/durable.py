"""Create and replace files and directories atomically and durably, and remove what dead writers left."""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from holdfast.fileio.bulk_copy import FileBatch

_DEBRIS = re.compile(r"\.tmp-(?P<host>[A-Za-z0-9_]+)-(?P<pid>\d+)-\d+-[A-Za-z0-9.-]+")
_HOST = re.sub(r"[^A-Za-z0-9]", "_", socket.gethostname()) or "_"
# Begins at random: a restarted container has the host name and the process ID of the writer before it.
_numbers = itertools.count(int.from_bytes(os.urandom(6), "big"))
# This process cannot check whether a writer on another host or in another PID namespace is alive. A live
# writer writes continuously, so it is considered dead after this long without a write.
DEBRIS_AGE_S = 3600.0


def sync_directory(path: Path) -> None:
    """Make the entries of a directory durable. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(target: Path, content: bytes, mode: int = 0o666) -> None:
    """Replace the content of `target` durably and atomically, with `mode` minus the umask. Raises OSError."""
    with FileBatch() as batch, replacement(target) as temporary:
        batch.write(temporary, content, mode)
        batch.sync()
        os.replace(temporary, target)
    sync_directory(target.parent)


@contextmanager
def replacement(target: Path) -> Iterator[Path]:
    """Yield a path next to `target` for its replacement; on exit, remove the file if it still exists."""
    temporary = temporary_path(target.parent, target.name)
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def temporary_path(root: Path, name: str) -> Path:
    """Return a path in `root` that identifies this writer. No other writer uses it."""
    return root / f".tmp-{_HOST}-{os.getpid()}-{next(_numbers)}-{name}"


def is_temporary_name(text: str, name: str) -> bool:
    """Return whether `text` has the form of a file name that `temporary_path` generates for `name`."""
    return _DEBRIS.fullmatch(text) is not None and text.endswith(f"-{name}")


@contextmanager
def temporary_directory(root: Path, name: str) -> Iterator[Path]:
    """Yield a new directory in `root`. When the context ends, remove it unless it was renamed.

    Until then, a lock keeps other processes from removing it as debris. Raises OSError.
    """
    path = temporary_path(root, name)
    path.mkdir()
    descriptor = -1
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with suppress(OSError):  # NFS can lock only files; `remove_debris` then relies on the age
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield path
    finally:
        # A failure here must not hide the original error. `remove_debris` will remove what remains.
        with suppress(OSError):
            _remove_tree(path)
        if descriptor >= 0:
            os.close(descriptor)


def remove_debris(root: Path, *, owned: bool = False) -> None:
    """Remove the files that dead writers have left in `root`. Raises OSError.

    Args:
        root: The directory.
        owned: True if no other process may write to `root`, and this one is not writing to it now. Every
            temporary file is then debris, no matter who wrote it.

    Each file is renamed first. A writer that is not dead, but was only stopped for that long, cannot publish
    a file while it is being removed, because only one of the two renames succeeds.
    """
    for path in tuple(root.iterdir()):
        match = _DEBRIS.fullmatch(path.name)
        if match is not None and (owned or _is_abandoned(path, match["host"], int(match["pid"]))):
            hidden = temporary_path(root, "removed")
            try:
                path.rename(hidden)
            except FileNotFoundError:  # published, or removed by another process
                continue
            _remove_tree(hidden)


def _remove_tree(path: Path) -> None:
    try:
        shutil.rmtree(path)
    except NotADirectoryError:
        path.unlink(missing_ok=True)
    except FileNotFoundError:
        return  # another process removed it


def _is_abandoned(path: Path, host: str, pid: int) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # the file system does not support locks
    finally:
        os.close(descriptor)
    if host == _HOST and not _is_alive(pid):
        return True
    try:
        newest = max(entry.stat().st_mtime for entry in (path, *path.glob("*")))
    except OSError:
        return False
    return _now_s(path.parent) - newest > DEBRIS_AGE_S


def _now_s(root: Path) -> float:
    """Return the time on the clock that sets file times in `root`, which may be the clock of a file server.

    If file times were compared with a local clock that is ahead, a live writer would look dead.
    """
    temporary = temporary_path(root, "now")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError:  # the file system is full
        return time.time()
    try:
        return os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)
        temporary.unlink(missing_ok=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
