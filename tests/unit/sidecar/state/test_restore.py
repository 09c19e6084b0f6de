from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.checkpoint import writer
from holdfast.checkpoint.directory import DirectoryStorage
from holdfast.protocol.launcher_messages import Launch, RankStart, Restore
from holdfast.protocol.lineage import Lineage
from holdfast.protocol.member_messages import HeldSnapshot, MemberOrder, StateSource
from holdfast.snapshot import member_directory
from sidecar.state import restore
from sidecar.state.holdings import Holdings
from sidecar.state.restore import NoFreeSlot, Restorer, StateUnavailable, VolumeRefused
from tests.sandbox import in_child, limit_file_size
from tests.unit.sidecar.fake_peer import fetching, serving
from tests.unit.sidecar.memory import flip, holdings, member, private, snapshot

LAUNCH = Launch(3, 2, 1, "", 0, 0, 0.0, restore=Restore(7, 2, "slot"))


@pytest.fixture
def here() -> Iterator[Path]:
    with member() as path:
        yield path


@pytest.fixture
def there() -> Iterator[Path]:
    with member() as path:
        yield path


def order(*sources: StateSource, launch: Launch = LAUNCH, ranks: tuple[int, ...] = (0,)) -> MemberOrder:
    places = tuple(RankStart(rank, local) for local, rank in enumerate(ranks))
    return MemberOrder("run", launch.generation, launch, places, sources)


async def prepared(
    here: Path,
    wanted: MemberOrder,
    free_a_slot: Callable[[], object] = lambda: None,
    storage: Path = Path("/nowhere"),
) -> tuple[Launch, tuple[RankStart, ...]]:
    async with fetching(here) as fetcher:
        return await Restorer(holdings(here), fetcher, DirectoryStorage(storage)).prepare(wanted, free_a_slot)


async def test_a_start_from_the_beginning_needs_no_state(here: Path) -> None:
    launch = replace(LAUNCH, restore=None)
    wanted = order(launch=launch)
    assert await prepared(here, wanted) == (launch, wanted.ranks)


async def test_local_state_is_used_in_place(here: Path) -> None:
    record = snapshot(here, 2, 7)
    private(here, 0, 2, 7, b"mine")
    launch, [rank] = await prepared(here, order(StateSource("", 0, 2, 7)))
    assert launch.restore is not None
    assert launch.restore.path == str(record.path)
    assert Path(rank.private).read_bytes() == b"mine"


async def test_one_source_can_have_the_states_of_several_ranks(here: Path, there: Path) -> None:
    snapshot(here, 2, 7)
    for rank in (0, 1):
        private(there, rank, 2, 7, b"state of %d" % rank)
    async with serving(there) as url:
        _, found = await prepared(here, order(StateSource(url, 0, 2, 7, count=2), ranks=(0, 1)))
    assert [Path(rank.private).read_bytes() for rank in found] == [b"state of 0", b"state of 1"]


async def test_a_holder_of_the_needed_slot_is_asked_to_release_it(here: Path, there: Path) -> None:
    sent = snapshot(there, 2, 7, fill=5)
    private(there, 0, 2, 7)
    for step in (1, 2):
        snapshot(here, 1, step)
    mine = holdings(here).arena
    async with serving(there) as url:
        with ExitStack() as held:
            held.enter_context(mine.pin(mine.records()[1]))
            launch, _ = await prepared(
                here, order(StateSource(url, -1, 2, 7), StateSource(url, 0, 2, 7)), held.close
            )
    assert launch.restore is not None
    assert Path(launch.restore.path).read_bytes() == sent.path.read_bytes()


async def test_slots_that_are_never_released_are_reported_and_the_state_is_not_blamed(
    here: Path, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restore, "ROOM_S", 0.05)
    snapshot(there, 2, 7)
    for step in (1, 2):
        snapshot(here, 1, step)
    mine, asked = holdings(here).arena, list[None]()
    newest, older = mine.records()
    async with serving(there) as url:
        with (
            mine.pin(older),
            mine.pin(newest),
            pytest.raises(NoFreeSlot, match="no slot of the arena is free"),
        ):
            await prepared(here, order(StateSource(url, -1, 2, 7)), lambda: asked.append(None))
    assert asked
    assert mine.records() == (newest, older)


