"""Published states and findings for the tests of publishing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nodeagent.agent.agent import Published, Released
from nodeagent.agent.clean_time import CleanTime
from nodeagent.agent.sensor_threads import NOT_YET, SensorStatus
from nodeagent.evaluation.evaluator import verdicts
from nodeagent.model import Action, HealthFinding, Level
from nodeagent.server.report import health_report

ABOUT: dict[str, Any] = {
    "node": "node1", "machine_id": "m" * 32, "provider_id": "aws:///i-1", "boot_id": "b" * 36,
    "booted_s": 1.0, "version": "0.1.0", "policy": "p", "test": False,
}  # fmt: skip


def finding(
    entity: str = "gpu/0000:3b:00.0",
    check: str = "xid",
    code: int | None = 79,
    level: Level = Level.UNHEALTHY,
    action: Action = Action.REBOOT_NODE,
    **more: Any,
) -> HealthFinding:
    why = more.pop("why", f"{check} {code}: it has failed")
    return HealthFinding(
        entity, check, code, level, action, more.pop("since_s", 50.0), 60.0, why, ("NVRM: text",), "a reboot",
        more.pop("sources", ("kmsg",)), origins=("driver log",), device="GPU-1", of_events=code is not None,
        **more,
    )  # fmt: skip


def sensor(name: str, why: str = "", *, nothing_there: bool = False, released: bool = False) -> SensorStatus:
    return SensorStatus(name, not why, why, 3, 2, 0.01, False, (), nothing_there, released)


SENSORS = tuple(
    map(sensor, ("nvml-events", "nvml-polling", "journal", "host", "sysfs", "operator", "policy"))
)


def published(
    *found: HealthFinding,
    sensors: Sequence[SensorStatus] = SENSORS,
    released: bool = False,
    at_s: float = 100.0,
    gpus: int = 2,
) -> Published:
    facts = {
        f"gpu/0000:{n:02x}:00.0": {"uuid": f"GPU-{n}", "name": "H100", "serial": f"{n}", "mig": "off"}
        for n in range(gpus)
    }
    return Published(
        at_s,
        verdicts(found, ["node", "driver"]),
        tuple(sensors),
        clean_time=CleanTime(1.0, 90.0, 95.0, needs=(frozenset({"kmsg"}), frozenset({"kmsg", "host"}))),
        facts={"driver": {"driver": "575"}, **facts},
        released=Released(500.0, True) if released else None,
    )


def untried() -> Published:
    return published(sensors=(*SENSORS[1:], sensor("nvml-events", NOT_YET)))


def report_of(state: Published) -> dict[str, Any]:
    return health_report(state, ABOUT)
