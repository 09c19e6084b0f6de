"""A standby copies the newest complete state of members that train, over real loopback sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web

from holdfast.process.network import Door
from holdfast.protocol.lineage import Lineage
from holdfast.protocol.member_messages import HeldPrivateState, HeldSnapshot, MemberOrder, StateSource
from holdfast.snapshot.private_store import PrivateStore
from sidecar.standby_copy import StandbyCopier, newest_copy
from sidecar.state import peers, snapshot_send
from sidecar.state.holdings import HeldStates, Holdings
from sidecar.state.snapshot_fetch import FetchFailed, FetchManner
from tests.unit.sidecar.fake_peer import TOKEN, fetching
from tests.unit.sidecar.memory import holdings, member, private, snapshot
from tests.unit.sidecar.test_pod_reconciler import sidecar

LIMIT_S = 20.0


@pytest.fixture
def there() -> Iterator[Path]:
    with member() as path:
        yield path


@pytest.fixture
def here() -> Iterator[Path]:
    with member() as path:
        yield path


class Holder:
    """A member that trains and serves its states, with a switch for `may_spare`."""

    def __init__(self, path: Path) -> None:
        self.holdings: Holdings = holdings(path)
        self.url = ""
        self.may_spare = True
        self.asked = asyncio.Event()  # set whenever the server asks whether it may spare a snapshot

    def _may_spare(self) -> bool:
        self.asked.set()
        return self.may_spare


@asynccontextmanager
async def holding(path: Path) -> AsyncIterator[Holder]:
    holder = Holder(path)
    app = peers.application(holder.holdings, lambda: TOKEN, Door(), 5.0, may_spare=holder._may_spare)
    runner = web.AppRunner(app, access_log=None, handle_signals=False)
    await runner.setup()
    await web.SockSite(runner, snapshot_send.listener("127.0.0.1")).start()
    holder.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield holder
    finally:
        await runner.cleanup()


class Standby:
    """A standby with an order to copy two ranks' state from `url`."""

    def __init__(self, path: Path, fetcher: peers.PeerClient, url: str) -> None:
        self.holdings = holdings(path)
        sources = (StateSource(url, -1, 2), StateSource(url, 0, count=2))
        self.order = MemberOrder("idle", 2, sources=sources)
        self.reported = 0
        self.copier = StandbyCopier(self.holdings, fetcher, lambda: self.order, self._report)

    def _report(self) -> None:
        self.reported += 1


def put(path: Path, step: int, generation: int = 2, size: int = 1000) -> None:
    """Hold a complete state of both ranks."""
    snapshot(path, generation, step, fill=step, size=size)
    for rank in (0, 1):
        private(path, rank, generation, step, b"rank %d at %d" % (rank, step))


async def test_the_standby_has_what_a_restart_of_all_ranks_needs(there: Path, here: Path) -> None:
    put(there, 7)
    async with holding(there) as holder, fetching(here) as fetcher:
        standby = Standby(here, fetcher, holder.url)
        await standby.copier.copy()
    assert standby.reported == 1
    found = holdings(here)
    assert [(each.generation, each.step) for each in found.slots()] == [(2, 7)]
    record = found.record(2, 7)
    assert record is not None
    assert found.good(record)
    for rank in (0, 1):
        state = found.private(rank, 2, 7)
        assert state is not None
        assert state.data == b"rank %d at 7" % rank
    assert {(each.rank, each.step, each.final) for each in found.privates()} == {(0, 7, True), (1, 7, True)}


async def test_the_report_of_a_standby_lists_its_copy(there: Path, here: Path) -> None:
    put(there, 7)
    async with holding(there) as holder, sidecar(here) as standby:
        sources = (StateSource(holder.url, -1, 2), StateSource(holder.url, 0, count=2))
        await standby.obey(MemberOrder("idle", 2, sources=sources, secret=TOKEN))
        assert standby.next_report().privates == ()
        await standby.copier.copy()
        report = standby.next_report()
    assert [(each.generation, each.step) for each in report.slots] == [(2, 7)]
    assert {(each.rank, each.step, each.final) for each in report.privates} == {(0, 7, True), (1, 7, True)}


async def test_a_newer_copy_replaces_the_older_of_two(there: Path, here: Path) -> None:
    async with holding(there) as holder, fetching(here) as fetcher:
        standby = Standby(here, fetcher, holder.url)
        for step in (7, 9, 12):
            put(there, step)
            await standby.copier.copy()
            await standby.copier.copy()  # nothing newer
    assert standby.reported == 3
    found = holdings(here)
    assert [each.step for each in found.slots()] == [12, 9]
    assert {(each.rank, each.step) for each in found.privates()} == {(0, 9), (1, 9), (0, 12), (1, 12)}
    assert len(list((here / "restore").iterdir())) == 4, "the files of older steps stayed"


