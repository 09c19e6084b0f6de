"""Store one rank's private states (random generators, data position) of recent steps in a mapped file.

The rank writes an entry in every step, without a system call. The sidecar, or a process that takes over the
rank, can read the file at any time, even during a write or after the writer was killed. An entry whose record
fails its CRC check is treated as missing.

The file consists of a header page and one entry for each place of the ruler (`holdfast.protocol.kept_steps`).
An entry has a record of 64 bytes and room for `capacity` bytes. If states are larger than 1 MiB, there are
only a few places, which limits the file to about nine times the size of one state. Before the entry of a
pinned step is overwritten, it is moved to one of the last places.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.fileio import folder_rights
from holdfast.protocol import kept_steps

HEADER_BYTES = 4096
RECORD_BYTES = 64
DEFAULT_CAPACITY_BYTES = 32 << 10  # random states take about 8 KiB, and data positions less than 1 KiB
MAX_CAPACITY_BYTES = 1 << 30  # also the limit for states that members exchange
FEW_BYTES = 1 << 20  # for larger states, the file has only a few places
_MAGIC = b"HFPRIV03"
_HEADER = struct.Struct("<8sIIQ")  # magic, rank, every, capacity
_RECORD = struct.Struct("<IIQQQI24x")  # magic, flags, generation, step, length, CRC32 of the blob
_STEP = struct.Struct("<16xQ")  # the step in a record
_RECORD_MAGIC = 0x50524956
_FINAL = 1
_CRC = struct.Struct("<I")
_NONE = bytes(RECORD_BYTES)


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """Describes an entry with an intact record. `final` has the value that the writer passed to `put`."""

    generation: int
    step: int
    final: bool
    length: int


@dataclass(frozen=True, slots=True)
class PrivateBlob:
    """A private state, with the arguments that were passed to `put`."""

    generation: int
    step: int
    final: bool
    data: bytes


@dataclass(frozen=True, slots=True)
class _Shape:
    """The content of the header, and what follows from it. It determines all positions in the file."""

    rank: int
    every: int
    capacity_bytes: int
    stride_bytes: int = field(init=False)
    few: bool = field(init=False)  # whether there are places only for the last few steps

    def __post_init__(self) -> None:
        object.__setattr__(self, "stride_bytes", RECORD_BYTES + self.capacity_bytes)
        object.__setattr__(self, "few", self.capacity_bytes > FEW_BYTES)

    @property
    def file_bytes(self) -> int:
        return HEADER_BYTES + kept_steps.count(self.every, self.few) * self.stride_bytes

    def pack(self) -> bytes:
        body = _HEADER.pack(_MAGIC, self.rank, self.every, self.capacity_bytes)
        return body + _CRC.pack(zlib.crc32(body))


class PrivateReader:
    """Reads a rank's store, in any process and at any time. A store whose file is missing has no entries."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._map: mmap.mmap | None = None
        self._shape = _Shape(0, 0, 0)
        self._inode = (0, 0)

    def held(self) -> tuple[StoredEntry, ...]:
        """Return the entries with an intact record, newest (generation, step) first."""
        found = {held for held, _ in self._entries()}
        return tuple(sorted(found, key=lambda held: (held.generation, held.step), reverse=True))

    def get(self, step: int, generation: int | None = None) -> PrivateBlob | None:
        """Return the state of `step`, or None if it is missing or damaged.

        Without `generation`, this returns the intact state of the highest generation.
        """
        found: list[PrivateBlob] = []
        for held, offset in self._entries():
            if held.step != step or generation not in (None, held.generation):
                continue
            data = self._bytes(held, offset)
            if data is not None:
                found.append(PrivateBlob(held.generation, step, held.final, data))
        return max(found, key=lambda blob: blob.generation, default=None)

    def stored(self, generation: int, step: int) -> StoredEntry | None:
        """Return the entry in the place of `step` if it has this `generation`, and this step or a later one.

        Otherwise, return None. Each call that finds such an entry reads only one record and makes no system
        call, so it is cheap enough for every step. Other calls first check whether the file was replaced, and
        if so map the new file.
        """
        found = self._in_place_of(generation, step)
        if found is None:
            self._look_again()
            found = self._in_place_of(generation, step)
        return found

    def _in_place_of(self, generation: int, step: int) -> StoredEntry | None:
        content, shape = self._map, self._shape
        if content is None:
            return None
        at = HEADER_BYTES + kept_steps.places(step, shape.every, shape.few)[0] * shape.stride_bytes
        record = _unpack(content[at : at + RECORD_BYTES])
        if record is None or record[0].generation != generation or record[0].step < step:
            return None
        return record[0]

    def close(self) -> None:
        """Release the mapping. The next call of another method maps the file again."""
        if self._map is not None:
            self._map.close()
            self._map = None

    def _entries(self) -> Iterator[tuple[StoredEntry, int]]:
        """Yield each entry that has an intact record, with the record's offset in the mapping."""
        self._look_again()
        content, shape = self._map, self._shape
        if content is None:
            return
        for offset in range(HEADER_BYTES, shape.file_bytes, shape.stride_bytes):
            record = _unpack(content[offset : offset + RECORD_BYTES])
            if record is not None and record[0].length <= shape.capacity_bytes:
                yield record[0], offset

    def _bytes(self, held: StoredEntry, offset: int) -> bytes | None:
        """Return the blob of `held` at `offset`, or None if it is damaged or has been overwritten."""
        assert self._map is not None
        record = _unpack(self._map[offset : offset + RECORD_BYTES])
        begin = offset + RECORD_BYTES
        data = self._map[begin : begin + held.length]
        return data if record == (held, zlib.crc32(data)) else None

    def _look_again(self) -> None:
        """Map the file again if it was replaced. The writer replaces the file when the store must grow."""
        try:
            status = self.path.stat()
            if self._map is not None and (status.st_dev, status.st_ino) == self._inode:
                return
            self.close()
            file = open(self.path, "rb")
        except FileNotFoundError:
            self.close()
            return
        with file:
            status = os.fstat(file.fileno())
            shape = _read_shape(file.read(HEADER_BYTES))
            if shape is not None and status.st_size == shape.file_bytes:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                self._shape = shape
                self._inode = (status.st_dev, status.st_ino)


