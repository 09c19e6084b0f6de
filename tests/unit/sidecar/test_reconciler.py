from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn, get_args

import pytest

from holdfast.checkpoint.object_location import ObjectLocation
from holdfast.process import event_loop
from holdfast.process.clock import NORMAL_LATENESS_S
from holdfast.protocol import codec
from holdfast.protocol.launcher_messages import (
    Launch,
    LauncherOrder,
    LauncherState,
    RankInspection,
    RankStart,
    Restore,
)
from holdfast.protocol.member_messages import (
    MAX_UNUSABLE,
    DrillOrder,
    HeldSnapshot,
    MemberAction,
    MemberOrder,
    MemberReport,
    RankStall,
    StateSource,
)
from holdfast.protocol.progress_writer import Page
from sidecar.config import Config
from sidecar.reconciler import SOONEST_S, Sidecar
from supervisor.view.faults import find_faults
from supervisor.view.model import Policy
from tests.unit.sidecar.fake_launcher import LIMIT_S, Launcher
from tests.unit.sidecar.memory import flip, holdings, member, private, snapshot
from tests.unit.supervisor.job_views import launcher, rank, view
from tests.unit.supervisor.job_views import member as view_of_member

LAUNCH = Launch(2, 1, 1, "", 0, 0, 0.0)
POLL_S = 0.25
NOBODY = 1 << 30  # higher than any pid that a kernel assigns


@pytest.fixture
def here() -> Iterator[Path]:
    with member() as path:
        yield path


@dataclass
class Place:
    """A running sidecar and its launcher."""

    sidecar: Sidecar
    there: Launcher
    writer: asyncio.StreamWriter

    async def tells(self, state: LauncherState) -> None:
        """Have the launcher send `state`, and return once the sidecar has it."""
        self.writer.write(codec.encode(state))
        await self.until(lambda report: report.launcher == replace(state, looks=()))

    async def until(self, condition: object) -> MemberReport:
        """Return the first report for which `condition` holds."""
        assert callable(condition)
        deadline = asyncio.get_running_loop().time() + LIMIT_S
        while not condition(report := self.sidecar.next_report()):
            assert asyncio.get_running_loop().time() < deadline
            self.sidecar.supervisor.dirty.clear()
            await asyncio.wait_for(self.sidecar.supervisor.dirty.wait(), LIMIT_S)
        return report

    async def heard(self) -> LauncherOrder:
        line = await asyncio.wait_for(self.there.heard.get(), LIMIT_S)
        return codec.decode(LauncherOrder, line)


@asynccontextmanager
async def at_work(here: Path, objects: ObjectLocation | None = None) -> AsyncIterator[Place]:
    token = here / "token"
    token.write_text("secret\n")
    config = Config("m0", "n0", 1, here, here / "checkpoints", "http://127.0.0.1:9", token, objects=objects)
    sidecar, there = Sidecar(config), Launcher(here / "launcher.sock")
    async with there.listening():
        services = [asyncio.create_task(work()) for work in (sidecar.launcher.run, sidecar.pursue)]
        try:
            writer = await asyncio.wait_for(there.came.get(), LIMIT_S)
            place = Place(sidecar, there, writer)
            await place.tells(launcher(rank(0)))
            yield place
        finally:
            await event_loop.end(services)
            await sidecar.peers.close()
            writer.close()


def run(generation: int = 2, restore: Restore | None = None, *sources: StateSource) -> MemberOrder:
    launch = replace(LAUNCH, generation=generation, restore=restore)
    return MemberOrder("run", generation, launch, (RankStart(0, 0),), sources)


