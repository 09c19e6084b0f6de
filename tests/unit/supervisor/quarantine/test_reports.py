from __future__ import annotations

import math
from typing import Any

import pytest

from supervisor.quarantine.decide import decide
from supervisor.quarantine.model import Hold, NodeFinding, NodeView, Report
from supervisor.quarantine.reports import BadReport, Machine, Received, heard, read_report
from tests.unit.supervisor.node_views import NOW_S, POLICY, asked, pool, why

XID: dict[str, Any] = {
    "check": "xid", "code": 79, "level": "unhealthy", "action": "reboot_node",
    "since_s": 1000.0, "last_s": 1060.0, "why": "Xid 79", "evidence": [], "clears": "a reboot",
    "sources": ["kmsg", "nvml-events"], "lasting": True, "overridden": "driver",
}  # fmt: skip
DOWN: dict[str, Any] = {
    "check": "ib_port", "code": None, "level": "degraded", "action": "contact_support",
    "since_s": 1040.0, "last_s": 1090.0, "sources": ["sysfs"], "lasting": True, "overridden": "",
}  # fmt: skip


def raw(*findings: dict[str, Any], **given: Any) -> dict[str, Any]:
    """Return a report as an agent of version 0.1.0 writes it."""
    return {
        "schema": 1, "node": "a", "boot_id": "b1", "version": "0.1.0", "policy": "9f3c", "test": False,
        "at_s": 1100.0, "level": "unhealthy", "action": "reboot_node",
        "clean_s": 0.0, "quiet_s": 0.0, "calmed_s": None, "driver": {},
        "gpus": [{"entity": "gpu/0000:2b:00.0", "uuid": "GPU-1", "name": "H100", "serial": "165"}],
        "entities": [
            {"entity": "port/mlx5_0/1", "findings": [DOWN]},
            {"entity": "gpu/0000:2b:00.0", "findings": list(findings)},
        ],
        "sensors": [{"name": "sysfs", "sees": True}, {"name": "kmsg", "sees": False, "why": "no permission"}],
        "dropped": 0, "problems": [], **given,
    }  # fmt: skip


def test_a_report_says_which_memory_it_is_from() -> None:
    assert read_report(raw(XID, state_id="m1")).state_id == "m1"
    assert read_report(raw(XID)).state_id == ""


def test_a_report_of_an_older_agent_is_read_as_far_as_it_says() -> None:
    place = "gpu/0000:2b:00.0 xid 79 reboot_node"
    port = "port/mlx5_0/1 ib_port contact_support"
    assert read_report(raw(XID)) == Report(
        (
            NodeFinding(
                place, "unhealthy", "reboot_node", 100.0, ("kmsg", "nvml-events"), "driver", True,
                "gpu/0000:2b:00.0", "xid 79", (), "", place, 40.0,
            ),
            NodeFinding(
                port, "degraded", "contact_support", 60.0, ("sysfs",), "", True,
                "port/mlx5_0/1", "ib_port", (), "", port, None,
            ),
        ),
        boot_id="b1",
        agent="0.1.0",
        blind=("kmsg",),
        devices=("GPU-1",),
    )  # fmt: skip


def test_a_finding_follows_its_device_and_keeps_the_key_of_its_place() -> None:
    for device in ("GPU-1", "165"):
        [gpu, _] = read_report(raw({**XID, "device": device, "origins": ["driver log", "run"]})).findings
        assert (gpu.key, gpu.device, gpu.origins) == (
            *("GPU-1 xid 79 reboot_node", "GPU-1"),
            ("driver log", "run"),
        )
        assert gpu.place_key == "gpu/0000:2b:00.0 xid 79 reboot_node"


def test_the_policy_is_no_part_of_the_agents_version() -> None:
    assert read_report(raw(policy="other")).agent == read_report(raw()).agent == "0.1.0"


