"""A first step has a generous limit, but a proof of a hang, and the same hang again, are acted on sooner."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.protocol.launcher_messages import RankInspection
from supervisor.decision import remedy
from supervisor.hangs import detection, observation, sentences
from supervisor.hangs.verdict import StallVerdict
from supervisor.view.model import LearnedStall, MemberView, PastFault, Policy, StallWatch, View
from tests.unit.supervisor.hangs.test_deadlock import MEETS, PLACE, REDUCES, twice
from tests.unit.supervisor.hangs.test_detection import (
    POLICY,
    SLEEPS,
    SPINS,
    WAITS,
    WORKS,
    judged,
    seen,
    there,
)
from tests.unit.supervisor.hangs.test_evidence import LOCKED, PLAIN
from tests.unit.supervisor.job_views import S

FIRST: dict[str, Any] = {"first_step": True, "early_s": 5.0, "late_s": 6.0, "at_s": 600.0}
SLEPT = PastFault("hang", 1, "m1", 5, "stall at evaluate (train.py)", 0, 1, place="evaluate (train.py)")
HERE = replace(SLEPT, work="sleep")
ALONE = replace(SLEEPS, meets_unseen=False)
STILL = [SLEEPS, LOCKED, PLAIN]


def at_first(*inspections: RankInspection | None, **given: Any) -> tuple[MemberView, ...]:
    return tuple(there(number, each, **{**FIRST, **given}) for number, each in enumerate(inspections))


def view_of(*inspections: RankInspection, watch: StallWatch | None = None, **given: Any) -> View:
    """Return the view after two equal inspections of ranks, `now_s` after the start of their first step."""
    now_s, step = given.pop("now_s", 6.0), given.pop("step", 5)
    of_rank = {"step": step, "begun": given.pop("begun", True)}
    shown = tuple(replace(each, step=step) for each in inspections)
    before = watch or seen(*at_first(*shown, **of_rank), **given).watch
    turn = max((each.look for each in before.ranks), default=0) + 1
    later = seen(*at_first(*shown, turn=turn, **of_rank), watch=before, **given)
    later = replace(later, now_ns=int((94 + now_s) * S))
    return replace(later, watch=observation.update(later.watch, later))


def verdict(*inspections: RankInspection, policy: Policy = POLICY, **given: Any) -> StallVerdict:
    found = detection.judge(view_of(*inspections, **given), policy)
    assert found is not None
    return found


@pytest.mark.parametrize("rank", [0, 1])
def test_a_proof_is_acted_on_in_the_first_step_after_a_restart(rank: int) -> None:
    found = verdict(*((LOCKED, WAITS) if rank == 0 else (WAITS, LOCKED)))
    assert found.fault is not None
    assert (found.rank, found.act_ns) == (rank, 100 * S)
    assert found.fault.detail.startswith(f"rank {rank} hangs: it waits for a lock that nothing will release")
    once = judged(*at_first(WAITS, LOCKED))
    assert once is not None
    assert once.act_ns is None, "one inspection does not show that the rank stays where it is"


def test_a_proof_at_a_cold_start_is_only_announced() -> None:
    found = verdict(WAITS, LOCKED, step=0)
    assert (found.act_ns, found.fault, found.limit_s) == (None, None, 600.0)
    assert found.warn_ns == 124 * S
    now = twice(REDUCES, MEETS, step=0, **FIRST)
    assert now.watch.rests
    dead = detection.judge(now, POLICY)
    assert dead is not None
    assert (dead.act_ns, dead.fault, dead.warn_ns) == (None, None, now.now_ns)
    assert "all ranks wait for each other" in sentences.warning(now, dead)
    resumed = detection.judge(twice(REDUCES, MEETS, **FIRST), POLICY)
    assert resumed is not None
    assert resumed.fault is not None
    assert resumed.act_ns is not None
    assert resumed.act_ns < 101 * S


@pytest.mark.parametrize("inspection", [*STILL[:1], *STILL[2:], SPINS, WORKS])
@pytest.mark.parametrize("step", [0, 5])
def test_possible_work_in_a_first_step_is_left_alone_until_its_limit(
    inspection: RankInspection, step: int
) -> None:
    """Nothing tells a wait for a download, an input() or compile workers from a hang."""
    for now_s in (6.0, 599.0):
        found = verdict(WAITS, inspection, now_s=now_s, step=step)
        assert (found.act_ns, found.fault, found.limit_s) == (None, None, 600.0)
    other = (
        *(replace(HERE, step=4), replace(HERE, rank=0), replace(HERE, place="load (data.py)")),
        *(replace(HERE, kind="crash"), replace(HERE, place="")),
    )
    found = verdict(WAITS, inspection, now_s=599.0, step=step, history=other)
    assert (found.act_ns, found.fault) == (None, None)


@pytest.mark.parametrize("inspection", STILL)
@pytest.mark.parametrize(("times", "limit_s"), [(1, 120.0), (2, 240.0), (3, 480.0), (4, 600.0)])
def test_the_same_hang_again_has_the_limit_of_a_repeated_stall(
    inspection: RankInspection, times: int, limit_s: float
) -> None:
    found = verdict(WAITS, inspection, history=(HERE,) * times)
    assert (found.limit_s, found.act_ns) == (limit_s, int((94 + limit_s) * S))
    assert found.fault is not None
    assert found.fault.detail.startswith(
        "rank 1 hangs again in step 5: it has been in evaluate (train.py:42)"
    )
    assert (found.fault.signature, found.fault.work) == (HERE.signature, ""), "it counts as the same failure"
    assert found.act_ns is not None
    assert found.warn_ns is not None
    assert found.warn_ns < found.act_ns
    words = sentences.warning(view_of(WAITS, inspection, history=(HERE,) * times), found)
    assert f"while rank 0 waits in <module> (train.py:9); Holdfast restarts it at {limit_s:.0f} s" in words


def test_the_same_hang_again_is_left_alone_while_it_may_be_work() -> None:
    calls = ("file", "child", "network", "poll")  # input() reads a file
    outside = [replace(PLAIN, calls=(each,)) for each in calls]
    for inspection in (WORKS, SPINS, replace(PLAIN, children=1), replace(PLAIN, io_bytes=9), *outside):
        found = verdict(WAITS, inspection, now_s=599.0, history=(HERE,))
        assert (found.act_ns, found.fault) == (None, None)
    traced = verdict(WAITS, replace(SLEEPS, traced=True), now_s=599.0, history=(HERE,))
    assert traced.act_ns is None
    apart = verdict(ALONE, ALONE, history=(HERE, replace(HERE, rank=0), replace(HERE, rank=-1)))
    assert apart.act_ns is None, "no rank waits for another"
    unbegun = verdict(WAITS, SLEEPS, begun=False, step=0, history=(replace(HERE, step=0),))
    assert unbegun.act_ns is None


@pytest.mark.parametrize(
    ("at", "is_acted_on"),
    [("all_reduce (torch/distributed/d.py:9)", True), ("synchronize (torch/cuda/a.py:9)", False)],
)
def test_a_rank_that_waits_for_its_device_again_is_left_alone(at: str, is_acted_on: bool) -> None:
    waits = replace(WAITS, at=at, where="evaluate (train.py:42)")
    behind = replace(waits, phase_seq=-1)  # this makes rank 1 the one that the others wait for
    found = verdict(replace(waits, where="<module> (train.py:9)"), behind, now_s=500.0, history=(HERE,))
    assert found.rank == 1
    assert (found.act_ns is not None) is is_acted_on


def test_signs_of_work_and_long_stalls_in_the_past_delay_the_limit_of_the_same_hang() -> None:
    at_work = view_of(WAITS, WORKS, history=(HERE,), now_s=50.0)
    still = view_of(WAITS, SLEEPS, history=(HERE,), now_s=56.0, watch=at_work.watch)
    found = detection.judge(still, POLICY)
    assert found is not None
    assert (found.limit_s, found.act_ns) == (120.0, (100 + 120) * S), "work was last seen at 100 s"
    learned = (LearnedStall("sleep", 50.0),)
    assert verdict(WAITS, SLEEPS, history=(HERE,), learned=learned).limit_s == 300.0


def test_a_rank_that_restores_holds_up_the_others_within_its_own_limit() -> None:
    held = there(0, WAITS, stalled=False, phase="restoring", first_step=True)
    found = judged(held, *at_first(WAITS, SLEEPS)[1:], history=(HERE,))
    assert found is not None
    assert found.act_ns is None
    assert "is restoring its state" in found.why


def test_the_user_learns_early_which_rank_waits_where() -> None:
    now = view_of(WAITS, SLEEPS, now_s=40.0)
    found = detection.judge(now, POLICY)
    assert found is not None
    assert found.warn_ns == 124 * S, "half of the limit of a later step"
    assert sentences.warning(now, found) == (
        "rank 1 has been in evaluate (train.py:42) (sleeping) since step 5: the first step has taken 40 s"
        " while rank 0 waits in <module> (train.py:9); it may take until 600 s (--first-step-timeout)"
    )
    unjoined = view_of(WAITS, SLEEPS, now_s=40.0, step=0, begun=False)
    told = detection.judge(unjoined, POLICY)
    assert told is not None
    assert (told.warn_ns, told.act_ns) == (124 * S, None)
    assert ": no step of a torch.optim optimizer for 40 s while rank 0" in sentences.warning(unjoined, told)


def test_ranks_that_may_work_or_serve_requests_cause_no_early_note() -> None:
    assert verdict(WAITS, WORKS, now_s=29.0).warn_ns == (100 + 30) * S, "work was seen at 100 s"
    assert verdict(WAITS, SPINS).warn_ns == (94 + 90) * S
    serving = verdict(ALONE, ALONE, step=0, begun=False, now_s=200.0)
    assert (serving.warn_ns, serving.limit_s) == (None, None)
    assert verdict(ALONE, ALONE).warn_ns == (94 + 60) * S


def test_nothing_is_learned_from_a_first_step() -> None:
    before = view_of(WAITS, SLEEPS, now_s=100.0)
    trains = seen(there(0, None, stalled=False), there(1, None, stalled=False), watch=before.watch)
    assert not trains.watch.ranks
    assert trains.watch.passed == ()
    usual = seen(there(0, WAITS, late_s=50.0), there(1, SLEEPS, late_s=50.0))
    trains = seen(there(0, None, stalled=False), there(1, None, stalled=False), watch=usual.watch)
    assert [each.work for each in trains.watch.passed] == ["sleep"]


def test_a_deterministic_hang_ends_the_run_at_the_fifth_time() -> None:
    history: tuple[PastFault, ...] = (HERE,)
    for times in range(2, 6):
        now = view_of(WAITS, SLEEPS, history=history, now_s=590.0)
        found = detection.judge(now, POLICY)
        assert found is not None
        assert found.fault is not None
        end = remedy.reason_to_stop(now, POLICY, found.fault)
        assert (end is not None) is (times == 5)
        history += (replace(HERE, work=""),)
    assert end is not None
    assert "hangs again in step 5" in end.why
    assert "the same failure 5 times at step 5; this is a bug, not a fault" in end.why


def test_a_first_step_that_exceeds_its_limit_counts_as_the_hang_that_it_repeats() -> None:
    over = {"limited": True, "early_s": 0.0, "late_s": 601.0}
    reads = replace(PLAIN, calls=("file",))
    for history, inspection, signature in (
        ((), SLEEPS, "hang in forward"),
        ((HERE,), SLEEPS, HERE.signature),
        ((HERE,), reads, "hang in forward"),
    ):
        found = judged(*at_first(WAITS, inspection, **over), history=history)
        assert found is not None
        assert found.fault is not None
        assert (found.fault.rank, found.fault.signature) == (1, signature)
        assert ("hangs again in step 5: " in found.fault.detail) is bool(history)


def test_a_deadlock_again_in_a_first_step_has_at_most_its_limit() -> None:
    past = PastFault("hang", -1, "", 5, "deadlock", 0, 1, place=PLACE)
    for times, limit_s in ((1, 120.0), (4, 600.0)):
        found = detection.judge(twice(REDUCES, MEETS, history=(past,) * times, **FIRST), POLICY)
        assert found is not None
        assert found.limit_s == limit_s
