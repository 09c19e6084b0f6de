from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast import exit_codes
from holdfast.protocol.launcher_messages import UNFLUSHED, Ending
from holdfast.protocol.lineage import Lineage
from holdfast.protocol.member_messages import CheckpointReport
from supervisor.decision import closing, orders, transition
from supervisor.decision.decide import decide
from supervisor.decision.orders import order_for
from supervisor.view import uneven_steps
from supervisor.view.model import (
    UNREAD,
    Checkpoint,
    Completion,
    Done,
    End,
    InterruptedWork,
    MissedWork,
    OpenIncident,
    PastFault,
    Policy,
    ResumePoint,
    Save,
    Secure,
    StorageContents,
    View,
    VoidStep,
    Wait,
)
from tests.unit.supervisor.job_views import S, fault, holding, launcher, member, progress, rank, report, view

POLICY = Policy(members=2, save_s=50.0, grace_s=5.0)
HELD = (
    holding("m0", ((1, 9), (1, 7)), ((0, 1, 9), (0, 1, 7))),
    holding("m1", ((1, 9), (1, 7)), ((1, 1, 9), (1, 1, 7))),
)


def test_a_secured_state_is_saved_by_a_member_that_holds_it() -> None:
    action = closing.save_and_end(view(*HELD), ())
    assert isinstance(action, Save)
    assert (action.member, action.resume.step) == ("m0", 9)


def test_a_stop_without_storage_says_where_the_state_was_and_announces_no_checkpoint() -> None:
    """Each pod would write it into its own volume, which nobody can read and which is lost with the pod."""
    away = "stopped as requested, without a checkpoint: the job has no storage for checkpoints"
    with_state = closing.save_and_end(view(*HELD), (), has_storage=False)
    kept = "so the state of step 9 is only in its pods' memory and is lost with them"
    assert with_state == End(exit_codes.INTERRUPTED, f"{away}, {kept}")
    without = closing.save_and_end(view(), (), has_storage=False)
    assert without == End(exit_codes.INTERRUPTED, f"{away}, and no member holds a state")


def test_a_bad_state_is_not_saved() -> None:
    action = closing.save_and_end(view(*HELD), (fault("nan", step=8),))
    assert isinstance(action, Save)
    assert action.resume.step == 7


def on_storage(
    *checkpoints: Checkpoint, error: str = "", looked_s: float = 100.0, heard: int = 9
) -> StorageContents:
    return StorageContents(checkpoints, error=error, looked_ns=int(looked_s * S), heard=heard)


def asked(stored: StorageContents, now_s: float = 100.0) -> Any:
    """Return the action if a stop was requested at 99 s and no member holds any state."""
    return closing.save_and_end(
        replace(view(now_s=now_s, phase="securing", since_ns=99 * S), stored=stored), ()
    )


def test_a_state_on_storage_is_not_saved_again() -> None:
    action = asked(on_storage(Checkpoint(9, 1, 2, "p")))
    assert action == End(exit_codes.INTERRUPTED, "stopped as requested; the newest checkpoint is from step 9")


def test_a_checkpoint_is_named_only_if_storage_was_read_after_the_stop() -> None:
    old = on_storage(Checkpoint(9, 1, 2, "p"), looked_s=98.0)
    assert isinstance(asked(old), Wait)
    away = on_storage(Checkpoint(9, 1, 2, "p"), error="Stale file handle")
    assert isinstance(asked(away), Wait)
    late = asked(away, now_s=110.0)
    assert late == End(
        exit_codes.INTERRUPTED, "stopped as requested, without a new checkpoint; storage: Stale file handle"
    )
    silent = asked(old, now_s=110.0)
    assert isinstance(silent, End)
    assert silent.why.endswith("storage: it does not respond")


def saving(
    durable: CheckpointReport, now_s: float = 40.0, stored: StorageContents | None = None, **given: Any
) -> Any:
    told = member("m0", report("m0", launcher(), durable=durable), **given)
    seen = view(told, now_s=now_s, phase="saving", save=2, save_member="m0", lineage=(Lineage(3, 20),))
    stored = stored if stored is not None else on_storage(Checkpoint(9, 1, 2, "p"))
    return closing.saving(replace(seen, stored=stored), POLICY)


@pytest.mark.parametrize(
    ("durable", "why"),
    [
        (CheckpointReport(9, 1, "p", 0.1, "", 2), "stopped as requested, with a checkpoint of step 9"),
        (CheckpointReport(7, 1, "p", 0.0, "disk full", 2), "stopped; the last checkpoint failed: disk full"),
    ],
)
def test_the_answer_to_the_save_ends_the_run(durable: CheckpointReport, why: str) -> None:
    assert saving(durable) == End(exit_codes.INTERRUPTED, why)


