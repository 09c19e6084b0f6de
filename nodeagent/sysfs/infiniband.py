"""Checks of the ports of InfiniBand and RoCE adapters: number, state and rate, and their error counters.

A port is expected to be up if an operator requires it, or if it was up before. If only a similar port is up,
it may never have had a cable.
"""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nodeagent.model import NODE
from nodeagent.sensing.counter_sum import CounterSum
from nodeagent.sensing.sensor import Omission
from nodeagent.sensing.small_files import exists, list_names, parse_number, parse_text, try_read
from nodeagent.sensing.sweep import CachedList, Reading
from nodeagent.sysfs.departures import Hardware, KnownHardware, works_elsewhere
from nodeagent.sysfs.pci import nearest_device, pci_address
from nodeagent.sysfs.port_roster import PortPlace, PortRoster, hidden_adapters

UP, DOWN, SLOW, UNUSED, NOT_EXPECTED = 0.0, 1.0, 2.0, 3.0, 4.0  # the states of the check `ib_port`
ACTIVE = 4  # rdma/ib_verbs.h: IB_PORT_ACTIVE
_RATE = re.compile(r"(\d{1,6}(?:\.\d{1,3})?) Gb/sec")
_STATE = re.compile(r"(\d{1,3}):")
MAX_PORTS = 256
MAX_REMEMBERED = 512
MAX_SUMS = 2048

# Check -> the files whose sum is its value. hw_counters/rnr_nak_retry_err is not among them: it rises on the
# sender when the receiving application ends, which is not a fault of the port.
COUNTERS: Mapping[str, tuple[str, ...]] = {
    "ib_link_downed": ("counters/link_downed",),
    "ib_integrity": (
        "counters/excessive_buffer_overrun_errors",
        "counters/local_link_integrity_errors",
    ),
    "ib_symbol_errors": ("counters/symbol_error",),
    "ib_link_recovery": ("counters/link_error_recovery",),
    "port_errors": ("counters/port_rcv_errors",),
    "port_discards": ("counters/port_xmit_discards",),
    "roce_slow_restart": ("hw_counters/roce_slow_restart",),
    "local_ack_timeout": ("hw_counters/local_ack_timeout_err",),
}


@dataclass(frozen=True, slots=True)
class IbPort:
    """One port of one adapter."""

    device: str  # mlx5_0
    port: str
    path: str
    pci: str  # path of the adapter's PCI device, or of its virtual device below one; "" if it has none
    key: str  # identifies the remembered port: the adapter's GUID, because names change
    model: str
    layer: str  # InfiniBand, Ethernet
    counters: tuple[str, ...] = ()  # files below `path`

    @property
    def entity(self) -> str:
        return f"port/{self.device}/{self.port}"

    @property
    def has_guid(self) -> bool:
        """True if `key` identifies the adapter; while its driver starts, it may have no GUID yet."""
        guid = self.key.rpartition("/")[0]
        return guid != self.device and bool(guid.strip("0:"))

    @property
    def alike(self) -> tuple[str, str, str, str]:
        """The key that all peers of a port share.

        The key includes the PCI function, because the second port of each card is a separate function, and
        often none of the second ports has a cable.
        """
        return self.model, self.layer, self.port, pci_address(self.pci).rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class IbPortState:
    """A port and its state."""

    place: IbPort
    is_active: bool
    rate_gbps: float | None
    words: str


@dataclass(frozen=True, slots=True)
class ExpectedPorts:
    """An operator's expectations; None: expect the state seen before."""

    ports: int | None = None  # the number of ports that must be up
    rate_gbps: float | None = None


def parse_active(state: str) -> bool | None:
    """Parse a state such as `4: ACTIVE`: True if the port is usable; None if it is malformed.

    The physical state is not usable for RoCE, where it is `Disabled` even for an unplugged cable.
    """
    found = _STATE.match(state)
    return int(found[1]) == ACTIVE if found else None


def parse_rate_gbps(rate: str) -> float | None:
    """Return the rate in `400 Gb/sec (4X NDR)`; None for anything else."""
    found = _RATE.match(rate)
    return float(found[1]) if found else None


def judge_ports(
    ports: Sequence[IbPortState],
    best_gbps: Mapping[str, float],
    expected: ExpectedPorts,
    hidden: int = 0,
    accepted: Container[str] = (),
) -> list[tuple[IbPortState, float, str]]:
    """Return the state of each port that can be evaluated, with the reason.

    A port that is down, was never up and has no peer that is up may be down on purpose.

    Args:
        ports: All ports of the node.
        best_gbps: The best rate of each port that has been up before, by `IbPort.key`.
        expected: An operator's expectations, which take precedence over earlier states.
        hidden: The number of ports that other network namespaces have.
        accepted: The keys of the ports that an operator no longer expects.
    """
    active = [each for each in ports if each.is_active]
    peers = {each.place.alike for each in active}
    found = []
    for each in ports:
        key = each.place.key
        if each.is_active:
            found.append((each, *_rated(each, best_gbps.get(key), expected.rate_gbps)))
        elif expected.ports is not None:
            state = DOWN if len(active) + hidden < expected.ports else NOT_EXPECTED
            found.append((each, state, f"{len(active)} of {expected.ports} expected ports are up"))
        elif key in best_gbps:
            found.append((each, DOWN, "it was up before"))
        elif key in accepted:
            found.append((each, NOT_EXPECTED, "an operator had it forgotten"))
        elif each.place.alike in peers:
            found.append((each, UNUSED, "a similar port is up"))
    return found


