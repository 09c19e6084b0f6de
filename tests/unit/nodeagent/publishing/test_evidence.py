"""The annotation says to the supervisor what the whole report says, in a bounded size."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nodeagent.agent.agent import Published
from nodeagent.model import Action, Level
from nodeagent.publishing.evidence import MAX_BYTES, compact
from supervisor.quarantine.evidence import costliest_action, severity
from supervisor.quarantine.model import NodeFinding, NodePolicy, NodeView
from supervisor.quarantine.reports import Machine, Received, heard, read_report
from tests.unit.nodeagent.publishing.states import ABOUT, SENSORS, finding, published, report_of, sensor

FAULTS = (
    finding(),
    finding(level=Level.DEGRADED, code=63, action=Action.RESET_GPU, lasting=True, overridden="operator"),
    finding("node", "memory_used", None, Level.DEGRADED, Action.NONE),
    finding("disk//var", "disk_used", None, action=Action.CONTACT_SUPPORT, sources=("host",)),
    finding("gpu/0000:3b:00.0", "xid", 31, Level.HEALTHY, Action.RESTART_APP),
    finding("port/" + "p" * 300, "ib_port", None, why="w" * 600),
)


@pytest.mark.parametrize(
    "state",
    [
        published(),
        published(*FAULTS),
        published(*FAULTS, released=True),
        published(sensors=(sensor("journal", "none"), *SENSORS[:2])),
        published(gpus=0),
    ],
)
def test_the_supervisor_reads_the_same_from_it_as_from_the_whole_report(state: Published) -> None:
    whole, kept = report_of(state), json.loads(compact(report_of(state)))
    assert read_report(kept) == read_report(whole)
    assert "left_out" not in kept
    node, machine, policy = (
        NodeView("node1"),
        Machine(ABOUT["boot_id"], ABOUT["machine_id"], 0.0),
        NodePolicy(),
    )
    views = [heard(node, machine, [Received(each["node"], each, 5.0)], 6.0, policy) for each in (kept, whole)]
    assert views[0] == views[1]
    assert views[0].report is not None


def test_nothing_that_only_people_read_is_in_it() -> None:
    text = compact(report_of(published(*FAULTS)))
    for field in ("why", "evidence", "clears", "call_s", "provider_id", "policy", "mig", "problems"):
        assert f'"{field}":' not in text, field
    assert " " not in text.replace("driver log", "")


def test_a_report_that_is_too_long_keeps_the_worst_findings_and_counts_the_others() -> None:
    mild = [finding(f"disk//{n}", "disk_used", None, Level.DEGRADED, Action.NONE) for n in range(1000)]
    bad = [finding(f"gpu/{n}", action=Action.REPLACE, lasting=True) for n in range(8)]
    kept_text = compact(report_of(published(*mild, *bad)))
    assert len(kept_text) <= MAX_BYTES
    kept = json.loads(kept_text)
    entities = [each["entity"] for each in kept["entities"]]
    assert {each.entity for each in bad} <= set(entities)
    findings = sum(len(each["findings"]) for each in kept["entities"])
    assert kept["left_out"] == len(mild) + len(bad) - findings
    one_more = json.dumps(kept["entities"][0], separators=(",", ":"))
    assert len(kept_text) + len(one_more) + 1 > MAX_BYTES - 10, "another finding would have fitted"
    assert read_report(kept).findings[0].level == "unhealthy"


def test_a_report_that_is_too_long_keeps_what_the_supervisor_ranks_highest() -> None:
    kinds: list[dict[str, Any]] = [
        {"level": level, "action": action, "lasting": lasting, "overridden": overridden}
        for level in (Level.DEGRADED, Level.UNHEALTHY)
        for action in Action
        for lasting in (False, True)
        for overridden in ("", "driver")
    ]
    found = [finding(f"gpu/{n}-{m}", **kind) for m, kind in enumerate(kinds) for n in range(5)]
    whole = report_of(published(*found))
    ranked = [_rank(each) for each in read_report(whole).findings]
    for most_bytes in range(4000, len(compact(whole)), 4000):
        kept = [_rank(each) for each in read_report(json.loads(compact(whole, most_bytes))).findings]
        assert 5 < len(kept) < len(found)
        assert kept == ranked[: len(kept)]


def _rank(found: NodeFinding) -> tuple[str, tuple[bool, bool, int, float]]:
    return found.level, severity((found,))


def test_a_gpu_to_replace_stays_in_a_report_with_too_many_findings_that_need_support() -> None:
    mild = [finding(f"port/{n}", "ib_port", None, action=Action.CONTACT_SUPPORT) for n in range(1000)]
    report = report_of(published(*mild, finding("gpu/x", action=Action.REPLACE)))
    kept = read_report(json.loads(compact(report)))
    assert costliest_action(kept.findings) == costliest_action(read_report(report).findings) == "replace"


def test_of_equal_findings_the_newest_stay_because_an_operator_may_have_waived_the_others() -> None:
    report = report_of(published(*(finding(f"gpu/{n}", since_s=float(n)) for n in range(1000))))
    kept = json.loads(compact(report))["entities"]
    assert {each["entity"] for each in kept} == {f"gpu/{n}" for n in range(1000 - len(kept), 1000)}


def test_the_largest_report_without_findings_fits() -> None:
    assert len(compact(report_of(published(gpus=256)))) <= MAX_BYTES


def test_text_that_is_not_ascii_counts_with_its_size_in_json() -> None:
    umlauts = "\u00e4" * 100
    odd = [finding(f"disk//{umlauts}{n}", "disk_used", None) for n in range(500)]
    text = compact(report_of(published(*odd)))
    assert text.isascii()
    assert len(text) <= MAX_BYTES