WRITTEN = CheckpointReport(9, 1, "p", 0.1, "", 2)


@pytest.mark.parametrize(
    "there",
    [(), (Checkpoint(9, 2, 2, "p"),), (Checkpoint(8, 1, 2, "p"),)],
    ids=["nothing", "another generation's", "an older one"],
)
def test_a_missing_checkpoint_is_not_named(there: tuple[Checkpoint, ...]) -> None:
    unread = saving(WRITTEN, stored=on_storage(*there, heard=1))
    assert unread == Wait(50 * S, "checking whether the checkpoint of step 9 is on storage"), (
        "storage was read before the checkpoint was written"
    )
    found = saving(WRITTEN, stored=on_storage(*there))
    gone = "stopped; the checkpoint of step 9 was written but is no longer on storage"
    assert found == End(exit_codes.INTERRUPTED, gone)


def test_a_reading_of_storage_since_the_save_request_is_recent_enough() -> None:
    found = saving(WRITTEN, stored=on_storage(Checkpoint(9, 1, 2, "p"), heard=2))
    assert found == End(exit_codes.INTERRUPTED, "stopped as requested, with a checkpoint of step 9")


def test_a_void_checkpoint_is_not_named() -> None:
    void = CheckpointReport(25, 1, "p", 0.1, "", 2)
    found = saving(void, stored=on_storage(Checkpoint(25, 1, 2, "p")))
    assert isinstance(found, End)
    assert found.why.endswith("is no longer on storage")


def test_storage_that_fails_after_the_save_is_named_at_the_end() -> None:
    away = on_storage(Checkpoint(9, 1, 2, "p"), error="Input/output error")
    assert isinstance(saving(WRITTEN, stored=away), Wait)
    why = "stopped; the checkpoint of step 9 was written, but storage could not be read: Input/output error"
    assert saving(WRITTEN, 50.0, away) == End(exit_codes.INTERRUPTED, why)


def test_after_the_answer_to_an_older_save_the_wait_continues_for_a_bounded_time() -> None:
    old = CheckpointReport(7, 1, "p", 0.1, "", 1)
    assert isinstance(saving(old), Wait)
    assert isinstance(saving(old, connected=False), Wait)
    late = "stopped without its last checkpoint: member m0 did not begin to save it for 50 s"
    assert saving(old, 50.0) == End(exit_codes.INTERRUPTED, late)
    gone = "stopped without its last checkpoint: member m0 is lost"
    assert saving(old, exists=False) == End(exit_codes.INTERRUPTED, gone)


def test_a_last_checkpoint_is_waited_for_while_storage_makes_progress() -> None:
    def saving_for(now_s: float, unmoved_s: float, durable: CheckpointReport, **given: Any) -> Any:
        told = member("m0", report("m0", launcher(), durable=durable, unmoved_s=unmoved_s), **given)
        seen = view(told, now_s=now_s, phase="saving", save=2, save_member="m0")
        return closing.saving(replace(seen, stored=on_storage(heard=1)), POLICY)

    under_way = CheckpointReport(7, 1, "p", 0.1, "", 1)
    assert isinstance(saving_for(4000.0, 49.0, under_way), Wait), "the save may take an hour"
    assert isinstance(saving_for(4000.0, 50.0, under_way), End)
    assert isinstance(saving_for(4000.0, 48.0, under_way, silent_s=3.0), End), "the report is already 3 s old"
    assert isinstance(saving_for(49.0, 4000.0, under_way), Wait), "nothing had to be saved for an hour"
    assert isinstance(saving_for(4000.0, 1.0, WRITTEN), Wait), (
        "storage gets the same time to list the checkpoint"
    )


def test_if_the_member_that_saves_is_lost_another_holder_is_asked() -> None:
    lost = replace(HELD[0], exists=False)
    both = replace(
        HELD[1],
        report=holding("m1", ((1, 9), (1, 7)), tuple((r, 1, s) for r in (0, 1) for s in (9, 7))).report,
    )
    cut = (InterruptedWork(0, 12, 11, 1.0),)
    given: dict[str, Any] = {"phase": "saving", "save": 2, "save_member": "m0", "save_step": 9}
    seen = replace(view(lost, both, save_generation=1, cut=cut, **given), stored=on_storage())
    action = decide(seen, POLICY)
    assert isinstance(action, Save)
    assert (action.member, action.resume.step, action.cut) == ("m1", 9, cut)
    memory = transition.after(seen, action, POLICY)
    assert (memory.save, memory.save_member, memory.since_ns) == (3, "m1", seen.now_ns)
    order = order_for(memory, "m1", POLICY, None)
    assert (order.save, order.save_step) == (3, 9)
    alone = replace(view(lost, member("m1", report("m1", launcher())), **given), stored=on_storage())
    assert isinstance(decide(alone, POLICY), End)
    older = replace(both, report=replace(both.report, slots=both.report.slots[1:])) if both.report else both
    stops = decide(replace(view(lost, older, **given), stored=on_storage()), POLICY)
    assert isinstance(stops, Save)
    assert stops.resume.step == 7
    ends = decide(replace(view(lost, older, finished=True, **given), stored=on_storage()), POLICY)
    assert ends == missing("member m0 is lost; there is no other")


