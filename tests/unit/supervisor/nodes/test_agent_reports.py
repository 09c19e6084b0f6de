from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from holdfast.node_report import REPORT, REPORT_AT
from supervisor.nodes import node_objects
from supervisor.nodes.agent_reports import MAX_SKEW_S, AgentReports, ClockError, calm_s, clock_error, views
from supervisor.nodes.names import VERDICTS
from supervisor.nodes.node_objects import KnownNode
from supervisor.quarantine.model import NodePolicy, NodeView
from tests.unit.supervisor.nodes.node_samples import XID, node_object, report_text

POLICY = NodePolicy()


def known(text: str | None, at: str = "", boot_id: str = "b1", uid: str = "uid-a") -> KnownNode:
    notes = {} if text is None else {REPORT: text, REPORT_AT: at}
    found = node_object(annotations=notes, uid=uid)
    found["status"]["nodeInfo"]["bootID"] = boot_id
    return node_objects.read(found)


def heard(*seen: tuple[KnownNode, float], now_s: float, policy: NodePolicy = POLICY) -> NodeView:
    reports = AgentReports()
    for node, at_s in seen:
        reports.note(node, at_s)
    return reports.view(seen[-1][0], now_s, policy)


def test_the_age_of_a_report_counts_from_when_it_was_seen_to_change() -> None:
    first, second = known(report_text("a")), known(report_text("a", XID))
    view = heard((first, 0.0), (second, 50.0), (second, 60.0), now_s=70.0)
    assert view.report is not None
    assert (view.silent_s, len(view.report.findings)) == (20.0, 1)
    assert heard((first, 0.0), now_s=1.0).report is None


def test_a_new_time_alone_shows_that_the_agent_lives() -> None:
    text = report_text("a")
    assert heard((known(text, "1"), 0.0), (known(text, "2"), 30.0), now_s=31.0).silent_s == 1.0


def test_the_report_of_a_recreated_node_is_not_that_of_its_predecessor() -> None:
    first, second = known(report_text("a")), known(report_text("a", at_s=2.0), uid="other")
    assert heard((first, 0.0), (second, 10.0), now_s=10.0).report is None


def test_an_agent_is_silent_until_its_report_or_its_verdict_changes_and_again_after_a_while() -> None:
    reports, node = AgentReports(), known(report_text("a"))
    assert reports.is_silent("a", 0.0, POLICY)
    reports.note(node, 0.0)
    reports.note(node, 10.0)
    assert reports.is_silent("a", 10.0, POLICY), "it may have died long ago"
    judged = replace(node, verdict="GPU 3 is lost")
    reports.note(judged, 20.0)
    assert not reports.is_silent("a", 20.0 + POLICY.stale_s, POLICY)
    assert reports.is_silent("a", 21.0 + POLICY.stale_s, POLICY)
    reports.note(replace(judged, report_at="later"), 500.0)
    assert not reports.is_silent("a", 501.0, POLICY)


def test_a_node_is_awaited_only_at_the_beginning() -> None:
    reports, node = AgentReports(), known(report_text("a"))
    reports.note(node, 0.0)
    assert reports.is_awaited("a", 100.0, POLICY)
    assert not reports.is_awaited("a", 121.0, POLICY)
    reports.note(known(report_text("a", at_s=5.0)), 50.0)
    assert not reports.is_awaited("a", 60.0, POLICY)
    reports.forget("a")
    assert not reports.is_awaited("a", 0.0, POLICY)
    assert reports.view(node, 0.0, POLICY).silent_s == math.inf


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "its report is invalid: '{' is not JSON"),
        (report_text("b"), "its report is about node 'b'"),
        (report_text("a").replace('"schema": 1', '"schema": 7'), "its report is invalid: schema is 7"),
        (report_text("a", boot_id="b9"), "a report under its name is from another machine or boot"),
    ],
)
def test_a_report_that_is_wrong_is_refused_and_the_next_good_one_is_heard(text: str, why: str) -> None:
    reports, first = AgentReports(), known(report_text("a"))
    reports.note(first, 0.0)
    reports.note(known(text), 10.0)
    view = reports.view(first, 11.0, POLICY)
    assert view.report is None
    assert view.refused.startswith(why)
    reports.note(known(report_text("a", at_s=7.0)), 200.0)
    view = reports.view(first, 201.0, POLICY)
    assert (view.refused, view.silent_s) == ("", 1.0)


@pytest.mark.parametrize("value", ["9" * 400, "9" * 5000, "[" * 980 + "]" * 980])
@pytest.mark.parametrize("name", ["node", "boot_id", "at_s", "schema", "clean_s"])
def test_whatever_a_report_says_only_its_own_node_is_refused(name: str, value: str) -> None:
    raw = {**json.loads(report_text("a")), name: "VALUE"}
    reports, first = AgentReports(), known(report_text("a"))
    reports.note(first, 0.0)
    bad = known(json.dumps(raw).replace('"VALUE"', value))
    reports.note(bad, 1.0)
    view = reports.view(bad, 2.0, POLICY)
    assert view.report is None
    assert view.refused
    assert len(view.refused) < 500