def test_the_sensors_that_pause_the_clean_time_are_read_and_each_sensor_does_during_a_release() -> None:
    seen = read_report(raw(clean_needs=["kmsg"], quiet_needs=["kmsg", "host"], released=None))
    assert (seen.clean_needs, seen.quiet_needs) == (("kmsg",), ("kmsg", "host"))
    released = read_report(raw(released={"until_s": 5.0, "closed": True}))
    assert released.clean_needs == released.quiet_needs == ("sysfs", "kmsg")


def test_a_healthy_finding_and_unknown_fields_are_left_out() -> None:
    assert read_report(raw({**XID, "level": "healthy"}, new={"x": 1})).findings[0].signature == "ib_port"
    assert read_report(raw(calmed_s=5, clean_s=7)).clean_s == 7.0
    assert read_report(raw()).calmed_s == math.inf


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"schema": 2}, "schema is 2; expected 1"),
        ({"at_s": "now"}, "at_s is 'now'; expected a number"),
        ({"at_s": math.nan}, "at_s is nan; expected a number"),
        ({"clean_s": True}, "clean_s is True; expected a number"),
        ({"entities": 5}, "entities is 5; expected a list of at most 10000 items"),
        ({"entities": [3]}, "an item of entities is 3; expected an object"),
        ({"clean_needs": "kmsg"}, "clean_needs is 'kmsg'; expected a list"),
        ({"boot_id": 7}, "boot_id is 7; expected text"),
        (
            {"entities": [{"entity": "a", "findings": [{**XID, "since_s": None}]}]},
            "since_s is None; expected",
        ),
        ({"gpus": [{"uuid": 1}]}, "uuid is 1; expected text"),
    ],
)
def test_a_malformed_report_is_refused_with_the_field_and_its_value(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadReport, match=f"^{message}"):
        read_report(raw(**given))
    seen = heard(NODE, Machine(), [Received("a", raw(**given), NOW_S)], NOW_S, POLICY)
    assert message in seen.refused
    assert seen.report is None


NODE = NodeView("a")
KNOWN = Machine("b1", "m1", NOW_S - 300.0)


def of(
    boot_id: str, age_s: float = 5.0, machine_id: str = "", node: str = "a", up_s: float | None = None
) -> Received:
    booted_s = {} if up_s is None else {"booted_s": 1100.0 - up_s}
    return Received(node, raw(XID, boot_id=boot_id, machine_id=machine_id, **booted_s), NOW_S - age_s)


def test_the_newest_report_of_the_node_is_used_and_others_names_are_ignored() -> None:
    seen = heard(NODE, KNOWN, [of("b1"), of("b1", 40.0), of("b2", node="b")], NOW_S, POLICY)
    assert (seen.silent_s, seen.refused) == (5.0, "")
    assert seen.report == read_report(of("b1").raw)
    assert heard(NODE, KNOWN, [], NOW_S, POLICY) == NODE


def test_two_machines_under_one_name_are_refused_and_reported() -> None:
    seen = heard(NODE, Machine(), [of("b1"), of("b2", 119.0)], NOW_S, POLICY)
    assert seen.report is None
    assert seen.refused == "2 machines report under its name (boot b1, boot b2)"
    assert asked(pool(seen)) == []
    [hold] = [each for each in decide(pool(seen), POLICY) if each.node == "a"]
    assert isinstance(hold, Hold)
    assert hold.alert
    later = heard(NODE, Machine(), [of("b1"), of("b2", 121.0)], NOW_S, POLICY)
    assert (later.refused, later.silent_s) == ("", 5.0), "the other one is silent"
    twins = [of("b1", machine_id="m1"), of("b1", machine_id="m2")]
    assert "2 machines" in heard(NODE, Machine(), twins, NOW_S, POLICY).refused


