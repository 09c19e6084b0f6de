"""Decisions about a run that a fault ends: its newest good state is saved first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast import exit_codes
from holdfast.protocol.launcher_messages import Ending
from holdfast.protocol.lineage import Lineage
from holdfast.protocol.member_messages import CheckpointReport
from supervisor.decision import closing, resume_point, transition
from supervisor.decision.decide import decide
from supervisor.decision.orders import order_for
from supervisor.view.model import (
    UNREAD,
    Checkpoint,
    Done,
    End,
    JobState,
    PendingStart,
    Policy,
    Save,
    SetAsideState,
    StopRequest,
    StorageContents,
    View,
    Wait,
)
from tests.simulation.cluster.scripts import STEPS, TWO, actions, cued
from tests.simulation.cluster.world import World
from tests.unit.supervisor.job_views import S, fault, holding, launcher, member, progress, rank, report, view

NEVER = replace(TWO, checkpoint_every_s=0.0)
SAVED = "; the state of step 5 is saved as a checkpoint"
ENDS: dict[str, tuple[dict[str, Any], int]] = {
    "an exception at the same step": ({"what": "raise"}, 1),
    "a crash at the same step": ({"what": "crash"}, 139),
    "a hang at the same step": ({"what": "hang", "policy": replace(NEVER, stall_limit_s=1.0)}, 1),
    "a bad number at the same step": ({"what": "nan"}, 1),
    "a deliberate exit": ({"what": "leave"}, 3),
    "the budget of restarts": ({"what": "kill", "policy": replace(NEVER, max_restarts=0)}, 137),
    "the budget, on a single member": ({"what": "kill", "policy": Policy(nproc=2, max_restarts=0)}, 137),
}


def failing(what: str, policy: Policy = NEVER, **given: Any) -> World:
    return cued(1, 5, what, times=99, policy=policy, **{"snapshot_every": 5, **given})


def newest_of_next_run(world: World) -> Checkpoint | None:
    """Return the checkpoint that the next run in the same directory resumes from."""
    memory = JobState(2, 1, lineage=world.memory.lineage)
    return resume_point.newest_checkpoint(View(0, 0.0, memory, (), world.store.stored()))


@pytest.mark.parametrize("name", ENDS)
def test_a_fault_that_ends_the_run_leaves_a_checkpoint_from_before_the_failing_step(name: str) -> None:
    given, code = ENDS[name]
    world = failing(**given).run()
    assert world.ended is not None
    assert world.ended.exit_code == code
    assert world.ended.why.endswith(SAVED)
    assert world.ended.cause is not None
    found = newest_of_next_run(world)
    assert found is not None
    assert found.step == 5
    assert world.memory.missed == ()
    assert world.memory.incident is not None
    assert world.memory.incident.lost == max(0, world.memory.incident.reached - 5)


def test_the_state_after_a_bad_number_is_not_saved() -> None:
    world = cued(1, 6, "nan", times=99, policy=NEVER, snapshot_every=5).run()
    assert world.ended is not None
    assert world.ended.why.endswith(SAVED)
    assert [each.step for each in world.store.found] == [5]


@pytest.mark.parametrize("name", ["an exception at the same step", "a bad number at the same step"])
def test_the_end_is_the_same_whenever_the_supervisor_dies_on_the_way_to_it(name: str) -> None:
    given, code = ENDS[name]
    whole = failing(**given).run()
    assert whole.ended is not None
    first = next(n for n, (_, action, _) in enumerate(whole.journal) if isinstance(action, Save))
    for point in range(whole.decided[first - 1], whole.points + 1):
        world = failing(**given, kills=frozenset({point})).run()
        assert world.ended is not None
        assert (world.ended.exit_code, world.ended.why) == (code, whole.ended.why), point
        assert [each.step for each in world.store.found] == [5], point
        assert world.memory.lineage == whole.memory.lineage, point


def test_storage_that_refuses_the_state_leaves_the_exit_code_of_the_fault() -> None:
    world = failing("crash").at(900, lambda w: setattr(w.store, "away", True)).run()
    assert world.ended is not None
    assert world.ended.exit_code == 139
    assert "; the state of step 5 could not be saved: " in world.ended.why
    assert world.memory.incident is not None
    assert world.memory.incident.lost == 5


def test_a_second_stop_request_ends_the_save_at_once() -> None:
    whole = failing("raise").run()
    [saved_ns] = [seen.now_ns for seen, action, _ in whole.journal if isinstance(action, Save)]
    requests: tuple[StopRequest, ...] = ("graceful", "now")

    def ask(how: StopRequest, world: World) -> None:
        world.stop = how
        world.look()

    for how in requests:
        world = failing("raise")
        world.at_ns(saved_ns + 1, lambda world=world, how=how: ask(how, world))  # type: ignore[misc]
        world.run()
        assert world.ended is not None
        if how == "graceful":
            assert whole.ended is not None
            assert (world.ended.exit_code, world.ended.why) == (1, whole.ended.why)
        else:
            assert world.ended.exit_code == exit_codes.INTERRUPTED
            said = "stopped immediately, as requested, while the run was ending: "
            assert world.ended.why.startswith(said)
            assert "the same failure 3 times at step 5; " in world.ended.why
            assert world.ended.cause is not None
            assert [type(a) for _, a, _ in world.journal][-3:] == [Save, End, Done]


def test_no_state_of_a_script_that_keeps_its_own_is_saved() -> None:
    world = failing("raise", keeps_itself=True).run()
    assert actions(world, Save) == []
    assert world.ended is not None
    assert world.ended.why.endswith("this is a bug, not a fault")


def test_a_bug_in_the_first_step_leaves_no_checkpoint() -> None:
    """A corrected script may begin with another model, which a checkpoint of step 0 would refuse."""
    world = cued(1, 0, "raise", times=99, policy=NEVER).run()
    assert actions(world, Save) == []
    assert world.store.found == []


# -- a single decision

RAISED = Ending(0, 1, fail="exception", message="ValueError: bug")
POLICY = Policy(members=2, max_restarts=0, save_s=50.0)
WHY = "--max-restarts 0 reached: 0 restarts in 1 h; rank 1 raised ValueError: bug"
ENDED = End(1, WHY, RAISED.message)


def ending(*steps: int, other: bool = True, checkpoints: tuple[int, ...] = (), **given: Any) -> View:
    """Return a group whose rank 1 has failed in step 9, and whose members hold the states of `steps`.

    With `other` false, no member holds rank 1's private states.
    """
    members = []
    for number in (0, 1):
        privates = tuple((number, 1, step) for step in steps if number == 0 or other)
        at = rank(number, RAISED if number else None)
        told = holding(f"m{number}", tuple((1, step) for step in steps), privates, launcher=launcher(at))
        assert told.report is not None
        members.append(replace(told, report=replace(told.report, secured_for=1)))
    seen = view(*members, phase="securing", since_ns=99 * S, **given)
    stored = tuple(Checkpoint(step, 1, 2, f"step-{step}") for step in checkpoints)
    return replace(seen, stored=StorageContents(stored, looked_ns=100 * S, heard=9))


def test_the_state_is_saved_by_a_member_that_holds_it_and_displaces_no_older_checkpoint() -> None:
    seen = ending(9, checkpoints=(4,))
    action = decide(seen, POLICY)
    assert isinstance(action, Save)
    assert (action.member, action.resume.step, action.finished) == ("m0", 9, False)
    assert action.end is not None
    assert (action.end.exit_code, action.end.why) == (1, WHY)
    memory = transition.after(seen, action, POLICY)
    assert (memory.phase, memory.end) == ("saving", action.end)
    order = order_for(memory, "m0", POLICY, None)
    assert (order.save, order.save_step, order.keep) == (1, 9, POLICY.keep + 1)
    assert order_for(seen.memory, "m0", POLICY, None).keep == POLICY.keep


def test_a_member_whose_ranks_have_moved_to_a_standby_saves_the_state_that_it_holds() -> None:
    seen = ending(9)
    held = holding("m00", ((1, 9),), (), launcher=launcher())
    assert held.report is not None
    moved = replace(held, report=replace(held.report, secured_for=1))
    seen = replace(seen, members=(moved, *seen.members))
    action = decide(seen, POLICY)
    assert isinstance(action, Save)
    memory = transition.after(seen, action, POLICY)
    assert action.member == "m00"
    assert "m00" not in memory.positions
    order = order_for(memory, "m00", POLICY, None)
    assert (order.save, order.save_step, order.sources) == (1, 9, action.resume.sources[3:])


@pytest.mark.parametrize("checkpoints", [(9,), (9, 4), (12,)])
def test_a_state_that_is_no_newer_than_a_checkpoint_is_not_saved(checkpoints: tuple[int, ...]) -> None:
    action = decide(ending(9, checkpoints=checkpoints), POLICY)
    assert isinstance(action, End)
    assert (action.exit_code, action.why, action.back) == (1, WHY, None)


@pytest.mark.parametrize(
    ("checkpoints", "clause"),
    [((), "no state could be saved"), ((4,), "no state after step 4 could be saved")],
)
def test_an_end_without_a_complete_state_says_what_is_missing(
    checkpoints: tuple[int, ...], clause: str
) -> None:
    action = decide(ending(9, other=False, checkpoints=checkpoints), POLICY)
    assert isinstance(action, End)
    assert action.why == f"{WHY}; {clause}: the private state of rank 1 is missing"


def test_a_supervisor_that_has_just_taken_over_looks_for_newer_checkpoints_first() -> None:
    unread = StorageContents((), error=UNREAD)
    seen = replace(ending(5), stored=unread)
    assert decide(seen, POLICY) == Wait(109 * S, "looking for checkpoints on storage")
    newer = StorageContents((Checkpoint(8, 1, 2, "p"),), looked_ns=100 * S, heard=9)
    assert isinstance(decide(replace(seen, stored=newer), POLICY), End)
    assert isinstance(decide(replace(seen, now_ns=109 * S), POLICY), Save), "storage may never respond"
    assert isinstance(decide(seen, replace(POLICY, has_storage=False)), End)


def test_a_run_from_scratch_that_fails_in_its_second_step_keeps_the_earlier_checkpoints() -> None:
    """As long as the run has not settled, the next run resumes from them if the user changes their mind."""
    aside = SetAsideState((Lineage(1, 4),), (), (), 20)
    begun = PendingStart(5, 0, (), aside=aside)
    seen = replace(
        ending(1), stored=StorageContents((Checkpoint(20, 0, 2, "p"),), looked_ns=100 * S, heard=9)
    )

    def decided(**given: Any) -> Any:
        memory = replace(seen.memory, **{"unbegun": begun, "lineage": (Lineage(1, 0),), **given})
        return decide(replace(seen, memory=memory), POLICY)

    action = decided()
    assert isinstance(action, End)
    assert action.why == (
        f"{WHY}; the state of step 1 was not saved, to keep the checkpoints from before this run, which began"
        " from scratch"
    )
    memory = transition.after(replace(seen, memory=replace(seen.memory, unbegun=begun)), action, POLICY)
    assert (memory.lineage, memory.saved) == (aside.lineage, 20)
    assert isinstance(decided(unbegun=replace(begun, aside=None)), Save)
    assert isinstance(decided(settled=True), Save)
    seen = replace(seen, stored=StorageContents(looked_ns=100 * S, heard=9))
    assert isinstance(decided(), Save), "there is nothing to keep"


def test_a_job_without_storage_says_where_its_state_was() -> None:
    action = decide(ending(9), replace(POLICY, has_storage=False))
    assert isinstance(action, End)
    assert action.exit_code == 1
    assert action.why == (
        f"{WHY}; without a checkpoint: the job has no storage for checkpoints, so the state of step 9 is only"
        " in its pods' memory and is lost with them"
    )


def test_a_state_that_only_a_member_out_of_control_holds_is_saved() -> None:
    seen = ending(9)
    told = seen.members[0].report
    assert told is not None
    alone = replace(told, launcher_silent="no sign of life", privates=())
    left = member("m1", report("m1", launcher(rank(1, RAISED)), secured_for=1))
    both = holding("m0", ((1, 9),), ((0, 1, 9), (1, 1, 9)))
    assert both.report is not None
    first = replace(both, report=replace(alone, privates=both.report.privates))
    action = closing.end_after_fault(
        replace(seen, members=(first, left)), POLICY, (fault("exception", step=9),), ENDED
    )
    assert isinstance(action, Save)
    assert action.member == "m0"


def test_a_member_that_may_hold_a_newer_state_is_waited_for_within_its_timeout() -> None:
    seen = ending(4)
    told, left = seen.members[0].report, seen.members[1]
    assert told is not None
    at = (progress(0, 9),)
    first = replace(seen.members[0], report=replace(told, progress=at, launcher=launcher(rank(0, RAISED))))
    late = seen.members[1].report
    assert late is not None
    second = replace(left, report=replace(late, secured_for=0, launcher=launcher(rank(1))), connected=False)
    memory = replace(seen.memory, since_ns=97 * S)

    def decided(silent_s: float, **given: Any) -> Any:
        members = (first, replace(second, silent_s=silent_s))
        return decide(replace(seen, members=members, memory=replace(memory, **given)), POLICY)

    waits = decided(3.0)
    assert isinstance(waits, Wait)
    assert waits.until_ns <= 100 * S + int(POLICY.member_timeout_s * S)
    assert "m1 may have a newer state" in waits.why
    for action in (decided(POLICY.member_timeout_s), decided(3.0, stop="graceful")):
        assert isinstance(action, Save | End)


def saving(
    durable: CheckpointReport,
    now_s: float = 140.0,
    stored: bool = True,
    unmoved_s: float = -1.0,
    **given: Any,
) -> Any:
    seen = ending(9)
    memory = transition.after(seen, decide(seen, POLICY), POLICY)
    told = seen.members[0].report
    assert told is not None
    first = replace(seen.members[0], report=replace(told, durable=durable, unmoved_s=unmoved_s), **given)
    found = (Checkpoint(9, 1, 2, "p"),) if stored else ()
    now = View(int(now_s * S), 0.0, memory, (first, seen.members[1]), StorageContents(found, heard=9))
    return decide(now, POLICY)


@pytest.mark.parametrize(
    ("action", "clause"),
    [
        (saving(CheckpointReport(9, 1, "p", 0.1, "", 1)), "the state of step 9 is saved as a checkpoint"),
        (
            saving(CheckpointReport(9, 1, "p", 0.1, "No space left on device", 1)),
            "the state of step 9 could not be saved: No space left on device",
        ),
        (
            saving(CheckpointReport(), now_s=151.0, unmoved_s=50.0),
            "the state of step 9 could not be saved: storage accepted no more data for 50 s",
        ),
        (
            saving(CheckpointReport(9, 1, "p", 0.1, "", 1), stored=False),
            "the checkpoint of step 9 was written but is no longer on storage",
        ),
    ],
)
def test_the_run_ends_with_its_own_code_and_says_what_became_of_the_state(action: Any, clause: str) -> None:
    assert isinstance(action, End)
    assert (action.exit_code, action.why) == (1, f"{WHY}; {clause}")
    assert action.message == RAISED.message


def test_another_holder_saves_the_state_if_the_saving_member_dies() -> None:
    other = saving(CheckpointReport(), now_s=101.0, exists=False)
    assert isinstance(other, End), "the private state of rank 0 died with it"
    assert other.why == f"{WHY}; the state of step 9 could not be saved: member m0 is lost"
    assert isinstance(saving(CheckpointReport(), now_s=101.0, connected=False, silent_s=2.0), Wait)


def test_the_end_after_a_fault_runs_to_its_last_step_otherwise() -> None:
    world = failing("raise", policy=replace(NEVER, identical_failures=200)).run()
    assert world.ended is not None
    assert world.ended.exit_code == 0
    assert world.final.step == STEPS
