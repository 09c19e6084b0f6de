"""Lists and identifies the GPUs that NVML knows, and lists the NVIDIA GPUs on the PCI bus without NVML."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nodeagent import model
from nodeagent.nvml import library
from nodeagent.nvml.library import nvml
from nodeagent.sensing.pci_classes import is_gpu
from nodeagent.sensing.progress import CallProgress
from nodeagent.sensing.small_files import SYSFS, exists, list_names

DEVICES = Path("/dev")
NVIDIA_VENDOR = "0x10de"  # the PCI vendor
NVIDIA_DRIVER = "nvidia"
MAX_DEVICES = 4096
MAX_GPUS = 64  # per node; NVIDIA's largest nodes have 16


def gpus_on_bus(sysfs: Path = SYSFS) -> tuple[str, ...]:
    """Return the addresses of the NVIDIA GPUs on the PCI bus; none on a machine without PCI."""
    try:
        devices = sorted((sysfs / "bus/pci/devices").iterdir())[:MAX_DEVICES]
    except OSError:
        return ()
    return tuple(
        each.name
        for each in devices
        if _word(each / "vendor") == NVIDIA_VENDOR and is_gpu(_hexadecimal(_word(each / "class")))
    )


@dataclass(frozen=True, slots=True)
class GpuBus:
    """The NVIDIA GPUs on the PCI bus."""

    addresses: tuple[str, ...] = ()
    bound: tuple[str, ...] = ()  # the GPUs that the NVIDIA driver has claimed; NVML should list them
    visible: int | None = None  # how many GPUs have a device file here; None: none has one

    @property
    def expected(self) -> int:
        """How many GPUs NVML should list; a container may have the device files of only some GPUs."""
        return len(self.bound) if self.visible is None else min(len(self.bound), self.visible)

    @property
    def claimed(self) -> frozenset[str]:
        """The GPUs that NVML should list; none if only some are visible, because it is not known which."""
        return frozenset(self.bound if self.expected == len(self.bound) else ())


def gpu_bus(sysfs: Path = SYSFS, devices: Path = DEVICES) -> GpuBus:
    """Return the NVIDIA GPUs on the PCI bus and in /dev.

    A GPU that is passed through to a virtual machine is bound to another driver. NVML does not list virtual
    functions.
    """
    addresses = gpus_on_bus(sysfs)
    folder = sysfs / "bus/pci/devices"
    bound = tuple(each for each in addresses if _driver(folder / each) == NVIDIA_DRIVER)
    files = sum(re.fullmatch(r"nvidia\d{1,4}", each) is not None for each in list_names(str(devices)))
    return GpuBus(addresses, bound, files or None)


def _driver(device: Path) -> str:
    """Return the name of the driver that has claimed a device; "" for none, and for a virtual function."""
    if exists(str(device / "physfn")):
        return ""
    try:
        return (device / "driver").readlink().name
    except OSError:
        return ""


def driver_load(sysfs: Path = SYSFS) -> str:
    """Return an identifier of this load of the NVIDIA module; "" if it is not loaded.

    sysfs gives every new directory a new inode number, so the identifier differs even if the agent did not
    notice that the module was unloaded and loaded again.
    """
    try:
        return str((sysfs / "module/nvidia").stat().st_ino)
    except OSError:
        return ""


def _hexadecimal(word: str) -> int | None:
    return int(word, 16) if re.fullmatch(r"0x[0-9a-f]{1,8}", word) else None


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


def count_gpus(progress: CallProgress) -> int:
    """Return how many GPUs NVML lists. Raises DriverGone."""
    progress.mark("nvmlDeviceGetCount")
    try:
        return min(int(nvml.nvmlDeviceGetCount()), MAX_GPUS)
    except library.Error as error:
        raise library.driver_gone(error.value, "nvmlDeviceGetCount") from None


def list_gpus(progress: CallProgress) -> GpuInventory:
    """Open all GPUs that NVML lists. A GPU that does not respond is omitted. Raises DriverGone."""
    listed = count_gpus(progress)
    found = [_opened(nvml.nvmlDeviceGetHandleByIndex, index, progress) for index in range(listed)]
    return GpuInventory(listed, tuple(each for each in found if isinstance(each, Gpu)))


def find_gpu(pci: str, progress: CallProgress) -> Gpu | int:
    """Return the GPU at a PCI address, or the code that NVML returns instead. Raises DriverGone."""
    return _opened(nvml.nvmlDeviceGetHandleByPciBusId, pci, progress)


def _opened(get_handle: Callable[[Any], Any], which: int | str, progress: CallProgress) -> Gpu | int:
    about = which if isinstance(which, str) else f"GPU {which}"

    def call(function: Callable[[Any], Any], argument: object) -> Any:
        progress.mark(function.__name__, about)
        return function(argument)

    try:
        handle = call(get_handle, which)
        return Gpu(
            pci=model.normalized_pci(_text(call(nvml.nvmlDeviceGetPciInfo, handle).busId)),
            uuid=_text(call(nvml.nvmlDeviceGetUUID, handle)),
            name=_text(call(nvml.nvmlDeviceGetName, handle)),
            serial=_serial(handle, about, progress),
            handle=handle,
        )
    except library.Error as error:
        if error.value in library.DRIVER_GONE:
            raise library.driver_gone(error.value, "looking for GPUs") from None
        return int(error.value)


def _serial(handle: Any, about: str, progress: CallProgress) -> str:
    progress.mark("nvmlDeviceGetSerial", about)
    try:
        return _text(nvml.nvmlDeviceGetSerial(handle))
    except library.Error as error:
        if error.value in library.NEVER:
            return ""
        raise


def _text(raw: Any) -> str:
    return raw.decode(errors="replace") if isinstance(raw, bytes) else str(raw)
