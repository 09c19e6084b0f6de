"""Write snapshots to storage as checkpoints, periodically during training and on request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from holdfast.checkpoint import retention, writer
from holdfast.checkpoint.manifest import REPLICATED, private_name
from holdfast.checkpoint.retention import Retention
from holdfast.checkpoint.storage import CheckpointStorage
from holdfast.fileio import folder_rights
from holdfast.process import event_loop
from holdfast.protocol.lineage import valid
from holdfast.protocol.member_messages import CheckpointReport, MemberOrder, StateSource
from holdfast.snapshot.arena import SnapshotGone
from holdfast.snapshot.commit_records import CommitRecord
from sidecar.state import background
from sidecar.state.holdings import Holdings
from sidecar.state.peers import PeerClient
from sidecar.state.piece_sharing import CheckpointSharing, PeerHelpers
from sidecar.state.snapshot_fetch import FetchFailed
from sidecar.watch.progress_monitor import ProgressMonitor

log = logging.getLogger(__name__)

RETRY_S = 5.0  # the pause after a storage error or a missing answer from the supervisor; training continues
FETCHES = 16  # how many private states are fetched from peers at a time
ANSWER_S = 5.0  # how long to wait for the supervisor's verdict; it receives each rank's progress every second


class CheckpointSchedule:
    """Decides which snapshots to write, and when. `saver` writes them and sets `saver.durable`."""

    def __init__(
        self,
        member: str,
        holdings: Holdings,
        pages: ProgressMonitor,
        saver: CheckpointSaver,
        ask: Callable[[], None] = lambda: None,
    ) -> None:
        """`ask` is called when `publishing` changes. `note_order` receives the supervisor's answer."""
        self.publishing = -1
        self._ask = ask
        self._order = MemberOrder("idle", 0)  # the newest
        self._answer = asyncio.Event()
        self._member = member
        self._holdings = holdings
        self._pages = pages
        self._saver = saver
        self._next_at_s = 0.0  # 0 before the first interval begins

    def left_s(self, now_s: float) -> float:
        """Return the time until a checkpoint is due; 0 or less if one is due or no interval has begun."""
        return self._next_at_s - now_s

    async def save_if_due(self, order: MemberOrder, now_s: float) -> bool:
        """If a checkpoint is due, save the newest good snapshot and return True.

        The first interval begins with the first call. After a failure, the next interval is shorter.
        """
        if order.do != "run" or order.checkpoint_every_s <= 0:
            return False
        if self._next_at_s == 0.0:
            self._next_at_s = now_s + order.checkpoint_every_s
        if now_s < self._next_at_s:
            return False
        answered = await self._save_newest(order)
        failed = bool(self._saver.durable.error) or not answered
        pause_s = min(RETRY_S, order.checkpoint_every_s) if failed else order.checkpoint_every_s
        self._next_at_s = now_s + pause_s
        return True

    def note_order(self, order: MemberOrder) -> None:
        """Record the newest order, which includes the supervisor's verdict on the ranks of other members."""
        self._order = order
        self._answer.set()

    async def _save_newest(self, order: MemberOrder) -> bool:
        """Save the newest snapshot that is certainly good.

        A snapshot is good once every rank is past its step and none changed its state after the commit.
        Return False while it is unknown whether a snapshot is good. Also return False while another
        checkpoint is being written: if both slots were pinned, no snapshot could be taken or fetched.
        """
        if self._saver.busy:
            return False
        ranks = self._pages.progress(order.generation)
        steps = [each.step for each in ranks]
        late = {step for each in ranks for step in each.late} | self._void(order)
        for record in self._holdings.arena.records():
            if record.generation != order.generation or not steps or record.step >= max(steps):
                continue
            if record.step in late:
                continue
            durable = self._saver.durable
            if (record.step, record.generation) == (durable.step, durable.generation):
                return True
            try:
                async with self._holdings.pinned(record):
                    if len(ranks) >= record.world_size:
                        good = self._own_verdict(record)
                    else:  # only the supervisor knows about the ranks of other members
                        good = await self._ask_for_verdict(record)
                    if good and self._saver.busy:
                        return False
                    if good:
                        await self._saver.save(record, order.sources, self._meta(order), asked=0)
            except (SnapshotGone, OSError):
                continue
            if good is None:
                return False
            if good and not self._saver.durable.error:
                return True
        return True

    def _own_verdict(self, record: CommitRecord) -> bool | None:
        """Return True if the snapshot is good, and False if a rank of this member changed its state.

        Return None while a rank of this member can still change the state.
        """
        found = self._pages.progress(record.generation)
        if any(record.step in each.late for each in found):
            return False
        return all(each.step > record.step for each in found) or None

    async def _ask_for_verdict(self, record: CommitRecord) -> bool | None:
        """Ask the supervisor whether the snapshot is good. Return False if a rank changed its state.

        Return None if the supervisor does not answer within `ANSWER_S`, or if its order is for another
        generation.
        """
        give_up_at = time.monotonic() + ANSWER_S
        self.publishing = record.step
        self._ask()
        try:
            while (left_s := give_up_at - time.monotonic()) > 0:
                self._answer.clear()
                order = self._order
                if order.do not in ("run", "secure") or order.generation != record.generation:
                    return None
                if record.step in self._void(order):
                    return False
                if order.good == record.step:
                    return True
                try:
                    await asyncio.wait_for(self._answer.wait(), left_s)
                except asyncio.TimeoutError:
                    break
        finally:
            self.publishing = -1
            self._ask()
        return None

    def _void(self, order: MemberOrder) -> set[int]:
        newest = self._order if self._order.generation == order.generation else order
        return {*order.void, *newest.void}

    async def save_on_request(self, order: MemberOrder) -> None:
        """Carry out the save request of `order`, and record its number, `order.save`, in `durable.asked`."""
        record = self._holdings.record(order.save_generation, order.save_step)
        if record is None and order.do == "run":  # a newer, equally good snapshot has replaced it
            self._saver.answer(order.save)
            return
        if record is None:
            why = f"this member does not hold the snapshot of step {order.save_step}"
            self._saver.answer(order.save, error=why)
            return
        await self._saver.save(record, order.sources, self._meta(order), asked=order.save)

    def _meta(self, order: MemberOrder) -> dict[str, object]:
        skip = list(order.launch.skip) if order.launch else []
        return {"skip": skip, "member": self._member}


