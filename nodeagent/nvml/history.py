"""What must outlive a session and the agent: which GPUs there were, and how they were last seen. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nodeagent.nvml.inventory import MAX_GPUS

MAX_LINKS = 64
MAX_UUID = 96  # NVML_DEVICE_UUID_V2_BUFFER_SIZE
_NO_RESET = frozenset({0, 5})  # recovery actions that no reset ends: none, recover the IMEX domain

OK, LOST, RESET_REQUIRED, VANISHED, UNREADABLE = range(5)  # the states of the check `gpu_state`
AWAY = frozenset({LOST, RESET_REQUIRED, VANISHED})


@dataclass(slots=True)
class GpuHistory:
    """One GPU, by what was seen of it last."""

    uuid: str
    state: int = OK
    links: set[int] = field(default_factory=set)  # NVLinks that were up
    uncorrected: float | None = None  # the volatile counter
    recovery: int = 0  # the driver's recovery action

    def take_state(self, state: int) -> bool:
        """Note the state; True if the GPU is back, so that it must have been reset."""
        back = self.state in AWAY and state == OK
        self.state = state
        return back

    def take_uncorrected(self, count: float) -> bool:
        """Note the volatile counter of uncorrected errors; True if it has begun anew: at a reset."""
        fell = self.uncorrected is not None and count < self.uncorrected
        self.uncorrected = count
        return fell

    def take_recovery(self, action: int) -> bool:
        """Note what the driver asks for; True if it asked for a reset, and is content now."""
        done = self.recovery not in _NO_RESET and action == 0
        self.recovery = action
        return done


@dataclass(slots=True)
class History:
    """All GPUs of the node, by PCI address."""

    most: int = 0  # GPUs listed at any time
    load: str = ""  # of the driver: see `presence.driver_load`
    gpus: dict[str, GpuHistory] = field(default_factory=dict)

    def reloaded(self, load: str, after_loss: bool) -> bool:
        """Note the load of the driver; True if it is another.

        Without a word from sysfs it counts whether NVML was lost in between.
        """
        known = bool(self.load and load)
        other = self.load != load if known else after_loss
        self.load = load or self.load
        return other

    def dump(self) -> dict[str, Any]:
        """Return what `load` takes: JSON."""
        return {
            "most": self.most,
            "driver_load": self.load,
            "gpus": {
                pci: {
                    "uuid": each.uuid,
                    "state": each.state,
                    "links": sorted(each.links),
                    "uncorrected": each.uncorrected,
                    "recovery": each.recovery,
                }
                for pci, each in self.gpus.items()
            },
        }


def load(raw: object) -> History:
    """Return what was dumped. What is malformed is as if it had never been seen."""
    if not isinstance(raw, dict):
        return History()
    history = History(_count(raw.get("most"), MAX_GPUS), str(raw.get("driver_load") or "")[:MAX_UUID])
    gpus = raw.get("gpus")
    for pci, each in list(gpus.items())[:MAX_GPUS] if isinstance(gpus, dict) else ():
        if isinstance(each, dict) and isinstance(each.get("uuid"), str):
            history.gpus[str(pci)[:MAX_UUID]] = _gpu(each)
    return history


def _gpu(raw: dict[Any, Any]) -> GpuHistory:
    links = raw.get("links")
    uncorrected = raw.get("uncorrected")
    return GpuHistory(
        uuid=raw["uuid"][:MAX_UUID],
        state=_count(raw.get("state"), UNREADABLE),
        links={_count(link, MAX_LINKS) for link in links[:MAX_LINKS]} if isinstance(links, list) else set(),
        uncorrected=float(uncorrected) if isinstance(uncorrected, (int, float)) else None,
        recovery=_count(raw.get("recovery"), 0xFF),
    )


def _count(raw: object, most: int) -> int:
    return raw if isinstance(raw, int) and 0 <= raw <= most else 0
