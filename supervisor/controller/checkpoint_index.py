"""What is on storage, followed in the background: no decision waits for a file system that does not answer.

A look reads manifests, never the content. Content is read only of a checkpoint that somebody doubts who is
about to use it: what members write they compare while they write it, and read whole before they restore it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TypeVar

from holdfast.checkpoint import catalog
from holdfast.checkpoint.manifest import InvalidCheckpoint
from holdfast.protocol import lineage
from holdfast.protocol.member_messages import CheckpointReport
from supervisor.view.model import UNREAD, Checkpoint, StorageContents, UnusableCheckpoint

log = logging.getLogger(__name__)

RETRY_S = 2.0  # after storage could not be read
PATIENCE = 5  # looks, until a checkpoint that cannot be read is taken for one that is damaged
MOST = 256  # checkpoints that are looked at: the newest
TOLD = 64  # answers of members that are remembered: a look follows each at once

_T = TypeVar("_T")


class CheckpointIndex:
    """`stored` is what `decide` sees. `changed` is called after every look."""

    def __init__(self, root: Path, changed: Callable[[], object]) -> None:
        self._root = root
        self._changed = changed
        self._wanted = asyncio.Event()
        self._verified: set[tuple[str, float]] = set()  # (name, when it was written)
        self._damaged: dict[tuple[str, float], str] = {}
        self._unread: Counter[str] = Counter()
        self._told: deque[CheckpointReport] = deque(maxlen=TOLD)
        self._heard = 0
        self._doubted: Checkpoint | None = None
        self.stored = StorageContents(error=UNREAD, failed_ns=time.monotonic_ns())

    async def run(self) -> None:
        """Look now, whenever something has changed, and again while storage cannot be read. For ever."""
        self._wanted.set()
        while True:
            timeout_s = RETRY_S if self.stored.error else None
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wanted.wait(), timeout_s)
            self._wanted.clear()
            await self.rescan()
            self._changed()
            if self._doubted is not None:
                await self._verify(self._doubted)
                self._changed()

    def request_rescan(self) -> None:
        """Have `run` look at once."""
        self._wanted.set()

    @property
    def rescan_requested(self) -> bool:
        """True when a look is due."""
        return self._wanted.is_set()

    def on_report(self, durable: CheckpointReport) -> None:
        """A member has written a checkpoint, and compared it while it wrote."""
        if durable.step < 0 or durable in self._told:
            return
        self._told.append(durable)
        self._heard = max(self._heard, durable.asked)
        self._wanted.set()

    def doubt(self) -> None:
        """Something could not be restored: believe nothing that was verified before."""
        self._verified.clear()
        self._told.clear()
        self.stored = replace(
            self.stored,
            checkpoints=tuple(replace(each, verified=False) for each in self.stored.checkpoints),
        )
        self._wanted.set()

    def verify(self, doubted: Checkpoint | None) -> None:
        """Have the content of a checkpoint read whole, if there is one to be doubted."""
        if doubted is not None and doubted != self._doubted:
            self._wanted.set()
        self._doubted = doubted

    async def rescan(self) -> None:
        """Read the manifests."""
        began_ns, heard = time.monotonic_ns(), self._heard
        try:
            found = await _beside(self._read)
        except OSError as error:
            log.warning("storage cannot be read", extra={"error": str(error)})
            self._fail(error, began_ns)
            return
        for each in found.unusable:
            if each not in self.stored.unusable:
                log.warning("checkpoint passed over", extra={"note": each.note})
        self.stored = replace(found, looked_ns=began_ns, heard=heard)

    def _fail(self, error: OSError, at_ns: int) -> None:
        failed_ns = self.stored.failed_ns if self.stored.error else at_ns
        self.stored = replace(self.stored, error=str(error), failed_ns=failed_ns)

    def _read(self) -> StorageContents:
        checkpoints: list[Checkpoint] = []
        unusable: list[UnusableCheckpoint] = []
        told: list[tuple[lineage.Lineage, ...]] = []
        generation = epoch = 0
        for path, found in islice(catalog.each_checkpoint(self._root), MOST):
            if isinstance(found, catalog.Unreadable):
                self._excuse(path, found)
            if isinstance(found, InvalidCheckpoint):
                unusable.append(_unusable(path, str(found)))
                continue
            told.append(found.lineage)
            generation = max(generation, found.generation, *(each.generation for each in found.lineage))
            epoch = max(epoch, found.epoch)
            key = (path.name, found.created)
            if key in self._damaged:
                unusable.append(_unusable(path, self._damaged[key]))
            else:
                checkpoints.append(_checkpoint(found, key in self._verified or self._is_told(found)))
        return StorageContents(
            tuple(checkpoints), tuple(unusable), lineage.merged(*told), generation, epoch=epoch
        )

    def _is_told(self, found: catalog.StoredCheckpoint) -> bool:
        wanted = (found.step, found.generation)
        return any((each.step, each.generation) == wanted for each in tuple(self._told))

    def _excuse(self, path: Path, error: catalog.Unreadable) -> None:
        """Raise `OSError` unless this checkpoint could not be read again and again."""
        self._unread[path.name] += 1
        if self._unread[path.name] < PATIENCE:
            raise OSError(f"checkpoint {path.name}: {error}")

    async def _verify(self, doubted: Checkpoint) -> None:
        """Read one whole, and believe it or never again as it is now."""

        path = Path(doubted.path)

        def read() -> tuple[tuple[str, float], str | None] | None:
            try:
                found = catalog.load(path)
            except InvalidCheckpoint:
                return None  # the next look tells
            key = (path.name, found.created)
            try:
                return key, catalog.content_fault(found)
            except catalog.Unreadable as error:
                self._excuse(path, error)
                return key, str(error)

        try:
            outcome = await _beside(read)
        except OSError as error:
            self._fail(error, time.monotonic_ns())
            return
        if self._doubted == doubted:
            self._doubted = None
        if outcome is not None:
            key, why = outcome
            if why is None:
                self._verified.add(key)
            else:
                self._damaged[key] = why
        await self.rescan()


def _unusable(path: Path, why: str) -> UnusableCheckpoint:
    number = re.search(r"\d+", path.name)
    return UnusableCheckpoint(path.name, int(number[0]) if number else -1, why)


def _checkpoint(found: catalog.StoredCheckpoint, verified: bool) -> Checkpoint:
    skip = found.meta.get("skip")
    steps = tuple(s for s in skip if isinstance(s, int)) if isinstance(skip, list) else ()
    return Checkpoint(found.step, found.generation, found.world_size, str(found.path), steps, verified)


async def _beside(work: Callable[[], _T]) -> _T:
    """Return what `work` returns, or raise what it raises.

    In a thread that nobody waits for at the end: a file system that hangs must not keep the process.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_T] = loop.create_future()

    def settle(outcome: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(lambda: None if done.done() else outcome())

    def call() -> None:
        try:
            found = work()
        except Exception as error:  # it belongs to whoever awaits it
            failed = error
            settle(lambda: done.set_exception(failed))
        else:
            settle(lambda: done.set_result(found))

    threading.Thread(target=call, name="storage", daemon=True).start()
    return await done
