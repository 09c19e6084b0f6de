"""The job's state after each action in full: what the action changes, and that it changes nothing else."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from holdfast.protocol.launcher_messages import Ending, Launch, LossJump, RankInspection, Restore
from holdfast.protocol.lineage import Lineage
from holdfast.protocol.member_messages import StateSource
from supervisor.decision import transition
from supervisor.view.model import (
    Checkpoint,
    Completion,
    Done,
    End,
    Fault,
    InterruptedWork,
    JobState,
    Learn,
    LearnedStall,
    MissedWork,
    OpenIncident,
    PastFault,
    PastWarning,
    PendingStart,
    Policy,
    Preserve,
    Replace,
    ResumePoint,
    RunAction,
    Save,
    Secure,
    SetAsideState,
    Settle,
    Start,
    StorageContents,
    View,
    Warn,
)
from tests.unit.supervisor.hangs.test_evidence import PLAIN
from tests.unit.supervisor.job_views import S, fault, holding, launcher, member, progress, rank, report, view

POLICY = Policy(
    *(2, 0, 2, 7, 0.25, 60.0, 3, 9),
    loss_jump=4.5,
    loss_jump_fault=True,
    patience_s=11.0,
    grace_s=12.0,
)
PAIRS: dict[str, Any] = {"nproc": 2, "world_size": 4, "wall_s": 5.0}
HELD = tuple(
    holding(
        f"m{n}",
        ((1, 5),),
        ((2 * n, 1, 5), (2 * n + 1, 1, 5)),
        launcher=launcher(rank(2 * n), rank(2 * n + 1)),
        progress=(progress(2 * n, 6 - n), progress(2 * n + 1, 5)),
    )
    for n in (0, 1)
)
CRASH = fault("crash", 1)
SOURCES = (StateSource("http://m0:1", -1, 1, 5),)
FROM_FIVE = ResumePoint(5, 1, "slot", "", SOURCES, ("m1", "m0"), ("a note",))
CUT = (InterruptedWork(0, 5, 5, 1.0), InterruptedWork(1, 5, 4, 2.0), InterruptedWork(2, 7, 6))
OPENED = OpenIncident(2, 1, 90 * S, 95 * S, 0.0, (CRASH,), ("before",), reached=6)
STAYS: dict[str, Any] = {"incidents": 2, "settled": True, "message": "old", "lost": ("x",), "looks": 3}


def seen(phase: str = "running", **given: Any) -> View:
    wall_s, stored = given.pop("wall_s", 5.0), given.pop("stored", StorageContents())
    members = given.pop("members", HELD)
    now = view(*members, **{"phase": phase, "nproc": 2, "world_size": 4, **STAYS, **given})
    return replace(now, wall_s=wall_s, stored=stored)


def after(now: View, action: RunAction, **changes: Any) -> None:
    """Assert that `action` makes exactly these changes."""
    found = transition.after(now, action, POLICY)
    assert asdict(found) == asdict(replace(now.memory, **changes))


def test_each_small_action_changes_only_its_own_fields() -> None:
    now = seen(warned=tuple(PastWarning(f"p{n}", "") for n in range(32)))
    later = (*now.memory.warned[1:], PastWarning("here", "text"))
    after(now, Warn("here", "text"), warned=later)
    after(now, Settle(5, ""), settled=True)
    pending = seen(settled=False, incident=OPENED, unbegun=PendingStart(1, 5))
    after(pending, Settle(5, ""), settled=True, incident=None, unbegun=None)
    after(seen(), Replace("m1", ""), lost=("x", "m1"))
    after(seen("stopping"), Done(""), phase="ended", since_ns=100 * S)
    preserved = ResumePoint(5, 1, "slot", sources=(StateSource("http://m0:1", 0, 1, 5),), holders=("m0",))
    after(
        seen("securing", incident=OPENED, save=3),
        Preserve("m0", preserved, ""),
        save=4,
        save_step=5,
        save_generation=1,
        save_member="m0",
        sources=preserved.sources,
        incident=replace(OPENED, preserved=4),
    )
    learned = (LearnedStall("sleep", 5.0), LearnedStall("a lock", 3.0))
    after(
        seen(learned=learned),
        Learn((LearnedStall("a lock", 4.0), LearnedStall("unknown", 0.5), LearnedStall("sleep", 4.0)), ""),
        learned=(learned[0], LearnedStall("a lock", 4.0), LearnedStall("unknown", 0.5)),
    )


def test_a_save_changes_exactly_these_fields() -> None:
    after(
        seen("securing", save=4),
        Save("m1", replace(FROM_FIVE, step=4, generation=3), "", CUT, True),
        phase="saving",
        since_ns=100 * S,
        save=5,
        save_step=4,
        save_generation=3,
        save_member="m1",
        sources=SOURCES,
        cut=CUT,
        finished=True,
    )


def test_a_first_fault_changes_exactly_these_fields() -> None:
    early = fault("victim", 0, at_ns=80 * S)
    opened = OpenIncident(3, 1, 80 * S, 100 * S, 5.0, (CRASH, early), reached=6)
    common = {"phase": "securing", "since_ns": 100 * S, "incident": opened, "incidents": 3}
    after(seen(), Secure((CRASH, early), True, ""), **common)
    end = End(1, "no more")
    after(seen(), Secure((CRASH, early), True, "", end), **common, end=end)
    after(seen(end=end), Secure((CRASH, early), True, ""), **common)


def test_a_stop_or_another_fault_of_the_generation_changes_exactly_these_fields() -> None:
    common = {"phase": "securing", "since_ns": 100 * S}
    after(seen(), Secure((), True, ""), **common)
    another = fault("exception", 0)
    opened = replace(OPENED, faults=(CRASH, another))
    after(seen(incident=OPENED), Secure((CRASH, another), True, ""), **common, incident=opened)
    after(seen(incident=OPENED), Secure((), True, ""), **common)


def test_a_fault_of_a_script_that_keeps_its_own_state_says_so() -> None:
    own = member("m0", report("m0", launcher(rank(0), joins=False), progress=(progress(0, 4, -1),)))
    opened = OpenIncident(3, 1, 90 * S, 100 * S, 5.0, (CRASH,), reached=4, own_state=True)
    common = {"phase": "securing", "since_ns": 100 * S, "incidents": 3}
    after(seen(members=(own,)), Secure((CRASH,), True, ""), **common, incident=opened)


def test_a_hang_records_its_evidence_and_stacks() -> None:
    looks = (replace(PLAIN, rank=0), RankInspection(1, 5, 3, 0, "T", 0.5, "no stack"))
    shows = member("m0", report("m0", launcher(rank(0), rank(1)), looks=looks, looked_for=1))
    hang = fault("hang", 1)
    lines = (
        "rank 0: step 5, state S, 0.00 s of CPU in 0.20 s, in evaluate (train.py:42)",
        "rank 1: step 5, state T, 0.50 s of CPU",
    )
    stacks = (((0,), 'Thread "MainThread"\n    evaluate (train.py:42)'), ((1,), "no stack"))
    opened = OpenIncident(3, 1, 90 * S, 100 * S, 5.0, (hang,), lines, stacks, 100 * S)
    common = {"phase": "securing", "since_ns": 100 * S, "incidents": 3}
    after(seen(members=(shows,)), Secure((hang,), True, ""), **common, incident=opened)
    known = replace(
        OPENED, faults=(CRASH, hang), evidence=("before", *lines), stacks=stacks, looked_ns=100 * S
    )
    common["incidents"] = 2
    after(seen(members=(shows,), incident=OPENED), Secure((hang,), True, ""), **common, incident=known)
    after(seen(members=(shows,), incident=OPENED), Secure((CRASH,), True, ""), **common)


def test_an_unknown_generation_is_adopted_with_its_placement() -> None:
    def runs(name: str, *numbers: int) -> Any:
        ranks = (rank(n, generation=3) for n in numbers)
        return member(name, report(name, launcher(*ranks, generation=3)))

    lost = fault("lost_track", -1)
    opened = OpenIncident(3, 3, 90 * S, 100 * S, 5.0, (lost,))
    common = {"phase": "securing", "since_ns": 100 * S, "incidents": 3, "incident": opened, "reached": -1}
    now = seen(members=(runs("b", 2, 3), runs("a", 0, 1)), reached=9)
    after(now, Secure((lost,), True, ""), **common, generation=3, placement=("a", "b"))
    now = seen(members=(runs("b", 2, 3),), reached=9)
    after(now, Secure((lost,), True, ""), **common, generation=3)


def begun(**given: Any) -> Start:
    made = Start(
        *(("m0", "m1"), FROM_FIVE, (3, 4), "host", 4000, CRASH, "restart", ("line",), "why"),
        cut=CUT,
        measure="measure",
    )
    return replace(made, **given)


def restarted(now: View, action: Start, **changes: Any) -> JobState:
    """Return the state that follows from a start from step 5 in generation 2."""
    launch = Launch(
        *(2, 4, 2, "host", 4000, 7, 0.25),
        skip=(3, 4),
        loss_jump=4.5,
        loss_jump_fault=True,
        patience_s=11.0,
        restore=Restore(5, 1, "slot"),
        grace_s=12.0,
    )
    peers = tuple(StateSource(f"http://m{n // 2}:1", n) for n in range(4))
    usual: dict[str, Any] = {
        "phase": "running",
        "since_ns": 100 * S,
        "started_ns": 100 * S,
        "generation": 2,
        "launch": launch,
        "sources": SOURCES,
        "peers": peers,
        "lineage": (Lineage(2, 5),),
        "history": (PastFault("crash", 1, "m1", 5, "crash somewhere", 100 * S, 1, True),),
        "skip": (3, 4),
        "settled": False,
        "missed": (MissedWork(0, 1, 5),),
        "reached": -1,
        "unbegun": PendingStart(2, 5, cut=CUT),
        "save": 1,
        "save_step": 5,
        "save_generation": 1,
        "save_member": "m0",
    }
    return replace(now.memory, **{**usual, **changes})


def test_members_on_one_node_of_a_cluster_send_their_private_states_to_another_node() -> None:
    nodes = {"m0": "a", "m1": "a", "m2": "b"}
    members = tuple(member(name, report(name, None, node=node)) for name, node in nodes.items())
    now = seen("securing", members=members, world_size=6)
    action = begun(placement=("m0", "m1", "m2"))
    on_cluster = replace(POLICY, members_created_externally=True)
    for policy, backups in ((on_cluster, (2, 2, 0)), (POLICY, ())):
        launch = transition.after(now, action, policy).launch
        assert launch is not None
        assert launch.backups == backups


def test_a_restart_changes_exactly_these_fields() -> None:
    now = seen("securing")
    assert asdict(transition.after(now, begun(), POLICY)) == asdict(restarted(now, begun()))


def test_a_restart_during_an_incident_changes_exactly_these_fields() -> None:
    raised = fault("exception", 0, 7, message="bad")
    now = seen(
        *("securing",),
        incident=replace(OPENED, faults=(CRASH, raised)),
        missed=(MissedWork(1, 0, 5), MissedWork(1, 1, 5, early=True), MissedWork(1, 2, 4, early=True)),
        lineage=(Lineage(1, 2),),
        equal=(3, 9),
        saved=4,
        held=5,
        history=(PastFault("loss_jump", 0, "m0", 2, "", 1, 1, value="9.5"),),
    )
    decided = replace(
        now.memory.incident or OPENED,
        secured_ns=100 * S,
        decided_ns=100 * S,
        cause=CRASH,
        remedy="restart",
        why="why",
        measure="measure",
        resume=FROM_FIVE,
        evidence=("before", "line", "a note"),
        reached=6,
        lost=1,
        cut=CUT,
        skipped=begun().skip,
    )
    expected = restarted(
        *(now, begun()),
        incident=decided,
        missed=(MissedWork(1, 0, 5), MissedWork(1, 2, 4, early=True), MissedWork(2, 1, 5)),
        lineage=(Lineage(1, 2), Lineage(2, 5)),
        equal=(3, 5),
    )
    assert expected.launch is not None
    launch = replace(expected.launch, jumped=(LossJump(2, "9.5"),))
    pending = PendingStart(
        *(2, 5, (Lineage(1, 2),), now.memory.missed, (3, 9), None, CUT, (raised,)),
    )
    history = (*now.memory.history, *expected.history)
    expected = replace(expected, launch=launch, unbegun=pending, history=history)
    assert asdict(transition.after(now, begun(), POLICY)) == asdict(expected)


def test_a_restart_for_a_loss_jump_on_a_standby_uses_the_checkpoint() -> None:
    jump = fault("loss_jump", 2, 5, value="7.0")
    standby = member("m2", report("m2", launcher(), peer_url="http://other:2"))
    stored = replace(FROM_FIVE, source="checkpoint", path="/s/step-5-1", holders=())
    deaf = replace(HELD[1], connected=False)
    now = seen("securing", members=(HELD[0], deaf, standby), incident=replace(OPENED, faults=(jump,)))
    action = begun(placement=("m0", "m2"), cause=jump, resume=stored, remedy="rollback", cut=())
    found = transition.after(now, action, POLICY)
    assert found.launch is not None
    assert found.launch.restore == Restore(5, 1, "checkpoint", "step-5-1")
    assert found.launch.jumped == (LossJump(5, "7.0"),)
    assert found.history[-1] == PastFault(
        "loss_jump", 2, "m2", 5, "loss_jump somewhere", 100 * S, 1, True, "7.0"
    )
    assert [each.url for each in found.peers] == ["http://m0:1"] * 2 + ["http://other:2"] * 2
    assert (found.lost, found.save, found.placement) == (("x", "m1"), 0, ("m0", "m2"))
    assert found.unbegun == PendingStart(2, 5, bound=5)
    assert found.missed == ()


@pytest.mark.parametrize(
    ("away", "lost"),
    [
        ({"connected": False}, ("x", "m1")),
        ({"report": report("m1", launcher(), launcher_silent="it is stopped")}, ("x", "m1")),
        ({}, ("x",)),
        ({"exists": False, "connected": False}, ("x",)),
    ],
)
def test_a_member_that_no_launcher_can_end_is_ended(away: dict[str, Any], lost: tuple[str, ...]) -> None:
    now = seen("securing", members=(HELD[0], replace(HELD[1], **away)))
    assert transition.after(now, begun(placement=("m0", "m2")), POLICY).lost == lost
    known = replace(now, memory=replace(now.memory, lost=("m1",)))
    assert transition.after(known, begun(placement=("m0", "m2")), POLICY).lost == ("m1",)
    assert transition.after(now, begun(), POLICY).lost == ("x",), "it keeps its ranks"


def test_after_a_fault_a_job_without_storage_requests_no_checkpoint() -> None:
    after = transition.after(seen("securing", save=3), begun(), replace(POLICY, has_storage=False))
    assert (after.save, after.save_member) == (3, "")


def test_the_state_is_also_written_to_storage_by_a_member_that_holds_it() -> None:
    def saving(**given: Any) -> tuple[int, str]:
        found = transition.after(seen("securing", save=3), begun(**given), POLICY)
        return found.save, found.save_member

    assert saving() == (4, "m0")
    assert saving(placement=("m2", "m1")) == (4, "m1")
    assert saving(placement=("m2", "m3")) == (3, "")
    assert saving(cause=None) == (3, "")
    assert saving(resume=replace(FROM_FIVE, source="checkpoint")) == (3, "")


def test_the_wait_for_a_member_that_joined_after_the_fault_has_its_own_place_in_the_timeline() -> None:
    now = seen("securing", incident=replace(OPENED, survived_ns=95 * S))
    found = transition.after(now, begun(), POLICY).incident
    assert found is not None
    assert (found.survived_ns, found.manned_ns, found.decided_ns) == (95 * S, 0, 100 * S)
    late = replace(now, members=(HELD[0], replace(HELD[1], heard_ns=OPENED.noticed_ns + 1), *now.members[2:]))
    found = transition.after(late, begun(), POLICY).incident
    assert found is not None
    assert (found.survived_ns, found.manned_ns, found.decided_ns) == (95 * S, 100 * S, 100 * S)


def test_the_first_start_changes_exactly_these_fields() -> None:
    scratch = replace(POLICY, from_scratch=True)
    now = seen(
        "forming", placement=(), generation=0, seen=3, lineage=(Lineage(1, 9),), saved=9, held=8, equal=(4,)
    )
    action = begun(cause=None, resume=ResumePoint(0, 0, "none"), skip=(), cut=(), remedy="start")
    aside = SetAsideState((Lineage(1, 9),), (), (4,), 9)
    pending = PendingStart(4, 0, (Lineage(1, 9),), (), (4,), 0, aside=aside)
    expected = restarted(
        *(now, action),
        generation=4,
        placement=("m0", "m1"),
        sources=(),
        lineage=(Lineage(4, 0),),
        history=(),
        skip=(),
        missed=(),
        equal=(),
        saved=-1,
        held=-1,
        unbegun=pending,
        save=0,
        save_step=-1,
        save_generation=0,
        save_member="",
    )
    assert expected.launch is not None
    launch = replace(expected.launch, generation=4, skip=(), restore=None)
    found = transition.after(now, action, scratch)
    assert asdict(found) == asdict(replace(expected, launch=launch))
    other = transition.after(now, action, POLICY).unbegun
    assert other == replace(pending, bound=None, aside=None), "the user has not asked for it"


def test_the_number_of_lost_steps_counts_from_the_furthest_known_step() -> None:
    def lost(reached: int, step: int, members: Any = HELD, **given: Any) -> tuple[int | None, bool, int]:
        now = seen("securing", members=members, incident=replace(OPENED, reached=reached), **given)
        found = transition.after(now, begun(resume=replace(FROM_FIVE, step=step)), POLICY).incident
        assert found is not None
        return found.lost, found.at_least, found.reached

    gone = tuple(replace(each, exists=False) for each in HELD)
    silent = (member("m0"), member("m1"))
    own = tuple(
        member(f"m{n}", report(f"m{n}", launcher(rank(n), joins=False), progress=(progress(n, 4, -1),)))
        for n in (0, 1)
    )
    assert lost(3, 5) == (1, False, 6)
    assert lost(9, 5) == (4, False, 9)
    assert lost(9, 12) == (0, False, 9)
    assert lost(9, 5, gone) == (4, True, 9)
    assert lost(0, 0, silent) == (0, False, 0)
    assert lost(-1, 0, silent) == (None, False, -1)
    assert lost(-1, 0, silent, settled=False) == (0, False, -1)
    assert lost(9, 5, own) == (None, False, 9)


# -- ends


FINISHED = Completion(notes=("a note",))


def test_the_end_of_a_finished_run_changes_exactly_these_fields() -> None:
    end = End(0, "all done", "message", completion=FINISHED, warning="no checkpoint")
    common: dict[str, Any] = {"phase": "stopping", "since_ns": 100 * S, "exit_code": 0, "why": "all done"}
    common |= {"message": "message", "completion": FINISHED}
    warned = (PastWarning("the end", "no checkpoint"),)
    after(seen(), end, **common, warned=warned)
    after(seen(), replace(end, warning=""), **common)
    recovered = replace(OPENED, resume=FROM_FIVE, remedy="restart", why="before", lost=1)
    closed = replace(recovered, closed_ns=100 * S)
    after(seen(incident=recovered), replace(end, warning=""), **common, incident=closed)


def test_the_end_for_a_fault_changes_exactly_these_fields() -> None:
    bug = fault("exception", 0, 5, message="bad")
    end = End(7, "a bug", "bad", bug)
    undecided = replace(OPENED, number=4, measure="m")
    closed = replace(
        *(undecided,),
        closed_ns=100 * S,
        decided_ns=100 * S,
        cause=bug,
        remedy="stop",
        why="a bug",
        measure="",
    )
    common: dict[str, Any] = {"phase": "stopping", "since_ns": 100 * S, "exit_code": 7, "why": "a bug"}
    common |= {"message": "bad", "incident": closed, "incidents": 4}
    after(seen("securing", incident=undecided), end, **common)
    known = replace(undecided, cause=CRASH)
    common["incident"] = replace(closed, cause=CRASH)
    after(seen("securing", incident=known), replace(end, cause=None), **common)


@pytest.mark.parametrize(
    ("given", "stored", "back", "lost"),
    [
        ({}, (), None, 6),
        ({}, (Checkpoint(4, 1, 4, "p"),), None, 2),
        ({}, (Checkpoint(4, 1, 4, "p"),), 3, 3),
        ({}, (Checkpoint(4, 1, 4, "p"),), 5, 2),
        ({}, (Checkpoint(9, 1, 4, "p"),), None, 0),
        ({"reached": 0}, (), None, 0),
        ({"reached": -1}, (), None, None),
        ({"own_state": True}, (), None, None),
        ({"lost": None}, (), None, None),
    ],
)
def test_after_a_restart_without_a_step_only_states_on_storage_are_left(
    given: dict[str, Any], stored: tuple[Checkpoint, ...], back: int | None, lost: int | None
) -> None:
    resumed = replace(OPENED, **{"resume": FROM_FIVE, "lost": 1, "generation": 0, **given})
    now = seen("securing", incident=resumed, stored=StorageContents(stored))
    found = transition.after(now, End(1, "no more", back=back), POLICY).incident
    assert found is not None
    assert (found.resume, found.lost, found.remedy, found.why) == (None, lost, "stop", "no more")
    kept = transition.after(now, End(3, "done", completion=FINISHED), POLICY).incident
    assert kept is not None
    assert (kept.resume, kept.lost) == (FROM_FIVE, resumed.lost)


def test_an_end_decided_earlier_leaves_only_states_on_storage() -> None:
    now = seen("saving", incident=OPENED, end=End(1, "no more"))
    found = transition.after(now, End(1, "no more"), POLICY).incident
    assert found is not None
    assert (found.resume, found.lost) == (None, 6)


def test_a_bad_number_or_repeated_work_makes_the_later_states_void_for_the_next_run() -> None:
    bad = fault("nan", 0, 4)
    usual: dict[str, Any] = {"lineage": (Lineage(1, 2),), "equal": (3, 9), "seen": 6}
    for given, back, good in (((bad,), None, 4), ((bad,), 3, 3), ((bad,), 9, 4), ((CRASH,), 3, 3)):
        now = seen("securing", incident=replace(OPENED, faults=given), **usual)
        found = transition.after(now, End(1, "no more", back=back), POLICY)
        assert (found.seen, found.lineage, found.equal) == (
            *(7, (Lineage(1, 2), Lineage(7, good))),
            (3, good) if good > 3 else (3,),
        )
    now = seen("securing", incident=OPENED, **usual)
    kept = transition.after(now, End(1, "no more"), POLICY)
    assert (kept.seen, kept.lineage, kept.equal) == (6, (Lineage(1, 2),), (3, 9))


def test_work_that_a_stop_leaves_undone_is_recorded() -> None:
    def missed(code: int, back: int | None = None, cut: Any = CUT, **given: Any) -> list[tuple[int, ...]]:
        end = End(code, "stopped", cut=cut, back=back)
        found = transition.after(seen("securing", missed=(MissedWork(1, 9, 9),), **given), end, POLICY).missed
        assert found[0] == MissedWork(1, 9, 9)
        return [(each.incident, each.rank, each.step, each.early) for each in found[1:]]

    everything = [(0, 0, 5, True), (0, 1, 5, False), (0, 2, 7, False)]
    assert missed(130) == everything
    assert missed(130, back=5) == everything[1:2]
    assert missed(130, back=4) == []
    assert missed(1) == []
    assert missed(1, end=End(1, "no more")) == everything
    failed = PendingStart(1, 5, cut=CUT[:1], failed=True)
    assert missed(1, unbegun=failed) == everything[:1]
    assert missed(130, cut=()) == []
    scratch = PendingStart(1, 5, aside=SetAsideState(missed=(MissedWork(1, 9, 9),)))
    assert missed(130, unbegun=scratch, settled=False) == []


def test_a_stopped_script_that_keeps_its_own_state_is_asked_first() -> None:
    own = member("m0", report("m0", launcher(rank(0), joins=False)))
    now = seen("securing", members=(own,), stop="interrupt")
    assert transition.after(now, End(130, "stopped"), POLICY).first == "interrupt"
    assert transition.after(now, End(1, "failed"), POLICY).first == ""


def test_the_faults_of_the_last_incident_are_completed_at_the_end() -> None:
    died = report("m0", launcher(rank(0, Ending(91 * S, 17))), progress=(progress(0, 5),))
    now = seen("securing", members=(member("m0", died), HELD[1]), incident=OPENED)
    found = transition.after(now, End(1, "no more"), POLICY).incident
    assert found is not None
    exited = Fault("crash", 0, "m0", 5, 91 * S, "exit 17", "rank 0 exited with code 17", code=17)
    assert found.faults == (CRASH, exited)


# -- other changes


def test_a_supervisor_that_takes_over_starts_its_waits_then() -> None:
    memory = seen(incident=OPENED).memory
    assert transition.taken_over(memory, 7) == replace(memory, since_ns=7)
    older = replace(memory, phase="looking")
    assert transition.taken_over(older, 7) == replace(memory, since_ns=7, incident=None)


@pytest.mark.parametrize(
    ("before", "how", "after"),
    [
        ("", "graceful", "graceful"),
        ("", "now", "now"),
        ("graceful", "interrupt", "graceful"),
        ("graceful", "now", "now"),
        ("now", "graceful", "now"),
        ("now", "now", "now"),
    ],
)
def test_a_request_to_stop_never_makes_the_stop_less_urgent(before: Any, how: Any, after: Any) -> None:
    memory = seen().memory
    assert transition.with_stop_request(replace(memory, stop=before), how) == replace(memory, stop=after)


def test_the_diagram_has_exactly_this_text() -> None:
    assert transition.mermaid() == (
        "stateDiagram-v2\n"
        "    [*] --> forming\n"
        "    forming --> running: Start\n"
        "    forming --> forming: Replace\n"
        "    forming --> securing: Secure\n"
        "    forming --> stopping: End\n"
        "    running --> securing: Secure\n"
        "    running --> running: Settle, Warn, Learn, Replace\n"
        "    running --> saving: Save\n"
        "    running --> stopping: End\n"
        "    securing --> running: Start\n"
        "    securing --> securing: Replace, Secure, Preserve\n"
        "    securing --> saving: Save\n"
        "    securing --> stopping: End\n"
        "    saving --> saving: Save\n"
        "    saving --> stopping: End\n"
        "    stopping --> ended: Done\n"
        "    ended --> [*]"
    )