async def test_while_a_checkpoint_reads_the_older_snapshot_the_newer_one_is_overwritten(
    here: Path, there: Path
) -> None:
    sent = snapshot(there, 2, 7, fill=5)
    private(there, 0, 2, 7)
    for step in (1, 2):
        snapshot(here, 1, step, fill=step)
    mine = holdings(here).arena
    _, older = mine.records()
    async with serving(there) as url:
        with mine.pin(older) as read:
            before = read.read_bytes()
            wanted = order(StateSource(url, -1, 2, 7), StateSource(url, 0, 2, 7))
            launch, _ = await prepared(here, replace(wanted, lineage=(Lineage(2, 1), Lineage(3, 7))))
            assert read.read_bytes() == before
    assert launch.restore is not None
    assert Path(launch.restore.path).read_bytes() == sent.path.read_bytes()
    assert [(each.generation, each.step) for each in mine.records()] == [(2, 7), (1, 1)]
    assert launch.restore.other == (1, 1), "the rank may also go back to this state"


async def test_a_void_snapshot_that_is_being_read_is_waited_for_before_the_other_is_overwritten(
    here: Path, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot(there, 2, 7)
    private(there, 0, 2, 7)
    for generation, step in ((1, 3), (2, 2)):
        snapshot(here, generation, step)
    mine = holdings(here).arena
    newest, older = mine.records()
    async with serving(there) as url:
        wanted = order(StateSource(url, -1, 2, 7), StateSource(url, 0, 2, 7))
        wanted = replace(wanted, lineage=(Lineage(2, 1), Lineage(3, 7)))
        with ExitStack() as held:
            held.enter_context(mine.pin(older))
            launch, _ = await prepared(here, wanted, held.close)
        assert launch.restore is not None
        assert launch.restore.other == (newest.generation, newest.step)
        snapshot(there, 2, 9)
        private(there, 0, 2, 9)
        monkeypatch.setattr(restore, "ROOM_S", 0.05)
        later = replace(LAUNCH, restore=Restore(9, 2, "slot"))
        wanted = order(StateSource(url, -1, 2, 9), StateSource(url, 0, 2, 9), launch=later)
        with mine.pin(newest):
            launch, _ = await prepared(here, replace(wanted, lineage=(Lineage(3, 1), Lineage(4, 9))))
    assert launch.restore is not None
    assert (launch.restore.step, launch.restore.other) == (9, ())


async def test_missing_state_is_fetched(here: Path, there: Path) -> None:
    sent = snapshot(there, 2, 7, fill=5)
    private(there, 1, 2, 7, b"theirs")
    async with serving(there) as url:
        wanted = order(
            StateSource("http://127.0.0.1:9", -1, 2, 7),
            StateSource(url, -1, 2, 7),
            StateSource(url, 1, 2, 7),
            ranks=(1,),
        )
        launch, [rank] = await prepared(here, wanted)
    assert launch.restore is not None
    assert Path(launch.restore.path).read_bytes() == sent.path.read_bytes()
    assert Path(launch.restore.path).is_relative_to(here)
    assert Path(rank.private).read_bytes() == b"theirs"


async def test_private_states_of_the_named_generation_are_used(here: Path) -> None:
    snapshot(here, 2, 7)
    private(here, 0, 1, 7, b"old")
    private(here, 0, 2, 7, b"new", kept=True)
    _, [rank] = await prepared(here, order(StateSource("", 0, 0, 0), StateSource("", 0, 2, 7)))
    assert Path(rank.private).read_bytes() == b"new"


async def test_a_damaged_snapshot_is_fetched_from_a_peer_and_not_used_locally_again(
    here: Path, there: Path
) -> None:
    record = snapshot(here, 2, 7)
    private(here, 0, 2, 7)
    holdings(here).arena.seal(record)
    flip(record)
    snapshot(there, 2, 7)
    async with serving(there) as url:
        launch, _ = await prepared(here, order(StateSource(url, -1, 2, 7), StateSource("", 0, 2, 7)))
    assert launch.restore is not None
    [held] = holdings(here).arena.records()
    assert holdings(here).good(held)
    assert launch.restore.path == str(held.path)


async def test_a_damaged_snapshot_without_another_holder_is_reported(here: Path) -> None:
    record = snapshot(here, 2, 7)
    holdings(here).arena.seal(record)
    flip(record)
    with pytest.raises(StateUnavailable, match="the snapshot of step 7 here fails its checksum") as caught:
        await prepared(here, order(StateSource("http://127.0.0.1:9", -1, 2, 7)))
    assert caught.value.slot == HeldSnapshot(2, 7, record.total_bytes)
    assert holdings(here).slots() == ()


async def test_a_state_that_no_member_has_is_named(here: Path) -> None:
    with pytest.raises(StateUnavailable, match="no member has the snapshot of step 7"):
        await prepared(here, order())
    snapshot(here, 2, 7)
    with pytest.raises(StateUnavailable, match="no member has the private state of rank 0"):
        await prepared(here, order(StateSource("", 1, 2, 7), StateSource("", 0, 2, 6)))
    with pytest.raises(StateUnavailable, match=r"127\.0\.0\.1:9"):
        await prepared(here, order(StateSource("http://127.0.0.1:9", 0, 2, 7)))


async def test_preparing_twice_gives_the_same_result(here: Path) -> None:
    snapshot(here, 2, 7)
    private(here, 0, 2, 7)
    wanted = order(StateSource("", 0, 2, 7))
    assert await prepared(here, wanted) == await prepared(here, wanted)


# -- from storage


def written(root: Path) -> Path:
    return writer.write(
        root,
        generation=2,
        step=7,
        world_size=2,
        files={"replicated.safetensors": b"s", "rank-00000.bin": b"0", "rank-00001.bin": b"1"},
        meta={},
        created_at=0.0,
    )


async def test_each_rank_gets_its_own_file_of_a_checkpoint(here: Path, tmp_path: Path) -> None:
    path = written(tmp_path)
    launch = replace(
        LAUNCH, restore=Restore(7, 2, "checkpoint", f"/where/the/supervisor/sees/it/{path.name}")
    )
    found, ranks = await prepared(here, order(launch=launch, ranks=(0, 1)), storage=tmp_path)
    assert found.restore == Restore(7, 2, "checkpoint", str(path))
    assert [Path(rank.private).read_bytes() for rank in ranks] == [b"0", b"1"]


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("rank-00001.bin", b"x", "rank-00001.bin is damaged"),
        ("rank-00001.bin", b"", "rank-00001.bin has 0 bytes, but 1 were written"),
        ("manifest.json", b"{}", "manifest.json"),
        ("manifest.json", None, "manifest.json is missing"),
    ],
)
async def test_a_damaged_checkpoint_is_reported(
    here: Path, tmp_path: Path, name: str, content: bytes | None, why: str
) -> None:
    path = written(tmp_path)
    if content is None:
        (path / name).unlink()
    else:
        (path / name).write_bytes(content)
    launch = replace(LAUNCH, restore=Restore(7, 2, "checkpoint", str(path)))
    with pytest.raises(StateUnavailable, match="checkpoint step-00000007: ") as caught:
        await prepared(here, order(launch=launch), storage=tmp_path)
    assert why in str(caught.value)
    assert caught.value.slot is None