async def test_a_generation_is_started_once_its_state_is_available(here: Path) -> None:
    record = snapshot(here, 1, 5)
    private(here, 0, 1, 5, b"mine")
    async with at_work(here) as place:
        await place.sidecar.obey(run(2, Restore(5, 1, "slot"), StateSource("", 0, 1, 5)))
        order = await place.heard()
        assert (order.do, order.generation) == ("run", 2)
        assert order.launch is not None
        assert order.launch.restore is not None
        assert order.launch.restore.path == str(record.path)
        assert Path(order.ranks[0].private).read_bytes() == b"mine"
        await place.tells(launcher(rank(0, generation=2), generation=2))
        await place.sidecar.obey(replace(run(2), settled=True))
        assert (await place.heard()).do == "settle"


UNREADABLE = '{"do": "run", "epoch": 4, "generation": 2, "colour": "red"}'


async def test_an_order_to_start_that_cannot_be_read_ends_the_supervisors_wait(here: Path) -> None:
    async with at_work(here) as place:
        place.sidecar.report_unreadable(UNREADABLE, "unknown field")
        told = place.sidecar.next_report()
        assert told.prepare_error == "the order to start cannot be read: unknown field"
        assert (told.prepare_generation, told.prepare_occupied) == (2, True), "the state may be good"
        [found] = find_faults(
            view(view_of_member("m0", told), generation=2, placement=("m0",), world_size=1), Policy()
        )
        assert (found.kind, found.member, found.signature) == ("restore", "m0", "restore")
        await place.sidecar.obey(replace(run(3), epoch=4))
        assert place.sidecar.next_report().prepare_error == "", "the next order can be read"


@pytest.mark.parametrize(
    "text",
    [
        "not json",
        "[]",
        '{"do": "run"}',
        '{"do": "run", "epoch": 4, "generation": "2"}',
        UNREADABLE.replace("run", "secure"),
        UNREADABLE.replace("4", "0"),
        UNREADABLE.replace("2", "1"),
    ],
)
async def test_other_messages_that_cannot_be_read_cannot_cause_a_restart(here: Path, text: str) -> None:
    """Not even an order to ranks that already run, nor one of a supervisor that was replaced."""
    async with at_work(here) as place:
        await place.sidecar.obey(MemberOrder("idle", 1, epoch=1))
        place.sidecar.report_unreadable(text, "unknown field")
        assert place.sidecar.next_report().prepare_error == ""


@pytest.mark.parametrize(
    ("ours", "theirs", "left"),
    [((), (5,), (3,)), ((5,), (), (3,)), ((), (4,), (5, 3)), ((), (5, 3), (3,))],
    ids=["another member's rank", "a rank of this member", "another step", "the last one stays"],
)
async def test_snapshots_of_steps_that_a_rank_has_made_void_are_forgotten(
    here: Path, ours: tuple[int, ...], theirs: tuple[int, ...], left: tuple[int, ...]
) -> None:
    for step in (3, 5):
        snapshot(here, 2, step)
    page = Page.create(here / "page-0.bin")
    page.begin(2, 0, 0, 77, 5)
    for step in ours:
        page.note_late(step, amended=False)
    async with at_work(here) as place:
        await place.tells(launcher(rank(0, generation=2), generation=2))
        await place.sidecar.obey(replace(run(2), void=theirs, do="secure"))
        assert [slot.step for slot in place.sidecar.next_report().slots] == [5, 3], (
            "it may be the only remaining state"
        )
        await place.sidecar.obey(replace(run(2), void=theirs))
        place.sidecar._pursue()
        assert tuple(slot.step for slot in place.sidecar.next_report().slots) == left


async def test_a_step_that_a_rank_makes_void_is_reported_once_it_is_seen(here: Path) -> None:
    page = Page.create(here / "page-0.bin")
    page.begin(2, 0, 0, 77, 5)
    async with at_work(here) as place:
        await place.tells(launcher(rank(0, generation=2), generation=2))
        await place.sidecar.obey(run(2))
        place.sidecar._poll(place.sidecar.launcher.heard_s, 0.0)
        place.sidecar.supervisor.dirty.clear()
        place.sidecar._poll(place.sidecar.launcher.heard_s, 0.0)
        assert not place.sidecar.supervisor.dirty.is_set()
        page.note_late(5, amended=False)
        place.sidecar._poll(place.sidecar.launcher.heard_s, 0.0)
        assert place.sidecar.supervisor.dirty.is_set()


