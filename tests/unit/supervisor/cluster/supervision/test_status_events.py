"""Each problem of a status becomes one event when it begins."""

from __future__ import annotations

from typing import Any

from supervisor.cluster.supervision.status_events import StatusEvents


def status(checkpoint: str = "", **launchers: str) -> dict[str, Any]:
    members = [{"name": name, "launcher_error": error} for name, error in launchers.items()]
    return {"checkpoint": {"step": None, "error": checkpoint} if checkpoint else None, "members": members}


def test_a_problem_is_reported_when_it_begins_and_again_when_it_has_returned() -> None:
    events = StatusEvents()
    failed = [
        ("CheckpointFailed", "no checkpoint can be written: full; training continues, and saving is retried")
    ]
    assert events.observe(status()) == []
    assert events.observe(status("full")) == failed
    assert events.observe(status("full: 7 bytes")) == []
    assert events.observe(status()) == []
    assert events.observe(status("full")) == failed


def test_each_member_whose_launcher_is_out_of_reach_is_reported() -> None:
    events = StatusEvents()
    assert events.observe(status(m0="", m1="denied")) == [
        ("LauncherUnreachable", "member m1 cannot start ranks: denied")
    ]
    assert events.observe(status(m0="denied", m1="denied")) == [
        ("LauncherUnreachable", "member m0 cannot start ranks: denied")
    ]


def test_an_empty_status_has_no_problems() -> None:
    assert StatusEvents().observe({}) == []
