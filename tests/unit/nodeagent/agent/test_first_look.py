"""The agent tells its evaluator when it first looks, and reports what found no room."""

from __future__ import annotations

import pytest

from nodeagent.agent.agent import Agent
from nodeagent.agent.saved_state import SavedState
from nodeagent.evaluation.evaluator import Evaluator
from nodeagent.model import HealthFinding, Level, Observation
from nodeagent.policy.loading import shipped
from nodeagent.sensing.clock import Anchor, Clock
from tests.unit.nodeagent.evaluation.world import GPU

BOOT = Anchor("boot", 0.0)


def agent(state: SavedState) -> Agent:
    return Agent(shipped(), Clock(BOOT), state, None, lambda _: None)


def findings(made: Agent) -> list[HealthFinding]:
    return [each for verdict in made.run_cycle().verdicts for each in verdict.findings]


def test_a_fault_from_before_the_first_look_counts_from_it_also_after_a_restart() -> None:
    began_s = Clock(BOOT).now_s()
    first = agent(SavedState())
    first.inbox.put([Observation(began_s - 1e6, "xid", GPU, "kmsg", 95.0)])
    [found] = findings(first)
    assert (found.level, found.lasting) == (Level.UNHEALTHY, True)
    assert found.since_s >= began_s
    first.close()
    assert [each.since_s for each in findings(agent(first.state))] == [found.since_s]


def test_what_the_evaluator_refuses_is_reported_with_what_the_queue_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = agent(SavedState())
    made.inbox.dropped = 2
    made.run_cycle()
    monkeypatch.setattr(Evaluator, "dropped", 3)
    [found] = findings(made)
    assert (found.check, found.level) == ("observations_dropped", Level.DEGRADED)
    assert made.published.dropped == 5
