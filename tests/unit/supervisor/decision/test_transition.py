from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, get_args

import pytest

from holdfast.protocol.launcher_messages import RankInspection as Looked
from holdfast.protocol.launcher_messages import Restore
from holdfast.protocol.lineage import Lineage
from supervisor.decision import transition
from supervisor.decision.transition import LOST, TRANSITIONS, IllegalTransition, with_stop_request
from supervisor.view.model import (
    PHASES,
    Dismiss,
    Done,
    End,
    JobPhase,
    JobState,
    Learn,
    LearnedStall,
    Look,
    OpenIncident,
    PastWarning,
    Policy,
    Preserve,
    Replace,
    ResumePoint,
    RunAction,
    Save,
    Secure,
    Settle,
    Start,
    View,
    Wait,
    Warn,
)
from tests.unit.supervisor.job_views import S, fault, holding, launcher, member, progress, report, view

POLICY = Policy(members=2, snapshot_every=7)
HELD = (
    holding("m0", ((1, 5),), ((0, 1, 5),), progress=(progress(0, 6),)),
    holding("m1", ((1, 5),), ((1, 1, 5),), progress=(progress(1, 5),)),
)
FROM_FIVE = ResumePoint(5, 1, "slot", holders=("m0", "m1"))


def start(resume: ResumePoint = FROM_FIVE, placement: tuple[str, ...] = ("m0", "m1")) -> Start:
    return Start(placement, resume, (3,), "h", 4000, fault("crash"), "restart", ("line",), "why")


def test_waiting_changes_nothing() -> None:
    seen = view()
    assert transition.after(seen, Wait(5), POLICY) is seen.memory


def test_a_first_fault_opens_an_incident_at_its_first_symptom() -> None:
    early, late = fault("victim", 0, at_ns=90 * S), fault("crash", at_ns=91 * S)
    after = transition.after(view(*HELD), Secure((late, early), True, ""), POLICY)
    assert after.phase == "securing"
    assert after.incident == OpenIncident(1, 1, 90 * S, 100 * S, 0.0, (late, early), reached=6)
    assert after.incidents == 1


def test_evidence_is_kept_when_a_hang_is_acted_on() -> None:
    looked = member("m0", report("m0", launcher(), looked_for=1, looks=(Looked(0, 5, 3, 0, "T", 0.5, "x"),)))
    named = fault("hang", 1, detail="rank 1 hangs")
    after = transition.after(view(looked, incidents=1), Secure((named,), True, ""), POLICY)
    assert after.incident is not None
    assert after.incident.faults == (named,)
    assert after.incident.evidence == ("rank 0: step 5, state T, 0.50 s of CPU",)
    assert (after.incident.looked_ns, after.incidents) == (100 * S, 2)
    assert after.incident.stacks[0][0] == (0,)


def test_the_longest_duration_of_each_kind_of_stall_is_kept() -> None:
    seen = view(*HELD, learned=(LearnedStall("sleep", 20.0), LearnedStall("a file system", 7.0)))
    after = transition.after(
        seen, Learn((LearnedStall("sleep", 12.0), LearnedStall("a file system", 9.0)), ""), POLICY
    )
    assert after == replace(
        seen.memory, learned=(LearnedStall("sleep", 20.0), LearnedStall("a file system", 9.0))
    )


def test_a_reported_place_is_remembered() -> None:
    seen = view(*HELD)
    after = transition.after(seen, Warn("evaluate (train.py:42)", "text"), POLICY)
    assert after == replace(seen.memory, warned=(PastWarning("evaluate (train.py:42)", "text"),))


def test_an_inspection_line_of_an_older_version_changes_nothing() -> None:
    seen = view(*HELD)
    assert transition.after(seen, Look((fault("hang"),), ""), POLICY) == seen.memory
    assert transition.after(seen, Dismiss("it went on"), POLICY) == seen.memory


def test_a_fault_before_the_first_new_step_is_a_separate_incident() -> None:
    old = OpenIncident(3, 1, 0, 0, 0.0, (fault("crash"),))
    after = transition.after(
        view(*HELD, generation=2, incident=old, incidents=3), Secure((fault("hang"),), True, ""), POLICY
    )
    assert after.incident is not None
    assert (after.incident.number, after.incident.generation, after.incidents) == (4, 2, 4)


def test_a_checkpoint_goes_to_members_by_its_name() -> None:
    """Each member has its own folder for checkpoints, so a path of the supervisor is useless there."""
    stored = ResumePoint(5, 1, "checkpoint", "/the/supervisors/own/step-00000005")
    after = transition.after(view(*HELD, phase="securing"), start(stored), POLICY)
    assert after.launch is not None
    assert after.launch.restore == Restore(5, 1, "checkpoint", "step-00000005")


