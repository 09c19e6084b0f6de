from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.protocol.launcher_messages import Ending, Restore
from supervisor.decision import remedy, transition
from supervisor.fault_kinds import FaultName
from supervisor.view import faults
from supervisor.view.model import (
    Checkpoint,
    End,
    Fault,
    MemberView,
    PastFault,
    Policy,
    Start,
    StorageContents,
    View,
)
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

POLICY = Policy(members=2)
STORED = StorageContents((Checkpoint(4, 1, 2, "p"),))
TWO = (
    member("m0", report("m0", launcher(rank(0)))),
    member("m1", report("m1", launcher(rank(1)))),
)


def past(cause: Fault, **given: Any) -> PastFault:
    made = PastFault(cause.kind, cause.rank, cause.member, cause.step, cause.signature, 99 * S, 1)
    return replace(made, **given)


# -- before anybody joined


def warm(ending: Ending, failures: int = 1, phase: str = "forming", **given: Any) -> End | None:
    state = launcher(warm_ending=ending, warm_failures=failures, parked=(), **given)
    return remedy.startup_failure(view(member("m0", report("m0", state)), phase=phase))


def test_a_script_that_ends_well_before_joining_is_finished() -> None:
    assert warm(Ending(0, 0)) == End(0, "the script ended before it joined")


@pytest.mark.parametrize(
    ("ending", "code", "output"),
    [
        (Ending(0, 3, fail="system_exit"), 3, ""),
        (Ending(0, 2, fail="bad_input", message="no"), 2, ""),  # the reason says it all
        (Ending(0, 2, fail="bad_input", message="epoch 1\nno"), 2, "epoch 1\nno"),
        (
            Ending(0, 1, message='  File "a.py", line 1\nSyntaxError: no\n'),
            1,
            '  File "a.py", line 1\nSyntaxError: no\n',
        ),
    ],
)
def test_a_script_that_cannot_start_ends_the_run_at_once(ending: Ending, code: int, output: str) -> None:
    ended = warm(ending)
    assert ended is not None
    assert (ended.exit_code, ended.message) == (code, output)


def test_other_failures_are_retried_and_end_the_run_at_the_third() -> None:
    ending = Ending(0, 1, fail="exception", message="RuntimeError")
    assert warm(ending, 2) is None
    assert warm(ending, 3) == End(1, "the script failed 3 times before it joined", "RuntimeError")
    assert warm(Ending(0, None, 11), 3) == End(
        139, "the script failed 3 times before it joined: it was killed by SIGSEGV"
    )


MISSING = """\
hello before join
Traceback (most recent call last):
  File "/src/train.py", line 2, in <module>
    import nosuchmodule
ModuleNotFoundError: No module named 'nosuchmodule'
"""


@pytest.mark.parametrize(
    "ending",
    [
        Ending(
            0,
            1,
            fail="exception",
            message=MISSING,
            raised="ModuleNotFoundError: No module named 'nosuchmodule'",
        ),
        Ending(0, 1, message=MISSING),
        Ending(0, 1, message=f"{MISSING}the process that imports the script's modules exited with code 1"),
        Ending(0, 1, message=MISSING.replace("'nosuch", "\x1b[2J'nosuch")),
    ],
)
def test_the_reason_why_a_script_never_joins_is_in_the_message(ending: Ending) -> None:
    """Events and the lists of jobs show no traceback."""
    ended = warm(ending, 3)
    assert ended is not None
    assert ended.why == (
        "the script failed 3 times before it joined: ModuleNotFoundError: No module named 'nosuchmodule'"
    )
    assert ended.message == ending.message


def test_a_script_that_cannot_be_compiled_is_named_by_its_error() -> None:
    ended = warm(Ending(0, 1, message='  File "a.py", line 1\n    (\n    ^\nSyntaxError: invalid syntax\n'))
    assert ended is not None
    assert ended.why == "the script cannot start: SyntaxError: invalid syntax"


def test_training_ranks_continue_if_no_other_process_can_be_created() -> None:
    """The script was edited and is now broken."""
    broken = Ending(0, 1, message="SyntaxError: invalid syntax")
    assert warm(broken, 3, "running", ranks=(rank(0),)) is None
    waiting = rank(0, pid=0, state="starting")
    assert warm(broken, 3, "running", ranks=(waiting,)) is not None


