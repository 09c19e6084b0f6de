"""Distinguishes moved or renamed hardware from hardware that is missing because it broke. Pure.

If the name of a port, an interface or a PCI device is no longer listed, the device is reported as gone only
if something shows that it works elsewhere: it has another name, or is in another network namespace. Hardware
that has disappeared without a trace may have failed, so its findings remain until an operator clears them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from nodeagent.model import GONE
from nodeagent.sensing.sweep import Reading

MAX_KNOWN = 1024


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a sensor has seen under one name."""

    key: str  # identifies the hardware under any name; for a PCI device, its model; "" if unknown
    # a directory that exists as long as the device has such an interface in any namespace; "" if none
    home: str = ""
    is_down: bool | None = False  # its check has found it down; None: not seen this time
    is_up: bool = False


def works_elsewhere(old: Hardware, present: Iterable[Hardware], exists: Callable[[str], bool]) -> bool:
    """Return True if a port or an interface has another name now, or belongs to another namespace.

    If it was down when last seen, it must be up under its new name, because hardware that moves into a
    namespace can no longer be seen, and a link that is down is a fault wherever it is.
    """
    same = [each for each in present if old.key and each.key == old.key]
    if old.is_down:
        return any(each.is_up for each in same)
    return bool(same) or (bool(old.home) and exists(old.home))


class KnownHardware:
    """The hardware of one kind seen so far, by entity, until it is gone."""

    def __init__(self, remembered: object) -> None:
        """Take what `remembered` returned before a restart; it may be corrupt."""
        self._known: dict[str, Hardware] = _known(remembered)
        self._absent: set[str] = set()  # entities that the last listing did not have
        self._forgotten: set[str] = set()  # entities that an operator has had forgotten
        self._listed_s = float("-inf")

    def is_down(self, entity: str) -> bool:
        """Return True if hardware was down when last seen."""
        known = self._known.get(entity)
        return known is not None and bool(known.is_down)

    def mark_down(self, entity: str) -> None:
        """Note that hardware which is no longer listed was found to be broken."""
        if entity in self._known:
            self._known[entity] = replace(self._known[entity], is_down=True)

    def forget(self, entity: str) -> None:
        """Have hardware reported as gone unless it is present; all of it if `entity` is empty."""
        self._forgotten |= {name for name in self._known if entity in ("", name)}

    def gone(
        self, present: Mapping[str, Hardware], listed_s: float, has_moved: Callable[[Hardware], bool]
    ) -> list[Reading]:
        """Note what is present, and return a reading for each entity that has moved or was forgotten.

        A listing may miss something that is being renamed, so an entity counts as absent only after two
        listings in a row without it. If other hardware has taken its name, it counts as absent at once.

        Args:
            present: All hardware of the kind in the newest listing.
            listed_s: The time of that listing.
            has_moved: Returns True if something shows that the hardware works elsewhere.
        """
        left = {name for name, each in present.items() if self._is_other(name, each)}
        if listed_s != self._listed_s:
            absent = self._known.keys() - present.keys()
            left |= absent & self._absent
            self._absent, self._listed_s = absent, listed_s
        forgotten = (self._forgotten & self._known.keys()) - present.keys()
        whys = {
            name: "it has another name or belongs to a container"
            for name in left - forgotten
            if has_moved(self._known[name])
        }
        whys |= dict.fromkeys(forgotten, "an operator had it forgotten")
        for name in whys:
            del self._known[name]
        self._absent -= whys.keys()
        self._forgotten.clear()
        for name, each in present.items():
            self._renew(name, each)
        return [Reading(GONE, name, 1.0, why) for name, why in sorted(whys.items())]

    def remembered(self) -> dict[str, Any]:
        """Return the state that must outlive the process, as JSON."""
        return {name: [each.key, each.home, bool(each.is_down)] for name, each in self._known.items()}

    def _is_other(self, entity: str, now: Hardware) -> bool:
        before = self._known.get(entity)
        return before is not None and "" not in (before.key, now.key) and before.key != now.key

    def _renew(self, entity: str, now: Hardware) -> None:
        before = self._known.pop(entity, None)
        if before is not None and not now.key:
            now = replace(now, key=before.key)
        if now.is_down is None:
            now = replace(now, is_down=before is not None and before.key == now.key and before.is_down)
        self._known[entity] = now
        while len(self._known) > MAX_KNOWN:
            healthy = (name for name, each in self._known.items() if not each.is_down)
            del self._known[next(healthy, next(iter(self._known)))]


def _known(raw: object) -> dict[str, Hardware]:
    found = {}
    for name, each in list(raw.items())[-MAX_KNOWN:] if isinstance(raw, dict) else ():
        if isinstance(name, str) and isinstance(each, list) and len(each) == 3:
            key, home, is_down = each
            if isinstance(key, str) and isinstance(home, str):
                found[name] = Hardware(key, home, is_down is True)
    return found
