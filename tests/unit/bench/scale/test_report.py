"""The verdicts of the scale bench."""

from __future__ import annotations

from typing import Any

import pytest

from bench.scale.report import PHASES, judge, rows

SLOW = {"first_s": 0.01, "last_s": 0.09, "settled_s": 0.9}


def figures(**given: Any) -> dict[str, Any]:
    phase = {
        "cpu": 0.4,
        "members_cpu": 0.2,
        "api_cpu": 0.1,
        "rss_bytes": 300e6,
        "peak_bytes": 310e6,
        "threads": 9,
        "reports_per_s": 2000.0,
        "report_bytes": 4100.0,
        "writes_per_s": {"PATCH supervisions": 50.0},
        "scrapes_s": [0.01, 0.02],
        "members_lag_s": [0.1, 0.01],
        "load": 1.0,
    }
    decision = {"first_s": 0.01, "last_s": 0.02, "settled_s": 0.9}
    found = {
        "faults_per_s": 1.0,
        "connected_s": 9.0,
        "adopted_s": 12.0,
        "rest": phase,
        "faults": phase,
        "decisions": [decision] * 100,
        "lag": {"p99_s": 0.004, "max_s": 0.1},
        "restart": {"connected_s": 17.0, "supervised_s": 19.0, "changed": 0, "peak_bytes": 320e6},
    }
    return {
        **found,
        **{name: {**phase, **value} if name in PHASES else value for name, value in given.items()},
    }


def missed(**given: Any) -> list[str]:
    return [each.target for each in judge(figures(**given)) if not each.met]


def test_all_targets_are_met() -> None:
    assert missed() == []


@pytest.mark.parametrize(
    ("given", "target"),
    [
        ({"rest": {"cpu": 0.51}}, "CPU of the supervisor at rest below 50% of a core"),
        ({"rest": {"scrapes_s": [0.01, 0.2]}}, "/metrics below 200 ms"),
        ({"faults": {"scrapes_s": [0.01, 0.2]}}, "/metrics below 200 ms"),
        ({"faults": {"peak_bytes": 501e6}}, "peak memory below 500 MB"),
        ({"decisions": [{"first_s": 0.1, "last_s": 0.1, "settled_s": 1.0}] * 3}, "decision p99 below 100 ms"),
        ({"decisions": [{"first_s": 0.01, "last_s": 0.01, "settled_s": None}]}, "every job recovers"),
    ],
)
def test_a_missed_target_is_named(given: dict[str, Any], target: str) -> None:
    assert missed(**given) == [target]


def test_the_cpu_of_a_phase_beyond_the_requirement_is_shown_without_a_limit() -> None:
    given = figures(faults={"cpu": 0.9})
    assert [each.target for each in judge(given) if not each.met] == []
    shown = dict(rows(given))["beyond the requirement, 1 crashes/s: CPU of the supervisor, of one core"]
    assert shown == "90.0%"


def test_the_p99_of_the_decisions_is_shown() -> None:
    took = [*[{"first_s": 0.01, "last_s": 0.02, "settled_s": 0.9}] * 98, *[SLOW] * 2]
    assert dict(rows(figures(decisions=took)))["decision, median, p99 and worst"] == "20 ms, 90 ms, 90 ms"


def test_a_run_without_faults_leaves_the_decision_open() -> None:
    (open_verdict,) = [each for each in judge(figures(decisions=[])) if each.met is None]
    assert open_verdict.target == "decision p99 below 100 ms"


def test_a_changed_generation_and_a_large_successor_are_misses() -> None:
    restart = {"connected_s": 17.0, "supervised_s": 19.0, "changed": 1, "peak_bytes": 501e6}
    assert missed(restart=restart) == [
        "peak memory below 500 MB",
        "no generation changes with the supervisor",
    ]


def test_each_figure_has_a_line() -> None:
    lines = dict(rows(figures()))
    assert lines["at rest: CPU of the supervisor, of one core"] == "40.0%"
    assert lines["  until all are supervised by its successor"] == "19.000 s"
