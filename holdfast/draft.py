"""A slot of an arena while it is filled: by the rank's state, or by a peer's snapshot."""

from __future__ import annotations

import mmap
from types import TracebackType

from holdfast.checksum import Running
from holdfast.records import Record, RecordPage
from holdfast.safetensors import Layout, parse
from holdfast.slot import Slot


class Corrupt(ValueError):
    """The bytes that came are not the snapshot that was announced."""


class Draft:
    """A slot being filled. Ends with `commit` or `abandon`; as a context manager it abandons.

    `data` is the writable data area: tensor bytes go to the offsets of `layout`'s entries. It is
    the same object as in the draft before as long as the mapping is, so views may be cached by
    its identity; write to them only while a draft is open.
    """

    __slots__ = ("_page", "_slot", "data", "layout", "record")

    def __init__(
        self, page: RecordPage, slot: Slot, record: Record, layout: Layout, data: memoryview
    ) -> None:
        self._page = page
        self._slot: Slot | None = slot
        self.record = record
        self.layout = layout
        self.data = data

    def commit(self) -> Record:
        """Declare the slot complete and let go of it. Raises RuntimeError if the draft ended."""
        if self._slot is None:
            raise RuntimeError("the draft has ended")
        self._page.write(self.record)
        self.abandon()
        return self.record

    def abandon(self) -> None:
        """Let go of the slot, which stays without a record. Nothing happens after the end."""
        slot, self._slot = self._slot, None
        if slot is not None:
            slot.release()

    def __enter__(self) -> Draft:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abandon()


class Incoming:
    """A slot being filled with another member's snapshot, piece by piece."""

    def __init__(self, page: RecordPage, slot: Slot, record: Record, mapping: mmap.mmap) -> None:
        self._page = page
        self._slot: Slot | None = slot
        self._record = record
        self._mapping = mapping
        self._running = Running()
        self.received_bytes = 0

    @property
    def total_bytes(self) -> int:
        """What was announced."""
        return self._record.total_bytes

    def write(self, piece: bytes | memoryview) -> None:
        """Take in the next piece. Raises Corrupt when more comes than was announced."""
        end = self.received_bytes + len(piece)
        if end > self._record.total_bytes:
            raise Corrupt(f"more than the announced {self._record.total_bytes} bytes came")
        self._mapping[self.received_bytes : end] = piece
        self._running.update(piece)
        self.received_bytes = end

    def finish(self, checksum: int) -> Record:
        """Commit and seal the snapshot if it is whole and has `checksum`.

        Raises:
            Corrupt: Too short, or another checksum than announced; nothing was committed.
            Malformed: Not a safetensors file; nothing was committed.
        """
        if self._slot is None:
            raise RuntimeError("the transfer has ended")
        try:
            total = self._record.total_bytes
            if self.received_bytes != total:
                raise Corrupt(f"{self.received_bytes} of the announced {total} bytes came")
            found = self._running.checksum()
            if found != checksum:
                raise Corrupt(f"checksum {found:08x}, announced was {checksum:08x}")
            parse(self._mapping)
            self._page.write(self._record)
            self._page.seal(self._record, found)
        finally:
            self.abandon()
        return self._record

    def abandon(self) -> None:
        """Let go of the slot, which stays without a record. Nothing happens after the end."""
        slot, self._slot = self._slot, None
        if slot is not None:
            slot.release()
