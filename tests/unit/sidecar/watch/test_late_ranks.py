import math
import random
from bisect import bisect_left, insort
from collections import deque
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.protocol.progress import FailKind, Phase, Progress
from sidecar.watch.late_ranks import (
    KEPT,
    HangPolicy,
    Stall,
    StepStats,
    early_limit_s,
    left_s,
    limit_s,
    pause_label,
    since_ns,
    stalled,
)

S = 1_000_000_000
POLICY = HangPolicy()
STEADY = StepStats.of((0.1,) * KEPT)
AT_WORK = Progress(
    generation=1, rank=3, local_rank=1, pid=77, phase=Phase.FORWARD, phase_seq=1,
    phase_since_ns=100 * S, step_started_ns=100 * S, write_seq=0, step=500, steps_done=500,
    times_written=499, loss=1.0, grad_norm=1.0, samples=0, tokens=0, flops=0.0, flags=0,
    position=-1, first_step_s=2.0, data_ns=0, forward_ns=0, pause_limit_s=0.0, pause_label="", failed_ns=0,
    fail_kind=FailKind.NONE, fail_code=0, snapshot_step=-1, snapshot_cost_s=0.0,
)  # fmt: skip
FIRST = replace(AT_WORK, steps_done=0)


def after(seconds: float) -> int:
    return 100 * S + round(seconds * S)


@pytest.mark.parametrize(
    ("progress", "stats", "expected_s"),
    [
        pytest.param(AT_WORK, STEADY, 0.9, id="usual step"),
        pytest.param(replace(AT_WORK, phase=Phase.OPTIMIZER), STEADY, 0.9, id="any phase of it"),
        pytest.param(AT_WORK, StepStats.of((0.1,) * 20), 0.9, id="just enough samples"),
        pytest.param(AT_WORK, StepStats.of((0.1,) * 19), 5.0, id="few fast samples"),
        pytest.param(AT_WORK, StepStats.of((2.0, 2.0)), 20.0, id="few slow samples"),
        pytest.param(AT_WORK, StepStats(), 600.0, id="no samples"),
        pytest.param(FIRST, STEADY, 600.0, id="first step"),
        pytest.param(replace(FIRST, phase=Phase.JOINING), STEADY, 600.0, id="joining"),
        pytest.param(replace(FIRST, phase=Phase.RESTORING), STEADY, 600.0, id="restoring"),
        pytest.param(replace(AT_WORK, phase=Phase.EVAL), STEADY, 1800.0, id="undeclared limit"),
        pytest.param(
            replace(AT_WORK, phase=Phase.CHECKPOINT, pause_limit_s=60.0),
            STEADY,
            60.0,
            id="declared",
        ),
        pytest.param(replace(FIRST, phase=Phase.PAUSED), STEADY, 1800.0, id="paused at first"),
        pytest.param(replace(AT_WORK, phase=Phase.IDLE), STEADY, math.inf, id="idle"),
        pytest.param(replace(AT_WORK, phase=Phase.DONE), STEADY, math.inf, id="done"),
        pytest.param(replace(AT_WORK, phase=Phase.DONE, failed_ns=100 * S), STEADY, 30.0, id="failed"),
    ],
)
def test_each_activity_is_late_exactly_when_its_limit_is_exceeded(
    progress: Progress, stats: StepStats, expected_s: float
) -> None:
    assert limit_s(progress, stats, POLICY) == pytest.approx(expected_s)
    if math.isfinite(expected_s):
        soon = stalled(progress, after(expected_s - 0.001), stats, POLICY)
        assert soon is None or (soon.early_s > 0 and not soon.limited)
        stall = stalled(progress, after(expected_s + 0.001), stats, POLICY)
        assert stall is not None
        assert stall.limit_s == pytest.approx(expected_s)
        assert stall.since_ns == 100 * S
        assert stall.early_s == 0.0
        early_s = early_limit_s(progress, stats, POLICY)
        assert left_s(progress, after(0.25), stats, POLICY, 0.5) == pytest.approx(early_s + 0.25)
    else:
        assert stalled(progress, after(1e9), stats, POLICY) is None
        assert left_s(progress, after(1e9), stats, POLICY) == math.inf


