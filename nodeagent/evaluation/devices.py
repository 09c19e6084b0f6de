"""Tracks which GPU is in which slot, so that evidence follows its GPU and never counts against another. Pure.

It also tracks the model and the MIG mode of each GPU, because they decide what some codes mean.

Evidence is kept by slot, because a kernel line names only a PCI address. NVML names the GPU in each slot by
its UUID. From these sightings, `eras` derives where and when the evidence about a slot's GPU was collected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Any

from nodeagent.model import Observation

MAX_PLACEMENTS = 256  # 64 slots with three exchanges each
INVENTORY = "gpu_state"  # the check whose facts name the GPU
MAX_NAME = 96
MAX_MODELS = 256
MAX_MODES = 16  # per GPU; each change requires a reset
MIG_ON = "on"  # in the facts of a GPU, as the current mode: `on, off pending`
_SHARED = "@"  # separates a name that two GPUs claim from the slot of one of them


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
    seen_s: float  # the last time


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
    """The history of the slots. The order of the sightings matters; late sightings are ignored."""

    def __init__(self) -> None:
        self._placements: list[_Placement] = []  # oldest first
        self._newest: dict[str, _Placement] = {}  # by entity
        self._of_device: dict[str, _Placement] = {}
        self._shared: set[str] = set()  # names that more than one GPU claims

    def see(self, seen: Observation, boots: Sequence[float] = ()) -> Mapping[str, float]:
        """Record a sighting. Return the slots that a GPU has left, and when it was last seen there."""
        device, opened = named_device(seen)
        if not device:
            return {}
        if device not in self._shared and opened and self._is_elsewhere(device, seen, boots):
            self._tell_apart(device)
        if device in self._shared:
            device = _own_name(device, seen.entity)
        here, there = self._newest.get(seen.entity), self._of_device.get(device)
        if here is not None and here is there:
            here.seen_s = max(here.seen_s, seen.at_s)
            return {}
        if not opened or (self._placements and seen.at_s < self._placements[-1].from_s):
            return {}
        changed = {each.entity: each.seen_s for each in (here, there) if each is not None}
        self._place(_Placement(seen.entity, device, seen.at_s, seen.at_s))
        return changed

    def _is_elsewhere(self, device: str, seen: Observation, boots: Sequence[float]) -> bool:
        """Return True if a GPU is seen where it was before it moved, although the node has not booted since.

        A GPU cannot be moved twice without a boot, so in this case two GPUs must have the same name.
        """
        here, there = self._newest.get(seen.entity), self._of_device.get(device)
        if here is None or there is None or here is there or here.device != device:
            return False
        return seen.at_s >= there.from_s and not any(there.from_s < at_s <= seen.at_s for at_s in boots)

    def _tell_apart(self, device: str) -> None:
        """Add the slot to the name of each GPU that claims this name."""
        self._shared.add(device)
        placements, self._placements = self._placements, []
        self._newest.clear()
        self._of_device.clear()
        for each in placements:
            if each.device == device:
                each.device = _own_name(device, each.entity)
            self._place(each)

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

    def names(self, entity: str) -> tuple[str, ...]:
        """Return the names by which the GPU in a slot is known, the most exact first."""
        device = self.device(entity)
        return (*dict.fromkeys((device, device.partition(_SHARED)[0])), entity) if device else (entity,)

    def owners(self, entity: str) -> tuple[str, ...]:
        """Return the slots that this slot's evidence may be about: itself, and where its GPUs have moved."""
        went = {
            self._of_device[each.device].entity
            for each in self._placements
            if each.entity == entity and self.device(self._of_device[each.device].entity) == each.device
        }
        return tuple(sorted({entity, *went}))

    def has_departed(self, entity: str) -> bool:
        """Return True if a GPU has left the slot."""
        return sum(each.entity == entity for each in self._placements) > (self.device(entity) != "")

    def oldest_sighting_s(self) -> float:
        """Return when the first GPU of this history was last seen; a later boot may begin or end an era."""
        return min((each.seen_s for each in self._placements), default=inf)

    def sightings_s(self) -> list[float]:
        """Return the first and last time of each GPU in each slot, in no particular order."""
        return [at_s for each in self._placements for at_s in (each.from_s, each.seen_s)]

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
        """Return a slot's GPUs, oldest first, with their eras; "" for the time after the last one left."""
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
        """Return the time when a GPU was first seen elsewhere, or `latest_s` if that is earlier."""
        at = self._placements.index(placement)
        later = (each.from_s for each in self._placements[at + 1 :] if each.device == placement.device)
        return min([latest_s, *later])

    def explains(self, entity: str, at_s: float) -> bool:
        """Return True if the eras already account for an exchange that a sensor reports at this time."""
        own = [each for each in self._placements if each.entity == entity]
        return any(old.seen_s < at_s <= new.from_s for old, new in pairwise(own))

    def dump(self) -> list[list[Any]]:
        """Return the history as JSON, for `load`."""
        return [[each.entity, each.device, each.from_s, each.seen_s] for each in self._placements]

    def load(self, raw: Any) -> None:
        """Restore the dumped history. Raises ValueError or TypeError if it is malformed."""
        for entity, device, from_s, seen_s in raw:
            self._place(_Placement(str(entity), str(device)[:MAX_NAME], float(from_s), float(seen_s)))
            name, shared, _ = str(device).partition(_SHARED)
            self._shared |= {name} if shared else set()


