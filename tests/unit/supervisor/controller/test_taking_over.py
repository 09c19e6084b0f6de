"""A supervisor takes over from one that was stuck, or that could not write its journal."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from supervisor.controller.member_server import MemberServer
from supervisor.controller.records import RunDirectoryRecords
from supervisor.controller.supervised_run import SupervisedRun
from supervisor.decision import transition
from supervisor.decision.decide import decide
from supervisor.decision.transition import taken_over
from supervisor.observability.publisher import StatusPublisher
from supervisor.store.journal import Journal
from supervisor.store.run_directory import RunDir
from supervisor.view import faults as symptoms
from supervisor.view.model import (
    PHASES,
    UNREAD,
    Checkpoint,
    End,
    OpenIncident,
    Policy,
    Replace,
    Save,
    Secure,
    Settle,
    Start,
    StorageContents,
    View,
    Wait,
)
from tests.simulation.cluster.scripts import SINGLE, TWO, actions, cued, is_whole, remedies
from tests.simulation.cluster.world import World
from tests.unit.supervisor.controller.test_supervised_run import Backend
from tests.unit.supervisor.decision.deciding.test_decide_stops import ask
from tests.unit.supervisor.job_views import (
    S,
    fault,
    holding,
    launcher,
    member,
    memory,
    progress,
    rank,
    report,
    view,
)

STUCK_MS = 6000  # longer than a member may be silent
CRASH = OpenIncident(1, 1, 90 * S, 90 * S, 0.0, (fault("crash"),))
UNHEARD = (member("m0"), member("m1"))


# -- stuck in the midst of a recovery


@pytest.mark.parametrize(
    "name", ["a rank is killed", "a rank raises", "one of several ranks of a member is killed"]
)
def test_no_member_is_given_up_for_the_time_in_which_its_supervisor_was_stuck(name: str) -> None:
    script, expected = SINGLE[name]
    for point in script().run().decided:
        world = script(kills=frozenset({point}), supervisor_ms=STUCK_MS).run()
        assert is_whole(world), point
        assert actions(world, Replace) == [], point
        assert [step for _, _, step in remedies(world)] == [step for _, _, step in expected], point


def test_members_that_take_seconds_to_reconnect_are_waited_for() -> None:
    """There are enough standbys to continue without them, but only from an older state."""
    policy = replace(TWO, standby=2)
    plain = cued(1, 5, "kill", policy=policy).run()
    decided = zip(plain.decided, plain.journal, strict=True)
    [secured] = [point for point, (_, action, _) in decided if isinstance(action, Secure)]
    world = cued(1, 5, "kill", policy=policy, kills=frozenset({secured}), supervisor_ms=STUCK_MS)

    def deafen(world: World) -> None:
        for each in ("m0", "m1"):
            world.network.cut_off(each, STUCK_MS + 2500)

    world.at(760, deafen).run()
    assert is_whole(world)
    assert actions(world, Replace) == []
    assert remedies(world) == [("crash", "restart", 5)]


def test_a_stop_requested_while_the_supervisor_was_stuck_still_saves_the_last_step() -> None:
    plain = World(TWO, 400, snapshot_every=0).at(700, ask("graceful")).run()
    decided = zip(plain.decided, plain.journal, strict=True)
    points = [point for point, (_, action, _) in decided if isinstance(action, Settle | Secure | Save | End)]
    assert len(points) == 4
    for point in points:
        world = World(TWO, 400, snapshot_every=0, kills=frozenset({point}), supervisor_ms=STUCK_MS)
        world.at(700, ask("graceful")).run()
        step = world.group.reached[1]
        assert world.ended is not None
        assert world.ended.why == f"stopped as requested, with a checkpoint of step {step}"


def test_every_wait_starts_over_when_a_supervisor_takes_over() -> None:
    for phase in PHASES:
        after = taken_over(memory(phase=phase, since_ns=3, started_ns=2), 100 * S)
        assert after.since_ns == 100 * S
        assert after.started_ns == 2
        assert after.phase == ("running" if phase == "looking" else phase)


def test_a_job_that_takes_over_starts_its_waits_at_the_current_time(tmp_path: Path) -> None:
    before = view(phase="securing", incident=CRASH, since_ns=1)
    kept = Journal(tmp_path / "journal.jsonl")
    kept.write(before, Policy(), Wait(1), before.memory, None)
    kept.close()
    began_ns = time.monotonic_ns()
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
    assert run.memory.since_ns >= began_ns
    assert run.memory.incident == CRASH


def test_a_member_that_has_not_yet_reported_is_waited_for_until_it_counts_as_lost() -> None:
    told = member("m0", report("m0", launcher(rank(0)), secured_for=1))
    known: dict[str, Any] = {"phase": "securing", "incident": CRASH, "since_ns": 97 * S}
    for silent_s, waits in ((3.0, True), (5.0, False)):
        seen = view(told, member("m1", silent_s=silent_s), **known)
        action = decide(seen, Policy(members=2))
        assert isinstance(action, Wait) == waits, action
        if isinstance(action, Wait):
            assert action.until_ns == 102 * S


@pytest.mark.parametrize(
    ("since_s", "connected", "silent_s", "well_s", "given_up"),
    [
        (90.0, True, 2.0, 0.0, False),
        (90.0, False, 0.1, 0.0, False),
        (90.0, False, 5.0, 0.0, True),
        (30.0, True, 2.0, 98.0, False),
        (30.0, False, 0.1, 99.0, False),  # its sidecar starts again, late in a long recovery
        (30.0, False, 0.1, 30.0, True),  # it has appeared and disappeared for a minute, without any use
        (30.0, False, 5.0, 95.0, True),
    ],
)
def test_a_member_is_given_up_for_its_own_silence_and_not_for_the_length_of_a_recovery(
    since_s: float, connected: bool, silent_s: float, well_s: float, given_up: bool
) -> None:
    """Work after a commit, large copies and storage can make a recovery longer than a member's timeout."""
    here = member("m0", report("m0", launcher(rank(0)), secured_for=1))
    away = member("m1", report("m1", launcher(rank(1)), secured_for=1))
    away = replace(away, connected=connected, silent_s=silent_s, well_ns=int(well_s * S))
    seen = view(here, away, phase="securing", incident=CRASH, since_ns=int(since_s * S))
    assert isinstance(decide(seen, Policy(members=2)), Replace if given_up else Wait)


