"""Tracks which GPU is in which slot, to let evidence follow its GPU and not count against another. Pure.

Evidence is kept by slot, because a kernel line names only a PCI address. NVML names the GPU in each slot by
its UUID. From these sightings, `eras` derives where, and when, the evidence about a slot's GPU was collected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Any

from nodeagent.model import Observation

MAX_PLACEMENTS = 256  # 64 slots, and three exchanges of each
INVENTORY = "gpu_state"  # the check whose facts name the GPU
MAX_NAME = 96


@dataclass(frozen=True, slots=True)
class Era:
    """A period when a slot's evidence is about one GPU."""

    entity: str
    from_s: float = -inf
    until_s: float = inf


@dataclass(slots=True, eq=False)
class _Placement:
    entity: str
    device: str
    from_s: float  # the first time that NVML saw the GPU in the slot
    seen_s: float  # the newest


def named_device(seen: Observation) -> tuple[str, bool]:
    """Return the GPU that an observation names ("": none), and whether NVML has it open now.

    NVML's sensor also names a GPU that does not respond or has left its slot, but then only by its UUID.
    """
    if seen.check != INVENTORY:
        return "", False
    facts = dict(seen.facts)
    device = facts.get("uuid") or facts.get("serial") or ""
    return device[:MAX_NAME], "name" in facts


class DeviceSlots:
    """The history of the slots. The order of the sightings matters, and a late one is ignored."""

    def __init__(self) -> None:
        self._placements: list[_Placement] = []  # oldest first
        self._newest: dict[str, _Placement] = {}  # by entity
        self._of_device: dict[str, _Placement] = {}

    def see(self, seen: Observation) -> Mapping[str, float]:
        """Record a sighting. Return the slots that a GPU has left, and when it was last seen there."""
        device, opened = named_device(seen)
        if not device:
            return {}
        here, there = self._newest.get(seen.entity), self._of_device.get(device)
        if here is not None and here is there:
            here.seen_s = max(here.seen_s, seen.at_s)
            return {}
        if not opened or (self._placements and seen.at_s < self._placements[-1].from_s):
            return {}
        changed = {each.entity: each.seen_s for each in (here, there) if each is not None}
        self._place(_Placement(seen.entity, device, seen.at_s, seen.at_s))
        return changed

    def _place(self, placement: _Placement) -> None:
        self._placements.append(placement)
        self._newest[placement.entity] = self._of_device[placement.device] = placement
        past = [each for each in self._placements if self._newest[each.entity] is not each]
        if len(self._placements) > MAX_PLACEMENTS and past:
            self._placements.remove(past[0])
            if self._of_device.get(past[0].device) is past[0]:
                del self._of_device[past[0].device]

    def device(self, entity: str) -> str:
        """Return the GPU in a slot; "" if it is unknown or has left."""
        here = self._newest.get(entity)
        return here.device if here is not None and self._of_device.get(here.device) is here else ""

    def owners(self, entity: str) -> tuple[str, ...]:
        """Return the slots whose GPU the evidence of this slot may be about: itself, and where one went."""
        went = {
            self._of_device[each.device].entity
            for each in self._placements
            if each.entity == entity and self.device(self._of_device[each.device].entity) == each.device
        }
        return tuple(sorted({entity, *went}))

    def has_departed(self, entity: str) -> bool:
        """Return True if a GPU has left the slot."""
        return sum(each.entity == entity for each in self._placements) > (self.device(entity) != "")

    def eras(self, entity: str, boots: Sequence[float]) -> tuple[Era, ...]:
        """Return where and when the evidence about the GPU now in a slot was collected.

        Args:
            boots: The times of the node's boots. A GPU is exchanged while the node is off, so the evidence
                between the boot and the first sighting of the new GPU is about the new GPU.
        """
        here = self._newest.get(entity)
        if here is None:
            return (Era(entity),)
        device = self.device(entity)
        if not device:
            return (self._slot_eras(entity, boots)[-1][1],)
        slots = dict.fromkeys(each.entity for each in self._placements if each.device == device)
        return tuple(era for slot in slots for owner, era in self._slot_eras(slot, boots) if owner == device)

    def _slot_eras(self, entity: str, boots: Sequence[float]) -> list[tuple[str, Era]]:
        """Return the GPUs of a slot, oldest first, with their eras; "" for the time after the last left."""
        own = [each for each in self._placements if each.entity == entity]
        begins: list[tuple[str, float]] = []
        for n, each in enumerate(own):
            before = self._before(each) if n == 0 else own[n - 1]
            since_s = (
                -inf if before is None else _exchanged_s(before, self._left_s(before, each.from_s), boots)
            )
            begins.append((each.device, since_s))
        if own and (left_s := self._left_s(own[-1], inf)) < inf:
            begins.append(("", _exchanged_s(own[-1], left_s, boots)))
        ends = [since_s for _, since_s in begins[1:]] + [inf]
        return [
            (device, Era(entity, since_s, until_s))
            for (device, since_s), until_s in zip(begins, ends, strict=True)
        ]

    def _before(self, placement: _Placement) -> _Placement | None:
        """Return the GPU's placement before this one, in another slot."""
        at = self._placements.index(placement)
        earlier = [each for each in self._placements[:at] if each.device == placement.device]
        return earlier[-1] if earlier else None

    def _left_s(self, placement: _Placement, latest_s: float) -> float:
        """Return when a GPU was first seen elsewhere, or `latest_s` if that is earlier."""
        at = self._placements.index(placement)
        later = (each.from_s for each in self._placements[at + 1 :] if each.device == placement.device)
        return min([latest_s, *later])

    def explains(self, entity: str, at_s: float) -> bool:
        """Return True if the eras already take account of an exchange that a sensor reports at this time."""
        own = [each for each in self._placements if each.entity == entity]
        return any(old.seen_s < at_s <= new.from_s for old, new in pairwise(own))

    def dump(self) -> list[list[Any]]:
        """Return the history as JSON, for `load`."""
        return [[each.entity, each.device, each.from_s, each.seen_s] for each in self._placements]

    def load(self, raw: Any) -> None:
        """Restore the dumped history. Raises ValueError or TypeError if it is malformed."""
        for entity, device, from_s, seen_s in raw:
            self._place(_Placement(str(entity), str(device)[:MAX_NAME], float(from_s), float(seen_s)))


def _exchanged_s(old: _Placement, first_seen_s: float, boots: Sequence[float]) -> float:
    """Return when a GPU gave way to the next: at the last boot between their sightings, if there was one."""
    between = [at_s for at_s in boots if old.seen_s < at_s <= first_seen_s]
    return max(between, default=first_seen_s)
