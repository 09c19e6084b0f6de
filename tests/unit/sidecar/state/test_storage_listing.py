"""A member reports numbered, bounded listings of storage. A failure never looks like empty storage."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from holdfast.checkpoint.directory import DirectoryStorage
from holdfast.process import event_loop
from holdfast.protocol.member_messages import StorageListing
from sidecar.state import storage_listing
from sidecar.state.storage_listing import MAX_WHY_BYTES, StorageLister
from tests.samples.checkpoints import STATE, save

LIMIT_S = 20.0


class Listings:
    """A running lister, and a way to wait for its listings."""

    def __init__(self, root: Path) -> None:
        self.asked = 0
        self.changes = 0
        self._changed = asyncio.Event()
        self.lister = StorageLister(DirectoryStorage(root), self._note, lambda: self.asked)

    def _note(self) -> None:
        self.changes += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, condition: Callable[[StorageListing], object]) -> StorageListing:
        async def wait() -> None:
            while not condition(self.lister.listing):
                await self._changed.wait()

        await asyncio.wait_for(wait(), LIMIT_S)
        return self.lister.listing


@asynccontextmanager
async def listing(root: Path) -> AsyncIterator[Listings]:
    made = Listings(root)
    running = asyncio.create_task(made.lister.run())
    try:
        yield made
    finally:
        await event_loop.end([running])


def test_before_the_first_listing_storage_counts_as_unread(tmp_path: Path) -> None:
    found = Listings(tmp_path).lister.listing
    assert (found.number, found.error) == (0, "it has not been read yet")


async def test_checkpoints_are_listed_when_they_are_requested(tmp_path: Path) -> None:
    async with listing(tmp_path) as made:
        first = await made.until(lambda found: found.number)
        assert (first.number, first.checkpoints, first.error) == (1, (), "")
        save(tmp_path, 5, epoch=3)
        made.asked = 2
        made.lister.request()
        found = await made.until(lambda found: found.checkpoints)
        assert [each.step for each in found.checkpoints] == [5]
        assert (found.asked, found.epoch, found.number) == (2, 3, 2)


async def test_a_listing_without_a_difference_is_not_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_listing, "EVERY_S", 0.001)
    save(tmp_path, 5)
    async with listing(tmp_path) as made:
        await made.until(lambda found: found.number)
        assert made.changes == 1
        save(tmp_path, 6)
        found = await made.until(lambda found: len(found.checkpoints) == 2)
        assert made.changes == 2
        assert found.number >= 2


async def test_a_failure_keeps_the_last_listing_and_reports_why(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    save(root, 5)
    async with listing(root) as made:
        await made.until(lambda found: found.checkpoints)
        (root / "step-00000006").mkdir()
        (root / "step-00000006" / "manifest.json").symlink_to("loop" * 60)
        made.lister.request()
        found = await made.until(lambda found: found.error)
        assert [each.step for each in found.checkpoints] == [5]
        assert (found.number, found.error.startswith("checkpoint step-00000006: ")) == (2, True)


async def test_storage_that_does_not_answer_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe without a writer stands for a file system that hangs."""
    monkeypatch.setattr(storage_listing, "ANSWER_S", 0.02)
    async with listing(tmp_path) as made:
        await made.until(lambda found: found.number and not found.error)
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        made.lister._files.submit(pipe.read_bytes)
        made.lister.request()
        found = await made.until(lambda found: found.error)
        assert "not responded for 0.02 s" in found.error
        pipe.write_bytes(b"")
        monkeypatch.setattr(storage_listing, "ANSWER_S", LIMIT_S)
        made.lister.request()
        await made.until(lambda found: not found.error)


async def test_a_listing_is_small_however_many_checkpoints_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_listing, "MAX_LISTED", 5)
    for step in range(8):
        save(tmp_path, step)
    damaged = tmp_path / f"step-{7:08d}"
    (damaged / STATE).unlink()
    async with listing(tmp_path) as made:
        found = await made.until(lambda found: found.number)
        assert len(found.checkpoints) + len(found.refused) == 5
        assert found.checkpoints[0].step == 6, "the newest ones"
        (refused,) = found.refused
        assert (refused.name, refused.step) == (damaged.name, 7)
        assert len(refused.why.encode()) <= MAX_WHY_BYTES