@pytest.mark.parametrize(("name", "waits"), [("m1", True), ("m2", False)])
def test_only_a_member_with_ranks_gets_time_to_secure_once_it_reports(name: str, waits: bool) -> None:
    """A new standby has nothing to secure."""
    here = member("m0", report("m0", launcher(rank(0)), secured_for=1))
    there = member("m1", report("m1", launcher(rank(1)), secured_for=1))
    late = member(name, report(name, None), heard_ns=99 * S)
    others = [each for each in (here, there) if each.name != name]
    seen = view(*others, late, phase="securing", incident=CRASH, since_ns=97 * S)
    action = decide(seen, Policy(members=2))
    assert (isinstance(action, Wait) and action.why.startswith("securing on")) == waits, action


def test_a_start_may_take_the_time_that_this_supervisor_allows() -> None:
    behind = member("m1", report("m1", launcher(generation=1)))
    seen = view(
        member("m0", report("m0", launcher(rank(0, generation=2), generation=2))), behind, generation=2
    )
    policy = Policy(members=2, form_s=50.0)
    assert [each.kind for each in symptoms.find_faults(seen, policy)] == ["restore"]
    assert symptoms.find_faults(replace(seen, memory=taken_over(seen.memory, 60 * S)), policy) == ()


def test_the_last_checkpoint_waits_for_others_that_may_hold_the_state() -> None:
    gone = member("m0", exists=False)
    saving: dict[str, Any] = {
        "phase": "saving",
        "since_ns": 99 * S,
        "stop": "graceful",
        "save": 1,
        "save_step": 7,
    }
    saving |= {"save_generation": 1, "save_member": "m0"}
    assert isinstance(decide(view(gone, member("m1", silent_s=1.0), **saving), Policy(members=2)), Wait)
    holds = holding("m1", ((1, 7),), ((0, 1, 7), (1, 1, 7)))
    again = decide(view(gone, holds, **saving), Policy(members=2))
    assert isinstance(again, Save)
    assert again.member == "m1"
    assert isinstance(decide(view(gone, member("m1", silent_s=6.0), **saving), Policy(members=2)), End)


