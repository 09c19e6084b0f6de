"""Write pieces of another member's checkpoint to storage, from this member's copy of the same snapshot.

Each request is for one piece. This member pins the snapshot while it reads, and for `HOLD_S` after that,
because the next request usually follows. It does not keep the snapshot pinned while storage hangs.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from holdfast.checkpoint.catalog import name_of
from holdfast.checkpoint.sharing import PIECE_BYTES, SharedPiece, ShareRefused, StagingPlace
from holdfast.checkpoint.storage import CheckpointStorage
from holdfast.fileio.checksum import CHUNK_BYTES
from holdfast.snapshot.arena import Arena, SnapshotGone
from holdfast.snapshot.commit_records import CommitRecord
from sidecar.fencing import OrderVersion
from sidecar.state.background import yield_to_all
from sidecar.state.holdings import Holdings
from sidecar.state.snapshot_send import crc32

log = logging.getLogger(__name__)

THREADS = 4  # pieces at a time, each of which is in memory up to three times
HOLD_S = 2.0
LOOK_S = 0.25  # between two checks of whether the writer still waits

# A separate pool: if storage hangs, further pieces are refused, and all else continues.
_pool = ThreadPoolExecutor(THREADS, "share", initializer=yield_to_all)


@dataclass(frozen=True, slots=True)
class PieceRequest:
    """A request to write bytes `begin` to `end` of the replicated state, of `total_bytes`.

    `epoch` and `generation` are those of the newest order that the writer obeys; the snapshot's generation
    may be an older one. `crc32` are the checksums of the chunks in the writer's copy.
    """

    epoch: int
    generation: int
    node: str  # of the writer
    total_bytes: int
    begin: int
    end: int
    folder: str
    token: str
    part_bytes: int
    crc32: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WrittenPiece:
    """The checksums of the chunks that were written and are durable."""

    crc32: tuple[int, ...]


class PieceWriter:
    """Writes for one other member at a time."""

    def __init__(
        self, holdings: Holdings, storage: CheckpointStorage, node: str, newest: Callable[[], OrderVersion]
    ) -> None:
        """`newest` returns the newest order that this member obeys."""
        self._holdings, self._storage = holdings, storage
        self._node, self._newest = node, newest
        self._for: tuple[str, str, CommitRecord] | None = None  # the writer's folder and token
        self._active = 0  # threads that write for it
        self._pinned: PinnedReader | None = None

    async def write(
        self, generation: int, step: int, asked: PieceRequest, is_gone: Callable[[], bool]
    ) -> WrittenPiece:
        """Write a piece of the snapshot of this generation and step; it is durable on return.

        `is_gone` returns True once the writer does not wait any more. Safe to repeat.

        Raises `ShareRefused`, `SnapshotGone`, or `OSError` if storage fails.
        """
        record = self._record(generation, step, asked)
        _check_range(asked)
        reader = self._reader(record, asked)
        stopped = threading.Event()
        work = asyncio.get_running_loop().run_in_executor(
            _pool, self._write, record, asked, reader, stopped.is_set
        )
        self._active += 1
        work.add_done_callback(self._ended)  # not when the request ends: storage may hang
        try:
            while not (await asyncio.wait({work}, timeout=LOOK_S))[0]:
                if is_gone():
                    raise ShareRefused("the writer does not wait any more")
        finally:
            stopped.set()
        return WrittenPiece(work.result())

    def release(self) -> None:
        """Release the snapshot, because the group forms again; a piece in progress is still written."""
        if not self._active:
            self._unpin()

    async def close(self, _: object = None) -> None:
        """Release the snapshot, at the end of the server."""
        self._unpin()

    def _unpin(self) -> None:
        if self._pinned is not None:
            self._pinned.release()
            self._pinned = None

    def _record(self, generation: int, step: int, asked: PieceRequest) -> CommitRecord:
        newest = self._newest()
        if newest > OrderVersion(asked.epoch, asked.generation):
            raise ShareRefused(
                f"this member obeys epoch {newest.epoch}, generation {newest.generation}: a newer order than"
                f" the writer's, of epoch {asked.epoch}, generation {asked.generation}"
            )
        if asked.node == self._node:
            raise ShareRefused("the writer is on the same node")
        record = self._holdings.record(generation, step)
        if record is None:
            raise SnapshotGone(f"no snapshot of generation {generation}, step {step}")
        if record.total_bytes != asked.total_bytes:
            raise ShareRefused(f"the snapshot has {record.total_bytes} bytes, not {asked.total_bytes}")
        return record

    def _reader(self, record: CommitRecord, asked: PieceRequest) -> PinnedReader:
        writer = (asked.folder, asked.token, record)
        if self._active and writer != self._for:
            raise ShareRefused("this member is helping another writer")
        if self._active >= THREADS:
            raise ShareRefused(f"this member is already writing {self._active} pieces")
        self._for = writer
        if self._pinned is None or self._pinned.record != record:
            self._unpin()
            self._pinned = PinnedReader(self._holdings.arena, record)
            asyncio.get_running_loop().call_later(HOLD_S, self._release, self._pinned)
        return self._pinned

    def _release(self, pinned: PinnedReader) -> None:
        """Release the snapshot if it has not been read for a while; else look again later."""
        if self._pinned is not pinned:
            return
        is_released = pinned.idle_s >= HOLD_S and pinned.release()
        if is_released and not self._active:
            self._pinned = None
        else:  # a thread that storage has kept waiting pins it again
            asyncio.get_running_loop().call_later(HOLD_S / 2, self._release, pinned)

    def _ended(self, work: asyncio.Future[tuple[int, ...]]) -> None:
        self._active -= 1
        if not work.cancelled() and work.exception() is not None:
            log.debug("piece not written", extra={"error": str(work.exception())})

    def _write(
        self, record: CommitRecord, asked: PieceRequest, reader: PinnedReader, is_over: Callable[[], bool]
    ) -> tuple[int, ...]:
        place = StagingPlace(asked.folder, asked.token, asked.part_bytes)
        piece = SharedPiece(asked.begin, asked.end)
        with mmap.mmap(-1, asked.end - asked.begin) as memory:
            checked = _CheckedReader(reader, memory, asked, is_over)
            try:
                self._storage.write_piece(
                    name_of(record.step), place, record.total_bytes, piece, checked.read
                )
                return tuple(checked.crcs)
            finally:
                checked.close()


class PinnedReader:
    """Reads a snapshot that it pins at the first read. Safe in any thread."""

    def __init__(self, arena: Arena, record: CommitRecord) -> None:
        self.record = record
        self._arena = arena
        self._one = threading.Lock()
        self._pin: AbstractContextManager[Path] | None = None
        self._file: FileIO | None = None
        self._read_s = time.monotonic()

    @property
    def idle_s(self) -> float:
        return time.monotonic() - self._read_s

    def read(self, at: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `at` on. Raises `SnapshotGone`, `OSError`."""
        with self._one:
            if self._file is None:
                pin = self._arena.pin(self.record)
                path = pin.__enter__()
                try:
                    self._file = open(path, "rb", buffering=0)
                except BaseException:
                    pin.__exit__(None, None, None)
                    raise
                self._pin = pin
            done = 0
            while done < len(into):
                with into[done:] as rest:
                    count = os.preadv(self._file.fileno(), [rest], at + done)
                if not count:
                    raise SnapshotGone("the file of the snapshot has been truncated")
                done += count
            self._read_s = time.monotonic()

    def release(self) -> bool:
        """Release the snapshot; return False if it is being read. It is pinned again by the next read."""
        if not self._one.acquire(blocking=False):
            return False
        try:
            if self._file is not None:
                self._file.close()
            if self._pin is not None:
                self._pin.__exit__(None, None, None)
            self._file = self._pin = None
        finally:
            self._one.release()
        return True