@pytest.mark.parametrize(
    "received",
    [
        (of("b1", 40.0, "m1"), of("b2", 5.0, "m1", up_s=20.0)),
        (of("b1", 40.0), of("b2", 5.0, up_s=20.0)),
        (of("b1", 61.0, "m1"), of("b2", 5.0, "m1")),
        (of("b1", 100.0, "m1"), of("b1", 65.0, "m1"), of("b2", 5.0, "m1")),
        (of("b1", 35.0), of("b1", 5.0, "m1")),
    ],
    ids=["reboot", "reboot, no machine id", "reboot, older agent", "several reports", "upgrade of the agent"],
)
def test_a_reboot_or_an_upgrade_of_the_agent_makes_no_second_machine(received: tuple[Received, ...]) -> None:
    seen = heard(NODE, Machine(), received, NOW_S, POLICY)
    assert (seen.refused, seen.silent_s) == ("", 5.0)
    assert seen.report is not None
    assert seen.report.boot_id == received[-1].raw["boot_id"]


@pytest.mark.parametrize(
    "received",
    [
        (of("b1", 20.0, "m1"), of("b2", 5.0, "m1", up_s=20.0)),
        (of("b1", 59.0, "m1"), of("b2", 5.0, "m1")),
        (of("b1", 61.0), of("b2", 5.0)),
        (of("b1", 40.0, "m1"), of("b2", 5.0, "m2", up_s=20.0)),
        (of("", 35.0), of("b1", 5.0, "m1")),
    ],
    ids=["reports after its clone has booted", "clone, older agent", "no ids", "other machine", "no boot id"],
)
def test_what_a_reboot_does_not_explain_is_another_machine(received: tuple[Received, ...]) -> None:
    assert "2 machines" in heard(NODE, Machine(), received, NOW_S, POLICY).refused


def test_an_upgrade_of_the_agent_makes_no_second_machine_beside_the_node_object() -> None:
    seen = heard(NODE, KNOWN, [of("b1", 35.0), of("b1", 5.0, "m1")], NOW_S, POLICY)
    assert (seen.refused, seen.silent_s) == ("", 5.0)


@pytest.mark.parametrize("booted_s", ["soon", math.nan, True])
def test_a_malformed_time_of_the_boot_explains_nothing(booted_s: object) -> None:
    new = Received("a", {**of("b2").raw, "booted_s": booted_s}, NOW_S)
    assert "2 machines" in heard(NODE, Machine(), [of("b1"), new], NOW_S, POLICY).refused


def test_a_report_of_another_boot_than_the_node_objects_is_refused_and_reported() -> None:
    seen = heard(NODE, KNOWN, [of("b2")], NOW_S, POLICY)
    assert seen.report is None
    assert seen.refused == "a report under its name is from another machine or boot (boot b2; expected b1 m1)"
    assert "unknown: a report under its name" in why(pool(seen), "a")
    assert heard(NODE, KNOWN, [of("b1", machine_id="m2")], NOW_S, POLICY).report is None


def test_the_report_that_the_node_object_confirms_is_used_and_the_other_is_still_reported() -> None:
    seen = heard(NODE, KNOWN, [of("b2", 1.0), of("b1")], NOW_S, POLICY)
    assert seen.report is not None
    assert seen.report.boot_id == "b1"
    found = [each for each in decide(pool(seen), POLICY) if each.node == "a"]
    assert [(type(each).__name__, each.why[:26]) for each in found[1:]] == [
        ("Hold", "a report under its name is")
    ]
    assert found[1].alert  # type: ignore[union-attr]


def test_a_report_from_before_the_last_boot_is_old_and_no_contradiction() -> None:
    rebooted = Machine("b2", "", NOW_S - 4.0)
    assert heard(NODE, rebooted, [of("b1", 5.0)], NOW_S, POLICY) == NODE
    assert heard(NODE, rebooted, [of("b1", 3.0)], NOW_S, POLICY).refused


def test_a_sensor_that_the_agent_needs_but_no_longer_has_is_blind() -> None:
    needs = {"clean_needs": ["nvml-events", "agent", "injected"], "quiet_needs": ["sysfs", "host"]}
    assert read_report(raw(XID, **needs)).blind == ("kmsg", "host", "nvml-events")
    assert read_report(raw(XID, **needs, sensors=None)).blind == (), "it does not say which it has"