class PrivateStore(PrivateReader):
    """Writes a rank's store. Only one process may write at a time. It also reads earlier writers' entries."""

    def __init__(
        self,
        path: Path | str,
        rank: int,
        capacity_bytes: int = DEFAULT_CAPACITY_BYTES,
        every: int = 0,
        pins: Callable[[], Collection[int]] = tuple,
    ) -> None:
        """Open the store at `path`, or create it.

        The entries of an existing store are kept if it belongs to this rank. A damaged file, or the file of
        another rank, is replaced.

        Args:
            path: The file. Its directory must exist.
            rank: The rank that the states belong to.
            capacity_bytes: The size of the largest blob that fits without enlarging the file.
            every: If states are small, the last four steps that are multiples of this number are kept in
                addition to the ruler's steps. 0 keeps no additional steps.
            pins: Returns the steps of the one or two existing snapshots, whose states must be kept. Each
                `put` calls this function. The result may omit a snapshot that is less than three steps old.

        Raises:
            OSError: There is no room (ENOSPC). An existing store is unchanged.
        """
        super().__init__(path)
        self._pins = pins
        self._look_again()
        old = self._shape if self._map is not None else None
        capacity = _rounded(capacity_bytes)
        if old is not None and old.rank == rank:
            capacity = max(capacity, old.capacity_bytes)
        shape = _Shape(rank, every, capacity)
        if old == shape:
            self._map_writable()
        else:
            self._rebuild(shape, copied=old is not None and old.rank == rank)

    @property
    def capacity_bytes(self) -> int:
        """The size of the largest blob that fits without enlarging the file."""
        return self._shape.capacity_bytes

    def put(self, generation: int, step: int, blob: bytes, final: bool = True) -> None:
        """Store `blob` as the state of `step`, which is at least 0.

        This makes no system call unless the file must grow.

        Raises:
            OSError: The file must grow, but there is no room. The entries are unchanged.
            ValueError: The blob exceeds `MAX_CAPACITY_BYTES`. The entries are unchanged.
        """
        length = len(blob)
        shape = self._shape
        if length > shape.capacity_bytes:
            capacity = _rounded(_with_room(length))
            self._rebuild(_Shape(shape.rank, shape.every, capacity), copied=True)
            shape = self._shape
        content = self._map
        assert content is not None
        body = _RECORD.pack(_RECORD_MAGIC, _FINAL if final else 0, generation, step, length, zlib.crc32(blob))
        record = body + _CRC.pack(zlib.crc32(body))
        places = kept_steps.places(step, shape.every, shape.few)
        self._save_pinned(HEADER_BYTES + places[0] * shape.stride_bytes, generation, step)
        for place in places:
            begin = HEADER_BYTES + place * shape.stride_bytes
            after = begin + RECORD_BYTES
            content[begin:after] = _NONE  # a writer that is killed during the copy leaves an invalid entry
            content[after : after + length] = blob
            content[begin:after] = record

    def _save_pinned(self, begin: int, generation: int, step: int) -> None:
        """Move the entry at `begin` if its step is pinned, unless the same state is about to be written."""
        content, shape = self._map, self._shape
        assert content is not None
        pinned = self._pins()
        if _STEP.unpack_from(content, begin)[0] not in pinned:
            return
        found = _unpack(content[begin : begin + RECORD_BYTES])
        if found is None or (found[0].generation, found[0].step) == (generation, step):
            return
        first = shape.file_bytes - kept_steps.PIN_PLACES * shape.stride_bytes
        places = range(first, shape.file_bytes, shape.stride_bytes)
        there = min(places, key=lambda place: self._worth(place, found[0].step, pinned))
        content[there : there + RECORD_BYTES] = _NONE
        content.move(there + RECORD_BYTES, begin + RECORD_BYTES, found[0].length)
        content[there : there + RECORD_BYTES] = content[begin : begin + RECORD_BYTES]

    def _worth(self, begin: int, new: int, pinned: Collection[int]) -> tuple[bool, bool, int, int]:
        """Return a sort key for the entry at `begin`. Step `new` replaces the entry with the lowest key."""
        assert self._map is not None
        found = _unpack(self._map[begin : begin + RECORD_BYTES])
        if found is None:
            return False, False, -1, -1
        held = found[0]
        return held.step != new, held.step in pinned, held.generation, held.step

    def _rebuild(self, shape: _Shape, copied: bool) -> None:
        """Atomically replace the file with one of `shape`, which contains the old entries if `copied`."""
        entries = list(self._entries()) if copied else []
        # Copy the oldest entries first, so that the newest of several entries for one place wins.
        entries.sort(key=lambda entry: (entry[0].generation, entry[0].step))
        temporary = self.path.with_name(f".{self.path.name}.new")
        try:
            with open(temporary, "w+b") as file:
                folder_rights.share(temporary)
                os.posix_fallocate(file.fileno(), 0, shape.file_bytes)
                file.write(shape.pack())
            fresh = PrivateStore.__new__(PrivateStore)
            PrivateReader.__init__(fresh, temporary)
            fresh._pins = self._pins
            fresh._map_writable()
            for held, offset in entries:
                data = self._bytes(held, offset)
                if data is not None:
                    fresh.put(held.generation, held.step, data, held.final)
            fresh.close()
            os.replace(temporary, self.path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        self.close()
        self._map_writable()

    def _look_again(self) -> None:
        """Map the file if it is not mapped. Only this store replaces the file, so a mapping stays valid."""
        if self._map is None:
            super()._look_again()

    def _map_writable(self) -> None:
        self.close()
        self._look_again()
        self.close()
        with open(self.path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), self._shape.file_bytes)