class _CheckedReader:
    """Reads chunks into private memory, from which they are written: they cannot change after the check."""

    def __init__(
        self, reader: PinnedReader, memory: mmap.mmap, asked: PieceRequest, is_over: Callable[[], bool]
    ) -> None:
        self._reader, self._asked, self._is_over = reader, asked, is_over
        self._memory = memoryview(memory)
        self._given: memoryview | None = None
        self.crcs: list[int] = []

    def read(self, begin: int, end: int) -> memoryview:
        if self._is_over():
            raise ShareRefused("the writer does not wait any more")
        self._give_up_last()
        content = self._given = self._memory[: end - begin]
        self._reader.read(begin, content)
        for at in range(begin, end, CHUNK_BYTES):
            with content[at - begin : at - begin + CHUNK_BYTES] as chunk:
                crc = crc32(chunk)
            expected = self._asked.crc32[(at - self._asked.begin) // CHUNK_BYTES]
            if crc != expected:
                why = f"this member's copy differs from byte {at} on"
                raise ShareRefused(f"{why}: checksum {crc:08x}, expected {expected:08x}")
            self.crcs.append(crc)
        return content

    def close(self) -> None:
        self._give_up_last()
        self._memory.release()

    def _give_up_last(self) -> None:
        if self._given is not None:
            self._given.release()
            self._given = None


def _check_range(asked: PieceRequest) -> None:
    """Raise `ShareRefused` unless the piece is whole chunks with a checksum each, and not too large."""
    begin, end, total = asked.begin, asked.end, asked.total_bytes
    is_whole = begin % CHUNK_BYTES == 0 and (end % CHUNK_BYTES == 0 or end == total)
    if not (is_whole and 0 <= begin < end <= min(total, begin + PIECE_BYTES)):
        raise ShareRefused(f"bytes {begin} to {end} of {total} are not a piece")
    if len(asked.crc32) != -(-(end - begin) // CHUNK_BYTES):
        raise ShareRefused(f"{len(asked.crc32)} checksums for bytes {begin} to {end}")
