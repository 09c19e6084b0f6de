"""Compute the checksums (seals) of snapshots during training, with a small share of a core.

A seal reveals a snapshot that was damaged later, and replicas that are no longer equal. For the latter all
members must seal the same steps although each has its own pace: they seal the steps whose count of intervals
is a multiple of a power of two, so the steps of a slower member are among those of a faster one. A snapshot
that nothing replaces for a while is sealed whatever its step is.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from holdfast.process.clock import seconds_to_next_tick
from holdfast.protocol.member_messages import HeldChecksum
from holdfast.snapshot.arena import Arena, SnapshotGone
from holdfast.snapshot.commit_records import CommitRecord
from sidecar.state import background

log = logging.getLogger(__name__)

LOOK_S = 0.25  # a bit that flips in a snapshot before its seal is not detected
SHARE = 0.003  # of a core
LINGER_S = 2.0  # how long a snapshot stays the newest before it is sealed whatever its step
KEPT = 8  # seals reported
MOST = 1 << 20


class SnapshotSealer:
    """One member's. `seals` are the last of the newest generation, oldest first."""

    def __init__(
        self,
        arena: Arena,
        pace: Callable[[], tuple[int, float]],
        final: Callable[[CommitRecord], bool] = lambda _: True,
    ) -> None:
        """`pace` gives the steps of a fixed interval (0: there is none) and the seconds of a step.

        `final` is False for a snapshot that may be made again with what the script changes after the commit:
        members at different points of that have different ones.
        """
        self._arena = arena
        self._pace = pace
        self._final = final
        self._took_s = 0.0
        self._since: tuple[tuple[int, int], float] = ((0, -1), 0.0)
        self.seals: tuple[HeldChecksum, ...] = ()

    async def run(self) -> None:
        """Seal at each tick, until cancelled."""
        while True:
            await asyncio.sleep(seconds_to_next_tick(LOOK_S))
            await self.look(time.monotonic())

    async def look(self, now_s: float) -> None:
        """Seal one snapshot, if it is the turn of one."""
        record = self._due(self._arena.records(), now_s)
        if record is None:
            return
        try:
            crc, self._took_s = await background.run_in_background(_sealed, self._arena, record)
        except (SnapshotGone, OSError) as error:  # a newer one is being written into it
            log.debug("not sealed", extra={"step": record.step, "error": str(error)})
            return
        same = [each for each in self.seals if each.generation == record.generation]
        self.seals = (*same, HeldChecksum(record.generation, record.step, record.total_bytes, crc))[-KEPT:]

    def _due(self, records: tuple[CommitRecord, ...], now_s: float) -> CommitRecord | None:
        open_ones = [each for each in records if not self._arena.sealed(each) and self._final(each)]
        every = self.every()
        for record in open_ones:
            if record.step % every == 0:
                return record
        if not open_ones or open_ones[0] != records[0]:
            return None
        newest = records[0]
        key = (newest.generation, newest.step)
        if key != self._since[0]:
            self._since = (key, now_s)
        return newest if now_s - self._since[1] >= max(LINGER_S, self._took_s / SHARE) else None

    def every(self) -> int:
        """Return the steps whose multiples are sealed: the fewest that keep within the share."""
        unit, step_s = self._pace()
        every = max(unit, 1)
        while step_s > 0 and every < MOST and self._took_s > SHARE * step_s * every:
            every *= 2
        return every


def _sealed(arena: Arena, record: CommitRecord) -> tuple[int, float]:
    """Return the checksum, and the CPU seconds it took, all of them this thread's.

    Wall-clock time would include waiting for other threads and processes.
    """
    began = time.thread_time()
    return arena.seal(record, threads=1), time.thread_time() - began
