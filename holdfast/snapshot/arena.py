"""Store a member's snapshots in two shared-memory slots; one of them always holds a complete state.

A writer claims an empty slot or, if there is none, the slot with the older snapshot. It invalidates the
slot's record, fills the slot, and writes the new record last. If it dies at any point, the other slot is
intact.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from holdfast.fileio import checksum, folder_rights
from holdfast.fileio.checksum import CHUNK_BYTES, THREADS, combine, file_crcs
from holdfast.fileio.safetensors import Layout, parse
from holdfast.protocol.defaults import SNAPSHOT_SLOTS
from holdfast.snapshot.commit_records import CommitRecord, CommitRecords
from holdfast.snapshot.slot_file import Slot, lock_shared, unlock

# While a slot has a valid record, a writer holds its lock only for microseconds, unless a signal stops the
# writer at that moment.
PIN_PATIENCE_S = 1.0
PIN_PAUSE_S = 0.0005
# One call of `back` allocates this much. If it allocated more, a writer might wait longer than 20 ms for the
# slot.
BACKED_BYTES = 32 << 20


class SnapshotGone(Exception):
    """The requested snapshot was overwritten or is being overwritten."""


class ArenaBusy(Exception):
    """No slot is free: readers or a writer hold the slots, or their snapshots must be kept."""


class CorruptSnapshot(ValueError):
    """The received bytes are not the bytes of the announced snapshot."""


class Arena:
    """The snapshots in one directory, shared by all processes of a member."""

    def __init__(self, directory: Path | str) -> None:
        """Open the arena, creating missing files. Raises OSError."""
        self.directory = Path(directory)
        folder_rights.make_folder(self.directory)
        self._page = CommitRecords(self.directory)
        self._slots = tuple(Slot(path) for path in self._page.paths)
        # The bytes of the records, and the results of `steps` for them by generation.
        self._steps: tuple[bytes, dict[int | None, tuple[int, ...]]] = (b"", {})

    def records(self) -> tuple[CommitRecord, ...]:
        """Return the records of the complete snapshots, newest (generation, step) first."""
        found = [record for slot in range(SNAPSHOT_SLOTS) if (record := self._complete(slot)) is not None]
        found.sort(key=_age, reverse=True)
        return tuple(found)

    def steps(self, generation: int | None = None) -> tuple[int, ...]:
        """Return the steps of the snapshots, of all generations or of `generation`, without a system call."""
        # Each training step asks several times, and the records seldom change.
        raw, known = self._page.raw(), self._steps
        if known[0] != raw:
            known = self._steps = (raw, {})  # replaced as a whole, because several threads may ask
        found = known[1].get(generation)
        if found is None:
            found = self._steps_of(generation)
            if self._page.raw() == raw:
                known[1][generation] = found
        return found

    def _steps_of(self, generation: int | None) -> tuple[int, ...]:
        found = (self._page.read(slot) for slot in range(SNAPSHOT_SLOTS))
        return tuple(
            record.step for record in found if record is not None and generation in (None, record.generation)
        )

    def begin(
        self,
        layout: Layout,
        generation: int,
        step: int,
        world_size: int,
        keep: frozenset[tuple[int, int]] | None = None,
        over: CommitRecord | None = None,
    ) -> SlotWriter | None:
        """Return a writer for an empty slot or for the slot of the snapshot to be overwritten, or None.

        The result is None if that slot is locked by readers or a writer, or if no snapshot may be
        overwritten. It is also None if the other slot already holds this state. If the slot's previous
        snapshot had the same layout, this takes only a few system calls.

        Args:
            layout: The layout of the new snapshot.
            generation: Fencing token of the state.
            step: The number of steps that the state contains.
            world_size: The number of ranks in the group that the state belongs to.
            keep: The (generation, step) pairs of snapshots that must not be overwritten. If this is None, or
                if no slot holds one of these snapshots, the newest complete snapshot is kept.
            over: The snapshot to overwrite, regardless of `keep`. If this is None, or if the snapshot no
                longer exists, `keep` applies.

        Raises:
            OSError: There is no room (ENOSPC). The other slot is unchanged.
            ValueError: A number is too large for a record. Nothing has changed.
        """
        _check(generation, step, world_size)
        claimed = self._claim(keep, over, (generation, step))
        if claimed is None:
            return None
        slot, before = claimed
        try:
            self._slots[slot].fit(layout.total_bytes)
            data = self._slots[slot].put_header(layout.header)
            record = self._record(slot, generation, step, world_size, layout.total_bytes)
            return SlotWriter(self._page, self._slots[slot], record, layout, data, before)
        except BaseException:
            self._slots[slot].release()
            raise

    def next_overwritten(self, keep: frozenset[tuple[int, int]] | None = None) -> CommitRecord | None:
        """Return the snapshot that `begin` overwrites with this `keep`.

        The result is None if a slot is empty, or if both snapshots must be kept.
        """
        return _next_overwritten(self.records(), keep)

    @contextmanager
    def pin(self, record: CommitRecord) -> Iterator[Path]:
        """Yield the path of a snapshot. No writer can overwrite the snapshot while the context is open.

        Raises:
            SnapshotGone: The slot now holds another snapshot, or a writer is filling it.
        """
        descriptor = self._lock(record)
        try:
            if self._page.read(record.slot) != record:
                raise SnapshotGone(f"{_title(record)} was overwritten")
            if os.fstat(descriptor).st_size != record.total_bytes:
                raise SnapshotGone(f"{_title(record)}: its file has the wrong size")
            yield record.path
        finally:
            unlock(descriptor)

    def seal(self, record: CommitRecord, threads: int = THREADS) -> int:
        """Compute, store and return the checksum of the snapshot's content. Raises SnapshotGone, OSError.

        The slot is not pinned during the computation, which may be slow, because a writer that needs the slot
        takes precedence.
        """
        with open(record.path, "rb") as file:
            found = combine(file_crcs(file.fileno(), record.total_bytes, CHUNK_BYTES, threads))
        if self._page.read(record.slot) != record:
            raise SnapshotGone(f"{_title(record)} was overwritten")
        self._page.seal(record, found)
        return found

    def sealed(self, record: CommitRecord) -> bool:
        """Return whether the snapshot was sealed with a checksum."""
        return self._page.sealed(record) is not None

    def checksum(self, record: CommitRecord) -> int | None:
        """Return the checksum in the snapshot's seal, or None if it was not sealed."""
        return self._page.sealed(record)

    def verify(self, record: CommitRecord) -> bool:
        """Return whether the content matches the snapshot's checksum. Raises SnapshotGone.

        If the snapshot has no checksum yet, this seals it and returns True.
        """
        with self.pin(record) as path:
            expected = self._page.sealed(record)
            found = _content_checksum(path)
            if expected is None:
                self._page.seal(record, found)
            return expected is None or found == expected

    def forget(self, record: CommitRecord) -> None:
        """Discard a snapshot. Does nothing if its slot is in use or already holds another snapshot."""
        slot = self._slots[record.slot]
        if not slot.acquire():
            return
        try:
            if self._page.read(record.slot) == record:
                self._page.forget(record.slot)
        finally:
            slot.release()

    def receive(
        self,
        generation: int,
        step: int,
        world_size: int,
        total_bytes: int,
        keep: frozenset[tuple[int, int]] | None = None,
    ) -> IncomingSnapshot:
        """Claim a slot for another member's snapshot; several threads may fill it part by part.

        This does not allocate memory yet. `IncomingSnapshot.back` does, and can still fail for lack of room.

        Raises:
            ArenaBusy: No slot is free.
            CorruptSnapshot: No snapshot can have the announced numbers. Nothing has changed.
            OSError: The slot cannot be mapped, or there is certainly not enough room.
        """
        if not 8 <= total_bytes < 2**63:
            raise CorruptSnapshot(f"a snapshot of {total_bytes} bytes was announced")
        try:
            _check(generation, step, world_size)
        except ValueError as error:
            raise CorruptSnapshot(str(error)) from None
        claimed = self._claim(keep)
        if claimed is None:
            raise ArenaBusy("no slot of the arena is free")
        slot, _ = claimed
        try:
            mapping = self._slots[slot].stretch(total_bytes)
            record = self._record(slot, generation, step, world_size, total_bytes)
            return IncomingSnapshot(self._page, self._slots[slot], record, mapping)
        except BaseException:
            self._slots[slot].release()
            raise

    def being_read(self) -> CommitRecord | None:
        """Return the snapshot that would be overwritten next if readers hold its slot; otherwise return None.

        A reader may hold the slot for as long as it takes to write a checkpoint to storage. The snapshot
        stays intact during this time.
        """
        record = self.next_overwritten()
        if record is None:
            return None
        slot = self._slots[record.slot]
        if slot.acquire():
            slot.release()
            return None
        try:
            descriptor = lock_shared(record.path)
        except FileNotFoundError:
            return None
        if descriptor is None:
            return None
        try:
            return record if self._page.read(record.slot) == record else None
        finally:
            unlock(descriptor)

    def back(self, total_bytes: int, begin: int) -> int:
        """Allocate memory in an empty slot for the part at `begin` of a snapshot of `total_bytes`.

        Returns the start of the next part, or -1 if there is no slot that is both empty and free. Raises
        OSError if there is no room.
        """
        slot = next((slot for slot in range(SNAPSHOT_SLOTS) if self._page.read(slot) is None), -1)
        if slot < 0 or not self._slots[slot].acquire():
            return -1
        try:
            if self._page.read(slot) is not None:  # a writer has filled the slot in the meantime
                return -1
            end = min(begin + BACKED_BYTES, total_bytes)
            self._slots[slot].stretch(total_bytes)
            self._slots[slot].back(begin, end)
            return end
        finally:
            self._slots[slot].release()

    def whole(self, total_bytes: int) -> tuple[mmap.mmap, ...]:
        """Return the mappings of the slots whose files have exactly the size `total_bytes`.

        No other thread may use this arena during the call. Raises OSError.
        """
        found = (slot.whole(total_bytes) for slot in self._slots)
        return tuple(mapping for mapping in found if mapping is not None)

    def note_cost(self, total_bytes: int, seconds: float) -> None:
        """Store how long a copy of a state of `total_bytes` took, for later generations."""
        self._page.note_cost(total_bytes, seconds)

    def cost_s(self, total_bytes: int) -> float:
        """Return the expected duration of a copy of `total_bytes` in seconds; 0 before the first copy."""
        return self._page.cost_s(total_bytes)

    def close(self) -> None:
        """Release the mappings and descriptors. Existing views remain valid."""
        for slot in self._slots:
            slot.close()

    def _record(
        self, slot: int, generation: int, step: int, world_size: int, total_bytes: int
    ) -> CommitRecord:
        path, sequence = self._page.paths[slot], self._page.next_sequence()
        return CommitRecord(slot, generation, step, world_size, total_bytes, path, sequence)

    def _complete(self, slot: int) -> CommitRecord | None:
        record = self._page.read(slot)
        if record is None:
            return None
        with suppress(OSError):
            if self._slots[slot].size_bytes() == record.total_bytes:
                return record
        return None

    def _claim(
        self,
        keep: frozenset[tuple[int, int]] | None,
        over: CommitRecord | None = None,
        new: tuple[int, int] | None = None,
    ) -> tuple[int, CommitRecord | None] | None:
        """Lock the slot to write to and invalidate its record; return the slot and its previous snapshot.

        The result is None if there is no such slot or it is locked. It is also None if the other slot already
        holds the state `new`, because all ranks of a member may try to write the same state, and one copy is
        enough.
        """
        before = self._page.raw()
        records = self.records()
        slot = _slot_to_write(records, keep, over)
        if slot is None or not self._slots[slot].acquire():
            return None
        held = any(_age(record) == new for record in records if record.slot != slot)
        # If the records have changed, another writer has committed a snapshot, possibly to this slot.
        if held or self._page.raw() != before:
            self._slots[slot].release()
            return None
        self._page.forget(slot)
        return slot, next((record for record in records if record.slot == slot), None)

    def _lock(self, record: CommitRecord) -> int:
        """Return a descriptor with a shared lock on the record's slot. Raises SnapshotGone."""
        give_up_at = time.monotonic() + PIN_PATIENCE_S
        while self._page.read(record.slot) == record and time.monotonic() < give_up_at:
            try:
                descriptor = lock_shared(record.path)
            except FileNotFoundError:
                break
            if descriptor is not None:
                return descriptor
            time.sleep(PIN_PAUSE_S)
        raise SnapshotGone(f"{_title(record)} was overwritten or is being overwritten")


