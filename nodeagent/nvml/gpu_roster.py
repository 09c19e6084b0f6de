"""Tracks the GPUs that the node should have: which ones are new, back, replaced or missing.

`NodeGpus` outlives the session and the agent. It records every GPU ever seen and the last known state of
each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from nodeagent import model
from nodeagent.nvml import inventory, library
from nodeagent.nvml.gpu_query import GpuQuery
from nodeagent.nvml.inventory import MAX_GPUS, Gpu, GpuBus, GpuInventory
from nodeagent.sensing import baselines
from nodeagent.sensing.baselines import Forgotten
from nodeagent.sensing.counter_sum import CounterSum
from nodeagent.sensing.progress import CallProgress

MAX_LINKS = 64
_ON = ("off", "on")
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
    links_by_mig: tuple[set[int], set[int]] = field(default_factory=lambda: (set(), set()))  # see `links`
    mig: bool = False  # MIG was on
    recovery: int = 0  # the driver's recovery action
    request_kept: bool = False  # persistence mode was on when the driver's request for a reset was last read
    required: bool = False  # NVML has answered RESET_REQUIRED since the GPU last worked
    required_kept: bool = False  # persistence mode was on when NVML first gave this answer, and not off since
    nvlink_total: CounterSum = field(default_factory=CounterSum)  # the sum of the links' errors
    # The following belong to one session of NVML and are not saved.
    uncorrected: tuple[int, float] | None = None  # the session, and the volatile counter
    persistence: bool | None = None  # persistence mode; None: unknown
    mig_word: str = ""  # the MIG mode, for people
    recovery_in: int = 0  # the session that last read the recovery action
    required_in: int = 0  # the session in which NVML last answered RESET_REQUIRED

    @property
    def links(self) -> set[int]:
        """The NVLinks that were up in the GPU's current MIG mode. MIG may make links inactive."""
        return self.links_by_mig[self.mig]

    def take_state(self, state: int, *, present: bool) -> bool:
        """Record the state; return True if the GPU is back, which means that it was reset.

        A GPU that NVML cannot open (not `present`) is not back, even if it is no longer expected (`OK`).
        """
        back = self.state in ABSENT and state == OK
        if back and not present:
            return False
        self.state = state
        return back

    def take_required(self, state: int, session: int, mode: bool | None = None) -> None:
        """Record whether the GPU needs a reset; a GPU that left the bus is not back without one.

        Args:
            mode: The persistence mode, read after NVML answered RESET_REQUIRED; None: it could not be read.
        """
        if state == RESET_REQUIRED:
            self.required_kept = (self.required_kept and mode is not False) if self.required else mode is True
            self.required, self.required_in = True, session
        elif state in (OK, LOST):
            self.required = False

    def take_uncorrected(self, count: float, session: int) -> bool:
        """Record the volatile counter of uncorrected errors; return True if it fell within one session.

        Between two sessions it may fall without a reset, because the driver forgets it when no program uses
        the GPU.
        """
        before, self.uncorrected = self.uncorrected, (session, count)
        return before is not None and before[0] == session and count < before[1]

    def take_mig(self, modes: tuple[bool, bool] | None) -> None:
        """Record whether MIG is on now and after a reset; None: the GPU has no MIG, or did not answer."""
        if modes is not None:
            self.mig = modes[0]
            self.mig_word = (
                _ON[modes[0]] if modes[0] == modes[1] else f"{_ON[modes[0]]}, {_ON[modes[1]]} pending"
            )

    def take_recovery(self, action: int) -> bool:
        """Record the action that the driver requests; return True if it no longer requests a reset."""
        done = self.requests_reset and action == 0
        self.recovery = action
        return done

    @property
    def requests_reset(self) -> bool:
        """True if the driver's recovery action, as last read, requires a reset."""
        return self.recovery not in _NO_RESET

    def take_persistence(self, mode: bool | None, session: int) -> None:
        """Record the persistence mode, also for a request for a reset that was read in the same session."""
        self.persistence = mode
        if self.recovery_in == session:
            self.request_kept = mode is True


