"""Record which complete snapshot each slot of an arena holds, and the snapshot's checksum.

All processes of a member map one page with two commit records and two seals, each with its own CRC32. A
record that is torn or that Holdfast did not write fails its CRC check and is treated as missing. No other
recovery is needed.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

from holdfast.fileio import folder_rights
from holdfast.protocol.defaults import SNAPSHOT_SLOTS
from holdfast.snapshot import member_directory

PAGE_BYTES = 4096
RECORD_BYTES = 128
SEAL_BYTES = 64
RECORD_MAGIC = b"HFSNAP01"
SEAL_MAGIC = b"HFSEAL01"
# magic, generation, step, total bytes, sequence, world size, slot
_RECORD = struct.Struct("<8sQQQQII76x")
_SEQUENCE = struct.Struct(f"<32xQ{RECORD_BYTES - 40}x32xQ")  # the sequence numbers of both records
# magic, generation, step, total bytes, sequence, checksum
_SEAL = struct.Struct("<8sQQQQI16x")
_CRC = struct.Struct("<I")
_SEALS_OFFSET = SNAPSHOT_SLOTS * RECORD_BYTES
_COST_OFFSET = 1024
_COST = struct.Struct("<8sQd")  # magic, bytes, seconds
COST_MAGIC = b"HFCOST01"


class CommitRecord(NamedTuple):  # created for each snapshot; a frozen dataclass is five times as slow
    """Identifies one complete snapshot. No two commits to the same slot have the same `sequence`."""

    slot: int
    generation: int
    step: int
    world_size: int
    total_bytes: int
    path: Path
    sequence: int = 0


class CommitRecords:
    """Accesses the mapped page. A writer must hold the slot's lock; readers need no lock."""

    def __init__(self, directory: Path) -> None:
        """Map the page, creating it if it is missing. Raises OSError, for example if there is no room."""
        self._paths = tuple(directory / member_directory.slot_name(slot) for slot in range(SNAPSHOT_SLOTS))
        descriptor = folder_rights.open_file(directory / member_directory.RECORDS)
        try:
            os.posix_fallocate(descriptor, 0, PAGE_BYTES)
            self._page = mmap.mmap(descriptor, PAGE_BYTES)
        finally:
            os.close(descriptor)
        # For each slot, the last result of `read` and the bytes that it was decoded from.
        self._seen: list[tuple[bytes, CommitRecord | None]] = [(b"", None)] * SNAPSHOT_SLOTS

    @property
    def paths(self) -> tuple[Path, ...]:
        """The slot files, by slot."""
        return self._paths

    def raw(self) -> bytes:
        """Return the bytes of both records, which change with each commit."""
        return self._page[:_SEALS_OFFSET]

    def read(self, slot: int) -> CommitRecord | None:
        """Return the slot's record; None if the slot is empty or the record is torn."""
        begin = slot * RECORD_BYTES
        whole = self._page[begin : begin + RECORD_BYTES]
        if self._seen[slot][0] != whole:
            self._seen[slot] = whole, self._record(slot, whole)
        return self._seen[slot][1]

    def _record(self, slot: int, whole: bytes) -> CommitRecord | None:
        body = _checked(whole)
        if body is None:
            return None
        magic, generation, step, total, sequence, world_size, number = _RECORD.unpack(body)
        if magic != RECORD_MAGIC or number != slot:
            return None
        return CommitRecord(slot, generation, step, world_size, total, self._paths[slot], sequence)

    def next_sequence(self) -> int:
        """Return a sequence number higher than that of any earlier commit, including discarded commits."""
        first, second = _SEQUENCE.unpack_from(self._page)
        return int((max(first, second) + 1) % 2**64)

    def write(self, record: CommitRecord) -> None:
        """Write a record. The content of its slot must already be complete."""
        body = _RECORD.pack(
            RECORD_MAGIC,
            record.generation,
            record.step,
            record.total_bytes,
            record.sequence,
            record.world_size,
            record.slot,
        )
        begin = record.slot * RECORD_BYTES
        whole = body + _CRC.pack(zlib.crc32(body))
        self._page[begin : begin + RECORD_BYTES] = whole
        self._seen[record.slot] = whole, record

    def forget(self, slot: int) -> None:
        """Invalidate the slot's record and seal by changing only their CRCs."""
        for begin, size in ((slot * RECORD_BYTES, RECORD_BYTES), (_seal(slot), SEAL_BYTES)):
            end = begin + size
            wrong = zlib.crc32(self._page[begin : end - _CRC.size]) ^ 0xFFFFFFFF
            self._page[end - _CRC.size : end] = _CRC.pack(wrong)

    def sealed(self, record: CommitRecord) -> int | None:
        """Return the checksum in the seal of exactly this record; None if it was not sealed."""
        begin = _seal(record.slot)
        body = _checked(self._page[begin : begin + SEAL_BYTES])
        if body is None:
            return None
        *bound, checksum = _SEAL.unpack(body)
        return int(checksum) if tuple(bound) == _bound(record) else None

    def seal(self, record: CommitRecord, checksum: int) -> None:
        """Seal `record` with a checksum.

        If the write is interrupted, or if the slot now has another record, the slot has no valid seal.
        """
        body = _SEAL.pack(*_bound(record), checksum)
        begin = _seal(record.slot)
        self._page[begin : begin + SEAL_BYTES] = body + _CRC.pack(zlib.crc32(body))

    def note_cost(self, total_bytes: int, seconds: float) -> None:
        """Store how long a copy of a state of `total_bytes` took on this machine."""
        body = _COST.pack(COST_MAGIC, total_bytes, seconds)
        self._page[_COST_OFFSET : _COST_OFFSET + _COST.size + _CRC.size] = body + _CRC.pack(zlib.crc32(body))

    def cost_s(self, total_bytes: int) -> float:
        """Estimate how many seconds a copy of `total_bytes` takes; 0 if no copy has been recorded.

        The estimate scales the duration of the last copy by the size. For a smaller copy, it is the duration
        of the last copy itself.
        """
        body = _checked(self._page[_COST_OFFSET : _COST_OFFSET + _COST.size + _CRC.size])
        if body is None:
            return 0.0
        magic, known_bytes, seconds = _COST.unpack(body)
        if magic != COST_MAGIC or not known_bytes or not 0.0 <= seconds < 1e6:
            return 0.0
        per_byte_s: float = seconds / known_bytes
        found: float = per_byte_s * max(known_bytes, total_bytes)
        return found


def _seal(slot: int) -> int:
    return _SEALS_OFFSET + slot * SEAL_BYTES


def _bound(record: CommitRecord) -> tuple[bytes, int, int, int, int]:
    return SEAL_MAGIC, record.generation, record.step, record.total_bytes, record.sequence


def _checked(raw: bytes) -> bytes | None:
    body = raw[: -_CRC.size]
    return body if _CRC.unpack(raw[-_CRC.size :])[0] == zlib.crc32(body) else None
