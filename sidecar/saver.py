"""Write checkpoints from the arena, in the background."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast import checkpoint
from holdfast.arena import Gone, Record
from holdfast.lineage import Lineage, valid
from holdfast.messages import Durable, Source
from sidecar import background
from sidecar.holdings import Holdings
from sidecar.peers import Fetcher, Unfetched

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Retention:
    """What may be deleted from storage: all but the newest `keep` that are not void, and one of `proven`."""

    keep: int = 3
    lineage: tuple[Lineage, ...] = ()
    proven: int = -1
    epoch: int = 0  # of the supervisor whose orders these are: a newer one's checkpoints are not ours


class Saver:
    """One checkpoint at a time. `durable` is what the supervisor is told.

    `retention` may change while one is written: what holds at the end of that counts.
    """

    def __init__(self, holdings: Holdings, fetcher: Fetcher, root: Path) -> None:
        self._holdings = holdings
        self._fetcher = fetcher
        self._root = root
        self._one = asyncio.Lock()
        self._moved_s = time.monotonic()
        self.durable = Durable()
        self.retention = Retention()

    @property
    def busy(self) -> bool:
        """True while a checkpoint is written: another would wait for it, for as long as storage hangs."""
        return self._one.locked()

    @property
    def unmoved_s(self) -> float:
        """For how long storage has taken nothing of a checkpoint, or since when there is this saver."""
        return time.monotonic() - self._moved_s

    def _moved(self) -> None:
        self._moved_s = time.monotonic()

    async def save(
        self,
        record: Record,
        sources: Iterable[Source],
        meta: Mapping[str, object],
        *,
        asked: int,
    ) -> None:
        """Make the snapshot `record` durable; the outcome is in `durable`. Never raises for storage.

        A step that is on storage already is left as it is. What `durable` names is on storage: one that gave
        way to newer ones at once leaves the last that was named.
        """
        async with self._one:
            try:
                await self._save(record, tuple(sources), meta, asked)
            finally:
                self._moved()

    async def _save(
        self, record: Record, sources: tuple[Source, ...], meta: Mapping[str, object], asked: int
    ) -> None:
        began = time.monotonic()
        try:
            privates = await self._privates(record, sources)
            self._refuse_void(record)
            path = await background.run(self._write, record, privates, dict(meta))
            self._refuse_void(record)
        except (OSError, ValueError, Gone, Unfetched) as error:
            log.warning("checkpoint failed", extra={"step": record.step, "error": str(error)})
            last = self.durable
            self.durable = Durable(
                last.step, last.generation, last.path, 0.0, str(error), max(asked, last.asked)
            )
            return
        took_s = time.monotonic() - began
        answered = max(asked, self.durable.asked)
        if path is None:
            self.durable = replace(self.durable, error="", asked=answered)
            return
        self.durable = Durable(record.step, record.generation, str(path), round(took_s, 3), "", answered)

    async def _privates(self, record: Record, sources: tuple[Source, ...]) -> dict[str, bytes]:
        """Collect the private states of all ranks at the snapshot's step, ours and the peers'."""
        found: dict[str, bytes] = {}
        for rank in range(record.world_size):
            mine = tuple(source for source in sources if source.rank == rank)
            blob = await background.run(self._held, rank, record, mine) or await self._fetched(
                rank, record, mine
            )
            if blob is None:
                raise Unfetched(f"no private state of rank {rank} for step {record.step}")
            found[f"rank-{rank:05d}.bin"] = blob
        return found

    def _held(self, rank: int, record: Record, sources: tuple[Source, ...]) -> bytes | None:
        told = [_generation(source, record) for source in sources]
        for generation in dict.fromkeys([*told, record.generation]):
            held = self._holdings.private(rank, generation, record.step)
            if held is not None:
                return held.data
        return None

    async def _fetched(self, rank: int, record: Record, sources: tuple[Source, ...]) -> bytes | None:
        for source in sources:
            wanted = Source(source.url, rank, _generation(source, record), record.step)
            try:
                return await self._fetcher.private(wanted)
            except Unfetched as error:
                log.info("peer did not help", extra={"error": str(error)})
        return None

    def _refuse_void(self, record: Record) -> None:
        if not valid(record.generation, record.step, self.retention.lineage):
            raise ValueError(f"the snapshot of step {record.step} is void: the group resumed from before it")

    def _write(
        self, record: Record, privates: Mapping[str, bytes], meta: Mapping[str, object]
    ) -> Path | None:
        """Return the checkpoint; None when it is one of those that there is no place for any more."""
        if not self._holdings.good(record):
            raise ValueError(f"the snapshot of step {record.step} fails its checksum")
        with self._holdings.arena.pin(record) as path:
            written = checkpoint.write(
                self._root,
                generation=record.generation,
                step=record.step,
                world_size=record.world_size,
                files={"replicated.safetensors": path, **privates},
                meta=meta,
                created_at=time.time(),
                known=self.retention.lineage,
                epoch=self.retention.epoch,
                moved=self._moved,
            )
        now = self.retention
        try:
            removed = checkpoint.retain(
                self._root, now.keep, frozenset({written}), now.lineage, now.proven, epoch=now.epoch
            )
        except OSError as error:  # what is written stands; the next one tries again
            log.warning("old checkpoints stay", extra={"error": str(error)})
            return written
        return None if written in removed else written


def _generation(source: Source, record: Record) -> int:
    """Return whose private state goes with the snapshot: a later generation's, if it went on from there."""
    return source.generation if source.generation and source.step == record.step else record.generation
