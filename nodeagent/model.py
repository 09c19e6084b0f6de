"""The sensors' observations, and the findings and verdicts that the agent derives from them. Pure.

An observation states a fact, never its severity: the evaluator derives the severity from the policy's tables.
Identical observations count once, so two sensors may report the same fact, and a sensor may report it again
after a restart.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType

MAX_TEXT = 512  # characters kept of a sensor's text, because a kernel line may be kilobytes long
MAX_FACTS = 16
GONE = "gone"  # the check that a sensor uses to report that an entity no longer exists (value 1)
STATE_LOST = "state_lost"  # the check with which the agent reports that it runs without its saved state
VERDICT_XID = 154  # the driver uses this Xid to recommend an action: its verdict on another Xid

# The nouns in the texts and units of the rules that count something.
_SINGULAR = {
    "GPUs": "GPU", "changes": "change", "errors": "error", "failures": "failure", "generations": "generation",
    "links": "link", "observations": "observation", "overruns": "overrun", "packets": "packet",
    "pages": "page", "processes": "process", "recoveries": "recovery", "replays": "replay",
    "restarts": "restart", "timeouts": "timeout", "times": "time",
}  # fmt: skip
_PLURAL = re.compile(rf"\b(?:{'|'.join(_SINGULAR)})\b")

# Entities are paths: the kind, then a name within that kind.
NODE = "node"
DRIVER = "driver"
ENTITY_KINDS = ("gpu", DRIVER, NODE, "disk", "port", "net", "device", "nvswitch")

# Where the evidence of each sensor comes from. Two sensors with the same origin are one witness: the kernel
# log and NVML's events both repeat what the driver has logged.
DRIVER_LOG, DRIVER_STATE, KERNEL, SYSFS, HOST, OPERATOR = (
    "driver log", "driver state", "kernel", "sysfs", "host", "operator"
)  # fmt: skip
ORIGINS: Mapping[str, str] = MappingProxyType(
    {
        "kmsg": DRIVER_LOG,
        "journal": DRIVER_LOG,
        "nvml-events": DRIVER_LOG,
        "nvml-polling": DRIVER_STATE,
        "sysfs": SYSFS,
        "host": HOST,
        "agent": HOST,
        "operator": OPERATOR,
    }
)
KERNEL_LOGS = ("kmsg", "journal")  # sensors that read the same log, so an agent has only one of them
# When the agent itself reports on one of these sensors, the driver is at fault: it does not answer the
# sensor.
GPU_SENSORS = ("nvml-events", "nvml-polling")
_OF_DRIVER = tuple(f"sensor/{each}" for each in GPU_SENSORS)
_DRIVERS_OWN = ("gpu", DRIVER, "nvswitch")  # the kinds of entities that only the driver logs about


def kind_of(entity: str) -> str:
    """Return the kind of an entity, such as `gpu`."""
    return entity.partition("/")[0]


def origin_of(source: str, entity: str, is_sample: bool = False) -> str:
    """Return the origin of a sensor's evidence about an entity, or the sensor's name if it is not known.

    Args:
        is_sample: True for a reading that a sensor has taken, False for an event that was reported to it.
    """
    if source == "agent" and entity in _OF_DRIVER:
        return DRIVER_STATE
    origin = ORIGINS.get(source, source)
    if origin != DRIVER_LOG:
        return origin
    if is_sample:
        return DRIVER_STATE  # an event makes `nvml-events` read the counter that `nvml-polling` reads
    return DRIVER_LOG if kind_of(entity) in _DRIVERS_OWN else KERNEL


def is_of_gpus(entity: str) -> bool:
    """Return True for a GPU, an NVSwitch, their driver, and the sensors that only the driver answers."""
    return kind_of(entity) in _DRIVERS_OWN or entity in _OF_DRIVER


def gpu_entity(bus_id: str) -> str:
    """Return the entity, such as `gpu/0000:3b:00.0`, of the GPU at a PCI address in any notation.

    NVML writes `00000000:3B:00.0`, the kernel log `PCI:0000:3b:00` or without a domain.
    """
    return f"gpu/{normalized_pci(bus_id)}"


def normalized_pci(bus_id: str) -> str:
    """Return a PCI address as sysfs writes it, such as `0000:3b:00.0`; return other text in lower case."""
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
    value: float = 0.0  # a sample, a counter's reading, or a code, depending on the check's kind
    variant: str = ""  # distinguishes meanings of the same code: an NVLink unit, a verdict
    text: str = ""  # the sensor's text, for people
    facts: tuple[tuple[str, str], ...] = ()  # decoded details: pid, name, link, ...

    def __post_init__(self) -> None:
        if len(self.text) > MAX_TEXT:
            object.__setattr__(self, "text", self.text[:MAX_TEXT])
        if len(self.facts) > MAX_FACTS:
            object.__setattr__(self, "facts", self.facts[:MAX_FACTS])


class Level(IntEnum):
    """The severity of an entity's state. Only `UNHEALTHY` may take a node out of service."""

    HEALTHY = 0
    DEGRADED = 1
    UNHEALTHY = 2