def _slot_to_write(
    records: tuple[CommitRecord, ...], keep: frozenset[tuple[int, int]] | None, over: CommitRecord | None
) -> int | None:
    """Return an empty slot, or else the slot of the snapshot to overwrite; None if all must be kept."""
    if len(records) < SNAPSHOT_SLOTS:
        occupied = {record.slot for record in records}
        return next(slot for slot in range(SNAPSHOT_SLOTS) if slot not in occupied)
    overwritten = over if over in records else _next_overwritten(records, keep)
    return None if overwritten is None else overwritten.slot


def _next_overwritten(
    records: tuple[CommitRecord, ...], keep: frozenset[tuple[int, int]] | None
) -> CommitRecord | None:
    """Return the oldest snapshot that need not be kept; None if there is none, or if a slot is empty."""
    if len(records) < SNAPSHOT_SLOTS:
        return None
    # If both slots hold the same state, it is enough to keep one of them.
    by_age = {_age(record): record.slot for record in records if keep and _age(record) in keep}
    kept = set(by_age.values()) or {records[0].slot}
    return next((record for record in reversed(records) if record.slot not in kept), None)


def _check(generation: int, step: int, world_size: int) -> None:
    if not (0 <= generation < 2**63 and 0 <= step < 2**63 and 0 < world_size < 2**31):
        raise ValueError(
            f"a snapshot of generation {generation}, step {step}, world size {world_size}:"
            " expected 0 to 2^63 - 1, and 1 to 2^31 - 1 ranks"
        )


