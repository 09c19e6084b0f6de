from __future__ import annotations

import re
from dataclasses import replace

import pytest

from supervisor.decision import transition
from supervisor.decision.decide import decide
from supervisor.view.model import (
    Checkpoint,
    Done,
    End,
    JobState,
    Learn,
    MemberView,
    Policy,
    Replace,
    Secure,
    Settle,
    Start,
    View,
    Wait,
    Warn,
)
from tests.simulation.cluster.scripts import SINGLE, STEPS, TWO, Script, actions, cued, is_whole, remedies
from tests.simulation.cluster.world import World
from tests.unit.supervisor.job_views import S, launcher, member, rank, report, view


def test_a_run_without_faults_forms_once_and_finishes() -> None:
    world = World(TWO, STEPS).run()
    assert is_whole(world)
    assert [type(action) for _, action, _ in world.journal] == [Start, Settle, End, Done]
    assert world.starts[0].resume.source == "none"


# -- one fault


@pytest.mark.parametrize(("script", "expected"), SINGLE.values(), ids=SINGLE.keys())
def test_a_single_fault_has_its_name_and_remedy_and_costs_one_step_at_most(
    script: Script, expected: list[tuple[str, str, int]]
) -> None:
    world = script().run()
    assert is_whole(world)
    assert remedies(world) == expected
    assert list(world.closed.values()) == ["settled"] * len(expected)
    for _, action, after in world.journal:
        if isinstance(action, Start) and after.incident is not None:
            lost = world.group.reached.get(after.incident.generation, 0) - action.resume.step
            assert after.incident.lost == max(0, lost)
            # except for a bad number, which is known only after others have continued with it
            assert lost <= 1 or action.remedy == "rollback"


@pytest.mark.parametrize("name", ["a rank is killed", "a rank raises", "a bad number", "a member is lost"])
def test_late_or_repeated_messages_change_nothing(name: str) -> None:
    script, expected = SINGLE[name]
    twice = script()
    twice.network.twice = True
    assert remedies(twice.run()) == expected
    late = script().at(600, lambda w: w.network.delay("m0", 40, 10_000))
    assert remedies(late.run()) == expected


def test_a_lost_member_is_replaced_so_that_a_second_loss_finds_a_standby() -> None:
    world = World(TWO, STEPS, cues={(1, 2): ("lose", 1), (0, 6): ("lose", 1)}).run()
    assert is_whole(world)
    assert [remedy for _, remedy, _ in remedies(world)] == ["swap", "swap"]
    assert [action.member for action in actions(world, Replace)] == ["m1", "m0"]
    assert world.starts[-1].placement == ("m3", "m2")


def test_no_members_are_created_while_the_group_recovers() -> None:
    world = cued(1, 2, "lose").run()
    order = [type(action) for _, action, _ in world.journal]
    assert order == [Start, Settle, Secure, Start, Settle, Replace, End, Done]


def test_a_hang_is_inspected_before_anything_is_stopped() -> None:
    world = cued(1, 5, "hang").run()
    assert [type(action) for _, action, _ in world.journal][2:4] == [Secure, Start]
    [named] = actions(world, Secure)[0].faults
    assert (named.kind, named.rank, named.member) == ("hang", 1, "m1")
    [incident] = {m.incident for _, a, m in world.journal if isinstance(a, Start) and m.incident}
    assert [line.partition(":")[0] for line in incident.evidence] == ["rank 0", "rank 1"]


def test_a_rank_that_continues_is_not_an_incident_and_a_later_hang_is_still_detected() -> None:
    late = cued(1, 3, "late")
    late.cues[0, 6] = ("hang", 1)
    world = late.run()
    kinds = [type(action) for _, action, _ in world.journal]
    assert kinds == [Start, Settle, Secure, Start, Settle, End, Done]
    assert remedies(world) == [("hang", "restart", 6)]
    assert world.memory.incidents == 1
    [incident] = {m.incident for _, a, m in world.journal if isinstance(a, Start) and m.incident}
    assert re.findall(r"step (\d+)", " ".join(incident.evidence)) == ["6", "6"]


def test_a_working_rank_is_not_stopped_and_the_duration_of_its_work_is_learned() -> None:
    world = cued(1, 5, "slow").run()
    assert is_whole(world)
    assert [type(a) for _, a, _ in world.journal] == [Start, Settle, Learn, End, Done]
    [learned] = world.memory.learned
    assert (learned.work, round(learned.seconds)) == ("computing", 31)


