"""A fault that needs a remedy is treated so, even if its action is to contact support."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from holdfast.node_report import REMEDIES
from supervisor.quarantine import evidence, release
from supervisor.quarantine.decide import decide
from supervisor.quarantine.model import (
    MAX_EVIDENCE,
    Drain,
    Hold,
    NodeFinding,
    NodeView,
    PoolView,
    Release,
    Report,
    Waiver,
)
from tests.unit.supervisor.node_views import (
    DAY_S,
    NOW_S,
    POLICY,
    asked,
    at,
    bad,
    finding,
    node_of,
    pool,
    recovered,
    report,
    settled,
    why,
)

AGAIN = finding(
    "GPU-1 xid 46 contact_support", action="contact_support", reported_remedy="reset_gpu", entity="gpu/0"
)


def known(*findings: NodeFinding, state_id: str = "S1", **given: str) -> NodeView:
    return bad("a", report=report(*findings, state_id=state_id, **given))


def lost(node: NodeView, **given: str) -> NodeView:
    """Return the node after a month without a finding, of which its agent knows only the last part."""
    return recovered(node, 30 * DAY_S, **{"state_id": "S2", "boot_id": "b1", **given})


def test_a_recurring_fault_is_drained_for_its_remedy() -> None:
    found = settled(pool(known(AGAIN)))
    held = node_of(found, "a").quarantine
    assert held is not None
    assert (held.action, held.drain_at_s) == ("contact_support", NOW_S)
    assert held.remedies == ("reset_gpu GPU-1 xid 46 contact_support",)
    support = replace(AGAIN, reported_remedy="")
    assert node_of(settled(pool(known(support))), "a").quarantine.drain_at_s is None  # type: ignore[union-attr]


def test_a_recurring_fault_that_is_lost_with_the_agents_memory_is_not_remedied() -> None:
    out = settled(pool(known(AGAIN)))
    seen = at(out, NOW_S + 30 * DAY_S, lost(node_of(out, "a")))
    assert asked(seen) == []
    assert "no sign of the remedy (reset_gpu)" in why(seen, "a")
    booted = at(out, NOW_S + 30 * DAY_S, lost(node_of(out, "a"), boot_id="b2"))
    assert any(isinstance(each, Release) for each in asked(booted))


def test_a_fault_that_needs_a_boot_waits_for_it_although_support_must_be_contacted() -> None:
    needs_boot = replace(AGAIN, reported_remedy="reboot_node")
    out = settled(pool(known(needs_boot)))
    node = recovered(node_of(out, "a"), 2 * 3600.0, state_id="S1")
    assert "without a sign of the remedy (reboot_node)" in why(at(out, NOW_S + DAY_S, node), "a")


def test_the_remedies_of_two_findings_of_a_gpu_back_each_other() -> None:
    single = replace(AGAIN, sources=("kmsg",), origins=("driver log",))
    other = finding("GPU-1 lost reset_gpu", action="reset_gpu", entity="gpu/0", origins=("driver state",))
    for each in evidence.weigh(bad("a", single, other), (single, other), NOW_S):
        assert evidence.is_corroborated(each)


def test_a_taint_of_an_earlier_version_learns_the_remedy() -> None:
    out = settled(pool(known(AGAIN)))
    node = node_of(out, "a")
    assert node.quarantine is not None
    older = replace(node, quarantine=replace(node.quarantine, remedies=()))
    again = node_of(settled(at(out, NOW_S, older)), "a")
    assert again.quarantine == node.quarantine


def faults(kind: str, count: int, action: str, *, lasting: bool) -> list[NodeFinding]:
    return [
        finding(f"{kind}/{n:03} x {action}", action=action, lasting=lasting, entity=f"{kind}/{n:03}")
        for n in range(count)
    ]


@given(
    st.integers(1, MAX_EVIDENCE + 10),
    st.integers(0, 2 * MAX_EVIDENCE),
    st.sampled_from(["disk", "zzz"]),
    st.sampled_from(REMEDIES),
)
def test_no_number_of_findings_makes_a_lost_fault_count_as_remedied(
    needing: int, others: int, kind: str, remedy: str
) -> None:
    """First there are faults that need a remedy, then others under a new memory, and then none."""
    out = settled(pool(known(*faults("gpu", needing, remedy, lasting=True))))
    passing = faults(kind, others, "contact_support", lasting=False)
    node = replace(node_of(out, "a"), report=report(*passing, state_id="S2"))
    later = settled(at(out, NOW_S + 4000.0, node))
    held = node_of(later, "a").quarantine
    assert held is not None
    assert len(held.evidence) <= MAX_EVIDENCE
    assert release.remedy(held) == remedy
    well = at(later, NOW_S + 60 * DAY_S, lost(node_of(later, "a")))
    assert asked(well) == []
    assert any(isinstance(each, Hold) and each.alert and each.node == "a" for each in decide(well, POLICY))


@given(st.integers(MAX_EVIDENCE + 1, MAX_EVIDENCE + 20), st.integers(1, MAX_EVIDENCE))
def test_a_part_of_the_faults_found_again_does_not_stand_for_those_that_had_no_room(
    count: int, again: int
) -> None:
    all_of_them = faults("gpu", count, "reset_gpu", lasting=True)
    out = settled(pool(known(*all_of_them)))
    found_again = replace(node_of(out, "a"), report=report(*all_of_them[:again], state_id="S2"))
    later = settled(at(out, NOW_S + 4000.0, found_again))
    well = at(later, NOW_S + 60 * DAY_S, lost(node_of(later, "a")))
    assert asked(well) == []


def test_a_report_without_room_raises_an_alert_even_if_all_that_it_shows_is_waived() -> None:
    said = report(finding(held_s=DAY_S), left_out=3)
    node = bad("a", report=said)
    waived = replace(node, waiver=_waiver(said))
    holds = [each for each in decide(pool(waived), POLICY) if isinstance(each, Hold) and each.node == "a"]
    assert [each.alert for each in holds] == [False, True]
    assert "no room for 3 of its findings" in holds[1].why
    only_degraded = replace(said, findings=(*said.findings, finding("x", level="degraded")))
    [hold] = [
        each
        for each in decide(pool(replace(waived, report=only_degraded)), POLICY)
        if isinstance(each, Hold) and each.node == "a"
    ]
    assert not hold.alert


def _waiver(said: Report) -> Waiver:
    return Waiver(evidence.keys(said.findings), NOW_S - 60.0, "b1")


def test_a_drain_for_other_actions_only_does_not_follow_the_remedy() -> None:
    careful = replace(POLICY, drain_for=frozenset({"replace"}))
    found = decide(PoolView(NOW_S, settled(pool(known(AGAIN)), careful).nodes), careful)
    assert not any(isinstance(each, Drain) for each in found)
