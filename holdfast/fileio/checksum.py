"""Compute the content checksum that snapshots and checkpoints share: a CRC32 for every 8 MiB chunk.

zlib's CRC32 releases the interpreter lock, so chunks can be checksummed in parallel. A mismatch identifies
the chunk that differs.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

CHUNK_BYTES = 8 << 20
# The size of a read. Larger buffers would stay allocated on the heap of each reading thread.
PIECE_BYTES = 256 << 10
THREADS = min(4, os.cpu_count() or 1)  # four threads use most of the memory bandwidth of a CPU socket


@dataclass(frozen=True, slots=True)
class FileEntry:
    """The size of a file in a checkpoint, and the CRC32 of each chunk."""

    name: str
    bytes: int
    chunk_bytes: int
    crc32: tuple[int, ...]

    @property
    def checksum(self) -> int:
        """A single checksum for the whole file. With 8 MiB chunks, it is the checksum that arenas use."""
        return combine(self.crc32)


def combine(crcs: Sequence[int]) -> int:
    """Combine the CRC32s of all chunks into a single checksum."""
    return zlib.crc32(struct.pack(f"<{len(crcs)}I", *crcs))


def chunk_crcs(content: memoryview, chunk_bytes: int = CHUNK_BYTES) -> tuple[int, ...]:
    """Return the CRC32 of each chunk of `content`. The call leaves no view of `content` behind."""

    def one(begin: int) -> int:
        with content[begin : begin + chunk_bytes] as chunk:
            return zlib.crc32(chunk)

    begins = range(0, len(content), chunk_bytes)
    if len(begins) < 2 or THREADS < 2:
        return tuple(map(one, begins))
    with ThreadPoolExecutor(THREADS, "holdfast-checksum") as pool:
        return tuple(pool.map(one, begins))


def stretch_crc(
    descriptor: int, begin: int, end: int, crc32: Callable[[memoryview, int], int] = zlib.crc32
) -> int:
    """Return the CRC32 of a file's bytes from `begin` to `end`, or to the end of a shorter file.

    The bytes are read with pread, because mapping them for a single read takes longer than copying them.
    Raises OSError.
    """
    crc, piece = 0, memoryview(bytearray(PIECE_BYTES))
    while begin < end and (count := os.preadv(descriptor, [piece[: end - begin]], begin)):
        crc = crc32(piece[:count], crc)
        begin += count
    return crc


def file_crcs(descriptor: int, size_bytes: int, chunk_bytes: int, threads: int = THREADS) -> tuple[int, ...]:
    """Return the CRC32 of each chunk of the first `size_bytes` of a file, read with pread.

    With `threads` = 1, the caller's thread does the work. If the file is shorter, the CRCs cover only the
    bytes that exist. Raises OSError.
    """

    def one(begin: int) -> int:
        return stretch_crc(descriptor, begin, min(begin + chunk_bytes, size_bytes))

    begins = range(0, size_bytes, chunk_bytes)
    if len(begins) < 2 or threads < 2:
        return tuple(map(one, begins))
    with ThreadPoolExecutor(threads, "holdfast-checksum") as pool:
        return tuple(pool.map(one, begins))


def checksum(content: memoryview) -> int:
    """Return the content checksum of `content`."""
    return combine(chunk_crcs(content))


class RunningChecksum:
    """Computes the content checksum of a stream that arrives in pieces of any size."""

    def __init__(self, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._done: list[int] = []
        self._crc = 0
        self._filled_bytes = 0

    def update(self, piece: bytes | memoryview) -> None:
        """Add the next piece."""
        with memoryview(piece) as view:
            begin = 0
            while begin < len(view):
                end = min(len(view), begin + self._chunk_bytes - self._filled_bytes)
                with view[begin:end] as part:
                    self._crc = zlib.crc32(part, self._crc)
                self._filled_bytes += end - begin
                begin = end
                if self._filled_bytes == self._chunk_bytes:
                    self._done.append(self._crc)
                    self._crc = self._filled_bytes = 0

    def crcs(self) -> tuple[int, ...]:
        """Return the CRC32 of each chunk so far; the last chunk may be incomplete."""
        return (*self._done, self._crc) if self._filled_bytes else tuple(self._done)

    def checksum(self) -> int:
        """Return the content checksum of the pieces added so far."""
        return combine(self.crcs())
