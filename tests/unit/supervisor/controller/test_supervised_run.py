from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.process import event_loop
from holdfast.protocol.launcher_messages import StartTimes
from holdfast.protocol.member_messages import CheckpointReport, HeldSnapshot, StateSource
from supervisor.controller.checkpoint_index import CheckpointIndex
from supervisor.controller.member_server import MemberServer
from supervisor.controller.records import RunDirectoryRecords
from supervisor.controller.supervised_run import SupervisedRun
from supervisor.decision import resume_point
from supervisor.observability.publisher import StatusPublisher
from supervisor.store import run_lead
from supervisor.store.journal import Journal, last
from supervisor.store.run_directory import RunDir
from supervisor.view.model import (
    Completion,
    Departure,
    JobState,
    MemberView,
    MissedWork,
    OpenIncident,
    Policy,
    ResumePoint,
    RunAction,
    Start,
    StopRequest,
    View,
    Wait,
)
from tests.unit.supervisor.job_views import S, fault, launcher, member, memory, progress, rank, report, view


@dataclass
class Backend:
    """A backend that has reported `members`."""

    members: Collection[str] = ()
    stop: StopRequest = ""
    renewed: list[str] = field(default_factory=list)
    volume_error: str = ""
    departures: dict[str, Departure] = field(default_factory=dict)

    def want(self, count: int, discard: tuple[str, ...]) -> None:
        raise AssertionError

    def end_member(self, member: str) -> None:
        raise AssertionError

    def renew(self, member: str) -> None:
        self.renewed.append(member)

    def record_stop(self, how: StopRequest) -> None:
        self.stop = how

    def finish(self, exit_code: int, why: str, message: str, completion: Completion | None) -> None:
        raise AssertionError


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SupervisedRun]:
    connections = MemberServer(time.monotonic_ns, lambda: None)
    made = SupervisedRun(
        Policy(),
        StatusPublisher(RunDir(tmp_path)),
        Backend(),
        connections,
        RunDirectoryRecords(tmp_path),
        fresh=True,
        started_ns=0,
    )
    yield made
    made.journal.decisions.close()


@pytest.mark.parametrize("ledger", ["none of ours", {"format": 99}, {"format": 1}, [1], None])
def test_an_unreadable_ledger_loses_only_the_ledger(ledger: object, tmp_path: Path) -> None:
    before = view(generation=7)
    kept = Journal(tmp_path / "journal.jsonl")
    kept.write(before, Policy(), Wait(1), before.memory, ledger)
    kept.close()
    connections = MemberServer(time.monotonic_ns, lambda: None)
    run = SupervisedRun(
        Policy(),
        StatusPublisher(RunDir(tmp_path)),
        Backend(),
        connections,
        RunDirectoryRecords(tmp_path),
        fresh=False,
        started_ns=5,
    )
    run.journal.decisions.close()
    assert run.memory == replace(before.memory, since_ns=run.memory.since_ns)
    assert run.bookkeeping.ledger.at_ns == 5


def test_a_silent_sidecar_is_inspected_once_and_not_at_the_end(run: SupervisedRun) -> None:
    seen = view(member("m0", report("m0", None), silent_s=3.0), member("m1", report("m1", None)))
    for phase in ("stopping", "saving", "running", "running"):
        run.memory = replace(seen.memory, phase=phase)
        run._renew(seen)
        assert isinstance(run.backend, Backend)
        assert run.backend.renewed == ["m0"] * (phase == "running")


class Leaving(Backend):
    """A backend that must be notified of the end."""

    def finish(self, exit_code: int, why: str, message: str, completion: Completion | None) -> None:
        self.told = exit_code, why


