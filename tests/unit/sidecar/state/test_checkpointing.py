from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from holdfast.checkpoint.directory import DirectoryStorage
from holdfast.protocol.launcher_messages import Launch
from holdfast.protocol.member_messages import MemberOrder
from holdfast.protocol.progress_writer import Page
from sidecar.state import checkpointing
from sidecar.state.checkpointing import RETRY_S, CheckpointSaver, CheckpointSchedule
from sidecar.watch.late_ranks import HangPolicy
from sidecar.watch.progress_monitor import ProgressMonitor
from tests.samples.checkpoints import newest_whole
from tests.unit.sidecar.fake_peer import fetching
from tests.unit.sidecar.memory import holdings, member, private, snapshot

RUN = MemberOrder("run", 1, Launch(1, 2, 1, "", 0, 0, 0.0, skip=(3,)), checkpoint_every_s=60.0)
STEPS = 8  # steps that the group has done


@dataclass
class Place:
    checkpoints: CheckpointSchedule
    saver: CheckpointSaver
    root: Path
    asked: list[int]

    @property
    def saved(self) -> int:
        return self.saver.durable.step


@pytest.fixture
def here() -> Iterator[Path]:
    with member() as path:
        page = Page.create(path / "page-0.bin")
        page.begin(1, 0, 0, 77, 0)
        page.commit(STEPS, 0.5, 0.5, 8, 64, 0.0, 0)
        yield path


@asynccontextmanager
async def saving(
    here: Path, root: Path, void: tuple[int, ...] = (), silent: bool = False, ranks: int = 1
) -> AsyncIterator[Place]:
    """Yield a running saver. Its supervisor answers that only `void` is void, or not at all if `silent`."""
    async with fetching(here) as fetcher:
        saver = CheckpointSaver(holdings(here), fetcher, DirectoryStorage(root))
        pages = ProgressMonitor(here, ranks, HangPolicy())
        asked: list[int] = []

        def answer() -> None:
            asked.append(place.checkpoints.publishing)
            if not silent:
                order = replace(RUN, void=void, good=-1 if asked[-1] in void else asked[-1])
                place.checkpoints.note_order(order)

        place = Place(CheckpointSchedule("m0", holdings(here), pages, saver, answer), saver, root, asked)
        yield place


def hold(here: Path, step: int, generation: int = 1) -> None:
    snapshot(here, generation, step)
    for rank in (0, 1):
        private(here, rank, generation, step)


async def test_a_checkpoint_is_written_once_an_interval(here: Path, tmp_path: Path) -> None:
    hold(here, 5)
    async with saving(here, tmp_path) as place:
        assert not await place.checkpoints.save_if_due(RUN, 100.0)
        assert not await place.checkpoints.save_if_due(RUN, 159.9)
        assert await place.checkpoints.save_if_due(RUN, 160.0)
        assert place.saved == 5
        hold(here, 6)
        assert not await place.checkpoints.save_if_due(RUN, 219.0)
        assert await place.checkpoints.save_if_due(RUN, 220.0)
        assert place.saved == 6
    found, _ = newest_whole(tmp_path)
    assert found is not None
    assert (found.meta["skip"], found.meta["member"]) == ([3], "m0")


@pytest.mark.parametrize("order", [replace(RUN, checkpoint_every_s=0.0), replace(RUN, do="secure")])
async def test_nothing_is_due_without_an_interval_or_while_the_group_does_not_train(
    here: Path, tmp_path: Path, order: MemberOrder
) -> None:
    hold(here, 5)
    async with saving(here, tmp_path) as place:
        for now_s in (100.0, 1000.0):
            assert not await place.checkpoints.save_if_due(order, now_s)


@pytest.mark.parametrize(("step", "generation"), [(STEPS, 1), (5, 2)])
async def test_a_snapshot_that_the_group_has_not_gone_beyond_in_this_generation_is_not_saved(
    here: Path, tmp_path: Path, step: int, generation: int
) -> None:
    hold(here, step, generation)
    async with saving(here, tmp_path) as place:
        await place.checkpoints.save_if_due(RUN, 100.0)
        await place.checkpoints.save_if_due(RUN, 160.0)
        assert place.saved == -1


async def test_after_a_failure_the_next_attempt_comes_sooner(here: Path, tmp_path: Path) -> None:
    snapshot(here, 1, 5)  # no member has the private states
    async with saving(here, tmp_path) as place:
        await place.checkpoints.save_if_due(RUN, 100.0)
        await place.checkpoints.save_if_due(RUN, 160.0)
        assert place.saver.durable.error != ""
        hold(here, 6)
        assert await place.checkpoints.save_if_due(RUN, 160.0 + RETRY_S)
        assert (place.saved, place.saver.durable.error) == (6, "")