def _rated(port: IbPortState, seen: float | None, wanted: float | None) -> tuple[float, str]:
    limit = seen if wanted is None else wanted
    if port.rate_gbps is None or limit is None or port.rate_gbps >= limit:
        return UP, ""
    said = "seen before" if wanted is None else "expected"
    return SLOW, f"{port.rate_gbps:g} of {limit:g} Gb/s {said}"


def best_rates(before: Mapping[str, float], ports: Iterable[IbPortState], most: int) -> dict[str, float]:
    """Return the best rates, including current ones, of at most `most` ports; the oldest are dropped."""
    found = dict(before)
    for each in ports:
        if each.is_active:
            found[each.place.key] = max(found.pop(each.place.key, 0.0), each.rate_gbps or 0.0)
    return dict(list(found.items())[-most:])


class InfiniBandPorts:
    """Checks the ports of one sysfs."""

    checks = frozenset({"ib_port", "ib_port_count", *COUNTERS})

    def __init__(
        self,
        root: str,
        expected: ExpectedPorts,
        remembered: Mapping[Any, Any],
        counts: Mapping[Any, Any],
        known: object = None,
        roster: object = None,
    ) -> None:
        """Take what the methods and attributes named `remembered` returned before a restart."""
        self.known = KnownHardware(known)
        self.roster = PortRoster(roster)
        self._root = root
        self._listing = CachedList(self._listed)
        self._expected = expected
        self._hidden = 0  # adapters whose ports belong to other network namespaces
        self._best_gbps = _remembered_rates(remembered)
        self._sums = _remembered_sums(counts)  # by port and check; a sum is kept while its port is absent
        self._seen: dict[str, IbPort] = {}  # by entity, since this process started

    def read(self, due: frozenset[str], now_s: float) -> Iterable[Reading]:
        found = self._listing.at(now_s)
        readings: list[Reading] = []
        if "ib_port" in due:
            readings += self._states(found)
        if self.roster.listed_s != self._listing.listed_s:
            self.roster.learn(self._places(found), self._listing.listed_s)
        if "ib_port_count" in due:
            readings += self._count_ports(found)
        for place in found:
            readings += self._counts(place, due)
        return readings

    def left_out(self) -> tuple[Omission, ...]:
        """Return the ports that cannot be seen. On a node without any ports, no check is left out."""
        if not self._hidden:
            return ()
        why = f"{self._hidden} adapters belong to other network namespaces, so their ports are not visible"
        return (Omission("ib_port", why),)

    def remembered(self) -> dict[str, Any]:
        """Return the best rate of each port that was up, as JSON."""
        return dict(self._best_gbps)

    def remembered_counts(self) -> dict[str, Any]:
        """Return the sums of counters, as JSON, for the next process to continue from."""
        return {key: each.dump() for key, each in list(self._sums.items())[-MAX_SUMS:]}

    def rebase_counts(self) -> None:
        """Count from the next readings: the node has booted, and links count errors while they come up."""
        for each in self._sums.values():
            each.rebase()

    def forget(self, entity: str) -> None:
        """Forget that a port was up, and its best rate; if `entity` is empty, do so for all ports.

        A port that is no longer listed is then reported as gone.
        """
        now = self._listing.last or self._listed()
        keys = self.roster.forget(entity, [each.key for each in now if entity in ("", each.entity)])
        keys |= {each.key for each in self._seen.values() if each.entity == entity}
        self.known.forget(entity)
        self._best_gbps = {key: each for key, each in self._best_gbps.items() if entity and key not in keys}
        self._seen = {name: each for name, each in self._seen.items() if entity and name != entity}

    def _listed(self) -> tuple[IbPort, ...]:
        found = list_ports(self._root)
        fewer = self._expected.ports is not None and len(found) < self._expected.ports
        self._hidden = hidden_adapters(self._root, {each.pci for each in found}) if fewer else 0
        return found

    def _places(self, found: Iterable[IbPort]) -> dict[str, PortPlace]:
        """Return the ports that have been up, by key.

        They do not include ports of virtual devices below a PCI device, which come and go.
        """
        return {
            each.key: PortPlace(each.entity, each.pci)
            for each in found
            if each.key in self._best_gbps and each.has_guid and pci_address(each.pci)
        }

    def _count_ports(self, found: Sequence[IbPort]) -> list[Reading]:
        if len(found) >= MAX_PORTS:
            return []  # there may be more
        listed = [(each.key, each.pci) for each in found if exists(each.path)]
        if self._expected.ports is None:
            judged: tuple[float, str] | None = self.roster.judge(listed, self._best_gbps)
        else:
            judged = self.roster.judge_number(self._expected.ports, listed, self._hidden)
        return [] if judged is None else [Reading("ib_port_count", NODE, *judged)]

    def _states(self, found: Iterable[IbPort]) -> Iterator[Reading]:
        ports = [port for place in found if (port := _port_state(place)) is not None]
        self._best_gbps = best_rates(self._best_gbps, ports, MAX_REMEMBERED)
        self.roster.end_acceptance(each.place.key for each in ports if each.is_active)
        judged = judge_ports(ports, self._best_gbps, self._expected, self._hidden, self.roster.accepted)
        yield from self._gone(found, ports, {port.place.entity for port, state, _ in judged if state == DOWN})
        for port, state, why in judged:
            yield Reading("ib_port", port.place.entity, state, "; ".join(filter(None, (port.words, why))))
        yield from self._vanished(ports)

    def _gone(
        self, found: Iterable[IbPort], ports: Iterable[IbPortState], down: Container[str]
    ) -> list[Reading]:
        active = {each.place.entity: each.is_active for each in ports}
        present = {
            each.entity: Hardware(
                each.key if each.has_guid else "",
                f"{each.pci}/infiniband" if each.pci else "",
                each.entity in down if each.entity in active else None,
                active.get(each.entity, False),
            )
            for each in found
        }
        if len(present) >= MAX_PORTS:
            return []  # there may be more
        gone = self.known.gone(
            present, self._listing.listed_s, lambda old: works_elsewhere(old, present.values(), exists)
        )
        for each in gone:
            self._seen.pop(each.entity, None)
        return gone

    def _vanished(self, ports: Iterable[IbPortState]) -> Iterator[Reading]:
        """Yield a reading for each port whose adapter has left the bus.

        If the PCI device is still there, the port has moved into a container's namespace, or its driver is
        being reloaded.
        """
        now = {each.place.entity: each.place for each in ports}
        up = {each.place.entity: each.place for each in ports if each.is_active}
        for entity, place in self._seen.items():
            if entity not in now and (device := nearest_device(place.pci)) and not exists(device):
                self.known.mark_down(entity)
                yield Reading("ib_port", entity, DOWN, f"its PCI device {pci_address(device)} is gone")
        self._seen = dict(list({**self._seen, **up}.items())[-MAX_PORTS:])

    def _counts(self, place: IbPort, due: frozenset[str]) -> Iterator[Reading]:
        for check, files in COUNTERS.items():
            there = [each for each in files if each in place.counters]
            if check in due and there:
                values = {each: parse_number(try_read(f"{place.path}/{each}")) for each in there}
                count = self._sums.setdefault(f"{check} {place.key}", CounterSum()).add(values)
                if count is not None:
                    yield Reading(check, place.entity, float(count))