HOLDS = tuple((r, 1, 9) for r in (0, 1))


def late(now_s: float, policy: Policy = POLICY, unmoved_s: float = -1.0, **given: Any) -> Any:
    """Decide about a member that was to save the state at 100 s, with another that holds the state too."""
    of_saver = {name: given.pop(name) for name in ("back_ns", "heard_ns") if name in given}
    saver = holding("m0", ((1, 9),), HOLDS, unmoved_s=unmoved_s)
    usual: dict[str, Any] = {"phase": "saving", "save": 2, "save_member": "m0", "save_step": 9}
    usual |= {"save_generation": 1, "since_ns": 100 * S, **given}
    both = (replace(saver, **of_saver), holding("m1", ((1, 9),), HOLDS))
    return decide(replace(view(*both, now_s=now_s, **usual), stored=on_storage()), policy)


def test_another_holder_is_asked_if_the_first_does_not_begin_to_save() -> None:
    assert isinstance(late(149.0), Wait)
    action = late(150.0)
    assert isinstance(action, Save)
    assert (
        action.why == "member m0 did not begin to save it for 50 s: member m1 saves the checkpoint of step 9"
    )
    assert action.member == "m1"
    assert late(150.0, unmoved_s=60.0).member == "m1", "its last write was before the request"
    ends = late(150.0, save_tries=closing.MAX_SAVE_TRIES)
    assert isinstance(ends, End), "the end is bounded even if no member saves"


def test_storage_that_accepts_nothing_ends_a_run_on_one_machine_in_time() -> None:
    said = "storage accepted no more data for 50 s"
    ends = late(151.0, unmoved_s=50.5)
    assert isinstance(ends, End)
    assert ends.why.endswith(said)
    new = late(151.0, unmoved_s=90.0, heard_ns=101 * S)
    assert isinstance(new, End), "the member began before this supervisor took over"
    assert new.why.endswith(said)
    once = late(151.0, CLUSTER, unmoved_s=50.5)
    assert isinstance(once, Save), "storage may respond to another node"
    assert once.member == "m1"
    assert isinstance(late(151.0, CLUSTER, unmoved_s=50.5, save_tries=1), End)


def test_a_sidecar_that_dies_again_and_again_does_not_delay_the_end_forever() -> None:
    """Each new sidecar writes the checkpoint from the beginning, which is no progress."""
    assert isinstance(late(250.0, unmoved_s=1.0), Wait), "the save may take an hour"
    assert isinstance(late(159.0, unmoved_s=1.0, back_ns=149 * S), Wait)
    first = late(151.0, unmoved_s=0.1, back_ns=151 * S)
    assert isinstance(first, Save)
    assert first.member == "m0", "if only its connection was interrupted, it is still writing"
    assert late(151.0, unmoved_s=0.1, back_ns=151 * S, save_tries=1).member == "m1"
    last = late(151.0, unmoved_s=0.1, back_ns=151 * S, save_tries=closing.MAX_SAVE_TRIES)
    assert isinstance(last, End)
    assert last.why.endswith("member m0 stopped reporting while it saved")


def test_the_orders_to_save_the_last_checkpoint_again_are_counted() -> None:
    seen = replace(view(*HELD, stop="graceful", save_tries=3, phase="securing"), stored=on_storage())
    save = Save("m0", ResumePoint(9, 1, "slot", holders=("m0",)), "")
    memory = transition.after(seen, save, POLICY)
    assert memory.save_tries == 0
    for tries in (1, 2):
        memory = transition.after(replace(seen, memory=memory), save, POLICY)
        assert memory.save_tries == tries


