"""A member was cut off while its ranks were moved to another member. What it still does, or does once it is
connected again, is refused or harmless.

The group resumed from step 100 as generation 3 and has saved checkpoints since. The member that was cut off
obeys the same supervisor, but its last order was for generation 2. `test_shared_directory` shows that members
of generation 3 write no piece of its checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.checkpoint.directory import DirectoryStorage
from holdfast.checkpoint.retention import Retention
from holdfast.protocol.lineage import Lineage
from holdfast.protocol.member_messages import MemberOrder, StateSource
from holdfast.snapshot.commit_records import CommitRecord
from sidecar.state.checkpointing import CheckpointSaver
from sidecar.state.snapshot_fetch import FetchFailed
from tests.samples.checkpoints import save, scan
from tests.unit.sidecar.fake_peer import fetching, serving
from tests.unit.sidecar.memory import holdings, member, private, snapshot
from tests.unit.sidecar.test_pod_reconciler import sidecar

EPOCH, CUT_OFF, MOVED, RESUMED = 5, 2, 3, 100
LINEAGE = (Lineage(MOVED, RESUMED),)
OUTDATED = Retention(keep=3, lineage=(Lineage(CUT_OFF, 40),), epoch=EPOCH)


@pytest.fixture
def here() -> Iterator[Path]:
    with member() as path:
        yield path


@pytest.fixture
def there() -> Iterator[Path]:
    with member() as path:
        yield path


def moved_group_saves(root: Path, *steps: int) -> None:
    for step in steps:
        save(root, step, generation=MOVED, known=LINEAGE, epoch=EPOCH)


def checkpoints(root: Path) -> list[tuple[int, int]]:
    """Return the step and the generation of each checkpoint, newest first."""
    return [(each.step, each.generation) for each in scan(root)]


def snapshot_of_old_ranks(path: Path, step: int) -> CommitRecord:
    record = snapshot(path, CUT_OFF, step)
    for rank in (0, 1):
        private(path, rank, CUT_OFF, step)
    return record


async def saves_late(path: Path, root: Path, record: CommitRecord) -> CheckpointSaver:
    """Write a checkpoint that was ordered before the member was cut off."""
    async with fetching(path) as fetcher:
        saver = CheckpointSaver(holdings(path), fetcher, DirectoryStorage(root))
        saver.retention = OUTDATED
        await saver.save(record, (), {}, asked=1)
        return saver


async def test_it_cannot_replace_a_checkpoint_that_the_group_has_saved_since(
    here: Path, tmp_path: Path
) -> None:
    save(tmp_path, RESUMED, generation=CUT_OFF, epoch=EPOCH)
    moved_group_saves(tmp_path, 120)
    before = (tmp_path / "step-00000120" / "replicated.safetensors").read_bytes()
    await saves_late(here, tmp_path, snapshot_of_old_ranks(here, 120))
    assert checkpoints(tmp_path) == [(120, MOVED), (RESUMED, CUT_OFF)]
    assert (tmp_path / "step-00000120" / "replicated.safetensors").read_bytes() == before


async def test_a_checkpoint_of_a_step_that_the_group_never_had_is_void_and_displaces_no_other(
    here: Path, tmp_path: Path
) -> None:
    save(tmp_path, RESUMED, generation=CUT_OFF, epoch=EPOCH)
    moved_group_saves(tmp_path, 110, 120)
    await saves_late(here, tmp_path, snapshot_of_old_ranks(here, 130))
    assert checkpoints(tmp_path) == [(120, MOVED), (110, MOVED), (RESUMED, CUT_OFF)]


async def test_before_the_group_saves_again_a_late_checkpoint_leaves_the_one_that_it_resumed_from(
    here: Path, tmp_path: Path
) -> None:
    save(tmp_path, 80, generation=CUT_OFF, epoch=EPOCH)
    save(tmp_path, RESUMED, generation=CUT_OFF, epoch=EPOCH)
    await saves_late(here, tmp_path, snapshot_of_old_ranks(here, 130))
    assert checkpoints(tmp_path) == [(130, CUT_OFF), (RESUMED, CUT_OFF), (80, CUT_OFF)]
    moved_group_saves(tmp_path, 130)  # the same step again
    assert checkpoints(tmp_path) == [(130, MOVED), (RESUMED, CUT_OFF), (80, CUT_OFF)]


async def test_a_supervisor_that_was_replaced_meanwhile_lets_it_publish_and_delete_nothing(
    here: Path, tmp_path: Path
) -> None:
    save(tmp_path, RESUMED, generation=CUT_OFF, epoch=EPOCH)
    save(tmp_path, 110, generation=MOVED, known=LINEAGE, epoch=EPOCH + 1)
    saver = await saves_late(here, tmp_path, snapshot_of_old_ranks(here, 130))
    assert f"this member obeys epoch {EPOCH}: it is cut off from the run" in saver.durable.error
    assert checkpoints(tmp_path) == [(110, MOVED), (RESUMED, CUT_OFF)]


async def test_it_cannot_fetch_states_that_the_group_does_not_have(here: Path, there: Path) -> None:
    snapshot(there, MOVED, 120)
    private(there, 0, MOVED, 120)
    async with serving(there) as url, fetching(here) as fetcher:
        with pytest.raises(FetchFailed, match="404 no snapshot of generation 2, step 100"):
            await fetcher.snapshot(StateSource(url, -1, CUT_OFF, RESUMED))
        with pytest.raises(FetchFailed, match="404 no private state of rank 0, step 100"):
            await fetcher.private(StateSource(url, 0, CUT_OFF, RESUMED))
    assert holdings(here).slots() == ()


async def test_once_connected_again_it_obeys_only_the_new_generation(here: Path, tmp_path: Path) -> None:
    record = snapshot_of_old_ranks(here, 130)
    async with sidecar(here, checkpoints=tmp_path) as cut_off:
        await cut_off.obey(MemberOrder("run", CUT_OFF, epoch=EPOCH, settled=True, checkpoint_every_s=1.0))
        await cut_off.obey(MemberOrder("idle", MOVED, epoch=EPOCH, lineage=LINEAGE))
        late = MemberOrder("run", CUT_OFF, epoch=EPOCH, settled=True, checkpoint_every_s=1.0)
        await cut_off.obey(late)  # for example, from a connection that was half open
        assert (cut_off.order.do, cut_off.order.generation) == ("idle", MOVED)
        assert "generation 2 refused" in cut_off.next_report().notes[0]
        await cut_off.checkpoint_saver.save(record, (), {}, asked=0)  # a save that began before
        assert "is void" in cut_off.checkpoint_saver.durable.error
        assert checkpoints(tmp_path) == []
