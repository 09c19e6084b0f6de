"""Derives the two conditions of the Node object from the agent's published state. Pure.

`GpuHealthy` is about the GPUs, their driver, its sensors and the NVSwitches. `TrainingNodeHealthy` is about
everything that the agent watches. A condition is True only if the agent can vouch for it: it is Unknown
before the first complete report, after the agent has ended, while a sensor that could find a fault is blind
or hangs, and while the loss of the agent's saved state is a finding.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass

from nodeagent.agent.agent import Published
from nodeagent.agent.sensor_threads import SensorStatus
from nodeagent.model import (
    GPU_SENSORS,
    OPERATOR,
    ORIGINS,
    STATE_LOST,
    HealthFinding,
    Level,
    gpu_entity,
    is_of_gpus,
    word,
)

GPU, TRAINING = "GpuHealthy", "TrainingNodeHealthy"
TRUE, FALSE, UNKNOWN = "True", "False", "Unknown"
MAX_MESSAGE = 512  # characters

_POLLING = "nvml-polling"  # the sensor that lists the GPUs


@dataclass(frozen=True, slots=True)
class NodeCondition:
    """One condition of the Node object, without its times."""

    type: str
    status: str
    reason: str  # CamelCase
    message: str  # one sentence


def starting() -> tuple[NodeCondition, ...]:
    """Return the conditions before the first complete report."""
    return _both("AgentStarting", "The node agent has not tried all of its sensors yet.")


def stopped() -> tuple[NodeCondition, ...]:
    """Return the conditions after the agent has ended cleanly."""
    return _both("AgentStopped", "The node agent was stopped, so this node is not monitored.")


def silent(for_s: float) -> tuple[NodeCondition, ...]:
    """Return the conditions while the agent's loop does not run, although its process does."""
    return _both("AgentSilent", f"The node agent has not evaluated the node for more than {for_s:g} s.")


def conditions(published: Published) -> tuple[NodeCondition, ...]:
    """Return the conditions for a published state."""
    if not published.ready:
        return starting()
    found = [each for verdict in published.verdicts for each in verdict.findings]
    known = {each.entity for each in published.verdicts}
    of_gpus = [each for each in found if _is_of_gpus(each, known)]
    gpus = [each for each in published.sensors if each.name in GPU_SENSORS]
    return (
        _bad(GPU, of_gpus)
        or _gpus_unseen(published, gpus)
        or _forgotten(GPU, found)
        or _vouched(GPU, of_gpus),
        _bad(TRAINING, found)
        or _unseen(TRAINING, published, published.sensors)
        or _forgotten(TRAINING, found)
        or _vouched(TRAINING, found),
    )


def _is_of_gpus(found: HealthFinding, known: Container[str]) -> bool:
    """Return True if a finding is about the GPUs; sysfs reports a known GPU's PCI errors as a device's."""
    if found.of_gpus or is_of_gpus(found.entity):
        return True
    kind, _, address = found.entity.partition("/")
    return kind == "device" and gpu_entity(address) in known


def _both(reason: str, message: str) -> tuple[NodeCondition, ...]:
    return tuple(NodeCondition(each, UNKNOWN, reason, message) for each in (GPU, TRAINING))


def _bad(type_: str, found: Iterable[HealthFinding]) -> NodeCondition | None:
    unhealthy = [each for each in found if each.level is Level.UNHEALTHY]
    if not unhealthy:
        return None
    worst = max(unhealthy, key=lambda each: (each.action, -each.since_s))
    return NodeCondition(type_, FALSE, reason_of(worst), _sentence(worst, len(unhealthy)))


def _vouched(type_: str, found: Iterable[HealthFinding]) -> NodeCondition:
    degraded = [each for each in found if each.level is Level.DEGRADED]
    if not degraded:
        return NodeCondition(type_, TRUE, "Healthy", "The node agent has found no fault.")
    worst = max(degraded, key=lambda each: (each.action, -each.since_s))
    return NodeCondition(type_, TRUE, "Degraded", _sentence(worst, len(degraded)))


def _gpus_unseen(published: Published, sensors: Iterable[SensorStatus]) -> NodeCondition | None:
    polling = next((each for each in sensors if each.name == _POLLING), None)
    if polling is None or (not polling.sees and polling.nothing_there):
        return NodeCondition(GPU, UNKNOWN, "NoGpus", "The node agent sees no GPU on this node.")
    return _unseen(GPU, published, sensors)


def _unseen(type_: str, published: Published, sensors: Iterable[SensorStatus]) -> NodeCondition | None:
    if published.released is not None:
        why = "An operator has released the GPUs, so the node agent does not watch them."
        return NodeCondition(type_, UNKNOWN, "GpusReleased", why)
    blind = [
        each
        for each in sensors
        if not each.sees and not each.nothing_there and ORIGINS.get(each.name, OPERATOR) != OPERATOR
    ]
    if not blind:
        return None
    names = ", ".join(sorted(each.name for each in blind))
    why = f"The node agent cannot see everything: {names} is blind ({blind[0].why})"
    return NodeCondition(type_, UNKNOWN, "SensorsBlind", _ended(why))


def _forgotten(type_: str, found: Iterable[HealthFinding]) -> NodeCondition | None:
    lost = next((each for each in found if each.check == STATE_LOST), None)
    if lost is None:
        return None
    why = f"The node agent may have forgotten a fault: {'; '.join(lost.evidence) or lost.why}"
    return NodeCondition(type_, UNKNOWN, "StateLost", _ended(why))


def reason_of(finding: HealthFinding) -> str:
    """Return the name of a finding in CamelCase: Xid79."""
    name = "".join(part.capitalize() for part in finding.check.split("_"))
    return name if finding.code is None else f"{name}{finding.code}"


def _sentence(worst: HealthFinding, count: int) -> str:
    more = f", and {count - 1} more" if count > 1 else ""
    action = f" (action: {word(worst.action)}{more})"
    why = f"{worst.entity}: {worst.why}"
    return _ended(why[: MAX_MESSAGE - len(action) - 1] + action)


def _ended(text: str) -> str:
    return f"{text[: MAX_MESSAGE - 1].rstrip('.')}."
