"""The agent reports what it could not do: use a policy file, or evaluate the evidence of one entity."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

from nodeagent.agent.agent import Agent
from nodeagent.agent.policy_file import PolicyFile
from nodeagent.agent.saved_state import SavedState
from nodeagent.evaluation import samples
from nodeagent.model import Level, Observation
from nodeagent.policy.loading import load
from nodeagent.sensing.clock import Anchor, Clock
from nodeagent.server import metrics, report

DISK = "disk//data"


class Room:
    """An agent without sensors, its policy file, and the lines that it wrote to its log."""

    def __init__(self, tmp_path: Path, text: str) -> None:
        self.path = tmp_path / "node.toml"
        self.path.write_text(text)
        self.file = PolicyFile(self.path, tmp_path, required=True)
        self.log: list[Mapping[str, Any]] = []
        self.clock = Clock(Anchor("boot", 0.0))
        self.agent = Agent(
            self.file.current.policy, self.clock, SavedState(), None, lambda _: None,
            policy_file=self.file, note=self.log.append,
        )  # fmt: skip

    def change(self, text: str) -> None:
        self.path.write_text(text)
        for _ in range(2):  # the second finds what the first has found
            self.file.read()
        self.agent.run_cycle()

    def see(self, percent: float) -> None:
        self.agent.inbox.put([Observation(self.clock.now_s(), "disk_used", DISK, "host", percent)])
        self.agent.run_cycle()

    def level(self) -> Level:
        return next(each.level for each in self.agent.published.verdicts if each.entity == DISK)

    def metric(self, name: str) -> float:
        text = generate_latest(metrics.registry(lambda: self.agent.published)).decode()
        return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(f"{name} "))

    def problems(self) -> list[str]:
        found: list[str] = report.health_report(self.agent.published, {})["problems"]
        return found


def test_a_changed_policy_takes_effect_without_a_restart_and_a_bad_one_is_reported(tmp_path: Path) -> None:
    room = Room(tmp_path, "")
    room.see(99.0)
    assert room.level() is Level.UNHEALTHY
    room.change("[checks.disk_used]\nunhealthy = false\n")
    assert room.level() is Level.DEGRADED
    good = room.agent.policy.version
    room.change("[checks.disk_used]\nunhealthy = maybe\n")
    room.see(99.0)
    assert (room.level(), room.agent.policy.version) == (Level.DEGRADED, good)
    (problem,) = room.problems()
    assert "the last good policy remains in force" in problem
    assert (room.metric("holdfast_node_problems"), room.metric("holdfast_node_policy_rejected")) == (1, 1)
    room.change("# nothing\n")
    assert room.level() is Level.UNHEALTHY
    assert room.problems() == []
    assert (room.metric("holdfast_node_problems"), room.metric("holdfast_node_policy_rejected")) == (0, 0)
    assert [each["event"] for each in room.log] == ["policy_loaded", "policy_problem", "policy_loaded"]
    assert room.log[1]["why"] == problem


def test_evidence_that_cannot_be_evaluated_is_reported_once_and_the_agent_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*_: object) -> None:
        raise ZeroDivisionError("a bug of ours")

    room = Room(tmp_path, "")
    monkeypatch.setattr(samples, "sample_finding", wrong)
    for _ in range(3):
        room.see(99.0)
    assert len(room.problems()) == 1
    assert DISK in room.problems()[0]
    assert [each["event"] for each in room.log] == ["evidence_problem"]
    assert room.metric("holdfast_node_problems") == 1
    monkeypatch.undo()
    room.see(99.0)
    assert room.level() is Level.UNHEALTHY


def test_an_agent_without_a_policy_file_keeps_its_policy() -> None:
    policy = load('[xid.63]\nlevel = "degraded"\n')
    agent = Agent(policy, Clock(Anchor("boot", 0.0)), SavedState(), None, lambda _: None)
    agent.run_cycle()
    assert agent.policy is policy


def test_an_agent_that_restarts_serves_what_it_has_saved_before_its_first_cycle(tmp_path: Path) -> None:
    room = Room(tmp_path, "")
    room.see(99.0)
    before = room.agent.published
    state = SavedState(id="same", evidence=room.agent.evaluator.dump(), history=list(before.events))
    again = Agent(room.agent.policy, room.clock, state, None, lambda _: None)
    assert again.published.verdicts == before.verdicts
    assert again.published.events == before.events
    assert again.published.state_id == "same"
    assert not again.published.ready
