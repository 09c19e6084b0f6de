from __future__ import annotations

from pathlib import Path

import pytest

from nodeagent.nvml.driver import branch_of
from nodeagent.nvml.inventory import driver_load, gpu_bus, gpus_on_bus


def device(sysfs: Path, address: str, vendor: str, kind: str, driver: str = "") -> None:
    folder = sysfs / "bus/pci/devices" / address
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(f"{vendor}\n")
    (folder / "class").write_text(f"{kind}\n")
    if driver:
        (sysfs / "bus/pci/drivers" / driver).mkdir(parents=True, exist_ok=True)
        (folder / "driver").symlink_to(sysfs / "bus/pci/drivers" / driver)


def devices(root: Path, *names: str) -> Path:
    root.mkdir()
    for name in names:
        (root / name).touch()
    return root


def test_gpus_are_display_devices_and_accelerators_of_nvidia(tmp_path: Path) -> None:
    device(tmp_path, "0000:4b:00.0", "0x10de", "0x120000")
    device(tmp_path, "0000:3b:00.0", "0x10de", "0x030200")
    device(tmp_path, "0000:01:00.0", "0x10de", "0x030000")
    device(tmp_path, "0000:05:00.0", "0x10de", "0x068000")  # an NVSwitch
    device(tmp_path, "0000:01:00.1", "0x10de", "0x040300")  # a GPU's audio
    device(tmp_path, "0000:00:02.0", "0x8086", "0x030000")
    (tmp_path / "bus/pci/devices/0000:09:00.0").mkdir()
    device(tmp_path, "0000:0a:00.0", "0x10de", "none")
    assert gpus_on_bus(tmp_path) == ("0000:01:00.0", "0000:3b:00.0", "0000:4b:00.0")


def test_the_gpus_that_the_nvidia_driver_has_claimed_are_expected(tmp_path: Path) -> None:
    sysfs = tmp_path / "sys"
    device(sysfs, "0000:1b:00.0", "0x10de", "0x030200", "nvidia")
    device(sysfs, "0000:2b:00.0", "0x10de", "0x030200", "vfio-pci")  # of a virtual machine
    device(sysfs, "0000:3b:00.0", "0x10de", "0x030200")
    device(sysfs, "0000:4b:00.4", "0x10de", "0x030200", "nvidia")
    (sysfs / "bus/pci/devices/0000:4b:00.4/physfn").mkdir()  # a virtual function
    bus = gpu_bus(sysfs, tmp_path / "none")
    assert (bus.bound, bus.expected, bus.claimed) == (("0000:1b:00.0",), 1, frozenset(("0000:1b:00.0",)))
    assert len(bus.addresses) == 4


def test_a_container_that_sees_only_some_gpus_does_not_miss_the_others(tmp_path: Path) -> None:
    for address in ("0000:1b:00.0", "0000:2b:00.0", "0000:3b:00.0"):
        device(tmp_path / "sys", address, "0x10de", "0x030200", "nvidia")
    some = gpu_bus(tmp_path / "sys", devices(tmp_path / "some", "nvidia1", "nvidia2", "nvidiactl", "null"))
    assert (some.expected, some.claimed) == (2, frozenset())
    every = gpu_bus(tmp_path / "sys", devices(tmp_path / "all", "nvidia0", "nvidia1", "nvidia2", "nvidia7"))
    assert (every.expected, len(every.claimed)) == (3, 3)


def test_a_machine_without_pci_has_no_gpus(tmp_path: Path) -> None:
    assert gpus_on_bus(tmp_path) == ()


def test_a_reloaded_module_has_another_load_id(tmp_path: Path) -> None:
    module = tmp_path / "module/nvidia"
    assert driver_load(tmp_path) == ""
    module.mkdir(parents=True)
    first = driver_load(tmp_path)
    assert first == driver_load(tmp_path) != ""
    module.rename(tmp_path / "before")  # keeps the inode number in use
    module.mkdir()
    assert driver_load(tmp_path) not in ("", first)


@pytest.mark.parametrize(
    ("version", "branch"),
    [("575.57.08", 575), ("610", 610), ("", None), ("r575.1", None), ("²75.1", None), ("9" * 5000, None)],
)
def test_the_branch_is_the_first_number_of_the_version(version: str, branch: int | None) -> None:
    assert branch_of(version) == branch
