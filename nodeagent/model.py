"""What a sensor observes and what the agent concludes: observations, findings, verdicts. Pure.

An observation states what was there, never how bad it is: the evaluator decides that from the policy's
tables. Equal observations count once, so it does no harm if two sensors report the same, or one sensor again
after a restart.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

MAX_TEXT = 512  # characters of a sensor's own words: a kernel line of kilobytes must not be kept
MAX_FACTS = 16
VERDICT_XID = 154  # the Xid by which the driver reports what is to be done: its verdict on another Xid

# Entities are paths: the kind, then what tells one from another.
NODE = "node"
DRIVER = "driver"


def gpu_entity(bus_id: str) -> str:
    """Return the entity of the GPU at a PCI address however written: `gpu/0000:3b:00.0`.

    NVML writes `00000000:3B:00.0`, the kernel log `PCI:0000:3b:00` or without a domain.
    """
    return f"gpu/{normalized_pci(bus_id)}"


def normalized_pci(bus_id: str) -> str:
    """Return a PCI address as sysfs writes it: `0000:3b:00.0`. What is none comes back in lower case."""
    text = bus_id.lower().removeprefix("pci:")
    address, _, function = text.partition(".")
    parts = address.split(":")
    if len(parts) == 2:
        parts.insert(0, "0")
    try:
        domain, bus, device = (int(part, 16) for part in parts)
        return f"{domain:04x}:{bus:02x}:{device:02x}.{int(function or '0', 16):x}"
    except ValueError:
        return text


@dataclass(frozen=True, slots=True, order=True)
class Observation:
    """One fact. `check` is the name of a rule in `policy/checks.toml`."""

    at_s: float  # agent time: see `clock`
    check: str
    entity: str
    source: str  # the sensor
    value: float = 0.0  # a sample, a counter's reading, or a code: as the check's kind says
    variant: str = (
        ""  # what parts one code from the same code with another meaning: an NVLink unit, a verdict
    )
    text: str = ""  # the sensor's words, for people
    facts: tuple[tuple[str, str], ...] = ()  # what was decoded: pid, name, link, ...

    def __post_init__(self) -> None:
        if len(self.text) > MAX_TEXT:
            object.__setattr__(self, "text", self.text[:MAX_TEXT])
        if len(self.facts) > MAX_FACTS:
            object.__setattr__(self, "facts", self.facts[:MAX_FACTS])


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
