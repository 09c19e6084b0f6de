"""Write pieces of another member's checkpoint to storage, from this member's copy of the same snapshot.

Each request is for one piece. This member pins the snapshot while it reads, and for `HOLD_S` longer, because
another request usually follows. It unpins the snapshot while storage hangs, and once its orders say that the
group stops training, because the ranks' newest state then needs the slot.
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
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from io import FileIO
from typing import Any

from holdfast.checkpoint.catalog import name_of
from holdfast.checkpoint.sharing import PIECE_BYTES, SharedPiece, ShareRefused, StagingPlace
from holdfast.checkpoint.storage import CheckpointStorage
from holdfast.fileio.checksum import CHUNK_BYTES
from holdfast.protocol.member_messages import MemberOrder
from holdfast.snapshot.arena import Arena, SnapshotGone
from holdfast.snapshot.commit_records import CommitRecord
from sidecar.fencing import OrderVersion
from sidecar.state.background import yield_to_all
from sidecar.state.holdings import Holdings
from sidecar.state.snapshot_send import crc32

log = logging.getLogger(__name__)

THREADS = 4  # how many pieces are written at a time; memory holds up to three copies of each
HOLD_S = 2.0
POLL_S = 0.25  # the time between two checks of whether the writer is still waiting
READ_BYTES = 1 << 20  # read at a time; a snapshot that is to be released stays pinned until the read ends

# A separate pool, so that if storage hangs, only further pieces are refused and everything else continues.
_pool = ThreadPoolExecutor(THREADS, "share", initializer=yield_to_all)


@dataclass(frozen=True, slots=True)
class PieceRequest:
    """A request to write bytes `begin` to `end` of the replicated state, which has `total_bytes`.

    `epoch` and `generation` belong to the newest order that the writer obeys; the snapshot's generation may
    be older. `crc32` contains the checksums of the chunks in the writer's copy.
    """

    epoch: int
    generation: int
    node: str  # the writer's node
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
    """Writes pieces for one other member at a time, while this member's order allows it."""

    def __init__(
        self, holdings: Holdings, storage: CheckpointStorage, node: str, newest: Callable[[], OrderVersion]
    ) -> None:
        """`newest` returns the version of the newest order that this member obeyed, even before a restart.

        Until the first `note_order`, that version alone decides whether this member helps.
        """
        self._holdings, self._storage = holdings, storage
        self._node, self._newest = node, newest
        self._order = MemberOrder("run", 0)
        self._helped: _HelpedWriter | None = None
        self._active = 0  # threads, including those that storage still blocks after their piece was stopped

    def note_order(self, order: MemberOrder) -> None:
        """Obey `order`: stop the pieces that were requested under another order, and release their snapshot.

        On return, the snapshot is released, and stopped pieces do not pin it again. If a thread is reading
        it, the thread releases it within `READ_BYTES`. A repeated order has no effect.
        """
        before, self._order = self._order, order
        helped = self._helped
        if helped is None:
            return
        is_same = (order.do, order.generation) == (before.do, before.generation)
        if not is_same or not _allows(order, helped.record):
            self._helped = None
            helped.stop(f"this member's order is now {order.do!r}, generation {order.generation}")

    async def write(
        self, generation: int, step: int, asked: PieceRequest, is_gone: Callable[[], bool]
    ) -> WrittenPiece:
        """Write a piece of the snapshot of this generation and step; it is durable on return.

        `is_gone` returns True once the writer no longer waits. Safe to repeat.

        Raises `ShareRefused`, `SnapshotGone`, or `OSError` if storage fails. Part of the piece may still be
        written later, because a storage call that hangs cannot be interrupted.
        """
        record = self._record(generation, step, asked)
        _check_range(asked)
        helped = self._helped_writer(record, asked)
        is_over = threading.Event()
        work = asyncio.get_running_loop().run_in_executor(
            _pool, self._write, record, asked, helped.reader, is_over.is_set
        )
        self._active += 1
        helped.active += 1
        work.add_done_callback(partial(self._ended, helped))  # not at the request's end: storage may hang
        try:
            while True:
                await asyncio.wait(
                    {work, helped.stopped}, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED
                )
                if work.done():
                    break
                if helped.stopped.done():
                    raise ShareRefused(helped.stopped.result())
                if is_gone():
                    raise ShareRefused("the writer no longer waits")
        finally:
            is_over.set()
        return WrittenPiece(work.result())

    async def close(self, _: object = None) -> None:
        """Release the snapshot when the server ends."""
        helped, self._helped = self._helped, None
        if helped is not None:
            helped.stop("this member is ending")

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
        if not _allows(self._order, record):
            raise ShareRefused(
                f"this member's order is {self._order.do!r}, and does not include the snapshot of generation"
                f" {generation}, step {step}"
            )
        return record

    def _helped_writer(self, record: CommitRecord, asked: PieceRequest) -> _HelpedWriter:
        """Return the writer that sent `asked`.

        Raises `ShareRefused` if this member is too busy to help it.
        """
        helped, identity = self._helped, (asked.folder, asked.token, record)
        if helped is not None and helped.identity != identity:
            if helped.active:
                raise ShareRefused("this member is helping another writer")
            helped.reader.close()
            helped = self._helped = None
        if self._active >= THREADS:
            raise ShareRefused(f"this member is already writing {self._active} pieces")
        if helped is None:
            helped = self._helped = _HelpedWriter(identity, PinnedReader(self._holdings.arena, record))
            asyncio.get_running_loop().call_later(HOLD_S, self._look, helped)
        return helped

    def _look(self, helped: _HelpedWriter) -> None:
        """Release the snapshot if it has not been read for a while; otherwise, check again later."""
        if self._helped is not helped:
            return
        is_released = helped.reader.idle_s >= HOLD_S and helped.reader.release()
        if is_released and not helped.active:
            self._helped = None
        else:  # a thread that storage has kept waiting pins it again
            asyncio.get_running_loop().call_later(HOLD_S / 2, self._look, helped)

    def _ended(self, helped: _HelpedWriter, work: asyncio.Future[tuple[int, ...]]) -> None:
        self._active -= 1
        helped.active -= 1
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


