from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Iterator
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.agent import clean_time, sensor_threads
from nodeagent.agent.agent import Agent
from nodeagent.agent.clean_time import GAP_S, CleanTime
from nodeagent.agent.saved_state import SavedState
from nodeagent.agent.sensor_threads import FittedSensor
from nodeagent.model import Action, HealthFinding, Level, Observation
from nodeagent.policy.loading import shipped
from nodeagent.sensing.sensor import Unavailable
from nodeagent.server.report import health_report
from tests.unit.nodeagent.evaluation.world import GPU
from tests.unit.nodeagent.ticking import Ticking

LEVELS = (Level.DEGRADED, Level.UNHEALTHY)


def standing(level: Level, *sources: str) -> list[HealthFinding]:
    if level is Level.HEALTHY:
        return []
    by = sources or ("test",)
    return [HealthFinding("node", "x", None, level, Action.NONE, 0.0, 0.0, "it", (), "", by)]


def ages(found: CleanTime, now_s: float) -> tuple[float | None, ...]:
    return tuple(found.as_json(now_s).values())


def test_clean_time_counts_from_the_first_cycle_in_which_all_sensors_were_tried() -> None:
    found = CleanTime().after(10.0, [], ready=False)
    assert ages(found, 10.0) == (0.0, 0.0, None)
    found = found.after(20.0, [], ready=True).after(50.0, [], ready=True)
    assert ages(found, 50.0) == (30.0, 30.0, None)


def test_clean_time_restarts_at_the_end_of_a_finding() -> None:
    found = CleanTime().after(0.0, [], ready=True)
    found = found.after(10.0, standing(Level.DEGRADED), ready=True)
    assert ages(found, 15.0) == (15.0, 5.0, None)
    found = found.after(20.0, standing(Level.UNHEALTHY), ready=True)
    assert ages(found, 25.0) == (5.0, 5.0, 5.0)


def test_clean_time_pauses_during_a_short_restart_and_restarts_after_a_gap() -> None:
    found = CleanTime().after(0.0, standing(Level.UNHEALTHY), ready=True).after(100.0, [], ready=True)
    back = found.resumed(100.0, 100.0 + GAP_S).after(101.0 + GAP_S, [], ready=False)
    assert ages(back, 300.0) == (300.0 - 1.0 - GAP_S, 300.0 - 1.0 - GAP_S, 300.0), "from save to first cycle"
    away = found.resumed(100.0, 101.0 + GAP_S)
    assert ages(away, 300.0) == (0.0, 0.0, 300.0)
    assert ages(away.after(400.0, [], ready=True), 410.0) == (10.0, 10.0, 410.0)


@given(
    st.lists(
        st.tuples(
            st.floats(0.0, 500.0),
            st.sampled_from(Level),
            st.booleans(),
            st.sampled_from(["kmsg", "sysfs"]),
            st.sets(st.sampled_from(["kmsg", "sysfs"])),
        ),
        max_size=20,
    ),
    st.floats(0.0, 9.0),
    st.booleans(),
)
def test_clean_time_never_exceeds_the_watched_time_nor_the_time_since_the_last_fault(
    looks: list[tuple[float, Level, bool, str, set[str]]], later_s: float, restarts: bool
) -> None:
    found, now_s, began_s, bad_s = CleanTime(), 0.0, None, float("-inf")
    for step_s, level, ready, source, blind in looks:
        now_s += step_s
        found = found.after(now_s, standing(level, source), ready, blind=blind)
        found = saved_and_loaded(found) if restarts else found
        began_s = now_s if began_s is None and ready else began_s
        bad_s = now_s if level is Level.UNHEALTHY else bad_s
    at_s = now_s + later_s
    clean_s, quiet_s, _ = ages(found, at_s)
    assert clean_s is not None
    assert quiet_s is not None
    assert quiet_s <= clean_s <= (0.0 if began_s is None else at_s - max(began_s, bad_s)) + 0.001


def test_a_release_of_the_gpus_neither_restarts_the_clean_time_nor_counts() -> None:
    found = CleanTime().after(0.0, standing(Level.UNHEALTHY), ready=True).after(100.0, [], ready=True)
    for now_s in (103.0, 500.0, 700.0):
        found = found.after(now_s, [], ready=True, released=True)
        assert ages(found, now_s) == (100.0, 100.0, now_s)
    found = found.after(710.0, [], ready=True)
    assert ages(found, 710.0) == (110.0, 110.0, 710.0)
    found = found.after(720.0, standing(Level.UNHEALTHY), ready=True).after(730.0, [], ready=True)
    assert ages(found, 730.0) == (10.0, 10.0, 10.0), "what was released before is over"


