from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from nodeagent.agent import agent as agent_module
from nodeagent.agent import claim, saved_state
from nodeagent.agent.agent import Agent
from nodeagent.agent.saved_state import SavedState
from nodeagent.agent.sensor_threads import FittedSensor
from nodeagent.model import Action, Level, Observation
from nodeagent.policy import loading
from nodeagent.sensing.clock import Anchor, Clock, begin
from nodeagent.sensing.sensor import Unavailable
from tests.local.nodeagent.serving import node, serving
from tests.unit.nodeagent.evaluation.world import GPU, xid

POLICY = loading.load()
PATIENCE_S = 20.0


class Scripted:
    """A scripted sensor, which may block."""

    def __init__(self, name: str = "scripted", position: int = 0) -> None:
        self.name, self.period_s = name, 0.0
        self.script: list[list[Observation]] = []
        self.given = threading.Semaphore(0)
        self.blocked = threading.Event()
        self.at = position
        self.why = ""

    def give(self, *seen: Observation) -> None:
        self.script.append(list(seen))
        self.given.release()

    def open(self) -> None:
        if self.why:
            raise Unavailable(self.why)

    def close(self) -> None: ...

    def read(self) -> Iterable[Observation]:
        if not self.given.acquire(timeout=0.05):
            return []
        found = self.script.pop(0)
        self.at += len(found)
        return found


class Room:
    """An agent, its sensors, and the changes it reported."""

    def __init__(self, folder: Path | None, *sensors: Scripted, clock: Clock | None = None) -> None:
        remembered, problems = saved_state.load(folder) if folder else (SavedState(), ())
        self.told: list[dict[str, Any]] = []
        self.clock = clock or begin(remembered.anchor, remembered.last_s)
        self.agent = Agent(POLICY, self.clock, remembered, folder, self.told.extend, problems=problems)
        self.thread = threading.Thread(target=self.agent.run, daemon=True)
        self.agent.watch([FittedSensor(each, lambda each=each: each.at) for each in sensors])  # type: ignore[misc]
        self.thread.start()

    def until(self, holds: Callable[[], bool]) -> None:
        with self.agent.looked:
            assert self.agent.looked.wait_for(holds, PATIENCE_S)

    def end(self) -> None:
        self.agent.stop()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()


def level(room: Room, entity: str = GPU) -> Level:
    return next((v.level for v in room.agent.published.verdicts if v.entity == entity), Level.HEALTHY)


def test_an_event_becomes_a_verdict_and_is_reported_once() -> None:
    sensor = Scripted()
    room = Room(None, sensor)
    sensor.give(xid(79, room.clock.now_s()))
    sensor.give(xid(79, room.clock.now_s(), source="nvml-events"))
    room.until(lambda: level(room) is Level.UNHEALTHY and bool(room.told))
    room.end()
    assert [(each["kind"], each["code"], each["action"]) for each in room.told] == [
        ("raised", 79, "reboot_node")
    ]


def test_after_a_restart_nothing_is_reported_twice_nothing_missed_and_recovery_is_reported(
    tmp_path: Path,
) -> None:
    first = Scripted()
    room = Room(tmp_path, first)
    first.give(xid(79, room.clock.now_s()))
    room.until(lambda: bool(room.told))
    room.end()
    again = Scripted()
    second = Room(tmp_path, again)
    assert second.agent.state.positions == {"scripted": 1}
    again.give(xid(79, second.clock.now_s()), xid(48, second.clock.now_s()))
    second.until(lambda: len(second.told) == 1)
    second.end()
    assert [(each["code"], each["seq"]) for each in second.told] == [(48, 2)]
    memory_of_it, _ = saved_state.load(tmp_path)
    later = Clock(Anchor("another boot", memory_of_it.anchor.offset_s + 1e6)) if memory_of_it.anchor else None
    third = Room(tmp_path, Scripted(), clock=later)
    third.until(lambda: len(third.told) == 2)
    third.end()
    assert sorted((each["kind"], each["code"]) for each in third.told) == [("cleared", 48), ("cleared", 79)]


class HangingAtFirst(Scripted):
    """A sensor whose first call returns only when the test allows it."""

    def __init__(self) -> None:
        super().__init__()
        self.release = threading.Event()

    def open(self) -> None:
        assert self.release.wait(PATIENCE_S)


def test_a_sensor_that_hung_before_a_restart_is_well_once_its_calls_return(tmp_path: Path) -> None:
    entity, first = "sensor/scripted", Scripted()
    room = Room(tmp_path, first)
    first.give(Observation(room.clock.now_s() - 30.0, "sensor_stuck", entity, "agent", 70.0))
    room.until(lambda: bool(room.told))
    room.end()
    again = HangingAtFirst()
    second = Room(tmp_path, again)
    second.agent.run_cycle()
    assert level(second, entity) is Level.UNHEALTHY, "it has not been tried"
    again.release.set()
    second.until(lambda: level(second, entity) is Level.HEALTHY)
    second.end()
    assert [(each["kind"], each["check"]) for each in second.told] == [("cleared", "sensor_stuck")]


