from __future__ import annotations

from dataclasses import replace
from typing import Any

from holdfast.protocol.launcher_messages import Restore, StartTimes
from supervisor.observability.bookkeeping import Bookkeeping
from supervisor.view.model import MemberView, OpenIncident, ResumePoint
from tests.unit.supervisor.job_views import LAUNCH, S, fault, launcher, member, memory, progress, report, view


def trained(step: int, phase: str = "forward", name: str = "m0") -> MemberView:
    number = int(name[1:])
    told = replace(progress(number, step), phase=phase)
    return member(name, report(name, launcher(), progress=(told,)))


def begun() -> Bookkeeping:
    """Return the accounts of a group of two that was formed at 0 s and did its first step at 10 s."""
    accounts = Bookkeeping(0, None)
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


def test_the_first_start_is_split_by_the_ranks_own_marks() -> None:
    assert seconds(begun()) == {"start": 1.0, "rendezvous": 1.0, "restore": 1.0}


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


def test_declared_pauses_have_their_buckets() -> None:
    accounts = begun()
    look(accounts, 20.0, 20)
    look(accounts, 20.0, 20, "checkpoint")
    look(accounts, 24.0, 20, "paused")
    look(accounts, 25.0, 20)
    assert seconds(accounts)["checkpoint"] == 4.0
    assert seconds(accounts)["paused"] == 1.0


def test_a_recovery_is_split_into_what_it_was_spent_on() -> None:
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


def test_what_was_trained_beyond_the_resume_point_is_lost() -> None:
    accounts = Bookkeeping(0, None)
    alone: dict[str, Any] = {"placement": ("m0",), "world_size": 1, "settled": True}
    accounts.closed(memory(), None, StartTimes(0, 0, 0, 1 * S), 0.0)
    accounts.observe(view(trained(10), now_s=10.0, **alone))
    accounts.observe(view(trained(20), now_s=30.0, **alone))
    accounts.opened(opened())
    accounts.closed(memory(), opened(resume=ResumePoint(10, 1, "slot")), StartTimes(*[34 * S] * 4), 0.0)
    assert seconds(accounts)["lost"] == 20.0


def its_own(step: int, name: str = "m0") -> MemberView:
    """Return a member whose script never joins."""
    told = progress(int(name[1:]), step, -1)
    return member(name, report(name, launcher(joins=False), progress=(told,)))


def test_what_a_script_that_keeps_its_own_state_had_trained_before_a_restart_is_not_training() -> None:
    accounts = begun()
    accounts.observe(view(its_own(20), its_own(20, "m1"), now_s=30.0, settled=True))
    assert accounts.ledger.pending_ns == 27 * S, "two members hold nothing of it"
    incident = opened(resume=ResumePoint(0, 0, "none"), lost=None, own_state=True)
    accounts.opened(incident)
    accounts.closed(memory(), incident, StartTimes(*[34 * S] * 4), 0.0)
    accounts.observe(view(its_own(20), its_own(20, "m1"), now_s=54.0, settled=True))
    accounts.stopped(55 * S, finished=True)
    spent = seconds(accounts)
    assert (spent["unknown"], spent["productive"], accounts.ledger.ettr()) == (27.0, 21.0, None)
    assert "lost" not in spent


def test_what_one_member_had_not_saved_is_productive_once_the_run_has_finished() -> None:
    accounts = begun()
    alone: dict[str, Any] = {"placement": ("m0",), "world_size": 1, "settled": True}
    accounts.observe(view(trained(20), now_s=30.0, **alone))
    accounts.stopped(31 * S, finished=True)
    assert (seconds(accounts)["productive"], accounts.ledger.pending_ns) == (28.0, 0)


def test_the_last_checkpoint_of_a_run_that_has_finished_is_no_training() -> None:
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


def test_a_fault_before_the_first_new_step_is_booked_after_the_one_that_it_overtakes() -> None:
    accounts, first = begun(), opened()
    look(accounts, 30.0, 20)
    accounts.opened(first)
    second = opened(number=2, fault_ns=36 * S, noticed_ns=37 * S, decided_ns=39 * S)
    accounts.opened(second, first)
    accounts.stopped(50 * S, second)
    spent = seconds(accounts)
    assert (spent["detect"], spent["decide"], spent["start"]) == (2.0 + 1.0, 1.0 + 2.0, 1.0 + 3.0 + 11.0)


def test_a_run_that_stops_in_the_middle_of_an_incident_has_decided_until_then() -> None:
    accounts = begun()
    look(accounts, 30.0, 20)
    accounts.opened(opened())
    accounts.stopped(40 * S, opened(decided_ns=0, resume=None))
    accounts.ledger.advance(41 * S)
    spent = seconds(accounts)
    assert (spent["detect"], spent["decide"], spent["stop"]) == (2.0, 8.0, 1.0)


def test_a_new_supervisor_goes_on_with_the_books() -> None:
    accounts = begun()
    look(accounts, 30.0, 20)
    again = Bookkeeping(31 * S, accounts.ledger.snapshot())
    look(again, 40.0, 30)
    assert again.ledger.total_ns == 40 * S
    assert seconds(again)["productive"] == 37.0
