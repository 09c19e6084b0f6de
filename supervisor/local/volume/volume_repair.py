"""Restore the files that other programs remove from a run's folder in the memory volume during the run.

systemd removes a user's files in /dev/shm at the last logout (RemoveIPC=yes), cleaners remove old files in
/tmp, and people remove files that look abandoned. The ranks have mapped their files and keep training. A
process that starts later, however, could not open the files, so the run could not recover from any fault.

The keeper lives as long as the run, so it keeps a descriptor of every file. An open file continues to exist
even without a name, and a symbolic link to /proc/PID/fd/N gives it a new name. Processes that open this name
get the same memory, with its present and future content.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import resource
import shutil
import stat
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from holdfast.snapshot.member_directory import FOLDERS, MEMBER_FILE, OWNER, RESTORED, RUN_FILE
from supervisor.local.volume import memory_volume

SPARED = 64  # descriptors that the process keeps available for other purposes
LOG_GAP_S = 60.0  # the minimum time between two lines about restored files
# The kernel gives all changes within a clock tick, of at most 10 ms, the same time. Only after this long does
# the time of a folder's last change show that nothing has changed since.
SETTLED_S = 0.1
FAILURES = 3  # failures in a row before a report; the first can be due to a removal still in progress


Identity: TypeAlias = "tuple[int, int]"  # device and inode
_Change: TypeAlias = "tuple[int, int]"  # inode, and time of the last change in nanoseconds


@dataclass(frozen=True, slots=True)
class _File:
    descriptor: int
    identity: Identity


@dataclass(slots=True)
class RepairedFolder:
    """A folder and the data to restore it: the descriptors of its files, its links and its subfolders."""

    folder: Path
    names: re.Pattern[str] = MEMBER_FILE  # matches the relative paths to restore
    _files: dict[str, _File] = field(default_factory=dict)
    _links: dict[str, str] = field(default_factory=dict)
    _folders: set[str] = field(default_factory=set)
    # The last change of each folder at the last `restore`; empty if a later one may have the same time.
    _changes: tuple[tuple[str, _Change], ...] = ()

    def restore(self) -> list[Path]:
        """Restore what was removed and return the restored paths. Open new files and close replaced ones.

        A file that its sidecar has deleted is not restored.

        Raises:
            OSError: Not everything could be restored. The next call tries again.
        """
        self._changes, before_ns = (), time.time_ns() - int(SETTLED_S * 1e9)
        if not _is_folder(self.folder):
            self._make_again()
            return [self.folder]
        known, self._folders = self._folders, set()
        try:
            found: dict[str, Identity | str] = dict(self._walk(""))
        except OSError:
            self._folders |= known
            raise
        removed = sorted(known - self._folders - {*found})
        self._folders.update(removed)
        for name in removed:
            (self.folder / name).mkdir(mode=0o700, exist_ok=True)
        back = list(removed)
        for name in sorted({*self._files, *self._links} - {*found}):
            within = name.rpartition("/")[0]
            deleted_by_sidecar = within == RESTORED and within not in removed
            if deleted_by_sidecar or (within and within not in self._folders):
                self._let_go(name)
                continue
            self._put_back(self.folder, name)
            back.append(name)
        for name, what in found.items():
            self._hold(name, what)
        changes = [(path, _last_change(path)) for path in map(str, self.folders())]
        settled = tuple((path, last) for path, last in changes if last is not None and last[1] < before_ns)
        self._changes = settled if len(settled) == len(changes) else ()
        return [self.folder / name for name in back]

    def is_unchanged(self) -> bool:
        """True if nothing was added, removed or replaced since the last `restore`.

        This takes a system call for each folder. A change of a file's permissions is not noticed.
        """
        return bool(self._changes) and all(_last_change(path) == last for path, last in self._changes)

    def folders(self) -> list[Path]:
        """Return the folder and the subfolders that existed at the last `restore`."""
        return [self.folder, *(self.folder / name for name in sorted(self._folders))]

    def close(self) -> None:
        """Close all descriptors, which frees the memory of files that no longer have a name."""
        for name in list(self._files):
            self._let_go(name)

    def _walk(self, within: str) -> Iterator[tuple[str, Identity | str]]:
        """Yield the relative name of each file with its identity, and of each link with its target."""
        with os.scandir(self.folder / within) as entries:
            for entry in entries:
                name = f"{within}/{entry.name}" if within else entry.name
                if not self.names.fullmatch(name):
                    continue
                with suppress(FileNotFoundError):  # removed in the meantime
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISLNK(status.st_mode):
                        yield name, self._led(entry.path)
                    elif stat.S_ISREG(status.st_mode):
                        _allow(entry.path, status, stat.S_IRUSR | stat.S_IWUSR)
                        yield name, (status.st_dev, status.st_ino)
                    elif stat.S_ISDIR(status.st_mode):
                        _allow(entry.path, status, stat.S_IRWXU)
                        self._folders.add(name)
                        yield from self._walk(name)

    def _led(self, path: str) -> Identity | str:
        """Return the target of a link.

        If the target is a restored file, return the file's identity instead.
        """
        to = os.readlink(path)  # noqa: PTH115
        if not to.startswith(_ours()):
            return to
        status = os.stat(path)  # noqa: PTH116
        return status.st_dev, status.st_ino

    def _hold(self, name: str, what: Identity | str) -> None:
        if name in FOLDERS:  # a file or link has taken the place of a folder
            return
        if isinstance(what, str):
            self._links[name] = what
            return
        known = self._files.get(name)
        if known is not None and known.identity == what:
            return
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(self.folder / name, flags)
        except OSError:  # removed in the meantime, or no descriptor is left; it cannot be restored
            return
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or descriptor >= _most_descriptors():
            os.close(descriptor)
            return
        self._let_go(name)
        self._files[name] = _File(descriptor, (status.st_dev, status.st_ino))

    def _let_go(self, name: str) -> None:
        known = self._files.pop(name, None)
        if known is not None:
            os.close(known.descriptor)
        self._links.pop(name, None)

    def _put_back(self, folder: Path, name: str) -> None:
        known = self._files.get(name)
        to = self._links[name] if known is None else f"{_ours()}{known.descriptor}"
        with suppress(FileExistsError):  # another process has created a new file, which takes precedence
            (folder / name).symlink_to(to)

    def _make_again(self) -> None:
        """Recreate the folder and its content atomically: no process ever sees it incomplete."""
        aside = self.folder.with_name(f".{self.folder.name}-{os.urandom(4).hex()}")
        aside.mkdir(mode=0o700)
        try:
            for name in sorted(self._folders):
                (aside / name).mkdir(mode=0o700)
            for name in {*self._files, *self._links}:
                self._put_back(aside, name)
            aside.rename(self.folder)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise


def _last_change(folder: str) -> _Change | None:
    """Return the identity of a folder, and when its entries or permissions changed; None if it is gone."""
    try:
        status = os.lstat(folder)
    except OSError:
        return None
    return status.st_ino, status.st_ctime_ns


@dataclass(slots=True)
class VolumeRepair:
    """Keeps a run's folder and its members' folders complete. All calls are made on one thread."""

    runtime: Path
    _members: dict[str, RepairedFolder] = field(default_factory=dict)
    _root: RepairedFolder = field(init=False)
    _owner: Identity | None = None  # identifies the lock file that shows other runs that this one is alive
    _lock: int = -1  # the descriptor of that file if it was recreated
    _kept: int = -1  # the descriptor of the folder, locked against programs that remove old files
    _reported_s: float = -LOG_GAP_S
    _back: list[Path] = field(default_factory=list)  # files that were restored but not reported yet
    _error: str = ""
    _failures: int = 0  # consecutive calls of `repair` that could not restore everything

    def __post_init__(self) -> None:
        self._root = RepairedFolder(self.runtime, RUN_FILE)

    def begin(self) -> None:
        """From now on, keep everything that the run's folder contains. Raises `OSError`."""
        self._owner = memory_volume.identity(self.runtime / OWNER)
        self._keep_from_aging()

    @property
    def error(self) -> str:
        """The reason why removed files could not be restored; "" if nothing is missing."""
        return self._error if self._failures >= FAILURES else ""

    def add(self, member: str) -> None:
        """Keep the folder of a new member complete too. The folder must exist."""
        self._members[member] = RepairedFolder(self.runtime / member)

    def repair(self, now_s: float) -> list[str]:
        """Restore what was removed, and return lines about it for the user. Never raises."""
        try:
            self.put_back()
        except OSError as error:
            self._failures += 1
            self._error = (
                f"{error.filename or self.runtime}: another program has removed or changed files of the run"
                f" here, and they cannot be restored: {error.strerror or error}. Holdfast keeps retrying."
                " Until then, the ranks keep training, but the run cannot recover from faults"
            )
            return [self._error] if self._failures == FAILURES else []
        self._failures = 0
        back, self._back = self._back, []
        if not back or now_s - self._reported_s < LOG_GAP_S:
            return []
        self._reported_s = now_s
        more = f" and {len(back) - 1} more" if len(back) > 1 and back[0] != self.runtime else ""
        return [
            f"{back[0]}{more}: removed by another program while the run uses it, and restored with its"
            " content. systemd removes a user's files in /dev/shm at the last logout (RemoveIPC=yes in"
            " logind.conf): `loginctl enable-linger` prevents that"
        ]

    def is_unchanged(self) -> bool:
        """True if `repair` would find nothing to do, unless a file's permissions were changed."""
        if self._failures or self._back or self._owner is None:
            return False
        return all(tree.is_unchanged() for tree in (self._root, *self._members.values()))

    def put_back(self) -> None:
        """Restore what was removed. The next `repair` reports it. Raises `OSError` on failure."""
        self._back += self._put_back_root()
        for tree in self._members.values():
            self._back += tree.restore()

    def folders(self) -> list[Path]:
        """Return all folders that are kept complete."""
        trees = (self._root, *self._members.values())
        return [folder for tree in trees for folder in tree.folders()]

    def free(self, member: str) -> threading.Thread:
        """Remove a member's folder in a thread and return the thread. See `memory_volume.free`."""
        tree = self._members.pop(member, None)
        return memory_volume.free(self.runtime / member, tree.close if tree is not None else None)

    def close(self) -> None:
        """Close all descriptors and release the locks."""
        for tree in (self._root, *self._members.values()):
            tree.close()
        self._members.clear()
        for descriptor in (self._lock, self._kept):
            if descriptor >= 0:
                os.close(descriptor)
        self._owner, self._lock, self._kept = None, -1, -1

    def _put_back_root(self) -> list[Path]:
        if self._owner is None:
            return []
        gone = not _is_folder(self.runtime)
        if gone or memory_volume.identity(self.runtime / OWNER) != self._owner:
            lock = memory_volume.make_again(self.runtime)
            if self._lock >= 0:
                os.close(self._lock)
            self._lock, self._owner = lock, memory_volume.identity(self.runtime / OWNER)
            self._keep_from_aging()
        back = self._root.restore()
        return [self.runtime] if gone else back

    def _keep_from_aging(self) -> None:
        """Lock the folder, because systemd-tmpfiles skips a locked folder and everything in it."""
        if self._kept >= 0:
            os.close(self._kept)
        self._kept = os.open(self.runtime, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with suppress(OSError):
            fcntl.flock(self._kept, fcntl.LOCK_SH | fcntl.LOCK_NB)


def _ours() -> str:
    return f"/proc/{os.getpid()}/fd/"


def _most_descriptors() -> int:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit - SPARED


def _is_folder(path: Path) -> bool:
    """True if the folder `path` exists. On return, this process has full access to it.

    Raises `OSError` if it is not a folder of this user.
    """
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise FileExistsError(errno.EEXIST, "something else is in its place", str(path))
    _allow(str(path), status, stat.S_IRWXU)
    return True


def _allow(path: str, status: os.stat_result, owner: int) -> None:
    """Give this user, who owns `path`, the permissions `owner` if any of them are missing."""
    if status.st_mode & owner != owner:
        os.chmod(path, stat.S_IMODE(status.st_mode) | owner)  # noqa: PTH101
