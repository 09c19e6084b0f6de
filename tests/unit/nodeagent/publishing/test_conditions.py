from __future__ import annotations

import re

import pytest

from nodeagent.agent.agent import Published
from nodeagent.agent.sensor_threads import SensorStatus
from nodeagent.model import Action, Level
from nodeagent.publishing import conditions
from nodeagent.publishing.conditions import GPU, MAX_MESSAGE, TRAINING
from tests.unit.nodeagent.publishing.states import SENSORS, finding, published, sensor, untried


def seen(state: Published) -> dict[str, tuple[str, str]]:
    return {each.type: (each.status, each.reason) for each in conditions.conditions(state)}


def test_a_node_without_findings_is_healthy() -> None:
    assert seen(published()) == {GPU: ("True", "Healthy"), TRAINING: ("True", "Healthy")}


def test_an_unhealthy_gpu_makes_both_false_and_names_the_worst_fault() -> None:
    mild = finding(check="ecc_dbe", code=None, action=Action.RESET_GPU)
    found = conditions.conditions(published(mild, finding()))
    assert [(each.status, each.reason) for each in found] == [("False", "Xid79")] * 2
    assert found[0].message == "gpu/0000:3b:00.0: xid 79: it has failed (action: reboot_node, and 1 more)."


def test_an_unhealthy_disk_says_nothing_about_the_gpus() -> None:
    full = finding("disk//var", "disk_used", None, action=Action.CONTACT_SUPPORT)
    assert seen(published(full)) == {GPU: ("True", "Healthy"), TRAINING: ("False", "DiskUsed")}


def test_a_degraded_node_may_be_used() -> None:
    assert seen(published(finding(level=Level.DEGRADED))) == {
        GPU: ("True", "Degraded"), TRAINING: ("True", "Degraded"),
    }  # fmt: skip


def test_a_finding_that_is_healthy_is_no_fault() -> None:
    assert seen(published(finding(level=Level.HEALTHY, action=Action.RESTART_APP)))[GPU] == (
        "True",
        "Healthy",
    )


def test_before_all_sensors_were_tried_nothing_is_known() -> None:
    assert seen(untried()) == {GPU: ("Unknown", "AgentStarting"), TRAINING: ("Unknown", "AgentStarting")}


@pytest.mark.parametrize(
    ("blind", "of_gpus", "of_node"),
    [
        (sensor("journal", "no journalctl"), ("True", "Healthy"), ("Unknown", "SensorsBlind")),
        (sensor("nvml-events", "no driver"), ("Unknown", "SensorsBlind"), ("Unknown", "SensorsBlind")),
        (sensor("nvml-polling", "no driver"), ("Unknown", "SensorsBlind"), ("Unknown", "SensorsBlind")),
        (sensor("nvml-polling", "none", nothing_there=True), ("Unknown", "NoGpus"), ("True", "Healthy")),
        (sensor("operator", "the disk hangs"), ("True", "Healthy"), ("True", "Healthy")),
        (sensor("policy", "the disk hangs"), ("True", "Healthy"), ("True", "Healthy")),
    ],
)
def test_a_blind_sensor_makes_unknown_what_it_would_see(
    blind: SensorStatus, of_gpus: tuple[str, str], of_node: tuple[str, str]
) -> None:
    sensors = [blind if each.name == blind.name else each for each in SENSORS]
    assert seen(published(sensors=sensors)) == {GPU: of_gpus, TRAINING: of_node}


def test_a_known_fault_outweighs_a_blind_sensor_and_a_degraded_state_does_not() -> None:
    sensors = (*SENSORS[:2], sensor("journal", "no journalctl"), *SENSORS[3:])
    assert seen(published(finding(), sensors=sensors))[TRAINING] == ("False", "Xid79")
    degraded = published(finding(level=Level.DEGRADED), sensors=sensors)
    assert seen(degraded)[TRAINING] == ("Unknown", "SensorsBlind")


def test_released_gpus_are_unknown_except_for_a_known_fault() -> None:
    assert seen(published(released=True))[GPU] == ("Unknown", "GpusReleased")
    assert seen(published(finding(), released=True))[GPU] == ("False", "Xid79")


def test_every_condition_is_one_bounded_sentence_with_a_reason_that_kubernetes_accepts() -> None:
    worst = published(finding(why="x" * 5000), finding(code=48))
    blind = published(sensors=(sensor("host", "y" * 5000), *SENSORS[:2]))
    for state in (published(), worst, blind, untried(), published(finding(level=Level.DEGRADED))):
        for each in conditions.conditions(state):
            assert re.fullmatch(r"[A-Z][A-Za-z0-9]*", each.reason)
            assert len(each.message) <= MAX_MESSAGE
            assert each.message.endswith(".")
            assert not each.message.endswith("..")
    assert [each.reason for each in conditions.stopped()] == ["AgentStopped"] * 2
    assert [each.status for each in (*conditions.stopped(), *conditions.silent(10.0))] == ["Unknown"] * 4
