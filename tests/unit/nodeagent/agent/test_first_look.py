"""The agent tells its evaluator when it first looks, and reports what found no room."""

from __future__ import annotations

import threading

import pytest

from nodeagent.agent.agent import Agent
from nodeagent.agent.saved_state import SavedState
from nodeagent.agent.sensor_threads import FittedSensor
from nodeagent.evaluation.evaluator import Evaluator
from nodeagent.model import HealthFinding, Level, Observation
from nodeagent.policy.loading import shipped
from nodeagent.sensing import clock
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


class Slow:
    """A sensor whose first call ends when it is let go."""

    name, period_s = "nvml-polling", 0.0

    def __init__(self, said: list[Observation]) -> None:
        self.said, self.let_go, self.read_twice = said, threading.Event(), threading.Event()

    def open(self) -> None:
        self.let_go.wait()

    def read(self) -> list[Observation]:
        said, self.said = self.said, []
        if not said:
            self.read_twice.set()
            self.let_go.wait(0.01)
        return said

    def close(self) -> None:
        pass


def test_nothing_is_forgotten_before_each_sensor_has_been_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[float] = []
    monkeypatch.setattr(Evaluator, "forget", lambda _, before_s: forgotten.append(before_s))
    made = agent(SavedState())
    slow = Slow([Observation(made.clock.now_s(), "gpu_state", GPU, "nvml-polling")])
    made.watch([FittedSensor(slow)])
    for _ in range(3):
        made.run_cycle()
    assert forgotten == []
    slow.let_go.set()
    assert slow.read_twice.wait(10.0)
    for _ in range(3):
        made.run_cycle()
    made.close()
    assert len(forgotten) == 1


def test_the_time_that_a_wrong_clock_adds_while_the_node_is_off_is_not_a_time_without_a_fault() -> None:
    day_s, began_s = 86400.0, Clock(BOOT).now_s()
    first = agent(SavedState())
    first.inbox.put([Observation(began_s, "xid", GPU, "kmsg", 138.0)])
    [before] = findings(first)
    assert before.clears == "1 d without another"
    first.close()
    ahead = clock.anchor(first.state.anchor, first.state.last_s, "next", began_s, began_s + 4 * day_s)
    up_s = first.state.last_s - before.last_s
    second = Agent(shipped(), Clock(ahead), first.state, None, lambda _: None)
    assert [(each.code, each.since_s) for each in findings(second)] == [(138, before.since_s)]
    booted_s = ahead.offset_s
    assert [each.code for each in second.evaluator.findings(booted_s + day_s - up_s - 1.0)] == [138]
    assert second.evaluator.findings(booted_s + day_s - up_s + 1.0) == ()
