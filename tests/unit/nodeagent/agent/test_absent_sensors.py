"""Findings about a sensor end when an agent starts that does not have it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace

import pytest

from nodeagent.agent.agent import Agent
from nodeagent.agent.saved_state import SavedState
from nodeagent.agent.sensor_threads import FittedSensor
from nodeagent.model import Level, Observation
from nodeagent.policy.loading import shipped
from nodeagent.sensing.clock import Anchor, Clock
from tests.unit.nodeagent.evaluation.world import GPU


class Quiet:
    """A sensor that observes nothing."""

    period_s = 60.0

    def __init__(self, name: str) -> None:
        self.name = name

    def open(self) -> None: ...

    def read(self) -> Iterable[Observation]:
        return ()

    def close(self) -> None: ...


def agent(state: SavedState, boot: str, *sensors: str) -> Agent:
    """Return an agent that has started its sensors, if it has any."""
    made = Agent(shipped(), Clock(Anchor(boot, 0.0)), state, None, lambda _: None)
    if sensors:
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
    before = agent(SavedState(), "first")
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


@pytest.mark.parametrize("boot", ["first", "second"])
def test_findings_about_absent_sensors_end_at_the_start_and_others_remain(boot: str) -> None:
    made = agent(troubled(), boot, "journal")
    try:
        assert set(troubles(made)) == {("sensor/memory", "memory_lost"), (GPU, "xid")}
    finally:
        state = after_restart(made)
    assert ("sensor/kmsg", "sensor_stuck") not in troubles(agent(state, boot)), "also after the next restart"


def test_a_finding_about_a_sensor_that_the_agent_has_remains_until_its_calls_return() -> None:
    made = agent(troubled(), "second", "kmsg", "policy")
    try:
        assert troubles(made)["sensor/kmsg", "sensor_stuck"] is Level.UNHEALTHY
    finally:
        made.close()
