from __future__ import annotations

from dataclasses import replace
from typing import Any

from holdfast.protocol.launcher_messages import Restore, StartTimes
from supervisor.observability.bookkeeping import Bookkeeping
from supervisor.observability.ledger import Bucket
from supervisor.view.model import MemberView, OpenIncident, ResumePoint
from tests.unit.supervisor.job_views import (
    LAUNCH,
    S,
    fault,
    launcher,
    member,
    memory,
    progress,
    rank,
    report,
    view,
)


def trained(step: int, phase: str = "forward", name: str = "m0") -> MemberView:
    number = int(name[1:])
    told = replace(progress(number, step), phase=phase)
    return member(name, report(name, launcher(), progress=(told,)))


def begun(*, queues: bool = False) -> Bookkeeping:
    """Return the accounts of a group of two that was formed at 0 s and did its first step at 10 s."""
    accounts = Bookkeeping(0, None, queues=queues)
    accounts.closed(memory(), None, StartTimes(1 * S, 2 * S, 3 * S, 10 * S), 0.0)
    return accounts


def look(accounts: Bookkeeping, now_s: float, step: int, phase: str = "forward", **given: Any) -> None:
    both = trained(step, phase), trained(step, phase, "m1")
    accounts.observe(view(*both, now_s=now_s, settled=True, **given))


def seconds(accounts: Bookkeeping) -> dict[str, float]:
    spent = {bucket.value: ns / S for bucket, ns in accounts.ledger.buckets_ns().items() if ns}
    assert sum(spent.values()) + accounts.ledger.pending_ns / S == accounts.ledger.total_ns / S
    return spent


def opened(**given: Any) -> OpenIncident:
    resumed = ResumePoint(19, 1, "slot")
    made = OpenIncident(
        1, 1, 30 * S, 32 * S, 0.0, (fault("crash"),), decided_ns=33 * S, resume=resumed, lost=1
    )
    return replace(made, **given)


def test_the_first_start_is_divided_by_the_ranks_own_timestamps() -> None:
    assert seconds(begun()) == {"start": 1.0, "rendezvous": 1.0, "restore": 1.0}


def queue(accounts: Bookkeeping, now_s: float, phase: str, *exist: bool, **given: Any) -> None:
    there = (member(f"m{n}", exists=each) for n, each in enumerate(exist))
    accounts.observe(view(*there, now_s=now_s, phase=phase, **given))


def test_time_without_enough_externally_created_members_is_queued_until_they_exist() -> None:
    accounts = Bookkeeping(0, None, queues=True)
    queue(accounts, 1.0, "forming")
    queue(accounts, 20.0, "forming", True, False)
    queue(accounts, 60.0, "forming", True, True)
    queue(accounts, 62.0, "forming", True, True)
    accounts.closed(memory(), None, StartTimes(63 * S, 64 * S, 65 * S, 70 * S), 0.0)
    assert seconds(accounts) == {"queued": 59.0, "start": 4.0, "rendezvous": 1.0, "restore": 1.0}


def test_the_wait_for_a_lost_members_successor_is_queued() -> None:
    accounts = Bookkeeping(0, None, queues=True)
    accounts.closed(memory(), None, StartTimes(1 * S, 2 * S, 3 * S, 10 * S), 0.0)
    look(accounts, 30.0, 20)
    incident = opened(decided_ns=101 * S)
    accounts.opened(incident)
    queue(accounts, 33.0, "securing", True, False, incident=incident)
    queue(accounts, 99.0, "securing", True, False, incident=incident)
    queue(accounts, 100.0, "securing", True, True, incident=incident)
    accounts.closed(
        memory(launch=replace(LAUNCH, restore=Restore(19, 1, "slot", ""))),
        incident,
        StartTimes(102 * S, 103 * S, 104 * S, 105 * S),
        0.0,
    )
    spent = seconds(accounts)
    assert (spent["detect"], spent["decide"], spent["queued"]) == (2.0, 2.0, 67.0)
    assert (spent["start"], spent["rendezvous"], spent["restore"]) == (2.0, 2.0, 2.0)


