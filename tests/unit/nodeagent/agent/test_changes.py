from __future__ import annotations

from dataclasses import replace

from nodeagent.agent.changes import Change, FindingKey, ReportedFinding, change_as_json, find_changes
from nodeagent.model import Action, HealthFinding, Level

FOUND = HealthFinding(
    "gpu/a", "xid", 79, Level.UNHEALTHY, Action.REBOOT_NODE, 5.0, 6.0, "gone",
    ("line",), "a reboot", ("kmsg",),
)  # fmt: skip
KEY: FindingKey = ("gpu/a", "xid", 79)


def kinds(told: dict[FindingKey, ReportedFinding], *standing: HealthFinding) -> list[str]:
    return [each.kind for each in find_changes(told, standing, 10.0)[0]]


def test_a_finding_is_reported_once_and_its_end_is_reported_once() -> None:
    found, told = find_changes({}, (FOUND,), 10.0)
    assert [(each.kind, each.why, each.evidence) for each in found] == [("raised", "gone", ("line",))]
    assert kinds(told, FOUND) == []
    assert kinds(told, replace(FOUND, last_s=9.0, sources=("kmsg", "nvml-events"))) == []
    ended, told = find_changes(told, (), 25.0)
    assert [(each.kind, each.level, each.why) for each in ended] == [
        ("cleared", Level.HEALTHY, "it was active for 20 s")
    ]
    assert told == {}


def test_better_and_worse_levels_are_reported() -> None:
    _, told = find_changes({}, (FOUND,), 10.0)
    assert kinds(told, replace(FOUND, action=Action.REPLACE)) == ["worse"]
    assert kinds(told, replace(FOUND, level=Level.DEGRADED)) == ["better"]


def test_the_beginning_is_that_of_the_first_report() -> None:
    _, told = find_changes({}, (FOUND,), 10.0)
    _, told = find_changes(told, (replace(FOUND, since_s=400.0),), 500.0)
    assert told[KEY].since_s == 5.0


def test_a_change_as_json_names_its_level_and_action() -> None:
    made = change_as_json(Change(1.0, "raised", "gpu/a", "xid", 79, Level.UNHEALTHY, Action.RESET_GPU, "why"))
    assert (made["level"], made["action"], made["code"]) == ("unhealthy", "reset_gpu", 79)
