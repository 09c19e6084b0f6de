"""What an agent sees while the disk of its state hangs is part of the state when the disk answers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nodeagent.agent import missed, saved_state
from nodeagent.agent.agent import Agent
from nodeagent.agent.missed import MissedObservations
from nodeagent.agent.saved_state import SavedState
from nodeagent.cli import commands
from nodeagent.cli.assembly import LoadedState
from nodeagent.model import Action, Level, Observation
from nodeagent.policy.loading import shipped
from nodeagent.sensing import clock as clocks
from tests.unit.nodeagent.ticking import Ticking

GPU = "gpu/0000:3b:00.0"
POLICY = shipped()
BEFORE = "before"  # the id of the saved state


def seen(check: str, value: float, at_s: float, source: str = "nvml-events") -> Observation:
    return Observation(at_s, check, GPU, source, value)


def kept(*observations: Observation) -> list[Observation]:
    found = MissedObservations()
    for each in observations:
        found.add(each, POLICY)
    return list(found.on_another_clock(100.0))


def test_events_and_readings_of_counters_that_have_changed_are_kept() -> None:
    event = seen("xid", 95.0, 1.0)
    readings = [seen("ecc_dbe", value, at_s) for at_s, value in ((1.0, 0.0), (2.0, 0.0), (3.0, 1.0))]
    found = kept(event, *readings, seen("gpu_state", 0.0, 4.0))
    assert [(each.check, each.value, each.at_s) for each in found] == [
        ("xid", 95.0, 101.0), ("ecc_dbe", 0.0, 101.0), ("ecc_dbe", 1.0, 103.0),
    ]  # fmt: skip


def an_agent(folder: Path | None, state: SavedState, lost: str = "") -> Agent:
    return Agent(POLICY, Ticking(1000.0), state, folder, lambda _: None, lost=lost)


def handed_over(folder: Path, *observations: Observation) -> tuple[SavedState, tuple[str, ...]]:
    """Return the state after an agent without its disk has seen something, and the disk has answered."""
    before = SavedState(anchor=clocks.begin(None, 0.0).anchor, last_s=0.0, id=BEFORE)
    saved_state.save(folder, before)
    blind = an_agent(None, SavedState(), "the disk has not answered for 15 s")
    blind.missed = MissedObservations()
    blind.inbox.put(observations)
    blind.run_cycle()
    parts: Any = SimpleNamespace(
        answer=lambda: LoadedState(saved_state.load(folder)[0], None, ()),
        branch=lambda: None,
        clock=Ticking(1000.0),
    )
    assert commands._hand_over(blind, parts, folder) == ""
    return saved_state.load(folder)


def test_a_fault_that_an_agent_without_its_state_has_seen_is_known_to_its_successor(tmp_path: Path) -> None:
    state, problems = handed_over(tmp_path, seen("xid", 95.0, 990.0), seen("poison_fatal", 0.0, 991.0))
    assert problems == ()
    heir = Agent(POLICY, clocks.begin(state.anchor, state.last_s), state, None, lambda _: None)
    found = {each.check: each for each in heir.evaluator.findings(heir.clock.now_s())}
    assert found["xid"].level is found["poison_fatal"].level is Level.UNHEALTHY
    assert found["xid"].action is Action.RESET_GPU


def test_the_state_keeps_its_id_only_if_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_state, "new_id", lambda: "new")
    whole, _ = handed_over(tmp_path / "a", seen("xid", 95.0, 990.0))
    assert whole.id == BEFORE
    monkeypatch.setattr(missed, "MAX_KEPT", 1)
    state, _ = handed_over(tmp_path / "b", seen("xid", 95.0, 990.0), seen("xid", 48.0, 991.0))
    assert state.id == "new"
    heir = Agent(POLICY, clocks.begin(state.anchor, state.last_s), state, None, lambda _: None)
    assert "state_lost" in {each.check for each in heir.evaluator.findings(heir.clock.now_s())}


def test_a_disk_that_returns_an_error_is_a_problem(tmp_path: Path) -> None:
    blind = an_agent(None, SavedState(), "the disk has not answered for 15 s")
    blind.missed = MissedObservations()

    def answer() -> LoadedState:
        raise OSError("broken")

    parts: Any = SimpleNamespace(answer=answer, branch=lambda: None, clock=Ticking(1000.0))
    assert "is not saved: broken" in commands._hand_over(blind, parts, tmp_path)
