from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast import checkpoint
from holdfast.launcher_messages import Launch, RankStart, Restore
from holdfast.lineage import Lineage
from holdfast.messages import MemberOrder, Slot, Source
from sidecar import prepare
from sidecar.holdings import Holdings
from sidecar.prepare import Occupied, Preparer, Unprepared
from tests.unit.sidecar.memory import flip, holdings, member, private, snapshot
from tests.unit.sidecar.peering import fetching, serving

LAUNCH = Launch(3, 2, 1, "", 0, 0, 0.0, restore=Restore(7, 2, "slot"))


@pytest.fixture
def here() -> Iterator[Path]:
    with member() as path:
        yield path


@pytest.fixture
def there() -> Iterator[Path]:
    with member() as path:
        yield path


def order(*sources: Source, launch: Launch = LAUNCH, ranks: tuple[int, ...] = (0,)) -> MemberOrder:
    places = tuple(RankStart(rank, local) for local, rank in enumerate(ranks))
    return MemberOrder("run", launch.generation, launch, places, sources)


async def prepared(
    here: Path,
    wanted: MemberOrder,
    make_room: Callable[[], object] = lambda: None,
    storage: Path = Path("/nowhere"),
) -> tuple[Launch, tuple[RankStart, ...]]:
    async with fetching(here) as fetcher:
        return await Preparer(holdings(here), fetcher, storage).prepare(wanted, make_room)


async def test_a_start_from_the_beginning_needs_nothing(here: Path) -> None:
    launch = replace(LAUNCH, restore=None)
    wanted = order(launch=launch)
    assert await prepared(here, wanted) == (launch, wanted.ranks)


async def test_what_is_here_is_used_where_it_lies(here: Path) -> None:
    record = snapshot(here, 2, 7)
    private(here, 0, 2, 7, b"mine")
    launch, [rank] = await prepared(here, order(Source("", 0, 2, 7)))
    assert launch.restore is not None
    assert launch.restore.path == str(record.path)
    assert Path(rank.private).read_bytes() == b"mine"


async def test_who_holds_the_slot_that_is_needed_is_made_to_let_go(here: Path, there: Path) -> None:
    sent = snapshot(there, 2, 7, fill=5)
    private(there, 0, 2, 7)
    for step in (1, 2):
        snapshot(here, 1, step)
    mine = holdings(here).arena
    async with serving(there) as url:
        with ExitStack() as held:
            held.enter_context(mine.pin(mine.records()[1]))
            launch, _ = await prepared(here, order(Source(url, -1, 2, 7), Source(url, 0, 2, 7)), held.close)
    assert launch.restore is not None
    assert Path(launch.restore.path).read_bytes() == sent.path.read_bytes()


async def test_slots_that_nobody_lets_go_of_are_told_and_nothing_is_said_against_the_state(
    here: Path, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "ROOM_S", 0.05)
    snapshot(there, 2, 7)
    for step in (1, 2):
        snapshot(here, 1, step)
    mine, asked = holdings(here).arena, list[None]()
    newest, older = mine.records()
    async with serving(there) as url:
        with mine.pin(older), mine.pin(newest), pytest.raises(Occupied, match="no slot of the arena is free"):
            await prepared(here, order(Source(url, -1, 2, 7)), lambda: asked.append(None))
    assert asked
    assert mine.records() == (newest, older)