async def test_an_older_order_is_refused(here: Path) -> None:
    async with at_work(here) as place:
        await place.sidecar.obey(MemberOrder("idle", 5))
        await place.sidecar.obey(run(4))
        assert place.sidecar.order == MemberOrder("idle", 5)


async def test_a_replaced_supervisor_is_also_refused_by_a_restarted_sidecar(here: Path) -> None:
    newer = replace(MemberOrder("idle", 3), epoch=2)
    async with at_work(here) as place:
        await place.sidecar.obey(replace(run(5), epoch=1))
        assert (await place.heard()).epoch == 1, "the launcher must learn the epoch of the order"
        await place.sidecar.obey(newer)
        assert place.sidecar.order == newer, "a newer epoch outranks any generation"
        await place.sidecar.obey(replace(run(9), epoch=1))
        assert place.sidecar.order == newer
        assert "order of epoch 1 refused" in place.sidecar.next_report().notes[0]
    async with at_work(here) as place:
        assert place.sidecar.next_report().epoch == 2
        await place.sidecar.obey(replace(MemberOrder("stop", 9), epoch=1))
        await place.sidecar.obey(replace(run(2), epoch=2))
        assert place.sidecar.order == MemberOrder("idle", 0), "generation 2 of epoch 2 was over before"
        await place.sidecar.obey(newer)
        assert place.sidecar.order == newer


async def test_a_sidecar_that_has_lost_its_epoch_file_learns_the_epoch_from_its_launcher(here: Path) -> None:
    async with at_work(here) as place:
        await place.tells(replace(launcher(rank(0)), epoch=4))
        await place.sidecar.obey(replace(run(9), epoch=3))
        assert place.sidecar.order == MemberOrder("idle", 0)
        assert place.sidecar.next_report().epoch == 4


async def test_a_failed_preparation_is_reported_with_its_generation_and_forgotten_with_it(here: Path) -> None:
    record = snapshot(here, 1, 5)
    holdings(here).arena.seal(record)
    flip(record)
    async with at_work(here) as place:
        await place.sidecar.obey(run(2, Restore(5, 1, "slot")))
        told = await place.until(lambda report: report.prepare_error)
        assert told.prepare_error == "the snapshot of step 5 here fails its checksum"
        assert told.prepare_generation == 2
        assert told.unusable == (HeldSnapshot(1, 5, record.total_bytes),)
        await place.sidecar.obey(run(3))
        assert place.sidecar.next_report().prepare_error == ""
        assert (await place.heard()).generation == 3


async def test_a_report_lists_only_the_last_unusable_snapshots(here: Path) -> None:
    record = snapshot(here, 1, 5)
    holdings(here).arena.seal(record)
    flip(record)
    async with at_work(here) as place:
        earlier = tuple(HeldSnapshot(1, step, 1) for step in range(MAX_UNUSABLE))
        place.sidecar.preparation.unusable = earlier
        await place.sidecar.obey(run(2, Restore(5, 1, "slot")))
        told = await place.until(lambda report: report.prepare_error)
        assert told.unusable == (*earlier[1:], HeldSnapshot(1, 5, record.total_bytes))


