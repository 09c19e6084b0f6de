"""The GPUs that should be there, and those that are: who is new, back, exchanged or missing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from nodeagent.nvml import inventory, library
from nodeagent.nvml.asking import Asker
from nodeagent.nvml.history import AWAY, LOST, OK, RESET_REQUIRED, VANISHED, GpuHistory, History
from nodeagent.nvml.inventory import Gpu, Inventory
from nodeagent.nvml.sweeping import state_of

Exchange = tuple[str, str, str]  # PCI address, UUID of the old one, of the new one


class Roster:
    """Holds an asker for every GPU that NVML opens, and the history of every one that it ever did."""

    def __init__(self, past: History, configured: int | None) -> None:
        self.history = past
        self.askers: dict[str, Asker] = {}
        self.away: dict[str, tuple[int, str]] = {}  # state and why, of those without an asker
        self.count = -1  # that NVML lists
        self._configured = configured

    @property
    def expected(self) -> int:
        return self.history.most if self._configured is None else self._configured

    @property
    def listed(self) -> tuple[str, ...]:
        return tuple(self.askers)

    @property
    def any_away(self) -> bool:
        return any(each.state in AWAY for each in self.history.gpus.values())

    @property
    def all_well(self) -> bool:
        """Whether every GPU that NVML lists is known and answers, and none is missed."""
        return len(self.askers) >= self.count and all(g.state == OK for g in self.history.gpus.values())

    def missing(self) -> tuple[int, str]:
        """Return how many GPUs are missing, and that in words."""
        return max(0, self.expected - self.count), f"{self.count} of {self.expected} GPUs"

    def facts(self, pci: str) -> tuple[tuple[str, str], ...]:
        """Return what tells a GPU to people."""
        asker = self.askers.get(pci)
        if asker is None:
            facts = [("uuid", self.history.gpus[pci].uuid)]
        else:
            gpu = asker.gpu
            facts = [("uuid", gpu.uuid), ("name", gpu.name), ("serial", gpu.serial)]
        return tuple(fact for fact in facts if fact[1])

    def void(self) -> None:
        """Forget all handles: a new session has begun."""
        self.askers.clear()

    def take(self, found: Inventory, on_bus: Iterable[str]) -> Iterator[Exchange]:
        """Take in what NVML lists, and look for the others one by one. Tells which were exchanged.

        Args:
            on_bus: The addresses of GPUs by the kernel: NVML does not name one that it does not open.

        Raises:
            DriverGone.
        """
        self.count = found.count
        self.history.most = max(self.history.most, found.count)
        self.away.clear()
        present = {gpu.pci: gpu for gpu in found.gpus}
        unnamed = set(on_bus) if found.count > len(found.gpus) else set()
        for pci in (self.history.gpus.keys() | unnamed) - present.keys():
            other = inventory.find(pci)
            if isinstance(other, Gpu):
                present[pci] = other
            else:
                self._take_absent(pci, other)
        for pci, gpu in sorted(present.items()):
            yield from self._take_gpu(pci, gpu)

    def _take_absent(self, pci: str, code: int) -> None:
        state, why = state_of(code), f"looking for it: {library.name(code)}"
        if pci not in self.history.gpus:
            if state not in (LOST, RESET_REQUIRED):
                return  # not NVML's, or not ours to see
            self.history.gpus[pci] = GpuHistory("")
        if state == VANISHED and self.count >= self.expected:
            # It sits in another slot, or is no more wanted.
            state, why = OK, f"not there, but all {self.expected} GPUs that are expected"
        self.away[pci] = state, why
        self.askers.pop(pci, None)

    def _take_gpu(self, pci: str, gpu: Gpu) -> Iterator[Exchange]:
        known = self.history.gpus.get(pci)
        if known is None:
            self.history.gpus[pci] = GpuHistory(gpu.uuid)
        elif not known.uuid:
            known.uuid = gpu.uuid
        elif known.uuid != gpu.uuid:
            self.history.gpus[pci] = GpuHistory(gpu.uuid)
            yield pci, known.uuid, gpu.uuid
        kept = self.askers.get(pci)
        if kept is None or kept.gpu != gpu:
            self.askers[pci] = Asker(gpu)