def _age(record: CommitRecord) -> tuple[int, int]:
    return record.generation, record.step


def _title(record: CommitRecord) -> str:
    return f"snapshot of generation {record.generation}, step {record.step}"


def _content_checksum(path: Path) -> int:
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping,
        memoryview(mapping) as content,
    ):
        return checksum.checksum(content)


class _ClaimedSlot:
    """A slot that `Arena._claim` has locked and whose record it has invalidated. `abandon` unlocks it."""

    __slots__ = ("_page", "_slot", "record")

    def __init__(self, page: CommitRecords, slot: Slot, record: CommitRecord) -> None:
        self._page = page
        self._slot: Slot | None = slot
        self.record = record  # `commit` or `finish_with` will write it

    def abandon(self) -> None:
        """Release the slot unless it is already released. Without a new record, the slot is empty."""
        slot, self._slot = self._slot, None
        if slot is not None:
            slot.release()


class SlotWriter(_ClaimedSlot):
    """A slot that this process fills until it calls `commit` or `abandon`. Leaving the context abandons it.

    `data` is the writable data area. The bytes of each tensor belong at the offset of its entry in `layout`.
    While the mapping stays the same, successive writers have the same `data` object, so callers may cache
    views of it by its identity. Such views may be written only while a writer is open.
    """

    __slots__ = ("before", "data", "layout")

    def __init__(
        self,
        page: CommitRecords,
        slot: Slot,
        record: CommitRecord,
        layout: Layout,
        data: memoryview,
        before: CommitRecord | None = None,
    ) -> None:
        """Take over a claimed slot.

        `before` is the slot's previous snapshot. If it has the same layout, `data` still holds its content.
        """
        super().__init__(page, slot, record)
        self.layout = layout
        self.data = data
        self.before = before

    def commit(self) -> CommitRecord:
        """Write the record and release the slot. Raises RuntimeError if the writer has already ended."""
        if self._slot is None:
            raise RuntimeError("the writer has ended")
        self._page.write(self.record)
        self.abandon()
        return self.record

    def __enter__(self) -> SlotWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abandon()


