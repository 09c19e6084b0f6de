"""Follow the output of the ranks: read the files logs/gen-*/rank-*.log as they appear and grow."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

CHUNK_BYTES = 64 << 10  # the limit on one read from a file, to keep one rank from starving the others
POLL_BYTES = 1 << 20  # the limit on a poll of all files; later polls read the remainder of a burst
BEHIND_BYTES = 16 << 20  # if more than this is unread, output is skipped; the log file still contains it
LINE_BYTES = 16 << 10  # a longer line is returned in pieces
# Each poll lists this many of the latest folders, both by time and by number: the folders of the current and
# the previous generation.
HOT = 2
SETTLED_S = 3.0  # the coarsest modification times of common file systems have a resolution of 2 s
RELIST_S = 5.0  # the times of a network file system may come from a machine whose clock is wrong
_RANK = re.compile(r"rank-(\d{1,6})\.log")
_GENERATION = re.compile(r"gen-\d{1,9}")


@dataclass(slots=True)
class _Tail:
    """One log file, and how far it has been read."""

    path: Path
    inode: int
    rank: int
    offset: int = 0
    held: bytes = b""  # an incomplete line
    behind: bool = True  # whether the last read stopped before the end of the file
    over: bool = False  # whether the rank has a newer file, which means that this file's writer is dead


class LogTails:
    """Follows the logs of one run through all its generations.

    With `skip`, the content that exists at the start is skipped, because an earlier run wrote it.
    """

    def __init__(self, logs: Path, skip: bool = False) -> None:
        self._logs = logs
        self._tails: dict[Path, _Tail] = {}
        self._newest: dict[int, _Tail] = {}  # by rank
        self._folders = _Listing(logs)
        self._files: dict[Path, _Listing] = {}  # by folder of a generation
        if skip:
            self._find()
            for tail in self._tails.values():
                tail.offset, tail.behind = _size(tail.path), False

    def poll(self) -> list[tuple[int, str]]:
        """Return the lines completed since the last call, as (rank, line). Never blocks.

        If there is more output than one poll may read, later calls return the remainder.
        """
        hot = self._find()
        lines: list[tuple[int, str]] = []
        budget = POLL_BYTES
        todo = [t for t in self._tails.values() if t.behind or t.path.parent in hot]
        while todo and budget > 0:
            for tail in todo:
                size = _size(tail.path)
                if size == tail.offset:
                    tail.behind = False
                    continue
                lines += self._catch_up(tail, size)
                chunk = _read(tail, max(0, min(CHUNK_BYTES, budget)))
                budget -= len(chunk)
                lines += [(tail.rank, line) for line in _split(tail, chunk)]
            todo = [tail for tail in todo if tail.behind]
        for tail in self._tails.values():
            if tail.over and tail.held and not tail.behind:
                lines.append(_flush(tail))
        return lines

    def positions(self) -> list[tuple[Path, int]]:
        """Return each file, and how far its lines have been returned."""
        return [(tail.path, tail.offset - len(tail.held)) for tail in self._tails.values()]

    def close(self) -> list[tuple[int, str]]:
        """Return the remaining lines, including incomplete last lines."""
        lines = self.poll()
        rounds = len(self._tails) * BEHIND_BYTES // POLL_BYTES  # bounded, because a writer may never stop
        while rounds > 0 and any(tail.behind for tail in self._tails.values()):
            lines += self.poll()
            rounds -= 1
        return lines + [_flush(tail) for tail in self._tails.values() if tail.held]

    def _find(self) -> set[Path]:
        """Find new files, and return the folders in use.

        Checking any other folder costs only a single stat.
        """
        now_ns = time.time_ns()
        folders: list[tuple[int, Path]] = []
        for name, _ in self._folders.entries(now_ns, _modified_ns(self._logs)):
            if _GENERATION.fullmatch(name):
                modified_ns = _modified_ns(path := self._logs / name)
                if modified_ns >= 0:
                    folders.append((modified_ns, path))
        folders.sort()
        # Sort by number as well, because a newer folder has an older time if the wall clock was set back.
        numbered = sorted(folders, key=lambda each: int(each[1].name.removeprefix("gen-")))
        hot = {folder for _, folder in (*folders[-HOT:], *numbered[-HOT:])}
        for modified_ns, folder in folders:
            listing = self._files.setdefault(folder, _Listing(folder))
            if listing.is_old(now_ns, modified_ns, in_use=folder in hot):
                self._list(folder, listing.entries(now_ns, modified_ns))
        return hot

    def _list(self, folder: Path, entries: Iterable[tuple[str, int]]) -> None:
        for name, inode in sorted(entries):
            match = _RANK.fullmatch(name)
            if match is None:
                continue
            path = folder / name
            known = self._tails.get(path)
            if known is None or known.inode != inode:
                self._add(_Tail(path, inode, int(match[1]), held=known.held if known else b""))

    def _add(self, tail: _Tail) -> None:
        if tail.held:  # the previous file of this name ended with an incomplete line
            tail.held += b"\n"
        before = self._newest.get(tail.rank)
        if before is not None:
            before.over = True
        self._newest[tail.rank] = self._tails[tail.path] = tail

    def _catch_up(self, tail: _Tail, size: int) -> list[tuple[int, str]]:
        """If more than `BEHIND_BYTES` are unread, skip most of them and return a line that says so."""
        if size - tail.offset <= BEHIND_BYTES:
            return []
        skipped = size - POLL_BYTES - tail.offset
        tail.offset, tail.held = size - POLL_BYTES, b""
        where = f"{tail.path.parent.name}/{tail.path.name}"
        return [(tail.rank, f"[{skipped / 2**20:.0f} MiB not shown; the complete output is in logs/{where}]")]


class _Listing:
    """The names and inodes in a folder, which is listed again only after its modification time has changed.

    A file system may give several changes the same time. A listing is therefore final only if the folder had
    been unchanged for `SETTLED_S`, and a folder in use is listed again after `RELIST_S` in any case.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._entries: list[tuple[str, int]] = []
        self._modified_ns = -1  # the modification time before the listing; -1 if it may not be final
        self._listed_ns = 0

    def is_old(self, now_ns: int, modified_ns: int, *, in_use: bool = True) -> bool:
        """Return True if the folder, now with the given modification time, must be listed again."""
        is_late = in_use and abs(now_ns - self._listed_ns) >= RELIST_S * 1e9
        return is_late or modified_ns != self._modified_ns

    def entries(self, now_ns: int, modified_ns: int) -> list[tuple[str, int]]:
        """Return the names and inodes, from the last listing unless it is old."""
        if self.is_old(now_ns, modified_ns):
            settled = 0 <= modified_ns < now_ns - SETTLED_S * 1e9
            self._modified_ns, self._listed_ns = modified_ns if settled else -1, now_ns
            self._entries = _names(self._folder)
        return self._entries


