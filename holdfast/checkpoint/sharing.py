"""Split a checkpoint file between the member that writes it and the peers that help.

Each member takes the next piece when it is free, so slow peers write fewer pieces. A peer writes bytes only
if they match the checksums of the writer's own copy. So everything that a peer writes is correct, even if
it is late, and a piece may safely be written twice (ADR 17).
"""

from __future__ import annotations

import hmac
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from holdfast.fileio.bulk_copy import BLOCK_BYTES
from holdfast.fileio.checksum import CHUNK_BYTES, FileEntry, stretch_crc

# While the writer accepts help, this file is in its folder. A peer that can read the file sees the same
# folder.
TOKEN = ".share"
TOKEN_BYTES = 64
PIECE_BYTES = 2 * CHUNK_BYTES  # in a directory; at 1 GB/s, this takes several times as long as a request
LEAST_BYTES = 64 << 20  # per member; with less, the requests cost more time than they save
# When no other piece is left, the writer also writes a piece that a peer has had for longer than `LATE_S`
# plus `SLOWER` times the mean duration. A hung peer therefore delays the checkpoint by at most this wait,
# plus the time to write the few pieces that it had taken.
LATE_S = 2.0
SLOWER = 3.0
READERS = 4  # threads that read single blocks, each of which takes a round trip to a file server


class ShareRefused(Exception):
    """A member cannot write a piece of another member's checkpoint. The message gives the reason."""


@dataclass(frozen=True, slots=True)
class StagingPlace:
    """Where the writer's files are, below the storage that every member is configured with."""

    folder: str  # the writer's own folder; the name is validated before it is used in a path
    token: str  # the content of `TOKEN`
    part_bytes: int = 0  # in object storage


