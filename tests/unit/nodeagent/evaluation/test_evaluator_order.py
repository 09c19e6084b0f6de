"""A verdict depends on the set of observations, but not on their order or repetition."""

from __future__ import annotations

import json
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.evaluation.evaluator import Evaluator
from nodeagent.evaluation.samples import LATE_S
from nodeagent.model import Level, Observation
from nodeagent.policy.loading import shipped
from tests.unit.nodeagent.evaluation.world import DAY_S, POLICY, evaluator, mark, sample, standing, xid


def samples_of(check: str, values: st.SearchStrategy[float]) -> st.SearchStrategy[list[Observation]]:
    moments = st.integers(0, int(LATE_S) - 1)
    return st.dictionaries(moments, values, max_size=25).map(
        lambda found: [sample(check, float(at), value) for at, value in found.items()]
    )


EVENTS = st.lists(
    st.one_of(
        st.builds(
            xid,
            st.sampled_from([13, 48, 64, 79, 95, 154]),
            st.floats(0, 3 * DAY_S),
            st.sampled_from(["", "none", "reset_gpu", "GPC 1 TPC 2"]),
            st.sampled_from(["kmsg", "nvml-events"]),
            st.sampled_from(["", "one", "two"]),
        ),
        st.builds(
            mark, st.sampled_from(["gpu_reset", "boot", "replaced", "cleared"]), st.floats(0, 3 * DAY_S)
        ),
    ),
    max_size=20,
)
ANY = st.tuples(
    EVENTS,
    samples_of("heat", st.sampled_from([-1.0, 0.0, 3.0, 5.0, 8.0, 10.0, 30.0])),
    samples_of("errors", st.sampled_from([0.0, 30.0, 60.0, 90.0, 400.0])),
    samples_of("verdict", st.sampled_from([0.0, 1.0, 2.0, 99.0])),
).map(lambda parts: [each for part in parts for each in part])


@given(ANY, st.randoms(use_true_random=False), st.floats(0, 5 * DAY_S))
def test_any_order_and_repetition_gives_the_same_findings(
    seen: list[Observation], chance: object, now_s: float
) -> None:
    other = [*seen, *seen[::2]]
    chance.shuffle(other)  # type: ignore[attr-defined]
    assert standing(other, now_s) == standing(seen, now_s)


def test_whether_a_finding_lasts_does_not_depend_on_the_order_of_two_equal_faults() -> None:
    link_a, link_b = (f"NETIR_LINK_EVT Fatal {0x00100011 | n << 11:#010x} {n:#010x}" for n in (1, 2))
    seen = [xid(149, 0.0, link_a), mark("gpu_reset", 500.0), xid(149, 700.0, link_b), xid(149, 0.0)]
    for order in permutations(seen):
        made = Evaluator(shipped(), 580)
        for each in order:
            made.add(each)
        for now_s in (800.0, 1050.0, 1150.0, 1500.0):
            assert [each.lasting for each in made.findings(now_s)] == [True], "link B's remedy is missing"


@given(ANY, st.lists(st.tuples(st.integers(0, 40), st.floats(0, 5 * DAY_S)), max_size=30))
def test_queries_at_any_time_and_frequency_change_nothing(
    seen: list[Observation], asked: list[tuple[int, float]]
) -> None:
    made = Evaluator(POLICY, 575)
    for count in range(len(seen) + 1):
        for now_s in (now_s for after, now_s in asked if after == count):
            assert made.findings(now_s) == evaluator(seen[:count]).findings(now_s)
        for each in seen[count : count + 1]:
            made.add(each)


LOOK_S = 4 * DAY_S  # after all events


@pytest.mark.parametrize(
    "seen",
    [
        pytest.param([xid(154, 5.0, "reset_gpu"), xid(95, 4.0)], id="the verdict came first"),
        pytest.param([xid(95, 4.0), xid(154, 5.0, "reset_gpu")], id="the verdict follows"),
        pytest.param([xid(48, 4.0), xid(154, 5.0, "reboot_node")], id="the verdict raises the action"),
        pytest.param([xid(79, 4.0), xid(79, 2 * DAY_S)], id="the code recurs"),
        pytest.param([xid(48, 4.0), mark("gpu_reset", 50.0), xid(48, 60.0)], id="the code returns"),
    ],
)
def test_each_event_is_judged_with_those_before_it(seen: list[Observation]) -> None:
    made = Evaluator(POLICY, 575)
    for count, each in enumerate(seen, 1):
        made.add(each)
        assert made.findings(LOOK_S) == evaluator(seen[:count]).findings(LOOK_S)


def test_growth_is_judged_again_when_its_xid_follows() -> None:
    counter = [sample("ecc_dbe", at_s, value) for at_s, value in ((0.0, 0.0), (10.0, 1.0))]
    made = Evaluator(shipped(), 575)
    for each in counter:
        made.add(each)
    before = made.findings(20.0)
    made.add(xid(94, 11.0))
    fresh = Evaluator(shipped(), 575)
    for each in (*counter, xid(94, 11.0)):
        fresh.add(each)
    assert made.findings(20.0) == fresh.findings(20.0) != before


@given(ANY, st.floats(0, 5 * DAY_S))
def test_a_restart_changes_nothing(seen: list[Observation], now_s: float) -> None:
    half = len(seen) // 2
    before = evaluator(seen[:half])
    after = Evaluator(POLICY, 575)
    after.load(json.loads(json.dumps(before.dump())))
    for each in seen[half:]:
        before.add(each)
        after.add(each)
    assert after.verdicts(now_s) == before.verdicts(now_s)


@given(st.lists(st.sampled_from([-1.0, 3.0, 8.0, 12.0]), min_size=1, max_size=120))
def test_a_level_never_alternates_faster_than_its_hold_time(values: list[float]) -> None:
    made, rose_s, level = Evaluator(POLICY), 0.0, Level.HEALTHY
    for n, value in enumerate(values):
        made.add(sample("heat", n * 10.0, value))
        now = max((each.level for each in made.findings(n * 10.0)), default=Level.HEALTHY)
        if now > level:
            rose_s = n * 10.0
        elif now < level:
            assert n * 10.0 - rose_s >= POLICY.rules["heat"].clear_s
        level = now


@given(ANY)
def test_the_level_can_always_return_to_healthy(seen: list[Observation]) -> None:
    made = evaluator(seen)
    at_s = 4 * DAY_S
    for name in ("boot", "gpu_reset", "replaced"):
        made.add(mark(name, at_s))
    for n in range(60):
        for check, good in (("heat", 30.0), ("errors", 500.0), ("verdict", 0.0)):
            made.add(sample(check, at_s + n * 10.0, good))
    assert not made.findings(at_s + 10 * DAY_S)
