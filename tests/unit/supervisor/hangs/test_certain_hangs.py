"""The verdicts about certain hangs, in full: the blamed rank, the sentence, and the time."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from holdfast.protocol.launcher_messages import Ending
from supervisor.hangs import certain_hangs, detection
from supervisor.hangs.verdict import StallVerdict
from supervisor.view.model import Fault, PastFault, Policy, StallWatch, View
from tests.unit.supervisor.hangs.test_deadlock import MEETS, PLACE, REDUCES, twice
from tests.unit.supervisor.hangs.test_detection import POLICY, STOPPED, WAITS, seen, there
from tests.unit.supervisor.hangs.test_evidence import LOCKED
from tests.unit.supervisor.job_views import S, launcher, progress, rank

HERE, PLACED = "evaluate (train.py:42)", "evaluate (train.py)"
LOCK = "it waits for a lock that nothing will release"
SLOW: dict[str, Any] = {"limited": True, "at_s": 600.0, "late_s": 601.0}
LEFT = there(1, None, stalled=False, ending=Ending(7, 0))
THREE: dict[str, Any] = {"placement": ("m0", "m1", "m2"), "world_size": 3}
DEADLOCK = (
    "all ranks wait for each other, and nothing is in transit:"
    " rank 0 in the backward pass, called by <module> (train.py:31),"
    " rank 1 in barrier, called by evaluate (train.py:40)."
    " All ranks must enter the same collectives in the same order"
)


def hang(number: int, signature: str, detail: str, since_s: float = 98.0, **given: Any) -> Fault:
    blamed = f"m{number}" if number >= 0 else ""
    return Fault("hang", number, blamed, 5, int(since_s * S), signature, detail, **given)


def verdict(fault: Fault, act_s: float = 100.0, place: str = "", limit_s: float = 0.0) -> StallVerdict:
    return StallVerdict(
        fault.detail, fault.rank, place=place, limit_s=limit_s, act_ns=int(act_s * S), fault=fault
    )


def stopped(number: int, since_s: float, where: str = "", place: str = "") -> Fault:
    why = f"it is stopped (state T){where}"
    signature = f"hang at {place or where.removeprefix(' in ') or 'forward'}: stopped"
    return hang(number, signature, f"rank {number} hangs: {why}", since_s, place=place, hung=why)


def exceeded(number: int, activity: str, lasted_s: float, limit: str, place: str = "") -> Fault:
    why = f"it has been in {activity} for {lasted_s:.1f} s (limit for this activity: {limit} s)"
    subject = f"rank {number}" if number >= 0 else "the group"
    detail = f"{subject} hangs: {why}"
    return hang(number, f"hang in {activity}", detail, 100.0 - lasted_s, place=place, hung=why)


SITUATIONS: dict[str, tuple[View, StallVerdict]] = {
    "a late rank is stopped": (
        seen(there(0, WAITS), there(1, STOPPED)),
        verdict(stopped(1, 98.0, place=PLACED), place=PLACED),
    ),
    "a late rank is stopped, and the other is being inspected": (
        seen(there(0, None, late_s=1.0), there(1, STOPPED, late_s=0.75, at_s=0.75)),
        verdict(stopped(1, 99.25, place=PLACED), 100.3, PLACED),
    ),
    "a rank is stopped in its pause, and none is late": (
        seen(there(0, None, stalled=False), there(1, None, stalled=False, stopped=True, phase="eval")),
        verdict(stopped(1, 100.0, " in eval"), 101.0),
    ),
    "two ranks are stopped": (
        seen(*(there(n, None, stalled=False, stopped=True, phase="joining") for n in (0, 1))),
        verdict(stopped(0, 100.0, " in joining"), 101.0),
    ),
    "a rank is stopped after its commit": (
        seen(
            there(0, WAITS, stalled=False),
            there(1, STOPPED, stalled=False, stopped=True, phase="tail"),
        ),
        verdict(stopped(1, 100.0, place=PLACED), place=PLACED),
    ),
    "a rank has a lock that is not released": (
        seen(there(0, WAITS), there(1, LOCKED)),
        verdict(
            hang(
                1,
                f"hang at {PLACED}: locked",
                f"rank 1 hangs: {LOCK}, in {HERE}",
                place=PLACED,
                hung=f"{LOCK}, in {HERE}",
            ),
            place=PLACED,
        ),
    ),
    "all ranks wait for such a lock": (
        seen(there(0, LOCKED), there(1, LOCKED)),
        verdict(
            hang(-1, "hang at forward: locked", f"ranks 0, 1 hang in the same way: {LOCK}", hung=LOCK),
        ),
    ),
    "a pause exceeds its limit": (
        seen(there(0, None, phase="eval", limited=True, at_s=1.5), there(1, WAITS)),
        verdict(exceeded(0, "eval", 2.0, "1.5"), limit_s=1.5),
    ),
    "first steps exceed their limit, and one rank works": (
        seen(there(0, replace(WAITS, phase_seq=4), **SLOW), there(1, STOPPED, **SLOW)),
        verdict(exceeded(1, "forward", 601.0, "600", PLACED), place=PLACED, limit_s=600.0),
    ),
    "first steps exceed their limit, and all ranks look alike": (
        seen(there(0, WAITS, **SLOW), there(1, WAITS, **SLOW)),
        verdict(exceeded(-1, "forward", 601.0, "600"), limit_s=600.0),
    ),
    "first steps exceed their limit, and only one of them may be a wait": (
        seen(there(0, WAITS, **SLOW), there(1, None, phase="optimizer", **SLOW)),
        verdict(exceeded(1, "optimizer", 601.0, "600"), limit_s=600.0),
    ),
    "a rank has left in the middle of its loop": (
        seen(there(0, WAITS), LEFT),
        verdict(
            Fault(
                *("crash", 1, "m1", 5, 7, "exit 0"),
                "rank 1 exited with code 0 in the middle of its loop, after step 5",
                code=1,
            ),
        ),
    ),
    "all ranks wait for each other": (
        twice(REDUCES, MEETS),
        verdict(hang(-1, f"deadlock at {PLACE}", DEADLOCK, place=PLACE), 100.5, PLACE),
    ),
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_each_certain_hang_has_exactly_its_verdict(name: str) -> None:
    view, expected = SITUATIONS[name]
    found = detection.judge(view, POLICY)
    assert found is not None
    assert asdict(found) == asdict(expected)


def left_without_loop(number: int, step: int) -> Any:
    """Return a member whose rank has exited with 0, of a script whose loop Holdfast does not know."""
    state = launcher(rank(number, Ending(7, 0)), joins=False)
    pages = (progress(number, step, -1),)
    return there(number, None, stalled=False, ending=Ending(7, 0), launcher=state, progress=pages)


@pytest.mark.parametrize("late", [True, False], ids=["late", "not late"])
def test_a_rank_that_exited_with_0_is_at_fault_while_another_waits_for_it(
    late: bool,
) -> None:
    meets = replace(WAITS, at="all_reduce (torch/distributed/distributed_c10d.py:9)")
    view = seen(
        there(0, meets, stalled=late), there(1, meets, stalled=late), left_without_loop(2, 4), **THREE
    )
    detail = "rank 2 exited with 0 at step 4 while rank 0 waits for it at step 5"
    begun_s = 98.0 if late else 100.0
    fault = Fault("crash", 2, "m2", 4, int(begun_s * S), "exited with 0 at step 4", detail, code=0)
    act_s = begun_s + certain_hangs.PEER_LEFT_S
    assert detection.judge(view, POLICY) == verdict(fault, act_s)


def test_a_rank_that_waits_outside_a_collective_may_work_without_the_one_that_has_left() -> None:
    view = seen(there(0, WAITS), there(1, WAITS), left_without_loop(2, 4), **THREE)
    assert certain_hangs.abandoned(view) is None
    assert certain_hangs.abandoned(seen(there(0, WAITS), there(1, WAITS))) is None, "no rank has left"


@pytest.mark.parametrize("early_s", [5.0, 0.0], ids=["early", "late"])
def test_a_rank_that_waits_for_its_device_has_time_after_the_others_have_left(early_s: float) -> None:
    """After the last commit, rank 0 evaluates on its GPU, and rank 1 has nothing more to do."""
    waits = replace(WAITS, at="synchronize (torch/cuda/__init__.py:985)")
    late = {"phase": "tail", "early_s": early_s, "late_s": 6.0, "at_s": 180.0 if early_s else 5.0}
    found = detection.judge(seen(there(0, waits, **late), left_without_loop(1, 5)), POLICY)
    assert found is not None
    assert found.limit_s == (180.0 if early_s else POLICY.stall_limit_s)
    assert found.act_ns is not None
    assert found.act_ns > 100 * S


def test_a_stall_beyond_its_limit_is_a_hang_although_its_rank_is_not_watched_yet() -> None:
    view = replace(seen(there(0, WAITS), there(1, WAITS, **SLOW)), watch=StallWatch(1))
    told = view.members[1].report
    assert told is not None
    found = certain_hangs.exceeded(view, list(told.stalls))
    fault = replace(exceeded(1, "forward", 601.0, "600", "<module> (train.py)"), at_ns=100 * S)
    assert asdict(found) == asdict(verdict(fault, place="<module> (train.py)", limit_s=600.0))


@pytest.mark.parametrize(("times", "limit_s"), [(1, 120), (2, 240)])
def test_the_limit_of_a_repeated_deadlock_doubles_with_each_restart(times: int, limit_s: int) -> None:
    past = PastFault("hang", -1, "", 5, "deadlock", 0, 1, place=PLACE)
    other = replace(past, kind="crash"), replace(past, place="elsewhere")
    view = twice(REDUCES, MEETS, history=(past,) * times + other)
    again = f"the group hangs again in step 5: {DEADLOCK}"
    detail = f"{again}; the limit is now {limit_s} s, because a restart here did not help"
    fault = hang(-1, f"deadlock at {PLACE}", detail, place=PLACE)
    expected = StallVerdict(
        *(again, -1, PLACE, "", float(limit_s)),
        *((98 + limit_s) * S, (98 + limit_s // 2) * S, fault),
    )
    assert detection.judge(view, POLICY) == expected
    at_once = detection.judge(view, replace(POLICY, hang_floor_s=0.5))
    assert at_once == verdict(replace(fault, detail=again), 100.5, PLACE)


def test_the_step_of_a_deadlock_is_the_lowest_step_of_any_rank() -> None:
    view = twice(REDUCES, MEETS)
    rests = (replace(view.watch.rests[0], step=6), replace(view.watch.rests[1], step=4))
    found = certain_hangs.deadlocked(view, Policy(), rests)
    assert found.fault is not None
    assert found.fault.step == 4


@pytest.mark.parametrize(
    ("given", "repeated"),
    [({}, True), ({"kind": "crash"}, False), ({"place": "x"}, False), ({"step": 4}, False)],
)
def test_a_hang_is_a_repetition_if_the_last_one_was_at_this_place_and_step(
    given: dict[str, Any], repeated: bool
) -> None:
    past = replace(PastFault("hang", 0, "m0", 5, "hang", 0, 1, place=PLACED), **given)
    view = seen(there(0, LOCKED), there(1, WAITS), history=(past,))
    assert certain_hangs.is_repeated(view, view.watch.ranks[0]) is repeated
    unknown = seen(there(0, None), there(1, WAITS), history=(replace(past, place=""),))
    assert not certain_hangs.is_repeated(unknown, unknown.watch.ranks[0]), "the place is unknown"
