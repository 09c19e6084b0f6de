"""Which PCI devices are looked at: network, NVMe, GPUs, and the bridges on the way to them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from nodeagent.reading import content, exists, names, number, text

MAX_DEVICES = 512  # a node with eight GPUs and their switches has about a hundred
MAX_DEPTH = 16  # bridges above one device

NETWORK, NVME, GPU, BRIDGE = "network", "nvme", "gpu", "bridge"
# The first bytes of the class: pci_ids.h. GPUs of data centres are 3D controllers or accelerators.
CLASSES = ((0x02, NETWORK), (0x0108, NVME), (0x03, GPU), (0x1200, GPU))

_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


@dataclass(frozen=True, slots=True)
class Device:
    """One PCI device that is looked at."""

    address: str
    path: str
    kind: str
    model: str  # vendor:device, to tell one from another that was put in its place
    width: int | None = None  # the most that it and the port above it can
    aer: tuple[str, ...] = ()  # the files of error counters that it has

    @property
    def entity(self) -> str:
        return f"device/{self.address}"


def kind(code: int | None) -> str:
    """Return what a device is by its class; "" if it is none of ours."""
    if code is None or not 0 <= code <= 0xFFFFFF:
        return ""
    for prefix, name in CLASSES:
        if code >> (16 if prefix < 0x100 else 8) == prefix:
            return name
    return ""


def address(path: str) -> str:
    """Return the PCI address that a path in /sys/devices ends in; "" if it ends in none."""
    name = path.rpartition("/")[2]
    return name if _ADDRESS.fullmatch(name) else ""


def above(path: str) -> list[str]:
    """Return the paths of the bridges above a device, nearest first."""
    found: list[str] = []
    parent = path.rpartition("/")[0]
    while address(parent) and len(found) < MAX_DEPTH:
        found.append(parent)
        parent = parent.rpartition("/")[0]
    return found


def nearest(path: str) -> str:
    """Return the address of the PCI device that a path in /sys/devices is or is below of; "" if none."""
    while path:
        if found := address(path):
            return found
        path = path.rpartition("/")[0]
    return ""


def devices(root: str) -> tuple[Device, ...]:
    """Return the devices to look at, as they are now. `root` is that of a sysfs."""
    found: dict[str, Device] = {}
    for path, what in _endpoints(f"{root}/bus/pci/devices"):
        found[path] = _device(path, what)
        for bridge in above(path):
            found.setdefault(bridge, _device(bridge, BRIDGE))
        if len(found) >= MAX_DEVICES:
            break
    return tuple(found.values())


def _endpoints(folder: str) -> Iterator[tuple[str, str]]:
    for name in names(folder):
        what = kind(_hexadecimal(content(f"{folder}/{name}/class")))
        # A virtual function has neither a link nor error counters of its own, and there may be hundreds.
        if what and not exists(f"{folder}/{name}/physfn"):
            path = os.path.realpath(f"{folder}/{name}")
            if address(path):
                yield path, what


def _device(path: str, what: str) -> Device:
    there = set(names(path))
    aer = tuple(each for each in ("fatal", "nonfatal", "correctable") if f"aer_dev_{each}" in there)
    model = f"{text(content(f'{path}/vendor'))}:{text(content(f'{path}/device'))}"
    return Device(address(path), path, what, model, _most(path), aer)


def _most(path: str) -> int | None:
    """Return the width that the link could have: a card of 16 lanes in a slot of 8 has 8."""
    ends = [path, *above(path)[:1]]
    widths = [number(content(f"{each}/max_link_width")) for each in ends]
    known = [each for each in widths if each is not None and each > 0]
    return min(known) if known else None


def _hexadecimal(raw: bytes | None) -> int | None:
    found = text(raw) or ""
    return int(found, 16) if re.fullmatch(r"0x[0-9a-f]{1,8}", found) else None
