"""List the checkpoints on storage, for reports to a supervisor that cannot read the storage."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace

from holdfast.checkpoint.directory import DirectoryStorage
from holdfast.checkpoint.listing import ListingReader
from holdfast.checkpoint.storage import CheckpointStorage
from holdfast.fileio.storage_thread import StorageThread
from holdfast.process import event_loop
from holdfast.protocol.foreign_text import shortened
from holdfast.protocol.member_messages import MAX_LISTED, StorageListing

EVERY_S = 10.0  # the time between two listings; other members also write checkpoints
# The same if each request costs money. The member that writes a checkpoint lists immediately afterwards.
PAID_EVERY_S = 60.0
ANSWER_S = 30.0  # a listing that takes longer is treated as failed, although storage may still complete it
MAX_WHY_BYTES = 300


class StorageLister:
    """Keeps `listing` up to date. A thread reads the storage, because storage can block."""

    def __init__(
        self, storage: CheckpointStorage, changed: Callable[[], None], asked: Callable[[], int]
    ) -> None:
        """`changed` is called when `listing` changes.

        `asked` returns the number of the last save request that was handled.
        """
        self._asked = asked
        self.listing = StorageListing(error="it has not been read yet")
        self._reader = ListingReader(storage, MAX_LISTED)
        self._is_paid = not isinstance(storage, DirectoryStorage)
        self._changed = changed
        self._files = StorageThread("listing")
        self._wanted = asyncio.Event()

    def request(self) -> None:
        """Request a listing as soon as possible."""
        self._wanted.set()

    async def run(self) -> None:
        """List now, every `EVERY_S` or `PAID_EVERY_S`, and on every request. Never returns."""
        while True:
            self._wanted.clear()
            before, self.listing = self.listing, await self._list()
            if replace(before, number=self.listing.number) != self.listing:
                self._changed()
            pause_s = PAID_EVERY_S if self._is_paid and not self.listing.error else EVERY_S
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wanted.wait(), pause_s)

    async def _list(self) -> StorageListing:
        number, asked = self.listing.number + 1, self._asked()
        try:
            found = await event_loop.result_of(self._files.submit(self._reader.read, "list"), ANSWER_S)
        except OSError as error:
            why = shortened(str(error), MAX_WHY_BYTES)
            return replace(self.listing, number=number, error=why, asked=asked)
        refused = tuple(replace(each, why=shortened(each.why, MAX_WHY_BYTES)) for each in found.refused)
        return replace(found, number=number, refused=refused, asked=asked)
