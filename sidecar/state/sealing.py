"""Compute checksums (seals) of snapshots during training, using a small share of a core.

Seals reveal later damage to a snapshot, and replicas that have diverged. To compare replicas, members must
seal the same steps, although slower members can seal fewer of them. Each member therefore doubles its
interval until it stays within its share, so a faster member seals every step that a slower member seals. A
snapshot that stays the newest for `LINGER_S` is sealed regardless of its step.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from holdfast.process.clock import seconds_to_next_tick
from holdfast.protocol.member_messages import MAX_SEALS, HeldChecksum
from holdfast.snapshot.arena import Arena, SnapshotGone
from holdfast.snapshot.commit_records import CommitRecord
from sidecar.state import background

log = logging.getLogger(__name__)

POLL_S = 0.25  # the time between two checks for a snapshot to seal; damage before the seal is not detected
SHARE = 0.003  # the share of a core that sealing may use
LINGER_S = 2.0  # a snapshot that has been the newest for this long is sealed regardless of its step
MOST = 1 << 20  # steps between two seals


class SnapshotSealer:
    """Seals a member's snapshots. `seals` contains the last seals of the newest generation, oldest first."""

    def __init__(
        self,
        arena: Arena,
        pace: Callable[[], tuple[int, float]],
        final: Callable[[CommitRecord], bool] = lambda _: True,
    ) -> None:
        """`pace` returns the snapshot interval in steps (0 if not fixed) and the step time in seconds.

        `final` returns False during the tail of the snapshot's step, because the snapshot may then be taken
        again. Until the tail ends, the snapshots of different members can differ.
        """
        self._arena = arena
        self._pace = pace
        self._final = final
        self._took_s = 0.0
        self._since: tuple[tuple[int, int], float] = ((0, -1), 0.0)
        # No snapshot of these steps is due before this time.
        self._idle_steps: tuple[int, ...] = ()
        self._idle_until_s = 0.0
        self.seals: tuple[HeldChecksum, ...] = ()

    async def run(self) -> None:
        """Check for a snapshot to seal at each tick until cancelled."""
        while True:
            await asyncio.sleep(seconds_to_next_tick(POLL_S))
            await self.seal_due(time.monotonic())

    async def seal_due(self, now_s: float) -> None:
        """Seal one snapshot if one is due."""
        steps = self._arena.steps()
        if steps == self._idle_steps and now_s < self._idle_until_s:
            return
        self._idle_steps, self._idle_until_s = steps, now_s
        record = self._due(self._arena.records(), now_s)
        if record is None:
            return
        try:
            crc, self._took_s = await background.run_in_background(_sealed, self._arena, record)
        except (SnapshotGone, OSError) as error:  # a newer snapshot is being written into the slot
            log.debug("not sealed", extra={"step": record.step, "error": str(error)})
            return
        same = [each for each in self.seals if each.generation == record.generation]
        self.seals = (*same, HeldChecksum(record.generation, record.step, record.total_bytes, crc))[
            -MAX_SEALS:
        ]

    def _due(self, records: tuple[CommitRecord, ...], now_s: float) -> CommitRecord | None:
        unsealed = [each for each in records if not self._arena.sealed(each)]
        open_ones = [each for each in unsealed if self._final(each)]
        every = self.every() if open_ones else 1
        for record in open_ones:
            if record.step % every == 0:
                return record
        if len(open_ones) == len(unsealed):  # otherwise, a tail may end at any time
            self._idle_until_s = now_s + LINGER_S
        if not open_ones or open_ones[0] != records[0]:
            return None
        newest = records[0]
        key = (newest.generation, newest.step)
        if key != self._since[0]:
            self._since = (key, now_s)
        due_s = self._since[1] + max(LINGER_S, self._took_s / SHARE)
        self._idle_until_s = min(self._idle_until_s, due_s)
        return newest if now_s >= due_s else None

    def every(self) -> int:
        """Return the interval between sealed steps: the shortest one that stays within `SHARE`."""
        unit, step_s = self._pace()
        every = max(unit, 1)
        while step_s > 0 and every < MOST and self._took_s > SHARE * step_s * every:
            every *= 2
        return every


def _sealed(arena: Arena, record: CommitRecord) -> tuple[int, float]:
    """Seal the snapshot; return its checksum and the CPU time of this thread in seconds.

    CPU time, unlike wall-clock time, excludes waits for other threads and processes.
    """
    began = time.thread_time()
    return arena.seal(record, threads=1), time.thread_time() - began
