"""Put back what somebody removes from a run's folder in the memory volume while the run uses it.

systemd removes a user's files in /dev/shm at the last logout (RemoveIPC=yes), cleaners remove what is old in
/tmp, and people what looks left behind. The ranks have their files mapped and train on, but nobody who comes
later could find them: no fault could be recovered. So the keeper, which lives as long as the run, holds every
file by a descriptor. A file that is open lives without a name, and a link to /proc/PID/fd/N is a new one:
the same memory, with all that is in it and all that is still written there.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import resource
import shutil
import stat
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from holdfast.snapshot.member_directory import FOLDERS, MEMBER_FILE, OWNER, RESTORED, RUN_FILE
from supervisor.local import memory_volume

SPARED = 64  # descriptors that are left to the process for other things
AGAIN_S = 60.0  # between two lines that something was put back
FAILURES = 3  # in a row: whoever removes a folder may not be done with it in the first


Identity: TypeAlias = "tuple[int, int]"  # device and inode


@dataclass(frozen=True, slots=True)
class _File:
    descriptor: int
    identity: Identity


@dataclass(slots=True)
class RepairedFolder:
    """The files of one folder, held by descriptors, and whatever else is needed to make it again."""

    folder: Path
    names: re.Pattern[str] = MEMBER_FILE  # of what is held, below the folder
    _files: dict[str, _File] = field(default_factory=dict)
    _links: dict[str, str] = field(default_factory=dict)
    _folders: set[str] = field(default_factory=set)

    def look(self) -> list[Path]:
        """Hold what has come, let go of what went as it should, and return what was put back.

        Raises:
            OSError: Not all could be put back. The next look tries again.
        """
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
            forgotten = within == RESTORED and within not in removed  # by a sidecar
            if forgotten or (within and within not in self._folders):
                self._let_go(name)
                continue
            self._put_back(self.folder, name)
            back.append(name)
        for name, what in found.items():
            self._hold(name, what)
        return [self.folder / name for name in back]

    def folders(self) -> list[Path]:
        """Return the folder and those below it that were there at the last look."""
        return [self.folder, *(self.folder / name for name in sorted(self._folders))]

    def close(self) -> None:
        """Let go of all: memory without a name is given back."""
        for name in list(self._files):
            self._let_go(name)

    def _walk(self, within: str) -> Iterator[tuple[str, Identity | str]]:
        """Yield each file with its identity and each other link with where it leads, by relative name."""
        with os.scandir(self.folder / within) as entries:
            for entry in entries:
                name = f"{within}/{entry.name}" if within else entry.name
                if not self.names.fullmatch(name):
                    continue
                with suppress(FileNotFoundError):  # gone meanwhile
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
        """Return where a link leads: the identity of a file of ours that was put back, else the words."""
        to = os.readlink(path)  # noqa: PTH115
        if not to.startswith(_ours()):
            return to
        status = os.stat(path)  # noqa: PTH116
        return status.st_dev, status.st_ino

    def _hold(self, name: str, what: Identity | str) -> None:
        if name in FOLDERS:  # something else is in the place of one
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
        except OSError:  # gone meanwhile, or no descriptor is left: then it is not held
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
        with suppress(FileExistsError):  # somebody has made another meanwhile, which counts
            (folder / name).symlink_to(to)

    def _make_again(self) -> None:
        """Make the folder with all that was in it, at once: nobody sees a part of it."""
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


@dataclass(slots=True)
class VolumeRepair:
    """A run's folder and those of its members. Looked at often, on one thread."""

    runtime: Path
    _members: dict[str, RepairedFolder] = field(default_factory=dict)
    _root: RepairedFolder = field(init=False)
    _owner: Identity | None = None  # of the lock by which others see that the run lives
    _lock: int = -1  # that lock's descriptor, if it was made again
    _kept: int = -1  # the folder's own descriptor, with a lock for those who remove what is old
    _told_s: float = -AGAIN_S
    _back: list[Path] = field(default_factory=list)  # put back, and not told
    _error: str = ""
    _failures: int = 0  # looks in a row in which not all could be put back

    def __post_init__(self) -> None:
        self._root = RepairedFolder(self.runtime, RUN_FILE)

    def begin(self) -> None:
        """Take what is there for the run's own. Raises `OSError`."""
        self._owner = memory_volume.identity(self.runtime / OWNER)
        self._keep_from_aging()

    @property
    def error(self) -> str:
        """Why not all that was removed could be put back; "" when all is there."""
        return self._error if self._failures >= FAILURES else ""

    def add(self, member: str) -> None:
        """Look after the folder of a new member, which is there."""
        self._members[member] = RepairedFolder(self.runtime / member)

    def look(self, now_s: float) -> list[str]:
        """Put back what was removed, and return lines for people about it. Never raises."""
        try:
            self.put_back()
        except OSError as error:
            self._failures += 1
            self._error = (
                f"{error.filename or self.runtime}: somebody has removed or changed what the run has there,"
                f" and it cannot be put back: {error.strerror or error}; tried again. Until then the ranks"
                " train on, but no fault can be recovered"
            )
            return [self._error] if self._failures == FAILURES else []
        self._failures = 0
        back, self._back = self._back, []
        if not back or now_s - self._told_s < AGAIN_S:
            return []
        self._told_s = now_s
        more = f" and {len(back) - 1} more" if len(back) > 1 and back[0] != self.runtime else ""
        return [
            f"{back[0]}{more}: somebody has removed this while the run uses it; it is put back with all that"
            " is in it. systemd removes a user's files in /dev/shm at the last logout (RemoveIPC=yes in"
            " logind.conf): `loginctl enable-linger` prevents that"
        ]

    def put_back(self) -> None:
        """Put back what was removed: the next `look` says so. Raises `OSError` when that fails."""
        self._back += self._put_back_root()
        for tree in self._members.values():
            self._back += tree.look()

    def folders(self) -> list[Path]:
        """Return all folders from which something may be removed."""
        trees = (self._root, *self._members.values())
        return [folder for tree in trees for folder in tree.folders()]

    def free(self, member: str) -> threading.Thread:
        """Look after a member's folder no more, and remove it; see `memory_volume.free`."""
        tree = self._members.pop(member, None)
        return memory_volume.free(self.runtime / member, tree.close if tree is not None else None)

    def close(self) -> None:
        """Let go of everything."""
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
        back = self._root.look()
        return [self.runtime] if gone else back

    def _keep_from_aging(self) -> None:
        """Hold a lock on the folder: systemd-tmpfiles passes over what has one, with all that is in it."""
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
    """True for a folder of ours; it may be used by us on return. Raises `OSError` for anything else."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise FileExistsError(errno.EEXIST, "something else is in its place", str(path))
    _allow(str(path), status, stat.S_IRWXU)
    return True


def _allow(path: str, status: os.stat_result, owner: int) -> None:
    """Give the owner, this user, the rights that somebody has taken."""
    if status.st_mode & owner != owner:
        os.chmod(path, stat.S_IMODE(status.st_mode) | owner)  # noqa: PTH101


# Hear at once when something is removed from a folder, by Linux' inotify.
#
# Whoever looks now and then finds out as well, but a fault may come before that. Where there is no inotify,
# or no more of it is to be had, nothing is heard and nothing is raised.


_REMOVED = 0x0000_0200 | 0x0000_0400  # IN_DELETE, IN_DELETE_SELF: include/uapi/linux/inotify.h
_OFFOLDERS = 0x0100_0000 | 0x0200_0000  # IN_ONLYDIR, IN_DONT_FOLLOW
_READ_BYTES = 1 << 16


@dataclass(slots=True)
class RemovalWatcher:
    """`descriptor` is ready to be read when something was removed; -1 where that cannot be had."""

    descriptor: int = -1
    _libc: ctypes.CDLL | None = field(default=None)

    def open(self) -> None:
        try:
            self._libc = ctypes.CDLL(None)
            self.descriptor = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, AttributeError):
            self.descriptor = -1

    def watch(self, folders: Iterable[Path]) -> None:
        """Hear of what is removed from `folders`, those that are watched already included."""
        if self._libc is None or self.descriptor < 0:
            return
        for folder in folders:
            self._libc.inotify_add_watch(self.descriptor, os.fsencode(folder), _REMOVED | _OFFOLDERS)

    def drain(self) -> None:
        """Take what there is to be heard: it says when to look, and not what is gone."""
        try:
            while os.read(self.descriptor, _READ_BYTES):
                pass
        except OSError:  # no more of it
            return

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1
