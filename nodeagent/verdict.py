"""What the agent concludes: findings, and one verdict per entity. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Level(IntEnum):
    """How bad an entity is; the greater counts. Only `UNHEALTHY` may cost a node its work."""

    HEALTHY = 0
    DEGRADED = 1
    UNHEALTHY = 2


class Action(IntEnum):
    """What is to be done, cheapest first; of several findings the greatest is the verdict's."""

    NONE = 0
    RESTART_APP = 1
    RESET_GPU = 2
    REBOOT_NODE = 3
    REPLACE = 4
    CONTACT_SUPPORT = 5


def word(value: Level | Action) -> str:
    """Return a level or an action as users write it: `reset_gpu`."""
    return value.name.lower()


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is, or was just now, wrong with one entity."""

    entity: str
    check: str
    code: int | None  # of an event: the Xid, the SXid
    level: Level
    action: Action
    since_s: float  # agent time of the first sign
    last_s: float  # of the newest
    why: str  # one sentence: what was seen, against which limit, or who says so
    evidence: tuple[str, ...]  # the sensors' own words, newest last
    clears: str  # what would end it
    sources: tuple[str, ...]  # sensors that saw it
    lasting: bool = False  # only a remedy ends it, and none has been seen since
    overridden: str = ""  # whose word went before the table's: "driver", "operator"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What holds for one entity now."""

    entity: str
    level: Level
    action: Action
    findings: tuple[Finding, ...]  # worst first