async def test_members_and_keeper_are_served_while_the_journal_is_written(
    run: SupervisedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, heard, loop = asyncio.Event(), threading.Event(), asyncio.get_running_loop()

    def write(*_: object) -> None:
        loop.call_soon_threadsafe(began.set)
        assert heard.wait(30), "the event loop waits for the storage"

    monkeypatch.setattr(run.journal.decisions, "write", write)
    run.backend = Leaving(stop="graceful")
    running = asyncio.create_task(run.supervise())
    await began.wait()
    assert run.memory.phase == "forming", "a decision must be written before it takes effect"
    assert run.decided.phase == "stopping"
    heard.set()
    await running
    assert (run.memory.phase, run.publisher.journal_error) == ("ended", "")
    assert run.decided is run.memory


async def test_unresponsive_storage_costs_the_journal_and_not_the_run(
    run: SupervisedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("supervisor.controller.journal_writer.JOURNAL_S", 0.05)
    monkeypatch.setattr("supervisor.controller.supervised_run.LEAVE_S", 0.05)
    answers = threading.Event()
    written: list[str] = []

    def write(_view: View, _policy: Policy, _action: RunAction, after: JobState, _ledger: object) -> None:
        answers.wait()
        written.append(after.phase)

    monkeypatch.setattr(run.journal.decisions, "write", write)
    run.backend = Leaving(stop="graceful")
    await run.supervise()
    assert run.backend.told == (130, "stopped before the first step")
    assert "has not responded" in run.publisher.journal_error
    answers.set()
    await event_loop.result_of(run.journal.thread.submit(lambda: None), 30.0)
    assert run.publisher.journal_error == ""
    assert written == ["stopping", "ended"], "the newest line must contain everything again"


async def test_the_keeper_of_the_run_stores_who_asked_for_a_stop(run: SupervisedRun) -> None:
    asked = []
    for now in (False, True):
        run.stop(now)
        asked.append(run.backend.stop)
    assert asked == ["graceful", "now"]


def published(run: SupervisedRun) -> Mapping[str, Any]:
    run.publish()
    return run.publisher.published


async def test_a_status_that_is_due_is_that_of_the_next_rounds_view(
    run: SupervisedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    views: list[View] = []
    built = run.view

    def counted() -> View:
        views.append(built())
        return views[-1]

    published: list[int] = []
    monkeypatch.setattr(run.backend, "want", lambda count, discard: None)
    monkeypatch.setattr(run, "view", counted)
    monkeypatch.setattr(run.publisher, "_published", lambda: published.append(len(views)))
    run.publish_next()
    assert published == [1], "no round can begin yet, so this has built its own view"
    await run.reconcile()
    views.clear()
    published.clear()
    run._is_waiting = True
    run.publish_next()
    assert (run.wake.is_set(), published) == (True, [])
    await run.reconcile()
    await run.reconcile()
    assert (len(views), published) == (2, [1])


def seen(run: SupervisedRun) -> list[tuple[str, bool]]:
    return [(each.name, each.exists) for each in run._observe().members]


def test_a_sidecar_that_connects_before_its_member_is_known_is_not_lost(run: SupervisedRun) -> None:
    run.member_server.connection("m0").report = report("m0", None)
    assert seen(run) == []
    run.backend = Backend(("m0",))
    assert seen(run) == [("m0", True)]
    assert run._observe().members[0].report is not None


def test_a_status_is_due_when_a_sidecar_connects_or_disconnects_but_not_for_mere_reports(
    run: SupervisedRun,
) -> None:
    first = member("m0", report("m0", None))
    assert first.report is not None
    gone = replace(first, connected=False)
    another = replace(first, report=replace(first.report, sidecar_pid=first.report.sidecar_pid + 1))
    due = []
    for each in (first, replace(first, silent_s=0.4), gone, gone, another, another):
        run._compare_sidecars(view(each))
        due.append(run.members_changed.is_set())
        run.members_changed.clear()
    assert due == [True, False, True, False, True, False]


class Owned(Backend):
    """A backend whose members someone else creates."""

    def want(self, count: int, discard: tuple[str, ...]) -> None:
        self.wanted = count


async def test_a_standby_is_ordered_to_copy_a_state_that_is_on_one_node_only(run: SupervisedRun) -> None:
    run.backend = Owned({"m0": "running", "s0": "running"})
    run.policy = Policy(standby=1, members_created_externally=True)
    peers = (StateSource("http://m0:1", 0),)
    alone = memory(placement=("m0",), world_size=1, settled=True, peers=peers)
    for node, copied in (("a", ()), ("b", (StateSource("http://m0:1", -1, 1), *peers))):
        standby = member("s0", report("s0", launcher(), node=node))
        seen = view(member("m0", report("m0", launcher(), node="a")), standby)
        run.memory = alone
        await run._give_orders(replace(seen, memory=alone))
        order = run.member_server.connection("s0").order
        assert order is not None
        assert (order.do, order.sources) == ("idle", copied)


def test_a_members_rack_is_that_of_the_node_that_it_reports(run: SupervisedRun) -> None:
    run._rack_of = {"n0": "r0"}.get  # type: ignore[assignment]
    run.backend = Backend(("m0", "m1"))
    run.member_server.connection("m0").report = report("m0", None, node="n0")
    assert [each.rack for each in run.view().members] == ["r0", ""]
    assert [*run.member_server.connections] == ["m0"], "a view creates nothing"


def test_a_member_that_the_backend_has_removed_is_gone_until_it_counts_as_lost(run: SupervisedRun) -> None:
    run.backend = Backend(("m0", "m1"))
    assert seen(run) == [("m0", True), ("m1", True)]
    run.backend = Backend(("m1",))
    assert seen(run) == [("m1", True), ("m0", False)]
    run.memory = replace(run.memory, lost=("m0",))
    assert seen(run) == [("m1", True)]
    run.memory = replace(run.memory, lost=())  # only the last few lost members are remembered
    assert seen(run) == [("m1", True)], "a member that was given up must not count as lost again"


def test_the_next_run_in_the_directory_knows_what_a_stop_cut_short(tmp_path: Path) -> None:
    before = view(generation=7, phase="ended", missed=(MissedWork(0, 1, 20),))
    kept = Journal(tmp_path / "journal.jsonl")
    kept.write(before, Policy(), Wait(1), before.memory, None)
    kept.close()
    connections = MemberServer(time.monotonic_ns, lambda: None)
    run = SupervisedRun(
        Policy(),
        StatusPublisher(RunDir(tmp_path)),
        Backend(),
        connections,
        RunDirectoryRecords(tmp_path),
        fresh=True,
        started_ns=5,
    )
    run.journal.decisions.close()
    assert (run.memory.phase, run.memory.missed) == ("forming", (MissedWork(0, 1, 20),))


def led(tmp_path: Path) -> SupervisedRun:
    lead = run_lead.take_over(tmp_path / run_lead.FILE)
    records = StatusPublisher(RunDir(tmp_path), lead=lead)
    connections = MemberServer(time.monotonic_ns, lambda: None)
    return SupervisedRun(
        Policy(),
        records,
        Leaving(stop="graceful"),
        connections,
        RunDirectoryRecords(tmp_path, lead),
        fresh=True,
        started_ns=0,
    )


async def test_a_replaced_supervisor_ends_and_none_of_its_actions_has_an_effect(tmp_path: Path) -> None:
    run = led(tmp_path)
    assert run_lead.take_over(tmp_path / run_lead.FILE).epoch == 2
    with pytest.raises(run_lead.Deposed):
        await run.supervise()
    assert not hasattr(run.backend, "told"), "the members must not be told of an end"
    run.publish()
    await event_loop.result_of(run.publisher.files.submit(lambda: None), 30.0)
    assert run.publisher.deposed is not None
    assert not (tmp_path / "status.json").exists()
    assert (tmp_path / "journal.jsonl").read_bytes() == b""
    run.journal.decisions.close()


async def test_a_supervisor_whose_epoch_is_below_what_a_member_obeys_takes_a_higher_one_or_ends(
    tmp_path: Path,
) -> None:
    run = led(tmp_path)
    run.member_server.connection("m0").report = report("m0", None, epoch=6)
    await run._stay_ahead()
    assert run.lead.epoch == 7, "the file was lost, but there is no other supervisor"
    other = run_lead.take_over(tmp_path / run_lead.FILE)
    run.member_server.connection("m0").report = report("m0", None, epoch=other.epoch)
    with pytest.raises(run_lead.Deposed):
        await run._stay_ahead()
    run.journal.decisions.close()


async def test_orders_carry_the_epoch_and_a_next_supervisor_has_a_higher_one_than_the_journal(
    tmp_path: Path,
) -> None:
    run = led(tmp_path)
    run.backend = Backend(("m0",))
    run.memory = replace(run.memory, phase="stopping", exit_code=0)
    await run._give_orders(run.view())
    order = run.member_server.connection("m0").order
    assert order is not None
    assert order.epoch == 1
    now = run.view()
    run.lead.raise_above(8)
    run.journal.decisions.write(now, Policy(), Wait(1), now.memory, None)
    run.journal.decisions.close()
    (tmp_path / run_lead.FILE).unlink()
    again = led(tmp_path)
    again.journal.decisions.close()
    assert again.lead.epoch == 10


class Making(Backend):
    """A backend that creates members."""

    def want(self, count: int, discard: tuple[str, ...]) -> None:
        pass


def training(step: int) -> MemberView:
    here = progress(0, step, step - 1)
    marks = StartTimes(1, 1, 1, 1)
    return member("m0", report("m0", launcher(rank(0, marks=marks)), progress=(here,), nproc=1))


async def test_the_journal_records_that_a_state_is_held_before_any_decision(tmp_path: Path) -> None:
    """Otherwise a successor without reports would start over, as if no state had ever been saved."""
    connections = MemberServer(time.monotonic_ns, lambda: None)
    run = SupervisedRun(
        Policy(),
        StatusPublisher(RunDir(tmp_path)),
        Making({"m0": ""}),
        connections,
        RunDirectoryRecords(tmp_path),
        fresh=True,
        started_ns=0,
    )
    path = tmp_path / "journal.jsonl"
    alone = memory(world_size=1, placement=("m0",), settled=True, since_ns=time.monotonic_ns())
    run.memory = alone
    line = run.member_server.connection("m0")
    line.connected = True
    for step, lines in ((1, 1), (9, 1), (10, 1)):
        line.report, line.heard_ns = training(step).report, time.monotonic_ns()
        await run.reconcile()
        await event_loop.result_of(run.journal.thread.submit(lambda: None), 30.0)
        assert len(path.read_bytes().splitlines()) == lines
    held = last(path)
    assert held is not None
    assert resume_point.has_saved_state(held.memory)
    run.journal.decisions.close()


def test_a_successor_knows_how_far_the_group_got_even_if_all_who_could_report_it_are_gone(
    tmp_path: Path,
) -> None:
    before = view(settled=True, generation=7, held=4, reached=5)
    kept = Journal(tmp_path / "journal.jsonl")
    kept.write(before, Policy(), Wait(1), before.memory, None)
    kept.close()
    ranks = [{"rank": number, "step": 147} for number in range(2)]
    RunDir(tmp_path).write_status({"generation": 7, "ranks": ranks, "snapshot_step": 128, "step": 147})
    connections = MemberServer(time.monotonic_ns, lambda: None)
    run = SupervisedRun(
        Policy(),
        StatusPublisher(RunDir(tmp_path)),
        Backend(),
        connections,
        RunDirectoryRecords(tmp_path),
        fresh=False,
        started_ns=5,
    )
    run.journal.decisions.close()
    assert (run.memory.reached, run.memory.held) == (147, 128)
    assert published(run)["step"] == 147


async def test_a_group_is_not_resized_without_a_line_in_the_journal(
    run: SupervisedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.policy = Policy(members=2, min_members=1)
    lost = OpenIncident(1, 1, 0, 0, 0.0, (fault("member_lost"),))
    left = member("m0", report("m0", launcher(), slots=(HeldSnapshot(1, 5, 8),), secured_for=1))
    given: dict[str, Any] = {"phase": "securing", "incident": lost, "lost": ("m1",), "resizable": True}
    seen = view(left, member("m1", exists=False), **given)
    start = Start(("m0",), ResumePoint(0, 0, "none"), (), "m0", 1, fault("member_lost"), "restart", (), "")
    run.memory, write = seen.memory, run.journal.decisions.write
    monkeypatch.setattr(run.journal.decisions, "write", _full)
    await run._commit(seen, start)
    assert run.memory == seen.memory
    assert run.view().unrecorded
    monkeypatch.setattr(run.journal.decisions, "write", write)
    run.wake.clear()
    await run._commit(seen, start)
    assert (run.memory.placement, run.memory.reduced_by) == (("m0",), 1)
    assert not run.view().unrecorded
    assert run.wake.is_set(), "decisions that waited for the journal can be made now"


async def test_a_line_that_could_not_be_written_is_retried_without_a_new_decision(
    run: SupervisedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("supervisor.store.journal.RETRY_S", 0.0)
    write, run.backend = run.journal.decisions.write, Making({"m0": ""})
    monkeypatch.setattr(run.journal.decisions, "write", _full)
    now = run.view()
    await run.journal.write(now, run.policy, Wait(1), now.memory, None)
    await run.reconcile()
    await event_loop.result_of(run.journal.thread.submit(lambda: None), 30.0)
    await asyncio.sleep(0)  # so that the loop notices it
    assert run.publisher.journal_error == "[Errno 28] no room"
    assert last(RunDir(run.publisher.run.path).journal) is None
    monkeypatch.setattr(run.journal.decisions, "write", write)
    await run.reconcile()
    await event_loop.result_of(run.journal.thread.submit(lambda: None), 30.0)
    await asyncio.sleep(0)
    assert run.publisher.journal_error == ""
    assert last(RunDir(run.publisher.run.path).journal) is not None


def _full(*_: object) -> None:
    raise OSError(28, "no room")


def test_a_view_changes_nothing_and_an_observation_is_remembered(run: SupervisedRun) -> None:
    run.backend = Backend(("m0",))
    run.member_server.connection("m0").report = replace(report("m0", None), durable=CheckpointReport(12, 1))
    index = run.checkpoints
    assert isinstance(index, CheckpointIndex)
    for _ in range(3):
        assert [each.name for each in run.view().members] == ["m0"]
    assert (run._existed, index._wanted.is_set()) == ((), False)
    run._observe()
    assert (run._existed, index._wanted.is_set()) == (("m0",), True)


async def test_a_decision_is_published_at_once_and_an_end_is_published_last(run: SupervisedRun) -> None:
    run.backend = Leaving(stop="graceful")
    await run.reconcile()
    assert run.publisher.published["phase"] in ("stopping", "ended"), "before any tick"
    await run.supervise()
    assert run.publisher.published["phase"] == "ended"
    found = run.publisher.run.status()
    assert found is not None
    assert found["phase"] == "ended"


def test_the_status_explains_why_the_members_memory_cannot_be_used(run: SupervisedRun) -> None:
    for why in ("/dev/shm/x: in the way", ""):
        assert isinstance(run.backend, Backend)
        run.backend.volume_error = why
        assert published(run)["volume_error"] == why


def test_time_in_which_this_process_read_nothing_is_not_counted_as_silence_whenever_it_was(
    tmp_path: Path,
) -> None:
    """For example, it was stopped while it wrote a decision, and not while it waited for a report."""
    paused_s = 0.0
    now_ns = 100 * S
    connections = MemberServer(lambda: now_ns, lambda: None)
    records = RunDirectoryRecords(tmp_path)
    publisher = StatusPublisher(RunDir(tmp_path))
    run = SupervisedRun(
        Policy(),
        publisher,
        Backend(),
        connections,
        records,
        fresh=True,
        started_ns=0,
        paused_s=lambda: paused_s,
    )
    line = connections.connection("m0")
    paused_s, now_ns = 5.0, 105 * S
    run._observe()
    assert line.heard_ns == 105 * S
    now_ns = 107 * S
    run._observe()
    assert line.heard_ns == 105 * S, "a pause is discounted once"
    run.journal.decisions.close()