def list_ports(root: str) -> tuple[IbPort, ...]:
    """Return the present ports of all adapters except virtual functions."""
    found: list[IbPort] = []
    base = f"{root}/class/infiniband"
    for device in list_names(base):
        folder = f"{base}/{device}"
        if not exists(f"{folder}/device/physfn"):
            found += [
                _ib_port(folder, device, each) for each in list_names(f"{folder}/ports") if each.isdecimal()
            ]
    return tuple(found[:MAX_PORTS])


def _ib_port(folder: str, device: str, port: str) -> IbPort:
    path = f"{folder}/ports/{port}"
    guid = parse_text(try_read(f"{folder}/node_guid")) or device
    model = parse_text(try_read(f"{folder}/board_id")) or parse_text(try_read(f"{folder}/hca_type")) or ""
    pci = os.path.realpath(f"{folder}/device") if exists(f"{folder}/device") else ""
    layer = parse_text(try_read(f"{path}/link_layer")) or ""
    files = {each for group in COUNTERS.values() for each in group}
    kept = {f"{sub}/{name}" for sub in ("counters", "hw_counters") for name in list_names(f"{path}/{sub}")}
    return IbPort(device, port, path, pci, f"{guid}/{port}", model, layer, tuple(sorted(files & kept)))


def _port_state(place: IbPort) -> IbPortState | None:
    state = parse_text(try_read(f"{place.path}/state")) or ""
    active = parse_active(state)
    if active is None:
        return None
    rate = parse_text(try_read(f"{place.path}/rate")) or ""
    physical = parse_text(try_read(f"{place.path}/phys_state")) or ""
    words = ", ".join(filter(None, (state, physical, rate)))
    return IbPortState(place, active, parse_rate_gbps(rate), words)


def _remembered_rates(remembered: Mapping[Any, Any]) -> dict[str, float]:
    """Return the remembered rates; `remembered` may be corrupt."""
    found = {
        key: float(rate)
        for key, rate in remembered.items()
        if isinstance(key, str) and isinstance(rate, (int, float)) and 0 <= rate < 1e6
    }
    return dict(list(found.items())[-MAX_REMEMBERED:])


def _remembered_sums(counts: Mapping[Any, Any]) -> dict[str, CounterSum]:
    """Return the remembered sums; `counts` may be corrupt."""
    kept = list(counts.items())[-MAX_SUMS:]
    return {key: CounterSum.load(each) for key, each in kept if isinstance(key, str)}