def test_a_restart_during_a_release_does_not_restart_the_clean_time() -> None:
    found = CleanTime().after(0.0, [], ready=True).after(50.0, [], ready=True)
    long = 50.0 + 10 * GAP_S

    def clean_s(released_until_s: float) -> float | None:
        resumed = found.resumed(50.0, long, released_until_s)
        return ages(resumed.after(long, [], ready=False), long)[0]

    assert clean_s(long + 1) == clean_s(long - GAP_S) == 50.0
    assert clean_s(long - GAP_S - 1) == clean_s(-inf) == 0.0


def test_restarts_in_a_row_without_a_look_of_the_needed_sensor_count_nothing() -> None:
    found = CleanTime().after(0.0, standing(Level.UNHEALTHY, "kmsg"), ready=True).after(10.0, [], ready=True)
    now_s = 10.0
    for _ in range(22):  # each agent is ended after its first cycles, and before its next save
        saved_s, now_s = now_s, now_s + GAP_S - 10.0
        found = saved_and_loaded(found).resumed(saved_s, now_s)
        for _ in range(2):
            now_s += 0.5
            found = found.after(now_s, [], ready=False, blind=["kmsg"])
    assert ages(found, now_s) == (10.0, 10.0, now_s)
    seeing = found.after(now_s + 5.0, [], ready=True).after(now_s + 15.0, [], ready=True)
    assert ages(seeing, now_s + 15.0)[0] == 20.0, "from its first look"


def test_a_restart_keeps_the_needed_sensors_of_a_fault_that_stands() -> None:
    found = CleanTime().after(0.0, standing(Level.UNHEALTHY, "kmsg"), ready=True)
    back = saved_and_loaded(found).resumed(0.0, 60.0)
    again = back.after(60.0, standing(Level.UNHEALTHY, "nvml-polling"), ready=False)
    assert again.needs_as_json()["clean_needs"] == ["kmsg", "nvml-polling"]


def test_a_release_is_saved_and_what_an_earlier_version_saved_is_loaded() -> None:
    found = CleanTime().after(0.0, [], ready=True).after(10.0, [], ready=True, released=True)
    assert ages(saved_and_loaded(found), 30.0) == (20.0, 20.0, None)
    assert ages(clean_time.load_clean_time(found.dump()), 30.0) == (30.0, 30.0, None)
    assert len(found.dump()) == 3, "an earlier version reads three values"


def saved_and_loaded(found: CleanTime) -> CleanTime:
    needs = [sorted(each) for each in found.needs]
    return clean_time.load_clean_time(*json.loads(json.dumps([found.dump(), found.paused_s, needs])))


def test_time_in_which_a_sensor_of_the_newest_findings_is_blind_does_not_count() -> None:
    found = CleanTime().after(0.0, standing(Level.UNHEALTHY, "kmsg"), ready=True)
    found = found.after(10.0, standing(Level.UNHEALTHY, "nvml-polling"), ready=True)
    assert found.needs_as_json()["clean_needs"] == ["kmsg", "nvml-polling"]
    for now_s in (20.0, 30.0):
        found = found.after(now_s, [], ready=True, blind=["sysfs"])
    assert ages(found, 30.0) == (20.0, 20.0, 20.0), "the sensor of no finding"
    for now_s in (40.0, 3000.0):
        found = found.after(now_s, [], ready=True, blind=["kmsg"])
        assert ages(found, now_s) == (20.0, 20.0, now_s - 10.0)
    found = found.after(3010.0, [], ready=True)
    assert ages(found, 3010.0)[0] == 20.0, "it was blind for a part of the time since the last cycle"
    found = (
        saved_and_loaded(found).after(3010.0, [], ready=True).after(3020.0, [], ready=True, blind=["kmsg"])
    )
    assert ages(found, 3020.0)[0] == 20.0, "the need is saved"


