"""Remove one particular checkpoint from a directory, whatever has its name by the time of the removal.

Another member may replace a checkpoint while this process is stopped between any two system calls. So nothing
here that deletes data finds it by the checkpoint's name. The directory is opened, compared through that
descriptor, and emptied through it; then it is the same directory even if it has lost its name. Its name is
removed only if it belongs to an empty directory, which no published checkpoint is.

Renaming the manifest, as the first step, takes the checkpoint from all readers at once. If the process is
killed after that, `finish` removes the rest.
"""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path

from holdfast.checkpoint import catalog
from holdfast.checkpoint.catalog import MANIFEST, REMOVED, StoredCheckpoint, Unreadable
from holdfast.checkpoint.manifest import InvalidCheckpoint, NewerFormat

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NOT_A_FOLDER = (errno.ENOTDIR, errno.ELOOP)
_NOT_EMPTY = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)


def remove(path: Path, what: StoredCheckpoint | InvalidCheckpoint) -> bool:
    """Remove `what`, which was found at `path`. Return False, and change nothing, if it is no longer there.

    Also returns False if it cannot be read, because then it cannot be compared. Raises OSError; a retry is
    safe.
    """
    try:
        folder = os.open(path, _FOLDER)
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno not in _NOT_A_FOLDER:
            raise
        return _remove_file(path)
    try:
        found = catalog.load_or_defect(path, _through(folder))
        if isinstance(found, NewerFormat | Unreadable) or not catalog.is_same(found, what):
            return False
        with suppress(FileNotFoundError):  # it has no manifest, or another process is removing it
            os.rename(MANIFEST, REMOVED, src_dir_fd=folder, dst_dir_fd=folder)
        _empty(folder, path)
    finally:
        os.close(folder)
    _remove_name(path)
    return True


def finish(root: Path) -> None:
    """Remove what is left of the checkpoints in `root` whose removal was interrupted. Raises OSError."""
    for path in tuple(root.iterdir()):
        if catalog.step_in(path.name) is None or not catalog.is_removed(path):
            continue
        try:
            folder = os.open(path, _FOLDER)
        except FileNotFoundError:
            continue
        try:
            if catalog.is_removed(_through(folder)):
                _empty(folder, path)
        finally:
            os.close(folder)
        _remove_name(path)


def _through(folder: int) -> Path:
    """Return a path that leads to the open directory even if it has been renamed."""
    return Path(f"/proc/self/fd/{folder}")


def _remove_file(path: Path) -> bool:
    """Remove a name that is no directory's. Return False, and change nothing, if it is one's by now."""
    try:
        path.unlink()
    except (FileNotFoundError, IsADirectoryError):
        return False
    return True


def _empty(folder: int, path: Path) -> None:
    """Remove the content of a directory. The mark that it is being removed goes last.

    Raises OSError if something is left, for example a file that NFS keeps for a reader.
    """
    for name in os.listdir(folder):
        if name != REMOVED:
            _remove_entry(folder, name)
    if set(os.listdir(folder)) - {REMOVED}:
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))
    with suppress(FileNotFoundError):
        os.unlink(REMOVED, dir_fd=folder)


def _remove_entry(folder: int, name: str) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        pass
    except IsADirectoryError:  # not from Holdfast
        shutil.rmtree(_through(folder) / name)


def _remove_name(path: Path) -> None:
    try:
        path.rmdir()
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno not in _NOT_EMPTY:  # the name is another checkpoint's
            raise
