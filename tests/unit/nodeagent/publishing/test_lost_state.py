"""An agent without the state that it should have does not vouch for the node, until that is over."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from nodeagent.agent.agent import LOST_EVERY_S, MEMORY, Agent, Published
from nodeagent.agent.saved_state import SavedState
from nodeagent.agent.sensor_threads import FittedSensor
from nodeagent.evaluation.evaluator import Evaluator
from nodeagent.model import STATE_LOST, Observation
from nodeagent.policy.loading import shipped
from nodeagent.publishing.conditions import GPU, TRAINING, conditions
from nodeagent.server.report import health_report
from tests.unit.nodeagent.evaluation.world import GPU as BAD_GPU
from tests.unit.nodeagent.ticking import Ticking

HOLD_S = 3600.0
WHY = "memory.json is not used: size or checksum differs from its first line"
LOST = {GPU: ("Unknown", "StateLost"), TRAINING: ("Unknown", "StateLost")}
FINE = {GPU: ("True", "Healthy"), TRAINING: ("True", "Healthy")}


class Seeing:
    period_s = 0.01

    def __init__(self, name: str) -> None:
        self.name = name

    def open(self) -> None: ...

    def close(self) -> None: ...

    def read(self) -> Iterable[Observation]:
        return ()


class Room:
    """An agent whose sensors have been tried, on a clock that the test moves."""

    def __init__(self, folder: Path | None, state: SavedState, lost: str, now_s: float = 1000.0) -> None:
        self.clock = Ticking(now_s)
        self.agent = Agent(shipped(), self.clock, state, folder, lambda _: None, lost=lost)
        self.agent.watch([FittedSensor(Seeing("nvml-polling")), FittedSensor(Seeing("operator"))])
        while not self.agent.published.ready or not all(each.sees for each in self.agent.published.sensors):
            self.agent.inbox.wait(1.0)
            self.agent.run_cycle()

    def after(self, seconds: float) -> Published:
        self.clock.at_s += seconds
        return self.agent.run_cycle()

    def restarted(self, folder: Path | None, lost: str = "") -> Room:
        self.agent.close()
        return Room(folder, self.agent.state, lost, self.clock.at_s)


def seen(published: Published) -> dict[str, tuple[str, str]]:
    return {each.type: (each.status, each.reason) for each in conditions(published)}


def clean_s(published: Published) -> tuple[object, object]:
    found = health_report(published, {})
    return found["clean_s"], found["quiet_s"]


def test_an_agent_that_has_lost_its_state_vouches_again_after_an_hour_and_restarts_do_not_shorten_it(
    tmp_path: Path,
) -> None:
    room = Room(tmp_path, SavedState(), WHY)
    assert seen(room.after(0.0)) == LOST
    assert WHY in conditions(room.agent.published)[0].message
    room = room.restarted(tmp_path)
    lost = room.after(HOLD_S - 10.0)
    assert (seen(lost), clean_s(lost)) == (LOST, (0.0, 0.0))
    room.after(20.0)
    over = room.after(30.0)
    assert (seen(over), clean_s(over)) == (FINE, (30.0, 30.0))
    room.agent.close()


def test_a_fault_that_is_seen_again_is_not_hidden_by_the_loss(tmp_path: Path) -> None:
    room = Room(tmp_path, SavedState(), WHY)
    room.agent.inbox.put([Observation(room.clock.at_s, "xid", BAD_GPU, "kmsg", 79.0)])
    assert seen(room.after(0.0))[GPU] == ("False", "Xid79")
    room.agent.close()


def test_while_the_disk_of_the_state_hangs_the_loss_does_not_end() -> None:
    room = Room(None, SavedState(), "the disk has not answered for 15 s")
    for _ in range(int(2 * HOLD_S / LOST_EVERY_S)):
        lost = room.after(LOST_EVERY_S)
        assert (seen(lost), clean_s(lost)) == (LOST, (0.0, 0.0))
    [finding] = [each for verdict in lost.verdicts for each in verdict.findings]
    assert (finding.check, finding.entity) == (STATE_LOST, MEMORY)
    room.agent.close()


def test_an_operator_ends_the_loss(tmp_path: Path) -> None:
    room = Room(tmp_path, SavedState(), WHY)
    room.after(10.0)
    room.agent.inbox.put([Observation(room.clock.at_s, "cleared", MEMORY, "operator")])
    assert seen(room.after(0.0)) == FINE
    assert seen(room.after(30.0)) == FINE
    assert clean_s(room.agent.published) == (30.0, 30.0)
    room.agent.close()


def test_an_agent_that_has_its_state_or_never_had_one_vouches_at_once(tmp_path: Path) -> None:
    room = Room(tmp_path, SavedState(), "")
    assert seen(room.after(0.0)) == FINE
    before = room.agent.published.state_id
    room = room.restarted(tmp_path)
    assert (seen(room.after(0.0)), room.agent.published.state_id) == (FINE, before)
    room.agent.close()


def test_evidence_that_cannot_be_used_is_a_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def malformed(*_: object) -> None:
        raise ValueError("it is malformed")

    monkeypatch.setattr(Evaluator, "load", malformed)
    room = Room(tmp_path, state := SavedState(evidence={"series": []}, id="before"), "")
    assert (seen(room.after(0.0)), state.id != "before") == (LOST, True)
    room.agent.close()
