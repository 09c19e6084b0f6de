from __future__ import annotations

from dataclasses import replace

import pytest

from supervisor.quarantine import evidence
from supervisor.quarantine.model import NodeFinding, RunFault
from tests.unit.supervisor.node_views import (
    NOW_S,
    POLICY,
    alone,
    asked,
    bad,
    finding,
    node_of,
    pool,
    report,
    settled,
)


@pytest.mark.parametrize(
    ("sources", "verdict_by", "expected"),
    [
        (("kmsg",), "", False),
        (("kmsg", "kmsg"), "", False),
        (("kmsg", "nvml_events"), "", True),
        (("kmsg",), "driver", True),
        (("kmsg",), "operator", False),
        ((), "", False),
    ],
)
def test_two_sensors_or_the_driver_are_two_sources(
    sources: tuple[str, ...], verdict_by: str, expected: bool
) -> None:
    assert evidence.is_corroborated(finding(sources=sources, verdict_by=verdict_by)) is expected


def test_only_a_lasting_finding_that_needs_an_empty_node_may_drain_it() -> None:
    assert evidence.may_drain(finding(), POLICY)
    assert not evidence.may_drain(finding(action="contact_support"), POLICY)
    assert not evidence.may_drain(finding(lasting=False), POLICY)
    assert not evidence.may_drain(finding(level="degraded"), POLICY)
    assert not evidence.may_drain(finding(held_s=59.0), POLICY)
    assert not evidence.may_drain(alone(action="replace", lasting=True), POLICY)


def test_an_unknown_action_counts_as_the_cheapest() -> None:
    found = (finding(action="sing"), finding(action="reset_gpu"))
    assert evidence.costliest_action(found) == "reset_gpu"
    assert evidence.costliest_action(()) == "none"


def test_a_degraded_node_is_not_unhealthy() -> None:
    assert evidence.unhealthy(report(finding(level="degraded"), finding(level="strange"))) == ()


GPU = finding(entity="gpu/0", device="GPU-1")
LOST = replace(GPU, key="lost", sources=("nvml-polling",), origins=("driver state",))
XID = replace(GPU, key="xid 79", sources=("kmsg", "nvml-events"), origins=("driver log",))
STUCK = finding("sensor_stuck", entity="sensor/nvml-polling", sources=("agent",), origins=("driver state",))
HUNG = finding("gpu_process_stuck", entity="node", sources=("host",), origins=("host",))


def sure(*findings: NodeFinding, runs: tuple[RunFault, ...] = ()) -> list[str]:
    """Return the keys of the findings that are corroborated on one node."""
    weighed = evidence.weigh(bad("a", *findings, runs=runs), findings, NOW_S)
    return [each.key for each in weighed if evidence.is_corroborated(each)]


def test_sensors_with_one_origin_are_one_witness() -> None:
    assert not evidence.is_corroborated(XID), "the log and the events of the driver are the same Xid"
    assert evidence.is_corroborated(replace(XID, origins=("driver log", "kernel")))
    assert evidence.is_corroborated(replace(XID, origins=())), "an older agent does not report origins"


def test_two_findings_of_one_gpu_that_need_one_remedy_are_two_witnesses() -> None:
    assert sure(LOST, XID) == ["lost", "xid 79"]
    assert sure(LOST, replace(XID, origins=("driver state",))) == []
    assert sure(LOST, replace(XID, device="GPU-2")) == []
    assert sure(replace(LOST, device=""), replace(XID, device="", entity="gpu/1")) == []
    assert sure(replace(LOST, entity="gpu/7"), XID) == ["lost", "xid 79"], "it was moved to another slot"
    assert sure(replace(LOST, entity="", device=""), replace(XID, entity="", device="")) == []


def test_the_dearer_remedy_backs_the_cheaper_one_and_not_the_other_way_round() -> None:
    assert sure(replace(LOST, action="reset_gpu"), XID) == ["lost"]
    assert sure(replace(LOST, action="replace"), XID) == ["xid 79"]
    assert sure(replace(LOST, action="contact_support"), replace(XID, action="contact_support")) == []


def test_the_drivers_word_on_one_finding_backs_the_others_of_that_gpu() -> None:
    assert sure(replace(LOST, origins=("driver log",)), replace(XID, verdict_by="driver")) == [
        *("lost", "xid 79")
    ]


def test_a_driver_that_hangs_is_seen_by_two_findings_of_the_node() -> None:
    assert sure(STUCK, HUNG) == ["sensor_stuck", "gpu_process_stuck"]
    assert sure(HUNG, XID) == ["gpu_process_stuck", "xid 79"]
    assert sure(replace(HUNG, action="reset_gpu"), replace(XID, action="reset_gpu")) == []


def test_a_finding_about_a_disk_does_not_confirm_a_gpu_fault() -> None:
    disk = replace(XID, entity="disk//", device="", key="disk_read_only")
    assert sure(disk, XID) == []


@pytest.mark.parametrize("pair", [(STUCK, HUNG), (LOST, XID)])
def test_work_is_ended_for_a_fault_that_two_findings_report(pair: tuple[NodeFinding, ...]) -> None:
    seen = settled(pool(bad("a", *pair)))
    held = node_of(seen, "a").quarantine
    assert held is not None
    assert held.drain_at_s == NOW_S
    assert asked(pool(bad("a", *pair)))[0].why.startswith(f"{max(pair, key=lambda f: f.key).key} (reboot")


def test_a_training_run_is_a_witness() -> None:
    assert evidence.is_corroborated(replace(XID, origins=("driver log", "run")))
    began_s = NOW_S - 100.0  # the report is 10 s old
    for at_s, counts in ((began_s - 600.0, True), (began_s - 601.0, False), (NOW_S, True)):
        assert sure(XID, runs=(RunFault(at_s, "GPU-1"),)) == (["xid 79"] if counts else [])
    assert sure(XID, runs=(RunFault(NOW_S, "GPU-2"),)) == []
    assert sure(XID, runs=(RunFault(NOW_S),)) == ["xid 79"]
    assert sure(replace(XID, entity="disk//", device=""), runs=(RunFault(NOW_S),)) == []
    seen = settled(pool(bad("a", XID, runs=(RunFault(NOW_S),))))
    assert node_of(seen, "a").quarantine.drain_at_s == NOW_S  # type: ignore[union-attr]


def test_a_description_names_what_backs_the_finding() -> None:
    [lost, _] = evidence.weigh(bad("a", LOST, XID), (LOST, XID), NOW_S)
    assert evidence.describe((lost,)) == (
        "lost (reboot_node) for 90 s, reported by nvml-polling, backed by driver log"
    )


def test_a_persons_look_is_no_remedy_and_hides_none() -> None:
    """The remedy of a node decides what has to be seen before it returns."""
    both = (finding(action="reboot_node"), finding(action="contact_support"))
    assert evidence.costliest_action(both) == "reboot_node"