async def test_a_checkpoint_of_the_same_step_from_another_generation_is_a_different_state(
    here: Path, tmp_path: Path
) -> None:
    launch = replace(LAUNCH, restore=Restore(7, 1, "checkpoint", str(written(tmp_path))))
    with pytest.raises(StateUnavailable, match="its generation is 2, expected 1"):
        await prepared(here, order(launch=launch), storage=tmp_path)


@pytest.mark.parametrize("is_large", [True, False])
async def test_the_memory_of_large_states_is_released_outside_the_event_loop(
    here: Path, monkeypatch: pytest.MonkeyPatch, is_large: bool
) -> None:
    """The kernel takes a quarter of a second for each gigabyte."""
    old = here / member_directory.RESTORED / member_directory.restored_name(1, 1, 3, 0)
    old.parent.mkdir(exist_ok=True)
    old.touch()
    os.truncate(old, restore.AT_ONCE_BYTES + 1 if is_large else 0)
    threads: list[threading.Thread] = []
    forget = Holdings.forget_restored

    def forgotten(held: Holdings, wanted: frozenset[tuple[int, int, int]], resumed_step: int) -> None:
        threads.append(threading.current_thread())
        forget(held, wanted, resumed_step)

    monkeypatch.setattr(Holdings, "forget_restored", forgotten)
    snapshot(here, 2, 7)
    private(here, 0, 2, 7)
    await prepared(here, order(StateSource("", 0, 2, 7)))
    assert threads
    assert (threading.main_thread() not in threads) is is_large


async def restarted(here: Path, generation: int, step: int, ranks: tuple[int, ...] = (0, 1)) -> list[Path]:
    """Prepare the start of `generation` from its predecessor's state, and return the ranks' files."""
    snapshot(here, generation - 1, step)
    for rank in ranks:
        private(here, rank, generation - 1, step, b"%d of %d" % (rank, step))
    launch = replace(LAUNCH, generation=generation, restore=Restore(step, generation - 1, "slot"))
    sources = [StateSource("", rank, generation - 1, step) for rank in ranks]
    _, starts = await prepared(here, order(*sources, launch=launch, ranks=ranks))
    return [Path(each.private) for each in starts]