class Action(IntEnum):
    """The actions, in ascending order of precedence: a verdict names the last of its worst findings' actions.

    The supervisor ranks findings by a different order, the cost of the action (`holdfast.node_report`). A
    verdict names `CONTACT_SUPPORT` even if another finding needs a remedy. Stored findings contain the
    numbers.
    """

    NONE = 0
    RESTART_APP = 1
    RESET_GPU = 2
    REBOOT_NODE = 3
    REPLACE = 4
    CONTACT_SUPPORT = 5


def word(value: Level | Action) -> str:
    """Return the name of a level or an action as users see it, such as `reset_gpu`."""
    return value.name.lower()


def duration(seconds: float) -> str:
    """Return a duration in words, such as `10 min`."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:g} {unit}"
    return f"{seconds:g} s"


def amount(number: float, things: str) -> str:
    """Return a number and what it counts, such as `2 links` or `1 link`; `things` is a rule's text."""
    text = f"{number:g}"
    if text == "1":
        things = _PLURAL.sub(lambda found: _SINGULAR[found[0]], things).replace(" and ", " or ")
    return f"{text} {things}".rstrip()


@dataclass(frozen=True, slots=True)
class HealthFinding:
    """One problem with one entity, either current or just ended."""

    entity: str
    check: str
    code: int | None  # the Xid or SXid of an event; None for other checks
    level: Level
    action: Action
    since_s: float  # agent time of the first sign
    last_s: float  # agent time of the newest sign
    why: str  # one sentence: the observed value and the limit, or the source
    evidence: tuple[str, ...]  # the sensors' texts, newest last
    clears: str  # the condition that clears the finding
    sources: tuple[str, ...]  # the sensors that reported it while it was active
    lasting: bool = False  # only a remedy ends it, and no remedy has been observed since
    # Only a boot or another GPU ends it; a finding that is otherwise the same is the same finding.
    until_boot: bool = field(default=False, compare=False)
    overridden: str = ""  # the source that overrode the table: "driver" or "operator"
    origins: tuple[str, ...] = ()  # the distinct origins of its evidence: see `origin_of`
    device: str = ""  # the UUID or serial number of the GPU, if it is known
    of_events: bool = False  # True: about events or a counter's growth; False: about samples
    of_gpus: bool = False  # the policy says that its check is about the GPUs, no matter what the entity is
    # the remedy that ends a lasting finding; `action` does not name it if support has to be contacted, too
    remedy: Action = Action.NONE


@dataclass(frozen=True, slots=True)
class HealthVerdict:
    """The current level and action of one entity."""

    entity: str
    level: Level
    action: Action
    findings: tuple[HealthFinding, ...]  # worst first