def test_a_rank_that_waits_for_a_file_is_reported_and_then_restarted_at_its_limit() -> None:
    world = cued(1, 5, "block", policy=replace(TWO, stall_limit_s=10.0)).run()
    assert is_whole(world)
    assert [type(a) for _, a, _ in world.journal][2:5] == [Warn, Secure, Start]
    [warned], [secured] = actions(world, Warn), actions(world, Secure)
    assert "rank 1 has been in evaluate (train.py:42) (waiting for a file system)" in warned.why
    assert "no step for 5 s while rank 0 waits; Holdfast restarts it at 10 s" in warned.why
    assert "the limit is 10 s" in secured.why


def test_a_changed_file_is_reported_once_up_to_the_number_that_is_remembered() -> None:
    def telling(number: int, *changed: str) -> MemberView:
        return member(f"m{number}", report(f"m{number}", launcher(rank(number), changed=changed)))

    seen = view(telling(0, "a has changed"), telling(1, "a has changed", "b has changed"), settled=True)
    told: list[str] = []
    while isinstance(action := decide(seen, TWO), Warn):
        told.append(action.why)
        seen = replace(seen, memory=transition.after(seen, action, TWO))
    assert told == ["a has changed", "b has changed"]
    for first in range(0, 80, 8):
        each = [f"{first + n} has changed" for n in range(8)]
        seen = replace(seen, members=(telling(0, *each), telling(1, "a has changed")))
        while isinstance(action := decide(seen, TWO), Warn):
            seen = replace(seen, memory=transition.after(seen, action, TWO))
    assert [each.text for each in seen.memory.warned][:2] == told, "a forgotten warning would be given again"


def test_after_a_restart_the_same_place_gets_twice_the_time_and_is_not_a_bug() -> None:
    world = cued(1, 5, "block", times=6, policy=replace(TWO, stall_limit_s=1.0)).run()
    assert is_whole(world)
    waited = [view.now_ns - view.watch.since_ns for view, a, _ in world.journal if isinstance(a, Secure)]
    assert [round(each / 1e9) for each in waited] == [1, 2, 4, 8, 16, 32]
    assert len(actions(world, Warn)) == 1, "each place must be warned about once"


def test_a_new_supervisor_counts_a_stall_from_its_beginning() -> None:
    policy = replace(TWO, stall_limit_s=10.0)
    world = cued(1, 5, "block", policy=policy).at(6_000, lambda w: w.kill_supervisor()).run()
    assert is_whole(world)
    [secured] = [view for view, a, _ in world.journal if isinstance(a, Secure)]
    assert secured.now_ns < world.journal[1][0].now_ns + 12 * S


def test_a_cause_that_is_reported_after_its_victims_is_named() -> None:
    """The member with the failing rank has the slower connection, so its peer's end is reported first."""
    world = cued(1, 5, "kill").at(600, lambda w: w.network.delay("m1", 100, 10_000)).run()
    assert remedies(world) == [("crash", "restart", 5)]
    [incident] = {m.incident for _, a, m in world.journal if isinstance(a, Start) and m.incident}
    assert [fault.kind for fault in incident.faults] == ["victim", "crash"]


def test_a_bad_number_limits_the_state_whatever_stopped_the_group() -> None:
    world = cued(1, 6, "nan", snapshot_every=1)
    world.cues[0, 7] = ("lose", 1)  # it continues with the bad state, and then its member is lost
    world.run()
    assert is_whole(world)
    assert remedies(world)[0][2] <= 6


# -- members that are not there


def test_without_enough_members_the_run_ends_at_its_time_limit() -> None:
    world = World(replace(TWO, form_s=3.0), STEPS, boot_ms=60_000).run()
    assert world.ended is not None
    assert (world.ended.exit_code, world.starts) == (1, [])
    assert world.ended.why == "only 0 of 2 members became ready"


def test_a_member_that_takes_long_to_start_does_not_count_as_lost() -> None:
    world = World(TWO, STEPS, sidecar_ms=30_000, boot_ms=31_000).run()
    assert is_whole(world)
    assert actions(world, Replace) == []


def test_a_briefly_disconnected_member_is_waited_for_if_no_other_can_take_its_ranks() -> None:
    """Its rank is killed while its sidecar is restarting."""
    policy = Policy(checkpoint_every_s=0)
    world = World(policy, STEPS, snapshot_every=1, cues={(0, 5): ("sidecar", 1), (0, 6): ("kill", 1)})
    world.sidecar_ms = 3000
    world.run()
    assert is_whole(world)
    assert remedies(world) == [("crash", "restart", 6)]
    assert actions(world, Replace) == []


def test_the_decision_waits_seconds_for_a_missing_members_state_rather_than_lose_steps() -> None:
    """The only member with state is disconnected, and there is a standby without state."""
    policy = Policy(standby=1, checkpoint_every_s=0)
    world = World(policy, STEPS, snapshot_every=1, cues={(0, 6): ("kill", 1)})
    world.at(500 + 400, lambda w: w.network.cut_off(w.memory.placement[0], 2500))
    world.run()
    assert is_whole(world)
    assert all(step >= 5 for _, _, step in remedies(world))