# -- storage that a new supervisor has not read


def without_state(stored: StorageContents) -> View:
    """Return a group that has only storage left, and has been recovering for a long time."""
    told = [member(f"m{n}", report(f"m{n}", launcher(rank(n)), secured_for=1)) for n in range(2)]
    seen = view(*told, phase="securing", incident=CRASH, since_ns=10 * S, saved=9)
    return replace(seen, stored=stored)


def test_unread_storage_does_not_end_the_run() -> None:
    seen = without_state(StorageContents(error=UNREAD, failed_ns=99 * S))
    assert isinstance(decide(seen, Policy(members=2)), Wait)
    found = StorageContents((Checkpoint(9, 1, 2, "step-9", verified=True),), looked_ns=1)
    assert isinstance(decide(without_state(found), Policy(members=2)), Start)


def test_storage_has_its_full_time_from_its_failure() -> None:
    seen = without_state(StorageContents(error="EIO", failed_ns=60 * S))
    assert decide(seen, Policy(members=2)) == Wait(120 * S, "storage cannot be read: EIO")
    ended = decide(replace(seen, now_ns=120 * S), Policy(members=2))
    assert isinstance(ended, End)
    assert ended.why == "storage could not be read for 60 s: EIO"


# -- a journal that lacks the newest generation


def ahead(**given: Any) -> View:
    """The members run generation 2, and the journal ends with a fault in generation 1."""
    slots = [holding(f"m{n}", ((2, 7),), ((n, 2, 7),)) for n in range(2)]
    told = []
    for number, each in enumerate(slots):
        assert each.report is not None
        state = launcher(rank(number, generation=2), generation=2)
        made = replace(each.report, launcher=state, secured_for=2, progress=(progress(number, 7),))
        told.append(replace(each, report=made))
    return view(*told, phase="securing", incident=CRASH, incidents=1, **given)


def test_a_generation_that_the_journal_lacks_has_its_own_incident() -> None:
    seen = ahead()
    secure = decide(seen, Policy(members=2))
    assert isinstance(secure, Secure)
    after = transition.after(seen, secure, Policy(members=2))
    assert after.generation == 2
    assert after.incident is not None
    assert (after.incident.number, after.incident.generation, after.incidents) == (2, 2, 2)
    assert [each.kind for each in after.incident.faults] == ["lost_track"]
    start = decide(replace(seen, memory=after), Policy(members=2))
    assert isinstance(start, Start)
    assert start.resume.step == 7


def test_a_group_is_not_ended_without_a_request_to_stop() -> None:
    """In a journal of an older version, the incident is of generation 1 and the group of generation 2."""
    seen, policy = ahead(generation=2), Policy(members=2)
    secure = decide(seen, policy)
    assert isinstance(secure, Secure)
    assert secure.why == "the journal does not contain the reason why generation 2 was stopped"
    start = decide(replace(seen, memory=transition.after(seen, secure, policy)), policy)
    assert isinstance(start, Start)
    assert start.resume.step == 7
    assert isinstance(decide(ahead(generation=2, stop="graceful"), policy), Save)


def test_a_run_survives_a_full_disk_a_lost_member_and_a_dead_supervisor_together() -> None:
    world = cued(1, 3, "lose")
    world.cues[0, 6] = ("supervisor", 1)
    world.at(600, lambda w: setattr(w, "disk_full", True))
    world.run()
    assert is_whole(world)
    assert [kind for kind, _, _ in remedies(world)] == ["member_lost", "lost_track"]
