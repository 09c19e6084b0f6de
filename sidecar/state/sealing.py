"""Give snapshots their checksum beside the training, with a small share of a core.

A seal tells a snapshot that was damaged later, and replicas that are no longer equal. For the second all
members must seal the same steps though each has a pace of its own: so it is those whose count of intervals is
a multiple of a power of two, and whoever seals less often has a multiple of everybody's. A snapshot that
nothing replaces for a while is sealed whatever its step is.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import ParamSpec, TypeVar

from holdfast.process.clock import seconds_to_next_tick
from holdfast.protocol.member_messages import HeldChecksum
from holdfast.snapshot.arena import Arena, SnapshotGone
from holdfast.snapshot.commit_records import CommitRecord

log = logging.getLogger(__name__)

LOOK_S = 0.25  # a bit that flips before that goes unseen
SHARE = 0.003  # of a core
LINGER_S = 2.0  # that a snapshot stays before it is sealed out of turn
KEPT = 8  # seals told
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
        """Look for ever."""
        while True:
            await asyncio.sleep(seconds_to_next_tick(LOOK_S))
            await self.look(time.monotonic())

    async def look(self, now_s: float) -> None:
        """Seal one snapshot, if it is the turn of one."""
        record = self._due(self._arena.records(), now_s)
        if record is None:
            return
        try:
            crc, self._took_s = await run_in_background(_sealed, self._arena, record)
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

    By the clock it waits for everybody else.
    """
    began = time.thread_time()
    return arena.seal(record, threads=1), time.thread_time() - began


# Work beside the training that may take its time: a thread that yields its core to everybody else.
#
# What it starts inherits that. On machines whose ranks take every core, hashing a snapshot at the same
# priority would cost every rank of the group the time that it costs one.


NICE = 19

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _yield_to_all() -> None:
    with suppress(OSError):  # a container may forbid it; then it is as important as we are
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


_pool = ThreadPoolExecutor(2, "background", initializer=_yield_to_all)


async def run_in_background(work: Callable[_P, _R], *args: _P.args, **named: _P.kwargs) -> _R:
    """Return what `work` returns, or raise what it raises, without holding up the event loop."""
    return await asyncio.get_running_loop().run_in_executor(_pool, lambda: work(*args, **named))
