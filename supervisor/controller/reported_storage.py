"""Track a job's checkpoints from its members' reports, when only they can read its storage."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace

from holdfast.protocol.member_messages import (
    CheckpointReport,
    ListedCheckpoint,
    MemberReport,
    StorageListing,
)
from supervisor.view.model import UNREAD, Checkpoint, StorageContents, UnusableCheckpoint

POLL_S = 2.0  # the longest time between two checks of the members' newest listings


class ReportedStorage:
    """Provides the storage's contents from members' listings. Replaces a `CheckpointIndex`.

    All members of a job see the same storage, so any member's listing is valid. Checkpoints are not verified
    in advance, because members verify the checkpoint that they restore.
    """

    def __init__(
        self,
        reports: Callable[[], Iterable[MemberReport]],
        changed: Callable[[], object],
        *,
        is_durable: bool = True,
    ) -> None:
        """`reports` returns the newest report of each connected member.

        If `is_durable` is false, each pod keeps its checkpoints in its own volume. No other pod can read this
        volume, and it is lost with the pod, so its checkpoints are ignored.
        """
        self._is_durable = is_durable
        self._reports = reports
        self._changed = changed
        self._is_due = asyncio.Event()  # set when a member may have reported a new listing
        self._listing: StorageListing | None = None
        self.stored = StorageContents(error=UNREAD, failed_ns=time.monotonic_ns())

    async def run(self) -> None:
        """Follow the members' listings as they change. Never returns."""
        while True:
            self._is_due.clear()
            if self._update():
                self._changed()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._is_due.wait(), POLL_S)

    def request_rescan(self) -> None:
        """Do nothing, because members list the storage at short intervals and after each checkpoint."""

    def on_report(self, durable: CheckpointReport) -> None:
        """Check the members' listings now. A listing includes the last save request of its member."""
        self._is_due.set()

    def doubt(self) -> None:
        """Do nothing, because every restore verifies what it reads."""

    def verify(self, doubted: Checkpoint | None) -> None:
        """Do nothing, because every restore verifies what it reads."""

    def _update(self) -> bool:
        """Adopt the best listing. Return False if nothing has changed.

        The time limit for failing storage does not start while no member reports on the storage, because
        pods can be pending for hours.
        """
        listings = [each.storage for each in self._reports() if each.storage is not None]
        good = [each for each in listings if not each.error and each.number]
        if not good:
            error = next((each.error for each in listings if each.error), UNREAD)
            new = error != self.stored.error
            if new or not listings:
                lasts = bool(self.stored.error and listings)
                failed_ns = self.stored.failed_ns if lasts else time.monotonic_ns()
                self.stored = replace(self.stored, error=error, failed_ns=failed_ns)
            return new
        newest = max(good, key=_age)
        if newest == self._listing and not self.stored.error:
            return False
        self._listing = newest
        self.stored = StorageContents(
            tuple(_checkpoint(each) for each in newest.checkpoints if self._is_durable),
            tuple(
                UnusableCheckpoint(each.name, each.step, each.why)
                for each in newest.refused
                if self._is_durable
            ),
            newest.lineage,
            newest.generation,
            looked_ns=time.monotonic_ns(),
            heard=newest.asked,
            epoch=newest.epoch,
        )
        return True


def _age(listing: StorageListing) -> tuple[float, int, int, int]:
    """Return a key that sorts listings by their newest checkpoint.

    Among listings with the same newest checkpoint, the one with the newest handled save request sorts last,
    because it includes the result of that request.
    """
    newest = listing.checkpoints[0] if listing.checkpoints else None
    created, step = (newest.created, newest.step) if newest else (0.0, -1)
    return created, step, listing.asked, listing.number


def _checkpoint(found: ListedCheckpoint) -> Checkpoint:
    return Checkpoint(found.step, found.generation, found.world_size, found.name, found.skip, verified=True)
