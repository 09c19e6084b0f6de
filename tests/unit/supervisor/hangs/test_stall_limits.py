"""Each stall that may be work has exactly this verdict: limit, reason, and message to the user."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from holdfast.protocol.launcher_messages import RankInspection
from supervisor.hangs import detection, group_reports, hung_rank, observation, stall_limits
from supervisor.hangs.verdict import APART, UNBEGUN, StallVerdict
from supervisor.view.model import Fault, LearnedStall, MemberView, PastFault, Policy, View
from tests.unit.supervisor.hangs.test_detection import (
    COMPUTES_APART,
    ONE,
    POLICY,
    SLEEPS,
    SLEEPS_APART,
    SPINS,
    WAITS,
    WORKS,
    seen,
    there,
    unbegun,
)
from tests.unit.supervisor.hangs.test_evidence import LOCKED, PLAIN
from tests.unit.supervisor.job_views import S, member, report

PLACE = "evaluate (train.py)"
FLOOR = replace(POLICY, hang_floor_s=1.0)
THREE: dict[str, Any] = {"placement": ("m0", "m1", "m2"), "world_size": 3}
SLEPT = "rank 0 has been in evaluate (train.py:42) (sleeping) since step 5"
COMPUTED = "rank 0 has been in evaluate (train.py:42) (computing) since step 5"
ALIKE = "ranks 0, 1 make no progress after step 5, and no evidence singles one out"
AGAIN = "rank 0 hangs again in step 5: it has been in evaluate (train.py:42) (waiting for a lock)"
BEFORE = ", because a restart here did not help"
WORKED = ", extended because there are signs of work"
LEARNED = ", learned from stalls that ended without a restart"
PAST = PastFault("hang", 0, "m0", 3, "stall", 0, 1, place=PLACE, work="sleep")


def limited(
    why: str,
    work: str,
    limit_s: float,
    source: str = "",
    number: int = 0,
    place: str = PLACE,
    **given: Any,
) -> StallVerdict:
    """Return the verdict about a stall with a limit. By default, the last progress was at 98 s."""
    since_s, warn_s = given.pop("since_s", 98.0), given.pop("warn_s", limit_s / 2)
    fault = Fault(
        *("hang", number, f"m{number}" if number >= 0 else "", 5, int(since_s * S)),
        given.pop("signature", f"stall at {place or 'forward'}"),
        f"{why}; the limit is {'now ' if source == BEFORE else ''}{limit_s:.0f} s{source}",
        place=place,
        work=given.pop("fault_work", work),
    )
    return StallVerdict(
        *(why, number, given.pop("shown", place), work, limit_s),
        *(int((since_s + given.pop("act_s", limit_s)) * S), int((since_s + warn_s) * S), fault),
        latest_s=given.pop("latest_s", None),
    )


def unlimited(why: str, place: str, work: str, warn_s: float) -> StallVerdict:
    return StallVerdict(why, 0, place=place, work=work, warn_ns=int(warn_s * S))


def at_floor(why: str, number: int, place: str) -> StallVerdict:
    blamed = f"m{number}" if number >= 0 else ""
    detail = f"{why}; --hang-floor is exceeded"
    fault = Fault("hang", number, blamed, 5, 98 * S, f"hang at {place}", detail, place=place)
    return StallVerdict(why, number, place=place, limit_s=0.0, act_ns=100 * S, fault=fault)


SITUATIONS: dict[str, tuple[View, Policy, StallVerdict]] = {
    "it sleeps": (seen(there(0, SLEEPS), there(1, WAITS)), POLICY, limited(SLEPT, "sleep", 60.0)),
    "it waits for something unknown": (
        seen(there(0, PLAIN), there(1, WAITS)),
        POLICY,
        limited(SLEPT.replace(" (sleeping)", ""), "unknown", 60.0),
    ),
    "it works": (
        seen(there(0, WORKS, late_s=40.0), there(1, WAITS, late_s=40.0)),
        POLICY,
        limited(COMPUTED, "computing", 100.0, WORKED, since_s=60.0, latest_s=600.0),
    ),
    "it computes in one function": (
        seen(there(0, SPINS), there(1, WAITS)),
        POLICY,
        limited(COMPUTED, "computing", 180.0, WORKED),
    ),
    "it counts as late only after minutes": (
        seen(there(0, SLEEPS, at_s=90.0), there(1, WAITS, at_s=300.0)),
        POLICY,
        limited(SLEPT, "sleep", 90.0),
    ),
    "a stall of its kind has ended": (
        seen(
            there(0, SLEEPS),
            there(1, WAITS),
            learned=(LearnedStall("sleep", 40.0), LearnedStall("a file system", 500.0)),
        ),
        POLICY,
        limited(SLEPT, "sleep", 120.0, LEARNED),
    ),
    "a short stall of its kind has ended": (
        seen(there(0, SLEEPS), there(1, WAITS), learned=(LearnedStall("sleep", 8.0),)),
        POLICY,
        limited(SLEPT, "sleep", 60.0, LEARNED),
    ),
    "it was restarted here": (
        seen(there(0, SLEEPS), there(1, WAITS), history=(PAST, replace(PAST, kind="crash"), PAST)),
        POLICY,
        limited(SLEPT, "sleep", 240.0, BEFORE),
    ),
    "a lock was restarted here": (
        seen(there(0, LOCKED), there(1, WAITS), history=(replace(PAST, step=5, work=""),)),
        POLICY,
        limited(
            *(AGAIN, "a lock", 120.0, BEFORE),
            signature=f"hang at {PLACE}: locked",
            fault_work="",
        ),
    ),
    "all wait in one collective": (
        seen(there(0, WAITS), there(1, WAITS)),
        POLICY,
        limited(ALIKE, "a collective", 60.0, number=-1, place=""),
    ),
    "nobody could be inspected": (
        seen(there(0, None, late_s=70.0), there(1, None, late_s=70.0)),
        POLICY,
        limited(ALIKE, "unknown", 60.0, number=-1, place="", since_s=30.0),
    ),
    "two of three sleep": (
        seen(there(0, SLEEPS), there(1, SLEEPS), there(2, WAITS), **THREE),
        POLICY,
        limited(ALIKE.replace("0, 1", "0, 1, 2"), "sleep", 60.0, number=-1, place=""),
    ),
    "one is behind the one that computes": (
        seen(there(0, SLEEPS), there(1, replace(SPINS, phase_seq=4)), there(2, WAITS), **THREE),
        POLICY,
        limited(SLEPT, "sleep", 60.0),
    ),
    "no step was done, and it sleeps": (
        seen(unbegun(0, SLEEPS, 301.0), unbegun(1, WAITS, 301.0)),
        POLICY,
        limited(SLEPT, "sleep", 600.0, shown=UNBEGUN, since_s=-201.0),
    ),
    "no step was done, and it works": (
        seen(unbegun(0, WORKS, 301.0), unbegun(1, WAITS, 301.0)),
        POLICY,
        limited(COMPUTED, "computing", 901.0, WORKED, shown=UNBEGUN, since_s=-201.0, warn_s=300.0),
    ),
    "this supervisor has just taken over": (
        seen(there(0, SLEEPS, late_s=300.0), there(1, WAITS, late_s=300.0), since_ns=99 * S),
        POLICY,
        limited(SLEPT, "sleep", 60.0, since_s=-200.0, act_s=309.0),
    ),
    "the user has set a limit, and it sleeps": (
        seen(there(0, SLEEPS), there(1, WAITS)),
        FLOOR,
        at_floor(SLEPT, 0, PLACE),
    ),
    "the user has set a limit, and all wait in one collective": (
        seen(there(0, WAITS), there(1, WAITS)),
        FLOOR,
        at_floor(ALIKE, -1, ""),
    ),
    "it is alone": (
        seen(there(0, SLEEPS, late_s=50.0), **ONE),
        POLICY,
        unlimited(f"{SLEPT}; no other rank waits for it", PLACE, "sleep", 110.0),
    ),
    "no rank waits for another": (
        seen(there(0, SLEEPS_APART, late_s=50.0), there(1, COMPUTES_APART, late_s=50.0)),
        POLICY,
        unlimited(f"{SLEPT}; no rank waits for another", APART, "sleep", 110.0),
    ),
    "it is alone, and no step was done": (
        seen(unbegun(0, WORKS, 301.0), **ONE),
        POLICY,
        unlimited(f"{COMPUTED}; no other rank waits for it", UNBEGUN, "computing", 99.0),
    ),
    "no step was done, and no rank waits for another": (
        seen(unbegun(0, SLEEPS, 301.0), unbegun(1, WORKS, 301.0)),
        POLICY,
        unlimited(f"{SLEPT}; no other rank waits for it", UNBEGUN, "sleep", 99.0),
    ),
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_each_stall_that_may_be_work_has_exactly_its_verdict(name: str) -> None:
    view, policy, expected = SITUATIONS[name]
    found = detection.judge(view, policy)
    assert found is not None
    assert asdict(found) == asdict(expected)


def after_work_apart(inspection: RankInspection, now_s: float = 105.0) -> View:
    """Return a stall of 1000 s whose first inspections, at 100 s, showed that no rank waits for another."""
    late: dict[str, Any] = {"late_s": 1000.0}
    before = seen(there(0, SLEEPS_APART, **late), there(1, SLEEPS_APART, **late))
    now = replace(
        before,
        now_ns=int(now_s * S),
        members=(there(0, WAITS, turn=2, **late), there(1, inspection, turn=2, **late)),
    )
    return replace(now, watch=observation.update(before.watch, now))


def test_time_in_which_no_rank_waited_for_another_extends_each_part_of_a_limit() -> None:
    """The last progress was at -900 s, and the ranks were apart until 100 s."""
    for inspection, limit_s in ((SLEEPS, 1060.0), (SPINS, 1180.0), (replace(WORKS, phase_seq=9), 1065.0)):
        found = detection.judge(after_work_apart(inspection), POLICY)
        assert found is not None
        assert (found.limit_s, found.act_ns) == (limit_s, int((limit_s - 900) * S))
        assert found.warn_ns == int((100 + (limit_s - 1000) / 2) * S)
    worked = after_work_apart(replace(WORKS, phase_seq=9), 1000.0)
    at_most = detection.judge(worked, POLICY)
    assert at_most is not None
    assert at_most.limit_s == 1000.0 + stall_limits.MOST_FACTOR * 60.0
    short = detection.judge(after_work_apart(SLEEPS), replace(POLICY, stall_limit_s=9.0, look_s=4.5))
    assert short is not None
    assert short.limit_s == 1000.0 + stall_limits.TWICE_S + 4.5


def test_one_rank_that_may_have_waited_for_another_makes_the_whole_time_count() -> None:
    late: dict[str, Any] = {"late_s": 30.0}
    for first, second in ((SLEEPS_APART, SLEEPS), (SLEEPS, SLEEPS_APART)):
        found = detection.judge(seen(there(0, first, **late), there(1, second, **late)), POLICY)
        assert found is not None
        assert found.limit_s == 60.0


def test_ranks_count_as_independent_while_the_inspections_that_showed_it_are_recent() -> None:
    view = seen(there(0, SLEEPS_APART), there(1, COMPUTES_APART))
    for after_s, apart in ((9.999, True), (10.0, False)):
        assert stall_limits.are_apart(replace(view, now_ns=int((100 + after_s) * S)), POLICY) is apart
    one = seen(there(0, SLEEPS_APART), there(1, None, stalled=False))
    assert not stall_limits.are_apart(one, POLICY), "the other rank was not inspected"
    alone = seen(there(0, SLEEPS_APART), member("m1", report("m1", None)))
    assert not stall_limits.are_apart(alone, POLICY)


def rests(number: int = 0, **given: Any) -> MemberView:
    made = there(number, WAITS, **{name: given.pop(name) for name in ("first_step",) if name in given})
    assert made.report is not None
    [page] = made.report.progress
    return replace(made, report=replace(made.report, progress=(replace(page, **given),)))


@pytest.mark.parametrize(
    ("first", "learned", "horizon_s"),
    [
        (rests(), (), 60.0),
        (rests(first_step=True), (), 600.0),
        (rests(pause_left_s=1800.0), (), 1799.0),
        (rests(pause_left_s=60.5), (), 60.0),
        (rests(), (LearnedStall("a collective", 50.0), LearnedStall("sleep", 900.0)), 150.0),
        (rests(), (LearnedStall("a collective", 5.0),), 60.0),
        (rests(first_step=True), (LearnedStall("a collective", 300.0),), 900.0),
    ],
)
def test_a_group_may_stay_in_collectives_until_a_limit_or_the_end_of_a_pause(
    first: MemberView, learned: tuple[LearnedStall, ...], horizon_s: float
) -> None:
    for members in ((first, rests(1)), (rests(1), first)):
        assert stall_limits.horizon_s(seen(*members, learned=learned), POLICY) == horizon_s


def test_a_limit_doubles_with_each_restart_up_to_a_thousand_times() -> None:
    factors = [stall_limits.doublings(times) for times in (0, 1, 2, 9, 10, 11, 500)]
    assert factors == [1, 2, 4, 512, 1024, 1024, 1024]


@pytest.mark.parametrize(
    ("past", "same"),
    [
        (PAST, True),
        (replace(PAST, kind="crash"), False),
        (replace(PAST, work=""), True),  # a restart at the same place
        (replace(PAST, place="load (data.py)"), False),
        (replace(PAST, place="load (data.py)", step=5), True),
        (replace(PAST, place="load (data.py)", step=5, work=""), False),
        (replace(PAST, place=""), True),
        (replace(PAST, place="", work=""), False),
    ],
)
def test_only_a_restart_for_the_same_stall_doubles_the_limit(past: PastFault, same: bool) -> None:
    found = detection.judge(seen(there(0, SLEEPS), there(1, WAITS), history=(past,)), POLICY)
    assert found is not None
    assert found.limit_s == (120.0 if same else 60.0)


def test_at_an_unknown_place_each_restart_for_work_may_have_been_for_the_same_stall() -> None:
    for past, limit_s in ((PAST, 120.0), (replace(PAST, work=""), 60.0)):
        found = detection.judge(seen(there(0, WAITS), there(1, WAITS), history=(past,)), POLICY)
        assert found is not None
        assert (found.place, found.limit_s) == ("", limit_s)


def test_only_a_rank_that_all_evidence_singles_out_is_named() -> None:
    view = seen(there(0, SLEEPS), there(1, SLEEPS), there(2, WAITS), **THREE)
    late = list(view.watch.ranks)
    assert hung_rank.name_rank(view, late[:1]) == late[0]
    assert hung_rank.name_rank(view, late[:2]) == replace(late[0], rank=-1), "they look alike"
    assert hung_rank.name_rank(view, late[1:]) == late[1], "it does not wait"
    unseen = seen(there(0, SLEEPS), there(1, WAITS), there(2, None), **THREE)
    assert hung_rank.name_rank(unseen, list(unseen.watch.ranks)) == replace(unseen.watch.ranks[0], rank=-1)
    assert group_reports.longest_limit_s({}) == 0.0
