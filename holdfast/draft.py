"""A slot of an arena while it is filled: by the rank's state, or by a peer's snapshot."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from types import TracebackType

from holdfast.checksum import combine
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

    __slots__ = ("_page", "_slot", "before", "data", "layout", "record")

    def __init__(
        self,
        page: RecordPage,
        slot: Slot,
        record: Record,
        layout: Layout,
        data: memoryview,
        before: Record | None = None,
    ) -> None:
        """`before` is the snapshot that the slot had: `data` is as it left it, if the layout is the same."""
        self._page = page
        self._slot: Slot | None = slot
        self.record = record
        self.layout = layout
        self.data = data
        self.before = before

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
    """A slot being filled with another member's snapshot, in parts and by any threads."""

    def __init__(self, page: RecordPage, slot: Slot, record: Record, mapping: mmap.mmap) -> None:
        self._page = page
        self._slot: Slot | None = slot
        self._record = record
        self.memory = mapping  # where the bytes go, after `back`

    @property
    def total_bytes(self) -> int:
        """What was announced."""
        return self._record.total_bytes

    def back(self, begin: int, end: int) -> None:
        """See that there is memory for a range. Raises OSError, RuntimeError after the end."""
        if self._slot is None:
            raise RuntimeError("the transfer has ended")
        self._slot.back(begin, end)

    def finish_with(self, crcs: Sequence[int], seal: int | None) -> Record:
        """Commit and seal the snapshot: all its bytes are there, and `crcs` are those of its chunks.

        Raises:
            Corrupt: Another checksum than that of the sender's seal; nothing was committed.
            Malformed: Not a safetensors file; nothing was committed.
        """
        if self._slot is None:
            raise RuntimeError("the transfer has ended")
        try:
            found = combine(crcs)
            if seal is not None and found != seal:
                raise Corrupt(f"checksum {found:08x}, announced was {seal:08x}")
            parse(self.memory)
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
