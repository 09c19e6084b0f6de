from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.checkpoint.directory import DirectoryStorage
from holdfast.checkpoint.retention import Retention
from holdfast.protocol.lineage import Lineage
from holdfast.protocol.member_messages import StateSource
from holdfast.snapshot.commit_records import CommitRecord
from holdfast.snapshot.private_store import PrivateBlob
from sidecar.state.checkpointing import CheckpointSaver
from sidecar.state.holdings import Holdings
from sidecar.state.peers import PeerClient
from sidecar.state.snapshot_fetch import FetchFailed
from tests.samples.checkpoints import newest_whole, scan
from tests.unit.sidecar.fake_peer import fetching, serving
from tests.unit.sidecar.memory import flip, holdings, member, private, snapshot
from tests.unit.users import Identity, kubelet_volume, needs_root

DEFAULT = Retention()


@pytest.fixture
def here() -> Iterator[Path]:
    with member() as path:
        yield path


@pytest.fixture
def there() -> Iterator[Path]:
    with member() as path:
        yield path


async def saved(
    here: Path,
    root: Path,
    record: CommitRecord,
    *sources: StateSource,
    asked: int = 1,
    retention: Retention = DEFAULT,
) -> CheckpointSaver:
    async with fetching(here) as fetcher:
        saver = CheckpointSaver(holdings(here), fetcher, DirectoryStorage(root))
        saver.retention = retention
        await saver.save(record, sources, {"skip": [3]}, asked=asked)
        return saver


def ready(path: Path, step: int = 7) -> CommitRecord:
    """Create everything that a checkpoint needs in one member."""
    record = snapshot(path, 2, step, fill=step)
    private(path, 0, 2, step, b"zero")
    private(path, 1, 2, step, b"one", kept=True)
    return record


async def test_a_checkpoint_contains_the_snapshot_and_every_ranks_private_state(
    here: Path, tmp_path: Path
) -> None:
    record = ready(here)
    saver = await saved(here, tmp_path, record, asked=4)
    told = saver.durable
    assert (told.step, told.generation, told.error, told.asked) == (7, 2, "", 4)
    found, notes = newest_whole(tmp_path)
    assert found is not None
    assert (found.step, found.world_size, found.meta["skip"], notes) == (7, 2, [3], ())
    assert str(found.path) == told.path
    assert (found.path / "replicated.safetensors").read_bytes() == record.path.read_bytes()
    assert [(found.path / f"rank-0000{rank}.bin").read_bytes() for rank in (0, 1)] == [b"zero", b"one"]