def _own_name(device: str, entity: str) -> str:
    return f"{device}{_SHARED}{entity}"[:MAX_NAME]


def _exchanged_s(old: _Placement, first_seen_s: float, boots: Sequence[float]) -> float:
    """Return the time of a GPU's replacement by the next: the last boot between their sightings, if any."""
    between = [at_s for at_s in boots if old.seen_s < at_s <= first_seen_s]
    return max(between, default=first_seen_s)


Model = tuple[str, bool]  # a GPU's name, and whether MIG is known to be on
UNKNOWN_MODEL: Model = ("", False)


@dataclass(slots=True)
class _Mode:
    mig: bool | None  # None: unknown
    from_s: float  # the first time that the GPU was seen in it
    seen_s: float  # the last time


@dataclass(slots=True)
class _GpuHistory:
    name: str
    modes: list[_Mode]  # oldest first


class GpuModels:
    """The name and the MIG modes of each GPU. Sightings that are late or have no name are ignored."""

    def __init__(self) -> None:
        self._of: dict[str, _GpuHistory] = {}  # by GPU, or by slot if the GPU is not identified

    def see(self, gpu: str, seen: Observation) -> bool:
        """Record a sighting; return True if it changes what codes may mean."""
        facts = dict(seen.facts)
        name, word = facts.get("name", ""), facts.get("mig", "")
        if not name:
            return False
        mig = word.partition(",")[0] == MIG_ON if word else None
        known = self._of.pop(gpu, None)
        self._of[gpu] = history = known or _GpuHistory(name, [_Mode(mig, seen.at_s, seen.at_s)])
        while len(self._of) > MAX_MODELS:
            del self._of[next(iter(self._of))]  # the GPU that has not been seen for the longest time
        changed = known is None or history.name != name
        history.name = name
        return self._note_mode(history.modes, mig, seen.at_s) or changed

    def _note_mode(self, modes: list[_Mode], mig: bool | None, at_s: float) -> bool:
        newest = modes[-1]
        if mig is None or at_s < newest.seen_s:
            return False
        if newest.mig in (None, mig):
            changed = newest.mig is None
            newest.mig, newest.seen_s = mig, at_s
            return changed
        modes.append(_Mode(mig, at_s, at_s))
        if len(modes) > MAX_MODES:  # the merged mode is off, because faults are more severe without MIG
            modes[:2] = [_Mode(False, modes[0].from_s, modes[1].seen_s)]
        return True

    def newest(self, *gpus: str) -> Model:
        """Return the model of the first GPU in `gpus` that is known."""
        history = self._history(gpus)
        return UNKNOWN_MODEL if history is None else (history.name, bool(history.modes[-1].mig))

    def during(self, first_s: float, last_s: float, *gpus: str) -> tuple[Model, ...]:
        """Return the models that the first known GPU in `gpus` had during a period.

        Between two sightings in different modes, MIG is assumed to be off, because some faults need a
        costlier remedy without MIG.
        """
        history = self._history(gpus)
        if history is None:
            return (UNKNOWN_MODEL,)
        modes = history.modes
        begins = [-inf, *(new.from_s if new.mig else old.seen_s for old, new in pairwise(modes))]
        ends = [*begins[1:], inf]
        return tuple(
            {
                (history.name, bool(mode.mig)): None
                for mode, from_s, until_s in zip(modes, begins, ends, strict=True)
                if from_s <= last_s and first_s < until_s
            }
        )

    def _history(self, gpus: Sequence[str]) -> _GpuHistory | None:
        return next((self._of[each] for each in gpus if each in self._of), None)

    def dump(self) -> list[list[Any]]:
        """Return everything as JSON, for `load`."""
        return [
            [gpu, each.name, [[mode.mig, mode.from_s, mode.seen_s] for mode in each.modes]]
            for gpu, each in self._of.items()
        ]

    def load(self, raw: Any) -> None:
        """Restore what was dumped. Raises ValueError or TypeError if it is malformed."""
        for gpu, name, modes in raw:
            made = [
                _Mode(None if mig is None else bool(mig), float(from_s), float(seen_s))
                for mig, from_s, seen_s in modes[-MAX_MODES:]
            ]
            if not made:
                raise ValueError("a GPU without a MIG mode")
            self._of[str(gpu)[:MAX_NAME]] = _GpuHistory(str(name), made)
