from __future__ import annotations

import re
from dataclasses import replace

import pytest

from nodeagent.agent.agent import Published
from nodeagent.agent.sensor_threads import SensorStatus
from nodeagent.evaluation.evaluator import Evaluator
from nodeagent.model import STATE_LOST, Action, Level, Observation
from nodeagent.policy.loading import shipped
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


def observed(*observations: Observation) -> Published:
    """Return the state of an agent that evaluates these observations by the shipped policy."""
    evaluator = Evaluator(shipped(), 575)
    for each in observations:
        evaluator.add(each)
    return replace(published(), verdicts=evaluator.verdicts(max(each.at_s for each in observations)))


@pytest.mark.parametrize(
    ("check", "entity", "source", "reason"),
    [
        ("sensor_stuck", "sensor/nvml-polling", "agent", "SensorStuck"),
        ("sensor_stuck", "sensor/nvml-events", "agent", "SensorStuck"),
        ("gpu_count", "node", "nvml-polling", "GpuCount"),
        ("gpu_process_stuck", "node", "host", "GpuProcessStuck"),
    ],
)
def test_faults_of_the_gpus_that_the_node_or_a_sensor_shows_are_faults_of_the_gpus(
    check: str, entity: str, source: str, reason: str
) -> None:
    state = observed(*(Observation(15.0 * n, check, entity, source, 15.0 * n) for n in range(1, 60)))
    assert seen(state) == {GPU: ("False", reason), TRAINING: ("False", reason)}


def test_a_hung_sensor_of_the_host_is_no_fault_of_the_gpus() -> None:
    state = observed(
        *(Observation(15.0 * n, "sensor_stuck", "sensor/host", "agent", 15.0 * n) for n in range(1, 60))
    )
    assert seen(state) == {GPU: ("True", "Healthy"), TRAINING: ("False", "SensorStuck")}


def test_pci_errors_of_a_device_are_faults_of_the_gpus_only_if_it_is_a_gpu() -> None:
    gpu, drive = "0000:3b:00.0", "0000:4c:00.0"
    listed = Observation(1.0, "gpu_state", f"gpu/{gpu}", "nvml-polling")
    for address, of_gpus in ((gpu, "False"), (drive, "True")):
        counts = (
            Observation(10.0 * n, "aer_fatal", f"device/{address}", "sysfs", float(n)) for n in range(1, 6)
        )
        found = seen(observed(listed, *counts))
        assert (found[GPU][0], found[TRAINING]) == (of_gpus, ("False", "AerFatal"))


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


def test_an_agent_without_its_state_vouches_for_nothing() -> None:
    lost = Observation(1.0, STATE_LOST, "sensor/memory", "agent", text="the disk has not answered for 15 s")
    state = observed(lost)
    assert seen(state) == {GPU: ("Unknown", "StateLost"), TRAINING: ("Unknown", "StateLost")}
    said = "The node agent may have forgotten a fault: the disk has not answered for 15 s."
    assert {each.message for each in conditions.conditions(state)} == {said}
    worse = observed(lost, Observation(1.0, "xid", "gpu/0000:3b:00.0", "kmsg", 79.0))
    assert seen(worse) == {GPU: ("False", "Xid79"), TRAINING: ("False", "Xid79")}