def test_before_the_first_step_a_script_that_does_not_join_is_late_at_half_of_its_limit() -> None:
    """It may never do a visible step, and the time alone does not distinguish inference from a hang."""
    policy = replace(POLICY, joins=False)
    for phase in (Phase.JOINING, Phase.OPTIMIZER):
        early = replace(FIRST, phase=phase)
        soon = stalled(early, after(299.0), STEADY, policy)
        assert soon is not None
        assert (soon.early_s > 0, soon.limited, soon.begun) == (True, False, False)
        stall = stalled(early, after(301.0), STEADY, policy)
        assert stall is not None
        assert (stall.limited, stall.begun, stall.limit_s) == (False, False, 300.0)
        joined = stalled(early, after(601.0), STEADY, POLICY)
        assert joined is not None
        assert (joined.limited, joined.begun) == (True, True)
    ending = stalled(replace(FIRST, failed_ns=100 * S), after(31.0), STEADY, policy)
    assert ending is not None
    assert (ending.limited, ending.begun) == (True, True)
    assert limit_s(AT_WORK, STEADY, policy) == limit_s(AT_WORK, STEADY, POLICY)


ONE_SLOW = StepStats.of((*(0.1,) * 40, 20.0))  # such as a first evaluation


def test_one_slow_step_does_not_delay_the_inspection_of_later_steps() -> None:
    """Until the step exceeds its limit, it is reported as early, so that only a proof of a hang counts."""
    assert limit_s(AT_WORK, ONE_SLOW, POLICY) == pytest.approx(60.6)
    assert early_limit_s(AT_WORK, ONE_SLOW, POLICY) == POLICY.few_floor_s
    assert stalled(AT_WORK, after(4.9), ONE_SLOW, POLICY) is None
    assert left_s(AT_WORK, after(4.0), ONE_SLOW, POLICY) == pytest.approx(1.0)
    early = stalled(AT_WORK, after(5.1), ONE_SLOW, POLICY)
    assert early is not None
    assert (early.early_s, early.limited) == (5.0, False)
    assert early.limit_s == pytest.approx(60.6)
    assert left_s(AT_WORK, after(5.1), ONE_SLOW, POLICY) == pytest.approx(55.5)
    late = stalled(AT_WORK, after(60.7), ONE_SLOW, POLICY)
    assert late is not None
    assert late.early_s == 0.0


def test_a_step_is_early_only_if_it_is_longer_than_most_and_takes_seconds() -> None:
    slow = StepStats.of((*(4.0,) * 30, 20.0))
    assert early_limit_s(AT_WORK, slow, POLICY) == pytest.approx(12.6)
    assert early_limit_s(AT_WORK, STEADY, POLICY) == limit_s(AT_WORK, STEADY, POLICY) == pytest.approx(0.9)
    few = StepStats.of((0.1, 0.1, 20.0))
    assert early_limit_s(AT_WORK, few, POLICY) == POLICY.few_floor_s
    tolerant = replace(POLICY, floor_s=30.0)  # --hang-floor
    assert early_limit_s(AT_WORK, ONE_SLOW, tolerant) == pytest.approx(30.3)
    others = (replace(AT_WORK, phase=Phase.EVAL), replace(AT_WORK, failed_ns=100 * S))
    for each in others:
        assert early_limit_s(each, ONE_SLOW, POLICY) == limit_s(each, ONE_SLOW, POLICY)


def test_a_first_step_is_reported_early_and_keeps_its_limit() -> None:
    """A step that hung may hang again when the group resumes from its state. A cold start has more time."""
    for first, floor_s in ((FIRST, 5.0), (replace(FIRST, step=0), POLICY.cold_floor_s)):
        assert stalled(first, after(floor_s - 0.1), STEADY, POLICY) is None
        early = stalled(first, after(floor_s + 0.1), STEADY, POLICY)
        assert early is not None
        assert (early.early_s, early.limit_s, early.limited, early.first_step) == (
            floor_s,
            600.0,
            False,
            True,
        )
        assert left_s(first, after(floor_s + 0.1), STEADY, POLICY) == pytest.approx(599.9 - floor_s)
        late = stalled(first, after(601.0), STEADY, POLICY)
        assert late is not None
        assert (late.early_s, late.limited) == (0.0, True)
    assert early_limit_s(FIRST, STEADY, replace(POLICY, floor_s=30.0)) == 30.0  # --hang-floor
    usual = stalled(AT_WORK, after(2.5), STEADY, POLICY)
    assert usual is not None
    assert not usual.first_step