async def test_the_time_for_which_storage_has_taken_nothing_is_reported(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, fsync = ready(here), os.fsync
    async with fetching(here) as fetcher:
        saver = CheckpointSaver(holdings(here), fetcher, DirectoryStorage(tmp_path))
        seen = list[float]()

        def seen_before(descriptor: int) -> None:
            seen.append(saver.unmoved_s)
            fsync(descriptor)

        monkeypatch.setattr(os, "fsync", seen_before)
        assert saver.unmoved_s == -1.0, "a new sidecar has not written anything"
        saver._moved_s = time.monotonic() - 1000.0  # nothing had to be written in this time
        assert saver.unmoved_s >= 1000.0
        await saver.save(record, (), {}, asked=1)
    assert saver.durable.error == ""
    assert max(seen) < 500.0, "writing must count as progress"
    assert saver.unmoved_s < 500.0


async def test_an_attempt_that_is_repeated_after_an_unexpected_error_is_no_progress(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = ready(here)
    async with fetching(here) as fetcher:
        saver = CheckpointSaver(holdings(here), fetcher, DirectoryStorage(tmp_path))

        async def fail(*_: object) -> None:
            raise RuntimeError("unexpected")

        monkeypatch.setattr(saver, "_save", fail)
        for begun in (True, False):
            saver._moved_s = time.monotonic() - 1000.0
            with pytest.raises(RuntimeError, match="unexpected"):
                await saver.save(record, (), {}, asked=1)
            assert (saver.unmoved_s < 500.0) is begun


async def test_private_states_on_other_members_are_fetched(here: Path, there: Path, tmp_path: Path) -> None:
    record = snapshot(here, 2, 7)
    private(here, 0, 2, 7)
    private(there, 1, 2, 7, b"theirs")
    async with serving(there) as url:
        sources = StateSource("http://127.0.0.1:9", 1, 0, 0), StateSource(url, 1, 0, 0)  # where ranks live
        saver = await saved(here, tmp_path, record, *sources)
    assert saver.durable.error == ""
    assert (Path(saver.durable.path) / "rank-00001.bin").read_bytes() == b"theirs"


async def test_private_states_of_a_later_generation_that_resumed_there_also_serve(
    here: Path, tmp_path: Path
) -> None:
    record = snapshot(here, 2, 7)
    private(here, 0, 2, 7, b"zero")
    private(here, 1, 3, 7, b"one")
    saver = await saved(here, tmp_path, record, StateSource("", 1, 3, 7))
    assert saver.durable.error == ""


async def test_one_source_can_have_the_states_of_several_ranks(
    here: Path, there: Path, tmp_path: Path
) -> None:
    record = snapshot(here, 2, 7)
    for rank in (0, 1):
        private(there, rank, 3, 7, b"state of %d" % rank)
    async with serving(there) as url:
        saver = await saved(here, tmp_path, record, StateSource(url, 0, 3, 7, count=9))
    assert saver.durable.error == ""
    found = Path(saver.durable.path)
    assert [(found / f"rank-0000{n}.bin").read_bytes() for n in (0, 1)] == [b"state of 0", b"state of 1"]


async def test_a_missing_private_state_is_reported_and_nothing_is_written(here: Path, tmp_path: Path) -> None:
    record = snapshot(here, 2, 7)
    private(here, 0, 2, 7)
    saver = await saved(here, tmp_path, record, asked=5)
    assert saver.durable.error == "no private state of rank 1 for step 7"
    assert (saver.durable.step, saver.durable.asked) == (-1, 5)
    assert scan(tmp_path) == ()


async def test_a_flipped_bit_in_the_snapshot_is_reported_and_nothing_is_written(
    here: Path, tmp_path: Path
) -> None:
    record = ready(here)
    holdings(here).arena.seal(record)
    flip(record)
    saver = await saved(here, tmp_path, record)
    assert saver.durable.error == "the snapshot of step 7 fails its checksum"
    assert scan(tmp_path) == ()


async def test_a_snapshot_overwritten_in_the_meantime_is_reported(here: Path, tmp_path: Path) -> None:
    record = ready(here)
    for step in (8, 9):
        snapshot(here, 2, step)
    saver = await saved(here, tmp_path, record)
    assert "snapshot of generation 2, step 7 was overwritten" in saver.durable.error


async def test_unavailable_storage_is_reported_and_durable_checkpoints_are_kept(
    here: Path, tmp_path: Path
) -> None:
    root = tmp_path / "storage"
    async with fetching(here) as fetcher:
        saver = CheckpointSaver(holdings(here), fetcher, DirectoryStorage(root))
        await saver.save(ready(here), (), {}, asked=1)
        root.rename(tmp_path / "away")
        root.write_bytes(b"no directory any more")
        await saver.save(ready(here, 8), (), {}, asked=2)
        assert (saver.durable.step, saver.durable.asked) == (7, 2)
        assert saver.durable.error != ""
        root.unlink()
        (tmp_path / "away").rename(root)
        await saver.save(ready(here, 9), (), {}, asked=3)
    assert (saver.durable.step, saver.durable.error) == (9, "")
    assert [each.step for each in scan(root)] == [9, 7]


async def test_the_oldest_checkpoints_beyond_the_limit_are_deleted(here: Path, tmp_path: Path) -> None:
    async with fetching(here) as fetcher:
        saver = CheckpointSaver(holdings(here), fetcher, DirectoryStorage(tmp_path))
        saver.retention = Retention(2)
        for step in range(1, 5):
            await saver.save(ready(here, step), (), {}, asked=0)
    assert [each.step for each in scan(tmp_path)] == [4, 3]


async def test_failing_to_delete_old_checkpoints_is_not_a_failure(here: Path, tmp_path: Path) -> None:
    await saved(here, tmp_path, ready(here, 1), retention=Retention(1))
    stubborn = tmp_path / "step-00000001" / "replicated.safetensors"
    stubborn.unlink()
    stubborn.mkdir()
    (stubborn / "x").mkdir(mode=0)
    saver = await saved(here, tmp_path, ready(here, 2), retention=Retention(1))
    assert (saver.durable.step, saver.durable.error) == (2, "")


async def test_saving_the_same_step_again_changes_nothing(here: Path, tmp_path: Path) -> None:
    record = ready(here)
    first = await saved(here, tmp_path, record)
    inode = Path(first.durable.path).stat().st_ino
    again = await saved(here, tmp_path, record)
    assert again.durable.path == first.durable.path
    assert Path(again.durable.path).stat().st_ino == inode


async def test_one_checkpoint_is_written_at_a_time(here: Path, tmp_path: Path) -> None:
    records = ready(here, 1), ready(here, 2)
    async with fetching(here) as fetcher:
        saver = CheckpointSaver(holdings(here), fetcher, DirectoryStorage(tmp_path))
        await asyncio.gather(*(saver.save(each, (), {}, asked=n) for n, each in enumerate(records, 1)))
    assert (saver.durable.step, saver.durable.asked, saver.durable.error) == (2, 2, "")
    assert [each.step for each in scan(tmp_path)] == [2, 1]


async def test_void_checkpoints_are_deleted_and_do_not_take_the_place_of_others(
    here: Path, tmp_path: Path
) -> None:
    for step in (80, 90, 100):
        await saved(here, tmp_path, ready(here, step))
    known = (Lineage(3, 70),)
    retention = Retention(3, known)
    record = snapshot(here, 3, 74)
    private(here, 0, 3, 74)
    private(here, 1, 3, 74)
    saver = await saved(here, tmp_path, record, retention=retention)
    assert (saver.durable.step, saver.durable.error) == (74, "")
    assert [(each.step, each.lineage) for each in scan(tmp_path)] == [(74, known)]
    assert Path(saver.durable.path).is_dir()


async def test_a_step_that_became_void_in_the_meantime_is_not_reported_as_durable(
    here: Path, tmp_path: Path
) -> None:
    await saved(here, tmp_path, ready(here, 60))
    record = ready(here, 100)
    saver = await saved(here, tmp_path, record, retention=Retention(3, (Lineage(3, 70),)), asked=6)
    assert (saver.durable.step, saver.durable.asked) == (-1, 6)
    assert saver.durable.error == "the snapshot of step 100 is void: the group resumed from an earlier step"
    assert [each.step for each in scan(tmp_path)] == [60]


async def test_a_checkpoint_deleted_in_favour_of_newer_ones_is_not_reported_as_durable(
    here: Path, tmp_path: Path
) -> None:
    async with fetching(here) as fetcher:
        saver = CheckpointSaver(holdings(here), fetcher, DirectoryStorage(tmp_path))
        saver.retention = Retention(1)
        await saver.save(ready(here, 9), (), {}, asked=1)
        await saver.save(ready(here, 5), (), {}, asked=2)
    assert (saver.durable.step, saver.durable.asked, saver.durable.error) == (9, 2, "")
    assert Path(saver.durable.path).is_dir()
    assert [each.step for each in scan(tmp_path)] == [9]


async def test_the_orders_at_the_time_of_writing_decide_which_checkpoints_are_deleted(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While gigabytes are written, a newer order may arrive than the one that requested the checkpoint."""
    for step in (60, 80):
        await saved(here, tmp_path, ready(here, step))
    async with fetching(here) as fetcher:
        saver = CheckpointSaver(holdings(here), fetcher, DirectoryStorage(tmp_path))
        saver.retention = Retention(1)
        good = Holdings.good

        def then_ordered(self: Holdings, record: CommitRecord) -> bool:
            saver.retention = Retention(1, (Lineage(3, 70),))
            return good(self, record)

        monkeypatch.setattr(Holdings, "good", then_ordered)
        await saver.save(ready(here, 90), (), {}, asked=0)
    assert saver.durable.step == -1
    assert [each.step for each in scan(tmp_path)] == [60]


async def test_private_states_are_read_and_compared_off_the_event_loop(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[threading.Thread] = []
    private_of = Holdings.private

    def slow(self: Holdings, rank: int, generation: int, step: int) -> PrivateBlob | None:
        read.append(threading.current_thread())
        return private_of(self, rank, generation, step)

    monkeypatch.setattr(Holdings, "private", slow)
    saver = await saved(here, tmp_path, ready(here))
    assert saver.durable.error == ""
    assert len(read) == 2
    assert threading.main_thread() not in read, (
        "reading gigabytes in the main thread would block everything else"
    )


@pytest.mark.parametrize("lost", [False, True], ids=["all arrive", "one is lost"])
async def test_the_private_states_of_other_members_are_fetched_at_the_same_time(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    """Fetched one after another, those of thousands of ranks would take longer than the snapshot."""
    record = snapshot(here, 2, 7)
    asked: list[int] = []
    both = asyncio.Event()

    async def private_of(_: PeerClient, wanted: StateSource) -> bytes:
        asked.append(wanted.rank)
        if len(asked) == 2:
            both.set()
        await asyncio.wait_for(both.wait(), 20)
        if lost and wanted.rank == 1:
            raise FetchFailed("gone")
        return b"of %d" % wanted.rank

    monkeypatch.setattr(PeerClient, "private", private_of)
    saver = await saved(here, tmp_path, record, StateSource("http://m1:1", 0, 2, 7, count=2))
    assert sorted(asked) == [0, 1]
    if lost:
        assert saver.durable.error == "no private state of rank 1 for step 7"
        assert newest_whole(tmp_path)[0] is None
        return
    found, _ = newest_whole(tmp_path)
    assert found is not None
    assert [(found.path / f"rank-0000{rank}.bin").read_bytes() for rank in (0, 1)] == [b"of 0", b"of 1"]


@needs_root
async def test_a_checkpoint_that_the_sidecar_may_not_write_names_both_users() -> None:
    """A kubelet creates the directory of `hostpath` as root, whoever the sidecar is."""
    with kubelet_volume() as volume, kubelet_volume(0o755) as root, Identity(1000, 1000).effective():
        error = (await saved(volume, root, ready(volume))).durable.error
    owner = f"but {root} belongs to user 0 and group 0, with mode 0755"
    assert error.startswith(f"Permission denied: this process is user 1000, {owner}; let this user write")
