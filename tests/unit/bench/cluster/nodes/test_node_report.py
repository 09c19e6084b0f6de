"""The verdicts on the targets of `bench cluster-nodes`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.cluster.nodes import node_report
from bench.cluster.nodes.node_report import MeasuredFault, RestCost, WeightComparison, judge

KILL = MeasuredFault(node_report.KILL, "n1", 1, first_step_s=5.1, noticed_s=4.6, pause_s=5.0, lost_steps=1)
DRAIN = MeasuredFault(node_report.DRAIN, "n1", 0, first_step_s=6.0, noticed_s=5.0, pause_s=0.4)
BARE = MeasuredFault(node_report.KILL_BARE, "n1", 0, first_step_s=6.0, noticed_s=30.0, pause_s=40.0)
LEADER = MeasuredFault(node_report.LEADER, "n1", -1, pause_s=0.1, incidents=0, supervised_s=20.0)
EQUAL = WeightComparison("job", "Succeeded", 40, ())


def missed(
    *faults: MeasuredFault, weights: WeightComparison = EQUAL, cost: RestCost | None = None
) -> list[str]:
    return [each.target for each in judge(faults, [weights], cost) if each.met is False]


def test_all_targets_are_met() -> None:
    cost = RestCost({"standbys": 0.02, "supervisors": 0.03}, 3)
    assert missed(KILL, DRAIN, BARE, LEADER, cost=cost) == []
    assert all(each.met for each in judge([KILL, DRAIN, BARE, LEADER], [EQUAL], cost))


@pytest.mark.parametrize(
    ("fault", "target"),
    [
        (replace(KILL, first_step_s=7.1), "node kill: first new step <= 7 s"),
        (replace(KILL, noticed_s=5.1), "node kill: noticed and decided <= 5 s"),
        (replace(KILL, lost_steps=2), "node kill: at most 1 step lost"),
        (replace(KILL, kind=node_report.CUT, first_step_s=7.1), "node cut: first new step <= 7 s"),
        (
            replace(KILL, kind=node_report.CUT_LEADER, noticed_s=5.1),
            "node cut, leader's node: noticed and decided <= 5 s",
        ),
        (replace(DRAIN, pause_s=2.1), "drain: at most 2 s without training"),
        (replace(DRAIN, lost_steps=1), "drain: no step lost"),
        (
            replace(BARE, first_step_s=7.1),
            "node kill, no standby: first new step <= 7 s of the new container's start",
        ),
        (replace(LEADER, lost_steps=1), "leader killed: no step lost"),
        (replace(LEADER, incidents=1), "leader killed: no incident"),
    ],
)
def test_the_worst_fault_of_a_kind_misses_its_target(fault: MeasuredFault, target: str) -> None:
    cuts = [replace(KILL, kind=kind) for kind in (node_report.CUT, node_report.CUT_LEADER)]
    good = {each.kind: each for each in (KILL, *cuts, DRAIN, BARE, LEADER)}
    assert missed(good[fault.kind], fault, good[fault.kind]) == [target]


def test_a_fault_without_a_new_step_misses_all_times_and_says_so() -> None:
    late = replace(KILL, first_step_s=120.0, pause_s=120.0, is_late=True)
    assert missed(KILL, late) == [
        "node kill: first new step <= 7 s",
        "node kill: noticed and decided <= 5 s",
    ]
    assert "> 120.000 s" in node_report.rows([KILL, late])
    assert "first new step > 120.000 s" in node_report.fault_line(late)


def test_weights_must_be_compared_and_equal_and_the_owner_must_succeed() -> None:
    target = "weights of the job equal an undisturbed run's"
    assert missed(weights=replace(EQUAL, differing=(49,))) == [target]
    assert missed(weights=replace(EQUAL, ended="Failed")) == [target]
    [verdict] = judge([], [replace(EQUAL, compared=0)], None)
    assert verdict.met is None


def test_the_cost_of_all_parts_together_has_a_target() -> None:
    [target] = missed(cost=RestCost({"standbys": 0.02, "supervisors": 0.031}, 3))
    assert target == "standbys, agents, supervisors and webhooks of 3 nodes at rest <= 5% of a core"
    *_, verdict = judge([], [EQUAL], RestCost({}, 3))
    assert verdict.met is None
    assert "5.10%" in node_report.cost_rows(RestCost({"standbys": 0.02, "supervisors": 0.031}, 3))


def test_the_table_has_the_medians_and_the_worst_of_each_kind() -> None:
    shown = node_report.rows([KILL, replace(KILL, first_step_s=6.1, lost_steps=0), DRAIN]).splitlines()
    assert [line.split("  ")[0] for line in shown[2:]] == ["node kill", "drain"]
    for word in ("5.600 s", "6.100 s", "4.600 s"):
        assert word in shown[2]


def test_a_verdict_has_a_target_of_its_own_and_one_for_the_time_after_it() -> None:
    good = MeasuredFault(node_report.VERDICT, "n1", 0, first_step_s=0.5, verdict_s=0.2, lost_steps=1)
    assert missed(good) == []
    assert missed(good, replace(good, verdict_s=1.1)) == ["Xid 79: verdict <= 1 s"]
    assert missed(good, replace(good, first_step_s=3.1)) == ["Xid 79: training <= 3 s after it"]
    assert missed(good, replace(good, lost_steps=2)) == ["Xid 79: at most 1 step lost"]


def test_a_line_about_a_fault_names_what_was_measured_and_why_there_was_more() -> None:
    assert node_report.fault_line(KILL) == (
        f"{'node kill':<24} n1 rank 1: first new step 5.100 s, noticed and decided 4.600 s, pause 5.000 s,"
        " 1 step lost"
    )
    assert node_report.fault_line(LEADER) == (
        f"{'leader killed':<24} n1: pause 0.100 s, supervised again 20.000 s, 0 steps lost"
    )
    twice = node_report.fault_line(replace(KILL, incidents=2, why="it was lost"))
    assert twice.endswith("; 2 incidents, the last one because it was lost")