def test_a_silent_holder_is_waited_for_when_the_saving_member_is_lost() -> None:
    lost = replace(HELD[0], exists=False)
    holds = holding("m1", ((1, 9),), tuple((r, 1, 9) for r in (0, 1)))
    given: dict[str, Any] = {"phase": "saving", "save": 2, "save_member": "m0", "save_step": 9}

    def decided(**quiet: Any) -> Any:
        return decide(replace(view(lost, replace(holds, **quiet), **given), stored=on_storage()), POLICY)

    assert isinstance(decided(), Save)
    assert isinstance(decided(silent_s=2.0), Wait), "no report for longer than usual"
    assert isinstance(decided(silent_s=2.0, connected=False), Wait), "its sidecar is being replaced"
    assert isinstance(decided(silent_s=POLICY.member_timeout_s), End), "it counts as lost"


def test_members_are_waited_for_until_they_are_gone_or_their_time_is_up() -> None:
    stopping = view(*HELD, now_s=14.9, phase="stopping")
    assert isinstance(closing.stopping(stopping, POLICY), Wait)
    assert isinstance(closing.stopping(view(*HELD, now_s=15.0), POLICY), Done)
    gone = [replace(each, exists=False) for each in HELD]
    assert closing.stopping(view(*gone), POLICY) == Done("no member is left")


CLUSTER = replace(POLICY, members_created_externally=True)


def test_a_stopped_run_of_a_cluster_has_not_ended_while_a_member_that_was_ordered_to_end_has_not() -> None:
    """Nothing kills it: its launcher may be out of reach, or its member may count as lost."""
    silent = replace(HELD[0], report=report("m0", None, launcher_silent="no sign of life"))
    lost = replace(HELD[1], name="lost", exists=False, is_listed=True)
    later = replace(HELD[1], name="the owner's next pod")
    given: dict[str, Any] = {"phase": "stopping", "stop": "graceful", "placement": ("m0",)}
    left = view(silent, lost, later, now_s=900.0, bystanders=("lost",), **given)
    action = closing.stopping(left, CLUSTER)
    assert isinstance(action, Wait)
    assert action.why == "2 members that were ordered to end have not ended: m0, lost"
    assert closing.stopping(view(later, now_s=900.0, **given), CLUSTER) == Done("no member is left")


@pytest.mark.parametrize("stop", ["", "terminate"])
def test_a_pod_that_does_not_end_delays_the_owners_next_pods_only_briefly_and_is_named(
    stop: str,
) -> None:
    left = view(*HELD, now_s=15.0, phase="stopping", stop=stop, why="failed")
    action = closing.stopping(left, CLUSTER)
    assert isinstance(action, Done)
    after = transition.after(left, action, CLUSTER)
    assert after.why == "failed; 2 members that were ordered to end have not ended: m0, m1"
    assert after.phase == "ended"


def test_the_members_without_ranks_that_are_ordered_to_end_are_remembered() -> None:
    standby, lost = replace(HELD[1], name="s"), replace(HELD[1], name="l", exists=False, is_listed=True)
    gone = replace(HELD[1], name="g", exists=False)
    seen = view(*HELD, standby, lost, gone)
    assert transition.after(seen, End(1, "no"), CLUSTER).bystanders == ("s", "l")
    assert transition.after(seen, End(1, "no"), POLICY).bystanders == ()


# -- work after a commit that a stop interrupts

CUT = InterruptedWork(0, 9, 8, 3.0)
AGAIN = "; it precedes the interrupted work after a commit (rank 0 after step 9), which will be repeated"


def evaluating(*slots: int, **given: Any) -> Any:
    """Return a view where rank 0 works after the commit of step 9, and both members hold `slots`."""
    members = []
    for number in (0, 1):
        held = holding(f"m{number}", tuple((1, s) for s in slots), tuple((number, 1, s) for s in slots))
        assert held.report is not None
        where = replace(progress(number, 9), tail_s=3.0 if number == 0 else 0.0)
        told = replace(held.report, launcher=launcher(rank(number)), progress=(where,), secured_for=1)
        members.append(replace(held, report=told))
    return view(*members, **{"phase": "securing", "since_ns": 99 * S, "stop": "graceful", **given})


def test_a_stop_that_cuts_off_work_after_a_commit_saves_a_state_from_before_it() -> None:
    seen = evaluating(9, 7)
    action = closing.save_and_end(seen, ())
    assert isinstance(action, Save)
    assert (action.resume.step, action.cut) == (7, (CUT,))
    memory = transition.after(seen, action, POLICY)
    assert memory.lineage == (), "nothing is void before the older state is on storage"
    order = orders.order_for(memory, "m0", POLICY, None)
    assert order.lineage == (Lineage(2, 7),), "later checkpoints must not displace it on storage"


