"""The ends and starts that the remedies lead to, in full: exit code, sentence, message and cause."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from holdfast.protocol.launcher_messages import Ending, Restore
from holdfast.protocol.lineage import Lineage
from supervisor.decision import remedy
from supervisor.view import faults
from supervisor.view.model import (
    Checkpoint,
    End,
    Fault,
    InterruptedWork,
    MemberView,
    OpenIncident,
    PendingStart,
    Policy,
    ResumePoint,
    Start,
    StorageContents,
    View,
    VoidStep,
)
from tests.unit.supervisor.decision.test_remedy import past
from tests.unit.supervisor.job_views import (
    LAUNCH,
    S,
    fault,
    holding,
    launcher,
    member,
    progress,
    rank,
    report,
    view,
)
from tests.unit.supervisor.view.test_interrupted_work import KILLED, at, group

POLICY = Policy(members=2)
SKIPS = replace(POLICY, skip_bad_batches=True)
ABORTED = "what(): op.preamble.length <= op.nbytes. 12 vs 4. Received data size"
SYNTAX = '  File "a.py", line 1\nSyntaxError: invalid syntax\n'

CRASH = fault("crash", 1, 5, code=7, message="log")
BUG = fault("exception", 1, 5, message="Traceback: bad", code=4)
NAN = fault("nan", 1, 5, position=64, value="nan")
JUMP = replace(NAN, kind="loss_jump", detail="rank 1 computed a loss of 9")
TYPO = replace(BUG, signature="exception TypeError at train.py:7")
VOLUME = fault("restore", -1, 5, signature=faults.VOLUME, detail="member m1: /dev/shm is full")
AGAIN = "step 5 of rank 1 (batch position 64) produces a bad number again: rank 1 failed"


def bug(cause: Fault, times: int, code: int, where: str = "at step 5") -> End:
    why = f"{cause.detail}: the same failure {times} times {where}; this is a bug, not a fault"
    return End(code, why, cause.message, cause)


@pytest.mark.parametrize(
    ("cause", "history", "policy", "expected"),
    [
        (
            fault("bad_input", message="no data"),
            0,
            POLICY,
            End(2, "no data", "", fault("bad_input", message="no data")),
        ),
        (fault("bad_input"), 0, POLICY, End(2, "rank 1 failed", "", fault("bad_input"))),
        (
            replace(BUG, message=SYNTAX),
            0,
            POLICY,
            End(4, "rank 1 failed", SYNTAX, replace(BUG, message=SYNTAX)),
        ),
        (replace(CRASH, message=SYNTAX), 0, POLICY, None),
        (
            fault("exit", code=3),
            0,
            POLICY,
            End(
                3, "rank 1 failed: not restarted, because the script chose to exit", "", fault("exit", code=3)
            ),
        ),
        (NAN, 0, POLICY, None),
        (NAN, 1, POLICY, End(1, f"{AGAIN}; --skip-bad-batches would skip it", "", NAN)),
        (NAN, 1, SKIPS, None),
        (
            replace(NAN, position=-1),
            1,
            POLICY,
            End(
                1,
                f"{AGAIN.replace(' (batch position 64)', '')}; --skip-bad-batches would skip it",
                "",
                replace(NAN, position=-1),
            ),
        ),
        (
            replace(NAN, position=0),
            1,
            POLICY,
            End(
                1,
                f"{AGAIN.replace('64', '0')}; --skip-bad-batches would skip it",
                "",
                replace(NAN, position=0),
            ),
        ),
        (
            JUMP,
            1,
            POLICY,
            End(
                1,
                f"{AGAIN.replace('failed', 'computed a loss of 9')}; --skip-bad-batches would skip"
                " it, --loss-jump 0 would ignore it",
                "",
                JUMP,
            ),
        ),
        (VOLUME, 1, POLICY, None),
        (
            VOLUME,
            2,
            POLICY,
            End(
                1,
                "member m1: /dev/shm is full: tried 3 times. The state itself is intact: free"
                " memory there or enlarge the volume (docker run --shm-size), then resume the run",
                "",
                VOLUME,
            ),
        ),
        (BUG, 1, POLICY, None),
        (BUG, 2, POLICY, bug(BUG, 3, 4)),
        (replace(BUG, code=None), 2, POLICY, bug(replace(BUG, code=None), 3, 1)),
        (replace(BUG, step=0), 2, POLICY, bug(replace(BUG, step=0), 3, 4, "at step 0")),
        (replace(BUG, step=-1), 2, POLICY, bug(replace(BUG, step=-1), 3, 4, "before the first step")),
        (CRASH, 3, POLICY, None),
        (CRASH, 4, POLICY, bug(CRASH, 5, 7)),
        (replace(CRASH, message=ABORTED), 2, POLICY, bug(replace(CRASH, message=ABORTED), 3, 7)),
        (fault("victim", message=ABORTED), 2, POLICY, None),
        (fault("hang", work="sleep"), 4, POLICY, None),
        (fault("member_lost"), 9, POLICY, None),
        (TYPO, 0, POLICY, None),
        (TYPO, 1, POLICY, None),
        (TYPO, 2, replace(POLICY, identical_failures=9), None),
        (replace(TYPO, step=0, at_ns=1), 1, POLICY, bug(replace(TYPO, step=0, at_ns=1), 2, 4, "at step 0")),
        (
            replace(TYPO, step=0, at_ns=1),
            0,
            replace(POLICY, identical_failures=1),
            bug(replace(TYPO, step=0, at_ns=1), 1, 4, "at step 0"),
        ),
    ],
)
def test_the_run_ends_where_no_restart_helps(
    cause: Fault, history: int, policy: Policy, expected: End | None
) -> None:
    now = view(history=(past(cause),) * history)
    found = remedy.reason_to_stop(now, replace(policy, max_restarts=99), cause)
    assert found == expected
    between = view(history=(past(cause),) * history + (past(fault("crash", 0, -1)),))
    if cause.signature != faults.VOLUME:
        assert remedy.reason_to_stop(between, replace(policy, max_restarts=99), cause) == expected


def test_restarts_beyond_the_budget_end_the_run_with_the_last_cause() -> None:
    policy = replace(POLICY, max_restarts=2, restart_window_s=1800.0)
    recent, other = past(fault("crash", 0, 1), at_ns=90 * S), past(fault("hang", 0, 1), at_ns=90 * S)
    why = "--max-restarts 2 reached: 2 restarts in 0.5 h; rank 1 failed"
    assert remedy.reason_to_stop(view(history=(recent, other)), policy, CRASH) == End(7, why, "log", CRASH)
    old = replace(other, at_ns=-1700 * S)
    assert remedy.reason_to_stop(view(history=(old, recent)), policy, CRASH) is None
    younger = replace(old, at_ns=-1700 * S + 1)
    assert remedy.reason_to_stop(view(history=(younger, recent)), policy, CRASH) is not None


@pytest.mark.parametrize(
    ("given", "same"),
    [
        ({}, 2),
        ({"kind": "hang"}, 0),
        ({"signature": "other"}, 0),
        ({"step": 4}, 0),
        ({"step": 6}, 0),
        ({"rank": 0}, 0),
    ],
)
def test_failures_are_the_same_if_kind_rank_step_and_signature_agree(
    given: dict[str, Any], same: int
) -> None:
    found = remedy.reason_to_stop(
        view(history=(past(CRASH, **given),) * 2), replace(POLICY, identical_crashes=3), CRASH
    )
    assert (found is not None) is (same == 2)


@pytest.mark.parametrize(
    ("signature", "signal", "worked", "same"),
    [
        ("signal 9", 9, False, True),
        ("signal 9", 9, True, False),
        ("signal 15", 15, True, False),
        ("signal 11", 11, True, True),
        ("out of memory", 9, True, True),
    ],
)
def test_signals_of_other_processes_are_a_bug_only_if_the_script_never_makes_progress(
    signature: str, signal: int, worked: bool, same: bool
) -> None:
    cause = replace(CRASH, signature=signature, signal=signal, code=None, step=0)
    policy = replace(POLICY, identical_crashes=2)
    found = remedy.reason_to_stop(
        view(history=(past(cause, worked=worked),), started_ns=80 * S), policy, cause
    )
    assert found == (bug(cause, 2, 128 + signal, "at step 0") if same else None)


def test_a_generation_made_progress_with_a_step_or_after_a_minute() -> None:
    launch = replace(LAUNCH, restore=Restore(5, 1, "slot"))

    def made(step: int, lived_s: float, started: Any = launch) -> bool:
        now = view(launch=started, started_ns=90 * S - int(lived_s * S))
        return remedy.made_progress(now, fault("crash", step=step))

    assert [made(step, 1.0) for step in (5, 6)] == [False, True]
    assert [made(5, lived_s) for lived_s in (60.0, 60.1)] == [False, True]
    assert [made(step, 1.0, LAUNCH) for step in (0, 1)] == [False, True]
    assert [made(step, 1.0, None) for step in (0, 1)] == [False, True]


# -- before the script joins


def cannot(ending: Ending, failures: int = 0, tries: int = 0, number: int = 0, **given: Any) -> End | None:
    seen = {name: given.pop(name) for name in ("phase", "settled", "history", "since_ns") if name in given}
    state = launcher(parked=(), warm_ending=ending, warm_failures=failures, warm_tries=tries, **given)
    there = member(f"m{number}", report(f"m{number}", state))
    return remedy.startup_failure(view(member("m9"), there, **{"phase": "forming", **seen}))


STARTING: dict[str, Any] = {"phase": "running", "ranks": (rank(0, pid=0, state="starting"),)}


class Tried:
    """The arguments of `cannot`, which the tests call themselves."""

    def __init__(self, *given: Any, **fields: Any) -> None:
        self.given, self.fields = given, fields


FAILED = Ending(1, 6, fail="exception", message="text")


@pytest.mark.parametrize(
    ("tried", "expected"),
    [
        (Tried(Ending(1, 0, message="text")), End(0, "the script ended before it joined", "text")),
        (
            Tried(Ending(1, 3, fail="unflushed", message="text")),
            End(3, "the script ended before it joined", "text"),
        ),
        (
            Tried(Ending(1, 3, fail="system_exit", message="text")),
            End(3, "the script cannot start: it exited with code 3", "text"),
        ),
        (
            Tried(Ending(1, 2, fail="bad_input", message="text")),
            End(2, "the script cannot start: text"),
        ),
        (
            Tried(Ending(1, 1, message=SYNTAX)),
            End(1, "the script cannot start: SyntaxError: invalid syntax", SYNTAX),
        ),
        (Tried(FAILED, 2), None),
        (Tried(FAILED, 3), End(6, "the script failed 3 times before it joined", "text")),
        (
            Tried(Ending(1, None, 11), 4),
            End(139, "the script failed 4 times before it joined: it was killed by SIGSEGV"),
        ),
        (Tried(Ending(1, 0), 3, **STARTING), End(1, "the script failed 3 times before it joined")),
        (Tried(replace(FAILED, ours=True), 3), None),
        (Tried(FAILED, 3, phase="running", ranks=(rank(0),)), None),
        (Tried(FAILED, 3, phase="running", ranks=(rank(0, state="starting"),)), None),
        (Tried(FAILED, 3, phase="running", ranks=(rank(0, pid=0),)), None),
        (Tried(FAILED, 3, **STARTING), End(6, "the script failed 3 times before it joined", "text")),
        (
            Tried(FAILED, 9, 3, settled=True, since_ns=40 * S, **STARTING),
            End(6, "the script failed 3 times before it joined", "text"),
        ),
        (Tried(FAILED, 9, 3, settled=True, since_ns=40 * S + 1, **STARTING), None),
        (Tried(FAILED, 9, 2, settled=True, since_ns=40 * S, **STARTING), None),
        (Tried(FAILED, 9, 0, history=(past(CRASH, worked=True),), since_ns=99 * S, **STARTING), None),
        (
            Tried(FAILED, 9, 0, history=(past(CRASH),), since_ns=99 * S, **STARTING),
            End(6, "the script failed 9 times before it joined", "text"),
        ),
        (Tried(FAILED, 3, settled=True), End(6, "the script failed 3 times before it joined", "text")),
    ],
)
def test_repeated_failures_before_the_join_end_the_run(tried: Tried, expected: End | None) -> None:
    assert cannot(*tried.given, **tried.fields) == expected


def test_a_missing_member_does_not_end_the_run() -> None:
    state = launcher(parked=(), warm_ending=FAILED, warm_failures=3)
    gone = member("m0", report("m0", state), exists=False)
    assert remedy.startup_failure(view(gone, phase="forming")) is None
    there = member("m1", report("m1", state))
    assert remedy.startup_failure(view(gone, there, phase="forming")) is not None, "the next one"


# -- the next generation


def two(**given: Any) -> tuple[MemberView, ...]:
    return tuple(
        holding(
            f"m{n}",
            ((1, 9), (1, 5)),
            ((n, 1, 9), (n, 1, 5)),
            launcher=launcher(rank(n), port=4000 + n),
            **given,
        )
        for n in (0, 1)
    )


def next_start(now: View, cause: Fault | None, *found: Fault, policy: Policy = POLICY) -> Start | End:
    return remedy.start_generation(now, policy, cause, found)


def test_a_roll_back_starts_with_exactly_these_fields() -> None:
    now = view(*two(), skip=(2,), history=(past(NAN),))
    action = next_start(now, NAN, NAN, policy=SKIPS)
    resumed = remedy.next_resume_point(now, SKIPS, NAN, (NAN,))
    assert (resumed.step, resumed.source, resumed.holders) == (5, "slot", ("m0", "m1"))
    measure = "roll back and resume from the snapshot of step 5"
    assert isinstance(action, Start)
    assert asdict(action) == asdict(
        Start(
            *(("m0", "m1"), resumed, (2, 5), "m0", 4000, NAN, "rollback"),
            (f"{AGAIN}: step 5 will be skipped",),
            f"rank 1 failed: {measure}",
            measure=measure,
        )
    )
    other = next_start(now, CRASH, CRASH, policy=SKIPS)
    assert isinstance(other, Start)
    assert (other.skip, other.evidence, other.resume.step) == ((2,), (), 9)


def test_a_restart_on_another_member_from_a_checkpoint_starts_with_exactly_these_fields() -> None:
    gone = fault("member_lost", 0)
    standby = member("m2", report("m2", launcher(port=4002), peer_url="http://10.0.0.7:81"))
    checkpoint = Checkpoint(7, 1, 2, "/s/step-7-1", skip=(4,))
    now = view(member("m0", exists=False), replace(two()[1], report=report("m1", launcher(rank(1)))), standby)
    now = replace(now, stored=StorageContents((checkpoint,)), memory=replace(now.memory, skip=(1,)))
    measure = "restart the processes on m2, from the checkpoint of step 7"
    action = next_start(now, gone, gone)
    assert isinstance(action, Start)
    assert asdict(action) == asdict(
        Start(
            *(("m2", "m1"), ResumePoint(7, 1, "checkpoint", "/s/step-7-1"), (1, 4), "10.0.0.7", 4002),
            *(gone, "swap", (), f"rank 0 failed: {measure}"),
            measure=measure,
        )
    )
    larger = replace(now, stored=StorageContents((replace(checkpoint, world_size=8),)))
    why = "checkpoint /s/step-7-1 has world size 8, but this run has 2"
    assert next_start(larger, gone, gone) == End(
        2, f"{why}: resume with 8 ranks, or use another run directory"
    )


def test_the_first_start_from_scratch_has_exactly_these_fields() -> None:
    measure = "start from the beginning, as requested"
    now = replace(view(*two(), phase="forming"), stored=StorageContents((Checkpoint(7, 1, 2, "p"),)))
    action = next_start(now, None, policy=replace(POLICY, from_scratch=True))
    assert isinstance(action, Start)
    assert asdict(action) == asdict(
        Start(
            *(("m0", "m1"), ResumePoint(0, 0, "none"), (), "m0", 4000, None, "start", ()),
            f"all members are ready: {measure}",
            measure=measure,
        )
    )


def test_a_script_that_keeps_its_own_state_restarts_with_exactly_these_fields() -> None:
    own = tuple(
        member(f"m{n}", report(f"m{n}", launcher(rank(n), joins=False), peer_url="nonsense")) for n in (0, 1)
    )
    measure = "restart the processes in place, from the script's first line, because it keeps its own state"
    for cause, remedied in ((CRASH, "restart"), (NAN, "rollback")):
        action = next_start(view(*own), cause, cause)
        assert isinstance(action, Start)
        assert (action.why, action.measure, action.remedy) == (f"rank 1 failed: {measure}", measure, remedied)
        assert action.master_addr == "127.0.0.1"
    first = next_start(view(*own, phase="forming"), None)
    assert isinstance(first, Start)
    assert first.measure == "start from the script's first line, because it keeps its own state"


def test_the_evidence_of_a_start_names_each_unused_state_and_all_repeated_work() -> None:
    now = group((rank(0), at(0, tail_s=1.5, late=(20,))), (rank(1, KILLED), at(1, tail_s=2.0)), (20, 15))
    action = next_start(now, CRASH, CRASH)
    assert isinstance(action, Start)
    assert action.resume.step == 15
    assert action.evidence == (
        "the state of step 20 was changed after its commit and is not used",
        "the work of rank 0 after the commit of step 20 (1.50 s) is repeated",
        "the work of rank 1 after the commit of step 20 (2.00 s) is repeated",
    )
    assert action.cut == (InterruptedWork(0, 20, 19, 1.5), InterruptedWork(1, 20, 19, 2.0))
    only = group((rank(0), at(0)), (rank(1, KILLED), at(1, tail_s=2.0, late=(20,))), (20,))
    action = next_start(only, CRASH, CRASH)
    assert isinstance(action, Start)
    assert action.evidence == (
        "the work of rank 1 after the commit of step 20 (2.00 s) is not repeated, because"
        " no earlier state is left",
    )
    assert action.cut == (InterruptedWork(1, 20, 19, 2.0), InterruptedWork(1, 20, 19))


def test_an_exception_whose_work_cannot_be_repeated_ends_the_run() -> None:
    raised = fault("exception", 1, 20, message="text", code=4)
    now = group((rank(0), at(0)), (rank(1, KILLED), at(1, tail_s=2.0)), (20,))
    why = "rank 1 failed after step 20, and no earlier state is left from which to repeat it"
    assert next_start(now, raised, raised) == End(4, why, "text", raised)
    known = PendingStart(
        1, 20, cut=(InterruptedWork(0, 20, 19, 1.0, raised=True),), raised=(replace(raised, rank=0),)
    )
    failed = replace(now, memory=replace(now.memory, unbegun=replace(known, failed=True)))
    assert next_start(failed, CRASH, CRASH) == End(4, why, "text", replace(raised, rank=0))
    assert isinstance(next_start(now, CRASH, CRASH, fault("exception", 0, 20)), Start)


@pytest.mark.parametrize(
    ("slots", "cuts", "bound", "void", "step"),
    [
        ((20, 15, 9), (), None, (), 20),
        ((20, 15, 9), (), 15, (), 15),
        ((20, 15, 9), (InterruptedWork(0, 20, 19),), None, (), 15),
        ((20, 15, 9), (InterruptedWork(0, 20, 19),), 10, (), 9),
        ((20,), (InterruptedWork(0, 20, 19),), None, (), 20),
        ((20, 15), (), None, (VoidStep(1, 20, 0),), 15),
        ((20,), (), None, (VoidStep(1, 20, 0),), 20),
    ],
)
def test_work_is_repeated_from_the_newest_usable_state_before_it(
    slots: tuple[int, ...],
    cuts: tuple[InterruptedWork, ...],
    bound: int | None,
    void: tuple[VoidStep, ...],
    step: int,
) -> None:
    now = group((rank(0), at(0)), (rank(1, KILLED), at(1)), slots)
    now = replace(now, memory=replace(now.memory, void=void))
    assert remedy.resume_before(now, cuts, bound).step == step


def test_work_of_the_first_step_is_repeated_from_the_beginning_unless_a_state_was_saved() -> None:
    now = group((rank(0), at(0)), (rank(1, KILLED), at(1)), (3,))
    cuts = (InterruptedWork(0, 0, 0),)
    assert remedy.resume_before(now, cuts, None) == ResumePoint(0, 0, "none")
    saved = replace(now, memory=replace(now.memory, saved=3))
    assert remedy.resume_before(saved, cuts, None).step == 3


def test_a_doubted_checkpoint_is_read_in_full_before_it_is_used() -> None:
    doubted = Checkpoint(7, 1, 2, "/s/step-7-1")
    restore = fault("restore", -1, 7)

    def verified(*known: Fault, phase: str = "securing", policy: Policy = POLICY, **given: Any) -> Any:
        opened = OpenIncident(1, 1, 90 * S, 91 * S, 0.0, known) if known else None
        now = view(phase=phase, incident=opened, **given)
        return remedy.checkpoint_to_verify(replace(now, stored=StorageContents((doubted,))), policy)

    assert verified(restore) == doubted
    assert verified(CRASH, restore) == doubted
    assert verified(CRASH) is None
    assert verified() is None
    assert verified(restore, phase="running") is None
    assert verified(phase="forming") == doubted
    assert verified(phase="forming", policy=replace(POLICY, from_scratch=True)) is None
    assert verified(restore, fault("nan", 0, 6)) is None, "it is beyond the last good step"
    failed_start = PendingStart(1, 5, (Lineage(0, 5),))
    assert verified(restore, lineage=(Lineage(2, 5),)) is None, "it is void"
    assert verified(restore, lineage=(Lineage(2, 5),), unbegun=failed_start) == doubted, (
        "unless the start is undone"
    )
    read = StorageContents((replace(doubted, verified=True),))
    assert remedy.checkpoint_to_verify(replace(view(phase="forming"), stored=read), POLICY) is None


def test_a_step_is_skipped_in_the_words_of_the_script() -> None:
    own = member(
        "m0", report("m0", launcher(rank(0), joins=False, generation=2), progress=(progress(0, 5, -1),))
    )
    cause = replace(NAN, position=-1)
    found = remedy.reason_to_stop(view(own, generation=2, history=(past(cause),)), POLICY, cause)
    named = "optimizer step 5 since the restart of rank 1"
    assert found == End(1, f"{named} produces a bad number again: rank 1 failed", "", cause)