async def test_private_states_do_not_accumulate_over_restarts(here: Path) -> None:
    for generation in range(2, 50):
        files = await restarted(here, generation, 10 * generation)
        assert [each.read_bytes() for each in files] == [b"%d of %d" % (r, 10 * generation) for r in (0, 1)]
        steps = {slot.step for slot in holdings(here).slots()}
        kept = {int(each.name.split("-")[2]) for each in (here / "restore").iterdir()}
        assert kept <= steps, "no rank may be offered any other state"
        assert len(list((here / "restore").iterdir())) <= 4, "at most two snapshots for two ranks"


async def test_private_states_do_not_accumulate_over_restarts_at_one_step(here: Path) -> None:
    for generation in range(2, 20):
        await restarted(here, generation, 7)
        assert len(list((here / "restore").iterdir())) <= 4


async def test_private_states_of_a_snapshot_that_is_still_held_are_kept(here: Path) -> None:
    """The group may go back to that snapshot, and the rank's own store may lack the step."""
    [before] = await restarted(here, 2, 7, ranks=(0,))
    [now] = await restarted(here, 3, 9, ranks=(0,))
    assert {slot.step for slot in holdings(here).slots()} == {7, 9}
    assert (before.read_bytes(), now.read_bytes()) == (b"0 of 7", b"0 of 9")


@pytest.mark.parametrize("ahead_s", [86_400, -86_400])
async def test_a_wall_clock_change_does_not_remove_the_files_of_a_starting_rank(
    here: Path, ahead_s: int
) -> None:
    ranks = tuple(range(4))
    for generation in range(2, 24):
        files = await restarted(here, generation, generation, ranks)
        assert [each.read_bytes() for each in files] == [b"%d of %d" % (r, generation) for r in ranks]
        for each in (here / "restore").iterdir():
            later = each.stat().st_mtime + ahead_s
            os.utime(each, (later, later))


async def test_an_overtaken_preparation_removes_nothing(here: Path, there: Path) -> None:
    """Its snapshot arrives late, while the ranks of the next generation already read their files."""
    snapshot(here, 2, 7)
    private(here, 0, 2, 7, b"mine")
    async with fetching(here) as fetcher:
        preparer = Restorer(holdings(here), fetcher, DirectoryStorage(there))
        newer = replace(LAUNCH, generation=5)
        _, [rank] = await preparer.prepare(order(StateSource("", 0, 2, 7), launch=newer), lambda: None)
        with pytest.raises(StateUnavailable, match="generation 5 was ordered"):
            await preparer.prepare(order(StateSource("", 0, 1, 3)), lambda: None)
    assert Path(rank.private).read_bytes() == b"mine"


# -- a memory volume that is full


def test_a_full_volume_is_named_with_its_free_and_the_needed_space(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restore, "VOLUME_S", 0.05)
    snapshot(here, 2, 7)
    private(here, 0, 2, 7, bytes(2000))
    before = sorted((here / "arena").iterdir())

    def child() -> None:
        limit_file_size(1000)
        with pytest.raises(
            VolumeRefused, match=r"2,000 bytes are needed for the private state of rank 0; .* free"
        ):
            asyncio.run(prepared(here, order(StateSource("", 0, 2, 7))))

    assert in_child(child) == 0
    assert sorted((here / "arena").iterdir()) == before, "a full volume does not discredit the state"


async def test_a_volume_that_has_space_again_is_used(here: Path) -> None:
    """The kernel frees the memory of a lost member a moment later."""
    snapshot(here, 2, 7)
    private(here, 0, 2, 7, b"mine")
    (here / "restore").write_bytes(b"no folder can be made here")
    _, [rank] = await prepared(here, order(StateSource("", 0, 2, 7)), (here / "restore").unlink)
    assert Path(rank.private).read_bytes() == b"mine"


async def test_a_rank_of_a_group_of_another_size_starts_from_the_state_of_the_rank_that_it_was(
    here: Path, there: Path
) -> None:
    snapshot(here, 2, 7)
    for rank in range(3):
        private(there, rank, 2, 7, b"state of %d" % rank)
    async with serving(there) as url:
        wanted = order(StateSource(url, 0, 2, 7, count=3))
        ranks = (RankStart(0, 0), RankStart(1, 1, state_of=2), RankStart(2, 2, state_of=0, is_shared=True))
        _, found = await prepared(here, replace(wanted, ranks=ranks))
    assert [Path(rank.private).read_bytes() for rank in found] == [b"state of %d" % n for n in (0, 2, 0)]
