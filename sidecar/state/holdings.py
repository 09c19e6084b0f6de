"""What this member holds of the group's state: snapshots in the arena, private states of ranks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import zlib
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from holdfast.protocol.member_messages import HeldPrivateState, HeldSnapshot
from holdfast.snapshot import member_directory
from holdfast.snapshot.arena import Arena, SnapshotGone
from holdfast.snapshot.commit_records import CommitRecord
from holdfast.snapshot.private_store import PrivateBlob, PrivateReader

_pinning = ThreadPoolExecutor(4, "pin")  # of its own: no storage that hangs may keep a snapshot from a peer
PIECE_BYTES = 1 << 20  # compared at a time
NEWEST = 12  # private states listed for each rank: a resume point is one of the last few


class Holdings:
    """A reader's view of the arena directory."""

    def __init__(self, directory: Path, restored: Path) -> None:
        """`restored` has the private states that this member's ranks were started from."""
        self.directory = directory
        self._restored = restored
        self._restoring = threading.Lock()  # one writes or removes there at a time
        self.arena = Arena(directory)
        self._readers: dict[Path, PrivateReader] = {}

    @contextlib.asynccontextmanager
    async def pinned(self, record: CommitRecord) -> AsyncIterator[Path]:
        """Pin as `Arena.pin` does, but wait in a thread while others hold the slot. Raises as that does."""
        pin = self.arena.pin(record)
        entering = asyncio.get_running_loop().run_in_executor(_pinning, pin.__enter__)
        try:
            path = await asyncio.shield(entering)
        except asyncio.CancelledError:
            entering.add_done_callback(lambda done: _let_go(pin, done))
            raise
        try:
            yield path
        finally:
            pin.__exit__(None, None, None)

    def slots(self) -> tuple[HeldSnapshot, ...]:
        return tuple(HeldSnapshot(r.generation, r.step, r.total_bytes) for r in self.arena.records())

    def record(self, generation: int, step: int) -> CommitRecord | None:
        for each in self.arena.records():
            if (each.generation, each.step) == (generation, step):
                return each
        return None

    def privates(self) -> tuple[HeldPrivateState, ...]:
        """List the private states held, the newest of each store and those of the snapshots."""
        wanted = {slot.step for slot in self.slots()}
        found: dict[tuple[int, int, int], HeldPrivateState] = {
            (rank, generation, step): HeldPrivateState(rank, generation, step, True)
            for rank, generation, step in self._restored_files().values()
            if step in wanted
        }
        for rank, reader in self._stores():
            for place, held in enumerate(reader.held()):
                if place >= NEWEST and held.step not in wanted:
                    continue
                key = (rank, held.generation, held.step)
                if key not in found or held.final:
                    found[key] = HeldPrivateState(rank, held.generation, held.step, held.final)
        return tuple(found.values())

    def private(self, rank: int, generation: int, step: int) -> PrivateBlob | None:
        """Return a private state whose bytes are what was put, and which did not change after that.

        One that may have changed belongs to no step. Any thread may ask.
        """
        for owner, path in self._store_paths():
            if owner != rank:
                continue
            with contextlib.closing(PrivateReader(path)) as reader:
                found = reader.get(step, generation)
            if found is not None and found.final:
                return found
        return self._as_restored(rank, generation, step)

    def keep_restored(self, rank: int, generation: int, step: int, data: bytes) -> Path:
        """Store the private state that a rank is started from, for this start and the next; return its file.

        The name has the checksum, so a file that was damaged is never believed. One that has these bytes is
        left as it is. Raises OSError; then there is no such file.
        """
        path = self._restored / member_directory.restored_name(rank, generation, step, zlib.crc32(data))
        partial = self._restored / f".{member_directory.restored_stem(rank, generation, step)}.tmp"
        with self._restoring:
            if _has(path, data):
                return path
            self._restored.mkdir(exist_ok=True)
            try:
                partial.write_bytes(data)
                os.replace(partial, path)
            except OSError as error:
                with contextlib.suppress(OSError):
                    partial.unlink()
                needed = f"{len(data):,} bytes are needed for the private state of rank {rank}"
                raise OSError(error.errno, f"{error.strerror or error}: {needed}") from None
        return path

    def forget_restored(self, wanted: frozenset[tuple[int, int, int]]) -> None:
        """Remove what no start can need any more: called before a start's own files are written.

        What stays is what is `wanted` (rank, generation, step), and the newest of each rank for each step
        that there is a snapshot of: nothing else of it is listed for anybody (`privates`). So there are never
        more than two states of a rank and the one that is wanted, however often the group was restarted. No
        clock has a say in it. Raises OSError.
        """
        with self._restoring:
            steps = {slot.step for slot in self.slots()}
            found = self._restored_files()
            newest: dict[tuple[int, int], int] = {}
            for rank, generation, step in found.values():
                newest[rank, step] = max(generation, newest.get((rank, step), generation))
            for path, (rank, generation, step) in found.items():
                stays = step in steps and generation == newest[rank, step]
                if not stays and (rank, generation, step) not in wanted:
                    path.unlink(missing_ok=True)
            for path in self._restored.glob(".*.tmp"):  # of a sidecar that was killed as it wrote
                path.unlink(missing_ok=True)

    def _as_restored(self, rank: int, generation: int, step: int) -> PrivateBlob | None:
        for path in self._restored.glob(f"{member_directory.restored_stem(rank, generation, step)}-*.bin"):
            with contextlib.suppress(OSError):
                data = path.read_bytes()
                if f"{zlib.crc32(data):08x}" == path.stem.rpartition("-")[2]:
                    return PrivateBlob(generation, step, True, data)
                path.unlink()
        return None

    def _restored_files(self) -> dict[Path, tuple[int, int, int]]:
        """Return rank, generation and step of what ranks were started from, by file."""
        try:
            files = list(self._restored.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return {}
        found = ((path, member_directory.RESTORED_STATE.fullmatch(path.name)) for path in files)
        return {path: (int(match[1]), int(match[2]), int(match[3])) for path, match in found if match}

    def good(self, record: CommitRecord) -> bool:
        """False when the snapshot is not what was sealed. One that has no seal yet is believed."""
        try:
            return not self.arena.sealed(record) or self.arena.verify(record)
        except SnapshotGone:
            return False

    def _stores(self) -> list[tuple[int, PrivateReader]]:
        return [
            (rank, self._readers.setdefault(path, PrivateReader(path))) for rank, path in self._store_paths()
        ]

    def _store_paths(self) -> list[tuple[int, Path]]:
        try:
            paths = sorted(self.directory.iterdir())
        except OSError:  # somebody has removed it, and it is not put back yet
            return []
        found = ((path, member_directory.PRIVATE_STORE.fullmatch(path.name)) for path in paths)
        return [(int(match[1]), path) for path, match in found if match]


def _has(path: Path, data: bytes) -> bool:
    """True when the file at `path` has these bytes."""
    at = 0
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != len(data):
                return False
            while piece := file.read(PIECE_BYTES):
                if piece != data[at : at + len(piece)]:
                    return False
                at += len(piece)
    except OSError:
        return False
    return at == len(data)


def _let_go(pin: contextlib.AbstractContextManager[Path], entered: asyncio.Future[Path]) -> None:
    """Give back a slot that nobody wants any more, now that it is had."""
    if not entered.cancelled() and entered.exception() is None:
        pin.__exit__(None, None, None)
