"""Lists and identifies the GPUs that NVML knows, and lists the NVIDIA GPUs on the PCI bus without NVML."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nodeagent import model
from nodeagent.nvml import library
from nodeagent.nvml.library import nvml
from nodeagent.sensing.small_files import SYSFS

NVIDIA_VENDOR = "0x10de"  # the PCI vendor
DISPLAY_CLASS = "0x03"  # the PCI base class of GPUs: VGA controllers 0x0300, 3D controllers 0x0302
MAX_DEVICES = 4096
MAX_GPUS = 64  # of one node; NVIDIA's largest nodes have 16


def gpus_on_bus(sysfs: Path = SYSFS) -> tuple[str, ...]:
    """Return the addresses of the NVIDIA GPUs on the PCI bus; none on a machine without PCI."""
    try:
        devices = sorted((sysfs / "bus/pci/devices").iterdir())[:MAX_DEVICES]
    except OSError:
        return ()
    return tuple(
        each.name
        for each in devices
        if _word(each / "vendor") == NVIDIA_VENDOR and _word(each / "class")[:4] == DISPLAY_CLASS
    )


def driver_load(sysfs: Path = SYSFS) -> str:
    """Return an identifier of this load of the NVIDIA module; "" if it is not loaded.

    sysfs gives every new directory a new inode number, so the identifier differs even if the agent did not
    notice that the module was unloaded and loaded again.
    """
    try:
        return str((sysfs / "module/nvidia").stat().st_ino)
    except OSError:
        return ""


def _word(path: Path) -> str:
    try:
        return path.read_text().strip().lower()
    except (OSError, UnicodeDecodeError):
        return ""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU in one session."""

    pci: str  # as sysfs writes it
    uuid: str
    name: str
    serial: str  # "" if the GPU has none
    handle: Any

    @property
    def entity(self) -> str:
        return model.gpu_entity(self.pci)


@dataclass(frozen=True, slots=True)
class GpuInventory:
    """The GPUs that NVML lists. `count` includes listed GPUs that NVML cannot open."""

    count: int
    gpus: tuple[Gpu, ...]


def count_gpus() -> int:
    """Return how many GPUs NVML lists. Raises DriverGone."""
    try:
        return min(int(nvml.nvmlDeviceGetCount()), MAX_GPUS)
    except library.Error as error:
        raise library.driver_gone(error.value, "nvmlDeviceGetCount") from None


def list_gpus() -> GpuInventory:
    """Open all GPUs that NVML lists. A GPU that does not respond is omitted. Raises DriverGone."""
    listed = count_gpus()
    found = [_opened(nvml.nvmlDeviceGetHandleByIndex, index) for index in range(listed)]
    return GpuInventory(listed, tuple(each for each in found if isinstance(each, Gpu)))


def find_gpu(pci: str) -> Gpu | int:
    """Return the GPU at a PCI address, or the code that NVML returns instead. Raises DriverGone."""
    return _opened(nvml.nvmlDeviceGetHandleByPciBusId, pci)


def _opened(get_handle: Callable[[Any], Any], which: object) -> Gpu | int:
    try:
        handle = get_handle(which)
        return Gpu(
            pci=model.normalized_pci(_text(nvml.nvmlDeviceGetPciInfo(handle).busId)),
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