async def test_while_a_checkpoint_is_written_from_the_older_snapshot_the_newer_one_is_overwritten(
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
            wanted = order(Source(url, -1, 2, 7), Source(url, 0, 2, 7))
            launch, _ = await prepared(here, replace(wanted, lineage=(Lineage(2, 1), Lineage(3, 7))))
            assert read.read_bytes() == before
    assert launch.restore is not None
    assert Path(launch.restore.path).read_bytes() == sent.path.read_bytes()
    assert [(each.generation, each.step) for each in mine.records()] == [(2, 7), (1, 1)]
    assert launch.restore.other == (1, 1), "the rank may go back to it, too"


async def test_what_is_read_and_void_is_waited_for_before_the_other_is_overwritten(
    here: Path, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot(there, 2, 7)
    private(there, 0, 2, 7)
    for generation, step in ((1, 3), (2, 2)):
        snapshot(here, generation, step)
    mine = holdings(here).arena
    newest, older = mine.records()
    async with serving(there) as url:
        wanted = order(Source(url, -1, 2, 7), Source(url, 0, 2, 7))
        wanted = replace(wanted, lineage=(Lineage(2, 1), Lineage(3, 7)))
        with ExitStack() as held:
            held.enter_context(mine.pin(older))
            launch, _ = await prepared(here, wanted, held.close)
        assert launch.restore is not None
        assert launch.restore.other == (newest.generation, newest.step)
        snapshot(there, 2, 9)
        private(there, 0, 2, 9)
        monkeypatch.setattr(prepare, "ROOM_S", 0.05)
        later = replace(LAUNCH, restore=Restore(9, 2, "slot"))
        wanted = order(Source(url, -1, 2, 9), Source(url, 0, 2, 9), launch=later)
        with mine.pin(newest):
            launch, _ = await prepared(here, replace(wanted, lineage=(Lineage(3, 1), Lineage(4, 9))))
    assert launch.restore is not None
    assert (launch.restore.step, launch.restore.other) == (9, ())


async def test_what_is_not_here_is_fetched(here: Path, there: Path) -> None:
    sent = snapshot(there, 2, 7, fill=5)
    private(there, 1, 2, 7, b"theirs")
    async with serving(there) as url:
        wanted = order(
            Source("http://127.0.0.1:9", -1, 2, 7), Source(url, -1, 2, 7), Source(url, 1, 2, 7), ranks=(1,)
        )
        launch, [rank] = await prepared(here, wanted)
    assert launch.restore is not None
    assert Path(launch.restore.path).read_bytes() == sent.path.read_bytes()
    assert Path(launch.restore.path).is_relative_to(here)
    assert Path(rank.private).read_bytes() == b"theirs"


async def test_private_states_of_the_generation_that_is_named_are_taken(here: Path) -> None:
    snapshot(here, 2, 7)
    private(here, 0, 1, 7, b"old")
    private(here, 0, 2, 7, b"new", kept=True)
    _, [rank] = await prepared(here, order(Source("", 0, 0, 0), Source("", 0, 2, 7)))
    assert Path(rank.private).read_bytes() == b"new"


async def test_a_damaged_snapshot_is_fetched_from_a_peer_and_not_used_here_again(
    here: Path, there: Path
) -> None:
    record = snapshot(here, 2, 7)
    private(here, 0, 2, 7)
    holdings(here).arena.seal(record)
    flip(record)
    snapshot(there, 2, 7)
    async with serving(there) as url:
        launch, _ = await prepared(here, order(Source(url, -1, 2, 7), Source("", 0, 2, 7)))
    assert launch.restore is not None
    [held] = holdings(here).arena.records()
    assert holdings(here).good(held)
    assert launch.restore.path == str(held.path)


async def test_a_damaged_snapshot_that_nobody_else_has_is_told(here: Path) -> None:
    record = snapshot(here, 2, 7)
    holdings(here).arena.seal(record)
    flip(record)
    with pytest.raises(Unprepared, match="the snapshot of step 7 here fails its checksum") as caught:
        await prepared(here, order(Source("http://127.0.0.1:9", -1, 2, 7)))
    assert caught.value.slot == Slot(2, 7, record.total_bytes)
    assert holdings(here).slots() == ()


async def test_what_nobody_has_is_named(here: Path) -> None:
    with pytest.raises(Unprepared, match="no member has the snapshot of step 7"):
        await prepared(here, order())
    snapshot(here, 2, 7)
    with pytest.raises(Unprepared, match="no member has the private state of rank 0"):
        await prepared(here, order(Source("", 1, 2, 7), Source("", 0, 2, 6)))
    with pytest.raises(Unprepared, match=r"127\.0\.0\.1:9"):
        await prepared(here, order(Source("http://127.0.0.1:9", 0, 2, 7)))


async def test_preparing_again_gives_the_same(here: Path) -> None:
    snapshot(here, 2, 7)
    private(here, 0, 2, 7)
    wanted = order(Source("", 0, 2, 7))
    assert await prepared(here, wanted) == await prepared(here, wanted)


async def test_files_of_older_starts_are_removed(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "KEPT", 2)
    snapshot(here, 2, 7)
    for generation in range(2, 6):
        private(here, 0, generation, 7)
        await prepared(here, order(Source("", 0, generation, 7)))
    assert len(list((here / "restore").iterdir())) == 2


# -- from storage


def written(root: Path) -> Path:
    return checkpoint.write(
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
        ("rank-00001.bin", b"", "rank-00001.bin has 0 bytes, 1 were written"),
        ("manifest.json", b"{}", "manifest.json"),
        ("manifest.json", None, "manifest.json is missing"),
    ],
)
async def test_a_damaged_checkpoint_is_told(
    here: Path, tmp_path: Path, name: str, content: bytes | None, why: str
) -> None:
    path = written(tmp_path)
    if content is None:
        (path / name).unlink()
    else:
        (path / name).write_bytes(content)
    launch = replace(LAUNCH, restore=Restore(7, 2, "checkpoint", str(path)))
    with pytest.raises(Unprepared, match="checkpoint step-00000007: ") as caught:
        await prepared(here, order(launch=launch), storage=tmp_path)
    assert why in str(caught.value)
    assert caught.value.slot is None


async def test_a_checkpoint_of_the_same_step_that_another_generation_wrote_is_another_state(
    here: Path, tmp_path: Path
) -> None:
    launch = replace(LAUNCH, restore=Restore(7, 1, "checkpoint", str(written(tmp_path))))
    with pytest.raises(Unprepared, match="it is of generation 2, expected 1"):
        await prepared(here, order(launch=launch), storage=tmp_path)


async def test_memory_is_given_back_beside_the_event_loop(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the kernel a quarter of a second for each gigabyte."""
    threads: list[threading.Thread] = []
    forget = Holdings.forget_restored

    def forgotten(held: Holdings, keep: int) -> None:
        threads.append(threading.current_thread())
        forget(held, keep)

    monkeypatch.setattr(Holdings, "forget_restored", forgotten)
    snapshot(here, 2, 7)
    private(here, 0, 2, 7)
    await prepared(here, order(Source("", 0, 2, 7)))
    assert threads
    assert threading.main_thread() not in threads
