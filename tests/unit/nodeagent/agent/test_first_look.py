"""The agent's start: its first look, its first losses, and the sensors that only an earlier agent had."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from dataclasses import replace

import pytest

from nodeagent.agent.agent import Agent
from nodeagent.agent.inbox import MAX_EVENTS
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
    assert findings(made) == []
    made.inbox.dropped = 2
    [found] = findings(made)
    assert (found.check, found.level) == ("observations_dropped", Level.DEGRADED)
    assert found.why.startswith("2 observations lost")
    monkeypatch.setattr(Evaluator, "dropped", 3)
    [found] = findings(made)
    assert found.why.startswith("5 observations lost")
    assert made.published.dropped == 5


def test_the_first_losses_are_reported_even_if_they_precede_the_first_cycle_and_after_each_restart() -> None:
    state = SavedState()
    for _ in range(3):  # each run of the agent loses the same number
        made = agent(state)
        assert made.evaluator.findings(made.clock.now_s() + 1e5) == ()
        made.inbox.dropped = 1
        assert [(each.check, each.level) for each in findings(made)] == [
            ("observations_dropped", Level.DEGRADED)
        ]
        made.evaluator.add(Observation(made.clock.now_s(), "cleared", "sensor/agent", "operator"))
        made.close()
        state = made.state


def test_a_fault_in_a_burst_of_harmless_events_is_reported_and_so_is_the_loss() -> None:
    made = agent(SavedState())
    made.run_cycle()
    now_s = made.clock.now_s()
    made.inbox.put([Observation(now_s, "xid", GPU, "kmsg", 95.0)])
    made.inbox.put(
        Observation(now_s, "xid", f"gpu/{n:04x}:00:00.0", "kmsg", 13.0) for n in range(MAX_EVENTS + 900)
    )
    found = {(each.entity, each.check): each.level for each in findings(made) if each.level}
    assert found == {
        (GPU, "xid"): Level.UNHEALTHY,
        ("sensor/agent", "observations_dropped"): Level.DEGRADED,
    }


# -- sensors that the agent does not have


class Quiet:
    """A sensor that observes nothing."""

    period_s = 60.0

    def __init__(self, name: str) -> None:
        self.name = name

    def open(self) -> None: ...

    def read(self) -> Iterable[Observation]:
        return ()

    def close(self) -> None: ...


def started(state: SavedState, boot: str, *sensors: str) -> Agent:
    """Return an agent of this boot that has started its sensors."""
    made = Agent(shipped(), Clock(Anchor(boot, 0.0)), state, None, lambda _: None)
    made.watch([FittedSensor(Quiet(each)) for each in sensors])
    return made


def after_restart(before: Agent) -> SavedState:
    before.close()
    return replace(before.state, evidence=json.loads(json.dumps(before.state.evidence)))


def troubles(made: Agent) -> dict[tuple[str, str], Level]:
    found = made.run_cycle().verdicts
    return {(each.entity, each.check): each.level for verdict in found for each in verdict.findings}


def troubled() -> SavedState:
    """Return the state of an agent with a finding about each of its sensors, and about itself."""
    before = agent(SavedState())
    now_s = before.clock.now_s()
    seen = [
        *(Observation(now_s - 90.0 + k, "sensor_stuck", "sensor/kmsg", "agent", float(k)) for k in range(80)),
        *(
            Observation(now_s - 60.0 + k, "observations_dropped", "sensor/kmsg", "kmsg", float(k))
            for k in range(2)
        ),
        Observation(now_s, "memory_lost", "sensor/policy", "agent", 1.0),
        Observation(now_s, "memory_lost", "sensor/memory", "agent", 1.0),
        Observation(now_s, "xid", GPU, "kmsg", 95.0),
    ]
    before.inbox.put(seen)
    assert troubles(before)["sensor/kmsg", "sensor_stuck"] is Level.UNHEALTHY
    assert len(troubles(before)) == len({(each.entity, each.check) for each in seen})
    return after_restart(before)


@pytest.mark.parametrize("boot", ["boot", "second"])
def test_findings_about_absent_sensors_end_at_the_start_and_others_remain(boot: str) -> None:
    made = started(troubled(), boot, "journal")
    try:
        assert set(troubles(made)) == {("sensor/memory", "memory_lost"), (GPU, "xid")}
    finally:
        state = after_restart(made)
    assert ("sensor/kmsg", "sensor_stuck") not in troubles(agent(state)), "also after the next restart"


def test_a_finding_about_a_sensor_that_the_agent_has_remains_until_its_calls_return() -> None:
    made = started(troubled(), "second", "kmsg", "policy")
    try:
        assert troubles(made)["sensor/kmsg", "sensor_stuck"] is Level.UNHEALTHY
    finally:
        made.close()


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


class UpFor(Clock):
    """The clock of a node that has been up for `up_s`, however long this machine has been."""

    def __init__(self, at: clock.Anchor, up_s: float) -> None:
        super().__init__(at)
        self._up_s = up_s

    def now_s(self) -> float:
        return self.anchor.offset_s + self._up_s


def test_the_time_that_a_wrong_clock_adds_while_the_node_is_off_is_not_a_time_without_a_fault() -> None:
    day_s, began_s = 86400.0, Clock(BOOT).now_s()
    first = agent(SavedState())
    first.inbox.put([Observation(began_s, "xid", GPU, "kmsg", 138.0)])
    [before] = findings(first)
    assert before.clears == "1 d without another"
    first.close()
    ahead = clock.anchor(first.state.anchor, first.state.last_s, "next", began_s, began_s + 4 * day_s)
    up_s = first.state.last_s - before.last_s
    second = Agent(shipped(), UpFor(ahead, 60.0), first.state, None, lambda _: None)
    assert [(each.code, each.since_s) for each in findings(second)] == [(138, before.since_s)]
    booted_s = ahead.offset_s
    assert [each.code for each in second.evaluator.findings(booted_s + day_s - up_s - 1.0)] == [138]
    assert second.evaluator.findings(booted_s + day_s - up_s + 1.0) == ()