def test_a_script_that_has_worked_is_retried_for_a_while() -> None:
    """A file that the script reads before it joins may be missing for a moment."""
    away = Ending(0, 1, fail="exception", message="FileNotFoundError: data.pt")
    waiting = rank(0, pid=0, state="starting")

    def ended(after_s: float, tries: int, **given: Any) -> End | None:
        state = launcher(waiting, parked=(), warm_ending=away, warm_failures=9, warm_tries=tries)
        told = member("m0", report("m0", state))
        return remedy.startup_failure(view(told, now_s=100 + after_s, since_ns=100 * S, **given))

    assert ended(0, 9) == End(1, "the script failed 9 times before it joined", away.message)
    for known in ({"saved": 7}, {"held": 7}, {"settled": True}):
        assert ended(59, 9, **known) is None
        assert ended(61, 2, **known) is None, "each attempt takes long"
        assert ended(61, 3, **known) == End(1, "the script failed 3 times before it joined", away.message)


def test_processes_that_holdfast_ended_do_not_count_as_failures() -> None:
    assert warm(Ending(0, None, 9, ours=True), 3) is None


# -- when to stop


@pytest.mark.parametrize(
    ("cause", "code"),
    [
        (fault("bad_input", code=2), 2),
        (fault("exit", code=3), 3),
    ],
)
def test_exits_that_the_script_decides_end_the_run(cause: Fault, code: int) -> None:
    ended = remedy.reason_to_stop(view(), POLICY, cause)
    assert ended is not None
    assert (ended.exit_code, ended.cause) == (code, cause)


@pytest.mark.parametrize(
    ("kind", "times"), [("exception", 3), ("crash", 5), ("victim", 5), ("hang", 5), ("member_lost", None)]
)
def test_the_same_failure_at_the_same_step_eventually_counts_as_a_bug(
    kind: FaultName, times: int | None
) -> None:
    cause = fault(kind)
    for before in range(8):
        ended = remedy.reason_to_stop(view(history=(past(cause),) * before), POLICY, cause)
        assert (ended is not None) == (times is not None and before + 1 >= times)


def raising(*names: str) -> tuple[View, Fault]:
    """Return two ranks that raise these exceptions in step 6, and the fault of the first rank."""
    raised = [
        Ending(90 * S, 1, fail="exception", message=f'  File "train.py", line 7\n{name}: bad\n')
        if name
        else None
        for name in names
    ]
    seen = view(
        *(
            member(f"m{n}", report(f"m{n}", launcher(rank(n, each)), progress=(progress(n, 5),)))
            for n, each in enumerate(raised)
        )
    )
    return seen, next(each for each in faults.find_faults(seen, POLICY) if each.rank == 0)


@pytest.mark.parametrize(
    ("names", "before", "ends"),
    [
        (("TypeError", "TypeError"), {}, True),
        (("UnboundLocalError", "UnboundLocalError"), {}, True),
        (("TypeError", ""), {}, False),
        (("TypeError", "NameError"), {}, False),
        (("OSError", "OSError"), {}, False),
        (("TypeError", "TypeError"), {"everywhere": False}, False),
        (("TypeError", "TypeError"), {"signature": "another"}, False),
        (("TypeError", "TypeError"), {"step": 4}, False),
    ],
)
def test_a_program_error_on_all_ranks_twice_in_a_row_is_not_tried_a_third_time(
    names: tuple[str, str], before: dict[str, Any], ends: bool
) -> None:
    seen, cause = raising(*names)
    assert remedy.reason_to_stop(seen, POLICY, cause) is None
    known = past(cause, **{"everywhere": True, "worked": True, **before})
    again = replace(seen, memory=replace(seen.memory, history=(known,)))
    assert (remedy.reason_to_stop(again, POLICY, cause) is not None) == ends
    between = replace(seen.memory, history=(known, past(fault("crash"))))
    assert remedy.reason_to_stop(replace(seen, memory=between), POLICY, cause) is None


def test_whether_all_ranks_failed_is_remembered() -> None:
    def history(*names: str) -> tuple[PastFault, ...]:
        seen, cause = raising(*names)
        action = remedy.start_generation(replace(seen, stored=STORED), POLICY, cause, (cause,))
        assert isinstance(action, Start)
        securing = replace(seen, memory=replace(seen.memory, phase="securing"))
        return transition.after(securing, action, POLICY).history

    assert [each.everywhere for each in history("KeyError", "KeyError")] == [True]
    assert [each.everywhere for each in history("KeyError", "")] == [False]


