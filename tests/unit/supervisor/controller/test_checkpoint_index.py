from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from holdfast.checkpoint import writer
from holdfast.checkpoint.listing import PATIENCE
from holdfast.protocol.lineage import Lineage
from holdfast.protocol.member_messages import CheckpointReport
from supervisor.controller.checkpoint_index import CheckpointIndex
from supervisor.view.model import Checkpoint, StorageContents


def write(
    root: Path,
    step: int,
    generation: int = 1,
    skip: tuple[object, ...] = (),
    known: tuple[Lineage, ...] = (),
    created: float = 0.0,
) -> CheckpointReport:
    path = writer.write(
        root,
        generation=generation,
        step=step,
        world_size=2,
        files={"replicated.safetensors": b"x" * 100},
        meta={"skip": list(skip)},
        created_at=created,
        known=known,
    )
    return CheckpointReport(step, generation, str(path))


def damage(durable: CheckpointReport) -> None:
    path = Path(durable.path) / "replicated.safetensors"
    content = bytearray(path.read_bytes())
    content[50] ^= 1
    path.write_bytes(content)


def steps(storage: CheckpointIndex) -> list[int]:
    return [each.step for each in storage.stored.checkpoints]


def notes(storage: CheckpointIndex) -> list[str]:
    return [each.note for each in storage.stored.unusable]


@dataclass
class Watched:
    """A storage with a running service, which counts its reads."""

    root: Path
    looks: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.storage = CheckpointIndex(self.root, self._looked)

    def _looked(self) -> None:
        self.looks += 1
        self.changed.set()

    async def until(self, holds: Callable[[StorageContents], object]) -> StorageContents:
        while not holds(self.storage.stored):
            self.changed.clear()
            await self.changed.wait()
        return self.storage.stored


@pytest.fixture
def storage(tmp_path: Path) -> CheckpointIndex:
    return CheckpointIndex(tmp_path, lambda: None)


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Watched]:
    made = Watched(tmp_path / "checkpoints")
    running = asyncio.create_task(made.storage.run())
    yield made
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


async def test_before_the_first_look_the_storage_counts_as_unread(storage: CheckpointIndex) -> None:
    assert storage.stored.error == "it has not been read yet"
    assert storage.stored.looked_ns == 0
    assert storage.stored.failed_ns > 0, "its time to answer starts now"
    await storage.rescan()
    assert (storage.stored.error, steps(storage)) == ("", [])
    assert storage.stored.looked_ns > 0


async def test_all_checkpoints_are_listed_newest_first_with_the_reason_why_others_are_unusable(
    tmp_path: Path, storage: CheckpointIndex
) -> None:
    write(tmp_path, 3, skip=(2, "x"))
    write(tmp_path, 7, generation=2, known=(Lineage(2, 5),))
    write(tmp_path, 6)
    (tmp_path / "step-00000009").mkdir()
    (tmp_path / "step-00000009" / "rank-0").touch()
    await storage.rescan()
    assert steps(storage) == [7, 6, 3], (
        "void ones must be listed too, because the lineage decides, not storage"
    )
    assert storage.stored.checkpoints[2] == Checkpoint(3, 1, 2, str(tmp_path / "step-00000003"), (2,))
    assert notes(storage) == ["checkpoint step-00000009 is not used: manifest.json is missing"]
    assert (storage.stored.lineage, storage.stored.generation) == ((Lineage(2, 5),), 2)


async def test_the_newest_generation_is_also_known_from_a_lineage(
    tmp_path: Path, storage: CheckpointIndex
) -> None:
    write(tmp_path, 3, known=(Lineage(5, 3),))
    await storage.rescan()
    assert storage.stored.generation == 5


async def test_a_look_reads_no_file_content(tmp_path: Path, storage: CheckpointIndex) -> None:
    damage(write(tmp_path, 5))
    await storage.rescan()
    assert [(each.step, each.verified) for each in storage.stored.checkpoints] == [(5, False)]


async def test_a_doubted_checkpoint_is_read_whole_and_then_believed_or_not(watched: Watched) -> None:
    good, bad = write(watched.root, 3), write(watched.root, 5)
    damage(bad)
    newest, older = (await watched.until(lambda seen: seen.looked_ns)).checkpoints
    watched.storage.verify(newest)
    seen = await watched.until(lambda seen: seen.unusable)
    assert seen.checkpoints == (older,)
    assert "step-00000005 is not used: replicated.safetensors is damaged" in seen.unusable[0].note
    watched.storage.verify(older)
    seen = await watched.until(lambda seen: seen.checkpoints[0].verified)
    assert seen.checkpoints[0].path == good.path