def test_a_change_is_saved_before_it_is_reported(tmp_path: Path) -> None:
    sensor, seen = Scripted(), []
    room = Room(tmp_path, sensor)
    room.agent.report = lambda _: seen.append(saved_state.load(tmp_path)[0].history[-1]["code"])
    sensor.give(xid(79, room.clock.now_s()))
    room.until(lambda: bool(seen))
    room.end()
    assert seen == [79]


def test_a_full_disk_does_not_keep_findings_from_being_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_: object) -> None:
        raise OSError(28, "no space left")

    monkeypatch.setattr(saved_state, "write", full_disk)
    sensor = Scripted()
    room = Room(tmp_path, sensor)
    sensor.give(xid(79, room.clock.now_s()))
    room.until(lambda: len(room.told) == 2)
    assert {each["check"] for each in room.told} == {"xid", "memory_lost"}
    monkeypatch.undo()
    sensor.give(xid(48, room.clock.now_s()))
    room.until(lambda: any(each["kind"] == "cleared" for each in room.told))
    room.end()
    assert saved_state.load(tmp_path)[0].next_seq == 5


def test_while_the_disk_hangs_the_agent_evaluates_and_reports_and_then_saves_the_newest_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_module, "SAVE_DEADLINE_S", 0.2)
    write, answers, entered = saved_state.write, threading.Event(), threading.Event()

    def hanging(folder: Path, content: bytes, generation: int = 0) -> None:
        entered.set()
        assert answers.wait(PATIENCE_S)
        write(folder, content, generation)

    monkeypatch.setattr(saved_state, "write", hanging)
    sensor = Scripted()
    room = Room(tmp_path, sensor)
    assert entered.wait(PATIENCE_S)
    sensor.give(xid(79, room.clock.now_s()))
    room.until(lambda: level(room) is Level.UNHEALTHY)
    room.until(lambda: {each["check"] for each in room.told} == {"xid", "memory_lost"})
    room.until(lambda: len(room.agent.published.events) == 2)
    assert not (tmp_path / saved_state.NAME).exists()
    room.until(lambda: len(room.agent._unreported) == 1)  # a long hang does not fill the memory
    answers.set()
    room.until(lambda: any(each["kind"] == "cleared" for each in room.told))
    room.end()
    assert [each["code"] for each in saved_state.load(tmp_path)[0].history] == [79, None, None]
    assert [each["seq"] for each in room.told] == [1, 2, 3]


def test_a_disk_that_hangs_does_not_delay_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr(agent_module, "LAST_SAVE_S", 0.05)
    monkeypatch.setattr(saved_state, "write", lambda *_: answers.wait(PATIENCE_S))
    sensor = Scripted()
    room = Room(tmp_path, sensor)
    sensor.give(xid(79, room.clock.now_s()))
    room.until(lambda: level(room) is Level.UNHEALTHY)
    room.end()
    assert [each["code"] for each in room.told] == [79], "every change is reported, even if it is not saved"
    answers.set()


def test_an_agent_that_was_taken_over_ends(tmp_path: Path) -> None:
    room = Room(tmp_path, Scripted())
    room.until(lambda: (tmp_path / "lock").exists())
    claim.take(tmp_path, 0.0)
    room.thread.join(PATIENCE_S)
    assert room.agent.superseded


class Hanging(Scripted):
    def read(self) -> Iterable[Observation]:
        self.blocked.wait(PATIENCE_S)
        return []


def test_a_sensor_that_hangs_delays_neither_the_others_nor_the_end() -> None:
    hangs, works = Hanging("hangs"), Scripted("works")
    room = Room(None, hangs, works)
    works.give(xid(79, room.clock.now_s()))
    room.until(lambda: level(room) is Level.UNHEALTHY)
    room.end()
    assert {each.name: each.in_call for each in room.agent.published.sensors} == {
        "hangs": True,
        "works": False,
    }
    hangs.blocked.set()


class Broken(Scripted):
    def read(self) -> Iterable[Observation]:
        raise ZeroDivisionError("a bug of ours")