def _allows(order: MemberOrder, record: CommitRecord) -> bool:
    """Return whether a member with this order may write pieces of the snapshot.

    While the group trains, its periodic checkpoints are shared. After that, only the snapshot that the
    supervisor has chosen to save is pinned, because any other would occupy a slot that the state being
    secured needs.
    """
    return order.do == "run" or (order.save_generation, order.save_step) == (record.generation, record.step)


class _HelpedWriter:
    """Another member's checkpoint, while this member writes pieces of it."""

    def __init__(self, identity: tuple[str, str, CommitRecord], reader: PinnedReader) -> None:
        """`identity` is the writer's folder, its token and the snapshot. Call this on the event loop."""
        self.identity = identity
        self.record = identity[2]
        self.reader = reader
        self.active = 0  # the number of threads that write for it
        self.stopped: asyncio.Future[Any] = asyncio.get_running_loop().create_future()  # gives the reason

    def stop(self, why: str) -> None:
        """Refuse the pieces in progress with the reason `why`, and release the snapshot for good."""
        self.reader.close()  # first; it works in any thread and does not depend on the requests' tasks
        self.stopped.set_result(why)


class PinnedReader:
    """Reads a snapshot that it pins at the first read. Safe in any thread."""

    def __init__(self, arena: Arena, record: CommitRecord) -> None:
        self.record = record
        self._arena = arena
        self._one = threading.Lock()  # held by the thread that reads, or that pins or releases the snapshot
        self._pin = ExitStack()
        self._file: FileIO | None = None
        self._is_closed = False
        self._read_s = time.monotonic()

    @property
    def idle_s(self) -> float:
        return time.monotonic() - self._read_s

    def read(self, at: int, into: memoryview) -> None:
        """Fill `into` with the bytes that begin at `at`.

        Raises `ShareRefused` once this reader is closed, even during the read, and `SnapshotGone` or
        `OSError` if the snapshot cannot be read.
        """
        try:
            with self._one:
                self._read(at, into)
        finally:
            if self._is_closed:  # `close` does not wait for the lock; see there
                self.release()

    def release(self) -> bool:
        """Release the snapshot; return False if it is being read. It is pinned again by the next read."""
        if not self._one.acquire(blocking=False):
            return False
        try:
            self._file = None
            self._pin.close()
        finally:
            self._one.release()
        return True

    def close(self) -> None:
        """Release the snapshot, and never pin it again. Does not wait for a read in another thread.

        If another thread holds the lock, that thread checks `_is_closed` after it has released the lock, and
        then releases the snapshot itself.
        """
        self._is_closed = True
        self.release()

    def _read(self, at: int, into: memoryview) -> None:
        done = 0
        while done < len(into):
            if self._is_closed:
                raise ShareRefused("the piece was stopped by an order")
            file = self._file or self._pinned()
            with into[done : done + READ_BYTES] as rest:
                count = os.preadv(file.fileno(), [rest], at + done)
            if not count:
                raise SnapshotGone("the file of the snapshot has been truncated")
            done += count
        self._read_s = time.monotonic()

    def _pinned(self) -> FileIO:
        with ExitStack() as pin:
            path = pin.enter_context(self._arena.pin(self.record))
            self._file = pin.enter_context(open(path, "rb", buffering=0))
            self._pin = pin.pop_all()
        return self._file


class _CheckedReader:
    """Reads chunks into private memory, so that they cannot change between the check and the write."""

    def __init__(
        self, reader: PinnedReader, memory: mmap.mmap, asked: PieceRequest, is_over: Callable[[], bool]
    ) -> None:
        self._reader, self._asked, self._is_over = reader, asked, is_over
        self._memory = memoryview(memory)
        self._given: memoryview | None = None
        self.crcs: list[int] = []

    def read(self, begin: int, end: int) -> memoryview:
        if self._is_over():
            raise ShareRefused("the writer no longer waits")
        self._give_up_last()
        content = self._given = self._memory[: end - begin]
        self._reader.read(begin, content)
        for at in range(begin, end, CHUNK_BYTES):
            with content[at - begin : at - begin + CHUNK_BYTES] as chunk:
                crc = crc32(chunk)
            expected = self._asked.crc32[(at - self._asked.begin) // CHUNK_BYTES]
            if crc != expected:
                why = f"this member's copy differs starting at byte {at}"
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
    """Raise `ShareRefused` unless the piece has whole chunks with a checksum each, and is not too large."""
    begin, end, total = asked.begin, asked.end, asked.total_bytes
    is_whole = begin % CHUNK_BYTES == 0 and (end % CHUNK_BYTES == 0 or end == total)
    if not (is_whole and 0 <= begin < end <= min(total, begin + PIECE_BYTES)):
        raise ShareRefused(f"bytes {begin} to {end} of {total} are not a piece")
    if len(asked.crc32) != -(-(end - begin) // CHUNK_BYTES):
        raise ShareRefused(f"{len(asked.crc32)} checksums for bytes {begin} to {end}")
