"""Before this member's ranks start, fetch and verify the state that they will restore."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from holdfast.checkpoint.manifest import REPLICATED, InvalidCheckpoint, private_name
from holdfast.checkpoint.storage import CheckpointStorage
from holdfast.protocol.launcher_messages import Launch, RankStart
from holdfast.protocol.lineage import valid
from holdfast.protocol.member_messages import HeldSnapshot, MemberOrder, StateSource
from holdfast.snapshot.arena import ArenaBusy
from sidecar.state import background
from sidecar.state.holdings import Holdings
from sidecar.state.peers import PeerClient
from sidecar.state.snapshot_fetch import FetchFailed

log = logging.getLogger(__name__)

ROOM_S = 10.0  # how long to wait for a free slot
ROOM_POLL_S = 0.01
# How long to retry if the memory volume is full, because the kernel may still be freeing a lost member's
# memory.
VOLUME_S = 5.0
AT_ONCE_BYTES = 16 << 20  # files of private states up to this size are handled without a thread
VOLUME_POLL_S = 0.25
STORAGE_S = 60.0  # how long to retry if storage fails or the disk is full; the parts read so far are kept
STORAGE_POLL_S = 5.0


LocalStart: TypeAlias = "tuple[Launch, tuple[RankStart, ...]]"


class StateUnavailable(Exception):
    """This member cannot obtain the state. `slot` is its own snapshot of the state if that is damaged."""

    def __init__(self, why: str, slot: HeldSnapshot | None = None) -> None:
        super().__init__(why)
        self.slot = slot


class NoFreeSlot(StateUnavailable):
    """No slot was free for the state. The state itself may be good."""


class VolumeRefused(StateUnavailable):
    """The memory volume had no room for the state. The state itself may be good."""


class StorageFailed(StateUnavailable):
    """Storage could not be read, or there was no room for a copy. The checkpoint itself may be good."""


class Restorer:
    """Puts the state that an order to run requires into files on this member."""

    def __init__(self, holdings: Holdings, fetcher: PeerClient, storage: CheckpointStorage) -> None:
        """`storage` is this member's access to the checkpoints, which may differ from the supervisor's."""
        self._storage = storage
        # When storage last delivered a part of the checkpoint being read, or when the read began; inf
        # otherwise.
        self._reading_since_s = math.inf
        self._holdings = holdings
        self._fetcher = fetcher
        self._newest = 0  # the newest generation that this member was ordered to run

    async def prepare(self, order: MemberOrder, free_a_slot: Callable[[], object]) -> LocalStart:
        """Return the order's launch and ranks with local paths. Raises `StateUnavailable`; safe to repeat.

        While no slot is free, this calls `free_a_slot` repeatedly, because a rank of the previous generation
        that is stopped or stuck in a copy would never release its slot. If a checkpoint is being written from
        a slot, that slot remains in use for as long as storage takes. The newer snapshot is then overwritten
        instead (see `_snapshot_to_keep`). Raises `NoFreeSlot` if neither slot becomes available within
        `ROOM_S`.

        If the memory volume is full, this removes the files that no start needs, and retries for `VOLUME_S`.
        Raises `VolumeRefused`, whose message includes the free space, if there is still no room.
        """
        give_up_at, refused_until, keep = math.inf, math.inf, None
        while True:
            try:
                return await self._prepare(order, keep)
            except ArenaBusy as error:
                late = time.monotonic() > give_up_at
                if late and keep is not None:
                    raise NoFreeSlot(str(error)) from None
                # The limit is counted from the first refusal, because the work before it can take a long
                # time.
                give_up_at = min(give_up_at, time.monotonic() + ROOM_S)
                keep = self._snapshot_to_keep(order, late)
                if late and keep is None:
                    raise NoFreeSlot(str(error)) from None
                again_s = ROOM_POLL_S
            except OSError as error:
                refused_until = min(refused_until, time.monotonic() + VOLUME_S)
                if time.monotonic() > refused_until:
                    raise VolumeRefused(self._refused(error)) from None
                with suppress(OSError):  # removing these files may make enough room
                    await asyncio.get_running_loop().run_in_executor(None, self._forget, order)
                again_s = VOLUME_POLL_S
            free_a_slot()
            await asyncio.sleep(again_s)

    def _refused(self, error: OSError) -> str:
        """Return a message that contains the error, and the memory volume's mount point and free space."""
        folder = self._holdings.directory
        volume = next(each for each in (folder, *folder.parents) if os.path.ismount(each))
        why = error.strerror or str(error)
        try:
            found = os.statvfs(folder)
        except OSError as gone:
            return f"{why}; the memory volume {volume}: {gone}"
        return f"{why}; the memory volume {volume} has {found.f_bavail * found.f_frsize:,} bytes free"

    def _snapshot_to_keep(self, order: MemberOrder, late: bool) -> frozenset[tuple[int, int]] | None:
        """Return the snapshot that is being read; the fetch then overwrites the other one.

        This is safe: during the fetch, this member can still resume from the returned snapshot, and other
        members hold the one being fetched. Return None if no snapshot is being read. If the snapshot is void,
        return None until `late` is True, to give its reader time to finish.
        """
        record = self._holdings.arena.being_read()
        if record is None or not (late or valid(record.generation, record.step, order.lineage)):
            return None
        return frozenset({(record.generation, record.step)})

    async def preallocate(self, total_bytes: int, wanted: Callable[[], bool]) -> None:
        """Preallocate `total_bytes` for a snapshot in a free slot, while `wanted` returns True.

        The memory is allocated in pieces in the background, and the slot remains available for other uses.
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
        if self._holdings.private_bytes() <= AT_ONCE_BYTES:
            held = self._keep_held(order)
        else:
            held = await asyncio.get_running_loop().run_in_executor(None, self._keep_held, order)
        ranks = tuple(
            [
                replace(rank, private=held.get(rank) or await self._private(rank, order))
                for rank in order.ranks
            ]
        )
        restore = replace(launch.restore, path=str(path), other=self._other(order))
        return replace(launch, restore=restore), ranks

    def _refuse_older(self, launch: Launch) -> None:
        if launch.generation < self._newest:
            raise StateUnavailable(f"generation {self._newest} was ordered in the meantime")

    def _forget(self, order: MemberOrder) -> None:
        """Remove the files that no start needs. Call this in a thread: it takes 0.25 s per gigabyte."""
        assert order.launch is not None
        assert order.launch.restore is not None
        self._holdings.forget_restored(_privates(order), order.launch.restore.step)

    def _keep_held(self, order: MemberOrder) -> dict[RankStart, str]:
        """Store the private states that this member holds itself, and return their files.

        Call this in a thread if they are large. Otherwise the switch to a thread and back takes longer than
        the work: several milliseconds on a busy machine.
        """
        self._forget(order)  # before the new files are written, because they may need the room
        found: dict[RankStart, str] = {}
        for rank in order.ranks:
            source = next(_private_sources(rank, order), None)
            if source is not None:
                key = (rank.source, source.generation, source.step)
                held = self._holdings.private(*key)
                if held is not None:
                    found[rank] = str(self._holdings.keep_restored(*key, held.data))
        return found

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
        damaged: HeldSnapshot | None = None
        if record is not None:
            if not self._holdings.arena.sealed(record):  # so there is no checksum to compare
                return record.path
            if await asyncio.get_running_loop().run_in_executor(None, self._holdings.good, record):
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
        why = f"no member has the private state of rank {rank.source}"
        for source in _private_sources(rank, order):
            source = replace(source, rank=rank.source, count=1)
            loop = asyncio.get_running_loop()
            key = (rank.source, source.generation, source.step)
            found = await loop.run_in_executor(None, self._holdings.private, *key)
            try:
                data = found.data if found else await self._fetcher.private(source)
            except FetchFailed as error:
                why = str(error)
                continue
            return str(await loop.run_in_executor(None, self._holdings.keep_restored, *key, data))
        raise StateUnavailable(why)

    @property
    def unread_s(self) -> float:
        """Seconds since storage delivered a part of the checkpoint being read; -1 if none is being read."""
        since_s = self._reading_since_s
        return -1.0 if since_s == math.inf else time.monotonic() - since_s

    async def forget_copies(self) -> None:
        """Remove the local copies of checkpoints. Call this once all ranks have restored from them."""
        await background.run_in_background(self._storage.forget_copies)

    async def _from_checkpoint(self, launch: Launch, ranks: tuple[RankStart, ...]) -> LocalStart:
        """Return the launch and the ranks with paths to verified local copies of a checkpoint's files."""
        wanted = launch.restore
        assert wanted is not None
        name = Path(wanted.path).name
        names = [REPLICATED, *dict.fromkeys(private_name(each.source) for each in ranks)]

        def moved() -> None:
            self._reading_since_s = time.monotonic()

        def obtain() -> tuple[Path, str | None]:
            found = self._storage.load(name)
            if (found.generation, found.step) != (wanted.generation, wanted.step):
                raise InvalidCheckpoint(f"its generation is {found.generation}, expected {wanted.generation}")
            return self._storage.local_copy(found, names, moved)

        moved()
        try:
            path, wrong = await self._obtained(launch, obtain)
        except OSError as error:
            raise StorageFailed(f"checkpoint {name}: {error}") from None
        except ValueError as error:
            raise StateUnavailable(f"checkpoint {name}: {error}") from None
        finally:
            self._reading_since_s = math.inf
        if wrong:
            raise StateUnavailable(f"checkpoint {name}: {wrong}")
        files = tuple(replace(r, private=str(path / private_name(r.source))) for r in ranks)
        return replace(launch, restore=replace(wanted, path=str(path))), files

    async def _obtained(
        self, launch: Launch, obtain: Callable[[], tuple[Path, str | None]]
    ) -> tuple[Path, str | None]:
        """Call `obtain` until it succeeds, and return its result.

        Raises `OSError` if storage delivers no part of the checkpoint for `STORAGE_S`.
        """
        while True:
            try:
                return await asyncio.get_running_loop().run_in_executor(None, obtain)
            except OSError as error:
                log.warning("checkpoint not read", extra={"error": str(error)})
                self._refuse_older(launch)
                if self.unread_s > STORAGE_S:
                    raise
                await asyncio.sleep(STORAGE_POLL_S)


def _private_sources(rank: RankStart, order: MemberOrder) -> Iterator[StateSource]:
    """Return the sources of the private state that `rank` starts from, in the order in which to try them."""
    assert order.launch is not None
    assert order.launch.restore is not None
    step = order.launch.restore.step
    return (each for each in order.sources if each.step == step and each.has(rank.source))


def _privates(order: MemberOrder) -> frozenset[tuple[int, int, int]]:
    """Return the rank, generation and step of each private state from which this member's ranks can start."""
    return frozenset(
        (rank.source, each.generation, each.step)
        for each in order.sources
        for rank in order.ranks
        if each.has(rank.source)
    )