@pytest.mark.parametrize(("is_copied", "resumed"), [(False, 0), (True, 4)])
def test_a_group_of_one_member_resumes_from_the_copy_on_its_standby(is_copied: bool, resumed: int) -> None:
    def copy(world: World) -> None:
        """Do what the sidecar of a standby on another node does."""
        [active] = world.memory.placement
        [standby] = [each for name, each in world.members.items() if name != active]
        standby.slots[:] = world.members[active].slots
        standby.privates.update(world.members[active].privates)

    policy = Policy(standby=1, checkpoint_every_s=0)
    world = cued(0, 6, "lose", policy=policy, snapshot_every=1)
    if is_copied:
        world.at(700, copy)
    world.run()
    assert is_whole(world)
    assert remedies(world) == [("member_lost", "swap", resumed)]


def test_a_silent_member_is_replaced_and_ended() -> None:
    world = World(TWO, STEPS, step_ms=2000, hang_ms=60_000)
    world.at(3000, lambda w: w.network.cut_off("m1", 60_000)).run()
    assert is_whole(world)
    assert [kind for kind, _, _ in remedies(world)] == ["member_lost"]
    assert world.members["m1"].gone


# -- states that cannot be had


def away(world: World) -> None:
    world.store.away = True


ALONE = Policy(checkpoint_every_s=0.08)


def test_a_damaged_checkpoint_is_skipped_for_the_previous_one() -> None:
    world = cued(0, 7, "lose", policy=ALONE, snapshot_every=1)
    world.store.damaged.add("step-5-1")
    world.run()
    assert is_whole(world)
    assert [start.resume.path for start in world.starts] == ["", "step-5-1", "step-3-1"]


def test_storage_that_comes_back_is_tried_again() -> None:
    world = cued(0, 7, "lose", policy=ALONE, snapshot_every=1).at(780, away)
    world.at(3500, lambda w: setattr(w.store, "away", False)).run()
    assert is_whole(world)
    assert {start.resume.step for start in world.starts[1:]} == {5}


def test_a_state_that_can_never_be_restored_ends_the_run_instead_of_starting_over() -> None:
    world = cued(0, 7, "lose", policy=ALONE, snapshot_every=1).at(780, away).run()
    assert world.ended is not None
    assert world.ended.exit_code == 1
    assert world.ended.why == "storage could not be read for 60 s: it is away"
    assert world.closed[world.memory.incidents] == "ended"


def test_a_checkpoint_of_another_world_size_ends_the_run_with_both_sizes() -> None:
    world = World(TWO, STEPS)
    world.store.found = [Checkpoint(4, 0, 8, "step-4-0")]
    world.run()
    assert world.ended is not None
    assert (world.ended.exit_code, world.starts) == (2, [])
    there, here = "checkpoint step-4-0 has world size 8", "but this run has 2"
    assert world.ended.why == f"{there}, {here}: resume with 8 ranks, or use another run directory"


# -- the supervisor dies


def test_a_repeatedly_dying_supervisor_still_completes_the_recovery() -> None:
    script, expected = SINGLE["a member is lost"]
    world = script(kills=frozenset(range(3, 300, 9))).run()
    assert is_whole(world)
    assert remedies(world) == expected


def test_a_supervisor_that_could_not_record_a_start_has_a_successor_that_recovers_it() -> None:
    """The disk is full during a recovery, and the supervisor dies afterwards."""
    world = cued(1, 3, "kill")
    world.cues[0, 6] = ("supervisor", 1)
    world.at(600, lambda w: setattr(w, "disk_full", True))
    world.run()
    assert is_whole(world)
    assert [kind for kind, _, _ in remedies(world)] == ["crash", "lost_track"]
    assert world.memory.generation == 3


def test_a_run_that_ended_while_its_supervisor_died_stays_ended() -> None:
    whole = World(TWO, STEPS).run()
    assert whole.ended == World(TWO, STEPS, kills=frozenset({whole.points})).run().ended


# -- small print


def test_deciding_again_in_the_same_view_gives_the_same_action() -> None:
    for seen, action, _ in SINGLE["a rank is stopped"][0]().run().journal:
        assert decide(seen, TWO) == action


def test_an_ended_job_only_waits() -> None:
    view = View(5, 0.0, JobState(1, 1, phase="ended"))
    assert isinstance(decide(view, Policy()), Wait)


def test_members_that_do_not_stop_in_time_are_left_to_their_keeper() -> None:
    memory = JobState(1, 1, phase="stopping", since_ns=0)
    member = World(Policy(), STEPS).run().journal[-2][0].members[0]
    late = View(41_000_000_000, 0.0, memory, (replace(member, exists=True),))
    assert decide(late, Policy()) == Done("1 members did not stop before the deadline")
