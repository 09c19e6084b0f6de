"""A simulated machine with eight GPUs: what its sensors would read, and what its kernel logs.

The readings describe only the state of the hardware. The agent decides which of them are faults.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from nodeagent.host.block_devices import OF_NODE
from nodeagent.model import DRIVER, NODE, gpu_entity, normalized_pci
from nodeagent.nvml.gpu_roster import ABSENT, OK, RESET_REQUIRED

GPUS = 8
BUSES = ("1b", "43", "52", "61", "9d", "c3", "d1", "df")  # of an HGX H100
NAME = "NVIDIA H100 80GB HBM3"
LIMITED_MARGIN, MARGIN = 3.0, 40.0  # degrees below the slowdown temperature
DISK = "disk//"
NVME = "disk/nvme1"  # the controller of that disk
ReadingPlace = tuple[str, str]  # entity, check


@dataclass(slots=True)
class SimulatedGpu:
    """A GPU in a slot. Each field is the reading of the check with the same meaning."""

    pci: str
    entity: str
    uuid: str
    state: int = OK
    recovery: int = 0
    uncorrected: int = 0
    remap_failed: bool = False
    sram_exceeded: bool = False
    margin: float = MARGIN
    throttled: bool = False

    @property
    def facts(self) -> tuple[tuple[str, str], ...]:
        if self.state in ABSENT:
            return (("uuid", self.uuid),)
        return (("uuid", self.uuid), ("name", NAME), ("persistence", "on"))

    def readings(self) -> dict[ReadingPlace, float]:
        """Return what NVML answers. For a lost GPU, this is only that the GPU is lost."""
        found = {(self.entity, "gpu_state"): float(self.state)}
        if self.state in ABSENT:
            return found
        own = {
            "recovery_action": self.recovery,
            "ecc_dbe": self.uncorrected,
            "row_remap_failure": self.remap_failed,
            "ecc_sram_threshold": self.sram_exceeded,
            "gpu_temperature_margin": self.margin,
            "gpu_throttled": self.throttled,
        }
        return {**found, **{(self.entity, check): float(value) for check, value in own.items()}}


def _gpu(pci: str, uuid: str) -> SimulatedGpu:
    return SimulatedGpu(normalized_pci(pci), gpu_entity(pci), uuid)


@dataclass(slots=True)
class Port:
    """A port of an InfiniBand adapter."""

    entity: str
    down: bool = False
    downed: int = 0  # the counter of link failures


@dataclass(slots=True)
class SimulatedMachine:
    """The hardware of a node. Mutable; times are simulated."""

    name: str
    booted_s: float = 0.0
    boots: int = 1
    gpus: list[SimulatedGpu] = field(default_factory=list)
    ports: list[Port] = field(default_factory=list)
    log: list[tuple[float, str]] = field(default_factory=list)  # the kernel's lines since the boot
    missing: int = 0  # GPUs that NVML does not list
    disk_used: float = 40.0
    memory_used: float = 50.0
    load: float = 1.0
    _exchanges: int = 0

    def __post_init__(self) -> None:
        self.gpus = [_gpu(f"0000:{bus}:00.0", f"GPU-{self.name}-{at}") for at, bus in enumerate(BUSES)]
        self.ports = [Port(f"port/mlx5_{at}/1") for at in range(GPUS)]

    @property
    def boot_id(self) -> str:
        return f"{self.name}-boot-{self.boots}"

    def readings(self) -> dict[ReadingPlace, float]:
        """Return what all sensors read now."""
        found: dict[ReadingPlace, float] = {
            (DRIVER, "nvml"): 0.0,
            (NODE, "gpu_count"): float(self.missing),
            (NODE, "memory_used"): self.memory_used,
            (NODE, "load"): self.load,
            (DISK, "disk_used"): self.disk_used,
            (NVME, "user_volume"): OF_NODE,
        }
        for gpu in self.gpus:
            found |= gpu.readings()
        for port in self.ports:
            found[port.entity, "ib_port"] = float(port.down)
            found[port.entity, "ib_link_downed"] = float(port.downed)
        return found

    def boot(self, now_s: float) -> None:
        """Boot the machine: GPUs are back, volatile counters are zero, and the log is empty."""
        self.boots += 1
        self.booted_s = now_s
        self.log.clear()
        self.missing = 0
        for port in self.ports:
            port.downed = 0
        for gpu in self.gpus:
            gpu.state, gpu.recovery, gpu.uncorrected = OK, 0, 0

    def begin_reset(self, slot: int) -> bool:
        """Begin to reset a GPU; return False if it does not respond at all and only a boot helps."""
        gpu = self.gpus[slot]
        if gpu.state in ABSENT and gpu.state != RESET_REQUIRED:
            return False
        gpu.state = RESET_REQUIRED
        return True

    def end_reset(self, slot: int) -> None:
        gpu = self.gpus[slot]
        gpu.state, gpu.recovery, gpu.uncorrected = OK, 0, 0

    def exchange(self, slot: int) -> None:
        """Put another GPU into a slot. The machine must be off."""
        self._exchanges += 1
        pci = self.gpus[slot].pci
        self.gpus[slot] = _gpu(pci, f"GPU-{self.name}-{slot}-{self._exchanges}")