@pytest.mark.parametrize(
    "given", [{"signature": "another"}, {"step": 4}, {"kind": "hang"}, {"step": 6}], ids=str
)
def test_another_failure_or_another_step_is_not_the_same(given: dict[str, Any]) -> None:
    cause = fault("exception")
    history = (past(cause, **given), past(cause, **given))
    assert remedy.reason_to_stop(view(history=history), POLICY, cause) is None


def test_other_failures_in_between_do_not_hide_a_repetition() -> None:
    cause = fault("exception")
    history = (past(cause), past(fault("crash", 0)), past(cause))
    assert remedy.reason_to_stop(view(history=history), POLICY, cause) is not None


def test_a_step_beyond_the_failure_shows_that_it_was_overcome() -> None:
    cause = fault("exception")
    history = (past(cause), past(cause), past(fault("crash", step=9)))
    assert remedy.reason_to_stop(view(history=history), POLICY, cause) is None


def test_mismatched_collectives_count_as_a_bug_as_early_as_an_exception() -> None:
    said = "what(): op.preamble.length <= op.nbytes. 12 vs 4. Received data size doesn't match"
    cause = fault("crash", message=said)
    assert remedy.reason_to_stop(view(history=(past(cause),) * 1), POLICY, cause) is None
    ended = remedy.reason_to_stop(view(history=(past(cause),) * 2), POLICY, cause)
    assert ended is not None
    assert "the same failure 3 times" in ended.why


def test_a_crash_of_another_rank_is_another_crash() -> None:
    cause = fault("crash")
    assert remedy.reason_to_stop(view(history=(past(cause, rank=0),) * 4), POLICY, cause) is None


@pytest.mark.parametrize(("worked", "is_bug"), [(False, True), (True, False)])
def test_a_kill_from_outside_is_a_bug_only_if_the_script_never_makes_progress(
    worked: bool, is_bug: bool
) -> None:
    cause = fault("crash", step=0, signal=9, signature="signal 9")
    history = (past(cause, worked=worked),) * 4
    assert (
        remedy.reason_to_stop(view(history=history, started_ns=80 * S), POLICY, cause) is not None
    ) == is_bug


def test_a_generation_worked_if_it_gained_a_step_or_lived_for_a_while() -> None:
    launch = replace(LAUNCH, restore=Restore(5, 1, "slot"))
    assert not remedy.made_progress(view(launch=launch, started_ns=89 * S), fault("crash", step=5))
    assert remedy.made_progress(view(launch=launch, started_ns=89 * S), fault("crash", step=6))
    assert remedy.made_progress(view(launch=launch, started_ns=10 * S), fault("crash", step=5))


def test_the_budget_counts_recent_restarts_only() -> None:
    policy = replace(POLICY, max_restarts=2, restart_window_s=50.0)
    other = fault("crash", 0, step=1)
    cause = fault("crash", signal=9, message="what the rank printed")
    assert remedy.reason_to_stop(view(history=(past(other),)), policy, cause) is None
    assert (
        remedy.reason_to_stop(view(history=(past(other), past(other, at_ns=40 * S))), policy, cause) is None
    )
    ended = remedy.reason_to_stop(view(history=(past(other), past(other, at_ns=51 * S))), policy, cause)
    why = "--max-restarts 2 reached: 2 restarts in 0.0138889 h; rank 1 failed"
    assert ended == End(137, why, "what the rank printed", cause)


def test_a_volume_that_refuses_the_state_in_each_attempt_ends_the_run_and_is_named() -> None:
    cause = fault("restore", -1, signature=faults.VOLUME, detail="member m1: /dev/shm has 3 bytes free")
    crash = fault("crash", signal=9, signature="signal 9")
    refused = (past(crash), *(past(cause),) * (remedy.VOLUME_TRIES - 2))
    assert remedy.reason_to_stop(view(history=refused), POLICY, cause) is None
    apart = (*refused, past(cause), past(crash))
    assert remedy.reason_to_stop(view(history=apart), POLICY, cause) is None, (
        "the run took a step between them"
    )
    ended = remedy.reason_to_stop(view(history=(*refused, past(cause))), POLICY, cause)
    assert ended is not None
    assert (ended.exit_code, "/dev/shm has 3 bytes free" in ended.why) == (1, True)