def test_once_the_older_state_is_on_storage_the_states_containing_the_cut_step_are_void() -> None:
    seen = evaluating(9, 7, phase="saving", save=2, save_member="m0", save_step=7, cut=(CUT,))
    first = seen.members[0]
    told = replace(first.report, durable=CheckpointReport(7, 1, "p", 0.1, "", 2))
    both = on_storage(Checkpoint(9, 1, 2, "k"), Checkpoint(7, 1, 2, "p"))
    seen = replace(seen, members=(replace(first, report=told), seen.members[1]), stored=both)
    action = closing.saving(seen, POLICY)
    assert isinstance(action, End)
    assert action.why == f"stopped as requested, with a checkpoint of step 7{AGAIN}"
    memory = transition.after(seen, action, POLICY)
    assert (memory.lineage, memory.missed) == ((Lineage(2, 7),), ())
    failed = replace(told, durable=CheckpointReport(9, 1, "k", 0.0, "disk full", 2))
    seen = replace(seen, members=(replace(first, report=failed), seen.members[1]))
    memory = transition.after(seen, closing.saving(seen, POLICY), POLICY)
    assert (memory.lineage, memory.missed) == ((), (MissedWork(0, 0, 9),))


def test_an_older_checkpoint_serves_if_no_older_snapshot_exists() -> None:
    seen = replace(evaluating(9), stored=on_storage(Checkpoint(6, 1, 2, "p")))
    action = closing.save_and_end(seen, ())
    assert isinstance(action, End)
    assert (action.back, action.why) == (
        6,
        f"stopped as requested; the newest checkpoint is from step 6{AGAIN}",
    )


def test_without_an_older_state_the_lost_work_is_reported_now_and_by_the_next_run() -> None:
    seen = replace(evaluating(9), stored=on_storage())
    saved = closing.save_and_end(seen, ())
    assert isinstance(saved, Save)
    assert saved.resume.step == 9
    memory = transition.after(seen, saved, POLICY)
    told = replace(seen.members[0].report, durable=CheckpointReport(9, 1, "p", 0.1, "", 1), progress=())
    over = replace(
        seen,
        members=(replace(seen.members[0], report=told), seen.members[1]),
        memory=memory,
        stored=on_storage(Checkpoint(9, 1, 2, "p")),
    )
    ended = transition.after(over, closing.saving(over, POLICY), POLICY)
    assert (ended.exit_code, ended.lineage, ended.missed) == (130, (), (MissedWork(0, 0, 9),))
    assert closing.summary(ended) == (
        "stopped as requested, with a checkpoint of step 9; "
        "work after commit was cut short 1 time: rank 0 after step 9"
    )
    found = closing.finished(view(missed=ended.missed), POLICY)
    assert found == End(
        exit_codes.CUT_SHORT,
        "all ranks have finished; work after commit was cut short 1 time: rank 0 after step 9 by a stop",
    )


def test_a_stop_names_the_newer_state_that_it_does_not_use() -> None:
    seen = evaluating(7, phase="saving", save=2, save_member="m0", save_step=7)
    first = seen.members[0]
    where = replace(progress(0, 9), late=(9,))
    told = replace(first.report, durable=CheckpointReport(7, 1, "p", 0.1, "", 2), progress=(where,))
    seen = replace(seen, members=(replace(first, report=told), seen.members[1]))
    seen = replace(seen, stored=on_storage(Checkpoint(7, 1, 2, "p")))
    assert closing.saving(seen, POLICY) == End(
        exit_codes.INTERRUPTED,
        "stopped as requested, with a checkpoint of step 7; "
        "the state of step 9 was changed after its commit and is not used",
    )


def test_a_rank_that_left_its_loop_early_is_named_when_the_run_has_finished() -> None:
    past = PastFault("crash", 1, "m1", 20, uneven_steps.EXITED_IN_LOOP, 90 * S, 3)
    found = view(history=(replace(past, signature="other"), past))
    end = closing.finished(found, POLICY)
    assert isinstance(end, End)
    assert end.exit_code == 0
    line = "; rank 1 alone left its loop at step 20 and was restarted; all ranks must leave the loop"
    assert end.why == f"all ranks have finished{line}"
    ended = replace(found.memory, why=end.why, completion=end.completion, exit_code=0, incidents=2, before=0)
    assert closing.summary(ended) == f"all ranks have finished after 2 incidents{line}"


def at_the_end(
    *steps: int, phase: str = "done", held: int = 9, stored: StorageContents | None = None, **given: Any
) -> View:
    """Return two members that hold the state of step `held`, and whose ranks have exited with code 0."""
    members = []
    for number, (name, step) in enumerate(zip(("m0", "m1"), steps, strict=True)):
        at = replace(progress(number, step), phase=phase)
        over = launcher(rank(number, Ending(0, 0, None, False, "", 0, "")))
        kept = ((1, held),), ((number, 1, held),)
        members.append(holding(name, *kept, launcher=over, progress=(at,)))
    stored = stored if stored is not None else on_storage(Checkpoint(4, 1, 2, "old"))
    return replace(view(*members, **given), stored=stored)