class IncomingSnapshot(_ClaimedSlot):
    """A slot that one or more threads fill with another member's snapshot, part by part."""

    __slots__ = ("memory",)

    def __init__(self, page: CommitRecords, slot: Slot, record: CommitRecord, mapping: mmap.mmap) -> None:
        super().__init__(page, slot, record)
        self.memory = mapping  # call `back` for a range before writing to that range

    @property
    def total_bytes(self) -> int:
        """The size of the snapshot, as announced by the sender."""
        return self.record.total_bytes

    def back(self, begin: int, end: int) -> None:
        """Allocate memory for a range. Raises OSError, or RuntimeError if the slot was released."""
        if self._slot is None:
            raise RuntimeError("the transfer has ended")
        self._slot.back(begin, end)

    def finish_with(self, crcs: Sequence[int], seal: int | None) -> CommitRecord:
        """Commit and seal the snapshot. Call this when all bytes are written.

        `crcs` are the checksums of the chunks. `seal` is the sender's checksum, or None if the sender has
        none.

        Raises:
            CorruptSnapshot: The checksum differs from `seal`. Nothing was committed.
            Malformed: The bytes are not a safetensors file. Nothing was committed.
        """
        if self._slot is None:
            raise RuntimeError("the transfer has ended")
        try:
            found = combine(crcs)
            if seal is not None and found != seal:
                raise CorruptSnapshot(f"checksum {found:08x}, expected {seal:08x}")
            parse(self.memory)
            self._page.write(self.record)
            self._page.seal(self.record, found)
        finally:
            self.abandon()
        return self.record