def _names(folder: Path) -> list[tuple[str, int]]:
    try:
        with os.scandir(folder) as found:
            return [(each.name, each.inode()) for each in found]
    except OSError:
        return []


def _modified_ns(folder: Path) -> int:
    """Return the modification time of a folder; -1 if it does not exist or cannot be read."""
    try:
        return os.stat(folder).st_mtime_ns  # noqa: PTH116 - each poll does this
    except OSError:
        return -1


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size  # noqa: PTH116 - each poll does this
    except OSError:
        return 0


def _read(tail: _Tail, most: int) -> bytes:
    """Return the next bytes of the file, and set `tail.behind`."""
    try:
        descriptor = os.open(tail.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(descriptor).st_size
            if size < tail.offset:
                tail.offset = 0  # the file was truncated, so read it from the start
            chunk = os.pread(descriptor, most, tail.offset)
        finally:
            os.close(descriptor)
    except OSError:
        tail.behind = False
        return b""
    tail.offset += len(chunk)
    tail.behind = tail.offset < size
    return chunk


def _split(tail: _Tail, chunk: bytes) -> list[str]:
    """Return the lines that `chunk` completes; keep the incomplete line in `tail.held`."""
    *whole, rest = (tail.held + chunk).split(b"\n")
    lines = [piece for line in whole for piece in _pieces(_visible(line))]
    rest = _visible(rest, complete=False)
    while len(rest) > LINE_BYTES:
        lines.append(_text(rest[:LINE_BYTES]))
        rest = rest[LINE_BYTES:]
    tail.held = rest
    return lines


def _visible(line: bytes, *, complete: bool = True) -> bytes:
    """Return what a terminal would show of a line that a progress bar has overwritten several times."""
    end = len(line) - 1 if line.endswith(b"\r") else len(line)
    start = line.rfind(b"\r", 0, end) + 1
    return line[start:end] if complete else line[start:]


def _pieces(line: bytes) -> list[str]:
    ends = range(LINE_BYTES, len(line) + LINE_BYTES, LINE_BYTES)
    return [_text(line[end - LINE_BYTES : end]) for end in ends] or [""]


def _flush(tail: _Tail) -> tuple[int, str]:
    held, tail.held = tail.held, b""
    return tail.rank, _text(_visible(held))


def _text(line: bytes) -> str:
    return line.decode(errors="replace")
