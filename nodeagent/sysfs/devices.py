"""Looks at PCI devices: their error counters, and the width of their links."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from nodeagent.reading import LeftOut, Reading, content, number
from nodeagent.sysfs import pcie_link
from nodeagent.sysfs.aer import total
from nodeagent.sysfs.listing import Listing
from nodeagent.sysfs.pci import NETWORK, NVME, Device, devices

AER = {f"aer_{each}": each for each in ("fatal", "nonfatal", "correctable")}
LINKS = frozenset({NETWORK, NVME})  # a GPU's own is NVML's; a bridge's is that of what is below it
MAX_REMEMBERED = 1024
NO_AER = "no PCI device shows error counters: the firmware keeps AER to itself, or this is a virtual machine"


class Devices:
    """Sees the devices of one sysfs."""

    checks = frozenset({"device_pcie_link", *AER})

    def __init__(self, root: str, remembered: Mapping[Any, Any]) -> None:
        self._listing = Listing(lambda: devices(root))
        self._best = pcie_link.widths(remembered)

    def read(self, due: frozenset[str], now_s: float) -> Iterable[Reading]:
        found = self._listing.at(now_s)
        readings: list[Reading] = []
        for check in sorted(due & set(AER)):
            readings += _errors(check, found)
        if "device_pcie_link" in due:
            readings += self._links([each for each in found if each.kind in LINKS])
        return readings

    def left_out(self) -> tuple[LeftOut, ...]:
        if any(each.aer for each in self._listing.last):
            return ()
        return (LeftOut("aer", NO_AER),)

    def remembered(self) -> dict[str, Any]:
        """Return the best width of each device. JSON."""
        return dict(list(self._best.items())[-MAX_REMEMBERED:])

    def _links(self, found: Iterable[Device]) -> Iterator[Reading]:
        now: dict[Device, int] = {}
        best: dict[Device, int] = {}
        for each in found:
            width = number(content(f"{each.path}/current_link_width"))
            seen = pcie_link.best(width, self._best.get(_key(each)), each.width)
            if width is not None and seen is not None:
                now[each], best[each] = width, seen
                self._best[_key(each)] = seen
        for each, width in now.items():
            alike = (seen for other, seen in best.items() if other.model == each.model)
            whole = pcie_link.full(best[each], each.width, alike)
            share = pcie_link.share(width, whole)
            if share is not None:
                yield Reading("device_pcie_link", each.entity, share, f"{each.kind}: x{width} of x{whole}")


def _errors(check: str, found: Iterable[Device]) -> Iterator[Reading]:
    for each in found:
        if AER[check] in each.aer:
            count = total(content(f"{each.path}/aer_dev_{AER[check]}") or b"")
            if count is not None:
                yield Reading(check, each.entity, float(count), each.kind)


def _key(device: Device) -> str:
    return f"{device.address} {device.model}"