def test_a_sensor_with_a_bug_or_without_a_privilege_is_reported_and_stops_no_other() -> None:
    broken, barred, works = Broken("broken"), Scripted("barred"), Scripted("works")
    barred.why = "it needs a right"
    room = Room(None, broken, barred, works)
    works.give(xid(79, room.clock.now_s()))
    room.until(lambda: level(room) is Level.UNHEALTHY and room.agent.published.ready)
    room.until(lambda: [each.sees for each in room.agent.published.sensors] == [False, False, True])
    room.end()
    whys = [each.why for each in room.agent.published.sensors]
    assert whys == ["ZeroDivisionError: a bug of ours", "it needs a right", ""]


def test_evidence_that_cannot_be_read_is_reported_and_the_agent_starts_without_it(tmp_path: Path) -> None:
    saved_state.save(tmp_path, SavedState(evidence={"series": 7, "events": []}))
    room = Room(tmp_path)
    room.end()
    assert "memory.json is not used" in room.agent.problems[0]
    assert json.dumps(room.agent.evaluator.dump())


def test_a_node_without_findings_needs_no_action() -> None:
    room = Room(None, Scripted())
    room.until(lambda: room.agent.published.ready)
    room.end()
    assert room.told == []
    assert {v.action for v in room.agent.published.verdicts} == {Action.NONE}
    assert room.agent.published.verdicts[0].entity == "node"


def test_the_facts_of_a_gpu_that_is_gone_leave_the_report() -> None:
    sensor = Scripted()
    room = Room(None, sensor)

    def state(**facts: str) -> Observation:
        return Observation(room.clock.now_s(), "gpu_state", GPU, "test", 0.0, facts=tuple(facts.items()))

    sensor.give(state(uuid="GPU-1", mig="off"))
    room.until(lambda: GPU in room.agent.published.facts)
    sensor.give(state(uuid="GPU-1", mig="on"))
    room.until(lambda: room.agent.published.facts[GPU]["mig"] == "on")
    sensor.give(state())
    room.until(lambda: GPU not in room.agent.published.facts)
    room.end()


def test_the_mig_mode_in_the_facts_of_a_gpu_decides_what_its_codes_mean() -> None:
    sensor = Scripted()
    room = Room(None, sensor)

    def action() -> str | None:
        found = room.agent.evaluator.findings(room.clock.now_s())
        return next((each.action.name for each in found if each.code == 95), None)

    for mode, expected in (("on", "RESET_GPU"), ("off", "REBOOT_NODE")):
        facts = (("uuid", "GPU-1"), ("name", "NVIDIA A100-SXM4-80GB"), ("mig", mode))
        sensor.give(Observation(room.clock.now_s(), "gpu_state", GPU, "test", 0.0, facts=facts))
        sensor.give(xid(95, room.clock.now_s()))
        room.until(lambda expected=expected: action() == expected)  # type: ignore[misc]
    room.end()


def test_a_node_is_evaluated_when_an_event_arrives_or_a_finding_ends_and_otherwise_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agent_module, "seconds_to_next_tick", lambda period_s: period_s)
    room = Room(None)
    room.end()
    agent = room.agent
    assert agent._patience_s() == agent_module.LOOK_S
    now_s = room.clock.now_s()
    agent.evaluator.add(xid(79, now_s))
    agent.run_cycle()
    assert agent._patience_s() == agent_module.SAVE_S  # it has just saved, and this must be reported
    agent._pending.clear()
    assert agent._patience_s() == agent_module.LOOK_S  # no time limit clears this finding
    hold_s = POLICY.meaning("xid", 31).hold_s
    assert hold_s > 0
    agent.evaluator.add(xid(31, now_s - hold_s + 1.0))
    agent.run_cycle()
    agent._pending.clear()
    assert agent_module.SOON_S <= agent._patience_s() <= 1.0
    agent._stuck.add("scripted")
    assert agent._patience_s() <= agent_module.STUCK_LOOK_S


def test_a_fault_seen_while_the_disk_hung_at_the_start_is_known_after_the_restart(tmp_path: Path) -> None:
    """The file of the saved state is a pipe until its disk answers, with the state from before."""
    folder = tmp_path / "test"
    saved_state.save(folder, SavedState(anchor=begin(None, 0.0).anchor, id="before"))
    file = folder / saved_state.NAME
    file.rename(kept := folder / "kept")
    os.mkfifo(file)
    with serving(tmp_path, None, "--test") as blind:
        done = node("inject", "xid", "95", "--entity", GPU, "--to", blind.address)
        assert done.returncode == 0, done.stderr
        assert blind.finding(GPU, "xid", 95)["level"] == "unhealthy"
        content = kept.read_bytes()
        with file.open("wb") as pipe:  # the agent has it open for reading
            kept.rename(file)
            pipe.write(content)
        assert blind.process.wait(PATIENCE_S) == 0
    with serving(tmp_path, None, "--test") as again:
        assert again.finding(GPU, "xid", 95)["level"] == "unhealthy"
        assert again.get("/v1/health")["state_id"] == "before"
