"""Looks at the ports of InfiniBand and RoCE adapters: their state, and their counters."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from nodeagent.reading import LeftOut, Reading, content, exists, names, number, text
from nodeagent.sysfs import ib_ports
from nodeagent.sysfs.counters import Sum
from nodeagent.sysfs.ib_ports import Expected, Place, Port
from nodeagent.sysfs.listing import Listing
from nodeagent.sysfs.pci import nearest

MAX_PORTS = 256
MAX_REMEMBERED = 512

# Check -> the files that it is the sum of.
COUNTERS: Mapping[str, tuple[str, ...]] = {
    "ib_link_downed": ("counters/link_downed",),
    "ib_integrity": (
        "counters/excessive_buffer_overrun_errors",
        "counters/local_link_integrity_errors",
        "hw_counters/rnr_nak_retry_err",
    ),
    "ib_symbol_errors": ("counters/symbol_error",),
    "ib_link_recovery": ("counters/link_error_recovery",),
    "port_errors": ("counters/port_rcv_errors",),
    "port_discards": ("counters/port_xmit_discards",),
    "roce_slow_restart": ("hw_counters/roce_slow_restart",),
    "local_ack_timeout": ("hw_counters/local_ack_timeout_err",),
}


class InfiniBand:
    """Sees the adapters of one sysfs."""

    checks = frozenset({"ib_port", *COUNTERS})

    def __init__(self, root: str, expected: Expected, remembered: Mapping[Any, Any]) -> None:
        self._listing = Listing(lambda: places(root))
        self._expected = expected
        self._best_gbps = _rates(remembered)
        self._sums: dict[tuple[str, str], Sum] = {}
        self._seen: dict[str, Place] = {}  # by entity, since this process began

    def read(self, due: frozenset[str], now_s: float) -> Iterable[Reading]:
        found = self._listing.at(now_s)
        readings: list[Reading] = []
        if "ib_port" in due:
            readings += self._states(found)
        for place in found:
            readings += self._counts(place, due)
        there = {each.entity for each in found}
        self._sums = {key: each for key, each in self._sums.items() if key[1] in there}
        return readings

    def left_out(self) -> tuple[LeftOut, ...]:
        """Return nothing: a node without such ports is no poorer to look at."""
        return ()

    def remembered(self) -> dict[str, Any]:
        """Return the best rate of each port that was up. JSON."""
        return dict(self._best_gbps)

    def _states(self, found: Iterable[Place]) -> Iterator[Reading]:
        ports = [port for place in found if (port := _port(place)) is not None]
        self._best_gbps = ib_ports.best(self._best_gbps, ports, MAX_REMEMBERED)
        for port, state, why in ib_ports.judged(ports, self._best_gbps, self._expected):
            yield Reading("ib_port", port.place.entity, state, "; ".join(filter(None, (port.words, why))))
        yield from self._vanished(ports)

    def _vanished(self, ports: Iterable[Port]) -> Iterator[Reading]:
        """Yield the ports whose adapter has left the bus.

        One whose PCI device is still there has gone into a container's namespace, or its driver is reloaded.
        """
        now = {each.place.entity: each.place for each in ports}
        up = {each.place.entity: each.place for each in ports if each.is_active}
        for entity, place in self._seen.items():
            if entity not in now and place.pci and not exists(place.pci):
                address = nearest(place.pci)
                yield Reading("ib_port", entity, ib_ports.DOWN, f"its PCI device {address} is gone")
        self._seen = dict(list({**self._seen, **up}.items())[-MAX_PORTS:])

    def _counts(self, place: Place, due: frozenset[str]) -> Iterator[Reading]:
        for check, files in COUNTERS.items():
            there = [each for each in files if each in place.counters]
            if check in due and there:
                values = {each: number(content(f"{place.path}/{each}")) for each in there}
                count = self._sums.setdefault((check, place.entity), Sum()).take(values)
                if count is not None:
                    yield Reading(check, place.entity, float(count))


def places(root: str) -> tuple[Place, ...]:
    """Return the ports of all adapters but virtual functions, as they are now."""
    found: list[Place] = []
    base = f"{root}/class/infiniband"
    for device in names(base):
        folder = f"{base}/{device}"
        if not exists(f"{folder}/device/physfn"):
            found += [_place(folder, device, each) for each in names(f"{folder}/ports") if each.isdecimal()]
    return tuple(found[:MAX_PORTS])


def _place(folder: str, device: str, port: str) -> Place:
    path = f"{folder}/ports/{port}"
    guid = text(content(f"{folder}/node_guid")) or device
    model = text(content(f"{folder}/board_id")) or text(content(f"{folder}/hca_type")) or ""
    pci = os.path.realpath(f"{folder}/device") if exists(f"{folder}/device") else ""
    layer = text(content(f"{path}/link_layer")) or ""
    files = {each for group in COUNTERS.values() for each in group}
    kept = {f"{sub}/{name}" for sub in ("counters", "hw_counters") for name in names(f"{path}/{sub}")}
    return Place(device, port, path, pci, f"{guid}/{port}", model, layer, tuple(sorted(files & kept)))


def _port(place: Place) -> Port | None:
    state = text(content(f"{place.path}/state")) or ""
    active = ib_ports.is_active(state)
    if active is None:
        return None
    rate = text(content(f"{place.path}/rate")) or ""
    physical = text(content(f"{place.path}/phys_state")) or ""
    words = ", ".join(filter(None, (state, physical, rate)))
    return Port(place, active, ib_ports.rate_gbps(rate), words)


def _rates(remembered: Mapping[Any, Any]) -> dict[str, float]:
    """Return the best rates of a memory that may be garbage."""
    found = {
        key: float(rate)
        for key, rate in remembered.items()
        if isinstance(key, str) and isinstance(rate, (int, float)) and 0 <= rate < 1e6
    }
    return dict(list(found.items())[-MAX_REMEMBERED:])
