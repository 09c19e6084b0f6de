"""Tracks the InfiniBand ports that the node should have, and finds those that are no longer listed.

Ports may leave the list of a healthy node: a container or a virtual machine has taken them, two of them were
bonded, or the driver is being reloaded. So without an operator's number, a port is missing only if its PCI
device has left the bus. A port that is no longer listed, although its PCI device is still there, is reported
as unlisted.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nodeagent.sensing.small_files import exists, list_names
from nodeagent.sysfs.pci import pci_address

COMPLETE, MISSING, UNLISTED = 0.0, 1.0, 2.0  # the states of the number of ports
MAX_REMEMBERED = 512
MAX_NAMED = 8  # in one text
MAX_TEXT = 512  # characters of a remembered name


@dataclass(frozen=True, slots=True)
class PortPlace:
    """Where a port was last seen."""

    entity: str
    pci: str  # path of the adapter's PCI device

    @property
    def is_hidden(self) -> bool:
        """True if the port, which is not listed, belongs to another network namespace."""
        return exists(f"{self.pci}/infiniband")

    @property
    def is_lent(self) -> bool:
        """True if a virtual machine has the adapter."""
        return os.path.realpath(f"{self.pci}/driver").rpartition("/")[2] == "vfio-pci"


class PortRoster:
    """The ports that were up, by key, and the most that were listed at once."""

    def __init__(self, remembered: object) -> None:
        """Take what `remembered` returned before a restart; it may be corrupt."""
        self._most, self._places, self._accepted = _restored(remembered)
        self._last: Container[str] = ()  # the ports of the last listing that had been up
        self.listed_s = float("-inf")  # when the newest listing that was learned was made

    def learn(self, present: Mapping[str, PortPlace], listed_s: float) -> None:
        """Note the ports of a listing that have been up.

        A port is expected once two listings in a row had it, because ports that are about to be bonded or
        renamed are listed for a moment while a node boots.

        Args:
            present: The ports by key, without those whose adapter is not a PCI device.
            listed_s: When they were listed.
        """
        again = {key: place for key, place in present.items() if key in self._last}
        self._last, self.listed_s = frozenset(present), listed_s
        complete = len(again) >= self._most  # the ports that are not among these were replaced
        self._most = max(self._most, len(again))
        kept = {} if complete else {key: each for key, each in self._places.items() if key not in again}
        self._places = dict([*kept.items(), *again.items()][-MAX_REMEMBERED:])

    def judge(self, listed: Collection[tuple[str, str]], were_up: Container[str]) -> tuple[float, str]:
        """Return the state without an operator's number, and the reason.

        Args:
            listed: The key of each listed port, and the path of its adapter's PCI device.
            were_up: The keys of the ports that have been up.
        """
        present = sum(key in were_up for key, _ in listed)
        if present >= self._most:
            return COMPLETE, ""
        unseen = self._unseen(listed)
        absent = [each for each in unseen if not (each.is_hidden or each.is_lent)]
        missing = min(len(absent), self._most - present - (len(unseen) - len(absent)))
        if missing <= 0:
            return COMPLETE, ""
        unlisted = sum(exists(each.pci) for each in absent)
        text = f"{self._most - missing} of {self._most} ports that were up; {_named(absent)}"
        return (UNLISTED if missing <= unlisted else MISSING), text

    def judge_number(
        self, wanted: int, listed: Collection[tuple[str, str]], hidden: int
    ) -> tuple[float, str] | None:
        """Return the state with an operator's number, and the reason; None if it cannot be evaluated.

        Args:
            wanted: The operator's number.
            listed: As for `judge`.
            hidden: The number of adapters whose ports belong to other network namespaces.
        """
        if len(listed) >= wanted:
            return COMPLETE, ""
        hidden = max(hidden, sum(each.is_hidden for each in self._unseen(listed)))
        if len(listed) + hidden >= wanted:
            return None
        return MISSING, f"{len(listed)} of {wanted} expected ports are present"

    def _unseen(self, listed: Collection[tuple[str, str]]) -> list[PortPlace]:
        """Return the expected ports that are not listed, unless another adapter is in the same place."""
        keys, devices = {key for key, _ in listed}, {pci for _, pci in listed}
        return [each for key, each in self._places.items() if key not in keys and each.pci not in devices]

    @property
    def accepted(self) -> Container[str]:
        """The keys of the ports that may be inactive, because an operator had them forgotten."""
        return self._accepted

    def end_acceptance(self, active: Iterable[str]) -> None:
        """Note that ports are up, so they may no longer be inactive."""
        for key in active:
            self._accepted.pop(key, None)

    def forget(self, entity: str, listed: Iterable[str]) -> set[str]:
        """Stop expecting the ports under a name until they are up again; all ports if `entity` is empty.

        Args:
            listed: The keys of the ports that are listed under this name; of all ports if `entity` is empty.

        Returns:
            The keys of the ports that were listed or expected under this name.
        """
        self._accepted = dict.fromkeys([*self._accepted, *listed][-MAX_REMEMBERED:])
        ended = {*listed, *(key for key, each in self._places.items() if entity in ("", each.entity))}
        kept = {key: each for key, each in self._places.items() if key not in ended}
        self._most = max(0, self._most - len(self._places) + len(kept)) if entity else 0
        self._places, self._last = kept, ()
        return ended

    def remembered(self) -> dict[str, Any]:
        """Return the state that must outlive the process, as JSON."""
        places = {key: [each.entity, each.pci] for key, each in self._places.items()}
        return {"most": self._most, "places": places, "accepted": list(self._accepted)}


def hidden_adapters(root: str, devices: Container[str]) -> int:
    """Return the number of adapters on the PCI bus whose ports belong to other network namespaces.

    Args:
        root: The root of a sysfs.
        devices: The paths of the PCI devices of the listed ports.
    """
    found = 0
    for name in list_names(f"{root}/bus/pci/devices"):
        path = f"{root}/bus/pci/devices/{name}"
        if exists(f"{path}/infiniband") and not exists(f"{path}/physfn"):
            found += os.path.realpath(path) not in devices
    return found


def _named(places: Collection[PortPlace]) -> str:
    named = [
        f"{each.entity}: {pci_address(each.pci)} {'has no port' if exists(each.pci) else 'is gone'}"
        for each in list(places)[:MAX_NAMED]
    ]
    return ", ".join([*named, "..."] if len(places) > MAX_NAMED else named)


def _restored(raw: object) -> tuple[int, dict[str, PortPlace], dict[str, None]]:
    """Return the remembered number, places and accepted ports; `raw` may be corrupt."""
    fields = raw if isinstance(raw, dict) else {}
    found = {}
    places = fields.get("places")
    for key, each in list(places.items())[-MAX_REMEMBERED:] if isinstance(places, dict) else ():
        if isinstance(key, str) and isinstance(each, list) and len(each) == 2:
            entity, pci = each
            if isinstance(entity, str) and isinstance(pci, str) and pci.isprintable() and pci_address(pci):
                found[key] = PortPlace(entity[:MAX_TEXT], pci)
    most, accepted = fields.get("most"), fields.get("accepted")
    names = accepted[-MAX_REMEMBERED:] if isinstance(accepted, list) else []
    return (
        min(most, len(found)) if type(most) is int and most > 0 else 0,
        found,
        {each: None for each in names if isinstance(each, str)},
    )
