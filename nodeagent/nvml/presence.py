"""What the kernel knows of NVIDIA GPUs, without NVML: are there any, and which load of the driver is it."""

from __future__ import annotations

from pathlib import Path

SYSFS = Path("/sys")
NVIDIA = "0x10de"  # the PCI vendor
DISPLAY = "0x03"  # the PCI base class of GPUs: VGA controllers 0x0300, 3D controllers 0x0302
MAX_DEVICES = 4096


def gpus_on_bus(sysfs: Path = SYSFS) -> tuple[str, ...]:
    """Return the addresses of the NVIDIA GPUs on the PCI bus; none also where there is no PCI."""
    try:
        devices = sorted((sysfs / "bus/pci/devices").iterdir())[:MAX_DEVICES]
    except OSError:
        return ()
    return tuple(
        each.name
        for each in devices
        if _word(each / "vendor") == NVIDIA and _word(each / "class")[:4] == DISPLAY
    )


def driver_load(sysfs: Path = SYSFS) -> str:
    """Return what tells one load of the NVIDIA module from the next; "" if it is not loaded.

    sysfs gives every directory a new inode number, so a module that was taken out and put in again while
    nobody looked has another one.
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