async def test_a_request_is_answered_by_its_number_whether_it_succeeds_or_not(
    here: Path, tmp_path: Path
) -> None:
    hold(here, 5)
    asked = replace(RUN, do="secure", save=3, save_step=5, save_generation=1)
    async with saving(here, tmp_path) as place:
        await place.checkpoints.save_on_request(asked)
        assert (place.saver.durable.asked, place.saved) == (3, 5)
        await place.checkpoints.save_on_request(replace(asked, do="run", save=4, save_step=2))
        assert (place.saver.durable.asked, place.saver.durable.error) == (4, "")
        await place.checkpoints.save_on_request(replace(asked, save=5, save_step=2))
        assert place.saver.durable.asked == 5
        assert place.saver.durable.error == "this member does not hold the snapshot of step 2"


async def test_while_a_checkpoint_is_written_no_other_snapshot_is_held_for_another_one(
    here: Path, tmp_path: Path
) -> None:
    """Storage may hang. If two checkpoints each held a slot, nothing could be copied or fetched."""
    hold(here, 5)
    hold(here, 6)
    async with saving(here, tmp_path) as place:
        await place.checkpoints.save_if_due(RUN, 100.0)
        async with place.saver._one:
            due = asyncio.create_task(place.checkpoints.save_if_due(RUN, 160.0))
            done, _ = await asyncio.wait([due], timeout=30.0)
            assert done, "nothing waits for it"
            assert place.saved == -1
        assert await place.checkpoints.save_if_due(RUN, 160.0 + RETRY_S)
        assert place.saved == 6


async def test_a_snapshot_that_lacks_changes_made_after_its_commit_is_not_saved(
    here: Path, tmp_path: Path
) -> None:
    hold(here, 3)
    hold(here, 5)
    page = Page.attach(here / "page-0.bin")
    page.note_late(5, amended=False)
    async with saving(here, tmp_path) as place:
        await place.checkpoints.save_if_due(RUN, 100.0)
        assert await place.checkpoints.save_if_due(RUN, 160.0)
        assert place.saved == 3
        page.note_late(5, amended=True)
        assert await place.checkpoints.save_if_due(RUN, 220.0)
        assert place.saved == 5


async def test_a_snapshot_that_another_members_rank_has_made_void_is_not_saved(
    here: Path, tmp_path: Path
) -> None:
    hold(here, 3)
    hold(here, 5)
    async with saving(here, tmp_path, void=(5,)) as place:
        await place.checkpoints.save_if_due(RUN, 100.0)
        assert await place.checkpoints.save_if_due(RUN, 160.0)
        assert (place.saved, place.asked) == (3, [5, -1, 3, -1])


async def test_a_snapshot_that_may_be_void_is_not_saved_and_tried_again_soon(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointing, "ANSWER_S", 0.01)
    hold(here, 5)
    async with saving(here, tmp_path, silent=True) as place:
        place.checkpoints.note_order(RUN)
        await place.checkpoints.save_if_due(RUN, 100.0)
        assert await place.checkpoints.save_if_due(RUN, 160.0)
        assert (place.saved, place.asked) == (-1, [5, -1])
        place.checkpoints.note_order(replace(RUN, good=5))
        assert await place.checkpoints.save_if_due(RUN, 160.0 + RETRY_S)
        assert place.saved == 5


async def test_a_member_with_all_ranks_need_not_ask_the_supervisor(here: Path, tmp_path: Path) -> None:
    hold(here, 5)
    page = Page.create(here / "page-1.bin")
    page.begin(1, 1, 1, 78, 0)
    page.commit(STEPS, 0.5, 0.5, 8, 64, 0.0, 0)
    async with saving(here, tmp_path, silent=True, ranks=2) as place:
        await place.checkpoints.save_if_due(RUN, 100.0)
        assert await place.checkpoints.save_if_due(RUN, 160.0)
        assert (place.saved, place.asked) == (5, [])
        hold(here, STEPS - 1)
        page.begin(1, 1, 1, 78, STEPS - 1)
        assert await place.checkpoints.save_if_due(RUN, 220.0)
        assert place.saved == 5, "the second rank may still be working after that commit"
        page.commit(STEPS, 0.5, 0.5, 8, 64, 0.0, 0)
        assert await place.checkpoints.save_if_due(RUN, 220.0 + RETRY_S)
        assert place.saved == STEPS - 1