@pytest.mark.parametrize("phase", [Phase.JOINING, Phase.RESTORING, Phase.EVAL, Phase.SNAPSHOT, Phase.IDLE])
def test_no_activity_outside_of_a_first_step_is_reported_early(phase: Phase) -> None:
    there = replace(FIRST, phase=phase)
    assert early_limit_s(there, STEADY, POLICY) == limit_s(there, STEADY, POLICY)
    failed = replace(FIRST, failed_ns=100 * S)
    assert early_limit_s(failed, STEADY, POLICY) == limit_s(failed, STEADY, POLICY)
    unjoined = early_limit_s(there, STEADY, replace(POLICY, joins=False))
    begins = phase in (Phase.JOINING, Phase.RESTORING)
    assert unjoined == (5.0 if begins else limit_s(there, STEADY, POLICY))


def test_a_step_is_measured_from_its_start_and_a_pause_from_its_own() -> None:
    late = replace(AT_WORK, phase_since_ns=after(0.8), phase_seq=40)
    assert since_ns(late) == after(0)
    assert stalled(late, after(1.0), STEADY, POLICY) is not None
    pause = replace(late, phase=Phase.EVAL, pause_limit_s=1.0)
    assert since_ns(pause) == after(0.8)
    assert stalled(pause, after(1.7), STEADY, POLICY) is None


def test_a_stall_states_the_rank_the_activity_and_the_limit() -> None:
    stall = stalled(AT_WORK, after(2.5), STEADY, POLICY)
    assert stall is not None
    assert (stall.rank, stall.step, stall.phase, stall.waited_s) == (3, 500, Phase.FORWARD, 2.5)
    assert stall.why == ("rank 3 made no progress for 2.50 s after step 500 (forward); the limit is 0.90 s")
    evaluating = replace(AT_WORK, phase=Phase.EVAL, pause_label="validation", pause_limit_s=1.0)
    stall = stalled(evaluating, after(2.5), STEADY, POLICY)
    assert stall is not None
    assert "(validation)" in stall.why


def test_a_watcher_that_did_not_run_does_not_blame_the_rank() -> None:
    assert stalled(AT_WORK, after(60.0), STEADY, POLICY, own_lateness_s=59.5) is None
    assert stalled(AT_WORK, after(60.0), STEADY, POLICY, own_lateness_s=50.0) is not None
    assert stalled(AT_WORK, after(1.0), STEADY, POLICY, own_lateness_s=-5.0) is not None


def test_a_page_written_after_the_clock_was_read_is_not_late() -> None:
    assert stalled(AT_WORK, after(-0.5), STEADY, POLICY) is None


@pytest.mark.parametrize(("count", "rank_from_top"), [(1, 1), (20, 1), (99, 1), (100, 2), (200, 3), (256, 3)])
def test_p99_is_the_nearest_rank(count: int, rank_from_top: int) -> None:
    times_s = tuple(float(each) for each in range(1, count + 1))
    assert StepStats.of(times_s).p99_s == count + 1 - rank_from_top


@given(st.lists(st.lists(st.floats(0.001, 100.0), max_size=300).map(tuple), max_size=5))
def test_growing_statistics_cover_the_last_times_only(parts: list[tuple[float, ...]]) -> None:
    stats = StepStats()
    for part in parts:
        stats = stats.extended(part)
    assert stats == StepStats.of(tuple(each for part in parts for each in part))
    assert len(stats.times_s) <= KEPT


@given(st.lists(st.floats(0.001, 100.0), min_size=20, max_size=300).map(tuple), st.floats(0.0, 0.05))
def test_a_hang_is_found_within_three_p99_and_a_second(times_s: tuple[float, ...], poll_s: float) -> None:
    stats = StepStats.of(times_s)
    promised_s = 3 * stats.p99_s + 1.0
    assert stalled(AT_WORK, after(promised_s - poll_s), stats, POLICY) is not None