async def test_while_a_rank_is_late_the_launcher_inspects_repeatedly_and_the_results_are_reported(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = RankInspection(0, 5, 3, 0, "S", 0.0, "stack", number=1)
    async with at_work(here) as place:
        sidecar = place.sidecar
        await sidecar.obey(MemberOrder("run", 1))
        late = [RankStall(0, 1, 5, 3, 0, "forward", 0.7, 0.6)]
        monkeypatch.setattr(sidecar.observed.pages, "poll", lambda *_: late)
        sidecar._poll(sidecar.launcher.heard_s, 0.0)
        assert (await place.heard()) == LauncherOrder("look", 1, look=1)
        await place.tells(launcher(rank(0), looks=(seen,), looked=1))
        told = sidecar.next_report()
        assert (told.looks, told.looked_for, told.look) == ((seen,), 1, 1)
        assert told.stalls[0].stalled_s >= 0.7
        late.clear()
        sidecar._poll(sidecar.launcher.heard_s, 0.0)
        told = sidecar.next_report()
        assert (told.stalls, told.looks) == ((), ())


async def test_all_ranks_are_inspected_while_a_rank_of_another_member_is_late(here: Path) -> None:
    async with at_work(here) as place:
        await place.sidecar.obey(MemberOrder("run", 1, look=1))
        place.sidecar._poll(place.sidecar.launcher.heard_s, 0.0)
        assert (await place.heard()) == LauncherOrder("look", 1, look=1, asked=1)
        place.sidecar._poll(place.sidecar.launcher.heard_s, 0.0)
        assert place.there.heard.empty(), "one inspection at a time"


async def test_a_rank_that_stalls_again_at_another_step_is_reported_again(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with at_work(here) as place:
        await place.sidecar.obey(MemberOrder("run", 1))
        for step in (5, 9):
            found = [RankStall(0, 1, step, 3, 0, "forward", 0.7, 0.6)]
            monkeypatch.setattr(place.sidecar.observed.pages, "poll", lambda *_, found=found: found)
            place.sidecar._poll(place.sidecar.launcher.heard_s, 0.0)
            assert [each.step for each in place.sidecar.next_report().stalls] == [step]


async def test_survivors_are_asked_to_secure_before_the_holdings_are_listed(here: Path) -> None:
    async with at_work(here) as place:
        await place.sidecar.obey(MemberOrder("secure", 1))
        assert await place.heard() == LauncherOrder("secure", 1)
        assert place.sidecar.next_report().secured_for == 0
        snapshot(here, 1, 9)
        private(here, 0, 1, 9)
        await place.tells(launcher(rank(0), secure_asked=1))
        told = await place.until(lambda report: report.secured_for)
        assert [each.step for each in told.slots] == [9]
        assert [each.step for each in told.privates] == [9]


async def test_ranks_that_start_after_the_holdings_were_listed_are_asked_to_make_no_step(here: Path) -> None:
    """The order to run was on its way to the launcher when the request to stop came."""
    async with at_work(here) as place:
        await place.sidecar.obey(MemberOrder("secure", 2))
        await place.until(lambda report: report.secured_for == 2)
        assert place.there.heard.empty()
        await place.tells(launcher(rank(0, generation=2), generation=2))
        assert await place.heard() == LauncherOrder("secure", 2)


async def test_ranks_with_bad_state_are_asked_to_make_no_step_and_no_copy(here: Path) -> None:
    async with at_work(here) as place:
        await place.sidecar.obey(MemberOrder("secure", 1, copy=False))
        assert await place.heard() == LauncherOrder("secure", 1, copy=False)
        assert place.sidecar.next_report().secured_for == 0
        await place.tells(launcher(rank(0), secure_asked=1))
        assert (await place.until(lambda report: report.secured_for)).secured_for == 1


@pytest.mark.parametrize(
    "order", [MemberOrder("secure", 1, just_in_time=False), MemberOrder("secure", 2)], ids=["bad", "behind"]
)
async def test_holdings_are_listed_at_once_if_no_rank_must_be_asked(here: Path, order: MemberOrder) -> None:
    async with at_work(here) as place:
        await place.sidecar.obey(order)
        assert (await place.until(lambda report: report.secured_for)).secured_for == order.generation
        assert place.there.heard.empty()


async def test_a_sidecar_without_a_known_launcher_claims_nothing(here: Path) -> None:
    async with at_work(here) as place:
        place.writer.close()
        await place.until(lambda report: report.launcher is None)
        await place.sidecar.obey(MemberOrder("secure", 1, just_in_time=False))
        place.writer = await asyncio.wait_for(place.there.came.get(), LIMIT_S)
        assert place.sidecar.next_report().secured_for == 0
        place.writer.write(codec.encode(launcher(rank(0))))
        await place.until(lambda report: report.secured_for == 1)


async def test_a_launcher_without_signs_of_life_is_reported_until_it_responds(here: Path) -> None:
    async with at_work(here) as place:
        sidecar = place.sidecar
        await place.tells(launcher(rank(0), pid=NOBODY))
        heard_s = sidecar.launcher.heard_s
        sidecar._poll(heard_s + 4.9, 0.0)
        assert sidecar.next_report().launcher_silent == ""
        sidecar._poll(heard_s + 9.0, 5.0)
        assert sidecar.next_report().launcher_silent == "", "the sidecar did not run in that time"
        sidecar._poll(heard_s + 10.5, 0.0)
        told = sidecar.next_report()
        assert told.launcher_silent == "its launcher has sent no heartbeat for 6 s and is gone"
        assert codec.decode(MemberReport, codec.encode(told)) == told
        await place.tells(launcher(rank(0), pid=NOBODY, port=4001))
        sidecar._poll(sidecar.launcher.heard_s + 1.0, 0.0)
        assert sidecar.next_report().launcher_silent == ""


async def test_a_starved_launcher_is_given_more_time(here: Path) -> None:
    async with at_work(here) as place:
        await place.tells(launcher(rank(0), pid=os.getpid()))  # runnable, as this process is at that moment
        place.sidecar._poll(place.sidecar.launcher.heard_s + 30.0, 0.0)
        assert place.sidecar.next_report().launcher_silent == ""


async def test_a_silent_launcher_is_asked_for_nothing_and_not_waited_for(here: Path) -> None:
    private(here, 0, 1, 9)
    async with at_work(here) as place:
        await place.tells(launcher(rank(0), pid=NOBODY))
        await place.sidecar.obey(MemberOrder("secure", 1))
        assert await place.heard() == LauncherOrder("secure", 1)
        assert place.sidecar.next_report().secured_for == 0
        place.sidecar._poll(place.sidecar.launcher.heard_s + 6.0, 0.0)
        told = await place.until(lambda report: report.secured_for == 1)
        assert [each.step for each in told.privates] == [9]
        await place.sidecar.obey(MemberOrder("stop", 1))
        place.sidecar._poll(place.sidecar.launcher.heard_s + 1.0, 0.0)
        assert place.sidecar.next_report().launcher_silent != "", (
            "the launcher does not listen any more at the end"
        )


async def test_ranks_whose_places_others_have_taken_are_ended(here: Path) -> None:
    async with at_work(here) as place:
        await place.sidecar.obey(MemberOrder("idle", 3))
        assert await place.heard() == LauncherOrder("kill", 1)


async def test_a_drill_is_carried_out_once(here: Path) -> None:
    async with at_work(here) as place:
        for number in (7, 7, 6):
            await place.sidecar.obey(replace(run(1), drill=DrillOrder(number, "stop", 0)))
        await place.sidecar.obey(MemberOrder("stop", 1, grace_s=2.0))
        assert await place.heard() == LauncherOrder("drill", 1, local_rank=0, what="stop")
        assert await place.heard() == LauncherOrder("stop", grace_s=2.0)


@pytest.mark.parametrize("do", [*get_args(MemberAction), "a word of a newer version"])
async def test_a_drill_and_a_save_are_carried_out_whatever_the_order_is(here: Path, do: MemberAction) -> None:
    async with at_work(here) as place:
        asked = replace(run(1), do=do, drill=DrillOrder(7, "stop", 0), save=3)
        await place.sidecar.obey(asked)
        assert await place.heard() == LauncherOrder("drill", 1, local_rank=0, what="stop")
        await place.until(lambda report: report.durable.asked == 3)


async def test_a_drill_waits_for_its_ranks_and_the_next_sidecar_does_not_repeat_it(here: Path) -> None:
    order = replace(run(1), drill=DrillOrder(7, "stop", 0))
    new = replace(launcher(rank(0)), generation=1)
    async with at_work(here) as place:
        await place.tells(replace(new, generation=0))
        await place.sidecar.obey(order)
        assert place.sidecar.next_report().drilled == 0, "those ranks have not started yet"
        await place.tells(new)
        await place.until(lambda report: report.drilled == 7)
        while await place.heard() != LauncherOrder("drill", 1, local_rank=0, what="stop"):
            continue
    async with at_work(here) as place:
        assert place.sidecar.next_report().drilled == 7
        await place.sidecar.obey(order)
        await place.sidecar.obey(MemberOrder("stop", 1, grace_s=2.0))
        assert await place.heard() == LauncherOrder("stop", grace_s=2.0)


async def test_a_requested_checkpoint_is_answered_by_its_number(here: Path) -> None:
    snapshot(here, 1, 5)
    for each in (0, 1):
        private(here, each, 1, 5)
    async with at_work(here) as place:
        asked = MemberOrder("secure", 1, just_in_time=False, save=3, save_step=5, save_generation=1)
        await place.sidecar.obey(asked)
        told = await place.until(lambda report: report.durable.asked == 3)
        assert (told.durable.step, told.durable.error) == (5, "")
        await place.sidecar.obey(replace(asked, save=4, save_step=6))
        told = await place.until(lambda report: report.durable.asked == 4)
        assert told.durable.error == "this member does not hold the snapshot of step 6"


class Stopped(Exception):
    """Raised once the watch has been observed for long enough."""


@pytest.mark.parametrize(
    ("left_s", "waits_s"),
    [(math.inf, POLL_S), (0.02, 0.02), (0.0, SOONEST_S), (10.0, POLL_S)],
    ids=["next poll", "a rank's limit", "shortest wait", "poll before the limit"],
)
def test_lateness_of_the_watch_is_only_the_time_beyond_its_own_wait(
    here: Path, monkeypatch: pytest.MonkeyPatch, left_s: float, waits_s: float
) -> None:
    token = here / "token"
    token.write_text("secret\n")
    config = Config("m0", "n0", 1, here, here / "checkpoints", "", token, poll_s=POLL_S)
    sidecar = Sidecar(config)
    sidecar.observed.pages.left_s = left_s
    most_s = waits_s + NORMAL_LATENESS_S
    clock = iter((100.0, 100.0, 100.0 + most_s, 200.0, 200.0, 200.0 + most_s + 0.3))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    waited: list[float] = []
    late: list[float] = []

    async def sleep(wait_s: float) -> None:
        waited.append(wait_s)

    def poll(_now_s: float, lateness_s: float) -> None:
        late.append(lateness_s)
        if len(late) == 2:
            raise Stopped

    monkeypatch.setattr("sidecar.reconciler.asyncio", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(sidecar, "_poll", poll)
    with pytest.raises(Stopped):
        sidecar.watch().send(None)
    assert waited == pytest.approx([waits_s, waits_s])
    assert late == pytest.approx([0.0, 0.3])


async def test_the_drill_sidecar_also_ends_the_first_process_of_a_container(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel ignores a signal that such a process sends itself, even SIGKILL."""

    class Ended(BaseException):
        """Stands for the end of this process."""

    def end(code: int) -> NoReturn:
        raise Ended(code)

    sent: list[tuple[int, int]] = []
    async with at_work(here) as place:
        with monkeypatch.context() as patched:
            patched.setattr(os, "kill", lambda pid, signum: sent.append((pid, signum)))
            patched.setattr(os, "_exit", end)
            with pytest.raises(Ended) as ended:
                await place.sidecar.obey(replace(run(1), drill=DrillOrder(7, "sidecar", 0)))
        assert (sent, ended.value.args) == ([(os.getpid(), 9)], (137,))
