"""Read and write the state that this member holds: snapshots in the arena, and private states of ranks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import zlib
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.fileio import folder_rights
from holdfast.protocol.codec import at_most
from holdfast.protocol.member_messages import MAX_SNAPSHOTS, HeldPrivateState, HeldSnapshot
from holdfast.snapshot import member_directory
from holdfast.snapshot.arena import Arena, SnapshotGone
from holdfast.snapshot.commit_records import CommitRecord
from holdfast.snapshot.private_store import PrivateBlob, PrivateReader

_pinning = ThreadPoolExecutor(4, "pin")  # a separate pool, because hung storage must not block sends to peers
PIECE_BYTES = 1 << 20  # bytes compared at a time
NEWEST = 12  # how many private states are listed per rank; the group resumes only from one of the last steps


@dataclass(frozen=True, slots=True)
class HeldStates:
    """What a member holds: its snapshots, newest first, and the private states of the snapshots' steps."""

    slots: tuple[HeldSnapshot, ...] = field(default=(), metadata=at_most(MAX_SNAPSHOTS))
    privates: tuple[HeldPrivateState, ...] = ()


class Holdings:
    """Reads the states in the arena directory, and stores the private states that ranks here start from."""

    def __init__(self, directory: Path, restored: Path) -> None:
        """`restored` is the directory for the private states that this member's ranks start from."""
        self.directory = directory
        self._restored = restored
        self._restoring = threading.Lock()  # held while files in `restored` are written or removed
        self.arena = Arena(directory)
        self.pins = 0  # how many readers of this process pin a snapshot at the moment
        self._readers: dict[Path, PrivateReader] = {}

    @contextlib.asynccontextmanager
    async def pinned(self, record: CommitRecord) -> AsyncIterator[Path]:
        """Pin a snapshot as `Arena.pin` does, with the same exceptions, but wait for the slot in a thread."""
        pin = self.arena.pin(record)
        entering = asyncio.get_running_loop().run_in_executor(_pinning, pin.__enter__)
        try:
            path = await asyncio.shield(entering)
        except asyncio.CancelledError:
            entering.add_done_callback(lambda done: _release_acquired(pin, done))
            raise
        self.pins += 1
        try:
            yield path
        finally:
            self.pins -= 1
            pin.__exit__(None, None, None)

    def slots(self) -> tuple[HeldSnapshot, ...]:
        return tuple(HeldSnapshot(r.generation, r.step, r.total_bytes) for r in self.arena.records())

    def states(self) -> HeldStates:
        """Return what this member holds for the steps of its snapshots."""
        slots = self.slots()
        steps = {each.step for each in slots}
        return HeldStates(slots, tuple(each for each in self.privates() if each.step in steps))

    def record(self, generation: int, step: int) -> CommitRecord | None:
        for each in self.arena.records():
            if (each.generation, each.step) == (generation, step):
                return each
        return None

    def privates(self) -> tuple[HeldPrivateState, ...]:
        """Return the private states held: the newest of each rank, and all those of the snapshots' steps."""
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
        """Return the private state if it is intact and final; None otherwise. Safe in any thread.

        Until it is final, the script may still change the private state of the step.
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
        """Store the private state that a rank starts from, now and perhaps again later; return its file.

        The file's name contains the checksum, so a damaged file is never used. If a file already has this
        content, it is not written again. If this raises `OSError`, no incomplete file is left.
        """
        path = self._restored / member_directory.restored_name(rank, generation, step, zlib.crc32(data))
        partial = self._restored / f".{member_directory.restored_stem(rank, generation, step)}.tmp"
        with self._restoring:
            if _has(path, data):
                return path
            folder_rights.make_folder(self._restored)
            try:
                partial.unlink(missing_ok=True)
                with partial.open("xb") as file:  # always a new file, never the target of a link
                    file.write(data)
                folder_rights.share(partial)
                os.replace(partial, path)
            except OSError as error:
                with contextlib.suppress(OSError):
                    partial.unlink()
                needed = f"{len(data):,} bytes are needed for the private state of rank {rank}"
                raise OSError(error.errno, f"{error.strerror or error}: {needed}") from None
        return path

    def forget_restored(self, wanted: frozenset[tuple[int, int, int]], resumed_step: int = -1) -> None:
        """Remove the files that no start can need any more. Call this before writing the files of a start.

        The states in `wanted` (rank, generation, step) are kept. The newest state of each rank is also kept
        for each step that has a snapshot, because `privates` lists it, and for `resumed_step`, because
        another member may be about to fetch it. A rank therefore never has more than two states in addition
        to the wanted one, no matter how often the group restarts. File times are not used. Raises `OSError`.
        """
        with self._restoring:
            steps = {slot.step for slot in self.slots()} | {resumed_step}
            found = self._restored_files()
            newest: dict[tuple[int, int], int] = {}
            for rank, generation, step in found.values():
                newest[rank, step] = max(generation, newest.get((rank, step), generation))
            for path, (rank, generation, step) in found.items():
                stays = step in steps and generation == newest[rank, step]
                if not stays and (rank, generation, step) not in wanted:
                    path.unlink(missing_ok=True)
            for path in self._restored.glob(".*.tmp"):  # left by a sidecar that was killed while writing
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
        """Return the rank, generation and step of each file in `restored`."""
        try:
            files = list(self._restored.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return {}
        found = ((path, member_directory.RESTORED_STATE.fullmatch(path.name)) for path in files)
        return {path: (int(match[1]), int(match[2]), int(match[3])) for path, match in found if match}

    def private_bytes(self) -> int:
        """Return the size of the files with private states."""
        paths = (*(path for _, path in self._store_paths()), *self._restored_files())
        total_bytes = 0
        for path in paths:
            with contextlib.suppress(OSError):  # removed in the meantime
                total_bytes += path.stat().st_size
        return total_bytes

    def good(self, record: CommitRecord) -> bool:
        """Return False if the snapshot is missing or does not match its seal; True if it has no seal."""
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
        except OSError:  # another process removed the directory, and nothing has recreated it yet
            return []
        found = ((path, member_directory.PRIVATE_STORE.fullmatch(path.name)) for path in paths)
        return [(int(match[1]), path) for path, match in found if match]


def _has(path: Path, data: bytes) -> bool:
    """Return whether the file at `path` contains exactly these bytes."""
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


def _release_acquired(pin: contextlib.AbstractContextManager[Path], entered: asyncio.Future[Path]) -> None:
    """Release a slot that was acquired after the caller had already been cancelled."""
    if not entered.cancelled() and entered.exception() is None:
        pin.__exit__(None, None, None)