def test_only_the_sensors_of_the_newest_findings_are_needed() -> None:
    found = CleanTime().after(0.0, standing(Level.UNHEALTHY, "kmsg"), ready=True).after(10.0, [], ready=True)
    found = found.after(20.0, standing(Level.DEGRADED, "sysfs"), ready=True).after(30.0, [], ready=True)
    assert found.needs_as_json() == {"clean_needs": ["kmsg"], "quiet_needs": ["kmsg", "sysfs"]}
    found = found.after(40.0, [], ready=True, blind=["sysfs"])
    assert ages(found, 40.0) == (40.0, 10.0, 40.0)
    found = found.after(50.0, standing(Level.UNHEALTHY, "nvml-polling"), ready=True)
    assert found.needs_as_json()["clean_needs"] == ["nvml-polling"]
    assert found.needs_as_json()["quiet_needs"] == ["nvml-polling"]


PATIENCE_S = 20.0


class Log:
    """A sensor that can be made blind."""

    name, period_s = "kmsg", 0.01

    def __init__(self) -> None:
        self.is_gone = threading.Event()

    def open(self) -> None:
        if self.is_gone.is_set():
            raise Unavailable("no such file")

    def close(self) -> None: ...

    def read(self) -> Iterable[Observation]:
        self.open()
        return ()


class World:
    """An agent with one sensor, on a clock that the test moves."""

    def __init__(self) -> None:
        self.clock, self.log = Ticking(), Log()
        self.agent = Agent(shipped(), self.clock, SavedState(), None, lambda _: None)

    def after(self, seconds: float) -> dict[str, object]:
        self.clock.at_s += seconds
        return health_report(self.agent.run_cycle(), {})

    def until(self, sees: bool) -> None:
        """Wait for the sensor, which reports a change to the inbox."""
        deadline = time.monotonic() + PATIENCE_S
        while self.agent.watched[0].status().sees is not sees:
            assert time.monotonic() < deadline, f"the sensor does not become {sees=}"
            self.agent.inbox.wait(PATIENCE_S)
            self.agent.run_cycle()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(sensor_threads, "RETRY_S", 0.01)
    monkeypatch.setattr(sensor_threads, "WAIT_S", 0.01)
    made = World()
    made.agent.watch([FittedSensor(made.log)])
    made.until(sees=True)
    yield made
    made.agent.close()


def test_an_hour_of_blindness_is_no_hour_of_health(world: World) -> None:
    world.agent.inbox.put([Observation(world.clock.at_s, "xid", GPU, "kmsg", 95.0)])
    assert world.after(1.0)["level"] == "unhealthy"
    world.agent.inbox.put([Observation(world.clock.at_s, "cleared", GPU, "operator")])
    assert world.after(1.0)["clean_needs"] == ["kmsg"]
    before_s = world.after(10.0)["clean_s"]
    assert isinstance(before_s, float)
    assert before_s >= 10.0
    world.log.is_gone.set()
    world.until(sees=False)
    for _ in range(3):
        assert world.after(1200.0)["clean_s"] == before_s
    world.log.is_gone.clear()
    world.until(sees=True)
    assert world.after(0.0)["clean_s"] == before_s
    assert world.after(20.0)["clean_s"] == before_s + 20.0


def test_time_without_a_needed_sensor_does_not_count() -> None:
    found = CleanTime().after(0.0, standing(Level.UNHEALTHY, "kmsg", "agent", "injected"), ready=True)
    assert found.missing(["sysfs"]) == {"kmsg"}, "the agent's own findings need no sensor"
    assert found.missing(["kmsg"]) == frozenset()
    other_way = found.with_sensors(["journal", "sysfs"])
    assert other_way.missing(["journal", "sysfs"]) == frozenset(), "it reads the same log"
    assert other_way.needs_as_json()["clean_needs"] == ["agent", "injected", "journal"]
    assert found.with_sensors(["sysfs"]).missing(["sysfs"]) == {"kmsg"}


def test_an_agent_that_no_longer_has_the_sensor_of_the_fault_does_not_prove_health(world: World) -> None:
    needs = frozenset({"nvml-events"})
    world.agent.state.clean_time = CleanTime(0.0, 10.0, 10.0, needs=(needs, needs))
    before_s = world.after(5.0)["clean_s"]
    assert world.after(60.0)["clean_s"] == before_s
    found = world.after(3600.0)
    assert (found["clean_s"], found["quiet_s"]) == (before_s, before_s)
    assert {each["name"] for each in found["sensors"]} == {"kmsg"}  # type: ignore[attr-defined]
