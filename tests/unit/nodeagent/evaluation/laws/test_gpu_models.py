"""What a fault means for a GPU's model, MIG mode and driver: across restarts and changes of the mode."""

from __future__ import annotations

import json

import pytest

from nodeagent.evaluation.devices import MAX_MODELS, MAX_MODES
from nodeagent.evaluation.evaluator import Evaluator
from nodeagent.evaluation.retention import FORGET_S
from nodeagent.model import Action, Observation
from nodeagent.policy.loading import shipped
from tests.unit.nodeagent.evaluation.world import DAY_S, GPU, mark, xid

POLICY = shipped()
A100, OTHER = "NVIDIA A100-SXM4-80GB", "gpu/0000:4b:00.0"


def seen(at_s: float, mig: str = "", slot: str = GPU, uuid: str = "GPU-a", name: str = A100) -> Observation:
    facts = {"uuid": uuid, "name": name, "mig": mig}
    stated = tuple((key, value) for key, value in facts.items() if value)
    return Observation(at_s, "gpu_state", slot, "nvml-polling", 0.0 if name else 1.0, facts=stated)


def evaluator(*observations: Observation) -> Evaluator:
    """Return an evaluator that was stored and restored after the observations."""
    made = Evaluator(POLICY, 575)
    for each in observations:
        made.add(each)
    again = Evaluator(POLICY)
    again.load(json.loads(json.dumps(made.dump())))
    return again


def actions(made: Evaluator, now_s: float) -> list[Action]:
    return [each.action for each in made.findings(now_s) if each.check == "xid"]


@pytest.mark.parametrize("code", [64, 95])
@pytest.mark.parametrize("uuid", ["GPU-a", ""])
def test_a_fault_that_needs_a_reboot_on_this_model_stands_after_a_restart_and_a_reset(
    code: int, uuid: str
) -> None:
    made = evaluator(seen(1.0, "off", uuid=uuid), xid(code, 10.0), mark("gpu_reset", 200.0))
    assert actions(made, 900.0) == [Action.REBOOT_NODE], "before the driver has answered"
    made.forget(900.0 + 40 * DAY_S - FORGET_S)
    assert actions(made, 40 * DAY_S) == [Action.REBOOT_NODE]
    made.add(mark("boot", 40 * DAY_S))
    assert not made.findings(40 * DAY_S + 700.0)


@pytest.mark.parametrize("fault_s", [10.0, 100.0, 205.0])
def test_switching_mig_on_does_not_end_a_fault_that_came_while_it_was_off(fault_s: float) -> None:
    fault = [seen(1.0, "off"), seen(200.0, "off"), xid(95, fault_s), mark("gpu_reset", 209.0)]
    made = evaluator(*fault, seen(210.0, "on"), seen(220.0, "on"))
    assert actions(made, 2000.0) == [Action.REBOOT_NODE]
    made = evaluator(*fault, seen(210.0, "on"), mark("boot", 900.0))
    assert actions(made, 2000.0) == []


def test_a_fault_while_mig_was_on_needs_only_a_reset_also_after_it_was_switched_off() -> None:
    made = evaluator(seen(1.0, "on"), seen(200.0, "on"), xid(95, 100.0), seen(210.0, "off"))
    assert actions(made, 300.0) == [Action.RESET_GPU]
    made.add(xid(95, 205.0))
    assert actions(made, 300.0) == [Action.REBOOT_NODE], "it may have been off already"


def test_a_driver_that_cannot_name_the_gpu_any_more_changes_nothing() -> None:
    lost = [seen(50.0, name=""), seen(60.0, ""), mark("gpu_reset", 200.0)]
    assert actions(evaluator(seen(1.0, "off"), xid(95, 10.0), *lost), 900.0) == [Action.REBOOT_NODE]
    lost = [seen(50.0, name=""), seen(60.0, ""), mark("gpu_reset", 200.0)]
    assert actions(evaluator(seen(1.0, "on"), xid(95, 10.0), *lost), 900.0) == []


def test_a_gpu_takes_its_mig_mode_along_to_another_slot() -> None:
    moved = [seen(1.0, "off"), xid(95, 10.0), mark("gpu_reset", 20.0), seen(30.0, "on", OTHER)]
    assert [(each.entity, each.action) for each in evaluator(*moved).findings(900.0)] == [
        (OTHER, Action.REBOOT_NODE)
    ]


def test_a_fault_of_a_gpu_whose_model_no_memory_and_no_sensor_has_told_is_not_forgotten() -> None:
    fault = [xid(95, 10.0), mark("gpu_reset", 200.0), xid(13, 300.0)]
    made = Evaluator(POLICY, 575)
    for each in fault:
        made.add(each)
    made.forget(40 * DAY_S - FORGET_S)
    assert [row[2] for row in made.dump()["events"] if row[1] == "xid"] == [95]
    made.add(seen(40 * DAY_S, "off"))
    assert actions(made, 40 * DAY_S) == [Action.REBOOT_NODE]
    made.add(seen(41 * DAY_S, "off", uuid="GPU-a", name="NVIDIA H100"))
    made.forget(42 * DAY_S - FORGET_S)
    assert not [row for row in made.dump()["events"] if row[1] == "xid"], "no reboot was needed on this model"


def test_the_driver_s_branch_is_remembered_until_the_driver_names_another() -> None:
    made = evaluator()
    assert made.branch == 575
    made.branch = None
    assert made.branch == 575, "a driver that does not answer has not become another one"
    again = Evaluator(POLICY, 550)
    again.load(made.dump())
    assert again.branch == 550
    made.branch = 560
    assert made.branch == 560


def test_the_histories_are_bounded_and_what_is_cut_off_counts_as_off() -> None:
    made = evaluator(seen(0.0, "on"), *(seen(10.0 + n, ("off", "on")[n % 2]) for n in range(40)))
    made.add(xid(95, 5.0))
    assert actions(made, 60.0) == [Action.REBOOT_NODE]
    [[_, _, modes]] = made.dump()["models"]
    assert len(modes) == MAX_MODES
    for n in range(MAX_MODELS + 5):
        made.add(seen(100.0 + n, "off", uuid=f"GPU-{n}"))
    assert len(made.dump()["models"]) == MAX_MODELS


@pytest.mark.parametrize("modes", [[], [None], [[None, "x", 1]]])
def test_a_malformed_history_is_refused(modes: object) -> None:
    raw = evaluator().dump() | {"models": [["GPU-a", A100, modes]]}
    with pytest.raises((ValueError, TypeError)):
        Evaluator(POLICY).load(raw)
