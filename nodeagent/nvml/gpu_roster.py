"""Tracks the GPUs that the node should have: which ones are new, back, replaced or missing.

`NodeGpus` outlives a session and the agent: it records every GPU ever seen, and the last known state of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from nodeagent.nvml import inventory, library
from nodeagent.nvml.gpu_query import GpuQuery
from nodeagent.nvml.inventory import MAX_GPUS, Gpu, GpuInventory

MAX_LINKS = 64
MAX_UUID = 96  # NVML_DEVICE_UUID_V2_BUFFER_SIZE
_NO_RESET = frozenset({0, 5})  # recovery actions that need no reset: none, recover the IMEX domain
OK, LOST, RESET_REQUIRED, VANISHED, UNREADABLE = range(5)  # the states of the check `gpu_state`
ABSENT = frozenset({LOST, RESET_REQUIRED, VANISHED})
Exchange = tuple[str, str, str]  # PCI address, UUID of the old GPU, UUID of the new GPU
STATE_OF_GONE = {
    library.GPU_IS_LOST: LOST,
    library.RESET_REQUIRED: RESET_REQUIRED,
    library.GPU_NOT_FOUND: VANISHED,
}


@dataclass(slots=True)
class GpuHistory:
    """The last known state of one GPU."""

    uuid: str
    state: int = OK
    links: set[int] = field(default_factory=set)  # NVLinks that were up
    uncorrected: float | None = None  # the volatile counter
    recovery: int = 0  # the driver's recovery action

    def take_state(self, state: int) -> bool:
        """Record the state; return True if the GPU is back, which means that it was reset."""
        back = self.state in ABSENT and state == OK
        self.state = state
        return back

    def take_uncorrected(self, count: float) -> bool:
        """Record the volatile counter of uncorrected errors; return True if a reset restarted it."""
        fell = self.uncorrected is not None and count < self.uncorrected
        self.uncorrected = count
        return fell

    def take_recovery(self, action: int) -> bool:
        """Record the action that the driver requests; return True if it no longer requests a reset."""
        done = self.recovery not in _NO_RESET and action == 0
        self.recovery = action
        return done


@dataclass(slots=True)
class NodeGpus:
    """All GPUs of the node, by PCI address."""

    most: int = 0  # the most GPUs ever listed
    load: str = ""  # of the driver: see `inventory.driver_load`
    gpus: dict[str, GpuHistory] = field(default_factory=dict)

    def reloaded(self, load: str, after_loss: bool) -> bool:
        """Record the driver's load; return True if it has changed.

        If sysfs does not show the load, a loss of NVML since the last call counts as a new load.
        """
        known = bool(self.load and load)
        other = self.load != load if known else after_loss
        self.load = load or self.load
        return other

    def dump(self) -> dict[str, Any]:
        """Return the history as JSON, for `load_history`."""
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


def load_history(raw: object) -> NodeGpus:
    """Restore the dumped history. Malformed parts are ignored."""
    if not isinstance(raw, dict):
        return NodeGpus()
    history = NodeGpus(_count(raw.get("most"), MAX_GPUS), str(raw.get("driver_load") or "")[:MAX_UUID])
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


class GpuRoster:
    """Holds a query for every GPU that NVML can open, and the history of every GPU ever opened."""

    def __init__(self, past: NodeGpus, configured: int | None) -> None:
        self.history = past
        self.queries: dict[str, GpuQuery] = {}
        self.absent: dict[str, tuple[int, str]] = {}  # state and reason of each GPU without a query
        self.count = -1  # the number of GPUs that NVML lists
        self._configured = configured

    @property
    def expected(self) -> int:
        return self.history.most if self._configured is None else self._configured

    @property
    def listed(self) -> tuple[str, ...]:
        return tuple(self.queries)

    @property
    def any_absent(self) -> bool:
        return any(each.state in ABSENT for each in self.history.gpus.values())

    @property
    def all_well(self) -> bool:
        """True if every GPU that NVML lists is known and responds, and none is missing."""
        return len(self.queries) >= self.count and all(g.state == OK for g in self.history.gpus.values())

    def missing(self) -> tuple[int, str]:
        """Return how many GPUs are missing, as a number and as text."""
        return max(0, self.expected - self.count), f"{self.count} of {self.expected} GPUs"

    def facts(self, pci: str) -> tuple[tuple[str, str], ...]:
        """Return a GPU's UUID, name and serial number, without those that are unknown."""
        query = self.queries.get(pci)
        if query is None:
            facts = [("uuid", self.history.gpus[pci].uuid)]
        else:
            gpu = query.gpu
            facts = [("uuid", gpu.uuid), ("name", gpu.name), ("serial", gpu.serial)]
        return tuple(fact for fact in facts if fact[1])

    def void(self) -> None:
        """Drop all handles, because a new session has started."""
        self.queries.clear()

    def update(self, found: GpuInventory, on_bus: Iterable[str]) -> Iterator[Exchange]:
        """Update from NVML's list, and look for the GPUs that are not on it. Yields the replaced GPUs.

        Args:
            on_bus: The addresses of the GPUs that the kernel shows, because NVML does not name a GPU that it
                cannot open.

        Raises:
            DriverGone.
        """
        self.count = found.count
        self.history.most = max(self.history.most, found.count)
        self.absent.clear()
        present = {gpu.pci: gpu for gpu in found.gpus}
        unnamed = set(on_bus) if found.count > len(found.gpus) else set()
        for pci in (self.history.gpus.keys() | unnamed) - present.keys():
            other = inventory.find_gpu(pci)
            if isinstance(other, Gpu):
                present[pci] = other
            else:
                self._take_absent(pci, other)
        for pci, gpu in sorted(present.items()):
            yield from self._take_gpu(pci, gpu)

    def _take_absent(self, pci: str, code: int) -> None:
        state, why = state_of_code(code), f"looking for it: {library.name(code)}"
        if pci not in self.history.gpus:
            if state not in (LOST, RESET_REQUIRED):
                return  # not a GPU that NVML supports, or not visible to this container
            self.history.gpus[pci] = GpuHistory("")
        if state == VANISHED and self.count >= self.expected:
            # The GPU is in another slot, or was removed on purpose.
            state, why = OK, f"absent, but all {self.expected} expected GPUs are present"
        self.absent[pci] = state, why
        self.queries.pop(pci, None)

    def _take_gpu(self, pci: str, gpu: Gpu) -> Iterator[Exchange]:
        known = self.history.gpus.get(pci)
        if known is None:
            self.history.gpus[pci] = GpuHistory(gpu.uuid)
        elif not known.uuid:
            known.uuid = gpu.uuid
        elif known.uuid != gpu.uuid:
            self.history.gpus[pci] = GpuHistory(gpu.uuid)
            yield pci, known.uuid, gpu.uuid
        kept = self.queries.get(pci)
        if kept is None or kept.gpu != gpu:
            self.queries[pci] = GpuQuery(gpu)


def state_of_code(code: int) -> int:
    """Return the value of the check `gpu_state` for the code that NVML returned for a GPU."""
    absent = (library.NOT_FOUND, library.INVALID_ARGUMENT)
    return VANISHED if code in absent else STATE_OF_GONE.get(code, UNREADABLE)