def _with_room(length: int) -> int:
    """Return a capacity for a state of `length` bytes, with some room to grow."""
    return max(length, min(length + min(length // 4, FEW_BYTES), MAX_CAPACITY_BYTES))


def _rounded(capacity_bytes: int) -> int:
    """Round the capacity up to align records to cache lines.

    Raises ValueError if it is not from 1 to `MAX_CAPACITY_BYTES`.
    """
    if not 0 < capacity_bytes <= MAX_CAPACITY_BYTES:
        raise ValueError(f"a private state of {capacity_bytes} bytes, expected 1 to 2^30")
    return -(-capacity_bytes // RECORD_BYTES) * RECORD_BYTES


def _read_shape(raw: bytes) -> _Shape | None:
    body, crc = raw[: _HEADER.size], raw[_HEADER.size : _HEADER.size + _CRC.size]
    if len(crc) < _CRC.size or _CRC.unpack(crc)[0] != zlib.crc32(body):
        return None
    magic, rank, every, capacity = _HEADER.unpack(body)
    sound = magic == _MAGIC and 0 < capacity <= MAX_CAPACITY_BYTES
    return _Shape(rank, every, capacity) if sound else None


def _unpack(raw: bytes) -> tuple[StoredEntry, int] | None:
    """Return a record's entry and the CRC32 of its blob, or None if the record is damaged."""
    body = raw[: -_CRC.size]
    if _CRC.unpack(raw[-_CRC.size :])[0] != zlib.crc32(body):
        return None
    magic, flags, generation, step, length, crc = _RECORD.unpack(body)
    if magic != _RECORD_MAGIC:
        return None
    return StoredEntry(generation, step, bool(flags & _FINAL), length), crc
