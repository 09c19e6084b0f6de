"""What each published kind of fault does to a machine and its kernel log, and what remedies it.

The codes, texts and readings come from NVIDIA's drivers, Linux and InfiniBand adapters, as in the policy's
tables. Which of them a published kind of fault shows, and in what order, is an assumption, because the papers
do not publish any codes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from bench.quarantine.joined.guesses import Guesses
from bench.quarantine.joined.machine import DISK, LIMITED_MARGIN, MARGIN, NVME, SimulatedMachine
from nodeagent.model import NODE
from nodeagent.nvml.gpu_roster import LOST, VANISHED

GPU, PORT, DISKS, HOST = "gpu", "port", "disk", "node"
REMEDIES = ("", "reset_gpu", "reboot_node", "replace")  # each includes what the one before it does
REPEAT_S = 240.0  # between two repetitions of an error that the driver reports again and again
REPEATS = 30
WORN_OUT = 3  # worn-out memory has no spare rows left when its errors occur for the third time
XID_TEXTS = {
    13: "pid=4021, name=python, Graphics SM Warp Exception on (GPC 3, TPC 1, SM 0): Out Of Range Address",
    31: "pid=4021, name=python, Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS HUBCLIENT_ESC faulted",
    43: "pid=4021, name=python, Ch 00000008",
    48: "pid=4021, name=python, An uncorrectable double bit error (DBE) has been detected on GPU.",
    63: "Row Remapper: New row (0x00000000002c1e10) marked for remapping, reset gpu to activate.",
    64: "Row Remapper: Failed to record a row for remapping.",
    79: "pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
    95: "pid=4021, name=python, Uncontained: FBHUB. RST: Yes, D-RST: No",
    119: "pid=4021, name=python, Timeout after 45s of waiting for RPC response from GPU0 GSP!",
}
VERDICTS = {1: "0x1 (GPU Reset Required)", 2: "0x2 (Node Reboot Required)"}


@dataclass(slots=True)
class NodeFault:
    """A fault of a part of a node. The same fault always has the same key."""

    kind: Kind
    slot: int
    entity: str
    device: str
    lasts_s: float = 0.0  # for a fault that ends without a remedy
    remedy: str = ""  # the cheapest remedy that ends it
    witnesses: int = 1
    has_verdict: bool = True
    is_active: bool = True
    is_dormant: bool = False  # an insufficient remedy has hidden it
    shows: int = 0  # how many times its symptoms have begun

    @property
    def key(self) -> str:
        return f"{self.kind.component} {self.device or self.entity}"

    @property
    def entities(self) -> tuple[str, ...]:
        """The entities that its findings may be about."""
        return (self.entity, NODE) if self.kind.component == "gpu_unavailable" else (self.entity,)


class Stage(Protocol):
    """The machine where a fault shows its symptoms. Nothing happens after the fault has ended."""

    machine: SimulatedMachine
    chance: random.Random

    def after(self, delay_s: float, call: Callable[[], None]) -> None: ...

    def log(self, text: str) -> None: ...

    def changed(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of fault."""

    component: str
    on: str
    show: Callable[[Stage, NodeFault], None]
    hide: Callable[[SimulatedMachine, NodeFault], None] = lambda _machine, _fault: None
    remedy: str = ""  # the cheapest remedy that ends the fault; "" if the fault ends without one
    witnesses: int = 1
    unhealthy_s: float = 5.0  # how long it must last before the agent's rule calls it unhealthy
    degraded: bool = False  # never a reason to take the node out


def _xid(stage: Stage, fault: NodeFault, code: int) -> None:
    pci = stage.machine.gpus[fault.slot].pci.rpartition(".")[0]
    stage.log(f"NVRM: Xid (PCI:{pci}): {code}, {XID_TEXTS[code]}")


def _verdict(stage: Stage, fault: NodeFault, action: int) -> None:
    """Have the driver recommend an action, in the log and as NVML's recovery action."""
    if fault.witnesses > 1 and fault.has_verdict:
        gpu = stage.machine.gpus[fault.slot]
        pci = gpu.pci.rpartition(".")[0]
        stage.log(
            f"NVRM: Xid (PCI:{pci}): 154, GPU recovery action changed from 0x0 (None) to {VERDICTS[action]}"
        )
        gpu.recovery = action
        stage.changed()


def _off_the_bus(stage: Stage, fault: NodeFault) -> None:
    gpu = stage.machine.gpus[fault.slot]
    _xid(stage, fault, 79)
    if fault.witnesses > 1:
        stage.after(0.2, lambda: _verdict(stage, fault, 2))
        stage.after(1.0, lambda: _lose(stage, fault, LOST))
    elif stage.chance.random() < 0.5:
        stage.log(f"NVRM: GPU {gpu.pci}: GPU has fallen off the bus.")


def _lose(stage: Stage, fault: NodeFault, state: int) -> None:
    stage.machine.gpus[fault.slot].state = state
    if state == VANISHED:
        stage.machine.missing = 1
    stage.changed()


def _unavailable(stage: Stage, fault: NodeFault) -> None:
    _lose(stage, fault, VANISHED)
    if fault.witnesses > 1:
        stage.after(2.0, lambda: _xid(stage, fault, 79))


def _uncorrected(code: int) -> Callable[[Stage, NodeFault], None]:
    def show(stage: Stage, fault: NodeFault) -> None:
        _xid(stage, fault, code)
        if fault.remedy == "replace" and fault.shows >= WORN_OUT:
            _xid(stage, fault, 64)
            stage.machine.gpus[fault.slot].remap_failed = True
        if fault.witnesses > 1:
            stage.machine.gpus[fault.slot].uncorrected += 1
            stage.after(0.1, lambda: _xid(stage, fault, 63))
            stage.after(0.3, lambda: _verdict(stage, fault, 1))
        stage.changed()

    return show


