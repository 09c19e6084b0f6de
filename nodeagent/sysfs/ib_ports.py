"""Whether a port is up, down or slow, by what it was and what its peers are. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nodeagent.sysfs.pci import address

UP, DOWN, SLOW = 0.0, 1.0, 2.0
ACTIVE = 4  # rdma/ib_verbs.h: IB_PORT_ACTIVE

_RATE = re.compile(r"(\d{1,6}(?:\.\d{1,3})?) Gb/sec")
_STATE = re.compile(r"(\d{1,3}):")


@dataclass(frozen=True, slots=True)
class Place:
    """One port of one adapter."""

    device: str  # mlx5_0
    port: str
    path: str
    pci: str  # path of the adapter's PCI device; "" if it has none
    key: str  # what it is remembered by: the adapter's GUID, since names change
    model: str
    layer: str  # InfiniBand, Ethernet
    counters: tuple[str, ...] = ()  # files below `path`

    @property
    def entity(self) -> str:
        return f"port/{self.device}/{self.port}"

    @property
    def alike(self) -> tuple[str, str, str, str]:
        """Return what makes two ports peers.

        The function is in it since the second port of a card has its own: often none of them has a cable.
        """
        return self.model, self.layer, self.port, address(self.pci).rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class Port:
    """A port, and what it says of itself."""

    place: Place
    is_active: bool
    rate_gbps: float | None
    words: str


@dataclass(frozen=True, slots=True)
class Expected:
    """What an operator says should be; None: what was seen counts."""

    ports: int | None = None  # that are up
    rate_gbps: float | None = None


def is_active(state: str) -> bool | None:
    """Say whether `4: ACTIVE` says that a port is usable; None if it says nothing.

    The physical state is no help with RoCE, where it is `Disabled` for a cable that is not plugged in, too.
    """
    found = _STATE.match(state)
    return int(found[1]) == ACTIVE if found else None


def rate_gbps(rate: str) -> float | None:
    """Return the figure of `400 Gb/sec (4X NDR)`; None for anything else."""
    found = _RATE.match(rate)
    return float(found[1]) if found else None


def judged(
    ports: Sequence[Port], best_gbps: Mapping[str, float], expected: Expected
) -> list[tuple[Port, float, str]]:
    """Return the state of each port of which one can be told, with the reason.

    A port that is down without having been up, and without a peer that is, may well be meant to be.

    Args:
        ports: All of the node.
        best_gbps: The best rate of those that have been up before, by `Place.key`.
        expected: What an operator says; it goes before what was seen.
    """
    active = [each for each in ports if each.is_active]
    enough = expected.ports is not None and len(active) >= expected.ports
    peers = {each.place.alike for each in active}
    found = []
    for each in ports:
        if each.is_active:
            found.append((each, *_rated(each, best_gbps.get(each.place.key), expected.rate_gbps)))
        elif why := _evidence(each, peers, best_gbps, expected, enough, len(active)):
            found.append((each, DOWN, why))
    return found


def _evidence(
    port: Port,
    peers: Iterable[tuple[str, str, str, str]],
    best_gbps: Mapping[str, float],
    expected: Expected,
    enough: bool,
    active: int,
) -> str:
    """Return why a port that is not active should be; "" if nothing says so."""
    if expected.ports is not None:
        return "" if enough else f"{active} of {expected.ports} expected ports are up"
    if port.place.key in best_gbps:
        return "it was up before"
    return "a port like it is up" if port.place.alike in peers else ""


def _rated(port: Port, seen: float | None, wanted: float | None) -> tuple[float, str]:
    limit = seen if wanted is None else wanted
    if port.rate_gbps is None or limit is None or port.rate_gbps >= limit:
        return UP, ""
    said = "seen before" if wanted is None else "expected"
    return SLOW, f"{port.rate_gbps:g} of {limit:g} Gb/s {said}"


def best(before: Mapping[str, float], ports: Iterable[Port], most: int) -> dict[str, float]:
    """Return the best rates with those of now, of at most `most` ports; the oldest are forgotten."""
    found = dict(before)
    for each in ports:
        if each.is_active:
            found[each.place.key] = max(found.pop(each.place.key, 0.0), each.rate_gbps or 0.0)
    return dict(list(found.items())[-most:])
