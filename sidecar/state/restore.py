"""Fetch and check the state from which this member's ranks will restore, before they start."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from holdfast.checkpoint import catalog
from holdfast.checkpoint.manifest import private_name
from holdfast.protocol.launcher_messages import Launch, RankStart
from holdfast.protocol.lineage import valid
from holdfast.protocol.member_messages import HeldSnapshot, MemberOrder, StateSource
from holdfast.snapshot.arena import ArenaBusy
from sidecar.state import background
from sidecar.state.holdings import Holdings
from sidecar.state.peers import PeerClient
from sidecar.state.snapshot_fetch import FetchFailed

log = logging.getLogger(__name__)

ROOM_S = 10.0  # for a slot to become free
ROOM_LOOK_S = 0.01
VOLUME_S = 5.0  # for a full memory volume: the kernel may still be freeing the memory of a lost member
VOLUME_LOOK_S = 0.25


LocalStart: TypeAlias = "tuple[Launch, tuple[RankStart, ...]]"


class StateUnavailable(Exception):
    """This member cannot obtain the state. `slot` is its own snapshot if damage to that is the reason."""

    def __init__(self, why: str, slot: HeldSnapshot | None = None) -> None:
        super().__init__(why)
        self.slot = slot


class NoFreeSlot(StateUnavailable):
    """No slot was free for the state. The state itself may be good."""


class VolumeRefused(StateUnavailable):
    """The memory volume had no room for the state. The state itself may be good."""


class Restorer:
    """Prepares the state that an order to run names, so that all its paths exist on this member."""

    def __init__(self, holdings: Holdings, fetcher: PeerClient, checkpoints: Path) -> None:
        """`checkpoints` is this member's path to the storage; the supervisor's may differ."""
        self._checkpoints = checkpoints
        self._holdings = holdings
        self._fetcher = fetcher
        self._newest = 0  # the newest generation that was ordered

    async def prepare(self, order: MemberOrder, free_a_slot: Callable[[], object]) -> LocalStart:
        """Return the launch and ranks with local paths. Raises `StateUnavailable`; safe to repeat.

        While no slot is free, call `free_a_slot` repeatedly: a rank of the previous generation that is
        stopped or stuck during a copy would never release its slot. A slot from which a checkpoint is being
        written stays in use for as long as storage takes, so the newer snapshot is overwritten in that case:
        see `_snapshot_to_keep`. Raises `NoFreeSlot` if neither slot becomes available in `ROOM_S`.

        If the memory volume is full, remove the files that no start needs and retry for `VOLUME_S`. Raises
        `VolumeRefused`, with the free space in the message, if there is still no room.
        """
        give_up_at, refused_until, keep = math.inf, math.inf, None
        while True:
            try:
                return await self._prepare(order, keep)
            except ArenaBusy as error:
                late = time.monotonic() > give_up_at
                if late and keep is not None:
                    raise NoFreeSlot(str(error)) from None
                # The limit begins with the first refusal, because the work before it may have taken long.
                give_up_at = min(give_up_at, time.monotonic() + ROOM_S)
                keep = self._snapshot_to_keep(order, late)
                if late and keep is None:
                    raise NoFreeSlot(str(error)) from None
                again_s = ROOM_LOOK_S
            except OSError as error:
                refused_until = min(refused_until, time.monotonic() + VOLUME_S)
                if time.monotonic() > refused_until:
                    raise VolumeRefused(self._refused(error)) from None
                with suppress(OSError):  # the files that it removes may make enough room
                    await self._forget(order)
                again_s = VOLUME_LOOK_S
            free_a_slot()
            await asyncio.sleep(again_s)

    def _refused(self, error: OSError) -> str:
        """Return a message with the error, the mount point of the memory volume, and its free space."""
        folder = self._holdings.directory
        volume = next(each for each in (folder, *folder.parents) if os.path.ismount(each))
        why = error.strerror or str(error)
        try:
            found = os.statvfs(folder)
        except OSError as gone:
            return f"{why}; the memory volume {volume}: {gone}"
        return f"{why}; the memory volume {volume} has {found.f_bavail * found.f_frsize:,} bytes free"

    def _snapshot_to_keep(self, order: MemberOrder, late: bool) -> frozenset[tuple[int, int]] | None:
        """Return the older snapshot if it is being read: the fetch must overwrite the newer one instead.

        Meanwhile this member could still resume from the older snapshot, and other members hold the one that
        is being fetched. Returns None if no snapshot is being read. Also returns None if the one being read
        is void, until it is `late`: its reader is given time to finish first.
        """
        record = self._holdings.arena.being_read()
        if record is None or not (late or valid(record.generation, record.step, order.lineage)):
            return None
        return frozenset({(record.generation, record.step)})

    async def preallocate(self, total_bytes: int, wanted: Callable[[], bool]) -> None:
        """Allocate memory in advance in a free slot for a snapshot of `total_bytes`, while that is `wanted`.

        It is allocated piece by piece in the background, so the slot remains available for other use.
        """
        begin = 0
        while wanted() and 0 <= begin < total_bytes:
            try:
                begin = await background.run_in_background(self._holdings.arena.back, total_bytes, begin)
            except OSError as error:  # if a fetch follows, it reports the error
                log.info("memory not allocated ahead", extra={"bytes": total_bytes, "error": str(error)})
                return

    async def _prepare(self, order: MemberOrder, keep: frozenset[tuple[int, int]] | None) -> LocalStart:
        launch = order.launch
        assert launch is not None
        self._newest = max(self._newest, launch.generation)
        self._refuse_older(launch)
        if launch.restore is None:
            return launch, order.ranks
        if launch.restore.source == "checkpoint":
            return await self._from_checkpoint(launch, order.ranks)
        path = await self._snapshot(launch, order.sources, keep)
        self._refuse_older(launch)
        await self._forget(order)  # before the new files are written, because they may need the room
        ranks = tuple([replace(rank, private=await self._private(rank, order)) for rank in order.ranks])
        restore = replace(launch.restore, path=str(path), other=self._other(order))
        return replace(launch, restore=restore), ranks

    def _refuse_older(self, launch: Launch) -> None:
        if launch.generation < self._newest:
            raise StateUnavailable(f"generation {self._newest} was ordered meanwhile")

    async def _forget(self, order: MemberOrder) -> None:
        """Remove the files that no start needs, in a thread: the kernel takes 0.25 s for each gigabyte."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self._holdings.forget_restored, _privates(order))

    def _other(self, order: MemberOrder) -> tuple[int, ...]:
        """Return the generation and step of this member's other valid snapshot; () if there is none."""
        assert order.launch is not None
        assert order.launch.restore is not None
        wanted = (order.launch.restore.generation, order.launch.restore.step)
        for each in self._holdings.slots():
            age = (each.generation, each.step)
            if age != wanted and valid(*age, order.lineage):
                return age
        return ()

    async def _snapshot(
        self, launch: Launch, sources: Iterable[StateSource], keep: frozenset[tuple[int, int]] | None
    ) -> Path:
        assert launch.restore is not None
        wanted = launch.restore
        record = self._holdings.record(wanted.generation, wanted.step)
        loop = asyncio.get_running_loop()
        damaged: HeldSnapshot | None = None
        if record is not None:
            if await loop.run_in_executor(None, self._holdings.good, record):
                return record.path
            damaged = HeldSnapshot(wanted.generation, wanted.step, record.total_bytes)
            self._holdings.arena.forget(record)
        why = f"no member has the snapshot of step {wanted.step}"
        if damaged is not None:
            why = f"the snapshot of step {wanted.step} here fails its checksum"
            log.warning("snapshot damaged", extra={"step": wanted.step, "generation": wanted.generation})
        holders = [source for source in sources if source.rank < 0]
        if holders:
            try:
                return (await self._fetcher.snapshot(*holders, keep=keep)).path
            except FetchFailed as error:
                why = why if damaged else str(error)
        raise StateUnavailable(why, damaged)

    async def _private(self, rank: RankStart, order: MemberOrder) -> str:
        assert order.launch is not None
        assert order.launch.restore is not None
        step = order.launch.restore.step
        why = f"no member has the private state of rank {rank.rank}"
        for source in order.sources:
            if (source.rank, source.step) != (rank.rank, step):
                continue
            loop = asyncio.get_running_loop()
            key = (rank.rank, source.generation, source.step)
            found = await loop.run_in_executor(None, self._holdings.private, *key)
            try:
                data = found.data if found else await self._fetcher.private(source)
            except FetchFailed as error:
                why = str(error)
                continue
            return str(await loop.run_in_executor(None, self._holdings.keep_restored, *key, data))
        raise StateUnavailable(why)

    async def _from_checkpoint(self, launch: Launch, ranks: tuple[RankStart, ...]) -> LocalStart:
        """Verify all files of a checkpoint, and return the launch and ranks with the paths of their files."""
        wanted = launch.restore
        assert wanted is not None
        path = self._checkpoints / Path(wanted.path).name
        loop = asyncio.get_running_loop()

        def check() -> str | None:
            found = catalog.load(path)
            if (found.generation, found.step) != (wanted.generation, wanted.step):
                return f"it is of generation {found.generation}, expected {wanted.generation}"
            return catalog.verify(found)

        try:
            wrong = await loop.run_in_executor(None, check)
        except (OSError, ValueError) as error:
            wrong = str(error)
        if wrong:
            raise StateUnavailable(f"checkpoint {path.name}: {wrong}")
        files = tuple(replace(r, private=str(path / private_name(r.rank))) for r in ranks)
        return replace(launch, restore=replace(wanted, path=str(path))), files


def _privates(order: MemberOrder) -> frozenset[tuple[int, int, int]]:
    """Return the rank, generation and step of each private state from which the group may start."""
    return frozenset((each.rank, each.generation, each.step) for each in order.sources if each.rank >= 0)