def test_members_of_our_own_are_not_queued() -> None:
    accounts = Bookkeeping(0, None)
    queue(accounts, 20.0, "forming", True, False)
    queue(accounts, 60.0, "forming", True, True)
    accounts.closed(memory(), None, StartTimes(63 * S, 64 * S, 65 * S, 70 * S), 0.0)
    assert "queued" not in seconds(accounts)


def test_steps_of_two_members_are_secured_as_they_are_done() -> None:
    accounts = begun()
    look(accounts, 30.0, 20)
    assert seconds(accounts)["productive"] == 27.0
    assert accounts.ledger.ettr() == 27.0 / 30.0


def test_steps_of_one_member_are_secured_by_a_checkpoint() -> None:
    accounts = begun()
    alone: dict[str, Any] = {"placement": ("m0",), "world_size": 1, "settled": True}
    accounts.observe(view(trained(20), now_s=30.0, **alone))
    assert "productive" not in seconds(accounts)
    saved = trained(20)
    assert saved.report is not None
    durable = replace(saved.report.durable, step=20)
    accounts.observe(view(replace(saved, report=replace(saved.report, durable=durable)), now_s=30.5, **alone))
    accounts.observe(view(trained(21), now_s=31.0, **alone))
    assert accounts.ledger.good_ns == 28 * S


def test_declared_pauses_have_separate_buckets() -> None:
    accounts = begun()
    look(accounts, 20.0, 20)
    look(accounts, 20.0, 20, "checkpoint")
    look(accounts, 24.0, 20, "paused")
    look(accounts, 25.0, 20)
    assert seconds(accounts)["checkpoint"] == 4.0
    assert seconds(accounts)["paused"] == 1.0


def test_a_recovery_is_divided_by_its_activities() -> None:
    accounts, incident = begun(), opened()
    look(accounts, 30.0, 20)
    accounts.opened(incident)
    again = replace(LAUNCH, restore=Restore(19, 1, "slot"))
    accounts.closed(memory(launch=again), incident, StartTimes(35 * S, 36 * S, 38 * S, 42 * S), 1.5)
    spent = seconds(accounts)
    assert spent["detect"] == 2.0
    assert spent["decide"] == 1.0
    assert spent["start"] == 1.0 + 2.0
    assert spent["rendezvous"] == 1.0 + 1.0
    assert spent["restore"] == 1.0 + 2.0
    assert spent["warmup"] == 2.5


def test_training_beyond_the_resume_point_is_lost() -> None:
    accounts = Bookkeeping(0, None)
    alone: dict[str, Any] = {"placement": ("m0",), "world_size": 1, "settled": True}
    accounts.closed(memory(), None, StartTimes(0, 0, 0, 1 * S), 0.0)
    accounts.observe(view(trained(10), now_s=10.0, **alone))
    accounts.observe(view(trained(20), now_s=30.0, **alone))
    accounts.opened(opened())
    accounts.closed(
        memory(), opened(resume=ResumePoint(10, 1, "slot")), StartTimes(34 * S, 34 * S, 34 * S, 34 * S), 0.0
    )
    assert seconds(accounts)["lost"] == 20.0


def its_own(step: int, name: str = "m0") -> MemberView:
    """Return a member whose script never joins."""
    told = progress(int(name[1:]), step, -1)
    return member(name, report(name, launcher(joins=False), progress=(told,)))


def test_training_before_a_restart_of_a_script_that_keeps_its_own_state_is_unknown() -> None:
    accounts = begun()
    accounts.observe(view(its_own(20), its_own(20, "m1"), now_s=30.0, settled=True))
    assert accounts.ledger.pending_ns == 27 * S, "two members hold no state of it"
    incident = opened(resume=ResumePoint(0, 0, "none"), lost=None, own_state=True)
    accounts.opened(incident)
    accounts.closed(memory(), incident, StartTimes(34 * S, 34 * S, 34 * S, 34 * S), 0.0)
    accounts.observe(view(its_own(20), its_own(20, "m1"), now_s=54.0, settled=True))
    accounts.stopped(55 * S, finished=True)
    spent = seconds(accounts)
    assert (spent["unknown"], spent["productive"], accounts.ledger.ettr()) == (27.0, 21.0, None)
    assert "lost" not in spent


