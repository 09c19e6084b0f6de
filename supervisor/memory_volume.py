"""Where a local run keeps its sockets, pages and snapshots: a folder in shared memory that goes with it."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from pathlib import Path

from holdfast.leftovers import OWNER

_ROOTS = (Path("/dev/shm"), Path("/tmp"))


def create() -> tuple[Path, int]:
    """Make a new folder and return it with a descriptor whose lock says that it is in use.

    Folders of runs whose keeper is gone are removed first. Raises `OSError`.
    """
    root = next(each for each in _ROOTS if os.access(each, os.W_OK))
    prefix = f"holdfast-{os.getuid()}-"
    for old in root.glob(f"{prefix}*"):
        if not in_use(old):
            shutil.rmtree(old, ignore_errors=True)
    folder = root / f"{prefix}{secrets.token_hex(4)}"
    folder.mkdir(mode=0o700)
    descriptor = os.open(folder / OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return folder, descriptor


def in_use(folder: Path) -> bool:
    """True while the keeper that made `folder` lives."""
    try:
        descriptor = os.open(folder / OWNER, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # not ours to judge
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
