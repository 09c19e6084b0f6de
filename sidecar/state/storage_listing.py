"""List the checkpoints on storage for the reports to a supervisor that cannot read the storage itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from holdfast.checkpoint.listing import ListingReader
from holdfast.fileio.storage_thread import StorageThread
from holdfast.process import event_loop
from holdfast.protocol.foreign_text import shortened
from holdfast.protocol.member_messages import StorageListing

EVERY_S = 10.0  # between two listings, because other members also write checkpoints
ANSWER_S = 30.0  # after this time a listing counts as failed, although storage may still be working on it
MAX_LISTED = 64  # how many of the newest checkpoints are listed
MAX_WHY_BYTES = 300


class StorageLister:
    """Keeps `listing` up to date. A thread reads the storage, which may block."""

    def __init__(self, root: Path, changed: Callable[[], None], asked: Callable[[], int]) -> None:
        """`changed` is called when the listing changes. `asked` returns the newest answered save order."""
        self._asked = asked
        self.listing = StorageListing(error="it has not been read yet")
        self._reader = ListingReader(root, MAX_LISTED)
        self._changed = changed
        self._files = StorageThread("listing")
        self._wanted = asyncio.Event()

    def request(self) -> None:
        """Request a listing as soon as possible."""
        self._wanted.set()

    async def run(self) -> None:
        """List now, every `EVERY_S`, and at every request. Never returns."""
        while True:
            self._wanted.clear()
            before, self.listing = self.listing, await self._list()
            if replace(before, number=self.listing.number) != self.listing:
                self._changed()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wanted.wait(), EVERY_S)

    async def _list(self) -> StorageListing:
        number, asked = self.listing.number + 1, self._asked()
        try:
            found = await event_loop.result_of(self._files.submit(self._reader.read, "list"), ANSWER_S)
        except OSError as error:
            why = shortened(str(error), MAX_WHY_BYTES)
            return replace(self.listing, number=number, error=why, asked=asked)
        refused = tuple(replace(each, why=shortened(each.why, MAX_WHY_BYTES)) for each in found.refused)
        return replace(found, number=number, refused=refused, asked=asked)