def new_token() -> str:
    return secrets.token_hex(TOKEN_BYTES // 2)


def is_token(found: bytes, token: str) -> bool:
    """Return whether the content of `TOKEN` is `token`, which came from another member."""
    return len(found) == TOKEN_BYTES and hmac.compare_digest(found, token.encode())


@dataclass(frozen=True, slots=True)
class SharedPiece:
    """Bytes `begin` to `end` of a file: whole chunks, except that the last one may be shorter."""

    begin: int
    end: int

    @property
    def chunks(self) -> range:
        """The offset of each chunk in the file."""
        return range(self.begin, self.end, CHUNK_BYTES)


# Returns the bytes between two offsets of a peer's copy if they match the writer's checksums. They are valid
# until the next call.
CheckedRead: TypeAlias = Callable[[int, int], memoryview]


class ShareHelpers(Protocol):
    """The peers that may help a writer."""

    def helping(self, place: StagingPlace, work: SharedFile) -> AbstractContextManager[object]:
        """Have peers take pieces of `work` until the context ends. Never raises because of a peer."""

    def distrust(self, why: str) -> None:
        """Stop accepting help, because data that peers reported as written is missing."""


class SharedFile:
    """The pieces of a file. A piece is done when its bytes are on storage. Any thread may use this object.

    Pieces that peers write are durable when they are done. The writer makes its own pieces durable later,
    before it publishes the checkpoint.
    """

    def __init__(self, source: Path, piece_bytes: int, moved: Callable[[], object]) -> None:
        """`moved` is called for each piece that a peer has written. Raises OSError."""
        self.size = source.stat().st_size
        self._source, self._moved = source, moved
        begins = range(0, self.size, piece_bytes)
        self._pieces = tuple(SharedPiece(at, min(at + piece_bytes, self.size)) for at in begins)
        self._free = deque(self._pieces)
        self._begun_s: dict[SharedPiece, float] = {}  # when peers began the pieces that they are writing
        self._own: set[SharedPiece] = set()  # the pieces that the writer is writing
        self._crcs: dict[SharedPiece, tuple[int, ...]] = {}  # the checksums of each finished piece
        self._of_peers: list[SharedPiece] = []  # the finished pieces that only a peer has written
        self._seconds = self._durations = 0.0
        self._is_over = False
        self._change = threading.Condition()

    def take(self) -> SharedPiece | None:
        """Return a piece for a peer to write; None if no piece is left."""
        with self._change:
            if self._is_over or not self._free:
                return None
            piece = self._free.popleft()
            self._begun_s[piece] = time.monotonic()
            return piece

    def checksums(self, piece: SharedPiece) -> tuple[int, ...]:
        """Return the checksums of the writer's own copy. Raises OSError."""
        descriptor = os.open(self._source, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return tuple(stretch_crc(descriptor, at, min(at + CHUNK_BYTES, piece.end)) for at in piece.chunks)
        finally:
            os.close(descriptor)

    def finish(self, piece: SharedPiece, crcs: tuple[int, ...]) -> None:
        """Record that a peer has written a piece, with the writer's own checksums."""
        with self._change:
            begun_s = self._begun_s.pop(piece, None)
            if begun_s is None or self._is_over:
                return
            if piece not in self._crcs:
                self._of_peers.append(piece)
            self._done(piece, crcs, begun_s)
        self._moved()

    def give_back(self, piece: SharedPiece) -> None:
        """Record that a peer has not written a piece, or may not have written it."""
        with self._change:
            if self._begun_s.pop(piece, None) is None or piece in self._crcs or piece in self._own:
                return
            self._free.append(piece)
            self._change.notify_all()

    def write_rest(self, write: Callable[[SharedPiece], tuple[int, ...]], threads: int) -> None:
        """Write pieces until all are done, in the caller's thread and others; `write` returns the checksums.

        Raises the first exception of `write`, after the other threads have ended.
        """
        errors: list[BaseException] = []

        def work() -> None:
            try:
                self._write_own(write)
            except BaseException as error:
                errors.append(error)
                self.end()

        others = [threading.Thread(target=work, name="share", daemon=True) for _ in range(threads - 1)]
        for each in others:
            each.start()
        try:
            self._write_own(write)
        except BaseException as error:
            errors.append(error)
        finally:
            self.end()
            for each in others:
                each.join()
        if errors:
            raise errors[0]

    def entry(self, name: str) -> FileEntry:
        """Return the entry for the manifest, once all pieces are done."""
        crcs = tuple(crc for piece in self._pieces for crc in self._crcs[piece])
        return FileEntry(name, self.size, CHUNK_BYTES, crcs)

    def missing(self, descriptor: int) -> tuple[SharedPiece, ...]:
        """Return the pieces that peers have reported as written but that are missing from the file.

        One random block of each chunk is compared. A file system on top of object storage may show all
        members the same folder, and yet let one member's writes overwrite another's. Raises OSError.
        """
        source = os.open(self._source, os.O_RDONLY | os.O_CLOEXEC)

        def is_there(piece: SharedPiece) -> bool:
            for at in piece.chunks:
                blocks = -(-(min(at + CHUNK_BYTES, piece.end) - at) // BLOCK_BYTES)
                begin = at + secrets.randbelow(blocks) * BLOCK_BYTES
                count = min(BLOCK_BYTES, piece.end - begin)
                if os.pread(descriptor, count, begin) != os.pread(source, count, begin):
                    return False
            return True

        try:
            with ThreadPoolExecutor(READERS, "share-look") as pool:
                found = tuple(pool.map(is_there, self._of_peers))
        finally:
            os.close(source)
        return tuple(piece for piece, there in zip(self._of_peers, found, strict=True) if not there)

    def end(self) -> None:
        """Stop handing out pieces."""
        with self._change:
            self._is_over = True
            self._change.notify_all()

    def _write_own(self, write: Callable[[SharedPiece], tuple[int, ...]]) -> None:
        while (piece := self._next_own()) is not None:
            began_s = time.monotonic()
            crcs = write(piece)
            with self._change:
                self._done(piece, crcs, began_s)

    def _next_own(self) -> SharedPiece | None:
        """Wait for a piece that the writer must write; return None once there are no more."""
        with self._change:
            while not self._is_over and len(self._crcs) < len(self._pieces):
                piece, wait_s = self._free.popleft() if self._free else None, 0.0
                if piece is None:
                    piece, wait_s = self._latest()
                if piece is not None:
                    self._own.add(piece)
                    return piece
                self._change.wait(wait_s)
            return None

    def _latest(self) -> tuple[SharedPiece | None, float]:
        """Return a piece that a peer takes too long to write, or how long to wait until there is one."""
        waiting = [
            (begun_s, piece)
            for piece, begun_s in self._begun_s.items()
            if piece not in self._own and piece not in self._crcs
        ]
        if not waiting:
            return None, LATE_S
        begun_s, piece = min(waiting, key=lambda each: each[0])
        mean_s = self._seconds / self._durations if self._durations else 0.0
        left_s = begun_s + LATE_S + SLOWER * mean_s - time.monotonic()
        return (piece, 0.0) if left_s <= 0 else (None, left_s)

    def _done(self, piece: SharedPiece, crcs: tuple[int, ...], began_s: float) -> None:
        self._seconds += time.monotonic() - began_s
        self._durations += 1
        self._own.discard(piece)
        self._crcs.setdefault(piece, crcs)
        if len(self._crcs) == len(self._pieces):
            self._is_over = True
        self._change.notify_all()
