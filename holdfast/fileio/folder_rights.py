"""Create files with the access rights of their folder, for processes of different users that share a folder.

In a pod, the ranks run as the user that their image specifies, which the injector cannot know, and the
sidecar may run as another user. They share a memory volume. Every user may write to it, but only these two
containers mount it, and on the node only root can reach it. The files that they create there must therefore
be open to every user as well. In a local run, the same folder belongs to one user, and no other user may
access it.

A new file or folder appears under its name only with its final rights, regardless of the umask, because the
other process may open it at any time. In a shared folder, symbolic links are not followed. Otherwise, a
script could trick a sidecar that has more rights than the script into writing to another file.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

_FLAGS = os.O_RDWR | os.O_CLOEXEC
_PRIVATE, _SHARED = 0o600, 0o666
_SHARED_FOLDER = 0o777


def is_shared(folder: Path) -> bool:
    """Return whether every user may create files in `folder`. Raises OSError.

    The kubelet's memory volumes have the sticky bit, so only the owner of a file may remove or replace it.
    The folders that `make_folder` creates in a volume lack this bit, because both processes replace each
    other's files there.
    """
    return bool(folder.stat().st_mode & stat.S_IWOTH)


def file_mode(folder: Path) -> int:
    """Return the mode for new files in `folder`: open to every user if it is shared. Raises OSError."""
    return _SHARED if is_shared(folder) else _PRIVATE


def share(path: Path) -> None:
    """Let every user read and write the new file `path`, if its folder is shared. Raises OSError."""
    if is_shared(path.parent):
        path.chmod(_SHARED)


def open_file(path: Path) -> int:
    """Open `path` for reading and writing, creating it if it is missing, and return the descriptor.

    Raises OSError.
    """
    if not is_shared(path.parent):
        return os.open(path, _FLAGS | os.O_CREAT, _PRIVATE)
    try:  # with O_CREAT, the kernel may refuse to open another user's file
        return os.open(path, _FLAGS | os.O_NOFOLLOW)
    except FileNotFoundError:
        _create(path)
    return os.open(path, _FLAGS | os.O_NOFOLLOW)


def make_folder(path: Path) -> None:
    """Create the folder `path` unless it exists, open to every user if its parent is. Raises OSError."""
    if path.is_dir():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if not is_shared(path.parent):
        path.mkdir(exist_ok=True)
        return
    temporary = _temporary(path)
    temporary.mkdir()
    try:
        temporary.chmod(_SHARED_FOLDER)
        temporary.rename(path)  # replaces an existing folder only if it is empty
    except OSError:
        temporary.rmdir()
        if not path.is_dir():  # otherwise, the other process has created it first
            raise


def denial(path: Path) -> str:
    """Describe the user of this process, and the owner of `path` or of the nearest existing folder above it.

    This completes the message of a PermissionError, which names neither.
    """
    found = next((each for each in (path, *path.parents) if os.path.lexists(each)), path)
    own = f"this process is user {os.geteuid()}"
    try:
        status = found.lstat()
    except OSError:
        return own
    mode = stat.S_IMODE(status.st_mode)
    return (
        f"{own}, but {found} belongs to user {status.st_uid} and group {status.st_gid}, with mode {mode:04o}"
    )


def _create(path: Path) -> None:
    """Create an empty file that every user may write, unless another process creates it first."""
    temporary = _temporary(path)
    descriptor = os.open(temporary, _FLAGS | os.O_CREAT | os.O_EXCL, _PRIVATE)
    try:
        os.fchmod(descriptor, _SHARED)
        with suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink()
        os.close(descriptor)


def _temporary(path: Path) -> Path:
    """Return an unused path. A process id would not be unique, because each container has its own ids."""
    return path.with_name(f".{path.name}.{os.urandom(8).hex()}.tmp")