def test_a_start_creates_the_next_generation_and_records_the_cause() -> None:
    opened = OpenIncident(1, 1, 90 * S, 95 * S, 0.0, (fault("crash"),), reached=6)
    seen = view(*HELD, phase="securing", incident=opened, lineage=(Lineage(1, 0),), history=())
    after = transition.after(seen, start(), POLICY)
    assert (after.phase, after.generation, after.settled, after.skip) == ("running", 2, False, (3,))
    assert after.launch is not None
    assert (after.launch.generation, after.launch.snapshot_every, after.launch.skip) == (2, 7, (3,))
    assert after.launch.restore is not None
    assert (after.launch.restore.step, after.launch.restore.generation) == (5, 1)
    assert after.lineage == (Lineage(1, 0), Lineage(2, 5))
    assert [(p.kind, p.step, p.generation, p.worked) for p in after.history] == [("crash", 5, 1, True)]
    assert after.incident is not None
    assert (after.incident.lost, after.incident.reached, after.incident.remedy) == (1, 6, "restart")
    assert not after.incident.at_least, "the members have reported the step"
    assert after.incident.evidence == ("line",)
    assert [(p.url, p.rank) for p in after.peers] == [("http://m0:1", 0), ("http://m1:1", 1)]
    assert (after.save, after.save_step, after.save_member) == (1, 5, "m0")


def test_steps_whose_number_is_unknown_are_not_reported_as_none() -> None:
    """The supervisor that knew them died together with the members."""
    opened = OpenIncident(1, 1, 90 * S, 95 * S, 0.0, (fault("member_lost", step=-1),))

    def lost(*, settled: bool, reached: int = -1, at_least: bool = False) -> int | None:
        gone = (member("m0", exists=False), member("m1", exists=False))
        seen = view(*gone, phase="securing", incident=opened, settled=settled, reached=reached)
        after = transition.after(seen, start(ResumePoint(128, 1, "checkpoint", "p")), POLICY)
        assert after.incident is not None
        assert after.reached == -1, "the step was one of the previous generation"
        assert after.incident.at_least == at_least
        return after.incident.lost

    assert lost(settled=True) is None
    assert lost(settled=True, reached=275, at_least=True) == 147, "by its last status, half a second old"
    assert lost(settled=False) == 0, "it had done no step"


def test_a_start_from_the_beginning_restores_nothing() -> None:
    after = transition.after(view(*HELD, phase="forming"), start(ResumePoint(0, 0, "none")), POLICY)
    assert after.launch is not None
    assert after.launch.restore is None
    assert after.save == 0


def test_members_that_could_not_be_stopped_are_given_up_when_others_take_their_ranks() -> None:
    cut = member("m1", report("m1", launcher()), connected=False)
    after = transition.after(view(HELD[0], cut, phase="securing"), start(placement=("m0", "m2")), POLICY)
    assert after.lost == ("m1",)
    gone = member("m1", exists=False)
    seen = view(HELD[0], gone, phase="securing")
    assert transition.after(seen, start(placement=("m0", "m2")), POLICY).lost == ()


def test_the_number_of_remembered_lost_members_is_bounded() -> None:
    names = tuple(f"x{n}" for n in range(LOST))
    assert transition.after(view(lost=names), Replace("m1", ""), POLICY).lost == (*names[1:], "m1")


def test_the_first_step_closes_the_incident() -> None:
    after = transition.after(view(incident=OpenIncident(1, 1, 0, 0, 0.0)), Settle(5, ""), POLICY)
    assert (after.settled, after.incident) == (True, None)


def test_a_save_is_requested_by_number() -> None:
    after = transition.after(view(save=4), Save("m1", FROM_FIVE, ""), POLICY)
    assert (after.phase, after.save, after.save_step, after.save_member) == ("saving", 5, 5, "m1")


def test_an_end_closes_the_open_incident_with_the_reason_to_stop() -> None:
    opened = OpenIncident(1, 1, 0, 0, 0.0, (fault("exit"),))
    after = transition.after(
        view(incident=opened, phase="securing"), End(3, "left", cause=fault("exit")), POLICY
    )
    assert (after.phase, after.exit_code, after.why) == ("stopping", 3, "left")
    assert after.incident is not None
    assert (after.incident.remedy, after.incident.closed_ns) == ("stop", 100 * S)


