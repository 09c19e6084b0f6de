from __future__ import annotations

from nodeagent.evaluation.evaluator import verdicts
from nodeagent.model import Action, HealthFinding, Level
from nodeagent.server import metrics


def bad(entity: str, level: Level) -> HealthFinding:
    return HealthFinding(entity, "x", None, level, Action.NONE, 0.0, 0.0, "it", (), "", ("test",))


def test_gpus_come_first_then_the_worst_so_that_none_of_them_is_left_out() -> None:
    disks = [f"disk//{n}" for n in range(600)]
    findings = [
        bad("disk//599", Level.DEGRADED),
        bad("gpu/b", Level.UNHEALTHY),
        bad("port/z", Level.UNHEALTHY),
    ]
    found = metrics.shown(verdicts(findings, [*disks, "gpu/a", "gpu/b", "node", "port/z"]))
    assert [each.entity for each in found[:5]] == ["gpu/b", "gpu/a", "node", "port/z", "disk//599"]
    assert len(found) == metrics.MAX_ENTITIES