class CheckpointSaver:
    """Writes one checkpoint at a time. `durable` is the report on it for the supervisor.

    `retention` may change while a checkpoint is being written; the value at the end of the write applies.
    """

    def __init__(
        self,
        holdings: Holdings,
        fetcher: PeerClient,
        storage: CheckpointStorage,
        sharing: CheckpointSharing | None = None,
    ) -> None:
        """Without `sharing`, as on a single machine, this member writes checkpoints alone."""
        self._holdings = holdings
        self._fetcher = fetcher
        self._storage = storage
        self._sharing = sharing
        self._one = asyncio.Lock()
        self._moved_s: float | None = None
        self._begun = 0  # the newest request that has been begun; a retry after a failure is no progress
        self.durable = CheckpointReport()
        self.retention = Retention()

    @property
    def busy(self) -> bool:
        """True while a checkpoint is being written. Another save would wait, perhaps for hung storage."""
        return self._one.locked()

    @property
    def unmoved_s(self) -> float:
        """Seconds since storage last accepted data, or since it was last to save a state; -1 if never."""
        return time.monotonic() - self._moved_s if self._moved_s is not None else -1.0

    def _moved(self) -> None:
        self._moved_s = time.monotonic()

    def answer(self, asked: int, *, error: str | None = None) -> None:
        """Record that the save request `asked` needs no write, or that it failed because of `error`."""
        last = self.durable
        self.durable = replace(last, error=last.error if error is None else error, asked=asked)

    async def save(
        self,
        record: CommitRecord,
        sources: Iterable[StateSource],
        meta: Mapping[str, object],
        *,
        asked: int,
    ) -> None:
        """Write the snapshot `record` to storage, and record the outcome in `durable`.

        Storage errors are recorded there and not raised. If a checkpoint of the step already exists, it is
        not written again. `durable` always refers to an existing checkpoint: if retention immediately removes
        the new checkpoint, `durable` still refers to the previous one.
        """
        if not asked or asked > self._begun:
            self._begun = max(asked, self._begun)
            self._moved()  # even if an earlier write is still waiting for storage
        async with self._one:
            await self._save(record, tuple(sources), meta, asked)
            self._moved()

    async def _save(
        self, record: CommitRecord, sources: tuple[StateSource, ...], meta: Mapping[str, object], asked: int
    ) -> None:
        began = time.monotonic()
        try:
            privates = await self._privates(record, sources)
            self._refuse_void(record)
            path = await self._write_shared(record, sources, privates, meta)
            self._refuse_void(record)
        except (OSError, ValueError, SnapshotGone, FetchFailed) as error:
            why = _explained(error)
            log.warning("checkpoint failed", extra={"step": record.step, "error": why})
            last = self.durable
            self.durable = CheckpointReport(
                last.step, last.generation, last.path, 0.0, why, max(asked, last.asked)
            )
            return
        took_s = time.monotonic() - began
        answered = max(asked, self.durable.asked)
        if path is None:
            self.durable = replace(self.durable, error="", asked=answered)
            return
        self.durable = CheckpointReport(
            record.step, record.generation, f"{self._storage}/{path.name}", round(took_s, 3), "", answered
        )

    async def _privates(self, record: CommitRecord, sources: tuple[StateSource, ...]) -> dict[str, bytes]:
        """Collect all ranks' private states of the snapshot's step, from this member and its peers.

        Several are fetched at a time, because a job may have thousands of ranks.
        """
        of_rank = _sources_of_ranks(sources, record.world_size)
        found = await background.run_in_background(self._held, record, of_rank)
        missing = iter([rank for rank in range(record.world_size) if private_name(rank) not in found])

        async def fetch() -> None:
            for rank in missing:
                blob = await self._fetched(rank, record, of_rank.get(rank, ()))
                if blob is None:
                    raise FetchFailed(f"no private state of rank {rank} for step {record.step}")
                found[private_name(rank)] = blob

        fetching = [asyncio.create_task(fetch()) for _ in range(FETCHES)]
        try:
            await asyncio.gather(*fetching)
        finally:
            await event_loop.end(fetching)
        return found

    def _held(self, record: CommitRecord, of_rank: Mapping[int, Sequence[StateSource]]) -> dict[str, bytes]:
        """Return the private states of the snapshot's step that this member holds, by name."""
        found = {}
        for rank in range(record.world_size):
            named = [_generation(source, record) for source in of_rank.get(rank, ())]
            for generation in dict.fromkeys([*named, record.generation]):
                held = self._holdings.private(rank, generation, record.step)
                if held is not None:
                    found[private_name(rank)] = held.data
                    break
        return found

    async def _fetched(self, rank: int, record: CommitRecord, sources: Iterable[StateSource]) -> bytes | None:
        for source in sources:
            wanted = StateSource(source.url, rank, _generation(source, record), record.step)
            try:
                return await self._fetcher.private(wanted)
            except FetchFailed as error:
                log.info("private state not fetched from a peer", extra={"error": str(error)})
        return None

    def _refuse_void(self, record: CommitRecord) -> None:
        if not valid(record.generation, record.step, self.retention.lineage):
            raise ValueError(
                f"the snapshot of step {record.step} is void: the group resumed from an earlier step"
            )

    async def _write_shared(
        self,
        record: CommitRecord,
        sources: tuple[StateSource, ...],
        privates: Mapping[str, bytes],
        meta: Mapping[str, object],
    ) -> Path | None:
        helpers = self._sharing.helpers(record, sources) if self._sharing is not None else None
        try:
            return await background.run_in_background(self._write, record, privates, dict(meta), helpers)
        finally:
            if helpers is not None:
                await helpers.close()

    def _write(
        self,
        record: CommitRecord,
        privates: Mapping[str, bytes],
        meta: Mapping[str, object],
        helpers: PeerHelpers | None,
    ) -> Path | None:
        """Write the checkpoint and return its path; None if retention immediately removed it as too old."""
        if not self._holdings.good(record):
            raise ValueError(f"the snapshot of step {record.step} fails its checksum")
        with self._holdings.arena.pin(record) as path:
            written = writer.write(
                self._storage,
                generation=record.generation,
                step=record.step,
                world_size=record.world_size,
                files={REPLICATED: path, **privates},
                meta=meta,
                created_at=time.time(),
                known=self.retention.lineage,
                epoch=self.retention.epoch,
                moved=self._moved,
                helpers=helpers,
            )
        try:
            removed = retention.retain(self._storage, self.retention, frozenset({written}))
        except OSError as error:  # the new checkpoint is complete; the next checkpoint tries again
            log.warning("old checkpoints not removed", extra={"error": str(error)})
            return written
        return None if written in removed else written


def _explained(error: Exception) -> str:
    """Return the message of `error`. If storage denies access, it includes the users and what to change."""
    if not isinstance(error, PermissionError) or not isinstance(error.filename, str):
        return str(error)
    target = Path(error.filename)
    remedy = "let this user write there, or set securityContext.fsGroup or runAsUser in the pod"
    return f"{error.strerror}: {folder_rights.denial(target.parent)}; {remedy}"


def _sources_of_ranks(sources: Iterable[StateSource], world_size: int) -> Mapping[int, list[StateSource]]:
    """Return the sources of each rank. A source can cover several consecutive ranks."""
    found: dict[int, list[StateSource]] = {}
    for each in sources:
        for rank in range(max(0, each.rank), min(world_size, each.rank + each.count)):
            found.setdefault(rank, []).append(each)
    return found


def _generation(source: StateSource, record: CommitRecord) -> int:
    """Return the generation of the private state that belongs to the snapshot.

    It is later than the snapshot's generation if the group has since resumed from the snapshot's step.
    """
    return source.generation if source.generation and source.step == record.step else record.generation