def test_a_finished_run_saves_its_last_state_before_it_ends() -> None:
    seen = at_the_end(9, 9)
    action = decide(seen, POLICY)
    assert isinstance(action, Save)
    assert (action.member, action.resume.step, action.finished) == ("m0", 9, True)
    after = transition.after(seen, action, POLICY)
    assert (after.phase, after.save_step, after.finished) == ("saving", 9, True)
    asked = order_for(after, "m0", POLICY, None)
    assert (asked.do, asked.save, asked.save_step, asked.just_in_time) == ("secure", 1, 9, False)


DONE = "all ranks have finished"
NONE = "no checkpoint of step 9 could be written: "
NEWEST = "; the newest is from step 4"
SILENT = "rank 0 ended without a report (for example through os._exit()) or inside its loop"


def missing(why: str) -> End:
    """Return the end of a run that has finished without a checkpoint of its last step."""
    return End(0, f"{DONE}, but {NONE}{why}", warning=f"{NONE}{why}")


@pytest.mark.parametrize(
    ("seen", "policy"),
    [
        pytest.param(at_the_end(9, 9), replace(POLICY, checkpoint_every_s=0.0), id="none wanted"),
        pytest.param(at_the_end(9, 9, stored=on_storage(Checkpoint(9, 1, 2, "p"))), POLICY, id="stored"),
        pytest.param(
            at_the_end(9, 9, phase="idle", stored=on_storage(Checkpoint(9, 1, 2, "p"))), POLICY, id="resumed"
        ),
        pytest.param(at_the_end(0, 0, phase="idle", held=0, stored=on_storage()), POLICY, id="no step"),
    ],
)
def test_a_last_state_that_is_stored_or_unwanted_delays_no_end_and_needs_no_note(
    seen: View, policy: Policy
) -> None:
    assert decide(seen, policy) == End(0, DONE)


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        pytest.param(at_the_end(9, 9, phase="idle"), f"{SILENT}{NEWEST}", id="os._exit"),
        pytest.param(
            at_the_end(9, 9, phase="idle", stored=on_storage()), f"{SILENT}; there is no other", id="none"
        ),
        pytest.param(
            at_the_end(9, 8), f"the ranks ended at different steps, 8 and 9{NEWEST}", id="different steps"
        ),
        pytest.param(
            at_the_end(9, 9, held=8),
            f"the private state of rank 0, 1 is missing{NEWEST}",
            id="an older state",
        ),
        pytest.param(
            at_the_end(9, 9, void=(VoidStep(1, 9, 0),)),
            f"no member holds a usable snapshot of it{NEWEST}",
            id="void",
        ),
        pytest.param(
            at_the_end(9, 9, stored=on_storage(error="Stale file handle")),
            "storage: Stale file handle",
            id="away",
        ),
    ],
)
def test_a_finished_run_without_a_checkpoint_of_its_last_step_says_so_and_why(seen: View, why: str) -> None:
    action = decide(seen, POLICY)
    assert action == missing(why)
    assert isinstance(action, End)
    assert action.completion == Completion(f"{NONE}{why}")
    ended = transition.after(seen, action, POLICY)
    assert [each.text for each in ended.warned] == [f"{NONE}{why}"]
    assert closing.summary(replace(ended, incidents=1)) == (f"{DONE} after 1 incident, but {NONE}{why}")


def test_the_note_about_a_rank_whose_last_state_is_not_kept_is_repeated() -> None:
    seen = at_the_end(9, 9, phase="idle")
    first, second = seen.members
    assert second.report is not None
    assert second.report.launcher is not None
    [told] = second.report.launcher.ranks
    word = "the script left its loop before all steps were done"
    left = replace(second.report.launcher, ranks=(replace(told, left=word),))
    seen = replace(seen, members=(first, replace(second, report=replace(second.report, launcher=left))))
    assert decide(seen, POLICY) == missing(f"{word}{NEWEST}")


def test_a_supervisor_that_takes_over_at_the_end_reads_storage_before_ending_without_a_checkpoint() -> None:
    unread = StorageContents(error=UNREAD, failed_ns=99 * S)
    assert decide(at_the_end(9, 9, stored=unread), POLICY) == Wait(
        109 * S, "looking for checkpoints on storage"
    )
    late = replace(unread, failed_ns=90 * S)
    assert decide(at_the_end(9, 9, stored=late), POLICY) == missing("storage: it does not respond")


