"""Checks of PCI devices: their error counters (AER), and the width of their links.

The checks cover network adapters, NVMe drives, GPUs and the bridges above them.

The link's speed is not checked, because an idle link may be slow by design. The device and the port above it
report the full width, but a slot may have fewer lanes than its port claims. So a width counts as full only
after this device, or another of the same model, has been seen with it.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from nodeagent.sensing.pci_classes import HIGHEST, is_gpu
from nodeagent.sensing.sensor import Omission
from nodeagent.sensing.small_files import MAX_FIGURES, exists, list_names, parse_number, parse_text, try_read
from nodeagent.sensing.sweep import CachedList, Reading
from nodeagent.sysfs.departures import Hardware, KnownHardware

MAX_DEVICES = 512  # a node with eight GPUs and their switches has about a hundred
MAX_DEPTH = 16  # bridges above one device
NETWORK, NVME, GPU, BRIDGE = "network", "nvme", "gpu", "bridge"
# The first bytes of the class, from pci_ids.h; `pci_classes` has the classes of GPUs.
CLASSES = ((0x02, NETWORK), (0x0108, NVME))
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
WIDTHS = frozenset({1, 2, 4, 8, 12, 16, 32})  # PCI Express: other values, such as 0 and 63, mean no link
AER = {f"aer_{each}": each for each in ("fatal", "nonfatal", "correctable")}
# NVML reports a GPU's link; a bridge's link is the link of the device below it
LINK_KINDS = frozenset({NETWORK, NVME})
MAX_REMEMBERED = 1024
NO_AER = "no PCI device shows error counters: the firmware handles AER, or this is a virtual machine"


@dataclass(frozen=True, slots=True)
class PciDevice:
    """One PCI device that is checked."""

    address: str
    path: str
    kind: str
    model: str  # vendor:device, to recognise another device in its place
    width: int | None = None  # the maximum that it and the port above it support
    aer: tuple[str, ...] = ()  # the device's files of error counters

    @property
    def entity(self) -> str:
        return f"device/{self.address}"


def device_kind(code: int | None) -> str:
    """Return a device's kind by its class; "" if it is not checked."""
    if code is None or not 0 <= code <= HIGHEST:
        return ""
    if is_gpu(code):
        return GPU
    for prefix, name in CLASSES:
        if code >> (16 if prefix < 0x100 else 8) == prefix:
            return name
    return ""


def pci_address(path: str) -> str:
    """Return the PCI address at the end of a path in /sys/devices; "" if there is none."""
    name = path.rpartition("/")[2]
    return name if _ADDRESS.fullmatch(name) else ""


def bridges_above(path: str) -> list[str]:
    """Return the paths of the bridges above a device, nearest first."""
    found: list[str] = []
    parent = path.rpartition("/")[0]
    while pci_address(parent) and len(found) < MAX_DEPTH:
        found.append(parent)
        parent = parent.rpartition("/")[0]
    return found


def nearest_device(path: str) -> str:
    """Return the path of the PCI device at or above a path in /sys/devices; "" if there is none."""
    while path and not pci_address(path):
        path = path.rpartition("/")[0]
    return path


def nearest_address(path: str) -> str:
    """Return the address of the PCI device at or above a path in /sys/devices; "" if there is none."""
    return pci_address(nearest_device(path))


def list_devices(root: str) -> tuple[PciDevice, ...]:
    """Return the devices to check now. `root` is the root of a sysfs."""
    found: dict[str, PciDevice] = {}
    for path, what in _endpoints(f"{root}/bus/pci/devices"):
        found[path] = _device(path, what)
        for bridge in bridges_above(path):
            found.setdefault(bridge, _device(bridge, BRIDGE))
        if len(found) >= MAX_DEVICES:
            break
    return tuple(found.values())


def _endpoints(folder: str) -> Iterator[tuple[str, str]]:
    for name in list_names(folder):
        what = device_kind(_hexadecimal(try_read(f"{folder}/{name}/class")))
        # A virtual function has no link or error counters of its own, and there may be hundreds.
        if what and not exists(f"{folder}/{name}/physfn"):
            path = os.path.realpath(f"{folder}/{name}")
            if pci_address(path):
                yield path, what


def _device(path: str, what: str) -> PciDevice:
    there = set(list_names(path))
    aer = tuple(each for each in ("fatal", "nonfatal", "correctable") if f"aer_dev_{each}" in there)
    model = f"{parse_text(try_read(f'{path}/vendor'))}:{parse_text(try_read(f'{path}/device'))}"
    return PciDevice(pci_address(path), path, what, model, _max_width(path), aer)


def _max_width(path: str) -> int | None:
    """Return the maximum width of the link: 8 for a card with 16 lanes in a slot with 8 lanes."""
    ends = [path, *bridges_above(path)[:1]]
    widths = [parse_number(try_read(f"{each}/max_link_width")) for each in ends]
    known = [each for each in widths if each is not None and each > 0]
    return min(known) if known else None


def _hexadecimal(raw: bytes | None) -> int | None:
    found = parse_text(raw) or ""
    return int(found, 16) if re.fullmatch(r"0x[0-9a-f]{1,8}", found) else None


def aer_total(raw: bytes) -> int | None:
    """Return the number of errors in a file aer_dev_*; None if the file contains no count.

    Its lines have the form `RxErr 0`. The last one, such as `TOTAL_ERR_COR 0`, counts messages, each of which
    may name several errors. If it is missing, the other counts are added up.
    """
    found: dict[bytes, int] = {}
    for line in raw.splitlines():
        name, _, figures = line.strip().rpartition(b" ")
        if name and figures.isdigit() and len(figures) <= MAX_FIGURES:
            found[name.strip()] = int(figures)
    totals = [count for name, count in found.items() if name.startswith(b"TOTAL_ERR")]
    if totals:
        return totals[0]
    return sum(found.values()) if found else None


