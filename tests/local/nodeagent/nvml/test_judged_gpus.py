"""The findings about GPUs that the polling sensor reads, judged by the shipped policy."""

from __future__ import annotations

import pytest

from nodeagent.evaluation.evaluator import Evaluator
from nodeagent.model import Level
from nodeagent.policy.loading import shipped
from tests.fakenvml import state
from tests.local.nodeagent.nvml.polling import Room

pytestmark = pytest.mark.local

STEP_S = 30.0


class Judged:
    """A room, and the evaluator of everything that its sensor reports."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self.evaluator = Evaluator(shipped(), 575)

    def after(self, reads: int) -> dict[tuple[str, str], Level]:
        """Read `reads` times, and return the findings."""
        for _ in range(reads):
            for each in self.room.read(STEP_S):
                self.evaluator.add(each)
        found = self.evaluator.findings(self.room.clock.now_s())
        return {(each.entity, each.check): each.level for each in found}


@pytest.fixture
def judged(room: Room) -> Judged:
    return Judged(room)


def test_a_fresh_node_with_a_gpu_that_nvml_does_not_list_is_unhealthy(judged: Judged) -> None:
    judged.room.fake.vanish(3)
    judged.room.start()
    found = judged.after(3)
    assert found[("node", "gpu_count")] is Level.UNHEALTHY
    assert found[(judged.room.fake.entity(3), "gpu_state")] is Level.UNHEALTHY


def test_a_fresh_node_with_a_gpu_that_cannot_be_opened_is_not_healthy(judged: Judged) -> None:
    for function in ("nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetHandleByPciBusId_v2"):
        judged.room.fake.fail(function, state.UNKNOWN, gpu=3)
    judged.room.start()
    assert judged.after(4) == {(judged.room.fake.entity(3), "gpu_state"): Level.DEGRADED}


def test_a_gpu_whose_mig_mode_is_switched_on_stays_healthy(judged: Judged) -> None:
    assert judged.after(2) == {}
    gpu = judged.room.fake.gpu(1)
    gpu.mig = gpu.mig_pending = 1
    for link in range(18):
        gpu.link_up[link] = 0
    assert judged.after(4) == {}


def test_a_link_that_is_down_takes_the_gpu_out_after_two_polls(judged: Judged) -> None:
    assert judged.after(2) == {}
    judged.room.fake.gpu(1).link_up[0] = 0
    assert judged.after(1) == {}
    assert judged.after(1) == {(judged.room.fake.entity(1), "nvlink_down"): Level.UNHEALTHY}


def test_a_link_that_is_slow_in_three_polls_under_load_is_degraded(judged: Judged) -> None:
    assert judged.after(2) == {}
    gpu, entity = judged.room.fake.gpu(1), judged.room.fake.entity(1)
    gpu.pcie_generation = 1
    assert judged.after(2) == {}
    assert judged.after(1) == {(entity, "pcie_generation"): Level.DEGRADED}
    gpu.utilization = 0  # an idle link proves nothing
    assert judged.after(9) == {(entity, "pcie_generation"): Level.DEGRADED}
    gpu.utilization, gpu.pcie_generation = 95, 5
    assert judged.after(5) == {}