def test_unsaved_training_of_one_member_is_productive_once_the_run_has_finished() -> None:
    accounts = begun()
    alone: dict[str, Any] = {"placement": ("m0",), "world_size": 1, "settled": True}
    accounts.observe(view(trained(20), now_s=30.0, **alone))
    accounts.stopped(31 * S, finished=True)
    assert (seconds(accounts)["productive"], accounts.ledger.pending_ns) == (28.0, 0)


def test_a_recovery_is_shown_as_far_as_it_has_got_and_the_ledger_stays_as_it_is() -> None:
    accounts = begun()
    look(accounts, 30.0, 20)
    noticed = opened(decided_ns=0, resume=None)
    accounts.opened(noticed)
    before = accounts.ledger.snapshot()

    def shown(now_s: float, phase: str, incident: OpenIncident, *marks: StartTimes) -> dict[str, float]:
        states = [rank(n, generation=2, marks=each) for n, each in enumerate(marks)]
        both = [
            member(f"m{n}", report(f"m{n}", launcher(each, generation=2))) for n, each in enumerate(states)
        ]
        ledger = accounts.so_far(view(*both, now_s=now_s, phase=phase, incident=incident, generation=2))
        assert ledger.total_ns == now_s * S
        return {bucket.value: ns / S for bucket, ns in ledger.buckets_ns().items() if ns}

    assert shown(40.0, "securing", noticed)["decide"] == 8.0
    started, joined = StartTimes(35 * S, 0, 0, 0), StartTimes(35 * S, 36 * S, 0, 0)
    late = shown(40.0, "running", opened(), joined, started)
    assert (late["decide"], late["start"], late["rendezvous"]) == (1.0, 1.0 + 2.0, 1.0 + 5.0)
    there = shown(40.0, "running", opened(), joined, joined)
    assert (there["rendezvous"], there["restore"]) == (1.0 + 1.0, 1.0 + 4.0)
    assert accounts.ledger.snapshot() == before
    settled = view(trained(20), trained(20, name="m1"), now_s=41.0, settled=True)
    assert accounts.so_far(settled) is accounts.ledger


def test_the_last_checkpoint_of_a_finished_run_is_not_training() -> None:
    accounts = begun()
    alone: dict[str, Any] = {"placement": ("m0",), "world_size": 1, "settled": True}
    accounts.observe(view(trained(20), now_s=30.0, **alone))
    accounts.saving(31 * S)
    accounts.stopped(33 * S, finished=True)
    spent = seconds(accounts)
    assert (spent["productive"], spent["checkpoint"], accounts.ledger.pending_ns) == (28.0, 2.0, 0)
    accounts = begun()
    look(accounts, 30.0, 20)
    accounts.opened(opened())
    accounts.saving(40 * S, opened())
    accounts.stopped(42 * S, finished=True)
    spent = seconds(accounts)
    assert (spent["detect"], spent["decide"], spent["start"], spent["checkpoint"]) == (
        2.0,
        1.0,
        1.0 + 7.0,
        2.0,
    )


def test_a_fault_before_the_first_new_step_is_recorded_after_the_one_it_overtakes() -> None:
    accounts, first = begun(), opened()
    look(accounts, 30.0, 20)
    accounts.opened(first)
    second = opened(number=2, fault_ns=36 * S, noticed_ns=37 * S, decided_ns=39 * S)
    accounts.opened(second, first)
    accounts.stopped(50 * S, second)
    spent = seconds(accounts)
    assert (spent["detect"], spent["decide"], spent["start"]) == (2.0 + 1.0, 1.0 + 2.0, 1.0 + 3.0 + 11.0)


