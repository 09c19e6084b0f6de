"""Manage the folder in shared memory where a local run keeps its sockets, progress pages and snapshots."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from holdfast.process import linux
from holdfast.snapshot import member_directory
from holdfast.snapshot.member_directory import OWNER

HALF_MADE_S = 3600.0  # a folder that is incomplete after this time was abandoned
_ROOTS = (Path("/dev/shm"), Path("/tmp"))


def create() -> tuple[Path, int]:
    """Create a folder. Return it and the descriptor of the lock that marks it as in use.

    Folders of runs whose keeper is gone are removed first. The new folder is locked before it receives its
    name, because another run that starts now could otherwise mistake it for an abandoned folder. Raises
    `OSError`.
    """
    root = next(each for each in _ROOTS if os.access(each, os.W_OK))
    prefix = _prefix()
    _remove_abandoned(root, prefix)
    folder = root / f"{prefix}{secrets.token_hex(4)}"
    return folder, _made(folder)


def make_again(folder: Path) -> int:
    """Recreate the folder of a run, or only its lock file, and return the lock's descriptor.

    Raises `OSError`, for example if another file or folder has taken its place.
    """
    if not folder.exists():
        return _made(folder)
    spare = folder / f".{OWNER}-{secrets.token_hex(4)}"
    descriptor = _locked(spare)
    try:
        spare.rename(folder / OWNER)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _made(folder: Path) -> int:
    """Create a folder that is locked before it gets its name. Return the lock's descriptor."""
    hidden = folder.with_name(f".{folder.name}")
    hidden.mkdir(mode=0o700)
    descriptor = -1
    try:
        descriptor = _locked(hidden / OWNER)
        hidden.rename(folder)
    except BaseException:
        if descriptor >= 0:
            os.close(descriptor)
        shutil.rmtree(hidden, ignore_errors=True)
        raise
    return descriptor


def _locked(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def identity(path: Path) -> tuple[int, int] | None:
    """Return the device and inode of `path`; None if it does not exist. Raises `OSError`."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def of_run(named: object) -> Path | None:
    """Return the folder named in a run's description; None if it is gone or `create` did not make it."""
    folder = Path(named) if isinstance(named, str) else None
    if folder is None or folder.parent not in _ROOTS or not folder.name.startswith(_prefix()):
        return None
    return folder if folder.is_dir() else None


def _prefix() -> str:
    return f"holdfast-{os.getuid()}-"


def _remove_abandoned(root: Path, prefix: str) -> None:
    for old in root.glob(f"{prefix}*"):
        if member_directory.is_abandoned(old, without_owner=True):
            shutil.rmtree(old, ignore_errors=True)
    for half in root.glob(f".{prefix}*"):  # its run is still creating it, or was killed while creating it
        with suppress(OSError):
            if time.time() - half.stat().st_mtime > HALF_MADE_S:
                shutil.rmtree(half, ignore_errors=True)


def free(folder: Path, let_go: Callable[[], None] | None = None) -> threading.Thread:
    """Remove a folder in a thread, because freeing gigabytes takes more than a second. Return the thread.

    The thread has the lowest priority, because a group may be recovering at the same time. At the end,
    it calls `let_go`.
    """

    def remove() -> None:
        with suppress(OSError):
            linux.lower_thread_priority()
        shutil.rmtree(folder, ignore_errors=True)
        if let_go is not None:
            let_go()

    thread = threading.Thread(target=remove, daemon=True)
    thread.start()
    return thread