class Recent:
    """The p99 of the last times. It keeps them sorted, because the simulation needs it at each step."""

    def __init__(self) -> None:
        self.arrived: deque[float] = deque(maxlen=KEPT)
        self.ordered: list[float] = []

    def learn(self, took_s: float) -> None:
        if len(self.arrived) == KEPT:
            del self.ordered[bisect_left(self.ordered, self.arrived[0])]
        self.arrived.append(took_s)
        insort(self.ordered, took_s)

    def stats(self) -> StepStats:
        if not self.ordered:
            return StepStats()
        p99_s = self.ordered[math.ceil(len(self.ordered) * 99 / 100) - 1]
        return StepStats(tuple(self.arrived), p99_s, self.ordered[(len(self.ordered) - 1) // 2])


def false_alarms(base_s: float, steps: int, seed: int) -> list[int]:
    """Train with a slow first step, evals of 50 steps, checkpoints of 20, and steps of 1x..5x."""
    chance, recent, wrong = random.Random(seed), Recent(), []
    pause = replace(AT_WORK, phase=Phase.EVAL, pause_limit_s=100 * base_s)
    for step in range(steps):
        took_s = base_s * chance.uniform(1, 5) if step else 300.0
        progress = replace(AT_WORK, steps_done=step) if step < 2 else AT_WORK
        found = stalled(progress, after(took_s), recent.stats(), POLICY)
        if found is not None and not (found.first_step and found.early_s):
            wrong.append(step)
        if step:
            recent.learn(took_s)
        if step % 100 == 50 and stalled(pause, after(50 * base_s), recent.stats(), POLICY):
            wrong.append(step)
        if step % 100 == 99 and stalled(
            replace(pause, phase=Phase.CHECKPOINT), after(20 * base_s), recent.stats(), POLICY
        ):
            wrong.append(step)
    return wrong


@pytest.mark.parametrize("base_s", [0.005, 0.02, 0.1, 0.5, 1.0, 10.0])
def test_a_run_whose_steps_vary_by_a_factor_of_five_has_no_false_alarm(base_s: float) -> None:
    assert false_alarms(base_s, steps=3000, seed=7) == []


def test_the_simulated_statistics_equal_the_real_ones() -> None:
    chance, recent = random.Random(3), Recent()
    times_s: tuple[float, ...] = ()
    for _ in range(400):
        took_s = chance.uniform(0.1, 0.5)
        times_s += (took_s,)
        recent.learn(took_s)
        assert recent.stats() == StepStats.of(times_s)


@given(base_s=st.floats(0.005, 100.0))
def test_steps_up_to_five_times_the_median_need_enough_samples_to_avoid_false_alarms(base_s: float) -> None:
    """Before a step of 5x, the p99 must be above (5x - the floor) / 3, which it is with 20 samples."""
    least_p99_s = (5 * base_s - POLICY.floor_s) / POLICY.factor
    share_below = max(0.0, least_p99_s / base_s - 1) / 4
    assert share_below**POLICY.min_samples < 1e-15
    few = StepStats.of((base_s,))
    assert stalled(AT_WORK, after(5 * base_s), few, POLICY) is None


def changed(field: str, value: Any) -> HangPolicy:
    """Return the default policy with another value of one field."""
    return HangPolicy(**{field: value})


@pytest.mark.parametrize("field", ["factor", "floor_s", "first_step_s", "pause_s", "finish_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_a_contradictory_policy_is_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        changed(field, value)


@pytest.mark.parametrize(
    ("progress", "policy", "waited_s", "expected"),
    [
        (
            AT_WORK, POLICY, 2.5,
            Stall(
                3, 500, Phase.FORWARD, 100 * S, 2.5, 0.6 + 3.0 * 0.1, False,
                "rank 3 made no progress for 2.50 s after step 500 (forward); the limit is 0.90 s", True,
            ),
        ),
        (
            replace(AT_WORK, phase=Phase.EVAL, pause_label="validation", pause_limit_s=1.0), POLICY, 2.5,
            Stall(
                3, 500, Phase.EVAL, 100 * S, 2.5, 1.0, True,
                "rank 3 made no progress for 2.50 s after step 500 (validation); the limit is 1.00 s", True,
            ),
        ),
        (
            replace(AT_WORK, pause_label="validation"), POLICY, 2.5,
            Stall(
                3, 500, Phase.FORWARD, 100 * S, 2.5, 0.6 + 3.0 * 0.1, False,
                "rank 3 made no progress for 2.50 s after step 500 (forward); the limit is 0.90 s", True,
            ),
        ),
        (
            replace(AT_WORK, failed_ns=90 * S), POLICY, 25.0,
            Stall(
                3, 500, Phase.FORWARD, 90 * S, 35.0, 30.0, True,
                "rank 3 made no progress for 35.00 s after step 500 (ending after its failure); "
                "the limit is 30.00 s", True,
            ),
        ),
        (
            FIRST, replace(POLICY, joins=False), 301.0,
            Stall(
                3, 500, Phase.FORWARD, 100 * S, 301.0, 300.0, False,
                "rank 3 made no progress for 301.00 s after step 500 (forward); the limit is 300.00 s", False,
                first_step=True,
            ),
        ),
        (
            replace(AT_WORK, steps_done=1), replace(POLICY, joins=False), 2.5,
            Stall(
                3, 500, Phase.FORWARD, 100 * S, 2.5, 0.6 + 3.0 * 0.1, False,
                "rank 3 made no progress for 2.50 s after step 500 (forward); the limit is 0.90 s", True,
            ),
        ),
        (
            replace(FIRST, phase=Phase.EVAL, pause_limit_s=1.0, pause_label="x"),
            replace(POLICY, joins=False), 2.0,
            Stall(
                3, 500, Phase.EVAL, 100 * S, 2.0, 1.0, True,
                "rank 3 made no progress for 2.00 s after step 500 (x); the limit is 1.00 s", True,
            ),
        ),
    ],
)  # fmt: skip
def test_a_stall_states_who_waits_where_since_when_and_its_limit(
    progress: Progress, policy: HangPolicy, waited_s: float, expected: Stall
) -> None:
    assert stalled(progress, after(waited_s), STEADY, policy) == expected


def test_the_label_of_a_pause_is_reported_only_during_that_pause() -> None:
    labelled = replace(AT_WORK, pause_label="validation")
    assert pause_label(labelled) == ""
    assert pause_label(replace(labelled, phase=Phase.EVAL)) == "validation"


def test_a_rank_exactly_at_its_limit_is_not_late() -> None:
    pause = replace(AT_WORK, phase=Phase.EVAL, pause_limit_s=1.0)
    assert stalled(pause, after(1.0), STEADY, POLICY) is None
    assert stalled(pause, after(1.0) + 1, STEADY, POLICY) is not None
    assert stalled(pause, after(1.5), STEADY, POLICY, 0.5) is None
    assert left_s(pause, after(0.25), STEADY, POLICY) == 0.75
    assert left_s(pause, after(0.25), STEADY, POLICY, 0.5) == 1.25
    assert left_s(pause, after(0.25), STEADY, POLICY, -0.5) == 0.75


@pytest.mark.parametrize("field", ["factor", "few_factor"])
def test_a_factor_below_1_is_refused_by_name(field: str) -> None:
    assert getattr(changed(field, 1.0), field) == 1.0
    with pytest.raises(ValueError, match=f"^{field}: 0.5 is not a factor of at least 1$"):
        changed(field, 0.5)


@pytest.mark.parametrize(
    "field", ["floor_s", "few_floor_s", "cold_floor_s", "first_step_s", "pause_s", "finish_s"]
)
def test_a_time_that_is_not_above_0_is_refused_by_name(field: str) -> None:
    assert getattr(changed(field, 0.5), field) == 0.5
    with pytest.raises(ValueError, match=f"^{field}: 0 is not a time above 0$"):
        changed(field, 0.0)


def test_the_default_limits_are_those_of_the_documentation() -> None:
    assert HangPolicy() == HangPolicy(
        factor=3.0,
        floor_s=0.6,
        min_samples=20,
        few_factor=10.0,
        few_floor_s=5.0,
        cold_floor_s=15.0,
        first_step_s=600.0,
        pause_s=1800.0,
        finish_s=30.0,
        joins=True,
    )