def test_a_run_that_stops_during_an_incident_has_been_deciding_until_then() -> None:
    accounts = begun()
    look(accounts, 30.0, 20)
    accounts.opened(opened())
    accounts.stopped(40 * S, opened(decided_ns=0, resume=None))
    accounts.ledger.advance(41 * S)
    spent = seconds(accounts)
    assert (spent["detect"], spent["decide"], spent["stop"]) == (2.0, 8.0, 1.0)


def test_a_new_supervisor_continues_the_ledger() -> None:
    accounts = begun()
    look(accounts, 30.0, 20)
    again = Bookkeeping(31 * S, accounts.ledger.snapshot())
    look(again, 40.0, 30)
    assert again.ledger.total_ns == 40 * S
    assert seconds(again)["productive"] == 37.0


def test_only_a_running_group_whose_ranks_all_report_has_steps() -> None:
    def booked(*members: MemberView, **given: Any) -> dict[str, Any]:
        accounts = begun()
        accounts.observe(view(*members, now_s=30.0, **{"settled": True, **given}))
        return accounts.ledger.snapshot()

    nothing = begun().ledger.snapshot()
    both = trained(20), trained(21, name="m1")
    assert booked(*both, phase="securing") == nothing
    assert booked(*both, settled=False) == nothing
    assert booked(both[0]) == nothing
    assert booked(both[0], member("m1")) == nothing
    assert booked(both[0], replace(both[1], name="m9")) == nothing
    done = booked(*both)
    assert (done["secured_step"], done["pending"], done["settled_ns"]["productive"]) == (20, [], 27 * S)
    waits = booked(member("m9"), *both)
    assert waits == done, "a standby"


def test_a_view_older_than_the_ledger_changes_no_time() -> None:
    accounts = begun()
    look(accounts, 30.0, 20)
    look(accounts, 29.0, 21)
    assert accounts.ledger.at_ns == 30 * S
    assert accounts.ledger.snapshot()["secured_step"] == 21


def test_a_group_pauses_if_all_its_ranks_pause() -> None:
    """If they are in different pauses, the first one by name counts."""
    accounts, found = begun(), []
    for now_s, phases in enumerate(
        (("eval", "paused"), ("checkpoint", "eval"), ("checkpoint", "forward"), ("paused", "paused")), 30
    ):
        both = trained(20, phases[0]), trained(20, phases[1], "m1")
        accounts.observe(view(*both, now_s=float(now_s), settled=True))
        found.append(accounts.ledger.activity)
    assert found == [Bucket.PRODUCTIVE, Bucket.CHECKPOINT, Bucket.PRODUCTIVE, Bucket.PAUSED]


def test_on_a_cluster_the_steps_of_members_on_one_node_are_secured_up_to_the_newest_checkpoint() -> None:
    def secured(*nodes: str, on_cluster: bool = True) -> object:
        accounts = begun(queues=on_cluster)
        members = []
        for number, node in enumerate(nodes):
            there = trained(20, name=f"m{number}")
            assert there.report is not None
            durable = replace(there.report.durable, step=17)
            members.append(replace(there, report=replace(there.report, node=node, durable=durable)))
        accounts.observe(view(*members, now_s=30.0, settled=True))
        return accounts.ledger.snapshot()["secured_step"]

    assert (secured("a", "b"), secured("a", "a")) == (20, 17)
    assert secured("a", "a", on_cluster=False) == 20


