"""Index the checkpoints on storage in the background, so decisions never wait for storage.

A scan reads only manifests. A checkpoint is read in full only if it is about to be used and has not been
verified yet. Members also compare a checkpoint with their state while they write it, and verify what they
restore.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from holdfast.checkpoint import catalog
from holdfast.checkpoint.listing import ListingReader
from holdfast.checkpoint.manifest import InvalidCheckpoint
from holdfast.protocol.member_messages import CheckpointReport, ListedCheckpoint
from supervisor.view.model import UNREAD, Checkpoint, StorageContents, UnusableCheckpoint

log = logging.getLogger(__name__)

RETRY_S = 2.0  # the pause after a failed scan
MAX_CHECKPOINTS = 256  # only the newest are indexed
# how many of the members' reports to keep; a few are enough, because a scan follows each one
MAX_REPORTED = 64

_T = TypeVar("_T")


class CheckpointIndex:
    """The index of one run. `decide` reads `stored`, the result of the last scan."""

    def __init__(self, root: Path, changed: Callable[[], object]) -> None:
        """`changed` is called after every scan."""
        self._root = root
        self._changed = changed
        self._wanted = asyncio.Event()
        self._verified: set[tuple[str, float]] = set()  # (name, time of writing)
        self._damaged: dict[tuple[str, float], str] = {}  # what is wrong with each damaged checkpoint
        self._reader = ListingReader(root, MAX_CHECKPOINTS)
        self._reported: deque[CheckpointReport] = deque(maxlen=MAX_REPORTED)
        self._heard = 0  # the last save order that a member has answered
        self._doubted: Checkpoint | None = None  # the checkpoint that `run` must read in full
        self.stored = StorageContents(error=UNREAD, failed_ns=time.monotonic_ns())

    async def run(self) -> None:
        """Scan now, after each request, and every `RETRY_S` while scans fail. Never returns."""
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
        """Have `run` scan as soon as possible."""
        self._wanted.set()

    def on_report(self, durable: CheckpointReport) -> None:
        """Record that a member has written and compared a checkpoint, and request a scan."""
        if durable.step < 0 or durable in self._reported:
            return
        self._reported.append(durable)
        self._heard = max(self._heard, durable.asked)
        self._wanted.set()

    def doubt(self) -> None:
        """Mark all checkpoints as unverified, because one of them could not be restored."""
        self._verified.clear()
        self._reported.clear()
        self.stored = replace(
            self.stored,
            checkpoints=tuple(replace(each, verified=False) for each in self.stored.checkpoints),
        )
        self._wanted.set()

    def verify(self, doubted: Checkpoint | None) -> None:
        """Have `run` read the checkpoint `doubted` in full. If it is None, cancel an earlier request."""
        if doubted is not None and doubted != self._doubted:
            self._wanted.set()
        self._doubted = doubted

    async def rescan(self) -> None:
        """Read the manifests and update `stored`. If storage fails, only `stored.error` changes."""
        began_ns, heard = time.monotonic_ns(), self._heard
        try:
            found = await _in_thread(self._read)
        except OSError as error:
            log.warning("storage cannot be read", extra={"error": str(error)})
            self._fail(error, began_ns)
            return
        for each in found.unusable:
            if each not in self.stored.unusable:
                log.warning("checkpoint ignored", extra={"note": each.note})
        self.stored = replace(found, looked_ns=began_ns, heard=heard)

    def _fail(self, error: OSError, at_ns: int) -> None:
        failed_ns = self.stored.failed_ns if self.stored.error else at_ns
        self.stored = replace(self.stored, error=str(error), failed_ns=failed_ns)

    def _read(self) -> StorageContents:
        found = self._reader.read()
        checkpoints: list[Checkpoint] = []
        unusable = [UnusableCheckpoint(each.name, each.step, each.why) for each in found.refused]
        for each in found.checkpoints:
            key = (each.name, each.created)
            if key in self._damaged:
                unusable.append(UnusableCheckpoint(each.name, each.step, self._damaged[key]))
            else:
                verified = key in self._verified or self._is_reported(each)
                checkpoints.append(_checkpoint(each, self._root, verified))
        return StorageContents(
            tuple(checkpoints), tuple(unusable), found.lineage, found.generation, epoch=found.epoch
        )

    def _is_reported(self, found: ListedCheckpoint) -> bool:
        wanted = (found.step, found.generation)
        return any((each.step, each.generation) == wanted for each in tuple(self._reported))

    async def _verify(self, doubted: Checkpoint) -> None:
        """Read a checkpoint in full. Record it as verified or damaged until it is written again."""

        path = Path(doubted.path)

        def read() -> tuple[tuple[str, float], str | None] | None:
            try:
                found = catalog.load(path)
            except InvalidCheckpoint:
                return None  # the scan below records why
            key = (path.name, found.created)
            try:
                return key, catalog.content_fault(found)
            except catalog.Unreadable as error:
                self._reader.count_failed_read(path.name, error)
                return key, str(error)

        try:
            outcome = await _in_thread(read)
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


def _checkpoint(found: ListedCheckpoint, root: Path, verified: bool) -> Checkpoint:
    path = str(root / found.name)
    return Checkpoint(found.step, found.generation, found.world_size, path, found.skip, verified)


async def _in_thread(work: Callable[[], _T]) -> _T:
    """Run `work` in a thread, and return its result or raise its exception.

    The thread is a daemon, so a hung file system cannot keep the process from exiting.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_T] = loop.create_future()

    def settle(outcome: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(lambda: None if done.done() else outcome())

    def call() -> None:
        try:
            found = work()
        except Exception as error:  # the awaiting task must receive any exception
            failed = error
            settle(lambda: done.set_exception(failed))
        else:
            settle(lambda: done.set_result(found))

    threading.Thread(target=call, name="storage", daemon=True).start()
    return await done