def test_a_briefly_silent_member_is_waited_for_but_not_until_it_is_lost() -> None:
    seen = at_the_end(9, 9)

    def quiet(silent_s: float) -> View:
        first, second = seen.members
        return replace(seen, members=(first, replace(second, silent_s=silent_s)))

    waits = decide(quiet(2.0), POLICY)
    assert isinstance(waits, Wait)
    assert waits.until_ns == 101 * S
    assert decide(quiet(3.5), POLICY) == missing(f"the private state of rank 1 is missing{NEWEST}")


@pytest.mark.parametrize(
    ("durable", "given", "why"),
    [
        (CheckpointReport(9, 1, "p", 0.1, "", 2), {}, ""),
        (CheckpointReport(9, 1, "p", 0.1, "", 1), {"stop": "now"}, ""),
        (
            CheckpointReport(7, 1, "p", 0.0, "disk full", 2),
            {"held": 7},
            "disk full; the newest is from step 7",
        ),
        (
            CheckpointReport(7, 1, "p", 0.0, "", 1),
            {"now_s": 50.0, "held": 7},
            "member m0 did not begin to save it for 50 s; the newest is from step 7",
        ),
        (
            CheckpointReport(7, 1, "p", 0.0, "", 1),
            {"exists": False, "held": 7},
            "member m0 is lost; the newest is from step 7",
        ),
        (
            CheckpointReport(8, 1, "p", 0.1, "", 2),
            {"held": 7},
            "it was written but is no longer on storage; the newest is from step 7",
        ),
        (
            CheckpointReport(9, 1, "p", 0.1, "", 2),
            {"stored": on_storage(error="Stale file handle"), "now_s": 50.0},
            "Stale file handle",
        ),
        (
            CheckpointReport(9, 1, "p", 0.1, "", 2),
            {"stored": on_storage(heard=1), "now_s": 50.0},
            "it was written, but storage does not respond; there is no other",
        ),
    ],
)
def test_a_finished_run_ends_with_code_0_whatever_becomes_of_the_last_checkpoint(
    durable: CheckpointReport, given: dict[str, Any], why: str
) -> None:
    assert _last_of(durable, **given) == (missing(why) if why else End(0, DONE))


@pytest.mark.parametrize("state", ["exited", "failing"])
def test_a_rank_that_could_not_write_its_output_is_not_a_fault_and_determines_the_code(state: str) -> None:
    lost = Ending(0, 120, None, False, UNFLUSHED, 0, "OSError: No space left on device")
    first = member("m0", report("m0", launcher(rank(0, replace(lost, code=0, fail="")))))
    second = member("m1", report("m1", launcher(rank(1, lost, state=state))))
    action = decide(view(first, second), POLICY)
    if state == "failing":  # its exit handlers are running
        assert isinstance(action, Wait)
    else:
        lost_line = "; rank 1 could not write all of its output: OSError: No space left on device"
        assert action == End(120, f"{DONE}{lost_line}")


def test_a_last_checkpoint_is_waited_for_within_bounds() -> None:
    assert isinstance(_last_of(CheckpointReport(7, 1, "p", 0.0, "", 1)), Wait)
    assert isinstance(_last_of(CheckpointReport(9, 1, "p", 0.1, "", 2), stored=on_storage(heard=1)), Wait)
    assert isinstance(_last_of(CheckpointReport(7, 1, "p", 0.0, "", 1), stop="graceful"), Wait)


def _last_of(
    durable: CheckpointReport,
    now_s: float = 40.0,
    stored: StorageContents | None = None,
    exists: bool = True,
    stop: str = "",
    held: int = 9,
) -> Any:
    told = member("m0", report("m0", launcher(), durable=durable), exists=exists)
    given = {"save": 2, "save_step": 9, "save_member": "m0", "finished": True, "stop": stop}
    seen = view(told, now_s=now_s, phase="saving", **given)
    return decide(
        replace(seen, stored=stored if stored is not None else on_storage(Checkpoint(held, 1, 2, "p"))),
        POLICY,
    )


AWAY = Ending(0, 1, fail="exception", message="FileNotFoundError: data.pt")
OLD = Checkpoint(4, 1, 2, "step-00000004")


def stuck(asked: CheckpointReport | None = None, **given: Any) -> View:
    """Return a group without processes: both members hold step 9, and step 4 is on storage."""
    members = []
    for number in (0, 1):
        waiting = rank(number, generation=2, pid=0, state="starting")
        failing = launcher(waiting, generation=2, parked=(), warm_ending=AWAY, warm_failures=4, warm_tries=4)
        more: dict[str, Any] = {"launcher": failing, "secured_for": 2}
        more |= {"durable": asked} if asked is not None and number == 0 else {}
        members.append(holding(f"m{number}", ((1, 9),), ((number, 1, 9),), **more))
    return replace(view(*members, **given), stored=on_storage(OLD))