def best_width(now: int | None, before: int | None, most: int | None) -> int | None:
    """Return the greatest width seen for a device; None if there is none.

    Args:
        now: The width in sysfs.
        before: The greatest width remembered.
        most: The maximum of device and port, which limits a width remembered from another slot.
    """
    seen = [each for each in (now, before) if each in WIDTHS and each is not None]
    if not seen:
        return None
    return max(seen) if most is None else min(max(seen), most)


def full_width(own: int | None, most: int | None, alike: Iterable[int | None]) -> int | None:
    """Return the width that a link should have; None if it is unknown.

    Args:
        own: The greatest width seen for the device.
        most: The maximum of device and port.
        alike: The greatest widths of the other devices of its model.
    """
    seen = [each for each in (own, *alike) if each is not None]
    if not seen:
        return None
    return max(seen) if most is None else min(max(seen), most)


def width_share(now: int | None, whole: int | None) -> float | None:
    """Return the share of the full width; None if either width is unknown."""
    if now not in WIDTHS or now is None or whole is None or whole <= 0:
        return None
    return min(1.0, now / whole)


def remembered_widths(remembered: Mapping[Any, Any]) -> dict[str, int]:
    """Return the remembered widths; `remembered` may be corrupt."""
    return {
        key: width
        for key, width in remembered.items()
        if isinstance(key, str) and isinstance(width, int) and width in WIDTHS
    }


def remembered_counts(counts: Mapping[Any, Any]) -> dict[str, int]:
    """Return the remembered number of devices of each model; `counts` may be corrupt."""
    return {
        model: count
        for model, count in counts.items()
        if isinstance(model, str) and type(count) is int and 0 < count <= MAX_DEVICES
    }


class PciDevices:
    """Checks the PCI devices of one sysfs."""

    checks = frozenset({"device_pcie_link", *AER})

    def __init__(
        self,
        root: str,
        remembered: Mapping[Any, Any],
        known: object = None,
        counts: Mapping[Any, Any] = MappingProxyType({}),
    ) -> None:
        """Take what `remembered`, `known.remembered` and `remembered_counts` returned before a restart."""
        self.known = KnownHardware(known)
        self._most = remembered_counts(counts)  # by model: the most devices that were present at once
        self._listing = CachedList(lambda: list_devices(root))
        self._best = remembered_widths(remembered)

    def read(self, due: frozenset[str], now_s: float) -> Iterable[Reading]:
        found = self._listing.at(now_s)
        readings = self._gone(found)
        for check in sorted(due & set(AER)):
            readings += _errors(check, found)
        if "device_pcie_link" in due:
            readings += self._links([each for each in found if each.kind in LINK_KINDS])
        return readings

    def left_out(self) -> tuple[Omission, ...]:
        if any(each.aer for each in self._listing.last):
            return ()
        return (Omission("aer", NO_AER),)

    def remembered(self) -> dict[str, Any]:
        """Return the greatest width of each device, as JSON."""
        return dict(list(self._best.items())[-MAX_REMEMBERED:])

    def remembered_counts(self) -> dict[str, Any]:
        """Return the number of devices of each model, as JSON."""
        return dict(list(self._most.items())[-MAX_REMEMBERED:])

    def forget(self, entity: str) -> None:
        """Forget the widths of a device, or of all devices if `entity` is empty."""
        kept = {} if not entity else self._best
        self._best = {key: each for key, each in kept.items() if f"device/{key.partition(' ')[0]}" != entity}

    def _gone(self, found: Sequence[PciDevice]) -> list[Reading]:
        """Return a reading for each device that has moved to another address.

        A device has moved if no device of its model is missing. A device that has left the bus without such a
        sign may have failed.
        """
        if len(found) >= MAX_DEVICES:
            return []  # there may be more
        present = {each.entity: Hardware("" if "None" in each.model else each.model) for each in found}
        counts = Counter(each.key for each in present.values() if each.key)
        for model, count in counts.items():
            self._most[model] = max(count, self._most.get(model, 0))
        return self.known.gone(
            present, self._listing.listed_s, lambda old: counts[old.key] >= self._most.get(old.key, 1)
        )

    def _links(self, found: Iterable[PciDevice]) -> Iterator[Reading]:
        now: dict[PciDevice, int] = {}
        best: dict[PciDevice, int] = {}
        for each in found:
            width = parse_number(try_read(f"{each.path}/current_link_width"))
            seen = best_width(width, self._best.get(_device_key(each)), each.width)
            if width is not None and seen is not None:
                now[each], best[each] = width, seen
                self._best[_device_key(each)] = seen
        for each, width in now.items():
            alike = (seen for other, seen in best.items() if other.model == each.model)
            whole = full_width(best[each], each.width, alike)
            share = width_share(width, whole)
            if share is not None:
                yield Reading("device_pcie_link", each.entity, share, f"{each.kind}: x{width} of x{whole}")


def _errors(check: str, found: Iterable[PciDevice]) -> Iterator[Reading]:
    for each in found:
        if AER[check] in each.aer:
            count = aer_total(try_read(f"{each.path}/aer_dev_{AER[check]}") or b"")
            if count is not None:
                yield Reading(check, each.entity, float(count), each.kind)


def _device_key(device: PciDevice) -> str:
    return f"{device.address} {device.model}"
