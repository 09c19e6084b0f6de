"""Remove one particular checkpoint from a directory, but never another one that now has the same name.

Another member may replace a checkpoint while this process is stopped between any two system calls. So this
module never uses the checkpoint's name to find the data that it deletes. It opens the directory, and compares
and empties it through the descriptor, which refers to the same directory even if the name changes. A name is
removed only if its directory is empty, which a published checkpoint never is.

Only Holdfast's own files are deleted, because a script may save into a directory of the same name. A script
may even have just created an empty one. So before a directory becomes empty, it is given a name that only
Holdfast uses and that `finish` recognises.

The first step renames the manifest, which hides the checkpoint from all readers at once. If the process is
killed after that, `finish` removes the rest.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

from holdfast.checkpoint import catalog
from holdfast.checkpoint.catalog import MANIFEST, REMOVED, Foreign, StoredCheckpoint, Unreadable
from holdfast.checkpoint.manifest import InvalidCheckpoint, NewerFormat

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NOT_A_FOLDER = (errno.ENOTDIR, errno.ELOOP)
_NOT_FREE = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR)
_KEPT_BY_NFS = ".nfs"


def remove(path: Path, what: StoredCheckpoint | InvalidCheckpoint) -> bool:
    """Remove `what`, which was found at `path`. Return False, and change nothing, if it is no longer there.

    Also return False if it cannot be read, and therefore cannot be compared, or if it is not a directory that
    Holdfast wrote. Raises OSError; a retry is safe.
    """
    try:
        folder = os.open(path, _FOLDER)
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno not in _NOT_A_FOLDER:
            raise
        return False
    try:
        found = catalog.load_or_defect(path, _through(folder))
        if isinstance(found, NewerFormat | Unreadable | Foreign) or not catalog.is_same(found, what):
            return False
        with suppress(FileNotFoundError):  # another process is removing it
            os.rename(MANIFEST, REMOVED, src_dir_fd=folder, dst_dir_fd=folder)
        _remove_rest(folder, path)
    finally:
        os.close(folder)
    return True


def finish(root: Path) -> None:
    """Complete the interrupted removals of checkpoints in `root`. Raises OSError."""
    for path in tuple(root.iterdir()):
        if catalog.step_in(path.name) is None or not catalog.is_removed(path):
            continue
        try:
            folder = os.open(path, _FOLDER)
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno not in _NOT_A_FOLDER:
                raise
            continue
        try:
            names = catalog.names_in(_through(folder))
            if REMOVED in names and MANIFEST not in names:
                _remove_rest(folder, path)
        finally:
            os.close(folder)
        if not names and catalog.is_own_name(path.name):
            _remove_name(path)


def has_strangers(path: Path) -> bool:
    """Return whether `path` is a link, or contains anything that Holdfast did not write. Raises OSError."""
    return path.is_symlink() or catalog.names_in(path) > catalog.own_names(path)


def _through(folder: int) -> Path:
    """Return a path that leads to the open directory even if it has been renamed."""
    return Path(f"/proc/self/fd/{folder}")


def _remove_rest(folder: int, path: Path) -> None:
    """Remove Holdfast's files, the renamed manifest last, and then the directory if nothing else is in it.

    Raises OSError if NFS still keeps a deleted file for a reader.
    """
    for name in catalog.own_names(_through(folder)) - {REMOVED}:
        with suppress(FileNotFoundError, IsADirectoryError):  # Holdfast does not create directories in it
            os.unlink(name, dir_fd=folder)
    left = catalog.names_in(_through(folder)) - {REMOVED}
    if any(name.startswith(_KEPT_BY_NFS) for name in left):
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))
    hidden = None if left else _hidden(folder, path)
    with suppress(FileNotFoundError):
        os.unlink(REMOVED, dir_fd=folder)
    if hidden is not None and not _remove_name(hidden):
        rename_if_free(hidden, path)  # a script has just saved something into it


def _hidden(folder: int, path: Path) -> Path | None:
    """Give the directory a name that only Holdfast uses; return its new path, or None if it is not at `path`.

    If this renames another directory that was just put there, that directory gets its name back. Until then,
    readers recognise its other name.
    """
    if not _is_at(folder, path):
        return None
    if catalog.is_own_name(path.name):
        return path
    hidden = path.with_name(catalog.name_aside(path.name))
    try:
        path.rename(hidden)
    except FileNotFoundError:
        return None
    if _is_at(folder, hidden):
        return hidden
    rename_if_free(hidden, path)
    return None


def _is_at(folder: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(folder), path.lstat())
    except FileNotFoundError:
        return False


def rename_if_free(source: Path, target: Path) -> bool:
    """Rename a directory. Return False, and change nothing, if `target` has content."""
    try:
        source.rename(target)
    except OSError as error:
        if error.errno not in _NOT_FREE:
            raise
        return False
    return True


def _remove_name(path: Path) -> bool:
    """Remove the directory `path`. Return False, and change nothing, if it has content."""
    try:
        path.rmdir()
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno not in _NOT_FREE:
            raise
        return False
    return True