async def test_a_state_whose_private_part_may_still_change_is_not_copied(there: Path, here: Path) -> None:
    put(there, 7)
    snapshot(there, 2, 8)
    private(there, 0, 2, 8)
    store = PrivateStore(there / "arena" / "private-00001.bin", 1)
    store.put(2, 8, b"not final", final=False)
    store.close()
    async with holding(there) as holder, fetching(here) as fetcher:
        standby = Standby(here, fetcher, holder.url)
        await standby.copier.copy()
    assert [each.step for each in holdings(here).slots()] == [7]


@pytest.mark.parametrize("order", [{"do": "secure"}, {"do": "run"}, {"sources": ()}])
async def test_nothing_is_copied_without_an_order(there: Path, here: Path, order: dict[str, object]) -> None:
    put(there, 7)
    async with holding(there) as holder, fetching(here) as fetcher:
        standby = Standby(here, fetcher, holder.url)
        standby.order = replace(standby.order, **order)  # type: ignore[arg-type]
        await standby.copier.copy()
    assert holdings(here).slots() == ()


async def test_a_member_in_a_recovery_spares_no_snapshot(there: Path, here: Path) -> None:
    put(there, 7)
    async with holding(there) as holder, fetching(here) as fetcher:
        holder.may_spare = False
        with pytest.raises(FetchFailed, match="503 this member can spare no snapshot"):
            await fetcher.snapshot(StateSource(holder.url, -1, 2, 7), manner=FetchManner("spare", 1))
        standby = Standby(here, fetcher, holder.url)
        await standby.copier.copy()
    assert standby.reported == 0
    assert holdings(here).slots() == ()


async def test_a_snapshot_is_not_spared_while_another_reader_has_one(there: Path, here: Path) -> None:
    put(there, 7)
    async with holding(there) as holder, fetching(here) as fetcher:
        record = holder.holdings.record(2, 7)
        assert record is not None
        async with holder.holdings.pinned(record):
            with pytest.raises(FetchFailed, match="503"):
                await fetcher.snapshot(StateSource(holder.url, -1, 2, 7), manner=FetchManner("spare", 1))
        await fetcher.snapshot(StateSource(holder.url, -1, 2, 7), manner=FetchManner("spare", 1))
    assert [each.step for each in holdings(here).slots()] == [7]


async def test_a_recovery_ends_the_copy_and_frees_the_slot(
    there: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(there, 7, size=20 << 20)  # several chunks
    monkeypatch.setattr(peers, "SPARE_BYTES_S", 1 << 20)  # each takes seconds
    async with holding(there) as holder, fetching(here) as fetcher:
        standby = Standby(here, fetcher, holder.url)
        copying = asyncio.create_task(standby.copier.copy())
        await asyncio.wait_for(holder.asked.wait(), LIMIT_S)
        standby.order = replace(standby.order, do="secure")
        await asyncio.wait_for(copying, LIMIT_S)
        assert standby.reported == 0
        assert holdings(here).slots() == ()
        incoming = standby.holdings.arena.receive(3, 9, 2, 1000)  # the start of the next generation
        incoming.abandon()


def listed(*slots: tuple[int, int], privates: tuple[tuple[int, int, int], ...]) -> HeldStates:
    return HeldStates(
        tuple(HeldSnapshot(generation, step, 8) for generation, step in slots),
        tuple(HeldPrivateState(rank, generation, step, True) for rank, generation, step in privates),
    )


TWO = MemberOrder("idle", 3, sources=(StateSource("a", -1), StateSource("a", 0), StateSource("b", 1)))


def test_private_states_may_be_on_several_members() -> None:
    held = {
        "a": listed((2, 7), privates=((0, 2, 7),)),
        "b": listed((2, 7), privates=((1, 2, 7),)),
    }
    found = newest_copy(held, TWO, (-1, -1))
    assert found == (
        StateSource("a", -1, 2, 7),
        (StateSource("a", 0, 2, 7), StateSource("b", 1, 2, 7)),
    )
    assert newest_copy(held, TWO, (7, 2)) is None
    assert newest_copy({**held, "b": HeldStates()}, TWO, (-1, -1)) is None


def test_a_void_state_is_not_copied() -> None:
    held = {
        "a": listed((2, 7), (1, 5), privates=((0, 2, 7), (1, 2, 7), (0, 1, 5), (1, 1, 5))),
        "b": HeldStates(),
    }
    resumed_at_five = replace(TWO, lineage=(Lineage(3, 5),))
    found = newest_copy(held, resumed_at_five, (-1, -1))
    assert found is not None
    assert found[0] == StateSource("a", -1, 1, 5)