async def test_a_checkpoint_found_damaged_is_unusable_until_it_is_written_again(
    watched: Watched,
) -> None:
    told = write(watched.root, 5)
    damage(told)
    (found,) = (await watched.until(lambda seen: seen.looked_ns)).checkpoints
    watched.storage.verify(found)
    await watched.until(lambda seen: seen.unusable)
    watched.storage.on_report(told)
    watched.storage.doubt()
    before = watched.looks
    watched.storage.request_rescan()
    await watched.until(lambda seen: watched.looks > before)
    assert steps(watched.storage) == []
    watched.storage.on_report(write(watched.root, 5, created=7.0))
    assert (await watched.until(lambda seen: seen.checkpoints)).checkpoints[0].verified


async def test_checkpoints_that_members_write_are_looked_for_whatever_their_generation(
    watched: Watched,
) -> None:
    """A journal was lost, so the generations before the loss have higher numbers."""
    watched.storage.on_report(write(watched.root, 6, generation=5))
    await watched.until(lambda seen: len(seen.checkpoints) == 1)
    told = write(watched.root, 9, generation=2)
    watched.storage.on_report(replace(told, asked=4))
    seen = await watched.until(lambda seen: len(seen.checkpoints) == 2)
    assert [(each.step, each.verified) for each in seen.checkpoints] == [(9, True), (6, True)]
    assert seen.heard == 4


async def test_a_repeated_report_needs_no_look(watched: Watched) -> None:
    told = write(watched.root, 6)
    watched.storage.on_report(told)
    await watched.until(lambda seen: seen.checkpoints)
    watched.storage.on_report(told)
    watched.storage.on_report(CheckpointReport())
    assert not watched.storage._wanted.is_set()


async def test_a_reported_checkpoint_that_does_not_exist_is_not_listed(watched: Watched) -> None:
    watched.storage.on_report(CheckpointReport(7, 1, str(watched.root / "step-00000007"), asked=2))
    seen = await watched.until(lambda seen: seen.heard == 2)
    assert seen.checkpoints == ()


async def test_after_a_failed_restore_no_checkpoint_is_trusted(watched: Watched) -> None:
    watched.storage.on_report(write(watched.root, 6))
    await watched.until(lambda seen: seen.checkpoints)
    watched.storage.doubt()
    assert not watched.storage.stored.checkpoints[0].verified
    before = watched.looks
    seen = await watched.until(lambda seen: watched.looks > before)
    assert not seen.checkpoints[0].verified


async def test_unavailable_storage_keeps_the_last_listing_and_is_reported(tmp_path: Path) -> None:
    write(tmp_path / "here", 3)
    storage = CheckpointIndex(tmp_path / "here", lambda: None)
    await storage.rescan()
    (tmp_path / "here").rename(tmp_path / "there")
    (tmp_path / "here").symlink_to("here")
    await storage.rescan()
    assert steps(storage) == [3]
    assert "Too many levels of symbolic links" in storage.stored.error
    failed_ns = storage.stored.failed_ns
    assert failed_ns > storage.stored.looked_ns
    await storage.rescan()
    assert storage.stored.failed_ns == failed_ns, "storage has been away since then"
    (tmp_path / "here").unlink()
    (tmp_path / "there").rename(tmp_path / "here")
    await storage.rescan()
    assert (storage.stored.error, storage.stored.failed_ns) == ("", 0)


async def test_an_unreadable_checkpoint_does_not_count_as_damaged_at_once(
    tmp_path: Path, storage: CheckpointIndex
) -> None:
    """Storage may fail for a moment. Using an older checkpoint would lose the steps between the two."""
    write(tmp_path, 3)
    manifest = Path(write(tmp_path, 5).path) / "manifest.json"
    content = manifest.read_bytes()
    manifest.unlink()
    manifest.symlink_to(manifest)
    for _ in range(PATIENCE - 1):
        await storage.rescan()
        assert "step-00000005: manifest.json cannot be read" in storage.stored.error
        assert steps(storage) == []
    manifest.unlink()
    manifest.write_bytes(content)
    await storage.rescan()
    assert steps(storage) == [5, 3]
    manifest.unlink()
    manifest.symlink_to(manifest)
    await storage.rescan()
    assert (storage.stored.error, steps(storage)) == ("", [3]), "the wait must be bounded"
