"""Each view of a group without progress leads to exactly this record."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.protocol.launcher_messages import Ending, RankInspection
from holdfast.protocol.member_messages import RankStall
from supervisor.hangs import deadlock, observation
from supervisor.view.model import (
    LateRank,
    LearnedStall,
    MemberView,
    PendingException,
    RankAtRest,
    StallWatch,
    View,
)
from tests.unit.supervisor.hangs.test_deadlock import MEETS, REDUCES, both
from tests.unit.supervisor.hangs.test_detection import (
    LATE_S,
    SLEEPS,
    SLEEPS_APART,
    SPINS,
    WAITS,
    WORKS,
    there,
)
from tests.unit.supervisor.hangs.test_evidence import LOCKED, PLAIN
from tests.unit.supervisor.job_views import S, launcher, member, progress, rank, report, view

AT = "evaluate (train.py"
LATE = LateRank(0, 5, "forward", 98 * S)


def watched(
    *members: MemberView, watch: StallWatch | None = None, now_s: float = 100.0, **given: Any
) -> StallWatch:
    now = view(*members, now_s=now_s, **{"settled": True, **given})
    return observation.update(watch or StallWatch(1), now)


def ranks(*late: LateRank, **given: Any) -> StallWatch:
    return StallWatch(1, late, **given)


def calm(number: int, **given: Any) -> MemberView:
    return there(number, None, stalled=False, **given)


# -- late ranks


@pytest.mark.parametrize(
    ("inspection", "expected"),
    [
        (None, LATE),
        (
            SLEEPS,
            replace(LATE, role="idle", work="sleep", look=1, phase_seq=0, at=AT, works=("sleep",), looks=1),
        ),
        (
            replace(WORKS, phase_seq=4),
            replace(
                *(LATE,),
                role="works",
                work="computing",
                worked_ns=100 * S,
                look=1,
                phase_seq=4,
                at=AT,
                works=("computing",),
                looks=1,
            ),
        ),
        (
            SPINS,
            replace(
                *(LATE,),
                role="busy",
                work="computing",
                busy=True,
                look=1,
                phase_seq=0,
                at=AT,
                works=("computing",),
                looks=1,
            ),
        ),
        (
            SLEEPS_APART,
            replace(
                *(LATE,),
                role="idle",
                work="sleep",
                look=1,
                phase_seq=0,
                at=AT,
                works=("sleep",),
                looks=1,
                apart=True,
                apart_ns=100 * S,
            ),
        ),
        (
            replace(PLAIN, process_state="T"),
            replace(LATE, role="stopped", look=1, phase_seq=0, at=AT, looks=1),
        ),
        (
            replace(SLEEPS, step=-1),
            replace(LATE, role="idle", work="sleep", look=1, phase_seq=0, at=AT, works=("sleep",), looks=1),
        ),
        (replace(SLEEPS, step=4), LATE),
    ],
    ids=["none", "sleeps", "works", "computes", "apart", "stopped", "no step", "another step"],
)
def test_a_rank_that_becomes_late_is_recorded_with_its_inspection(
    inspection: RankInspection | None, expected: LateRank
) -> None:
    assert watched(there(0, inspection), calm(1)) == ranks(expected)


def test_a_second_inspection_is_compared_with_the_first() -> None:
    def second(first: RankInspection, then: RankInspection, turn: int = 2, **given: Any) -> LateRank:
        before = watched(there(0, first, **given), calm(1))
        after = watched(there(0, then, turn=turn, **given), calm(1), watch=before, now_s=103.0)
        return after.ranks[0]

    slept = replace(LATE, role="idle", work="sleep", look=2, phase_seq=0, at=AT, works=("sleep",), looks=2)
    works: dict[str, Any] = {"role": "works", "worked_ns": 103 * S}
    assert second(SLEEPS, SLEEPS) == slept
    assert second(SLEEPS, replace(SLEEPS, phase_seq=1), turn=1) == replace(slept, look=1, looks=1)
    assert second(SLEEPS, replace(SLEEPS, phase_seq=1)) == replace(slept, phase_seq=1, **works)
    assert second(SLEEPS, replace(SLEEPS, at="load (a.py:9)")) == replace(slept, at="load (a.py", **works)
    assert second(SLEEPS, replace(SLEEPS, at="evaluate (train.py:43)")) == slept, "another line"
    spun = replace(slept, work="computing", works=("sleep", "computing"), busy=True, role="busy")
    assert second(SLEEPS, SPINS) == spun
    moved = replace(spun, phase_seq=1, role="works", worked_ns=103 * S)
    assert second(SPINS, replace(SPINS, phase_seq=1)) == replace(moved, works=("computing",))
    locked = second(LOCKED, replace(LOCKED, phase_seq=1))
    assert (locked.role, locked.work, locked.worked_ns) == ("works", "a lock", 103 * S)
    waits = second(WAITS, replace(WAITS, phase_seq=1))
    assert (waits.role, waits.work, waits.worked_ns) == ("waits", "a collective", 103 * S)
    waits = second(WORKS, SLEEPS)
    assert (waits.role, waits.work, waits.works, waits.worked_ns) == (
        *("idle", "sleep", ("computing", "sleep")),
        100 * S,
    )
    apart = second(SLEEPS_APART, SLEEPS)
    assert (apart.apart, apart.apart_ns) == (False, 100 * S)
    computes = second(SPINS, SPINS, begun=False)
    assert (computes.role, computes.worked_ns, computes.busy) == ("works", 103 * S, False)


def test_a_rank_is_late_since_its_progress_before_the_silence_of_its_member() -> None:
    quiet = replace(there(0, None), silent_s=1.5)
    assert watched(quiet, calm(1)) == ranks(replace(LATE, since_ns=int(96.5 * S)))


def test_a_rank_at_another_step_or_phase_is_observed_from_the_start() -> None:
    before = watched(there(0, SLEEPS_APART), calm(1))
    same = watched(there(0, None), calm(1), watch=before, now_s=105.0)
    assert same == before
    moved_on = watched(there(0, None, phase="backward"), calm(1), watch=before, now_s=105.0)
    assert moved_on == ranks(LateRank(0, 5, "backward", 103 * S, apart_ns=100 * S))
    late = there(0, None)
    assert late.report is not None
    later = replace(
        late, report=replace(late.report, stalls=(RankStall(0, 1, 6, 3, 0, "forward", LATE_S, 0.6),))
    )
    assert watched(later, calm(1), watch=before, now_s=105.0) == ranks(LateRank(0, 6, "forward", 103 * S))
    unbegun = watched(there(0, None, begun=False), calm(1), watch=before)
    assert unbegun == ranks(replace(before.ranks[0], begun=False))


def test_only_members_with_ranks_of_a_running_group_are_observed() -> None:
    assert watched(replace(there(0, SLEEPS), name="m9"), calm(1)) == StallWatch(1, untold_ns=0)
    known = ranks(LATE, untold_ns=7, passed=(LearnedStall("sleep", 9.0),))
    assert watched(there(0, SLEEPS), calm(1), watch=known, phase="securing") == StallWatch(1)
    assert watched(there(0, None), calm(1), watch=replace(known, generation=0)) == ranks(LATE)
    mute = watched(member("m0"), calm(1))
    assert mute == StallWatch(1, untold_ns=100 * S)
    assert watched(member("m0"), calm(1), watch=mute, now_s=103.0) == mute
    assert watched(calm(0), calm(1), watch=mute, now_s=103.0) == StallWatch(1)


# -- other ranks that are watched

DONE = there(1, None, stalled=False, ending=Ending(1, 0))


def test_a_rank_that_has_left_its_loop_is_observed_while_another_is_late() -> None:
    idle = LateRank(1, 5, "idle", 100 * S)
    assert watched(there(0, None), calm(1, phase="idle")) == ranks(LATE, idle)
    assert watched(there(0, None), calm(1, phase="tail")) == ranks(LATE)
    assert watched(calm(0), calm(1, phase="idle")) == StallWatch(1)
    seen = watched(there(0, None), there(1, SLEEPS, phase="idle", stalled=False))
    looked = replace(idle, role="idle", work="sleep", look=1, phase_seq=0, at=AT, works=("sleep",), looks=1)
    assert seen == ranks(LATE, looked)
    again = watched(there(0, None), there(1, SLEEPS, phase="idle", stalled=False), watch=seen, now_s=103.0)
    assert again == seen, "the same inspection"
    done = watched(there(0, None), calm(1, phase="done"), watch=seen, now_s=103.0)
    assert done.ranks[1] == LateRank(1, 5, "done", 103 * S)


@pytest.mark.parametrize(
    "phase", ["joining", "restoring", "data", "forward", "backward", "optimizer", "tail"]
)
def test_a_rank_in_its_loop_is_observed_while_another_has_left(phase: str) -> None:
    assert watched(calm(0, phase=phase), DONE) == ranks(LateRank(0, 5, phase, 100 * S))
    starting = there(0, None, stalled=False, phase=phase)
    assert starting.report is not None
    unborn = launcher(rank(0, state="starting"))
    assert watched(replace(starting, report=replace(starting.report, launcher=unborn)), DONE) == StallWatch(1)


def test_a_rank_in_a_pause_or_at_its_end_is_not_observed_because_another_has_left() -> None:
    for phase in ("eval", "paused", "snapshot", "idle", "done"):
        assert watched(calm(0, phase=phase), DONE) == StallWatch(1)


def test_a_stopped_rank_is_observed_whatever_it_does() -> None:
    stopped = LateRank(1, 5, "eval", 100 * S, role="stopped")
    seen = watched(calm(0), calm(1, stopped=True, phase="eval"))
    assert seen == ranks(stopped)
    assert watched(calm(0), calm(1, stopped=True, phase="eval"), watch=seen, now_s=103.0) == seen
    unknown = member("m1", report("m1", launcher(rank(1, state="starting", stopped=True))))
    assert watched(calm(0), unknown) == ranks(LateRank(1, -1, "starting", 100 * S, role="stopped"))
    older = member("m1", report("m1", launcher(rank(1, generation=0, stopped=True))))
    assert watched(calm(0), older) == StallWatch(1)
    late = watched(calm(0), there(1, SLEEPS, stopped=True))
    assert late == ranks(
        LateRank(
            *(1, 5, "forward", 98 * S, "stopped", "sleep"),
            look=1,
            phase_seq=0,
            at=AT,
            works=("sleep",),
            looks=1,
        )
    )
    two = watched(calm(0, stopped=True), calm(1, stopped=True))
    assert [each.rank for each in two.ranks] == [0, 1]
    was_late = ranks(replace(LATE, rank=1, role="idle"))
    begins = watched(calm(0), calm(1, stopped=True), watch=was_late, now_s=103.0)
    assert begins == ranks(LateRank(1, 5, "forward", 103 * S, role="stopped"))


# -- exceptions, stalls that ended, and time when the supervisor did not run


def raising(number: int, failed_ns: int, step: int = 5, state: str = "failing") -> MemberView:
    hint = Ending(1, 1, fail="exception", failed_ns=failed_ns, unwinding=True, step=step)
    told = report(f"m{number}", launcher(rank(number, hint, state=state)), progress=(progress(number, 5),))
    return member(f"m{number}", told)


def test_an_exception_is_pending_since_it_was_first_reported() -> None:
    seen = watched(calm(0), raising(1, 70))
    assert seen.hints == (PendingException(1, 70, 100 * S),)
    both_raise = watched(raising(0, 60), raising(1, 70), watch=seen, now_s=103.0)
    assert both_raise.hints == (PendingException(0, 60, 103 * S), PendingException(1, 70, 100 * S))
    assert watched(calm(0), raising(1, 71), watch=seen, now_s=103.0).hints == (
        PendingException(1, 71, 103 * S),
    )
    assert watched(calm(0), raising(1, 70, step=4), watch=seen).hints == ()
    assert watched(calm(0), raising(1, 70, state="exited"), watch=seen).hints == ()


@pytest.mark.parametrize(
    ("late", "now_s", "passed"),
    [
        (
            (replace(LATE, works=("sleep", "a lock")),),
            103.0,
            (LearnedStall("sleep", 5.0), LearnedStall("a lock", 5.0)),
        ),
        ((replace(LATE, works=("sleep",)),), 102.96, (LearnedStall("a child process", 7.0),)),
        (
            (
                replace(LATE, works=("a collective", "sleep")),
                replace(LATE, rank=1, works=("a collective", "sleep")),
            ),
            110.26,
            (LearnedStall("sleep", 12.3),),
        ),
        ((replace(LATE, works=("a collective",)),), 108.0, (LearnedStall("a collective", 10.0),)),
        ((LATE,), 108.0, ()),
        (
            (replace(LATE, works=("sleep",)), replace(LATE, rank=1, begun=False)),
            110.0,
            (LearnedStall("a child process", 7.0),),
        ),
    ],
)
def test_a_stall_that_ended_is_learned_once_for_each_kind_of_work(
    late: tuple[LateRank, ...], now_s: float, passed: tuple[LearnedStall, ...]
) -> None:
    before = ranks(*late, passed=(LearnedStall("a child process", 7.0),))
    assert watched(calm(0), calm(1), watch=before, now_s=now_s) == StallWatch(1, passed=passed)
    ended = StallWatch(1, passed=passed)
    assert watched(calm(0), calm(1), watch=ended, now_s=300.0) == ended


def test_time_in_which_the_supervisor_did_not_run_is_not_counted() -> None:
    rests = (RankAtRest(0, 5, 7, 9, 1, 0, 9, 60.0, 3, "here"),)
    late = replace(LATE, worked_ns=99 * S, apart_ns=97 * S)
    watch = ranks(late, hints=(PendingException(0, 60, 90 * S),), rests=rests, untold_ns=80 * S)
    moved = replace(late, since_ns=105 * S, worked_ns=106 * S, apart_ns=104 * S)
    expected = ranks(moved, hints=(PendingException(0, 60, 97 * S),), rests=rests, untold_ns=87 * S)
    assert observation.discount_pause(watch, 7 * S) == expected
    never = observation.discount_pause(ranks(LATE), 7 * S)
    assert (never.ranks[0].apart_ns, never.untold_ns) == (0, 0), "times that were never set must stay unset"


# -- ranks at rest


def test_the_record_of_ranks_at_rest_has_exactly_these_fields() -> None:
    def resting(
        members: tuple[MemberView, ...], before: Any = (), now_s: float = 100.0
    ) -> tuple[RankAtRest, ...]:
        now: View = view(*members, now_s=now_s, settled=True)
        return deadlock.update_resting(before, now)

    backward = RankAtRest(
        *(0, 5, 7, 100 * S, 1, 3, 100 * S, 86_000.0, REDUCES.ends),
        "the backward pass, called by <module> (train.py:31)",
    )
    barrier = replace(backward, rank=1, place="barrier, called by evaluate (train.py:40)")
    first = resting(both(REDUCES, MEETS, asked=3))
    assert first == (backward, barrier)
    assert resting(both(REDUCES, MEETS, asked=3)[::-1]) == first, "in the order of the ranks"
    assert resting(both(REDUCES, MEETS, asked=3), first, 103.0) == first, "the same inspection"
    later = resting(both(REDUCES, MEETS, turn=2, asked=4), first, 103.0)
    assert later == tuple(replace(each, look=2, asked=4, heard_ns=103 * S) for each in first)
    anew: dict[str, Any] = {"since_ns": 103 * S, "heard_ns": 103 * S}
    moved = resting(both(replace(REDUCES, mark=8), MEETS, turn=2, asked=4), first, 103.0)
    assert moved == (replace(backward, mark=8, look=2, asked=4, **anew), later[1])
    restarted = resting(both(REDUCES, MEETS, turn=1, asked=4), later, 105.0)
    assert restarted == tuple(replace(each, since_ns=105 * S, heard_ns=105 * S, asked=4) for each in first), (
        "the launcher has restarted its count"
    )
    nameless = replace(REDUCES, at="all_reduce (torch/distributed/distributed_c10d.py:9)", where="")
    assert resting(both(nameless, MEETS))[0].place == "all_reduce"
    method = replace(REDUCES, at="Work.wait (torch/distributed/distributed_c10d.py:9)", where="f (a.py:1)")
    assert resting(both(method, MEETS))[0].place == "wait, called by f (a.py:1)"


def test_the_description_of_a_deadlock_names_the_place_of_each_rank() -> None:
    def waits(*places: str) -> tuple[RankAtRest, ...]:
        return tuple(RankAtRest(n, 5, 7, 9, 1, 0, 9, 60.0, 3, place) for n, place in enumerate(places))

    begins = "all ranks wait for each other, and nothing is in transit: "
    ends = ". All ranks must enter the same collectives in the same order"
    assert deadlock.describe(waits("a", "a")) == f"{begins}each is in a{ends}"
    assert deadlock.describe(waits("a", "b")) == f"{begins}rank 0 in a, rank 1 in b{ends}"
    four = "rank 0 in a, rank 1 in b, rank 2 in a, rank 3 in a"
    assert deadlock.describe(waits("a", "b", "a", "a")) == f"{begins}{four}{ends}"
    assert deadlock.describe(waits("a", "b", "a", "a", "c", "d")) == f"{begins}{four}, and 2 more{ends}"
    assert deadlock.place(waits("b (x.py:1)", "a (x.py:2)", "b (x.py:9)")) == "a (x.py); b (x.py)"