def test_a_report_from_before_the_boot_is_no_longer_used() -> None:
    first, ill = known(report_text("a")), known(report_text("a", XID))
    booted = known(report_text("a", XID), boot_id="b2")
    assert heard((first, 0.0), (ill, 10.0), (booted, 40.0), now_s=41.0).report is None
    after = known(report_text("a", boot_id="b2", at_s=9e6 + 100, booted_s=9e6 + 99), boot_id="b2")
    view = heard((first, 0.0), (ill, 10.0), (booted, 40.0), (after, 50.0), now_s=51.0)
    assert view.report is not None
    assert (view.report.findings, view.refused) == ((), "")


def test_another_policy_is_applied_to_what_was_heard_before() -> None:
    reports = AgentReports()
    reports.note(known(report_text("a")), 0.0)
    node = known(report_text("a", XID))
    reports.note(node, 1.0)
    assert reports.view(node, 2.0, POLICY).report is not None
    assert reports.view(node, 2.0, NodePolicy(stale_s=0.5)).report is not None
    assert [*views([node, known(None)], reports, 2.0, POLICY)] == ["a"]


# -- nodes that have recovered before this process was there

RECOVERED = report_text("a", calmed_s=1000.0)


@pytest.mark.parametrize(
    ("text", "changed_s", "expected_s"),
    [
        (RECOVERED, 1800.0, 1030.0),
        (RECOVERED, 60.0, 1030.0),  # the agent has restarted
        (report_text("a"), 60.0, math.inf),  # the agent knows of no trouble
        (report_text("a", XID), 60.0, 60.0),  # the report is older
        ("{}", 60.0, 60.0),
        (None, 60.0, math.inf),
        (RECOVERED, 2e5, math.inf),  # nothing has changed for days
    ],
)
def test_how_long_ago_a_node_recovered_is_what_its_agent_has_reported(
    text: str | None, changed_s: float, expected_s: float
) -> None:
    assert calm_s(known(text), changed_s, 30.0) == expected_s


def test_since_when_a_node_is_calm_is_read_from_the_conditions_that_show_no_fault() -> None:
    found = node_object()
    for number, status in enumerate(("True", "False", "Unknown")):
        kind = VERDICTS[number % 2]
        found["status"]["conditions"].append(
            {"type": kind, "status": status, "lastTransitionTime": f"t{number}"}
        )
    assert node_objects.calm_times_of(found) == ("t0", "t2")
    assert node_objects.verdict_times_of(found) == ("t1",)


RIGHT = ClockError()


def test_a_clock_that_agrees_with_the_nodes_is_right() -> None:
    assert clock_error([1.0, 2.0, 40.0, -3.0], RIGHT) == RIGHT
    assert clock_error([0.5], RIGHT) == RIGHT
    assert clock_error([DAYS_S, 1.0, 2.0], RIGHT) == RIGHT, "one node has a wrong clock"
    assert clock_error([DAYS_S, 1.0], RIGHT) == RIGHT


DAYS_S = 60 * 86400.0


@pytest.mark.parametrize("ahead_s", [DAYS_S, -DAYS_S, MAX_SKEW_S + 1.0])
def test_the_time_of_most_nodes_corrects_a_wrong_clock(ahead_s: float) -> None:
    found = clock_error([ahead_s, ahead_s + 2.0, ahead_s - 1.0, 7 * DAYS_S], RIGHT)
    assert found.ahead_s == pytest.approx(ahead_s, abs=2.0)
    assert "set the clock" in found.why
    assert not found.is_doubtful
    steady = clock_error([ahead_s + 20.0] * 3, found)
    assert steady.ahead_s == found.ahead_s, "a stored time must not become later than now"
    assert clock_error([ahead_s + 100.0] * 3, found).ahead_s == ahead_s + 100.0
    assert clock_error([], found) == found
    assert clock_error([0.0] * 3, found) == RIGHT


@pytest.mark.parametrize("ahead_s", [[DAYS_S], [DAYS_S, -DAYS_S], [DAYS_S, 2 * DAYS_S, 3 * DAYS_S]])
def test_a_clock_is_in_doubt_if_nothing_shows_which_one_is_right(ahead_s: list[float]) -> None:
    found = clock_error(ahead_s, RIGHT)
    assert (found.ahead_s, found.is_doubtful) == (0.0, True)
    assert "unknown which clock is right" in found.why


def test_only_agents_that_report_now_say_what_time_it_is() -> None:
    reports = AgentReports()
    text = report_text("a")
    reports.note(known(text, "1"), 0.0, 3 * DAYS_S)
    assert reports.clock_error(RIGHT, 1.0, POLICY) == RIGHT, "nobody knows how old a report was at the start"
    reports.note(known(text, "2"), 30.0, DAYS_S)
    assert reports.clock_error(RIGHT, 31.0, POLICY).is_doubtful
    assert reports.clock_error(RIGHT, 31.0 + POLICY.stale_s, POLICY) == RIGHT
    reports.note(known(text, "yesterday"), 60.0, None)
    assert reports.clock_error(RIGHT, 61.0, POLICY) == RIGHT
