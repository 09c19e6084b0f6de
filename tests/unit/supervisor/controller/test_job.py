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
from supervisor.controller.job import Job
from supervisor.controller.member_server import MemberServer
from supervisor.controller.records import RunDirectoryRecords
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
def job(tmp_path: Path) -> Iterator[Job]:
    connections = MemberServer(time.monotonic_ns, lambda: None)
    made = Job(
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
    job = Job(
        Policy(),
        StatusPublisher(RunDir(tmp_path)),
        Backend(),
        connections,
        RunDirectoryRecords(tmp_path),
        fresh=False,
        started_ns=5,
    )
    job.journal.decisions.close()
    assert job.memory == replace(before.memory, since_ns=job.memory.since_ns)
    assert job.bookkeeping.ledger.at_ns == 5


def test_a_silent_sidecar_is_inspected_once_and_not_at_the_end(job: Job) -> None:
    seen = view(member("m0", report("m0", None), silent_s=3.0), member("m1", report("m1", None)))
    for phase in ("stopping", "saving", "running", "running"):
        job.memory = replace(seen.memory, phase=phase)
        job._renew(seen)
        assert isinstance(job.backend, Backend)
        assert job.backend.renewed == ["m0"] * (phase == "running")


class Leaving(Backend):
    """A backend that must be notified of the end."""

    def finish(self, exit_code: int, why: str, message: str, completion: Completion | None) -> None:
        self.told = exit_code, why


async def test_members_and_keeper_are_served_while_the_journal_is_written(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, heard, loop = asyncio.Event(), threading.Event(), asyncio.get_running_loop()

    def write(*_: object) -> None:
        loop.call_soon_threadsafe(began.set)
        assert heard.wait(30), "the event loop waits for the storage"

    monkeypatch.setattr(job.journal.decisions, "write", write)
    job.backend = Leaving(stop="graceful")
    running = asyncio.create_task(job.run())
    await began.wait()
    assert job.memory.phase == "forming", "a decision must be written before it takes effect"
    assert job.decided.phase == "stopping"
    heard.set()
    await running
    assert (job.memory.phase, job.publisher.journal_error) == ("ended", "")
    assert job.decided is job.memory


async def test_unresponsive_storage_costs_the_journal_and_not_the_run(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("supervisor.controller.journal_writer.JOURNAL_S", 0.05)
    monkeypatch.setattr("supervisor.controller.job.LEAVE_S", 0.05)
    answers = threading.Event()
    written: list[str] = []

    def write(_view: View, _policy: Policy, _action: RunAction, after: JobState, _ledger: object) -> None:
        answers.wait()
        written.append(after.phase)

    monkeypatch.setattr(job.journal.decisions, "write", write)
    job.backend = Leaving(stop="graceful")
    await job.run()
    assert job.backend.told == (130, "stopped before the first step")
    assert "has not responded" in job.publisher.journal_error
    answers.set()
    await event_loop.result_of(job.journal.thread.submit(lambda: None), 30.0)
    assert job.publisher.journal_error == ""
    assert written == ["stopping", "ended"], "the newest line must contain everything again"


async def test_the_keeper_of_the_run_stores_who_asked_for_a_stop(job: Job) -> None:
    asked = []
    for now in (False, True):
        job.stop(now)
        asked.append(job.backend.stop)
    assert asked == ["graceful", "now"]


def published(job: Job) -> Mapping[str, Any]:
    job.publish()
    return job.publisher.published


async def test_a_status_that_is_due_is_that_of_the_next_rounds_view(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    views: list[View] = []
    built = job.view

    def counted() -> View:
        views.append(built())
        return views[-1]

    published: list[int] = []
    monkeypatch.setattr(job.backend, "want", lambda count, discard: None)
    monkeypatch.setattr(job, "view", counted)
    monkeypatch.setattr(job.publisher, "_published", lambda: published.append(len(views)))
    job.publish_next()
    assert published == [1], "no round can begin yet, so this has built its own view"
    await job.reconcile()
    views.clear()
    published.clear()
    job._is_waiting = True
    job.publish_next()
    assert (job.wake.is_set(), published) == (True, [])
    await job.reconcile()
    await job.reconcile()
    assert (len(views), published) == (2, [1])


def seen(job: Job) -> list[tuple[str, bool]]:
    return [(each.name, each.exists) for each in job._observe().members]


def test_a_sidecar_that_connects_before_its_member_is_known_is_not_lost(job: Job) -> None:
    job.member_server.connection("m0").report = report("m0", None)
    assert seen(job) == []
    job.backend = Backend(("m0",))
    assert seen(job) == [("m0", True)]
    assert job._observe().members[0].report is not None


def test_a_status_is_due_when_a_sidecar_connects_or_disconnects_but_not_for_mere_reports(job: Job) -> None:
    first = member("m0", report("m0", None))
    assert first.report is not None
    gone = replace(first, connected=False)
    another = replace(first, report=replace(first.report, sidecar_pid=first.report.sidecar_pid + 1))
    due = []
    for each in (first, replace(first, silent_s=0.4), gone, gone, another, another):
        job._compare_sidecars(view(each))
        due.append(job.members_changed.is_set())
        job.members_changed.clear()
    assert due == [True, False, True, False, True, False]


class Owned(Backend):
    """A backend whose members someone else creates."""

    def want(self, count: int, discard: tuple[str, ...]) -> None:
        self.wanted = count


async def test_a_standby_is_ordered_to_copy_a_state_that_is_on_one_node_only(job: Job) -> None:
    job.backend = Owned({"m0": "running", "s0": "running"})
    job.policy = Policy(standby=1, members_created_externally=True)
    peers = (StateSource("http://m0:1", 0),)
    alone = memory(placement=("m0",), world_size=1, settled=True, peers=peers)
    for node, copied in (("a", ()), ("b", (StateSource("http://m0:1", -1, 1), *peers))):
        standby = member("s0", report("s0", launcher(), node=node))
        seen = view(member("m0", report("m0", launcher(), node="a")), standby)
        job.memory = alone
        await job._give_orders(replace(seen, memory=alone))
        order = job.member_server.connection("s0").order
        assert order is not None
        assert (order.do, order.sources) == ("idle", copied)


def test_a_members_rack_is_that_of_the_node_that_it_reports(job: Job) -> None:
    job._rack_of = {"n0": "r0"}.get  # type: ignore[assignment]
    job.backend = Backend(("m0", "m1"))
    job.member_server.connection("m0").report = report("m0", None, node="n0")
    assert [each.rack for each in job.view().members] == ["r0", ""]
    assert [*job.member_server.connections] == ["m0"], "a view creates nothing"


def test_a_member_that_the_backend_has_removed_is_gone_until_it_counts_as_lost(job: Job) -> None:
    job.backend = Backend(("m0", "m1"))
    assert seen(job) == [("m0", True), ("m1", True)]
    job.backend = Backend(("m1",))
    assert seen(job) == [("m1", True), ("m0", False)]
    job.memory = replace(job.memory, lost=("m0",))
    assert seen(job) == [("m1", True)]
    job.memory = replace(job.memory, lost=())  # only the last few lost members are remembered
    assert seen(job) == [("m1", True)], "a member that was given up must not count as lost again"


def test_the_next_run_in_the_directory_knows_what_a_stop_cut_short(tmp_path: Path) -> None:
    before = view(generation=7, phase="ended", missed=(MissedWork(0, 1, 20),))
    kept = Journal(tmp_path / "journal.jsonl")
    kept.write(before, Policy(), Wait(1), before.memory, None)
    kept.close()
    connections = MemberServer(time.monotonic_ns, lambda: None)
    job = Job(
        Policy(),
        StatusPublisher(RunDir(tmp_path)),
        Backend(),
        connections,
        RunDirectoryRecords(tmp_path),
        fresh=True,
        started_ns=5,
    )
    job.journal.decisions.close()
    assert (job.memory.phase, job.memory.missed) == ("forming", (MissedWork(0, 1, 20),))


def led(tmp_path: Path) -> Job:
    lead = run_lead.take_over(tmp_path / run_lead.FILE)
    records = StatusPublisher(RunDir(tmp_path), lead=lead)
    connections = MemberServer(time.monotonic_ns, lambda: None)
    return Job(
        Policy(),
        records,
        Leaving(stop="graceful"),
        connections,
        RunDirectoryRecords(tmp_path, lead),
        fresh=True,
        started_ns=0,
    )


async def test_a_replaced_supervisor_ends_and_none_of_its_actions_has_an_effect(tmp_path: Path) -> None:
    job = led(tmp_path)
    assert run_lead.take_over(tmp_path / run_lead.FILE).epoch == 2
    with pytest.raises(run_lead.Deposed):
        await job.run()
    assert not hasattr(job.backend, "told"), "the members must not be told of an end"
    job.publish()
    await event_loop.result_of(job.publisher.files.submit(lambda: None), 30.0)
    assert job.publisher.deposed is not None
    assert not (tmp_path / "status.json").exists()
    assert (tmp_path / "journal.jsonl").read_bytes() == b""
    job.journal.decisions.close()


async def test_a_supervisor_whose_epoch_is_below_what_a_member_obeys_takes_a_higher_one_or_ends(
    tmp_path: Path,
) -> None:
    job = led(tmp_path)
    job.member_server.connection("m0").report = report("m0", None, epoch=6)
    await job._stay_ahead()
    assert job.lead.epoch == 7, "the file was lost, but there is no other supervisor"
    other = run_lead.take_over(tmp_path / run_lead.FILE)
    job.member_server.connection("m0").report = report("m0", None, epoch=other.epoch)
    with pytest.raises(run_lead.Deposed):
        await job._stay_ahead()
    job.journal.decisions.close()


async def test_orders_carry_the_epoch_and_a_next_supervisor_has_a_higher_one_than_the_journal(
    tmp_path: Path,
) -> None:
    job = led(tmp_path)
    job.backend = Backend(("m0",))
    job.memory = replace(job.memory, phase="stopping", exit_code=0)
    await job._give_orders(job.view())
    order = job.member_server.connection("m0").order
    assert order is not None
    assert order.epoch == 1
    now = job.view()
    job.lead.raise_above(8)
    job.journal.decisions.write(now, Policy(), Wait(1), now.memory, None)
    job.journal.decisions.close()
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
    job = Job(
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
    job.memory = alone
    line = job.member_server.connection("m0")
    line.connected = True
    for step, lines in ((1, 1), (9, 1), (10, 1)):
        line.report, line.heard_ns = training(step).report, time.monotonic_ns()
        await job.reconcile()
        await event_loop.result_of(job.journal.thread.submit(lambda: None), 30.0)
        assert len(path.read_bytes().splitlines()) == lines
    held = last(path)
    assert held is not None
    assert resume_point.has_saved_state(held.memory)
    job.journal.decisions.close()


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
    job = Job(
        Policy(),
        StatusPublisher(RunDir(tmp_path)),
        Backend(),
        connections,
        RunDirectoryRecords(tmp_path),
        fresh=False,
        started_ns=5,
    )
    job.journal.decisions.close()
    assert (job.memory.reached, job.memory.held) == (147, 128)
    assert published(job)["step"] == 147


async def test_a_group_is_not_resized_without_a_line_in_the_journal(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.policy = Policy(members=2, min_members=1)
    lost = OpenIncident(1, 1, 0, 0, 0.0, (fault("member_lost"),))
    left = member("m0", report("m0", launcher(), slots=(HeldSnapshot(1, 5, 8),), secured_for=1))
    given: dict[str, Any] = {"phase": "securing", "incident": lost, "lost": ("m1",), "resizable": True}
    seen = view(left, member("m1", exists=False), **given)
    start = Start(("m0",), ResumePoint(0, 0, "none"), (), "m0", 1, fault("member_lost"), "restart", (), "")
    job.memory, write = seen.memory, job.journal.decisions.write
    monkeypatch.setattr(job.journal.decisions, "write", _full)
    await job._commit(seen, start)
    assert job.memory == seen.memory
    assert job.view().unrecorded
    monkeypatch.setattr(job.journal.decisions, "write", write)
    job.wake.clear()
    await job._commit(seen, start)
    assert (job.memory.placement, job.memory.reduced_by) == (("m0",), 1)
    assert not job.view().unrecorded
    assert job.wake.is_set(), "decisions that waited for the journal can be made now"


async def test_a_line_that_could_not_be_written_is_retried_without_a_new_decision(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("supervisor.store.journal.RETRY_S", 0.0)
    write, job.backend = job.journal.decisions.write, Making({"m0": ""})
    monkeypatch.setattr(job.journal.decisions, "write", _full)
    now = job.view()
    await job.journal.write(now, job.policy, Wait(1), now.memory, None)
    await job.reconcile()
    await event_loop.result_of(job.journal.thread.submit(lambda: None), 30.0)
    await asyncio.sleep(0)  # so that the loop notices it
    assert job.publisher.journal_error == "[Errno 28] no room"
    assert last(RunDir(job.publisher.run.path).journal) is None
    monkeypatch.setattr(job.journal.decisions, "write", write)
    await job.reconcile()
    await event_loop.result_of(job.journal.thread.submit(lambda: None), 30.0)
    await asyncio.sleep(0)
    assert job.publisher.journal_error == ""
    assert last(RunDir(job.publisher.run.path).journal) is not None


def _full(*_: object) -> None:
    raise OSError(28, "no room")


def test_a_view_changes_nothing_and_an_observation_is_remembered(job: Job) -> None:
    job.backend = Backend(("m0",))
    job.member_server.connection("m0").report = replace(report("m0", None), durable=CheckpointReport(12, 1))
    index = job.checkpoints
    assert isinstance(index, CheckpointIndex)
    for _ in range(3):
        assert [each.name for each in job.view().members] == ["m0"]
    assert (job._existed, index._wanted.is_set()) == ((), False)
    job._observe()
    assert (job._existed, index._wanted.is_set()) == (("m0",), True)


async def test_a_decision_is_published_at_once_and_an_end_is_published_last(job: Job) -> None:
    job.backend = Leaving(stop="graceful")
    await job.reconcile()
    assert job.publisher.published["phase"] in ("stopping", "ended"), "before any tick"
    await job.run()
    assert job.publisher.published["phase"] == "ended"
    found = job.publisher.run.status()
    assert found is not None
    assert found["phase"] == "ended"


def test_the_status_explains_why_the_members_memory_cannot_be_used(job: Job) -> None:
    for why in ("/dev/shm/x: in the way", ""):
        assert isinstance(job.backend, Backend)
        job.backend.volume_error = why
        assert published(job)["volume_error"] == why


def test_time_in_which_this_process_read_nothing_is_not_counted_as_silence_whenever_it_was(
    tmp_path: Path,
) -> None:
    """For example, it was stopped while it wrote a decision, and not while it waited for a report."""
    paused_s = 0.0
    now_ns = 100 * S
    connections = MemberServer(lambda: now_ns, lambda: None)
    records = RunDirectoryRecords(tmp_path)
    publisher = StatusPublisher(RunDir(tmp_path))
    job = Job(
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
    job._observe()
    assert line.heard_ns == 105 * S
    now_ns = 107 * S
    job._observe()
    assert line.heard_ns == 105 * S, "a pause is discounted once"
    job.journal.decisions.close()