def test_the_steps_of_one_member_are_secured_up_to_the_newest_checkpoint() -> None:
    accounts = begun()
    alone: dict[str, Any] = {"placement": ("m0",), "world_size": 1, "settled": True}

    def saw(step: int, now_s: float, saved: int) -> int | None:
        there = trained(step)
        assert there.report is not None
        durable = replace(there.report.durable, step=saved)
        older = member("m7", report("m7", None, durable=replace(durable, step=2)))
        both = replace(there, report=replace(there.report, durable=durable)), older, member("m8")
        accounts.observe(view(*both, now_s=now_s, **alone))
        secured = accounts.ledger.snapshot()["secured_step"]
        assert secured is None or isinstance(secured, int)
        return secured

    assert saw(20, 30.0, -1) == 2
    assert saw(21, 31.0, 20) == 20
    assert saw(22, 32.0, 30) == 22, "a step that was not done must not count as secured"


def test_a_successor_records_the_steps_that_its_predecessor_saw() -> None:
    def booked(**given: Any) -> list[list[int]]:
        accounts = begun()
        again = Bookkeeping(31 * S, accounts.ledger.snapshot())
        again.caught_up(memory(**{"settled": True, "reached": 20, **given}), 30 * S)
        found = again.ledger.snapshot()["pending"]
        assert isinstance(found, list)
        return found

    first = [1, 1, 7 * S]
    assert booked() == [first, [2, 20, 20 * S]]
    assert booked(reached=0) == [first]
    assert booked(phase="securing") == [first]
    assert booked(settled=False) == [first]
    assert booked(reached=-1) == [first]
    young = Bookkeeping(0, None)
    young.ledger.enter(Bucket.PRODUCTIVE, 0)
    young.ledger.trained(-1, 2 * S)
    young.caught_up(memory(settled=True, reached=0), 3 * S)
    assert young.ledger.snapshot()["pending"] == [[-1, -1, 2 * S], [0, 0, S]]


def test_a_restart_from_the_beginning_loses_all_steps_and_one_without_loss_does_not() -> None:
    def lost(**given: Any) -> tuple[float, float]:
        accounts = begun()
        alone: dict[str, Any] = {"placement": ("m0",), "world_size": 1, "settled": True}
        accounts.observe(view(trained(20), now_s=30.0, **alone))
        accounts.opened(opened())
        accounts.stopped(40 * S, opened(**given))
        return seconds(accounts).get("lost", 0.0), accounts.ledger.pending_ns / S

    beginning = ResumePoint(0, 0, "none")
    assert lost(resume=beginning, lost=20) == (27.0, 0.0)
    assert lost(resume=beginning, lost=0) == (0.0, 27.0)
    assert lost(resume=ResumePoint(1, 1, "slot"), lost=0) == (20.0, 7.0)
    assert lost(resume=None) == (0.0, 27.0)


def test_a_fault_that_began_after_it_was_noticed_is_detected_at_once() -> None:
    accounts = begun()
    look(accounts, 30.0, 20)
    accounts.opened(opened(fault_ns=35 * S))
    assert "detect" not in seconds(accounts)
    assert accounts.ledger.activity is Bucket.DETECT
    early = begun()
    look(early, 40.0, 20)
    early.opened(opened(noticed_ns=32 * S))
    assert (early.ledger.at_ns, early.ledger.activity) == (40 * S, Bucket.DETECT)


def test_the_first_step_after_a_restart_is_the_one_after_the_resume_point() -> None:
    accounts = begun()
    look(accounts, 30.0, 20)
    accounts.opened(opened())
    again = replace(LAUNCH, restore=Restore(19, 1, "slot"))
    marks = StartTimes(34 * S, 34 * S, 34 * S, 40 * S)
    accounts.closed(memory(launch=again), opened(), marks, 2.0)
    found = accounts.ledger.snapshot()
    assert (found["pending"], found["settled_ns"]["warmup"]) == ([[20, 20, 2 * S]], 4 * S)
    look(accounts, 41.0, 20)
    assert accounts.ledger.snapshot()["tail_ns"] == S, "it is the same step"
    bare = Bookkeeping(0, None)
    bare.closed(memory(launch=None), None, StartTimes(1 * S, 2 * S, 3 * S, 10 * S), 0.0)
    assert bare.ledger.snapshot()["pending"] == [[1, 1, 7 * S]]
