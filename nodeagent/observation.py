"""What a sensor has seen: one fact about one entity at one time. Pure.

An observation says what was there, never how bad it is: that is the evaluator's, from the policy's tables.
Two that are equal are one: what two sensors report, or one sensor again after a restart, does no harm.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_TEXT = 512  # characters of a sensor's own words: a kernel line of kilobytes must not be kept
MAX_FACTS = 16

# Entities are paths: the kind, then what tells one from another.
NODE = "node"
DRIVER = "driver"


def gpu(bus_id: str) -> str:
    """Return the entity of the GPU at a PCI address however written: `gpu/0000:3b:00.0`.

    NVML writes `00000000:3B:00.0`, the kernel log `PCI:0000:3b:00` or without a domain.
    """
    return f"gpu/{pci(bus_id)}"


def pci(bus_id: str) -> str:
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
