"""Which GPUs NVML lists, and what each of them is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nodeagent import observation
from nodeagent.nvml import library
from nodeagent.nvml.library import nvml

MAX_GPUS = 64  # of one node; NVIDIA's largest have 16


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU in one session."""

    pci: str  # as sysfs writes it
    uuid: str
    name: str
    serial: str  # "" if it has none
    handle: Any

    @property
    def entity(self) -> str:
        return observation.gpu(self.pci)


@dataclass(frozen=True, slots=True)
class Inventory:
    """What NVML lists. `count` includes GPUs that it lists and does not open."""

    count: int
    gpus: tuple[Gpu, ...]


def count() -> int:
    """Return how many GPUs NVML lists. Raises DriverGone."""
    try:
        return min(int(nvml.nvmlDeviceGetCount()), MAX_GPUS)
    except library.Error as error:
        raise library.driver_gone(error.value, "nvmlDeviceGetCount") from None


def take() -> Inventory:
    """Look at all GPUs. One that does not answer is left out. Raises DriverGone."""
    listed = count()
    found = [_opened(nvml.nvmlDeviceGetHandleByIndex, index) for index in range(listed)]
    return Inventory(listed, tuple(each for each in found if isinstance(each, Gpu)))


def find(pci: str) -> Gpu | int:
    """Return the GPU at a PCI address, or the code that NVML gives instead. Raises DriverGone."""
    return _opened(nvml.nvmlDeviceGetHandleByPciBusId, pci)


def _opened(get_handle: Callable[[Any], Any], which: object) -> Gpu | int:
    try:
        handle = get_handle(which)
        return Gpu(
            pci=observation.pci(_text(nvml.nvmlDeviceGetPciInfo(handle).busId)),
            uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
            name=_text(nvml.nvmlDeviceGetName(handle)),
            serial=_serial(handle),
            handle=handle,
        )
    except library.Error as error:
        if error.value in library.DRIVER_GONE:
            raise library.driver_gone(error.value, "looking for GPUs") from None
        return int(error.value)


def _serial(handle: Any) -> str:
    try:
        return _text(nvml.nvmlDeviceGetSerial(handle))
    except library.Error as error:
        if error.value in library.NEVER:
            return ""
        raise


def _text(raw: Any) -> str:
    return raw.decode(errors="replace") if isinstance(raw, bytes) else str(raw)