@dataclass(slots=True)
class NodeGpus:
    """All GPUs of the node, by PCI address."""

    most: int = 0  # the most GPUs that NVML ever listed, or that the driver had claimed
    load: str = ""  # identifies the load of the driver: see `inventory.driver_load`
    gpus: dict[str, GpuHistory] = field(default_factory=dict)

    def reloaded(self, load: str, after_loss: bool) -> bool:
        """Record the driver's load; return True if it has changed.

        If sysfs does not show the load, and NVML was lost since the last call, the load is assumed to be new.
        """
        known = bool(self.load and load)
        other = self.load != load if known else after_loss
        self.load = load or self.load
        for each in self.gpus.values() if other else ():
            each.nvlink_total.rebase()
        if other:
            self.end_requirements()
        return other

    def end_requirements(self) -> None:
        """Record that the driver's load or the node's boot has reset all GPUs."""
        for each in self.gpus.values():
            each.required = False

    def dump(self) -> dict[str, Any]:
        """Return the history as JSON, for `load_history`."""
        return {
            "most": self.most,
            "driver_load": self.load,
            "gpus": {
                pci: {
                    "uuid": each.uuid,
                    "state": each.state,
                    "links": sorted(each.links_by_mig[False]),
                    "mig_links": sorted(each.links_by_mig[True]),
                    "mig": each.mig,
                    "recovery": each.recovery,
                    "request_kept": each.request_kept,
                    "required": each.required,
                    "required_kept": each.required_kept,
                    "nvlink_total": each.nvlink_total.dump(),
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
    return GpuHistory(
        uuid=raw["uuid"][:MAX_UUID],
        state=_count(raw.get("state"), UNREADABLE),
        links_by_mig=(_links(raw.get("links")), _links(raw.get("mig_links"))),
        mig=raw.get("mig") is True,
        recovery=_count(raw.get("recovery"), 0xFF),
        request_kept=raw.get("request_kept") is True,
        required=raw.get("required", raw.get("state") == RESET_REQUIRED) is True,
        required_kept=raw.get("required_kept") is True,
        nvlink_total=CounterSum.load(raw.get("nvlink_total")),
    )


def _links(raw: object) -> set[int]:
    return {_count(link, MAX_LINKS) for link in raw[:MAX_LINKS]} if isinstance(raw, list) else set()


def _count(raw: object, most: int) -> int:
    return raw if isinstance(raw, int) and 0 <= raw <= most else 0


class GpuRoster:
    """Holds a query for every GPU that NVML can open, and the history of every GPU ever opened."""

    def __init__(self, past: NodeGpus, configured: int | None, progress: CallProgress | None = None) -> None:
        self.history = past
        self.queries: dict[str, GpuQuery] = {}
        self.last_queries: dict[str, GpuQuery] = {}  # of this session, also of GPUs that NVML opens no longer
        self.absent: dict[str, tuple[int, str]] = {}  # state and reason of each GPU without a query
        self.count = -1  # the number of GPUs that NVML lists
        self._bus = GpuBus()
        self._configured = configured
        self._progress = progress or CallProgress()

    @property
    def expected(self) -> int:
        """How many GPUs NVML should list: at least as many as its driver has claimed on the bus.

        A number set by an operator overrides the number seen earlier, but not what the hardware shows now.
        """
        remembered = self.history.most if self._configured is None else self._configured
        return max(remembered, self._bus.expected)

    @property
    def listed(self) -> tuple[str, ...]:
        return tuple(self.queries)

    @property
    def any_absent(self) -> bool:
        """True if NVML, once initialised again, may find a GPU that it cannot open now."""
        return any(state != OK for state, _ in self.absent.values()) or any(
            each.state in ABSENT and not self._is_unmissed(pci) for pci, each in self.history.gpus.items()
        )

    @property
    def all_well(self) -> bool:
        """True if every GPU that NVML lists is known and responds, and none is missing."""
        return len(self.queries) >= self.count and all(
            each.state == OK or self._is_unmissed(pci) for pci, each in self.history.gpus.items()
        )

    def _is_unmissed(self, pci: str) -> bool:
        """Return True if a GPU is absent, but all expected GPUs are present."""
        return self.absent.get(pci, (VANISHED, ""))[0] == OK

    def missing(self) -> tuple[int, str]:
        """Return how many GPUs are missing, as a number and as text."""
        return max(0, self.expected - self.count), f"{self.count} of {self.expected} GPUs"

    def facts(self, pci: str) -> tuple[tuple[str, str], ...]:
        """Return what is known about a GPU: UUID, name, serial number, modes.

        For a missing GPU, return only the UUID; for a GPU that is absent but not expected, return nothing.
        """
        known, query = self.history.gpus[pci], self.queries.get(pci)
        if query is not None:
            gpu, persistence = query.gpu, "" if known.persistence is None else _ON[known.persistence]
            facts = [("uuid", gpu.uuid), ("name", gpu.name), ("serial", gpu.serial)]
            facts += [("persistence", persistence), ("mig", known.mig_word)]
        else:
            facts = [] if self._is_unmissed(pci) else [("uuid", known.uuid)]
        return tuple(fact for fact in facts if fact[1])

    def forget(self, request: Forgotten) -> None:
        """Forget a baseline: the number of GPUs that were seen, or the NVLinks that were up."""
        if request.baseline == baselines.GPUS:
            self.history.most = max(0, self.count)
        elif request.baseline == baselines.NVLINKS:
            for pci, each in self.history.gpus.items():
                if request.entity in ("", model.gpu_entity(pci)):
                    each.links_by_mig = (set(), set())

    def void(self) -> None:
        """Drop all handles, because a new session has started."""
        self.queries.clear()
        self.last_queries.clear()

    def update(self, found: GpuInventory, bus: GpuBus) -> Iterator[Exchange]:
        """Update from NVML's list, and look for the GPUs that are not on it. Yields the replaced GPUs.

        Args:
            bus: The GPUs that the kernel shows, because NVML does not name a GPU that it cannot open.

        Raises:
            DriverGone.
        """
        self.count = found.count
        self._bus = bus
        self.history.most = max(self.history.most, found.count, bus.expected)
        self.absent.clear()
        present = {gpu.pci: gpu for gpu in found.gpus}
        unnamed = set(bus.addresses) if found.count > len(found.gpus) else set()
        for pci in (self.history.gpus.keys() | unnamed | bus.claimed) - present.keys():
            other = inventory.find_gpu(pci, self._progress)
            if isinstance(other, Gpu):
                present[pci] = other
            else:
                self._take_absent(pci, other)
        for pci, gpu in sorted(present.items()):
            yield from self._take_gpu(pci, gpu)

    def _take_absent(self, pci: str, code: int) -> None:
        state, why = state_of_code(code), f"looking for it: {library.name(code)}"
        if pci not in self.history.gpus:
            if pci not in self._bus.claimed and (state == VANISHED or code == library.NO_PERMISSION):
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
            self.queries[pci] = self.last_queries[pci] = GpuQuery(gpu, self._progress)


def state_of_code(code: int) -> int:
    """Return the value of the check `gpu_state` for the code that NVML returned for a GPU."""
    absent = (library.NOT_FOUND, library.INVALID_ARGUMENT)
    return VANISHED if code in absent else STATE_OF_GONE.get(code, UNREADABLE)