def test_a_good_end_keeps_the_remedy_of_a_recovery_without_a_step_left_to_do() -> None:
    opened = OpenIncident(1, 0, 0, 0, 0.0, (fault("crash"),), remedy="restart", resume=FROM_FIVE)
    after = transition.after(view(incident=opened), End(0, "finished"), POLICY)
    assert after.incident is not None
    assert (after.incident.remedy, after.incident.closed_ns) == ("restart", 100 * S)


def test_an_immediate_stop_cannot_be_withdrawn() -> None:
    memory = with_stop_request(JobState(1, 1), "graceful")
    assert memory.stop == "graceful"
    now = with_stop_request(memory, "now")
    assert with_stop_request(now, "graceful").stop == "now"
    assert with_stop_request(memory, "interrupt").stop == "graceful", "the first request must stay"


def test_what_is_decided_depends_on_nothing_but_the_view() -> None:
    seen = view(*HELD, phase="securing")
    assert transition.after(seen, start(), POLICY) == transition.after(
        View(seen.now_ns, seen.wall_s, replace(seen.memory), seen.members), start(), POLICY
    )


def test_a_generation_is_newer_than_any_seen_before() -> None:
    after = transition.after(view(*HELD, phase="securing", seen=7), start(), POLICY)
    assert (after.generation, after.lineage) == (8, (Lineage(8, 5),))


def test_a_roll_back_limits_what_is_known_to_be_equal_and_saved() -> None:
    seen = view(*HELD, phase="securing", equal=(3, 9), saved=4, held=9)
    after = transition.after(seen, start(), POLICY)
    assert (after.equal, after.saved, after.held) == ((3, 5), 4, 9)
    anew = replace(start(), resume=ResumePoint(0, 0, "none"))
    after = transition.after(seen, anew, POLICY)
    assert (after.equal, after.saved, after.held) == ((), -1, -1)


# -- the state machine


ACTIONS: dict[type[Any], Any] = {
    Wait: Wait(5),
    Look: Look((), ""),
    Dismiss: Dismiss(""),
    Warn: Warn("a place", ""),
    Learn: Learn((), ""),
    Secure: Secure((), True, ""),
    Start: start(),
    Settle: Settle(5, ""),
    Save: Save("m1", FROM_FIVE, ""),
    Preserve: Preserve("m1", FROM_FIVE, ""),
    Replace: Replace("m1", ""),
    End: End(1, ""),
    Done: Done(""),
}


def test_every_action_is_in_the_table() -> None:
    assert set(ACTIONS) == set(get_args(RunAction))
    assert {kind for row in TRANSITIONS.values() for kind in row} == set(ACTIONS) - {Wait}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", ACTIONS)
def test_an_action_leads_to_the_phase_of_the_table_and_every_other_is_refused(
    phase: JobPhase, kind: type[Any]
) -> None:
    seen = view(*HELD, phase=phase)
    if kind is Wait:
        assert transition.after(seen, ACTIONS[kind], POLICY) is seen.memory
    elif kind in TRANSITIONS[phase]:
        assert transition.after(seen, ACTIONS[kind], POLICY).phase == TRANSITIONS[phase][kind]
    else:
        with pytest.raises(IllegalTransition, match=f"{kind.__name__} in phase '{phase}'"):
            transition.after(seen, ACTIONS[kind], POLICY)


def test_each_action_of_the_table_has_an_effect() -> None:
    allowed = {kind for following in TRANSITIONS.values() for kind in following}
    assert allowed == transition._EFFECTS.keys()


def reached_from(phase: JobPhase) -> set[JobPhase]:
    found, new = {phase}, [phase]
    while new:
        following = set(TRANSITIONS[new.pop()].values()) - found
        found |= following
        new += following
    return found


def test_every_phase_except_those_of_older_versions_is_reached_and_leads_to_the_end() -> None:
    assert reached_from("forming") == set(PHASES) - {"looking"}
    assert all("ended" in reached_from(phase) for phase in TRANSITIONS)


def test_the_diagram_has_each_transition_once() -> None:
    _, *lines = transition.mermaid().splitlines()
    drawn = {
        (phase, name, to)
        for phase, to, names in re.findall(r"^ +(\w+) --> (\w+): (.+)$", transition.mermaid(), re.MULTILINE)
        for name in names.split(", ")
    }
    assert drawn == {
        (phase, kind.__name__, to)
        for phase, row in TRANSITIONS.items()
        for kind, to in row.items()
        if phase != "looking" and kind not in (Look, Dismiss)
    }
    assert (lines[0], lines[-1]) == ("    [*] --> forming", "    ended --> [*]")