# -- the next generation


def started(cause: Fault | None, found: tuple[Fault, ...] = (), **given: Any) -> Start:
    policy = given.pop("policy", POLICY)
    action = remedy.start_generation(view(*given.pop("members", TWO), **given), policy, cause, found)
    assert isinstance(action, Start)
    return action


def test_the_first_start_is_from_the_beginning_with_rank_0s_member_in_the_middle() -> None:
    action = started(None)
    assert (action.remedy, action.resume.source) == ("start", "none")
    assert (action.master_addr, action.master_port) == ("http://m0"[7:], 4000)
    assert action.why == "all members are ready: start from the beginning, because nothing has been saved yet"


def test_a_bad_number_limits_the_state_even_if_the_cause_is_another_fault() -> None:
    held = (
        holding("m0", ((1, 9), (1, 7)), ((0, 1, 9), (0, 1, 7))),
        holding("m1", ((1, 9), (1, 7)), ((1, 1, 9), (1, 1, 7))),
    )
    lost, bad = fault("member_lost", 0), fault("nan", step=8)
    assert started(lost, (lost,), members=held).resume.step == 9
    assert started(lost, (lost, bad), members=held).resume.step == 7
    assert started(lost, (lost, replace(bad, step=9)), members=held).resume.step == 9


def test_the_first_bad_step_of_any_rank_counts() -> None:
    assert remedy.last_good_step((fault("nan", step=8), fault("inf", step=7), fault("crash", step=1))) == 7
    assert remedy.last_good_step((fault("crash", step=1),)) is None


def test_a_bad_batch_is_skipped_only_the_second_time() -> None:
    cause, skipping = fault("nan"), replace(POLICY, skip_bad_batches=True)
    assert started(cause, (cause,), policy=skipping).skip == ()
    action = started(cause, (cause,), policy=skipping, history=(past(cause),), skip=(2,))
    assert action.skip == (2, 5)
    assert "step 5 of rank 1 produces a bad number again" in action.evidence[0]


def test_steps_that_a_checkpoint_skipped_stay_skipped() -> None:
    seen = view(*TWO, skip=(1,))
    stored = replace(seen, stored=StorageContents((Checkpoint(9, 1, 2, "p", (4,)),)))
    action = remedy.start_generation(stored, POLICY, None, ())
    assert isinstance(action, Start)
    assert action.skip == (1, 4)


def test_restarting_from_the_failed_state_is_a_retry() -> None:
    action = started(None)
    signature = faults.restore_signature("none", 0, 0)
    assert remedy.is_retry(view(), fault("restore", signature=signature), action.resume)
    assert remedy.is_retry(view(), fault("restore", signature=faults.VOLUME), action.resume)
    assert not remedy.is_retry(view(), fault("restore", signature="other"), action.resume)
    assert not remedy.is_retry(view(), fault("crash", signature=signature), action.resume)


def test_without_any_state_left_the_run_ends_instead_of_starting_over() -> None:
    action = remedy.start_generation(view(*TWO), POLICY, fault("restore"), ())
    assert isinstance(action, End)
    assert (action.exit_code, "no state is left to resume from" in action.why) == (1, True)


def test_a_script_that_keeps_its_own_state_starts_from_its_first_line_and_skips_nothing() -> None:
    def its_own(name: str) -> MemberView:
        number = int(name[1:])
        state = launcher(rank(number), joins=False)
        return member(name, report(name, state, progress=(progress(number, 5, -1),)))

    two, cause = (its_own("m0"), its_own("m1")), fault("nan")
    action = remedy.start_generation(view(*two), POLICY, cause, (cause,))
    assert isinstance(action, Start)
    first = "restart the processes in place, from the script's first line, because it keeps its own state"
    assert action.why == f"{cause.detail}: {first}"
    seen = view(*two, history=(past(cause),))
    ended = remedy.reason_to_stop(seen, POLICY, cause)
    assert ended is not None
    assert ended.why == "step 5 of rank 1 produces a bad number again: rank 1 failed"
