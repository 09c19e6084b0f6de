"""The GPUs that the fake library shows. Other processes see changes by tests and benches immediately."""

from __future__ import annotations

import ctypes
import mmap
import platform
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from tests.fakenvml.layout import MAX_FAULTS, MAX_GPUS, MAX_LINKS, RING, Fault, Gpu, State

VARIABLE = "FAKE_NVML_STATE"
FOREVER = -1.0
WHOLE_GPU = 0xFFFFFFFF  # the instance id of an event that concerns no MIG instance
DRIVERS = ("loaded", "missing", "mismatch", "reloading")

# Constants of NVML, with the values of nvml.h.
XID, DOUBLE_BIT, SBE_STORM = 0x8, 0x2, 0x200
FATAL_POISON, GPU_UNAVAILABLE, RECOVERY_ACTION = 0x2000, 0x4000, 0x8000
ALL_EVENTS = 0xFF9F
INVALID_ARGUMENT, NOT_SUPPORTED, FUNCTION_NOT_FOUND = 2, 3, 13
GPU_IS_LOST, RESET_REQUIRED, UNKNOWN = 15, 16, 999

_FUTEX = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAKE = 1
_ALL = 0x7FFFFFFF
_libc = ctypes.CDLL(None, use_errno=True)


class Fake:
    """The state file of one fake node. The next call into the library sees every change."""

    def __init__(self, path: Path, gpus: int = 8, links: int = MAX_LINKS) -> None:
        """Create the file, with a loaded driver and healthy GPUs. Processes find it by `VARIABLE`."""
        if not 0 <= gpus <= MAX_GPUS:
            raise ValueError(f"gpus: 0 to {MAX_GPUS}")
        self.path = path
        with path.open("wb") as file:
            file.truncate(ctypes.sizeof(State))
        self._open()
        self._state.driver_version = b"575.57.08"
        self._state.nvml_version = b"12.575.57.08"
        self._state.generation = 1
        self._state.gpus = gpus
        for number in range(gpus):
            _well(self._state.gpu[number], number, links)
        self._state.size = ctypes.sizeof(State)

    @classmethod
    def existing(cls, path: Path) -> Fake:
        """Return the fake whose file another process has created."""
        found = cls.__new__(cls)
        found.path = path
        found._open()
        return found

    def _open(self) -> None:
        with self.path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), ctypes.sizeof(State))
        self._state = State.from_buffer(self._map)

    def close(self) -> None:
        """Unmap the file. No call of this process may still be in the library."""
        del self._state
        try:
            self._map.close()
        except BufferError:
            pass  # a GPU is still referenced: the mapping is closed with it

    def __enter__(self) -> Fake:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def state(self) -> State:
        return self._state

    def gpu(self, number: int) -> Gpu:
        """Return the state that a GPU reports, which the caller may change in place."""
        found: Gpu = self._state.gpu[number]
        return found

    def entity(self, number: int) -> str:
        """Return the name of the GPU in observations."""
        return f"gpu/{self.gpu(number).pci.decode()[4:].lower()}"

    def field(self, gpu: int, field: int, value: int = 0, scope: int = 0, code: int = 0) -> None:
        """Set the value of a field, or the code that NVML returns instead. Raises ValueError if full."""
        for slot in self.gpu(gpu).fields:
            if not slot.set or (slot.id, slot.scope) == (field, scope):
                slot.id, slot.scope, slot.value, slot.code, slot.set = field, scope, value, code, 1
                return
        raise ValueError("no slot is left for another field")

    # -- events

    def send(
        self, gpu: int, event_type: int, data: int = 0, gi: int = WHOLE_GPU, ci: int = WHOLE_GPU
    ) -> None:
        """Send an event to all event sets that are registered for it. `gi` and `ci` name a MIG instance."""
        event = self._state.ring[self._state.next_event % RING]
        event.type, event.data, event.gpu = event_type, data, gpu
        event.gpu_instance, event.compute_instance = gi, ci
        self._state.next_event += 1
        self._wake()

    def xid(self, gpu: int, code: int) -> None:
        self.send(gpu, XID, code)

    def _wake(self) -> None:
        self._state.wake = (self._state.wake + 1) & _ALL
        number = _FUTEX.get(platform.machine())
        if number is None:
            return  # the library sees it at the end of its wait, 5 s at most
        address = ctypes.addressof(self._state) + State.wake.offset  # type: ignore[attr-defined]
        _libc.syscall(number, ctypes.c_void_p(address), _FUTEX_WAKE, _ALL, None, None, 0)

    # -- faults

    def fail(self, function: str, code: int, gpu: int | None = None) -> None:
        """Make a function return `code` for one GPU or for all; 0 makes it work again."""
        self._fault(function, gpu, code, 0.0)

    def block(self, function: str, seconds: float = FOREVER, gpu: int | None = None, code: int = 0) -> None:
        """Make calls of a function block in C, for a time or until `release`."""
        self._fault(function, gpu, code, seconds)

    def release(self, function: str = "", gpu: int | None = None) -> None:
        """Remove the faults of one function or of all functions. Blocked calls then return."""
        for fault in self._state.faults:
            if not function or (fault.function == function.encode() and fault.gpu == _number(gpu)):
                fault.active = 0
        self._wake()

    def _fault(self, function: str, gpu: int | None, code: int, block_s: float) -> None:
        name, about = function.encode(), _number(gpu)
        slots: list[Fault] = list(self._state.faults)
        same = [slot for slot in slots if slot.function == name and slot.gpu == about]
        free = same or [slot for slot in slots if not slot.active]
        if not free:
            raise ValueError(f"no more than {MAX_FAULTS} faults at once")
        slot = free[0]
        slot.active = 0
        slot.function, slot.gpu, slot.code, slot.block_s = name, about, code, block_s
        slot.serial += 1
        self._state.fault_count = max(self._state.fault_count, slots.index(slot) + 1)
        slot.active = int(code != 0 or block_s != 0)
        self._wake()

    # -- the driver

    def driver(self, state: str) -> None:
        """Put the driver into one of the states `DRIVERS`. Processes that have it open must open it again."""
        self._state.driver = DRIVERS.index(state)
        self._state.generation += 1
        self._wake()

    def reload(self) -> None:
        self.driver("reloading")
        self.driver("loaded")

    def old(self, is_old: bool = True, version: str = "525.147.05") -> None:
        """Act as an old driver, which does not know newer functions, fields and events."""
        self._state.old_driver = int(is_old)
        self._state.driver_version = version.encode()

    def vanish(self, gpu: int) -> None:
        """Remove the GPU from NVML's list."""
        self.gpu(gpu).present = 0

    def restore(self, gpu: int) -> None:
        """Return the GPU to NVML's list, and make it answer again."""
        self.gpu(gpu).present = 1
        self.gpu(gpu).code = 0

    # -- for tests that must not sleep

    def until(self, holds: Callable[[State], bool], within_s: float = 5.0) -> None:
        """Wait until a condition on the state holds, such as that a call blocks or waits on an event set.

        Raises:
            TimeoutError: It does not hold within `within_s`.
        """
        end_s = time.monotonic() + within_s
        while not holds(self._state):
            if time.monotonic() > end_s:
                raise TimeoutError("the fake library has not reached that state")
            time.sleep(0.001)


def _number(gpu: int | None) -> int:
    return -1 if gpu is None else gpu


def _well(gpu: Gpu, number: int, links: int) -> None:
    """Set the state of a healthy, busy H100 of an HGX board."""
    gpu.present = 1
    gpu.pci = f"00000000:{0x1B + 0x10 * number & 0xFF:02X}:00.0".encode()
    gpu.uuid = f"GPU-00000000-0000-4000-8000-{number:012x}".encode()
    gpu.name = b"NVIDIA H100 80GB HBM3"
    gpu.serial = f"165222300{number:04d}".encode()
    gpu.supported_events = ALL_EVENTS
    gpu.temperature, gpu.slowdown_temperature, gpu.margin = 50, 87, 37
    gpu.utilization = 95
    gpu.pcie_width = gpu.pcie_max_width = 16
    gpu.pcie_generation = gpu.pcie_max_generation = 5
    gpu.persistence = 1
    gpu.fabric_state = 3  # completed
    gpu.fabric_mask = 2 | 2 << 2 | 2 << 4 | 2 << 6 | 1 << 8  # none of these conditions is present
    gpu.fabric_summary = 1
    gpu.links = links
    for link in range(links):
        gpu.link_up[link] = 1