def _sram(stage: Stage, fault: NodeFault) -> None:
    stage.machine.gpus[fault.slot].sram_exceeded = True
    _uncorrected(48)(stage, fault)


def _gsp(stage: Stage, fault: NodeFault) -> None:
    for at in range(REPEATS):
        stage.after(at * REPEAT_S, lambda: _xid(stage, fault, 119))


def _thermal(stage: Stage, fault: NodeFault) -> None:
    stage.machine.gpus[fault.slot].margin = LIMITED_MARGIN
    stage.changed()


def _cool(machine: SimulatedMachine, fault: NodeFault) -> None:
    machine.gpus[fault.slot].margin = MARGIN


def _overheat(stage: Stage, fault: NodeFault) -> None:
    stage.machine.gpus[fault.slot].margin = -1.0
    stage.changed()


def _throttle(stage: Stage, fault: NodeFault) -> None:
    stage.machine.gpus[fault.slot].throttled = True
    stage.changed()


def _unthrottle(machine: SimulatedMachine, fault: NodeFault) -> None:
    machine.gpus[fault.slot].throttled = False


def _port_down(stage: Stage, fault: NodeFault) -> None:
    port = stage.machine.ports[fault.slot]
    port.down, port.downed = True, port.downed + 1
    stage.changed()


def _port_up(machine: SimulatedMachine, fault: NodeFault) -> None:
    machine.ports[fault.slot].down = False


def _crash(stage: Stage, fault: NodeFault) -> None:
    _xid(stage, fault, stage.chance.choice((13, 31, 43)))


def _load(stage: Stage, _fault: NodeFault) -> None:
    stage.machine.load = 12.0
    stage.changed()


def _unload(machine: SimulatedMachine, _fault: NodeFault) -> None:
    machine.load = 1.0


def _fill_memory(stage: Stage, _fault: NodeFault) -> None:
    stage.machine.memory_used = 96.0
    stage.changed()


def _free_memory(machine: SimulatedMachine, _fault: NodeFault) -> None:
    machine.memory_used = 50.0


def _fill_disk(stage: Stage, _fault: NodeFault) -> None:
    stage.machine.disk_used = 99.0
    stage.changed()


def _empty_disk(machine: SimulatedMachine, _fault: NodeFault) -> None:
    machine.disk_used = 40.0


def _nvme(stage: Stage, fault: NodeFault) -> None:
    disk = fault.entity.partition("/")[2]
    stage.log(f"nvme {disk}: controller is down; will reset: CSTS=0xffffffff, PCI_STATUS=0xffff")
    stage.after(30.0, lambda: stage.log(f"nvme {disk}: Disabling device after reset failure: -19"))


def _port(component: str) -> Kind:
    return Kind(component, PORT, _port_down, _port_up, unhealthy_s=250.0)


KINDS = {
    each.component: each
    for each in (
        Kind("faulty_gpu", GPU, _off_the_bus, remedy="reboot_node", witnesses=2),
        Kind("gpu_unavailable", GPU, _unavailable, remedy="reboot_node", witnesses=2, unhealthy_s=30.0),
        Kind("gpu_hbm3", GPU, _uncorrected(48), remedy="reset_gpu", witnesses=2),
        Kind("gpu_memory_error", GPU, _uncorrected(95), remedy="reset_gpu", witnesses=2),
        Kind("gpu_sram", GPU, _sram, remedy="replace", witnesses=2),
        Kind("gpu_system_processor", GPU, _gsp, remedy="reset_gpu"),
        Kind("disk_fault", DISKS, _nvme, remedy="reboot_node", unhealthy_s=40.0),
        _port("network_switch_cable"),
        _port("nic"),
        _port("infiniband_error"),
        _port("leaf_switch"),
        Kind("insufficient_disk_space", DISKS, _fill_disk, _empty_disk, unhealthy_s=35.0),
        Kind("cooling", GPU, _overheat, _cool, unhealthy_s=90.0),
        Kind("gpu_thermal_sensor", GPU, _thermal, _cool, degraded=True),
        Kind("mfu_decline", GPU, _throttle, _unthrottle, degraded=True),
        Kind("cuda_error", GPU, _crash, degraded=True),
        Kind("cpu_overload", HOST, _load, _unload, degraded=True),
        Kind("cpu_oom", HOST, _fill_memory, _free_memory, degraded=True),
    )
}
MEMORY = ("gpu_hbm3", "gpu_memory_error")


def make(kind: Kind, machine: SimulatedMachine, chance: random.Random, guesses: Guesses) -> NodeFault:
    """Return a fault of a part of the machine, chosen at random."""
    slot = chance.randrange(len(machine.gpus))
    witnesses = kind.witnesses
    if witnesses > 1 and chance.random() < guesses.no_second:
        witnesses = 1
    has_verdict = chance.random() >= guesses.no_verdict
    entity, device = {
        GPU: (machine.gpus[slot].entity, machine.gpus[slot].uuid),
        PORT: (machine.ports[slot].entity, ""),
        DISKS: (DISK if not kind.remedy else NVME, ""),
        HOST: (NODE, ""),
    }[kind.on]
    is_worn = kind.component in MEMORY and chance.random() < guesses.worn
    remedy = "replace" if is_worn else kind.remedy
    return NodeFault(kind, slot, entity, device, remedy=remedy, witnesses=witnesses, has_verdict=has_verdict)