def opened() -> OpenIncident:
    resumed = ResumePoint(9, 1, "slot")
    return OpenIncident(1, 1, 90 * S, 90 * S, 0.0, (fault("crash"),), resume=resumed, lost=0, reached=9)


@pytest.mark.parametrize(
    ("asked", "stored", "said", "lost"),
    [
        (
            CheckpointReport(9, 1, "p", 0.1, "", 1),
            (Checkpoint(9, 1, 2, "p"), OLD),
            "; the state of step 9 is saved as a checkpoint",
            0,
        ),
        (
            CheckpointReport(4, 1, "p", 0.1, "no space", 1),
            (OLD,),
            "; the state of step 9 could not be saved: no space",
            5,
        ),
    ],
)
def test_a_run_whose_script_no_longer_starts_ends_once_the_secured_state_is_on_storage(
    asked: CheckpointReport, stored: tuple[Checkpoint, ...], said: str, lost: int
) -> None:
    why = "the script failed 4 times before it joined"
    seen = stuck(now_s=161, since_ns=100 * S, generation=2, saved=4, incident=opened(), incidents=1)
    known = replace(seen.memory, lineage=(Lineage(2, 9),))
    seen = replace(seen, memory=known)
    secure = decide(seen, POLICY)
    assert secure == Secure((), True, why, End(1, why, AWAY.message))
    seen = replace(seen, memory=transition.after(seen, secure, POLICY))
    save = decide(seen, POLICY)
    assert isinstance(save, Save)
    assert (save.member, save.resume.step) == ("m0", 9)
    memory = transition.after(seen, save, POLICY)
    seen = replace(stuck(asked, now_s=170), memory=memory, stored=on_storage(*stored, looked_s=169))
    end = decide(seen, POLICY)
    assert end == End(1, why + said, AWAY.message)
    after = transition.after(seen, end, POLICY)
    assert (after.exit_code, after.why, after.phase) == (1, why + said, "stopping")
    assert after.incident is not None
    assert (after.incident.resume, after.incident.lost, after.incident.remedy) == (None, lost, "stop")


def test_a_script_that_has_never_worked_ends_the_run_at_once() -> None:
    ended = decide(stuck(now_s=100, since_ns=100 * S, generation=2, incident=opened()), POLICY)
    assert ended == End(1, "the script failed 4 times before it joined", AWAY.message)


def test_an_unrequested_end_has_its_own_reason_and_states_what_is_saved() -> None:
    reason = End(7, "the script failed 3 times before it joined", "traceback")
    stored = on_storage(Checkpoint(9, 1, 2, "p"))
    seen = replace(view(phase="securing", end=reason), stored=stored)
    found = closing.save_and_end(seen, ())
    why = "the script failed 3 times before it joined; the newest checkpoint is from step 9"
    assert found == End(7, why, "traceback")


def test_a_run_that_finished_while_about_to_be_given_up_is_reported_as_finished() -> None:
    reason = End(7, "the script failed 3 times before it joined")
    seen = view(phase="saving", save=1, save_member="m0", save_step=9, finished=True, end=reason)
    found = closing.saving(replace(seen, now_ns=seen.now_ns + 1000 * S), POLICY)
    assert isinstance(found, End)
    assert found.exit_code == 0
    assert found.why.startswith(f"{DONE}, but no checkpoint of step 9 could be written: member m0 is lost")


def test_only_the_end_of_a_finished_script_has_the_parts_of_its_sentence() -> None:
    assert closing.is_finish(closing.end_finished(view(), ""))
    assert closing.is_finish(End(3, f"{DONE}; and more", completion=Completion(notes=("and more",))))
    assert closing.is_finish(End(0, "the script ended before it joined"))
    assert not closing.is_finish(End(3, f"{DONE}; and more")), "a sentence is not parsed"


def test_work_that_a_stop_cut_short_is_named_even_if_the_run_finished() -> None:
    missed, end = (MissedWork(0, 0, 9),), End(1, "given up")
    ended = view(missed=missed, end=end, why=DONE, completion=Completion(), exit_code=3).memory
    cut_short = "work after commit was cut short 1 time: rank 0 after step 9"
    assert closing.summary(ended) == f"{DONE}; {cut_short}"
    assert closing.completion_of(ended) == Completion(notes=(cut_short,))
    assert closing.summary(replace(ended, end=None)) == DONE
